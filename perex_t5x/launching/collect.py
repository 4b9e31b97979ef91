"""What a launch has left in the bucket: how far it is, its first error, and its files, downloaded without checkpoints.

All of it from any machine that can read the bucket: neither slices nor a cluster are asked.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from perex_t5x import goodput, metric_files
from perex_t5x.errors import ConfigError, Reason
from perex_t5x.experiments.sweep import execute
from perex_t5x.experiments.sweep.directory import Folder, result_of_metrics
from perex_t5x.experiments.sweep.runs import DONE, FAILED, Result, Run
from perex_t5x.files import write_atomically
from perex_t5x.launching import launch_folder, names, shell
from perex_t5x.launching.launch_folder import HostError, LaunchFolder
from perex_t5x.launching.shell import Commands, say
from perex_t5x.launching.spec import Work
from perex_t5x.launching.worker import command_fingerprint, read_mark, read_marks
from perex_t5x.metrics import loss_of

_LEFT_OUT = r"(.*/)?((checkpoint_[^/]*|\.jax_cache)/.*|bundle[^/]*\.tar\.gz)$"
_SILENT_SECONDS = 300  # host 0 reports every half a minute


def first_error(root: str, name: str, attempt: str | None = None) -> HostError | None:
    """The error of a launch that came first, of all hosts; None if no host has reported one.

    An error that reports the end of another process comes after those that do not, since hosts' clocks differ a little.

    Args:
      root: the folder of the sweep or the run.
      name: of the launch.
      attempt: one start of the hosts; None: the newest in which a job failed.

    `str()` of it is 'host 37 (slice 0), 12:03:11.201, RUN: error (exit code 1): ValueError: ...'; its `traceback` has
    the rest. Launchers show it before they delete a slice.
    """
    folder = LaunchFolder.of(root, name)
    for one in [attempt] if attempt else reversed(folder.attempts()):
        if errors := folder.errors(one):
            return errors[0]
    return None


@dataclass(frozen=True)
class LaunchStatus:
    """A launch as its folder in the bucket shows it.

    Attributes:
      phase: of the worker on host 0: 'starting', 'running' or 'ended'; '' before it has reported.
      job, step: what it runs, and the last step that it made.
      time: of that report, UTC; '' as `phase`.
      attempt: the start of the hosts that reported.
      reason: why the worker ended; None while it runs.
      jobs: names of all.
      done: names of those that are done.
      failed: name -> error, of those that have failed for good.
      checkpoint: the step of the newest whole checkpoint of `job`; None without one.
      metrics: the last line of the training's metrics of `job`.
      attempts: how often `job` was started in this launch.
      first_error: see `first_error`.
      goodput: of `job`, in words; '' if it is not known.
    """

    name: str
    phase: str
    job: str
    step: int | None
    time: str
    attempt: str
    reason: Reason | None
    jobs: tuple[str, ...]
    done: tuple[str, ...]
    failed: Mapping[str, str]
    checkpoint: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    attempts: int = 0
    first_error: HostError | None = None
    goodput: str = ""

    @property
    def ended(self) -> bool:
        """Whether nobody will restart it."""
        return self.reason is not None and (self.reason is Reason.DONE or self.reason.final)

    @property
    def silent_seconds(self) -> float:
        """How long ago host 0 has reported; 0 if it has ended, or has not begun."""
        if not self.time or self.phase == "ended":
            return 0.0
        then = datetime.datetime.fromisoformat(self.time)
        return max(0.0, (datetime.datetime.now(datetime.UTC) - then).total_seconds())

    def lines(self) -> list[str]:
        """In words."""
        if not self.phase:
            return [f"{self.name}: no host has begun yet"]
        words = f"ended ({self.reason})" if self.phase == "ended" else self.phase
        if self.phase != "ended" and self.job:
            words += f" {self.job}" + ("" if self.step is None else f", step {self.step}")
        shown = [f"{self.name}: {words}, as of {self.time[:19].replace('T', ' ')} UTC"]
        if self.silent_seconds > _SILENT_SECONDS:
            shown.append(f"  silent for {self.silent_seconds / 60:.0f} minutes: its hosts are gone, or starting again")
        shown.append(f"  {len(self.done)} of {len(self.jobs)} jobs done, {len(self.failed)} failed")
        shown += [f"  failed: {name}: {error}" for name, error in self.failed.items()]
        if self.job:
            saved = "no checkpoint yet" if self.checkpoint is None else f"newest checkpoint at step {self.checkpoint}"
            shown.append(f"  {self.job}: {saved}, started {self.attempts} time(s)")
        loss = loss_of(self.metrics) if self.metrics else None
        if loss is not None:
            shown.append(f"  {self.job}: loss {loss:.4g} at step {self.metrics.get('step')}")
        shown += [f"  {self.job}: {self.goodput}"] if self.goodput else []
        shown += [f"  first error of the newest attempt that failed: {self.first_error}"] if self.first_error else []
        return shown


def status(root: str, name: str) -> LaunchStatus:
    """A launch's status from the bucket alone.

    Raises:
      ConfigError: the folder holds no launch of this name.
    """
    folder = LaunchFolder.of(root, name)
    work, state = read_work(root, name), folder.read(launch_folder.STATE) or {}
    marks = read_marks(work.jobs, work.launch_id)
    reason = state.get("reason") if state.get("phase") == "ended" else None
    job = next((job for job in work.jobs if job.name == state.get("job")), None)
    of_job: dict[str, Any] = {}
    if job is not None:
        rows = [row for row in metric_files.read_rows(job.model_dir) if row.get("name") == "train"]
        of_job = {
            "checkpoint": launch_folder.newest_step(job.model_dir),
            "metrics": rows[-1] if rows else {},
            "attempts": len(folder.read_attempts(job.name, work.launch_id)),
            "goodput": goodput.summary(job.model_dir),
        }
    return LaunchStatus(
        name=name,
        phase=state.get("phase", ""),
        job=state.get("job", ""),
        step=state.get("step"),
        time=state.get("time", ""),
        attempt=state.get("attempt", ""),
        reason=Reason(reason) if reason in list(Reason) else None,
        jobs=tuple(job.name for job in work.jobs),
        done=tuple(name for name, mark in marks.items() if mark["status"] == "done"),
        failed={name: mark.get("error", "") for name, mark in marks.items() if mark["status"] != "done"},
        first_error=first_error(root, name),
        **of_job,
    )


def read_work(root: str, name: str) -> Work:
    """What a launch runs, from its folder in the bucket."""
    content = LaunchFolder.of(root, name).read("jobs.json")
    if content is None:
        others = LaunchFolder(f"{root.rstrip('/')}/.launch").entries()
        known = f" It has {', '.join(others)}." if others else ""
        raise ConfigError(f"{root} holds no launch with the name {name!r}.{known}")
    return Work.from_json(json.dumps(content))


def _download(root: str, out: str) -> None:
    """What `gcloud storage rsync` does, on a machine without gcloud."""
    from perex_t5x import buckets

    buckets.check(root, "--dir", writes=False)
    bucket, prefix = buckets.split(root)
    wanted = []
    for blob in buckets.client().list_blobs(bucket, prefix=f"{prefix}/" if prefix else ""):
        path = blob.name.removeprefix(f"{prefix}/")
        target = os.path.normpath(os.path.join(out, path))
        inside = os.path.abspath(target).startswith(os.path.abspath(out) + os.sep)
        if path.endswith("/") or not inside or re.fullmatch(_LEFT_OUT, path):
            continue
        if not os.path.isfile(target) or _md5(target) != blob.md5_hash:
            wanted.append((blob, target))
    for folder in {os.path.dirname(target) for _, target in wanted}:
        os.makedirs(folder, exist_ok=True)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda each: each[0].download_to_filename(each[1]), wanted))


def _md5(path: str) -> str:
    with open(path, "rb") as f:
        return base64.b64encode(hashlib.file_digest(f, "md5").digest()).decode()


def collect(root: str, name: str, out: str, commands: Commands) -> Work | None:
    """Downloads everything, then writes a sweep's results; returns the work, None in a dry run.

    Metrics, logs of all hosts, configurations, profiles and HLO; not checkpoints, compiled programs and bundles. Without
    gcloud on this machine, by Cloud Storage's Python client.
    """
    root = names.check_bucket_path(root)
    if not commands.dry_run:
        os.makedirs(out, exist_ok=True)
    if commands.dry_run or shutil.which("gcloud") is not None:
        argv = ["gcloud", "storage", "rsync", "--recursive", f"--exclude={_LEFT_OUT}", root, out]
        done = commands.run(argv, check=False, retries=2)
        if done.returncode != 0:
            raise ConfigError(shell.refusal(f"{root} cannot be copied to {out}", done.said))
    else:
        _download(root, out)
    if commands.dry_run:
        return None
    path = os.path.join(out, ".launch", name, "jobs.json")
    if not os.path.isfile(path):
        raise ConfigError(f"{root} holds no launch with the name {name!r}.")
    with open(path, encoding="utf-8") as f:
        work = Work.from_json(f.read())
    if work.sweep:
        write_results(work, work.sweep, out)
        say(f"collected: {out}\nreport: python -m perex_t5x.experiments.report {out}")
    else:
        say(f"collected: {out}")
    return work


def write_results(work: Work, sweep: Mapping[str, Any], out: str) -> dict[str, Result]:
    """sweep.json, results.csv and every finished run's result.json, as `perex_t5x.experiments.sweep` writes them."""
    kept = Folder(out)
    write_atomically(kept.path("sweep.json"), json.dumps(sweep, indent=1, ensure_ascii=False) + "\n")
    runs = {entry["name"]: _run(entry) for entry in sweep["runs"]}
    results: dict[str, Result] = {}
    for job in work.jobs:
        folder = kept.path("runs", job.name)
        mark = read_mark(folder)
        if mark is None or mark.get("arguments") != command_fingerprint(job):
            continue
        status = DONE if mark["status"] == "done" else FAILED
        run = runs[job.name]
        results[job.name] = result_of_metrics(run, folder, mark.get("seconds", 0.0), status, mark.get("error", ""))
        kept.write_result(run, results[job.name])
    for name, first in work.twins.items():
        if first in results:
            results[name] = execute.copy_twin(kept, runs[first], runs[name], results[first])
            kept.write_result(runs[name], results[name])
    kept.write_results(sweep["runs"], results)
    return results


def _run(entry: dict) -> Run:
    """From sweep.json."""
    same = ("name", "values", "batch_size", "learning_rate", "train_steps", "seed", "examples")
    bindings = tuple(entry["bindings"])
    values = {key: entry[key] for key in same}
    return Run(**values, files=tuple(entry["files"]), bindings=bindings, own_bindings=bindings)
