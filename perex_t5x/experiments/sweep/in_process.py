"""Runs of a sweep in this process: those that differ in nothing but learning rate and seed share compiled programs.

Each is a `perex_t5x.train.Training` on the same loop as a run by itself, and writes the same files. Several run at once,
each in a thread: the devices work while Python waits.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x import train as train_script
from perex_t5x.errors import ConfigError, DivergedError
from perex_t5x.experiments.sweep import plan
from perex_t5x.experiments.sweep.directory import result_of_metrics
from perex_t5x.experiments.sweep.overview import Overview
from perex_t5x.experiments.sweep.runs import FAILED, STOPPED, Result, Run

# Gin has one configuration at a time, and tracing reads it: an optimizer's arguments are bound when it is called.
_gin_lock = threading.Lock()


def train_arguments() -> dict[str, Any]:
    """The arguments of `perex_t5x.train.train` in the configuration that Gin holds, with its defaults."""
    signature = inspect.signature(train_script.train).parameters
    defaults = {n: p.default for n, p in signature.items() if p.default is not inspect.Parameter.empty}
    return {**defaults, **gin.get_bindings(train_script.train)}


def learning_rates(training: train_script.Training) -> np.ndarray:
    """The rate of every step of a run, as its own schedule gives it."""
    return np.asarray(jax.vmap(training.trainer.learning_rate_fn)(jnp.arange(training.last_step)), np.float32)


@dataclass(frozen=True)
class Shared:
    """What the runs of a group share."""

    setup: train_script.Setup
    programs: train_script.Programs


class _Group:
    """Runs with the same programs, which are compiled for the first of them and dropped after the last, unless kept."""

    def __init__(self, runs: Sequence[Run], kept: dict[str, Shared] | None):
        self.waiting, self.left = list(runs), len(runs)
        self._lock = threading.Lock()
        self._name, self._kept = runs[0].group, kept
        self._shared: Shared | None = (kept or {}).get(self._name)
        self.making = False

    @property
    def ready(self) -> bool:
        return self._shared is not None

    def prepare(self, run: Run, root: str) -> Callable[..., Any]:
        """`Training.run` of this run, with the compiled programs and what was read while Gin held its configuration."""
        with self._lock, contextlib.ExitStack() as if_it_fails:
            shared = self._shared
            self.making = shared is None
            with _gin_lock:
                plan.parse_configuration(run.files, run.bindings, run.search_paths, run.folder(root))
                arguments = train_arguments()
                _check(arguments)
                training = if_it_fails.enter_context(
                    train_script.Training(arguments, None if shared is None else shared.setup)
                )
                training.describe()
                feed, rates = training.make_feed(), learning_rates(training)
                compile_all = _lower(training) if shared is None else lambda: shared.programs
            programs = compile_all()
            if shared is None:
                self._shared, self.making = Shared(training.setup, programs), False
                if self._kept is not None:
                    self._kept[self._name] = self._shared
            if_it_fails.pop_all()  # from here on its folder is held until `run` ends
            return functools.partial(training.run, programs, feed, learning_rates=rates)

    def finished_one(self) -> None:
        self.left -= 1
        if not self.left:
            self._shared = None


def _check(arguments: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for what runs in one process cannot do."""
    for argument, what in (("infer_eval_dataset_cfg", "evaluate by decoding"), ("profile_steps", "write profiles")):
        if arguments[argument] is not None:
            raise ConfigError(f"--together does not {what} (train.{argument}): leave --together out.")
    if getattr(arguments["bad_numbers"], "then", "stop") != "stop":
        raise ConfigError("--together does not roll back (BadNumbers.then): leave --together out.")
    if arguments["dump_hlo"]:
        raise ConfigError("--together does not write HLO (train.dump_hlo): leave --together out.")
    if jax.process_count() > 1:
        raise ConfigError("--together is for one process: leave --together out.")


def _lower(training: train_script.Training) -> Callable[[], train_script.Programs]:
    """Traces everything, while Gin holds the configuration; what is returned compiles it, and needs Gin no more.

    Evaluation and monitor compile at once: they are short.
    """
    setup = training.setup
    parts = (setup.shapes, setup.shardings, setup.spec)
    with ThreadPoolExecutor(1) as compiler:
        evaluators = training.make_evaluators(compiler, keep_batches=True)
        monitor = compiler.submit(setup.trainer.compiled_monitor, *parts)
        step = setup.trainer.lowered_step(*parts, rate_is_argument=True)
        init = setup.init.lower(jax.eval_shape(lambda: jax.random.key(0)))

    def compile_all() -> train_script.Programs:
        with ThreadPoolExecutor(1) as compiler:
            compiled_step = compiler.submit(train_script.timed, step.compile)
            return train_script.Programs(init.compile(), compiled_step, monitor, evaluators)

    return compile_all


def run_all(
    runs: Sequence[Run],
    root: str,
    overview: Overview,
    finished: Callable[[Run, Result], None],
    parallel: int,
    stop: threading.Event,
    programs: dict[str, Shared] | None = None,
) -> None:
    """Runs all; `finished` is told of each end. Returns early where `stop` is set.

    Programs are taken from and put into `programs`, if it is given: for runs that come in several calls.
    """
    groups = list({run.group: None for run in runs})
    groups = [_Group([run for run in runs if run.group == name], programs) for name in groups]
    choosing = threading.Lock()

    def choose() -> tuple[_Group, Run] | None:
        """A run whose programs are there; else one whose programs nobody compiles yet; else any."""
        with choosing:
            open_groups = [g for g in groups if g.waiting]
            if not open_groups or stop.is_set():
                return None
            group = min(open_groups, key=lambda g: (not g.ready, g.making))
            group.making = not group.ready
            return group, group.waiting.pop(0)

    def work() -> None:
        while (chosen := choose()) is not None:
            group, run = chosen
            overview.started(run.name)
            result = _run_one(group, run, root, overview, stop)
            with choosing:
                group.finished_one()
            finished(run, result)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(parallel, len(runs)))]
    with plan.quiet_logging():
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            workers[0].join(0.1)  # short, so that Ctrl-C is heard
            workers = [worker for worker in workers if worker.is_alive()] or workers


def _run_one(group: _Group, run: Run, root: str, overview: Overview, stop: threading.Event) -> Result:
    begun = time.monotonic()
    where = run.folder(root)
    try:
        train = group.prepare(run, root)
        begun = time.monotonic()
        progress = contextlib.nullcontext(_Progress(overview, run.name))
        train(progress=lambda first, last: progress, stop=stop, saves_in_background=False)
        return result_of_metrics(run, where, time.monotonic() - begun)
    except KeyboardInterrupt:
        return Result(run.name, STOPPED, values=run.values)
    except DivergedError as e:
        error = f"diverged at step {e.step}: {e.finding}"
        return result_of_metrics(run, where, time.monotonic() - begun, FAILED, error)
    except Exception as e:  # a full disk, too little memory: the others continue, and this one is tried again next time
        kind = "" if isinstance(e, ConfigError) else f"{type(e).__name__}: "
        return Result(run.name, FAILED, seconds=time.monotonic() - begun, error=f"{kind}{e}", values=run.values)
    finally:
        group.making = False


@dataclass(frozen=True)
class _Progress:
    """Shows a loop's progress in the sweep's overview."""

    overview: Overview
    name: str

    def update(self, step: int, values: Mapping[str, float]) -> None:
        self.overview.progress(self.name, step, values.get("loss"))
