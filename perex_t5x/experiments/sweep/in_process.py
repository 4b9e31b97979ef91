"""Runs of a sweep in this process: those that differ in nothing but rate and seed share one compiled program.

Each run gets the batches, the rates and the evaluations that `perex_t5x.train` would give it, and writes the same files but
for checkpoints. Several runs go on at once, each in a thread: the devices work while Python waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x import run_dir
from perex_t5x.data.feed import Feed, make_feed
from perex_t5x.errors import ConfigError
from perex_t5x.experiments.sweep import configuration
from perex_t5x.experiments.sweep import directory as folders
from perex_t5x.experiments.sweep.overview import Overview
from perex_t5x.experiments.sweep.program import Program, parsed_arguments
from perex_t5x.experiments.sweep.runs import FAILED, STOPPED, Result, Run
from perex_t5x.metrics import MetricSums, MetricsWriter

# Gin has one configuration at a time, and tracing reads it.
_gin_lock = threading.Lock()


class _StoppedError(Exception):
    """The sweep was asked to stop."""


class _DivergedError(Exception):
    """The loss or the parameters are not finite."""


@dataclass
class _Prepared:
    """What of a run depends on its own configuration."""

    run: Run
    program: Program
    feed: Feed
    rates: np.ndarray
    seed: int
    folder: str


class _Group:
    """Runs of one program, which is made when the first of them starts and dropped after the last, unless it is kept."""

    def __init__(self, runs: Sequence[Run], kept: dict[str, Program] | None):
        self.waiting, self.left = list(runs), len(runs)
        self._lock = threading.Lock()
        self._name, self._kept = runs[0].group, kept
        self._program: Program | None = (kept or {}).get(self._name)
        self.making = False

    @property
    def ready(self) -> bool:
        return self._program is not None

    def prepare(self, run: Run, root: str) -> _Prepared:
        """The run's own things, and the program, compiled."""
        with self._lock:
            self.making = not self.ready
            with _gin_lock, configuration.quiet():
                prepared = self._parsed(run, root)
            if self.making:
                prepared.program.compile()
                self._program, self.making = prepared.program, False
                if self._kept is not None:
                    self._kept[self._name] = prepared.program
        return prepared

    def _parsed(self, run: Run, root: str) -> _Prepared:
        where = run.folder(root)
        configuration.parse(run.files, run.bindings, run.search_paths, where)
        arguments = parsed_arguments()
        program = self._program or Program(arguments)
        trainer = arguments["trainer_cls"](model=arguments["model"], partitioner=arguments["partitioner"])
        rates = jax.vmap(trainer.learning_rate_fn)(jnp.arange(program.last_step))
        run_dir.prepare(where)
        run_dir.write_model_info(
            where,
            program.boxed_params,
            program.shardings.params,
            run_dir.summarize_model(program.boxed_params, program.shapes),
        )
        arguments["summarize_config_fn"](where, None, 0)
        feed = make_feed(arguments["train_dataset_cfg"], program.converter)
        return _Prepared(run, program, feed, np.asarray(rates), arguments["random_seed"], where)

    def finished_one(self) -> None:
        self.left -= 1
        if not self.left:
            self._program = None


def run_all(
    runs: Sequence[Run],
    root: str,
    overview: Overview,
    finished: Callable[[Run, Result], None],
    parallel: int,
    stop: threading.Event,
    programs: dict[str, Program] | None = None,
) -> None:
    """Runs all; `finished` is told of each end. Returns early where `stop` is set.

    Programs are taken from and put into `programs`, if it is given: for runs that come in several calls.
    """
    groups = list({run.group: None for run in runs})
    groups = [_Group([run for run in runs if run.group == name], programs) for name in groups]
    choosing = threading.Lock()

    def choose() -> tuple[_Group, Run] | None:
        """A run whose program is there; else one whose program nobody makes yet; else any."""
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
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        workers[0].join(0.1)  # short, so that Ctrl-C is heard
        workers = [worker for worker in workers if worker.is_alive()] or workers


