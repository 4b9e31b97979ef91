"""--executor=local: every run a work unit of XManager on this machine, results as `perex_t5x.experiments.sweep` has them."""

from __future__ import annotations

import collections
import csv
import dataclasses
import os
import shlex
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any, TextIO

from perex_t5x.cli import prompts, subprocesses
from perex_t5x.errors import ConfigError, Reason, TrainingError
from perex_t5x.experiments.sweep import command, execute, processes
from perex_t5x.experiments.sweep.directory import Folder, InUseError, result_of_metrics
from perex_t5x.experiments.sweep.overview import Overview
from perex_t5x.experiments.sweep.plan import Plan
from perex_t5x.experiments.sweep.runs import DONE, STOPPED, Result, Run, absolute
from perex_t5x.launching import spec
from perex_t5x.launching.xm.experiment import Experiment

_PERIOD = float(os.environ.get("PEREX_T5X_PROGRESS_SECONDS", "5"))
_FIRST_LINES = 10  # of a log that is followed


def launch(args: Any) -> int:
    """Runs the sweep, or the one run, to its end; returns the status of the command."""
    _check_flags(args)
    if not args.sweep:
        return launch_single(args)

    def run_plan(plan: Plan, folder: str) -> list[Result]:
        record = os.path.join(absolute(folder), "xmanager.json")
        try:
            with Experiment(args.name or plan.sweep.name, record) as experiment:
                return plan.run(folder, parallel=args.parallel, only=args.only, child=experiment.child)
        except InUseError as e:
            return follow_instead(plan, absolute(folder), e, args.follow)

    return command.carry_out(args, run_plan)


def _check_flags(args: Any) -> None:
    slips = []
    if args.dir and "://" in args.dir:
        slips.append(f"--dir={args.dir}: --executor=local writes to a folder of this machine.")
    for name in ("topology", "slices", "spot", "reservation", "zone", "image"):
        if getattr(args, name):
            slips.append(f"--{name} is not for --executor=local, which runs on what this machine has.")
    if args.parallel is not None and args.parallel < 1:
        slips.append(f"--parallel={args.parallel}: must be at least 1.")
    if args.parallel is not None and not args.sweep:
        slips.append("--parallel is for a sweep: give --sweep, too.")
    if args.xm_use_multiplexer or args.xm_open_multiplexer_window:
        slips.append(
            "--xm_use_multiplexer: the runs write their output to log.txt in their folders, not to a terminal. "
            "Look at one with tail -f."
        )
    if slips:
        raise ConfigError("\n".join(slips))


@dataclass(frozen=True)
class SingleRun(Run):
    """A run whose Gin files say where it writes."""

    model_dir: str = ""
    module: str = "perex_t5x.train"

    def folder(self, root: str) -> str:
        return self.model_dir

    def command(self, root: str, python: str | None = None) -> list[str]:
        paths = [f"--gin_search_paths={','.join(self.search_paths)}"] if self.search_paths else []
        files = [f"--gin_file={name}" for name in self.files]
        bindings = [f"--gin_bindings={binding}" for binding in self.bindings]
        return [python or sys.executable, "-m", self.module, *paths, *files, *bindings, *self.flags]


def launch_single(args: Any) -> int:
    """Runs it; returns the status of a command."""
    run = from_flags(args)
    _check(run)
    if args.dry_run:
        print("dry run: the run is fine. Nothing was run.")
        return 0
    try:
        return _run(args, run)
    except InUseError as e:
        return _follow_single(run, e, args.follow)


def _run(args: Any, run: SingleRun) -> int:
    record = f"{run.model_dir}/xmanager.json"
    # The folder is held against a second launch.
    with Folder(run.model_dir).locked(), Experiment(args.name or run.name, record) as experiment:
        results: list[Result] = []
        stop = threading.Event()
        with Overview([run], {}) as show, execute.asking_to_stop(stop):

            def finished(_: Run, result: Result) -> None:
                results.append(result)
                show.finished(result)

            processes.run_all([run], run.model_dir, show, finished, 1, stop, experiment.child)
    return _told(run, results[0]) if results else Reason.INTERRUPTED.exit_code


