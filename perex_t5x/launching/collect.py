"""Downloads a run's or a sweep's files from the bucket, without checkpoints, and writes what the report reads."""

from __future__ import annotations

import json
import os

from perex_t5x.errors import ConfigError
from perex_t5x.experiments.sweep import execute
from perex_t5x.experiments.sweep.directory import Folder, result_of_metrics
from perex_t5x.experiments.sweep.runs import DONE, FAILED, Result, Run
from perex_t5x.files import write_atomically
from perex_t5x.launching import names, shell
from perex_t5x.launching.launch_folder import HostError, LaunchFolder
from perex_t5x.launching.shell import Commands, say
from perex_t5x.launching.spec import Work
from perex_t5x.launching.worker import command_fingerprint, read_mark

_LEFT_OUT = r"(.*/)?((checkpoint_[^/]*|\.jax_cache)/.*|bundle[^/]*\.tar\.gz)$"


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


def collect(root: str, name: str, out: str, commands: Commands) -> Work | None:
    """Downloads everything, then writes a sweep's results; returns the work, None in a dry run."""
    root = names.check_bucket_path(root)
    if not commands.dry_run:
        os.makedirs(out, exist_ok=True)
    argv = ["gcloud", "storage", "rsync", "--recursive", f"--exclude={_LEFT_OUT}", root, out]
    done = commands.run(argv, check=False, retries=2)
    if done.returncode != 0:
        raise ConfigError(shell.refusal(f"{root} cannot be copied to {out}", done.said))
    if commands.dry_run:
        return None
    path = os.path.join(out, ".launch", name, "jobs.json")
    if not os.path.isfile(path):
        raise ConfigError(f"{root} holds no launch with the name {name!r}.")
    with open(path, encoding="utf-8") as f:
        work = Work.from_json(f.read())
    if work.sweep:
        write_results(work, out)
        say(f"collected: {out}\nreport: python -m perex_t5x.experiments.report {out}")
    else:
        say(f"collected: {out}")
    return work


def write_results(work: Work, out: str) -> dict[str, Result]:
    """sweep.json, results.csv and every finished run's result.json, as `perex_t5x.experiments.sweep` writes them."""
    kept = Folder(out)
    write_atomically(kept.path("sweep.json"), json.dumps(work.sweep, indent=1, ensure_ascii=False) + "\n")
    runs = {entry["name"]: _run(entry) for entry in work.sweep["runs"]}
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
    kept.write_results(work.sweep["runs"], results)
    return results


def _run(entry: dict) -> Run:
    """From sweep.json."""
    same = ("name", "values", "batch_size", "learning_rate", "train_steps", "seed", "examples")
    bindings = tuple(entry["bindings"])
    values = {key: entry[key] for key in same}
    return Run(**values, files=tuple(entry["files"]), bindings=bindings, own_bindings=bindings)