def _run_one(group: _Group, run: Run, root: str, overview: Overview, stop: threading.Event) -> Result:
    begun = time.monotonic()
    where, writer = run.folder(root), None
    try:
        prepared = group.prepare(run, root)
        begun = time.monotonic()
        writer = MetricsWriter(where)
        _train(prepared, writer, lambda step, loss: overview.progress(run.name, step, loss), stop)
        return folders.result_of_metrics(run, where, time.monotonic() - begun)
    except _StoppedError:
        return Result(run.name, STOPPED, values=run.values)
    except _DivergedError as e:
        return folders.result_of_metrics(run, where, time.monotonic() - begun, FAILED, str(e))
    except Exception as e:  # a full disk, too little memory: the others go on, and this one is tried again next time
        kind = "" if isinstance(e, ConfigError) else f"{type(e).__name__}: "
        return Result(run.name, FAILED, seconds=time.monotonic() - begun, error=f"{kind}{e}", values=run.values)
    finally:
        group.making = False
        if writer is not None:
            writer.close()


def _train(
    prepared: _Prepared, writer: MetricsWriter, progress: Callable[[int, float], None], stop: threading.Event
) -> None:
    """The loop of `perex_t5x.train`, many steps at a time."""
    program, feed = prepared.program, prepared.feed
    log = _Log(program, writer)
    state = program.init(prepared.seed)
    step = 0
    monitor = program.trainer.monitor
    while step < program.last_step:
        if stop.is_set():
            raise _StoppedError
        end = _next_end(program, step)
        batches = [feed.batch(i) for i in range(step, end)]
        measured: dict[str, Any] = {}
        if monitor is not None and monitor.is_due(step + 1):
            averages, measured = program.monitor(state, program.placed(batches[0]))
            state = state.replace(monitor=averages)
        state, metrics = program.train(state, batches, prepared.rates[step:end])
        loss = log.read(step, end - step, jax.device_get(metrics), jax.device_get(measured))
        step = end
        progress(step, loss)
        if step % program.eval_period == 0 or step == program.last_step:
            log.evaluate(step, state.params)


def _next_end(program: Program, step: int) -> int:
    """Where the next call has to end: before a measurement, at an evaluation, at the end."""
    ends = [program.last_step, step + program.length, (step // program.eval_period + 1) * program.eval_period]
    if program.trainer.monitor is not None:
        period = program.trainer.monitor.period
        ends.append(((step + 1) // period + 1) * period - 1)
    return min(ends)


class _Log:
    """Writes what `loop.Loop` writes, at the same steps."""

    def __init__(self, program: Program, writer: MetricsWriter):
        self._program, self._writer = program, writer
        self._sums, self._since = MetricSums(program.trainer.model), time.monotonic()

    def read(self, first: int, count: int, metrics: Any, measured: dict[str, Any]) -> float:
        """Metrics of steps first + 1 ... first + count; returns the last loss per token."""
        program = self._program
        sums = {name: np.asarray(x).tolist() for name, x in metrics["sums"].items()}
        for i, objective in enumerate(np.asarray(metrics["objective"])[:count].tolist()):
            step = first + i + 1
            if not math.isfinite(objective):
                raise _DivergedError(f"diverged at step {step}: the loss is {objective}")
            self._sums.add({name: values[i] for name, values in sums.items()}, objective)
            of_step = measured if i == 0 else {}
            if step % program.stats_period == 0 or step == program.last_step:
                self._write(step, {**{name: x[i] for name, x in metrics["scalars"].items()}, **of_step})
            elif of_step:
                self._writer.write("train", step, of_step)
        return sums["loss"][count - 1] / max(sums["tokens"][count - 1], 1.0)

    def _write(self, step: int, scalars: dict[str, Any]) -> None:
        now = time.monotonic()
        timing = self._sums.timing(now - self._since, self._program.partitioner.mesh.size)
        skipped = {
            f"per_example/{name}": self._sums.totals[name]
            for name in ("non_finite_examples",)
            if name in self._sums.totals
        }
        self._writer.write("train", step, {**self._sums.summary(), **timing, **scalars, **skipped})
        self._sums, self._since = MetricSums(self._program.trainer.model), now

    def evaluate(self, step: int, params: Any) -> None:
        begun = time.monotonic()
        found = self._program.evaluate(params)
        for name, metrics in found.items():
            self._writer.write(name, step, metrics)
        last = step == self._program.last_step
        if last and not all(math.isfinite(m["loss_per_nonpadding_target_token"]) for m in found.values()):
            raise _DivergedError(f"diverged at step {step}: the parameters are not finite")
        self._since += time.monotonic() - begun
