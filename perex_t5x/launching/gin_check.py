"""Builds the configuration of every job on the devices of its slices, as the hosts will; it compiles and writes nothing.

    python -m perex_t5x.launching.gin_check --jobs=jobs.json --topology=v5e:16x16 --slices=1 --devices=256 --report=r.json

The devices are those that the TPU compiler describes, which know their hosts: so what each host would read is checked, too.
Without the compiler (libtpu), or for chips that it does not know, they are fake ones of a single host, and the report says
so. It runs in the folder of jobs.json, so that a file that is not copied along is missed here and not on paid chips. It
exits with 2 if a job has a configuration error, and lists all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perex_t5x import cli
from perex_t5x.cli import console
from perex_t5x.errors import ConfigError, Reason
from perex_t5x.launching.spec import Job, Work


@dataclass(frozen=True)
class GinReport:
    """What the check has found.

    Attributes:
      problems: configuration errors, each for its reader; empty if all is well.
      built: how many different configurations were built.
      hosts: how many hosts the devices belong to; 0 if that is not known, as they are fake ones.
      unchecked: what was not checked, and why.
    """

    problems: tuple[str, ...] = ()
    built: int = 0
    hosts: int = 0
    unchecked: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GinReport:
        """
        >>> GinReport.from_json(GinReport(("a problem",), 2, 64).to_json()).problems
        ('a problem',)
        """
        values = json.loads(text)
        return cls(tuple(values["problems"]), values["built"], values["hosts"], tuple(values["unchecked"]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--topology", default="")
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--report", required=True)
    options = parser.parse_args(argv)
    with open(options.jobs, encoding="utf-8") as f:
        jobs = Work.from_json(f.read()).jobs
    report_path = os.path.abspath(options.report)
    os.chdir(os.path.dirname(os.path.abspath(options.jobs)))
    console.set_up(quiet=True)
    from perex_t5x.hardware.devices import use_cpu_backend

    use_cpu_backend(options.devices)
    console.import_tensorflow_quietly()
    report = check(jobs, options.topology, options.slices)
    with open(report_path, "w", encoding="utf-8") as f:
        f.write(report.to_json())
    for problem in report.problems:
        print(problem)
    return Reason.CONFIGURATION.exit_code if report.problems else 0


def check(jobs: Sequence[Job], topology: str, slices: int) -> GinReport:
    devices, unchecked = _devices(topology, slices)
    # The first of those that differ only in learning rate and seed.
    one_per_group = list({(job.group or job.name): job for job in reversed(jobs)}.values())[::-1]
    problems = []
    for job in one_per_group:
        problem, notes = _check_job(job, devices)
        problems += [problem] if problem else []
        unchecked += notes
    hosts = len({d.process_index for d in devices})
    return GinReport(tuple(dict.fromkeys(problems)), len(one_per_group), hosts, tuple(dict.fromkeys(unchecked)))


def _devices(topology: str, slices: int) -> tuple[list[Any], list[str]]:
    """The TPU compiler's devices, or none and the reason."""
    from perex_t5x.hardware.devices import has_libtpu, tpu_devices

    what = "which rows each host would read: the configurations were built on fake devices of one host, as"
    if not topology:
        return [], [f"{what} the TPU compiler does not know these chips"]
    if not has_libtpu():
        return [], [f"{what} the TPU compiler is not installed (pip install 'perex_t5x[tpu]')"]
    try:
        return tpu_devices(topology, slices), []
    except ConfigError as e:
        return [], [f"{what} {e}"]


def _check_job(job: Job, devices: Sequence[Any]) -> tuple[str | None, list[str]]:
    """The job's configuration error, if there is one, and what was not checked."""
    import gin

    from perex_t5x import gin_utils
    from perex_t5x import train as train_script
    from perex_t5x.experiments.sweep import plan
    from perex_t5x.experiments.sweep.runs import Run
    from perex_t5x.preflight import step

    _configure_data(job)
    vars(sys.modules["__main__"])["train"] = train_script.train  # ported files say `import __main__ as train_script`
    values = {name: tuple(_values(job, name)) for name in ("gin_file", "gin_bindings", "gin_search_paths")}
    paths = tuple(p for v in values["gin_search_paths"] for p in v.split(","))
    if job.module != "perex_t5x.train":
        try:
            gin_utils.parse_gin_flags(paths, values["gin_file"], values["gin_bindings"])
        except ConfigError as e:
            return cli.cleaned(str(e)), []
        return None, [f"{job.module}: its Gin files were read, nothing was built"]
    files, bindings, sizes = values["gin_file"], values["gin_bindings"], (job.batch_size, None, job.train_steps)
    run = Run(job.name, {}, files, bindings, (), *sizes, seed=0, examples=0, search_paths=paths)
    problem = plan.dry_run(run, functools.partial(step.bind_devices, devices) if devices else lambda: None)
    return problem, [] if problem or not devices else _division(gin.get_bindings(train_script.train))


def _division(arguments: Mapping[str, Any]) -> list[str]:
    """A feed that may stream, on a mesh that cannot be divided among the hosts: known only where the data's size is."""
    from perex_t5x.data import streaming

    config, partitioner = arguments["train_dataset_cfg"], arguments["partitioner"]
    if config.feed != "auto":
        return []  # a feed that is to stream was checked with the configuration
    try:
        streaming.data_shards(partitioner.data_sharding, config.batch_size)
    except ConfigError as e:
        return [f"whether the data fit into the hosts' memory; if not, the run is refused: {e}"]
    return []


def _configure_data(job: Job) -> None:
    """As `perex_t5x.cli` does in the job's own process."""
    import seqio

    for folder in _values(job, "tfds_data_dir"):
        os.environ["TFDS_DATA_DIR"] = folder
        seqio.set_tfds_data_dir_override(folder)
    for folders in _values(job, "seqio_additional_cache_dirs"):
        seqio.add_global_cache_dirs(folders.split(","))


def _values(job: Job, flag: str) -> list[str]:
    return [a.partition("=")[2] for a in job.arguments if a.startswith(f"--{flag}=")]


if __name__ == "__main__":
    sys.exit(main())
