"""One run, without a sweep, as a work unit of XManager on this machine."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

from perex_t5x import cli
from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.experiments.sweep import command, execute, processes
from perex_t5x.experiments.sweep.directory import Folder, InUseError, result_of_metrics
from perex_t5x.experiments.sweep.overview import Overview
from perex_t5x.experiments.sweep.runs import DONE, STOPPED, Result, Run, absolute
from perex_t5x.launching import spec
from perex_t5x.launching.xm import following
from perex_t5x.launching.xm.experiment import Experiment


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


def launch(args: Any) -> int:
    """Runs it; returns the status of a command."""
    run = from_flags(args)
    _check(run)
    if args.dry_run:
        print("dry run: the run is fine. Nothing was run.")
        return 0
    try:
        return _run(args, run)
    except InUseError as e:
        return _followed(run, e, args.follow)


def _run(args: Any, run: SingleRun) -> int:
    record = f"{run.model_dir}/xmanager.json"
    # The folder is held against a second launch.
    with Folder(run.model_dir).locked(), Experiment(args.name or run.name, record) as experiment:
        results: list[Result] = []
        stop = threading.Event()
        with Overview([run], {}) as show, execute._asking_to_stop(stop):

            def finished(_: Run, result: Result) -> None:
                results.append(result)
                show.finished(result)

            processes.run_all([run], run.model_dir, show, finished, 1, stop, experiment.child)
    return _told(run, results[0]) if results else cli.EXIT_INTERRUPTED


def _followed(run: SingleRun, busy: InUseError, follow: bool) -> int:
    """What a run that is running already comes to, if that is wanted; else the slip, with the way to look."""
    words = f"MODEL_DIR = {run.model_dir!r}: this run is running already (process {busy.process})."
    if not following.wanted(words, follow):
        raise ConfigError(
            f"{words} With --follow this command shows its log until it ends, as does "
            f"tail -f {shlex.quote(run.model_dir + '/log.txt')}. Or choose another folder."
        ) from None
    following.log_until_it_ends(run.model_dir)
    result = result_of_metrics(run, run.model_dir, seconds=0)
    if result.steps < run.train_steps:
        raise TrainingError(
            f"the run that was followed has ended after {result.steps} of {run.train_steps} steps. The same command goes on."
        )
    return _told(run, result)


def from_flags(args: Any) -> SingleRun:
    """What the flags describe; raises `ConfigError` for a slip in the Gin files."""
    import gin

    if not args.gin_file:
        raise ConfigError("nothing to run: give --gin_file=runs/quickstart.gin, or --sweep=sweeps/learning_rate.gin.")
    for name in ("sweep_bindings", "only", "print_commands"):
        if getattr(args, name, None):
            raise ConfigError(f"--{name} is for a sweep: give --sweep, too.")
    bindings = [*args.gin_bindings, *([f"MODEL_DIR = {absolute(args.dir)!r}"] if args.dir else [])]
    command.start(args)
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
    done = subprocess.run(checked, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise ConfigError(said(done.stderr))


def said(text: str) -> str:
    """A command's own words of its error.

    >>> said("noise\\nERROR: no such file\\n")
    'no such file'
    """
    if "\nERROR: " in text:
        return text.rpartition("\nERROR: ")[2].strip()
    return "\n".join(text.strip().splitlines()[-5:])


def _told(run: SingleRun, result: Result) -> int:
    if result.status == STOPPED:
        print("Stopped, and saved. The same command goes on.", file=sys.stderr)
        return cli.EXIT_INTERRUPTED
    if result.status != DONE:
        print(f"{run.name} failed: {result.error}", file=sys.stderr)
        return cli.EXIT_ERROR
    loss = "" if result.eval_loss is None else f", validation loss {result.eval_loss:.4f}"
    print(f"\n{run.name}: {result.steps} steps{loss}\nlog      {run.model_dir}/log.txt")
    return 0