def _follow_single(run: SingleRun, busy: InUseError, follow: bool) -> int:
    """What a run that is running already comes to, if that is wanted; else the slip, with the way to look."""
    words = f"MODEL_DIR = {run.model_dir!r}: this run is running already (process {busy.process})."
    if not _wants_to_follow(words, follow):
        raise ConfigError(
            f"{words} With --follow this command shows its log until it ends, as does "
            f"tail -f {shlex.quote(run.model_dir + '/log.txt')}. Or choose another folder."
        ) from None
    follow_log(run.model_dir)
    result = result_of_metrics(run, run.model_dir, seconds=0)
    if result.steps < run.train_steps:
        raise TrainingError(
            f"the run that was followed has ended after {result.steps} of {run.train_steps} steps. The same command goes on."
        )
    return _told(run, result)


def from_flags(args: Any) -> SingleRun:
    """What the flags describe; raises `ConfigError` for a slip in the Gin files."""
    import gin

    from perex_t5x.cli import gin_command

    if not args.gin_file:
        raise ConfigError("nothing to run: give --gin_file=runs/quickstart.gin, or --sweep=sweeps/learning_rate.gin.")
    for name in ("sweep_bindings", "only", "print_commands"):
        if getattr(args, name, None):
            raise ConfigError(f"--{name} is for a sweep: give --sweep, too.")
    bindings = [*args.gin_bindings, *([f"MODEL_DIR = {absolute(args.dir)!r}"] if args.dir else [])]
    gin_command.load_training(args)
    parsed = spec.parse(args, bindings)
    if (folder := parsed.folder) is None:
        raise ConfigError("the Gin files have no MODEL_DIR: give those of a run, and --gin.MODEL_DIR=FOLDER.")
    if "://" in folder:
        raise ConfigError(
            f"MODEL_DIR = {folder!r}: --executor=local keeps the run's log in that folder, which has to be on this machine."
        )
    gin.clear_config()
    folder = absolute(folder)
    return SingleRun(
        name=folder.rstrip("/").rpartition("/")[2],
        values={},
        files=tuple(args.gin_file),
        bindings=tuple(bindings),
        own_bindings=(),
        batch_size=parsed.batch_size,
        learning_rate=None,
        train_steps=parsed.train_steps,
        seed=0,
        examples=parsed.batch_size * parsed.train_steps,
        search_paths=tuple(args.gin_search_paths),
        flags=tuple(command.passed_on(args)),
        model_dir=folder,
        module=args.module,
    )


def _check(run: SingleRun) -> None:
    """What the command's own --dry_run finds."""
    checked = dataclasses.replace(run, flags=(*run.flags, "--dry_run")).command("")
    with tempfile.TemporaryDirectory() as scratch:
        child = subprocesses.Child(checked, log=f"{scratch}/log.txt", status_file=f"{scratch}/status.json")
        child.wait()
        if (status := child.status()).reason is not Reason.DONE:
            raise ConfigError(status.message)


def _told(run: SingleRun, result: Result) -> int:
    if result.status == STOPPED:
        print("Stopped, and saved. The same command goes on.", file=sys.stderr)
        return Reason.INTERRUPTED.exit_code
    if result.status != DONE:
        print(f"{run.name} failed: {result.error}", file=sys.stderr)
        return Reason.ERROR.exit_code
    loss = "" if result.eval_loss is None else f", validation loss {result.eval_loss:.4f}"
    print(f"\n{run.name}: {result.steps} steps{loss}\nlog      {run.model_dir}/log.txt")
    return 0


def follow_instead(plan: Plan, folder: str, busy: InUseError, follow: bool) -> list[Result]:
    """Follows the sweep if asked, by the flag or on the terminal; else the slip, with the ways to look."""
    if not _wants_to_follow(f"{folder}: this sweep is running already, in process {busy.process}.", follow):
        raise ConfigError(
            f"{busy} With --follow this command looks on until it ends; its results so far are in {folder}/results.csv."
        ) from None
    return follow_sweep(plan, folder)


def _wants_to_follow(words: str, follow: bool) -> bool:
    """Whether to follow: --follow, or the answer on a terminal."""
    return follow or (sys.stderr.isatty() and prompts.confirm(f"{words}\nFollow it?"))


def follow_sweep(plan: Plan, folder: str, stream: TextIO | None = None) -> list[Result]:
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


def follow_log(folder: str, stream: TextIO | None = None) -> None:
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
