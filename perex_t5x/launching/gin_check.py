"""Builds the configuration of every job on fake devices, as it will be built over there; compiles and writes nothing.

    python -m perex_t5x.launching.gin_check --jobs=jobs.json --devices=256

In the folder of jobs.json, so that what is not taken along is missed here and not on paid chips. Ends with 2 where a job has
a slip, and lists all of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from perex_t5x import cli
from perex_t5x.cli import console
from perex_t5x.errors import ConfigError
from perex_t5x.launching.spec import Job, Work


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", required=True)
    parser.add_argument("--devices", type=int, required=True)
    options = parser.parse_args(argv)
    with open(options.jobs, encoding="utf-8") as f:
        jobs = Work.from_json(f.read()).jobs
    os.chdir(os.path.dirname(os.path.abspath(options.jobs)))
    console.set_up(quiet=True)
    from perex_t5x.hardware.devices import use_cpu_backend

    use_cpu_backend(options.devices)
    console.import_tensorflow_quietly()
    slips = [slip for job in one_a_group(jobs) if (slip := _slip(job))]
    for slip in dict.fromkeys(slips):
        print(slip)
    return cli.EXIT_CONFIG if slips else 0


def one_a_group(jobs: Sequence[Job]) -> list[Job]:
    """The first of those that differ in learning rate and seed alone."""
    return list({(job.group or job.name): job for job in reversed(jobs)}.values())[::-1]


def _slip(job: Job) -> str | None:
    from perex_t5x import gin_utils
    from perex_t5x import train as train_script
    from perex_t5x.experiments.sweep import configuration
    from perex_t5x.experiments.sweep.runs import Run

    _configure_data(job)
    sys.modules["__main__"].train = train_script.train  # ported files say `import __main__ as train_script`
    values = {name: tuple(_values(job, name)) for name in ("gin_file", "gin_bindings", "gin_search_paths")}
    paths = tuple(p for v in values["gin_search_paths"] for p in v.split(","))
    if job.module != "perex_t5x.train":
        try:
            gin_utils.parse_gin_flags(paths, values["gin_file"], values["gin_bindings"])
        except ConfigError as e:
            return cli.cleaned(str(e))
        return None
    run = Run(job.name, {}, values["gin_file"], values["gin_bindings"], (), job.batch_size, None, job.train_steps, 0, 0)
    return configuration._dry_run(Run(**{**run.__dict__, "search_paths": paths}))


def _configure_data(job: Job) -> None:
    """As `cli` does it for the job's own process."""
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
