"""Runs of a sweep as processes of their own, `python -m perex_t5x.train`, several at once.

Each resumes from its own checkpoint. In its folder, log.txt has what it prints, metrics.jsonl how far it is, status.json how
it ended. The processes end with this one, however it ends.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from perex_t5x.cli import status as status_lib
from perex_t5x.cli import subprocesses
from perex_t5x.cli.status import Status
from perex_t5x.errors import Reason
from perex_t5x.experiments.sweep import directory
from perex_t5x.experiments.sweep.overview import Overview
from perex_t5x.experiments.sweep.runs import FAILED, STOPPED, Result, Run
from perex_t5x.metrics import loss_of

_PERIOD = 0.2  # seconds between looks


class RunProcess:
    """A run's process."""

    def __init__(self, run: Run, root: str, environment: dict[str, str]):
        self.run, self.folder = run, run.folder(root)
        self._begun = time.monotonic()
        os.makedirs(self.folder, exist_ok=True)
        self.log = os.path.join(self.folder, "log.txt")
        self.status_file = os.path.join(self.folder, status_lib.FILE)
        self.process = self.start(run.command(root), environment)

    def start(self, command: list[str], environment: dict[str, str]) -> Any:
        """Anything with `poll()`, `returncode`, `send_signal()` and `status()`, as of `subprocesses.Child`."""
        return subprocesses.Child(command, env=environment, log=self.log, status_file=self.status_file)

    def progress(self) -> tuple[int, float | None] | None:
        """(step, loss) of the last log line; None before the first."""
        for line in reversed(subprocesses.read_tail(os.path.join(self.folder, "metrics.jsonl"), 20_000).splitlines()):
            try:
                row = json.loads(line)
                if row["name"] == "train" and (loss := loss_of(row)) is not None:
                    return row["step"], loss
            except (ValueError, KeyError, TypeError):
                continue  # half of a line
        return None

    def result(self) -> Result:
        """After its end."""
        status, seconds = self.process.status(), time.monotonic() - self._begun
        if status.reason is Reason.DONE:
            return directory.result_of_metrics(self.run, self.folder, seconds)
        if was_stopped(status):
            return Result(self.run.name, STOPPED, seconds=seconds, values=self.run.values)
        if status.reason is Reason.DIVERGED:
            return directory.result_of_metrics(self.run, self.folder, seconds, FAILED, divergence(status))
        error = failure(status, self.log)
        return Result(self.run.name, FAILED, seconds=seconds, error=error, values=self.run.values)


def was_stopped(status: Status) -> bool:
    """Whether a process ended because it was asked to; one that is only just starting may not hear it, and just ends.

    >>> [was_stopped(status_lib.of_process(code)) for code in (130, -signal.SIGTERM, -signal.SIGKILL, 1)]
    [True, True, False, False]
    """
    asked = (128 + signal.SIGTERM, 128 + signal.SIGINT)
    return status.reason is Reason.INTERRUPTED or (status.reason is Reason.KILLED and status.exit_code in asked)


def divergence(status: Status) -> str:
    """
    >>> divergence(Status(Reason.DIVERGED, 5, "the loss of ...", "the loss is nan", 7))
    'diverged at step 7: the loss is nan'
    """
    where = "" if status.step is None else f" at step {status.step}"
    return f"diverged{where}: {status.finding or status.message}"


def failure(status: Status, log: str) -> str:
    """Why a process failed: its own words, if it had any.

    >>> failure(status_lib.of_process(-9), "log.txt")
    'killed by SIGKILL (see log.txt)'
    """
    words = status.message.strip().splitlines()
    return f"{status.ended}{f': {words[0]}' if words else ''} (see {log})"


def run_all(
    runs: Sequence[Run],
    root: str,
    overview: Overview,
    finished: Callable[[Run, Result], None],
    parallel: int,
    stop: threading.Event,
    child: Callable[[Run, str, dict[str, str]], RunProcess] = RunProcess,
) -> None:
    """Runs all; `finished` is told of each end. Where `stop` is set, the processes save and end, and no more are started."""
    environment = _environment(root)
    waiting, children, told = list(runs), [], False
    try:
        while waiting or children:
            if stop.is_set():
                waiting = []
                if not told:
                    subprocesses.signal_all((c.process for c in children), signal.SIGTERM)
                    told = True
            while waiting and len(children) < parallel:
                run = waiting.pop(0)
                overview.started(run.name)
                children.append(child(run, root, environment))
            for ended in [c for c in children if c.process.poll() is not None]:
                children.remove(ended)
                finished(ended.run, ended.result())
            for running in children:
                if (made := running.progress()) is not None:
                    overview.progress(running.run.name, *made)
            time.sleep(_PERIOD)
    finally:
        subprocesses.signal_all((c.process for c in children), signal.SIGKILL)


def _environment(root: str) -> dict[str, str]:
    return {
        "JAX_COMPILATION_CACHE_DIR": os.path.join(root, ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        **os.environ,
        "PYTHONUNBUFFERED": "1",
    }
