"""--executor=local: runs are XManager work units on this machine, with the results of `perex_t5x.experiments.sweep`."""

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

from perex_t5x.cli import console, subprocesses
from perex_t5x.errors import ConfigError, Reason, TrainingError
from perex_t5x.experiments.sweep import command, execute
from perex_t5x.experiments.sweep.directory import Folder, InUseError, result_of_metrics
from perex_t5x.experiments.sweep.overview import Overview
from perex_t5x.experiments.sweep.plan import Plan
from perex_t5x.experiments.sweep.runs import DONE, STOPPED, Result, Run, absolute
from perex_t5x.files import is_remote
from perex_t5x.launching import spec
from perex_t5x.launching.xm.experiment import Experiment, modules

_PERIOD = float(os.environ.get("PEREX_T5X_PROGRESS_SECONDS", "5"))
_FIRST_LINES = 10  # of a log that is followed


def launch(args: Any) -> int:
    """Runs the sweep, or the single run, to its end; returns the exit code."""
    modules()  # fails without XManager, before anything is read
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
    problems = []
    if args.dir and is_remote(args.dir):
        problems.append(f"--dir={args.dir}: --executor=local writes to a folder of this machine.")
    for name in ("topology", "slices", "spot", "reservation", "zone", "image", "env", "libtpu_args", "secret"):
        if getattr(args, name):
            problems.append(f"--{name} does not apply to --executor=local, which uses this machine.")
    if args.parallel is not None and args.parallel < 1:
        problems.append(f"--parallel={args.parallel}: must be at least 1.")
    if args.parallel is not None and not args.sweep:
        problems.append("--parallel is only for sweeps: add --sweep.")
    if args.xm_use_multiplexer or args.xm_open_multiplexer_window:
        problems.append(
            "--xm_use_multiplexer: the runs write their output to log.txt in their folders, not to a terminal. "
            "Follow one with tail -f."
        )
    if problems:
        raise ConfigError("\n".join(problems))


@dataclass(frozen=True)
class SingleRun(Run):
    """A run whose Gin files say where it writes."""

    model_dir: str = ""
    module: str = "perex_t5x.train"

    def folder(self, root: str) -> str:
        return self.model_dir

    def command(self, root: str, python: str | None = None) -> list[str]:
        words = spec.arguments(self.module, self.search_paths, self.files, self.bindings, self.flags)
        return [python or sys.executable, *words]


def launch_single(args: Any) -> int:
    """Runs one run, without a sweep; returns the exit code."""
    run = from_flags(args)
    _check(run)
    if args.dry_run:
        print("dry run: the configuration is valid. Nothing was run.")
        return 0
    try:
        return _run(args, run)
    except InUseError as e:
        return _follow_single(run, e, args.follow)


def _run(args: Any, run: SingleRun) -> int:
    record = f"{run.model_dir}/xmanager.json"
    # The lock refuses a second launch.
    with Folder(run.model_dir).locked(), Experiment(args.name or run.name, record) as experiment:
        results: list[Result] = []
        stop = threading.Event()
        with Overview([run], {}) as show, execute.asking_to_stop(stop):

            def finished(_: Run, result: Result) -> None:
                results.append(result)
                show.finished(result)

            execute.run_all([run], run.model_dir, show, finished, 1, stop, experiment.child)
    return _report(run, results[0]) if results else Reason.INTERRUPTED.exit_code


def _follow_single(run: SingleRun, busy: InUseError, follow: bool) -> int:
    """Follows a run that is running already, if the user wants that; else raises `ConfigError`, which says how."""
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
            f"the followed run has ended after {result.steps} of {run.train_steps} steps. The same command resumes it."
        )
    return _report(run, result)


