"""Runs of a sweep as processes of their own, `python -m perex_t5x.train`, so many at once.

Each resumes from its own checkpoint. What it prints is in its folder's log.txt. The processes end with this one, however it
ends.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from perex_t5x.errors import Reason
from perex_t5x.experiments.sweep import directory as folders
from perex_t5x.experiments.sweep.overview import Overview
from perex_t5x.experiments.sweep.runs import FAILED, STOPPED, Result, Run

_DIVERGED = re.compile(r"the loss of step (\d+) is (\S+):|the parameters after step (\d+) are not finite")
_PROGRESS = re.compile(r"^step (\d+)/\d+ .*?loss (\S+)", re.MULTILINE)
# Has the kernel kill the process when the sweep dies, however it dies, then becomes the training. Not a `preexec_fn`: this
# process has threads, and a fork of it that runs Python may hang.
DIES_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
_PERIOD = 0.2  # seconds between looks


class Child:
    """A run's process."""

    def __init__(self, run: Run, root: str, environment: dict[str, str]):
        self.run, self.folder = run, run.folder(root)
        self._begun = time.monotonic()
        os.makedirs(self.folder, exist_ok=True)
        self.log = os.path.join(self.folder, "log.txt")
        with open(self.log, "ab") as log:
            self._start = log.tell()
            self.process = self.start(run.command(root), environment, log)

    def start(self, command: list[str], environment: dict[str, str], log: BinaryIO) -> Any:
        """Anything with `poll()`, `returncode` and `send_signal()`, as of `subprocess.Popen`."""
        return subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", DIES_WITH_PARENT, str(os.getpid()), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which passes it on
        )

    def said(self, most: int = 20_000) -> str:
        """The end of what it has printed since it was started."""
        with open(self.log, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._start, end - most))
            return log.read().decode(errors="replace")

    def progress(self) -> tuple[int, float | None] | None:
        found = _PROGRESS.findall(self.said(4_000))
        if not found:
            return None
        step, loss = found[-1]
        try:
            return int(step), float(loss)
        except ValueError:
            return int(step), None

    def result(self) -> Result:
        """After its end."""
        status, seconds = self.process.returncode, time.monotonic() - self._begun
        if status == 0:
            return folders.result_of_metrics(self.run, self.folder, seconds)
        if was_stopped(status):
            return Result(self.run.name, STOPPED, seconds=seconds, values=self.run.values)
        said = self.said()
        if (why := diverged(status, said)) is not None:
            return folders.result_of_metrics(self.run, self.folder, seconds, FAILED, why)
        return Result(
            self.run.name, FAILED, seconds=seconds, error=reason(status, said, self.log), values=self.run.values
        )


def was_stopped(status: int) -> bool:
    """Whether a process ended because it was asked to; one that is still starting does not hear it, and just ends.

    >>> was_stopped(130), was_stopped(-signal.SIGTERM), was_stopped(-signal.SIGKILL), was_stopped(1)
    (True, True, False, False)
    """
    return status in (Reason.INTERRUPTED.exit_code, -signal.SIGTERM, -signal.SIGINT)


def diverged(status: int, said: str) -> str | None:
    """That a training diverged, from its exit status and what it printed; None if it did not.

    >>> diverged(1, "ERROR: the loss of step 7 is nan: ...")
    'diverged at step 7: the loss is nan'
    """
    found = _DIVERGED.search(said) if status == Reason.ERROR.exit_code else None
    if found is None:
        return None
    step, loss, after = found.groups()
    return f"diverged at step {step or after}: " + (f"the loss is {loss}" if step else "the parameters are not finite")


def reason(status: int, said: str, log: str) -> str:
    """Why a process failed: its own words, if it had any."""
    if "\nERROR: " in said:
        words = said.rpartition("\nERROR: ")[2].strip().splitlines()
    else:
        words = [line for line in said.strip().splitlines() if line.strip()][-1:]
    ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"ended with {ended}: {words[0] if words else 'it said nothing'} (see {log})"


def run_all(
    runs: Sequence[Run],
    root: str,
    overview: Overview,
    finished: Callable[[Run, Result], None],
    parallel: int,
    stop: threading.Event,
    child: Callable[[Run, str, dict[str, str]], Child] = Child,
) -> None:
    """Runs all; `finished` is told of each end. Where `stop` is set, the processes save and end, and no more are started."""
    environment = _environment(root)
    waiting, children, told = list(runs), [], False
    try:
        while waiting or children:
            if stop.is_set():
                waiting = []
                if not told:
                    _signal(children, signal.SIGTERM)
                    told = True
            while waiting and len(children) < parallel:
                run = waiting.pop(0)
                overview.started(run.name)
                children.append(child(run, root, environment))
            for ended in [c for c in children if c.process.poll() is not None]:
                children.remove(ended)
                finished(ended.run, ended.result())
            for going in children:
                if (made := going.progress()) is not None:
                    overview.progress(going.run.name, *made)
            time.sleep(_PERIOD)
    finally:
        _signal(children, signal.SIGKILL)


def _environment(root: str) -> dict[str, str]:
    return {
        "JAX_COMPILATION_CACHE_DIR": os.path.join(root, ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        **os.environ,
        "PEREX_T5X_PROGRESS_SECONDS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _signal(children: Sequence[Any], number: int) -> None:
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(number)
