"""Before anything is created: Gin files, preflight, bucket and zone are checked, the cost is shown, the user confirms.

    python -m perex_t5x.launching.checks --jobs=jobs.json --devices=256

builds the configuration of every job on fake devices, as the hosts will; it compiles and writes nothing. It runs in the
folder of jobs.json, so that a file that is not copied along is missed here and not on paid chips. It exits with 2 if a job
has a configuration error, and lists all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import perex_t5x
from perex_t5x import cli
from perex_t5x.cli import console, status
from perex_t5x.errors import ConfigError, Reason, TrainingError
from perex_t5x.hardware.slices import Slice
from perex_t5x.launching import bundle, names, shell
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import Commands, say
from perex_t5x.launching.spec import Job, Work


def _python(request: Request, module: str, *arguments: str) -> list[str]:
    """A command of this package on the CPU, which can import --with_package but nothing from the working directory."""
    packages = [os.path.abspath(p) for p in request.with_package if os.path.isdir(p)]
    paths = [str(Path(perex_t5x.__file__).parent.parent), *packages, *(os.path.join(p, "src") for p in packages)]
    environment = ["JAX_PLATFORMS=cpu", "XLA_FLAGS=", f"PYTHONPATH={':'.join(paths)}"]
    return ["env", *environment, sys.executable, "-P", "-m", module, *arguments]


def check_gin(request: Request, commands: Commands) -> None:
    """Builds every distinct configuration on as many fake devices as the slices have, in its own process."""
    devices = request.slice.devices * request.slices if request.slice else 1
    if commands.dry_run or request.skip_gin_check:
        return  # the check needs files that a dry run does not write
    say(f"checking the Gin files on {devices} fake device(s)")
    with tempfile.TemporaryDirectory() as folder:
        bundle.write_jobs(request.work, folder, commands)
        argv = _python(request, "perex_t5x.launching.checks", f"--jobs={folder}/jobs.json", f"--devices={devices}")
        done = commands.run(argv, check=False)
    if done.returncode == 2 and done.stdout.strip():
        raise ConfigError(done.stdout.strip())
    if done.returncode != 0:
        raise TrainingError(f"the Gin files could not be checked:\n{done.said}")


def largest_batches(jobs: tuple[Job, ...]) -> dict[str, Job]:
    """Job name -> the job that preflight compiles for it: the largest batch among those with the same Gin files.

    >>> a, b = (Job(n, ("-m", "m", "--gin_file=x"), "", size) for n, size in (("a", 8), ("b", 16)))
    >>> {name: job.name for name, job in largest_batches((a, b)).items()}
    {'a': 'b', 'b': 'b'}
    """

    def files(job: Job) -> tuple[str, ...]:
        return tuple(a for a in job.gin_arguments if a.startswith("--gin_file="))

    largest: dict[tuple[str, ...], Job] = {}
    for job in jobs:
        if files(job) not in largest or job.batch_size > largest[files(job)].batch_size:
            largest[files(job)] = job
    return {job.name: largest[files(job)] for job in jobs}


def preflight(request: Request, commands: Commands) -> Estimate:
    """Compiles the steps for the slices, unless --skip_preflight; a step that does not fit is an error, with its table."""
    jobs, kind = request.work.jobs, request.slice
    seconds: dict[str, float | None] = {}
    if not request.skip_preflight and all(job.module == "perex_t5x.train" for job in jobs):
        chosen = largest_batches(jobs)
        compiled = {job.name: job for job in chosen.values()}
        if not commands.dry_run:
            say(f"compiling {len(compiled)} step(s) for {request.slices} x {kind.topology}; this takes minutes")
        if len(compiled) < len(jobs) and not commands.dry_run:
            say("only the largest batch among runs with the same Gin files; the others are scaled from it")
        seconds_per_step = {name: _preflight_one(request, job, commands) for name, job in compiled.items()}
        for job in jobs:
            of, per_step = chosen[job.name], seconds_per_step[chosen[job.name].name]
            seconds[job.name] = per_step and per_step * job.batch_size / max(of.batch_size, 1)
    return estimate(jobs, seconds, kind, request.slices)


def _preflight_one(request: Request, job: Job, commands: Commands) -> float | None:
    """Seconds per step."""
    where = [f"--topology={request.slice.topology}", f"--slices={request.slices}"]
    argv = _python(request, "perex_t5x.preflight", *where, *job.gin_arguments)
    if commands.dry_run:
        commands.run(argv)
        return None
    with tempfile.TemporaryDirectory() as folder:
        bundle.write_jobs(request.work, folder, commands)
        path, status_file = os.path.join(folder, "preflight.json"), os.path.join(folder, "status.json")
        argv = ["env", f"{status.VARIABLE}={status_file}", *argv, f"--json={path}"]
        done = commands.run(argv, check=False, cwd=folder)
        ended = status.of_process(done.returncode, status_file, message=done.said)
        case = json.loads(Path(path).read_text(encoding="utf-8"))["cases"][0] if os.path.exists(path) else {}
    if case:
        say(done.stdout)
    if case.get("fits") is False:
        raise ConfigError(
            f"{job.name} does not fit on {request.slices} x {request.slice.topology}, see the table above: change it, "
            "choose a larger --topology, or skip this check with --skip_preflight."
        )
    if done.returncode != 0 or not case:
        raise ConfigError(f"preflight of {job.name}: {ended.message}\nTo skip this check: --skip_preflight.")
    return case["seconds"]


def bucket(request: Request, commands: Commands, must_see: bool = True) -> dict[str, Any]:
    """Raises `ConfigError` if the bucket does not exist; notes if it is far from the slices. Returns its description.

    `must_see=False`: a user without access to it may continue, as the hosts' account may have access.
    """
    name = names.bucket_of(request.work.root)
    argv = ["gcloud", "storage", "buckets", "describe", name, "--format=json", f"--project={request.project}"]
    done = commands.run(argv, check=False, dry="{}")
    if done.returncode != 0:
        region = request.zone.rpartition("-")[0] if request.zone else "REGION"
        if done.matches(shell.NO_BUCKET):
            raise ConfigError(
                f"there is no bucket {name}:\n{done.said}\nCreate it, near the slices: gcloud storage buckets create {name} "
                f"--location={region} --uniform-bucket-level-access"
            )
        words = shell.refusal(f"the bucket {name} cannot be read", done.said)
        if must_see:
            raise ConfigError(words)
        say(f"note: {words}")
        return {}
    described = json.loads(done.stdout or "{}")
    location, region = str(described.get("location", "")).lower(), (request.zone or "").rpartition("-")[0]
    if location and region and location not in (region, region.partition("-")[0]):
        say(f"note: {name} is in {location}, the slices are in {region}: reading and writing costs time and money.")
    return described


def zone_has(request: Request, commands: Commands) -> None:
    """Raises `ConfigError` if the zone has no such slices. Whether some are available shows when they are created."""
    where = [f"--zone={request.zone}", f"--project={request.project}"]
    kind = request.slice.accelerator_type
    argv = ["gcloud", "compute", "tpus", "accelerator-types", "describe", kind, *where, "--format=json"]
    done = commands.run(argv, check=False)
    if done.returncode == 0:
        return
    if done.matches(shell.GONE):
        raise ConfigError(
            f"--zone={request.zone} has no {kind}. To list what it has: gcloud compute tpus accelerator-types list "
            f"{' '.join(where)}. Zones by chip: https://cloud.google.com/tpu/docs/regions-zones"
        )
    raise ConfigError(f"whether the zone has {kind} is not known:\n{done.said}")


def quota(request: Request, commands: Commands) -> None:
    """Prints a note if the project's quota of chips in the zone is too small, or cannot be read.

    The numbers come from the Cloud Quotas API, which has to be enabled; gcloud needs its beta commands. They do not include
    what is in use, so a quota that is large enough is no guarantee. Reserved slices do not count against it.
    """
    if request.reservation or request.reserved:
        return
    name = request.slice.quota_id(request.spot)
    if name is None:
        return
    argv = ["gcloud", "beta", "quotas", "info", "describe", name, "--service=tpu.googleapis.com"]
    done = commands.run([*argv, f"--project={request.project}", "--format=json", "--quiet"], check=False, timeout=60)
    if commands.dry_run:
        return
    if done.returncode != 0:
        reason = done.said.strip().splitlines()[-1].strip()
        say(
            f"note: the quota {name} cannot be read ({reason}); whether it is sufficient shows when the slices are created."
        )
        return
    limit, wanted = quota_limit(json.loads(done.stdout), request.zone), request.slice.chips * request.slices
    if limit is not None and 0 <= limit < wanted:
        say(
            f"note: the quota {name} is {limit} in {request.zone}, and {wanted} chips would be requested. Request more at "
            "https://console.cloud.google.com/iam-admin/quotas, service tpu.googleapis.com"
        )


def quota_limit(info: dict[str, Any], zone: str) -> int | None:
    """The limit for a zone; one for this zone alone precedes one for several.

    >>> many = {"applicableLocations": ["a", "b"], "details": {"value": "8"}}
    >>> one = {"applicableLocations": ["a"], "dimensions": {"zone": "a"}, "details": {"value": "16"}}
    >>> [quota_limit({"dimensionsInfos": [many, one]}, zone) for zone in ("a", "b", "c")]
    [16, 8, None]
    """
    infos = [i for i in info.get("dimensionsInfos", []) if zone in i.get("applicableLocations", [])]
    infos.sort(key=lambda info: info.get("dimensions", {}).get("zone") != zone)
    values = [info["details"]["value"] for info in infos if "value" in info.get("details", {})]
    return int(values[0]) if values else None


def confirm(summary: str, request: Request) -> None:
    """Shows the summary and asks for confirmation; scripts have to give --yes."""
    say(summary)
    if not request.yes and not request.dry_run:
        console.confirm("Create?", refused="Nothing was created.")


def summary(request: Request, cost: Estimate, commit: str, where: str) -> str:
    """What would be created and run, in a few lines."""
    kind, work = request.slice, request.work
    what = f"{len(work.jobs)} runs, one after another" if work.sweep else f"{work.jobs[0].module} of one run"
    tier = "spot, may be preempted at any time" if request.spot else request.reservation or "on demand"
    if request.reserved:
        tier = "reserved"
    along = bundle.uncommitted([*work.gin_files.values(), *request.with_package])
    return "\n".join(
        [
            "",
            f"name      {request.name}",
            f"runs      {what}, into {work.root}",
            f"slices    {request.slices} x {kind.topology} ({kind.chips} chips on {kind.hosts} host(s)), {tier}",
            f"where     {where}",
            f"commit    {commit}",
            *(f"{'' if i else 'along':<10}{path}" for i, path in enumerate(along)),
            f"cost      {cost.words()}",
            "",
        ]
    )


@dataclass(frozen=True)
class Estimate:
    """Hours, chip-hours and cost of a launch, from preflight's seconds per step and list prices.

    Attributes:
      chips: of all slices.
      price: of a chip-hour in USD; None if not known.
      hours: of all jobs; None if not known.

    >>> print(Estimate(256, 1.2, 10.0).words())
    at least 10.0 hours, 2,560 chip-hours, about $3,072 at $1.2 per chip-hour (the compiler's cycles, without collectives,
    input and evaluation: a lower bound; compiling and restarts come on top)
    """

    chips: int
    price: float | None
    hours: float | None = None

    def words(self) -> str:
        if self.hours is None:
            return (
                f"{self.chips:,} chip-hours per hour, {self._dollars(self.chips, ' per hour')} (how many hours is not known "
                "without preflight)"
            )
        chip_hours = self.hours * self.chips
        hours = f"{self.hours:.1f} hours" if self.hours >= 0.1 else f"{self.hours * 60:.1f} minutes"
        return (
            f"at least {hours}, {chip_hours:,.0f} chip-hours, {self._dollars(chip_hours)} (the compiler's cycles, without "
            "collectives,\ninput and evaluation: a lower bound; compiling and restarts come on top)"
        )

    def _dollars(self, chip_hours: float, each: str = "") -> str:
        if self.price is None:
            return "list price not known: give --price_per_chip_hour"
        return f"about ${chip_hours * self.price:,.0f}{each} at ${self.price:g} per chip-hour"


def estimate(jobs: Sequence[Job], seconds: Mapping[str, float | None], kind: Slice, slices: int) -> Estimate:
    """Adds up steps times seconds per step.

    Args:
      jobs: run one after another.
      seconds: per step, by the job's name; a job that is missing, or None, makes the hours unknown.
      kind, slices: what they run on.
    """
    each = [seconds.get(job.name) for job in jobs]
    hours = None if None in each else sum(s * job.train_steps for s, job in zip(each, jobs, strict=True)) / 3600
    return Estimate(kind.chips * slices, kind.price, hours)


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
    # The first of those that differ only in learning rate and seed.
    one_per_group = list({(job.group or job.name): job for job in reversed(jobs)}.values())[::-1]
    problems = [problem for job in one_per_group if (problem := _problem(job))]
    for problem in dict.fromkeys(problems):
        print(problem)
    return Reason.CONFIGURATION.exit_code if problems else 0


def _problem(job: Job) -> str | None:
    from perex_t5x import gin_utils
    from perex_t5x import train as train_script
    from perex_t5x.experiments.sweep import plan
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
    files, bindings, sizes = values["gin_file"], values["gin_bindings"], (job.batch_size, None, job.train_steps)
    return plan.dry_run(Run(job.name, {}, files, bindings, (), *sizes, seed=0, examples=0, search_paths=paths))


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
