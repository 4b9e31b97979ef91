"""Runs the unfinished runs of a plan in a folder, `Sweep(...).plan(...).run(folder)`: as processes, or in this one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from perex_t5x import buckets
from perex_t5x.cli import status as status_lib
from perex_t5x.cli import subprocesses
from perex_t5x.cli.status import Status
from perex_t5x.errors import ConfigError, Reason
from perex_t5x.experiments.sweep.directory import Folder, result_of_metrics
from perex_t5x.experiments.sweep.overview import Overview
from perex_t5x.experiments.sweep.runs import FAILED, STOPPED, WAITING, Result, Run, absolute
from perex_t5x.files import as_path, is_remote
from perex_t5x.metrics import loss_of, newest_text

if TYPE_CHECKING:
    from perex_t5x.experiments.sweep.plan import Plan


def run(
    plan: Plan,
    folder: str,
    *,
    together: bool = False,
    parallel: int | None = None,
    only: str | None = None,
    overview: Any = None,
    programs: dict[str, Any] | None = None,
    child: Any = None,
) -> list[Result]:
    """Runs what is not finished, and returns the results of all of the plan's runs, in its order.

    Args:
      plan: of `Sweep.plan`.
      folder: where the sweep is, or will be. Finished runs in it are left as they are.
      together: in this process, with one compiled step for runs that differ in rate and seed only; else each run is a
        process of its own.
      parallel: how many runs at once; None: one, or `together` as many as there are cores.
      only: a regular expression; runs whose names do not match are left for later.
      overview: a stream for the live overview; None: stderr.
      programs: a dictionary that keeps what `together` compiles, for a later call in this process.
      child: what starts a run, in place of `RunProcess`, such as a work unit of XManager.

    Raises:
      ConfigError: the folder holds another sweep, or one that is running.
      KeyboardInterrupt: after Ctrl-C, once the runs have stopped.
    """
    folder = absolute(folder)
    chosen = chosen_runs(plan.runs, only)
    parallel = _checked_parallel(parallel, together)
    directory = Folder(folder)
    if problems := directory.check(plan):
        raise ConfigError("\n".join(problems))
    stop = threading.Event()
    with directory.locked(on_lost=stop.set):
        described = directory.write_description(plan)
        results = directory.results([r.name for r in plan.runs])
        directory.write_results(described, results)
        first_of = first_of_twins(chosen, results)
        unfinished = [r for r in chosen if r.name not in results]
        todo = [r for r in unfinished if first_of[r.name] is r]
        if len(chosen) > len(unfinished):
            logging.info("%d of %d runs are finished already", len(chosen) - len(unfinished), len(chosen))
        writing = threading.Lock()

        def finished(run: Run, result: Result) -> None:
            with writing:
                if result.final:
                    directory.write_result(run, result)
                results[run.name] = result
                copied = copy_twins(run) if result.final else []
                directory.write_results(described, results)
            for ended in (result, *copied):
                show.finished(ended)

        def copy_twins(run: Run) -> list[Result]:
            waiting = [r for r in unfinished if first_of[r.name] is run and r is not run]
            for twin in waiting:
                results[twin.name] = copy_twin(directory, run, twin, results[run.name])
                directory.write_result(twin, results[twin.name])
            return [results[twin.name] for twin in waiting]

        for ended in [r for r in chosen if r.name in results]:
            copy_twins(ended)
        directory.write_results(described, results)
        with Overview(chosen, results, stream=overview) as show, asking_to_stop(stop):
            if together:
                from perex_t5x.experiments.sweep import in_process

                _use_compilation_cache(folder)
                in_process.run_all(todo, folder, show, finished, parallel, stop, programs)
            else:
                run_all(todo, folder, show, finished, parallel, stop, child or RunProcess)
        if stop.is_set():
            done = sum(r.name in results and results[r.name].final for r in plan.runs)
            raise KeyboardInterrupt(
                f"Stopped: {done} of {len(plan.runs)} runs are finished. The same command resumes the others."
            )
    return [results.get(r.name) or Result(r.name, WAITING, values=r.values) for r in plan.runs]


def _use_compilation_cache(folder: str) -> None:
    import jax

    # Programs for several fake devices, read back from it, may crash: their collectives get mixed up.
    is_fake = jax.default_backend() == "cpu" and jax.device_count() > 1
    if jax.config.values["jax_compilation_cache_dir"] is None and not is_fake:
        jax.config.update("jax_compilation_cache_dir", os.path.join(folder, ".jax_cache"))


def chosen_runs(runs: Sequence[Run], only: str | None) -> list[Run]:
    if only is None:
        return list(runs)
    try:
        pattern = re.compile(only)
    except re.error as e:
        raise ConfigError(f"--only={only!r} is not a regular expression: {e}.") from None
    chosen = [run for run in runs if pattern.search(run.name)]
    if not chosen:
        raise ConfigError(f"--only={only!r} matches none of the {len(runs)} runs' names, such as {runs[0].name}.")
    return chosen


def _checked_parallel(parallel: int | None, together: bool) -> int:
    if parallel is None:
        return len(os.sched_getaffinity(0)) if together else 1
    if not isinstance(parallel, int) or parallel < 1:
        raise ConfigError(f"--parallel={parallel!r}: must be at least 1.")
    return parallel


@contextlib.contextmanager
def asking_to_stop(stop: threading.Event) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks the runs to stop, the second ends at once: finished results are already written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: Any) -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()
        # Not through the log, which is quiet while runs share this process.
        print("asked to stop: the runs save and stop (a second signal stops at once)", file=sys.stderr, flush=True)

    former = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


# --- twins: runs with the same configuration --------------------------------------------------------------------------


def first_of_twins(runs: Sequence[Run], finished: Mapping[str, Result]) -> dict[str, Run]:
    """Name -> the run that stands for it: the first with its configuration, or one that is finished.

    Twins are runs of one sweep with the same configuration, such as those at the base batch size under several rules: one of
    them is run, the others are copies of it.
    """
    first: dict[tuple[tuple[str, ...], tuple[str, ...]], Run] = {}
    for run in sorted(runs, key=lambda r: r.name not in finished):  # stable: finished ones first, else in order
        first.setdefault((run.files, run.bindings), run)
    return {run.name: first[run.files, run.bindings] for run in runs}


def copy_twin(directory: Folder, first: Run, twin: Run, result: Result) -> Result:
    """Copies what `first` has written, except checkpoints, into the twin's folder; returns its result."""
    source, target = directory.path("runs", first.name), directory.path("runs", twin.name)
    if is_remote(target):
        buckets.copy_folder(source, target, leave_out=r"checkpoint_|result\.json|goodput/")
    else:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("checkpoint_*", "result.json*", "goodput"))
    config = as_path(os.path.join(target, "config.gin"))
    if config.exists():
        config.write_text(config.read_text(encoding="utf-8").replace(repr(source), repr(target)), encoding="utf-8")
    return dataclasses.replace(result, name=twin.name, values=dict(twin.values), seconds=0.0)


