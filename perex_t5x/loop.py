"""The training loop: dispatch step t, then read the metrics of step t−1, so the device never waits for the host.

It knows no configuration: `perex_t5x.train` gives it compiled programs, a feed, a writer and a checkpointer. Runs of a sweep
that share a process (`perex_t5x.experiments.sweep.in_process`) have a loop each, and one step for all of them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from absl import logging

from perex_t5x import distributed
from perex_t5x.actions import TRAIN, ActionMode, Actions
from perex_t5x.bad_numbers import BadNumbers, Watch
from perex_t5x.checkpoints import Checkpointer
from perex_t5x.cli import status
from perex_t5x.cli.progress import Progress
from perex_t5x.data.device_batches import prefetch
from perex_t5x.errors import DivergedError
from perex_t5x.goodput import Recorder
from perex_t5x.interrupts import Interrupts
from perex_t5x.metrics import MetricSums, MetricsWriter, flops_per_step, loss_metric, model_flops_utilization, summarize
from perex_t5x.monitoring import shown
from perex_t5x.profiling import Profiler
from perex_t5x.trainer import Trainer, TrainState


class Evaluator(Protocol):
    """Something that scores parameters: {folder under the run's: {metric: value}}.

    Attributes:
      folders: those that `evaluate` returns metrics of.
    """

    @property
    def folders(self) -> Sequence[str]: ...

    def compile(self, executor: Executor, params_shapes: Any, params_shardings: Any) -> None: ...
    def evaluate(
        self, step: int, params: Any, between_batches: Callable[[], None]
    ) -> Mapping[str, Mapping[str, float]]:
        """Calls `between_batches` often, on all processes at the same places; what that raises ends the evaluation."""
        ...


class _AskedToStopError(Exception):
    """The loop was asked to stop during an evaluation; it is made up for when the run is resumed."""


@jax.jit
def _finite(params: Any, opt_state: Any) -> tuple[jax.Array, jax.Array]:
    """Whether the parameters are, and whether the optimizer's state is. A single number of the latter may be infinite: the
    best loss so far of optax's `reduce_on_plateau` begins so."""

    def floats(tree: Any) -> list[jax.Array]:
        return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def all_of(tests: list[jax.Array]) -> jax.Array:
        return jnp.all(jnp.array(tests, bool))

    state = [jnp.all(jnp.isfinite(x) if x.ndim else ~jnp.isnan(x)) for x in floats(opt_state)]
    return all_of([jnp.all(jnp.isfinite(x)) for x in floats(params)]), all_of(state)


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
      unlogged: of a resumed run, the sums of the steps since its last log line, as its checkpoint has them; None: none.
      bad_numbers: what is done about losses and updates that are not finite, or too large.
      watched: of a resumed run, what its checkpoint has of that; None: nothing.
      actions: may end the run; None: none.
      ended: whether the actions had ended it before it was resumed.
      evaluate_first: whether the state it starts with is evaluated, too.
      gc_period: steps between runs of Python's garbage collector, which otherwise comes when it likes; 0: it does.
      evaluated: of a resumed run, the folders that have metrics of the step at which it starts. What is due there and not
        among them is made up for: a run may be stopped or killed between a checkpoint and the end of its evaluation. None: a
        run that starts.
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
        unlogged: Mapping[str, Any] | None = None,
        bad_numbers: BadNumbers | None = None,
        watched: Mapping[str, Any] | None = None,
        evaluated: Collection[str] | None = None,
        actions: Actions | None = None,
        ended: bool = False,
        evaluate_first: bool = False,
        gc_period: int = 0,
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
        self._evaluated = evaluated
        self._actions, self._ended = actions or Actions(), ended
        self._evaluate_first, self._gc_period = evaluate_first, gc_period
        self._bad_numbers = bad_numbers or BadNumbers()
        self._watch = Watch(self._bad_numbers, watched)
        self._sums = MetricSums(trainer.model, unlogged)
        self._clock = _Stopwatch((unlogged or {}).get("seconds", 0.0))
        self._pending: tuple[int, Any] | None = None
        self._latest: dict[str, float] = {}
        self._stats: Mapping[str, float] = {}  # the newest log line
        self._failed_saves = 0
        self._flops = flops_per_step(trainer.model, feed.element_spec)

    def __call__(self, state: TrainState) -> TrainState:
        try:
            with Interrupts(self._stop) as interrupts:
                self._make_up_for_evaluation(state, interrupts)
                return self._train(state, interrupts)
        except Exception as e:
            if not (isinstance(e, DivergedError) and self._bad_numbers.then == "roll_back"):
                distributed.failing(e)
            raise

    def _train(self, state: TrainState, interrupts: Interrupts) -> TrainState:
        step = int(state.step)
        if step >= self._last_step or self._ended:
            why = "an action has ended the run" if self._ended else "nothing to train"
            logging.info("already at step %d of %d: %s.", step, self._last_step, why)
            return state
        sharding = self._trainer.partitioner.data_sharding
        shardings = {name: sharding for name in self._feed.element_spec}
        batches = prefetch(self._feed, step, shardings)
        self._clock.resume()
        self._recorder.write(self._writer.put)
        try:
            with self._make_progress(step, self._last_step) as self._progress, self._garbage_collected():
                first = step
                while step < self._last_step and not self._ended:
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
                    self._after_step(step, state, stopping, interrupts)
                    if self._gc_period and step % self._gc_period == 0:
                        gc.collect()
                    if stopping or interrupts.stop_here():  # the signal may have come during an evaluation
                        self._save(step, state, last=True)
                        self._wait_for_checkpoint(step, state)
                        raise KeyboardInterrupt(self._farewell(step))
                if self._ended:
                    self._save(step, state, last=True)
                distributed.doing("finishing", patient=True)
        finally:
            batches.close()
        self._wait_for_checkpoint(step, state)
        self._recorder.done()
        return state

    @contextlib.contextmanager
    def _garbage_collected(self) -> Iterator[None]:
        """Python's own garbage collection is off where it has a period."""
        on = gc.isenabled()
        if self._gc_period:
            gc.disable()
        try:
            yield
        finally:
            if on:
                gc.enable()

    def _wait_for_checkpoint(self, step: int, state: TrainState) -> None:
        """Until the last step is stored: a write that has failed is tried again, and ends the run if it still fails."""
        with self._recorder.phase("save"):
            while not self._checkpointer.settle():
                self._checkpointer.wait_to_retry()
                self._save(step, state, last=True)

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
        monitor = self._trainer.monitor
        if self._monitor_fn is None or monitor is None or not monitor.is_due(step):
            return None
        return self._monitor_fn(state, batch)

    # --- after a step -------------------------------------------------------------------------------------------------

    def _after_step(self, step: int, state: TrainState, stopping: bool, interrupts: Interrupts) -> None:
        self._checkpointer.poll()
        self._note_failed_saves(step)
        self._writer.raise_errors()
        self._profiler.raise_errors()
        last = stopping or step == self._last_step
        evaluate = not stopping and self._is_evaluated(step)
        if ActionMode.TRAIN in self._actions and (step % self._stats_period == 0 or last):
            self._read_pending()
            self._ended |= self._actions.run(ActionMode.TRAIN, state, {TRAIN: self._stats})
        if not (last or evaluate or self._checkpointer.is_due(step, last)):
            return
        self._read_pending()  # also sees that the loss is finite before anything is saved
        with self._clock.paused():
            with self._recorder.phase("save"):
                self._save(step, state, last)
            if evaluate:
                self._evaluate(step, state, interrupts)

    def _save(self, step: int, state: TrainState, last: bool) -> None:
        """Saves if it is due. A state that is not finite is neither saved nor a run's result.

        The loss of a step is that before its update, so it does not tell.
        """
        is_due = self._checkpointer.is_due(step, last)
        if not is_due and step < self._last_step:
            return
        distributed.doing(f"saving checkpoint_{step}", patient=True)
        of_params, of_optimizer = _finite(state.params, state.opt_state)
        for finite, what in ((of_params, "the parameters"), (of_optimizer, "the values of the optimizer's state")):
            if not finite:
                message = f"{what} after step {step} are not finite: {self._advice()}"
                raise DivergedError(message, step, f"{what} are not finite")
        if is_due:
            self._writer.flush_lines()  # what a checkpoint has behind it is not written again after a crash
            unlogged = {**self._sums.to_keep(), "seconds": self._clock.seconds()}
            watched = self._watch.to_keep()
            run = {**self._run_info, "data": self._feed.position(step), "unlogged": unlogged, "watched": watched}
            self._checkpointer.save(state, run, self._feed if self._feed.has_state else None)
            self._note_failed_saves(step)
            self._recorder.write(self._writer.put)

    def _note_failed_saves(self, step: int) -> None:
        """In the metrics at once: how many saves in a row have failed, and 0 when one has not."""
        if self._checkpointer.failures != self._failed_saves:
            self._failed_saves = self._checkpointer.failures
            self._writer.write("train", step, {"failed_saves": self._failed_saves})

    def _advice(self) -> str:
        newest = self._checkpointer.latest_step()
        kept = f"checkpoint_{newest} is the newest whole one" if newest else "no checkpoint was written yet"
        return (
            f"stopped before saving; {kept}. Usual causes: a learning rate that is too high, too short a warm-up, or a "
            "low-precision dtype."
        )

    def _is_evaluated(self, step: int) -> bool:
        period = self._eval_period
        return bool(self._evaluators and period) and (step % period == 0 or step == self._last_step)

    def _make_up_for_evaluation(self, state: TrainState, interrupts: Interrupts) -> None:
        """Evaluates the state that a run starts with, if that is asked for, or was due and has not come to its end."""
        step, evaluated = int(state.step), set(self._evaluated or ())
        is_missing = self._evaluated is not None and self._is_evaluated(step)
        if not is_missing and not self._evaluate_first:
            return
        if {folder for evaluator in self._evaluators for folder in evaluator.folders} <= evaluated:
            return
        if is_missing:
            logging.info("the evaluation of step %d is missing: it is made up for", step)
        self._evaluate(step, state, interrupts, leave_out=evaluated)
        if interrupts.stop_here():
            raise KeyboardInterrupt(self._farewell(step))

    def _evaluate(self, step: int, state: TrainState, interrupts: Interrupts, leave_out: Collection[str] = ()) -> None:
        """Writes the metrics of all folders but `leave_out`. Asked to stop it returns at once, to be made up for later."""

        def between_batches() -> None:
            distributed.doing(f"evaluating step {step}", patient=True)  # each batch is progress
            if interrupts.stop_here():
                raise _AskedToStopError

        results: dict[str, Mapping[str, float]] = {}
        distributed.doing(f"evaluating step {step}", patient=True)
        with self._recorder.phase("evaluate"), contextlib.suppress(_AskedToStopError):
            for evaluator in self._evaluators:
                if not leave_out or not set(evaluator.folders) <= set(leave_out):
                    metrics = evaluator.evaluate(step, state.params, between_batches)
                    results |= {k: v for k, v in metrics.items() if k not in leave_out}
                    self._write_evaluation(step, {k: v for k, v in metrics.items() if k not in leave_out})
            self._checkpointer.evaluated(step, results)
            self._ended |= self._actions.run_evaluation(state, results)

    def _write_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        for folder, metrics in results.items():
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
        is_logged = step % self._stats_period == 0 or step == self._last_step
        objective, sums, scalars, measured, skipped = jax.device_get(
            (
                metrics["objective"],
                metrics["sums"],
                metrics["scalars"] if is_logged else {},  # they may be hundreds, and each takes as long as an objective
                metrics.get("measured", {}),
                metrics.get("skipped", False),
            )
        )
        if finding := self._watch.look(step, float(objective), bool(skipped)):
            words = finding.words.replace("the loss", f"the loss of step {step}", 1)
            raise DivergedError(f"{words}: {self._advice()}", step, finding.words, finding.first_step)
        if skipped:
            logging.warning("the update of step %d is not finite (loss %s): it is left out", step, objective)
            self._sums.add_skipped()
        else:
            self._sums.add(sums, objective)
        model = self._trainer.model
        self._latest["loss"] = summarize(model, sums, objective)[loss_metric(model)]
        self._latest |= shown(measured)
        seconds = self._clock.seconds()
        self._progress.update(step, {**self._latest, **self._sums.speed(seconds)})
        if is_logged:
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
        self._stats = values
        self._checkpointer.trained(step, values)
        self._writer.write("train", step, values)
        self._recorder.write(self._writer.put, due=False)
        self._sums = MetricSums(self._trainer.model)

    def _skipped(self) -> dict[str, float]:
        """What was left out since the last log line: examples, where these are looked at, and updates."""
        names = {"non_finite_examples": "per_example/non_finite_examples", "non_finite_updates": "non_finite_updates"}
        return {shown: self._sums.totals[name] for name, shown in names.items() if name in self._sums.totals}


class _Stopwatch:
    """Time spent training: evaluation and saving do not count. It is stopped at first.

    Args:
      seconds: that it starts with.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._counted, self._since = seconds, math.inf  # those before `_since`; inf: it is stopped

    def resume(self) -> None:
        self._since = time.monotonic()

    def seconds(self) -> float:
        return self._counted + max(0.0, time.monotonic() - self._since)

    def lap(self) -> float:
        seconds = self.seconds()
        self._counted, self._since = 0.0, max(self._since, time.monotonic())
        return seconds

    def paused(self) -> _Stopwatch:
        return self

    def __enter__(self) -> None:
        self._counted, self._since = self.seconds(), math.inf

    def __exit__(self, *exc: object) -> None:
        self.resume()
