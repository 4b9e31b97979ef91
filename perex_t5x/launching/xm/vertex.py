"""--executor=vertex: every run is a custom job of Vertex AI on a TPU v2-8 or v3-8, all that XManager's executor knows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.launching import bundle, checks, image, names, spec
from perex_t5x.launching.shell import Commands, Leftovers
from perex_t5x.launching.spec import Work
from perex_t5x.launching.xm import command, experiment
from perex_t5x.launching.xm.experiment import close_quietly

REGION = "us-central1"  # the only one that XManager's executor uses
CORES = 8  # of one host; each is a device
_PATIENCE = 60.0  # seconds for an answer that is on its way
_KNOWN = {"v2-8": "tpu_v2", "v3-8": "tpu_v3"}


def launch(args: Any) -> int:
    """Checks, builds the image if none is given, asks, and creates a job for every run; does not wait for them."""
    if args.topology:
        kind_of(args.topology, args)
    work = spec.make(args)
    kind = kind_of(args.topology or work.topology, args)
    name = names.check_name(args.name or names.suggestion(work.name) or work.name)
    _check_work(args, work)
    modules = experiment.modules()
    commands = Commands(args.dry_run)
    # What the checks need of a `Request`, whose slices begin with v4.
    asked = SimpleNamespace(
        work=work,
        slice=SimpleNamespace(devices=CORES),
        slices=1,
        with_package=args.with_package,
        project=args.project,
        zone=f"{REGION}-a",
        skip_gin_check=args.skip_gin_check,
    )
    checks.check_gin(asked, commands)
    if args.project:
        checks.bucket(asked, commands)
    used, build = _image(args, name, work, commands)
    made = make_jobs(modules, work, used, kind)
    checks.confirm(_summary(args, name, work, used), args)
    build()
    if args.dry_run:
        for job in made:
            print(f"a custom job: {job.name}, {job.executor.requirements}", file=sys.stderr)
        return 0
    return create_jobs(modules[1], f"{name} {work.root}"[:255], work.root, made, commands, args.project)


def kind_of(topology: str | None, args: Any) -> str:
    """XManager's name of the chip; raises `ConfigError`, with the commands to use instead, for other chips."""
    if topology is None:
        raise ConfigError("--topology is missing: --topology=v2-8 or --topology=v3-8 on Vertex through XManager.")
    if topology in _KNOWN:
        return _KNOWN[topology]
    if re.match(r"v[23]\b", topology):
        raise ConfigError(f"--topology={topology}: of v2 and v3, one host is supported: v2-8 or v3-8.")
    raise ConfigError(
        f"--topology={topology}: XManager 0.8.5's Vertex executor knows only v2-8 and v3-8. To run on {topology}, as TPU "
        f"VMs or on a GKE cluster:\n{command.other_launchers(args)}"
    )


def _check_work(args: Any, work: spec.Work) -> None:
    work.check_in_bucket()
    if args.project:
        names.check_project(args.project)
    for job in work.jobs:
        if argument := next((a for a in job.arguments if "$(" in a), None):
            raise ConfigError(f"{argument!r}: Vertex AI would expand $(...) in it.")
    if args.image and work.gin_files:
        raise ConfigError(
            f"--image: it does not contain your own Gin files, {', '.join(work.gin_files)}. Use --repository instead, which "
            "builds an image that does."
        )
    for name in ("spot", "reservation", "slices", "zone"):
        if getattr(args, name):
            raise ConfigError(
                f"--{name} does not apply to --executor=vertex: XManager requests one TPU per run, in {REGION}."
            )


def _image(args: Any, name: str, work: spec.Work, commands: Commands) -> tuple[str, Callable[[], Any]]:
    """The image's name, and a function that builds it after the confirmation."""
    if args.image:
        return image.check_image(args.image), lambda: None
    if not args.repository:
        raise ConfigError(
            "--image=HOST/PROJECT/REPOSITORY/NAME:TAG is missing, or --repository, to which an image of this checkout would "
            "be pushed (as ./launch/build_image.py does)."
        )
    repository = image.check_repository(args.repository)
    files = bundle.checkout(args.allow_uncommitted)
    # The user's own Gin files are part of the image.
    tag = f"{files.commit}-{work.fingerprint}" if work.gin_files else files.commit

    def build() -> None:
        target = bundle.folder(f"image-{name}-{files.commit}")
        with bundle.alone(target, args.dry_run):
            folder = image.context(target, files, commands, args.with_package, args.allow_uncommitted, work.gin_files)
            image.build(folder, f"{repository}:{tag}", files, commands)

    return f"{repository}:{tag}", build


