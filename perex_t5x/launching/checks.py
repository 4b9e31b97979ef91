"""Before anything is created: Gin files, preflight, bucket and zone are checked, the cost is shown, the user confirms.

Each check adds to a `Checklist` what it has looked at, how long that took, and what it could not see from here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import perex_t5x
from perex_t5x import files, gin_utils
from perex_t5x.cli import console, status
from perex_t5x.errors import ConfigError, Reason, TrainingError
from perex_t5x.hardware.slices import Slice
from perex_t5x.launching import bundle, names, shell
from perex_t5x.launching.gin_check import GinReport
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import Commands, say
from perex_t5x.launching.spec import Job

# Environment variables that decide what the compiler does.
_COMPILER_VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "TPU_")


@dataclass
class Checklist:
    """What the checks before a launch have looked at, and what they have not.

    >>> checklist = Checklist()
    >>> checklist.checked("the bucket gs://b exists")
    >>> checklist.not_checked("whether slices are free now")
    >>> print("\\n".join(checklist.lines()))
    checked   the bucket gs://b exists
    unchecked whether slices are free now
    """

    done: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def checked(self, what: str, since: float | None = None) -> None:
        """`since`: when the check began, by `time.monotonic`."""
        took = "" if since is None else f" ({time.monotonic() - since:.1f} s)"
        self.done.append(f"{what}{took}")

    def not_checked(self, what: str) -> None:
        self.open.append(what)

    def lines(self) -> list[str]:
        parts = (("checked", dict.fromkeys(self.done)), ("unchecked", dict.fromkeys(self.open)))
        return [f"{'' if i else label:<10}{text}" for label, texts in parts for i, text in enumerate(texts)]


def _python(request: Request, module: str, *arguments: str) -> list[str]:
    """A command of this package on the CPU, which can import --with_package but nothing from the working directory."""
    packages = [os.path.abspath(p) for p in request.with_package if os.path.isdir(p)]
    paths = [str(Path(perex_t5x.__file__).parent.parent), *packages, *(os.path.join(p, "src") for p in packages)]
    given = [f"{name}={value}" for name, value in (getattr(request, "environment", None) or {}).items()]
    environment = [*given, "JAX_PLATFORMS=cpu", "XLA_FLAGS=", f"PYTHONPATH={':'.join(paths)}"]
    return ["env", *environment, sys.executable, "-P", "-m", module, *arguments]


def check_gin(request: Request, commands: Commands, checklist: Checklist | None = None) -> None:
    """Builds every distinct configuration on the devices of the slices, in its own process; see `gin_check`."""
    checklist, since = checklist or Checklist(), time.monotonic()
    devices = request.slice.devices * request.slices if request.slice else 1
    if request.skip_gin_check:
        checklist.not_checked("the Gin files (--skip_gin_check)")
    if commands.dry_run or request.skip_gin_check:
        return  # the check needs files that a dry run does not write
    topology = getattr(request.slice, "topology", "")
    on = f"the devices of {request.slices} x {topology}" if topology else f"{devices} fake device(s)"
    say(f"checking the Gin files on {on}")
    with tempfile.TemporaryDirectory() as folder:
        bundle.write_jobs(request.work, folder, commands)
        path = os.path.join(folder, "report.json")
        where = [f"--devices={devices}", f"--topology={topology}", f"--slices={request.slices}"]
        module = "perex_t5x.launching.gin_check"
        done = commands.run(
            _python(request, module, f"--jobs={folder}/jobs.json", *where, f"--report={path}"), check=False
        )
        report = GinReport.from_json(Path(path).read_text(encoding="utf-8")) if os.path.exists(path) else None
    if done.returncode == Reason.CONFIGURATION.exit_code and done.stdout.strip():
        raise ConfigError(done.stdout.strip())
    if done.returncode != 0 or report is None:
        raise TrainingError(f"the Gin files could not be checked:\n{done.said}")
    hosts = ""
    if report.hosts == request.slices * getattr(request.slice, "hosts", 0):
        hosts = f", and the rows that each of {report.hosts} host(s) reads"
    elif report.hosts:  # v5e-8 and v6e-8 are one host of eight chips, or two of four
        checklist.not_checked(f"which rows each host reads: the compiler describes {report.hosts} hosts of four chips")
    what = f"{report.built} configuration(s), built on {on}: model, mesh, batch, task{hosts}"
    checklist.checked(what, since)
    for text in report.unchecked:
        checklist.not_checked(text)
    checklist.not_checked("whether the hosts can read the data (the tasks were looked up from here), and how fast")


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


def preflight(request: Request, commands: Commands, checklist: Checklist | None = None) -> Estimate:
    """Compiles the steps for the slices, unless --skip_preflight; a step that does not fit is an error, with its table."""
    checklist, since = checklist or Checklist(), time.monotonic()
    jobs, kind = request.work.jobs, request.slice
    seconds: dict[str, float | None] = {}
    if request.skip_preflight or any(job.module != "perex_t5x.train" for job in jobs):
        why = "--skip_preflight" if request.skip_preflight else "only a training's step can be compiled here"
        checklist.not_checked(f"whether the program fits on the slices, and its time ({why})")
        return estimate(jobs, seconds, kind, request.slices)
    chosen = largest_batches(jobs)
    compiled = {job.name: job for job in chosen.values()}
    known = {} if commands.dry_run else {name: _Answer.read(request, job) for name, job in compiled.items()}
    unknown = [name for name in compiled if known.get(name) is None]
    if unknown and not commands.dry_run:
        say(
            f"compiling {len(unknown)} step(s) for {request.slices} x {kind.topology}; this takes minutes the first time"
        )
    if len(compiled) < len(jobs) and not commands.dry_run:
        say("only the largest batch among runs with the same Gin files; the others are scaled from it")
    answers = {name: known.get(name) or _preflight_one(request, job, commands) for name, job in compiled.items()}
    for name in known.keys() - set(unknown):
        say(answers[name].table)
    for job in jobs:
        of, per_step = chosen[job.name], answers[chosen[job.name].name].seconds
        seconds[job.name] = per_step and per_step * job.batch_size / max(of.batch_size, 1)
    before = f", {len(compiled) - len(unknown)} of them before" if len(unknown) < len(compiled) else ""
    checklist.checked(
        f"{len(compiled)} step(s), compiled for {request.slices} x {kind.topology}{before}: they fit", since
    )
    checklist.not_checked("the hosts' memory, and the real speed of steps, network and input")
    return estimate(jobs, seconds, kind, request.slices)


@dataclass(frozen=True)
class _Answer:
    """What preflight said of a step that fits: seconds per step, and its table.

    Answers are kept on disk by everything that they depend on: the command with its Gin bindings, the contents of the Gin
    files, all files of this package, the versions of all installed packages, the compiler's variables. With a package of the
    user's own nothing is kept, as its code may read anything; preflight's cache of compiled programs still helps then.
    """

    seconds: float | None
    table: str

    @classmethod
    def read(cls, request: Request, job: Job) -> _Answer | None:
        path = cls._path(request, job)
        try:
            return path and cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # missing, or damaged
            return None

    def keep(self, request: Request, job: Job) -> None:
        path = self._path(request, job)
        if path:
            with contextlib.suppress(OSError):  # a full disk is no reason to lose the result
                files.write_atomically(path, json.dumps(vars(self)))

    @staticmethod
    def _path(request: Request, job: Job) -> Path | None:
        from perex_t5x.preflight import report_cache

        if request.with_package:
            return None
        package = Path(perex_t5x.__file__).parent
        sources = [*sorted(package.rglob("*.py")), *sorted(Path(gin_utils.shipped_gin_dir()).rglob("*.gin"))]
        sources += [Path(path) for _, path in sorted(request.work.gin_files.items())]
        contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sources]
        installed = sorted(f"{d.metadata['Name']} {d.version}" for d in importlib.metadata.distributions())
        variables = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_COMPILER_VARIABLES))
        names_of_files = sorted(request.work.gin_files)
        parts = [sys.version, *_preflight_command(request, job), *names_of_files, *contents, *installed, *variables]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return report_cache.default_folder() / f"launch-{key}.json"


def _preflight_command(request: Request, job: Job) -> list[str]:
    where = [f"--topology={request.slice.topology}", f"--slices={request.slices}"]
    return _python(request, "perex_t5x.preflight", *where, *job.gin_arguments)


def _preflight_one(request: Request, job: Job, commands: Commands) -> _Answer:
    argv = _preflight_command(request, job)
    if commands.dry_run:
        commands.run(argv)
        return _Answer(None, "")
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
    answer = _Answer(case["seconds"], done.stdout)
    answer.keep(request, job)
    return answer


def bucket(
    request: Request, commands: Commands, must_see: bool = True, checklist: Checklist | None = None
) -> dict[str, Any]:
    """Raises `ConfigError` if the bucket does not exist; notes if it is far from the slices. Returns its description.

    `must_see=False`: a user without access to it may continue, as the hosts' account may have access.
    """
    checklist, since = checklist or Checklist(), time.monotonic()
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
        checklist.not_checked(f"whether the bucket {name} exists")
        return {}
    checklist.checked(f"the bucket {name} exists", since)
    checklist.not_checked(f"whether the hosts' service account may list, read, write and delete in {name}")
    described = json.loads(done.stdout or "{}")
    location, region = str(described.get("location", "")).lower(), (request.zone or "").rpartition("-")[0]
    if location and region and location not in (region, region.partition("-")[0]):
        say(f"note: {name} is in {location}, the slices are in {region}: reading and writing costs time and money.")
    return described


def zone_has(request: Request, commands: Commands, checklist: Checklist | None = None) -> None:
    """Raises `ConfigError` if the zone has no such slices. Whether some are available shows when they are created."""
    checklist, since = checklist or Checklist(), time.monotonic()
    where = [f"--zone={request.zone}", f"--project={request.project}"]
    kind = request.slice.accelerator_type
    argv = ["gcloud", "compute", "tpus", "accelerator-types", "describe", kind, *where, "--format=json"]
    done = commands.run(argv, check=False)
    if done.returncode == 0:
        checklist.checked(f"{request.zone} offers {kind}", since)
        checklist.not_checked(f"whether {request.slices} such slice(s) are free now")
        return
    if done.matches(shell.GONE):
        raise ConfigError(
            f"--zone={request.zone} has no {kind}. To list what it has: gcloud compute tpus accelerator-types list "
            f"{' '.join(where)}. Zones by chip: https://cloud.google.com/tpu/docs/regions-zones"
        )
    raise ConfigError(f"whether the zone has {kind} is not known:\n{done.said}")


def quota(request: Request, commands: Commands, checklist: Checklist | None = None) -> None:
    """Prints a note if the project's quota of chips in the zone is too small, or cannot be read.

    The numbers come from the Cloud Quotas API, which has to be enabled; gcloud needs its beta commands. They do not include
    what is in use, so a quota that is large enough is no guarantee. Reserved slices do not count against it.
    """
    checklist, since = checklist or Checklist(), time.monotonic()
    if request.reservation or request.reserved:
        checklist.not_checked("how much of the reservation is in use")
        return
    name = request.slice.quota_id(request.spot)
    if name is None:
        checklist.not_checked("the quota")
        return
    argv = ["gcloud", "beta", "quotas", "info", "describe", name, "--service=tpu.googleapis.com"]
    done = commands.run([*argv, f"--project={request.project}", "--format=json", "--quiet"], check=False, timeout=60)
    if commands.dry_run:
        return
    if done.returncode != 0:
        checklist.not_checked(f"the quota {name}")
        reason = done.said.strip().splitlines()[-1].strip()
        say(
            f"note: the quota {name} cannot be read ({reason}); whether it is sufficient shows when the slices are created."
        )
        return
    limit, wanted = quota_limit(json.loads(done.stdout), request.zone), request.slice.chips * request.slices
    if limit is None:
        checklist.not_checked(f"the quota {name}: it names no limit for {request.zone}")
    else:
        checklist.checked(f"the quota {name}: {'no limit' if limit < 0 else f'{limit} chips'}", since)
        checklist.not_checked("how much of the quota is in use")
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


def summary(request: Request, cost: Estimate, commit: str, where: str, checklist: Checklist | None = None) -> str:
    """What would be created and run, in a few lines; then what was checked and what was not."""
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
            *(checklist.lines() if checklist and not request.dry_run else ()),
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
    total, chips = 0.0, kind.chips * slices
    for job in jobs:
        per_step = seconds.get(job.name)
        if per_step is None:
            return Estimate(chips, kind.price)
        total += per_step * job.train_steps
    return Estimate(chips, kind.price, total / 3600)
