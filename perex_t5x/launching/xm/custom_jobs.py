"""Custom jobs of Vertex AI through XManager: made, created together or not at all, found again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.launching import names
from perex_t5x.launching.leftovers import Leftovers
from perex_t5x.launching.shell import Commands
from perex_t5x.launching.spec import Work
from perex_t5x.launching.xm.experiment import close_quietly

REGION = "us-central1"  # XManager's own, which it cannot be told
_PATIENCE = 60.0  # seconds for an answer that is on its way
CORES = 8  # of one host; each is a device


def make(modules: tuple[Any, Any], work: Work, image: str, kind: str) -> list[Any]:
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


def create(
    xm_local: Any, title: str, root: str, jobs: Sequence[Any], commands: Commands, project: str | None = None
) -> int:
    """Creates all jobs or, where one fails, none: those that are there are cancelled, or named in the last lines."""
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
                    finally:  # also one that was created though Ctrl-C came in between
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
    print(f"look     gcloud ai custom-jobs list --region={REGION}, then gcloud ai custom-jobs stream-logs JOB")
    print(f"stop     gcloud ai custom-jobs cancel JOB --region={REGION}")
    return 0


def cancel_command(resource: str) -> list[str]:
    """
    >>> " ".join(cancel_command("projects/1/locations/us-central1/customJobs/2"))
    'gcloud ai custom-jobs cancel projects/1/locations/us-central1/customJobs/2 --region=us-central1'
    """
    return ["gcloud", "ai", "custom-jobs", "cancel", resource, f"--region={REGION}"]


def _check_free(title: str) -> None:
    """That no earlier launch of the same name and folder, as this machine's records have them, is going on."""
    from xmanager.cloud import vertex
    from xmanager.xm_local.storage import database

    records = database.database()
    earlier = [records.get_experiment(number) for number in records.list_experiment_ids()]
    for experiment in (e for e in earlier if e.experiment_title == title):
        resources = [job.caip.resource_name for unit in experiment.work_units for job in unit.jobs.values()]
        going_on = [r for r in resources if r and vertex.VertexHandle(r).get_status().is_active]
        if going_on:
            raise ConfigError(
                f"this is launched already, XManager experiment {experiment.experiment_id}, and is going on. To follow it: "
                f"gcloud ai custom-jobs stream-logs {going_on[0]}"
            )


def _resources(experiment: int, work_unit: int) -> list[str]:
    """Vertex's name of a work unit's job; none where it has not been created."""
    from xmanager.xm_local.storage import database

    return list(database.database().get_work_unit(experiment, work_unit).jobs)


def _wait(launched: asyncio.Future) -> None:
    """The future belongs to XManager's own thread, which Ctrl-C does not stop: its answer is waited for even then."""
    try:
        _until_done(launched)
    except KeyboardInterrupt as e:
        with contextlib.suppress(KeyboardInterrupt):  # once more: it is only named
            _until_done(launched, seconds=_PATIENCE)
        if not launched.done():
            e.add_note(f"perhaps there is one more custom job: gcloud ai custom-jobs list --region={REGION}")
        raise
    launched.result()


def _until_done(launched: asyncio.Future, seconds: float = float("inf")) -> None:
    end = time.monotonic() + seconds
    while not launched.done() and time.monotonic() < end:
        time.sleep(0.05)