def _summary(args: Any, name: str, work: spec.Work, used: str) -> str:
    runs = f"{len(work.jobs)} runs, all at once, each on one" if len(work.jobs) > 1 else "one run on one"
    topology = args.topology or work.topology
    return "\n".join(
        [
            "",
            f"name      {name}",
            f"runs      {runs} TPU {topology}, into {work.root}",
            f"where     Vertex AI, {REGION}, project {args.project or '(that of your credentials)'}",
            f"image     {used}",
            "cost      unknown: there is no preflight for v2 and v3; see https://cloud.google.com/vertex-ai/pricing",
            "",
        ]
    )


def make_jobs(modules: tuple[Any, Any], work: Work, image: str, kind: str) -> list[Any]:
    """An `xm.Job` for every run; `kind` is XManager's name of the chip."""
    xm, xm_local = modules
    from xmanager.xm_local import executables

    # Not `experiment.package`: with Docker here it would pull the image and push it to gcr.io.
    executable = executables.GoogleContainerRegistryImage(name="perex_t5x", image_path=image)
    executor = xm_local.Vertex(requirements=xm.JobRequirements(**{kind: CORES}))
    return [
        xm.Job(executable, executor=executor, name=names.label_value(job.name), args=job.argv("python"))
        for job in work.jobs
    ]


def create_jobs(
    xm_local: Any, title: str, root: str, jobs: Sequence[Any], commands: Commands, project: str | None = None
) -> int:
    """Creates all jobs or, if one fails, none: those created so far are cancelled, or named in the last lines."""
    # XManager has no flags for these two.
    os.environ["GOOGLE_CLOUD_BUCKET_NAME"] = names.bucket_of(root).removeprefix("gs://")
    if project:
        os.environ["GOOGLE_CLOUD_PROJECT"] = project
    created: list[str] = []
    with Leftovers(commands) as leftovers:
        try:
            _check_free(title)
            with contextlib.ExitStack() as opened:
                experiment = xm_local.create_experiment(experiment_title=title).__enter__()
                opened.push(lambda *exc: close_quietly(experiment, *exc))
                for number, job in enumerate(jobs, 1):
                    try:
                        _wait(experiment.add(job))
                    finally:  # also if it was created despite a Ctrl-C
                        for resource in _resources(experiment.experiment_id, number):
                            created.append(resource)
                            leftovers.add(f"custom job {resource}", cancel_command(resource))
        except ConfigError:
            raise
        except Exception as e:
            raise TrainingError(f"Vertex AI, through XManager: {type(e).__name__}: {e}") from e
    print(f"XManager experiment {experiment.experiment_id}: {len(created)} custom job(s)")
    for resource in created:
        print(f"  {resource}")
    print(f"follow   gcloud ai custom-jobs list --region={REGION}, then gcloud ai custom-jobs stream-logs JOB")
    print(f"stop     gcloud ai custom-jobs cancel JOB --region={REGION}")
    return 0


def cancel_command(resource: str) -> list[str]:
    """
    >>> " ".join(cancel_command("projects/1/locations/us-central1/customJobs/2"))
    'gcloud ai custom-jobs cancel projects/1/locations/us-central1/customJobs/2 --region=us-central1'
    """
    return ["gcloud", "ai", "custom-jobs", "cancel", resource, f"--region={REGION}"]


def _check_free(title: str) -> None:
    """Raises `ConfigError` if an earlier launch of the same name and folder, in this machine's records, is still active."""
    from xmanager.cloud import vertex
    from xmanager.xm_local.storage import database

    records = database.database()
    earlier = [records.get_experiment(number) for number in records.list_experiment_ids()]
    for former in (e for e in earlier if e.experiment_title == title):
        resources = [job.caip.resource_name for unit in former.work_units for job in unit.jobs.values()]
        active = [r for r in resources if r and vertex.VertexHandle(r).get_status().is_active]
        if active:
            raise ConfigError(
                f"this is launched already, as XManager experiment {former.experiment_id}, and is active. To follow it: "
                f"gcloud ai custom-jobs stream-logs {active[0]}"
            )


def _resources(experiment: int, work_unit: int) -> list[str]:
    """Vertex's name of a work unit's job; none if it has not been created."""
    from xmanager.xm_local.storage import database

    return list(database.database().get_work_unit(experiment, work_unit).jobs)


def _wait(launched: asyncio.Future) -> None:
    """Waits for a future of XManager's own thread, even after Ctrl-C, which does not stop that thread."""
    try:
        _until_done(launched)
    except KeyboardInterrupt as e:
        with contextlib.suppress(KeyboardInterrupt):  # after a second Ctrl-C the job is only named
            _until_done(launched, seconds=_PATIENCE)
        if not launched.done():
            e.add_note(f"there may be one more custom job: gcloud ai custom-jobs list --region={REGION}")
        raise
    launched.result()


def _until_done(launched: asyncio.Future, seconds: float = float("inf")) -> None:
    end = time.monotonic() + seconds
    while not launched.done() and time.monotonic() < end:
        time.sleep(0.05)
