"""Before anything is created: Gin files, preflight, bucket and zone are checked, the cost is shown, and one is asked."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import perex_t5x
from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.launching import bundle, estimate, leftovers, names, refusals
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import Commands, Completed
from perex_t5x.launching.spec import Job


def say(text: str) -> None:
    """On stderr: stdout is for the commands of a dry run."""
    print(text, file=sys.stderr, flush=True)


def _python(request: Request, module: str, *arguments: str) -> list[str]:
    """A command of this package on the CPU, which finds what --with_package takes along, and not the working directory."""
    packages = [os.path.abspath(p) for p in request.with_package if os.path.isdir(p)]
    paths = [str(Path(perex_t5x.__file__).parent.parent), *packages, *(os.path.join(p, "src") for p in packages)]
    environment = ["JAX_PLATFORMS=cpu", "XLA_FLAGS=", f"PYTHONPATH={':'.join(paths)}"]
    return ["env", *environment, sys.executable, "-P", "-m", module, *arguments]


def check_gin(request: Request, commands: Commands) -> None:
    """Builds every distinct configuration on as many fake devices as the slices have, in a process of its own."""
    devices = request.slice.devices * request.slices if request.slice else 1
    if commands.dry_run or request.skip_gin_check:
        return  # the check needs files that a dry run does not write
    say(f"checking the Gin files on {devices} fake device(s)")
    with tempfile.TemporaryDirectory() as folder:
        bundle.write_jobs(request.work, folder, commands)
        argv = _python(request, "perex_t5x.launching.gin_check", f"--jobs={folder}/jobs.json", f"--devices={devices}")
        done = commands.run(argv, check=False)
    if done.returncode == 2 and done.stdout.strip():
        raise ConfigError(done.stdout.strip())
    if done.returncode != 0:
        raise TrainingError(f"the Gin files could not be checked:\n{done.said}")


def largest_batches(jobs: tuple[Job, ...]) -> dict[str, Job]:
    """Job -> the job that preflight compiles for it: of those with the same Gin files the one with the largest batch.

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


def preflight(request: Request, commands: Commands) -> estimate.Estimate:
    """Compiles the steps for the slices, unless that is not wanted; a step that does not fit is refused with its table."""
    jobs, kind = request.work.jobs, request.slice
    seconds: dict[str, float | None] = {}
    if not request.skip_preflight and all(job.module == "perex_t5x.train" for job in jobs):
        chosen = largest_batches(jobs)
        compiled = {job.name: job for job in chosen.values()}
        if not commands.dry_run:
            say(f"compiling {len(compiled)} step(s) for {request.slices} x {kind.topology}; this takes minutes")
        if len(compiled) < len(jobs) and not commands.dry_run:
            say("of runs with the same Gin files the one with the largest batch; the others are scaled from it")
        found = {name: _preflight_one(request, job, commands) for name, job in compiled.items()}
        for job in jobs:
            of, per_step = chosen[job.name], found[chosen[job.name].name]
            seconds[job.name] = per_step and per_step * job.batch_size / max(of.batch_size, 1)
    return estimate.estimate(jobs, seconds, kind, request.slices)


def _preflight_one(request: Request, job: Job, commands: Commands) -> float | None:
    """Seconds a step."""
    where = [f"--topology={request.slice.topology}", f"--slices={request.slices}"]
    argv = _python(request, "perex_t5x.preflight", *where, *job.gin_arguments)
    if commands.dry_run:
        commands.run(argv)
        return None
    with tempfile.TemporaryDirectory() as folder:  # of this launch alone
        bundle.write_jobs(request.work, folder, commands)
        path = os.path.join(folder, "preflight.json")
        return _compiled(request, job, commands.run([*argv, f"--json={path}"], check=False, cwd=folder), path)


