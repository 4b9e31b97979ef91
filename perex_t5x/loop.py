"""The training loop: dispatch step t, then read the metrics of step t−1, so the device never waits for the host.

It knows no configuration: `perex_t5x.train` gives it compiled programs, a feed, a writer and a checkpointer. Runs of a sweep
that share a process (`perex_t5x.experiments.sweep.in_process`) have a loop each, and one step for all of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from absl import logging

from perex_t5x import distributed
from perex_t5x.checkpoints import Checkpointer
from perex_t5x.cli import status
from perex_t5x.cli.progress import Progress
from perex_t5x.data.device_batches import prefetch
from perex_t5x.errors import DivergedError
from perex_t5x.goodput import Recorder
from perex_t5x.metrics import MetricSums, MetricsWriter, flops_per_step, loss_metric, model_flops_utilization, summarize
from perex_t5x.monitoring import shown
from perex_t5x.profiling import Profiler
from perex_t5x.trainer import Trainer, TrainState


class Evaluator(Protocol):
    """Something that scores parameters: {folder under the run's: {metric: value}}."""

    def compile(self, executor: Executor, params_shapes: Any, params_shardings: Any) -> None: ...
    def evaluate(self, step: int, params: Any) -> Mapping[str, Mapping[str, float]]: ...


class Interrupts:
    """Ctrl-C or SIGTERM asks the loop to save and stop; a second one stops at once.

    Several processes stop at the same step, whichever of them was asked.

    Args:
      asked: set by whoever else wants the loop to stop, where signals are someone else's; None: signals alone.
    """

    def __init__(self, asked: threading.Event | None = None) -> None:
        self._asked = asked or threading.Event()
        self._handles_signals = asked is None and threading.current_thread() is threading.main_thread()
        self._former: dict[int, Any] = {}
        group = distributed.group()
        self._stopping = None if group is None else group.stopping

    def stop_here(self) -> bool:
        """Whether to save and stop now. All processes ask at the same places, and get the same answer."""
        return self._asked.is_set() if self._stopping is None else not self._stopping.passes()

    def __enter__(self) -> Interrupts:
        if self._handles_signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self._asked.is_set():
            raise KeyboardInterrupt("stopped at once, without saving")
        self._asked.set()
        if self._stopping is not None:
            self._stopping.requested = True
        logging.info("asked to stop: saving a checkpoint after this step (a second signal stops at once)")


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


class Loop:
    """Runs a compiled step to `last_step`, logging, evaluating and saving on the way.

    Args:
      trainer: of the step; says what is monitored, and where batches go.
      step_fn: (state, batch) -> (state, metrics), or with `learning_rates` (state, batch, learning_rate) -> the same.
      feed: gives the batch of each step.
      evaluators: run every `eval_period` steps and at the end.
      checkpointer: says when to save, and saves.
      writer: of the metrics.
      last_step: where to stop, counted from the start of training.
      stats_period: steps between log lines.
      run_info: what a checkpoint keeps of the run beside its state.
      profile_steps: (first, last) steps to trace; None: none.
      model_dir: the run's folder.
      monitor_fn: compiled `Trainer.monitor_step`; None without a monitor.
      learning_rates: the rate of every step, from step 0, given to the step as data, so that runs can share it; None: the
        step has a schedule of its own.
      progress: makes what shows the progress, from (first step, last step).
      stop: asks the loop from another thread to save and stop; None: Ctrl-C and SIGTERM do.
      recorder: of the run's goodput; None: one that is not stored.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        step_fn: Callable[..., tuple[TrainState, Any]],
        feed: Any,
        evaluators: Sequence[Evaluator],
        checkpointer: Checkpointer,
        writer: MetricsWriter,
        last_step: int,
        eval_period: int,
        stats_period: int,
        run_info: Mapping[str, Any],
        profile_steps: tuple[int, int] | None,
        model_dir: str,
        monitor_fn: Callable[[TrainState, Any], tuple[Any, Any]] | None = None,
        learning_rates: Sequence[float] | None = None,
        progress: Callable[[int, int], AbstractContextManager[Any]] | None = None,
        stop: threading.Event | None = None,
        recorder: Recorder | None = None,
    ):
        self._trainer, self._step_fn, self._feed = trainer, step_fn, feed
        self._evaluators, self._checkpointer, self._writer = evaluators, checkpointer, writer
        self._last_step, self._eval_period, self._stats_period = last_step, eval_period, stats_period
        self._run_info, self._model_dir = run_info, model_dir
        self._profiler = Profiler(model_dir, profile_steps)
        self._monitor_fn, self._learning_rates = monitor_fn, learning_rates
        self._make_progress = progress or functools.partial(Progress, enabled=distributed.is_writer())
        self._stop = stop
        self._recorder = recorder or Recorder()
        self._sums = MetricSums(trainer.model)
        self._clock = _Stopwatch()
        self._pending: tuple[int, Any] | None = None
        self._latest: dict[str, float] = {}
        self._flops = flops_per_step(trainer.model, feed.element_spec)

    def __call__(self, state: TrainState) -> TrainState:
        step = int(state.step)
        if step >= self._last_step:
            logging.info("already at step %d of %d: nothing to train.", step, self._last_step)
            return state
        sharding = self._trainer.partitioner.data_sharding
        shardings = {name: sharding for name in self._feed.element_spec}
        batches = prefetch(self._feed, step, shardings)
        self._clock.start()
        self._recorder.write(self._writer.put)
        try:
            with self._make_progress(step, self._last_step) as self._progress, Interrupts(self._stop) as interrupts:
                first = step
                while step < self._last_step:
                    # A stream may fill its buffers before the first batch.
                    distributed.doing(f"reading the batch of step {step + 1}", patient=step == first)
                    with self._recorder.phase("data"):
                        _, batch = next(batches)
                    self._recorder.step(step + 1)
                    distributed.doing(f"making step {step + 1}", patient=step == first)
                    if self._profiler.is_over(step + 1):
                        self._read_pending()
                        self._profiler.stop()
                    self._profiler.starts(step + 1)
                    measured = self._measure(step + 1, state, batch)  # the step takes the state's buffers
                    rate = () if self._learning_rates is None else (self._learning_rates[step],)
                    state, metrics = self._step_fn(state, batch, *rate)
                    if measured is not None:
                        state = state.replace(monitor=measured[0])
                        metrics = {**metrics, "measured": measured[1]}
                    self._read_pending()
                    step += 1
                    status.at_step(step)
                    self._pending = (step, metrics)
                    stopping = interrupts.stop_here()
                    self._after_step(step, state, stopping)
                    if stopping or interrupts.stop_here():  # the signal may have come during an evaluation
                        self._save(step, state, last=True)
                        self._wait_for_checkpoint()
                        raise KeyboardInterrupt(self._farewell(step))
                distributed.doing("finishing", patient=True)
        except Exception as e:
            distributed.failing(e)
            raise
        finally:
            batches.close()
        self._wait_for_checkpoint()
        self._recorder.done()
        return state

    def _wait_for_checkpoint(self) -> None:
        with self._recorder.phase("save"):
            self._checkpointer.wait()

    def _farewell(self, step: int) -> str:
        if not self._checkpointer.is_due(step, last=True):
            return f"Stopped at step {step} of {self._last_step}; nothing is saved (CheckpointConfig.save is None)."
        return (
            f"Stopped at step {step} of {self._last_step}; checkpoint_{step} is saved in {self._model_dir}. "
            "The same command resumes from it."
        )

    def close(self) -> None:
        """Waits until everything is stored."""
        with (
            self._recorder.phase("save"),
            contextlib.ExitStack() as stack,
        ):  # each of them, whatever becomes of the others
            stack.callback(self._writer.close)
            stack.callback(self._recorder.write, self._writer.put)
            stack.callback(self._profiler.close)
            stack.callback(self._checkpointer.close)

    def _measure(self, step: int, state: TrainState, batch: Any) -> tuple[Any, Any] | None:
        """The monitor's averages and values at its steps; None between."""
        if self._monitor_fn is None or not self._trainer.monitor.is_due(step):
            return None
        return self._monitor_fn(state, batch)

    # --- after a step -------------------------------------------------------------------------------------------------

    def _after_step(self, step: int, state: TrainState, stopping: bool) -> None:
        self._checkpointer.raise_errors()
        self._writer.raise_errors()
        self._profiler.raise_errors()
        last = stopping or step == self._last_step
        evaluate = self._evaluators and not stopping and (step % self._eval_period == 0 or last)
        if not (last or evaluate or self._checkpointer.is_due(step, last)):
            return
        self._read_pending()  # also sees that the loss is finite before anything is saved
        with self._clock.paused():
            with self._recorder.phase("save"):
                self._save(step, state, last)
            if evaluate:
                with self._recorder.phase("evaluate"):
                    self._evaluate(step, state.params)

    def _save(self, step: int, state: TrainState, last: bool) -> None:
        """Saves if it is due. Parameters that are not finite are neither saved nor a run's result.

        The loss of a step is that before its update, so it does not tell.
        """
        is_due = self._checkpointer.is_due(step, last)
        if not is_due and step < self._last_step:
            return
        distributed.doing(f"saving checkpoint_{step}", patient=True)
        if not _all_finite(state.params):
            message = f"the parameters after step {step} are not finite: {self._advice()}"
            raise DivergedError(message, step, "the parameters are not finite")
        if is_due:
            self._writer.flush_lines()  # what a checkpoint has behind it is not written again after a crash
            run = {**self._run_info, "data": self._feed.position(step)}
            self._checkpointer.save(state, run, self._feed if self._feed.has_state else None)
            self._recorder.write(self._writer.put)

    def _advice(self) -> str:
        newest = self._checkpointer.latest_step()
        kept = f"checkpoint_{newest} is the newest whole one" if newest else "no checkpoint was written yet"
        return (
            f"stopped before saving; {kept}. Usual causes: a learning rate that is too high, too short a warm-up, or a "
            "low-precision dtype."
        )

    def _evaluate(self, step: int, params: Any) -> None:
        distributed.doing(f"evaluating step {step}", patient=True)
        for evaluator in self._evaluators:
            for folder, metrics in evaluator.evaluate(step, params).items():
                self._writer.write(folder, step, metrics)
                if loss_metric(self._trainer.model) in metrics:
                    self._latest["valid"] = metrics[loss_metric(self._trainer.model)]
                shown = ", ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items())[:4])
                logging.info("step %d, %s: %s", step, folder, shown)

    def _read_pending(self) -> None:
        """Reads the metrics of the last step but one; on its log step writes them."""
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        objective, sums, scalars, measured = jax.device_get(
            (metrics["objective"], metrics["sums"], metrics["scalars"], metrics.get("measured", {}))
        )
        if not math.isfinite(objective):
            message = f"the loss of step {step} is {objective}: {self._advice()}"
            raise DivergedError(message, step, f"the loss is {objective}")
        self._sums.add(sums, objective)
        model = self._trainer.model
        self._latest["loss"] = summarize(model, sums, objective)[loss_metric(model)]
        self._latest |= shown(measured)
        seconds = self._clock.seconds()
        self._progress.update(step, {**self._latest, **self._sums.speed(seconds)})
        if step % self._stats_period == 0 or step == self._last_step:
            self._write_stats(step, {**scalars, **measured})
        elif measured:
            self._writer.write("train", step, measured)

    def _write_stats(self, step: int, scalars: Mapping[str, Any]) -> None:
        devices = self._trainer.partitioner.mesh.devices
        timing = self._sums.timing(self._clock.lap(), devices.size)
        mfu = model_flops_utilization(
            self._flops, timing["timing/steps_per_second"], devices.flat[0].device_kind, devices.size
        )
        goodput = self._recorder.goodput().metrics
        values = {**self._sums.summary(), **timing, **mfu, **goodput, **scalars, **self._skipped()}
        self._writer.write("train", step, values)
        self._recorder.write(self._writer.put, due=False)
        self._sums = MetricSums(self._trainer.model)

    def _skipped(self) -> dict[str, float]:
        """Examples with non-finite loss or gradient since the last log line, where examples are looked at."""
        name = "non_finite_examples"
        return {f"per_example/{name}": self._sums.totals[name]} if name in self._sums.totals else {}


class _Stopwatch:
    """Time spent training: evaluation and saving do not count."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._begun = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def lap(self) -> float:
        seconds = self.seconds()
        self.start()
        return seconds

    def paused(self) -> _Stopwatch:
        return self

    def __enter__(self) -> None:
        self._paused_at = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self._begun += time.monotonic() - self._paused_at