def from_flags(args: Any) -> SingleRun:
    """The run that the flags describe; raises `ConfigError` for errors in the Gin files."""
    import gin

    from perex_t5x.cli import gin_command

    if not args.gin_file:
        raise ConfigError("nothing to run: give --gin_file=runs/quickstart.gin, or --sweep=sweeps/learning_rate.gin.")
    gin_command.load_training(args)
    bindings, folder, batch_size, train_steps = spec.read_single(args, such_as="FOLDER")
    if is_remote(folder):
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
        batch_size=batch_size,
        learning_rate=None,
        train_steps=train_steps,
        seed=0,
        examples=batch_size * train_steps,
        search_paths=tuple(args.gin_search_paths),
        flags=tuple(command.passed_on(args)),
        model_dir=folder,
        module=args.module,
    )


def _check(run: SingleRun) -> None:
    """Raises `ConfigError` with what the command's own --dry_run reports."""
    checked = dataclasses.replace(run, flags=(*run.flags, "--dry_run")).command("")
    with tempfile.TemporaryDirectory() as scratch:
        child = subprocesses.Child(checked, log=f"{scratch}/log.txt", status_file=f"{scratch}/status.json")
        child.wait()
        if (status := child.status()).reason is not Reason.DONE:
            raise ConfigError(status.message)


def _report(run: SingleRun, result: Result) -> int:
    if result.status == STOPPED:
        print("Stopped and saved. The same command resumes it.", file=sys.stderr)
        return Reason.INTERRUPTED.exit_code
    if result.status != DONE:
        print(f"{run.name} failed: {result.error}", file=sys.stderr)
        return Reason.ERROR.exit_code
    loss = "" if result.eval_loss is None else f", validation loss {result.eval_loss:.4f}"
    print(f"\n{run.name}: {result.steps} steps{loss}\nlog      {run.model_dir}/log.txt")
    return 0


def follow_instead(plan: Plan, folder: str, busy: InUseError, follow: bool) -> list[Result]:
    """Follows a sweep that is running already, if the user wants that; else raises `ConfigError`, which says how."""
    if not _wants_to_follow(f"{folder}: this sweep is running already, in process {busy.process}.", follow):
        raise ConfigError(
            f"{busy} With --follow this command follows it until it ends; its results so far are in {folder}/results.csv."
        ) from None
    return follow_sweep(plan, folder)


def _wants_to_follow(words: str, follow: bool) -> bool:
    """Whether to follow: --follow, or the answer on a terminal."""
    return follow or (sys.stderr.isatty() and console.confirm(f"{words}\nFollow it?"))


def follow_sweep(plan: Plan, folder: str, stream: TextIO | None = None) -> list[Result]:
    """Prints how many runs are done whenever that changes; returns the results of all.

    Raises:
      TrainingError: it was stopped, or runs have failed, so that some are not finished.
      KeyboardInterrupt: after Ctrl-C. The sweep itself continues.
    """
    stream = stream or sys.stderr
    kept, shown = Folder(folder), ""
    try:
        while _running(kept):
            if (counts := _counts(kept)) != shown:
                print(counts, file=stream, flush=True)
                shown = counts
            time.sleep(_PERIOD)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("No longer following: the sweep continues.") from None
    results = [result for run in plan.runs if (result := kept.result(run)) is not None]
    if len(results) < len(plan.runs):
        raise TrainingError(
            f"the followed sweep has ended, and {len(results)} of {len(plan.runs)} runs are finished. The same command "
            "resumes the others."
        )
    return results


def follow_log(folder: str, stream: TextIO | None = None) -> None:
    """Prints what a run appends to its log.txt, starting with its last lines, until its folder is unlocked.

    Raises:
      KeyboardInterrupt: after Ctrl-C. The run itself continues.
    """
    stream = stream or sys.stdout
    kept, running = Folder(folder), True
    try:
        with open(kept.path("log.txt"), "a+", encoding="utf-8", errors="replace") as log:  # it may not exist yet
            log.seek(0)
            shown = "".join(log.readlines()[-_FIRST_LINES:])
            while running:
                running = _running(kept)  # before the log is read, so that its last lines are printed
                print(shown + log.read(), end="", file=stream, flush=True)
                shown = ""
                time.sleep(_PERIOD if running else 0)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("No longer following: the run continues.") from None


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
