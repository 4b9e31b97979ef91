"""A sweep or a run that is running already, launched again: looked at, until it ends."""

from __future__ import annotations

import collections
import csv
import os
import sys
import time
from typing import TextIO

from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.experiments.sweep.directory import Folder, InUseError
from perex_t5x.experiments.sweep.plan import Plan
from perex_t5x.experiments.sweep.runs import Result
from perex_t5x.launching.checks import answer

_PERIOD = float(os.environ.get("PEREX_T5X_PROGRESS_SECONDS", "5"))
_FIRST_LINES = 10  # of a log that is followed


def instead(plan: Plan, folder: str, busy: InUseError, follow: bool) -> list[Result]:
    """Follows the sweep if asked, by the flag or on the terminal; else the slip, with the ways to look."""
    if not wanted(f"{folder}: this sweep is running already, in process {busy.process}.", follow):
        raise ConfigError(
            f"{busy} With --follow this command looks on until it ends; its results so far are in {folder}/results.csv."
        ) from None
    return until_it_ends(plan, folder)


def wanted(words: str, follow: bool) -> bool:
    """Whether to follow: --follow, or the answer on a terminal."""
    if follow or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return follow
    print(f"{words}\nFollow it? [y/N] ", end="", file=sys.stderr, flush=True)
    return answer() in ("y", "yes")


def until_it_ends(plan: Plan, folder: str, stream: TextIO | None = None) -> list[Result]:
    """Says how many runs are done whenever that changes; returns the results of all.

    Raises:
      TrainingError: it was stopped, or runs have failed, so that some are not finished.
      KeyboardInterrupt: after Ctrl-C. The sweep itself goes on.
    """
    stream = stream or sys.stderr
    kept, said = Folder(folder), ""
    try:
        while _running(kept):
            if (counts := _counts(kept)) != said:
                print(counts, file=stream, flush=True)
                said = counts
            time.sleep(_PERIOD)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("No longer following: the sweep goes on.") from None
    found = [result for run in plan.runs if (result := kept.result(run)) is not None]
    if len(found) < len(plan.runs):
        raise TrainingError(
            f"the sweep that was followed has ended, and {len(found)} of {len(plan.runs)} runs are finished. The same "
            "command goes on with the others."
        )
    return found


def log_until_it_ends(folder: str, stream: TextIO | None = None) -> None:
    """Copies what a run adds to its log.txt, from its last lines on, until nobody holds its folder.

    Raises:
      KeyboardInterrupt: after Ctrl-C. The run itself goes on.
    """
    stream = stream or sys.stdout
    kept, running = Folder(folder), True
    try:
        with open(kept.path("log.txt"), "a+", encoding="utf-8", errors="replace") as log:  # it may not have begun
            log.seek(0)
            shown = "".join(log.readlines()[-_FIRST_LINES:])
            while running:
                running = _running(kept)  # before the log is read: what it said last is printed
                print(shown + log.read(), end="", file=stream, flush=True)
                shown = ""
                time.sleep(_PERIOD if running else 0)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("No longer following: the run goes on.") from None


def _running(kept: Folder) -> bool:
    try:
        with kept.locked():
            return False
    except InUseError:
        return True


def _counts(kept: Folder) -> str:
    """Of results.csv, which is written whenever a run ends."""
    try:
        with open(kept.path("results.csv"), encoding="utf-8", newline="") as f:
            count = collections.Counter(row["status"] for row in csv.DictReader(f))
    except OSError:
        return "no results yet"
    return ", ".join(f"{n} {status}" for status, n in count.items())