# --- runs as processes of their own, `python -m perex_t5x.train`, several at once -------------------------------------
#
# Each resumes from its own checkpoint. In its folder, log.txt has what it prints, metrics.jsonl how far it is, status.json
# how it ended. The processes end with this one, however it ends.


_PERIOD = 0.2  # seconds between looks
_REMOTE_PERIOD = 10.0  # seconds between looks into a run's folder in an object store


class RunProcess:
    """A run's process."""

    def __init__(self, run: Run, root: str, environment: dict[str, str]):
        self.run, self.folder = run, run.folder(root)
        self._begun = time.monotonic()
        self._looked, self._made = -math.inf, None
        # A process writes its log into a file of this machine; in a bucket the log is put beside the rest at the end.
        here = tempfile.mkdtemp(prefix="perex_t5x_sweep_") if is_remote(self.folder) else self.folder
        os.makedirs(here, exist_ok=True)
        self._here, self.log = here, os.path.join(here, "log.txt")
        self.status_file = os.path.join(here, status_lib.FILE)
        self.process = self.start(run.command(root), environment)

    def start(self, command: list[str], environment: dict[str, str]) -> Any:
        """Anything with `poll()`, `returncode`, `send_signal()` and `status()`, as of `subprocesses.Child`."""
        return subprocesses.Child(command, env=environment, log=self.log, status_file=self.status_file)

    def progress(self) -> tuple[int, float | None] | None:
        """(step, loss) of the last log line; None before the first."""
        if not is_remote(self.folder):
            return self._newest()
        if time.monotonic() - self._looked > _REMOTE_PERIOD:
            self._looked, self._made = time.monotonic(), self._newest()
        return self._made

    def _newest(self) -> tuple[int, float | None] | None:
        for line in reversed(newest_text(self.folder).splitlines()):
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
        if is_remote(self.folder):
            self._upload_log()
        if status.reason is Reason.DONE:
            return result_of_metrics(self.run, self.folder, seconds)
        if was_stopped(status):
            return Result(self.run.name, STOPPED, seconds=seconds, values=self.run.values)
        if status.reason is Reason.DIVERGED:
            return result_of_metrics(self.run, self.folder, seconds, FAILED, divergence(status))
        error = failure(status, self.log)
        return Result(self.run.name, FAILED, seconds=seconds, error=error, values=self.run.values)

    def _upload_log(self) -> None:
        target = os.path.join(self.folder, "log.txt")
        try:
            as_path(target).write_bytes(as_path(self.log).read_bytes())
        except Exception as e:  # a log is not worth a run
            logging.warning("%s could not be written: %s. It stays in %s", target, e, self.log)
            return
        shutil.rmtree(self._here, ignore_errors=True)
        self.log = target


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