def _compiled(request: Request, job: Job, done: Completed, path: str) -> float | None:
    """Seconds a step, of what preflight has said and written."""
    if done.returncode == 1 and os.path.exists(path) and done.stdout.strip():
        say(done.stdout)
        raise ConfigError(
            f"{job.name} does not fit on {request.slices} x {request.slice.topology}, see the table above: change it, take "
            "a larger --topology, or leave this check out with --skip_preflight."
        )
    if done.returncode != 0:
        message = done.stderr.rpartition("ERROR: ")[2].strip() or done.said
        if "TPU compiler, which is not installed" in message:
            message += " Or leave this check out with --skip_preflight."
        raise ConfigError(f"preflight of {job.name}: {message}")
    with open(path, encoding="utf-8") as f:
        found = json.load(f)["cases"][0]
    say(done.stdout)
    return found["seconds"]


def bucket(request: Request, commands: Commands, must_see: bool = True) -> dict[str, Any]:
    """What the cloud says of the bucket; it has to be there before hosts try to write into it.

    `must_see=False`: one who may not look at it goes on; the hosts' account may.
    """
    name = names.bucket_of(request.work.root)
    argv = ["gcloud", "storage", "buckets", "describe", name, "--format=json", f"--project={request.project}"]
    done = commands.run(argv, check=False, dry="{}")
    if done.returncode != 0:
        region = request.zone.rpartition("-")[0] if request.zone else "REGION"
        if re.search(r"not found|\b404\b", done.stderr):
            raise ConfigError(
                f"there is no bucket {name}:\n{done.said}\nMake it, near the slices: gcloud storage buckets create {name} "
                f"--location={region} --uniform-bucket-level-access"
            )
        words = refusals.message(f"the bucket {name} cannot be looked at", done.said)
        if must_see:
            raise ConfigError(words)
        say(f"note: {words}")
        return {}
    found = json.loads(done.stdout or "{}")
    location, region = str(found.get("location", "")).lower(), (request.zone or "").rpartition("-")[0]
    if location and region and location not in (region, region.partition("-")[0]):
        say(f"note: {name} is in {location}, the slices are in {region}: reading and writing costs time and money.")
    return found


def zone_has(request: Request, commands: Commands) -> None:
    """That the zone has such slices at all. Whether some are free, and the quota allows them, is seen when creating."""
    where = [f"--zone={request.zone}", f"--project={request.project}"]
    kind = request.slice.accelerator_type
    argv = ["gcloud", "compute", "tpus", "accelerator-types", "describe", kind, *where, "--format=json"]
    done = commands.run(argv, check=False)
    if done.returncode == 0:
        return
    if re.search(leftovers.GONE, done.stderr):
        raise ConfigError(
            f"--zone={request.zone} has no {kind}. What it has: gcloud compute tpus accelerator-types list "
            f"{' '.join(where)}. Zones by chip: https://cloud.google.com/tpu/docs/regions-zones"
        )
    raise ConfigError(f"the zone cannot be asked for {kind}:\n{done.said}")


def confirm(summary: str, request: Request, ask: Callable[[str], str] = input) -> None:
    """Shows the summary, and asks on a terminal; in scripts --yes has to be given."""
    say(summary)
    if request.yes or request.dry_run:
        return
    if not sys.stdin.isatty():
        raise ConfigError("nothing was created: this is not a terminal where one could be asked. Give --yes.")
    print("Create? [y/N] ", end="", file=sys.stderr, flush=True)
    if answer(ask) not in ("y", "yes"):
        raise ConfigError("nothing was created.")


def answer(ask: Callable[[str], str] = input) -> str:
    """What is typed; the end of input, Ctrl-D, is a no."""
    try:
        return ask("").strip().lower()
    except EOFError:
        return "no"


def summary(request: Request, cost: estimate.Estimate, commit: str, where: str) -> str:
    """What would be created and run, in a few lines."""
    kind, work = request.slice, request.work
    what = f"{len(work.jobs)} runs, one after another" if work.sweep else f"{work.jobs[0].module} of one run"
    tier = "spot, may be taken away at any time" if request.spot else request.reservation or "on demand"
    if request.reserved:
        tier = "of the project's reservation"
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
