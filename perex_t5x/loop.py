"""The training loop: dispatch step t, then read the metrics of step t−1, so the device never waits for the host."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol, TextIO

import jax
import jax.numpy as jnp
from absl import logging

from perex_t5x import distributed
from perex_t5x.checkpoints import Checkpointer
from perex_t5x.cli.progress import Progress
from perex_t5x.data.device_batches import prefetch
from perex_t5x.errors import TrainingError
from perex_t5x.evaluation import TrainEvaluator
from perex_t5x.metrics import MetricSums, MetricsWriter, model_flops_utilization
from perex_t5x.monitoring import shown
from perex_t5x.trainer import Trainer, TrainState
from perex_t5x.utils import DatasetConfig


class Evaluator(Protocol):
    """Something that scores parameters: {folder under the run's: {metric: value}}."""

    def compile(self, executor: Executor, params_shapes: Any, params_shardings: Any) -> None: ...
    def evaluate(self, step: int, params: Any) -> Mapping[str, Mapping[str, float]]: ...


def make_evaluators(
    trainer: Trainer,
    train_eval: DatasetConfig | None,
    infer_eval: DatasetConfig | None,
    inference_evaluator_cls: Callable[..., Any] | None,
    eval_steps: int | None,
    model_dir: str,
) -> list[Evaluator]:
    """Teacher-forced and decoding evaluation, whichever is configured."""
    evaluators: list[Evaluator] = []
    if train_eval is not None:
        evaluators.append(TrainEvaluator(trainer, train_eval, eval_steps))
    if infer_eval is not None:
        from perex_t5x.inference_evaluation import InferenceEvaluator

        log_dir = os.path.join(model_dir, "inference_eval")
        evaluators.append(
            InferenceEvaluator(trainer.model, trainer.partitioner, infer_eval, inference_evaluator_cls, log_dir)
        )
    return evaluators


class Interrupts:
    """Ctrl-C or SIGTERM asks the loop to save and stop; a second one stops at once.

    Several processes stop at the same step, whichever of them was asked.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._former: dict[int, Any] = {}
        group = distributed.group()
        self._stopping = None if group is None else group.stopping

    def stop_here(self) -> bool:
        """Whether to save and stop now. All processes ask at the same places, and get the same answer."""
        return self.signal is not None if self._stopping is None else not self._stopping.passes()

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt("stopped at once, without saving")
        self.signal = number
        if self._stopping is not None:
            self._stopping.requested = True
        logging.info("asked to stop: saving a checkpoint after this step (once more stops at once)")


class Loop:
    """Runs a compiled step to `last_step`, logging, evaluating and saving on the way."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        step_fn: Callable[[TrainState, Any], tuple[TrainState, Any]],
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
        progress_stream: TextIO | None = None,
        monitor_fn: Callable[[TrainState, Any], tuple[Any, Any]] | None = None,
    ):
        self._progress_stream = progress_stream
        self._monitor_fn = monitor_fn
        self._trainer, self._step_fn, self._feed = trainer, step_fn, feed
        self._evaluators, self._checkpointer, self._writer = evaluators, checkpointer, writer
        self._last_step, self._eval_period, self._stats_period = last_step, eval_period, stats_period
        self._run_info, self._profile_steps, self._model_dir = run_info, profile_steps, model_dir
        self._all_finite = jax.jit(
            lambda tree: jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))
        )
        self._sums = MetricSums()
        self._clock = _Stopwatch()
        self._pending: tuple[int, Any] | None = None
        self._latest: dict[str, float] = {}
        spec = feed.element_spec
        lengths = {name: shape.shape[1] for name, shape in spec.items()}
        self._flops = trainer.model.flops_per_step(next(iter(spec.values())).shape[0], lengths)

    def __call__(self, state: TrainState) -> TrainState:
        step = int(state.step)
        if step >= self._last_step:
            logging.info("already at step %d of %d: nothing to train.", step, self._last_step)
            return state
        sharding = self._trainer.partitioner.data_sharding
        shardings = {name: sharding for name in self._feed.element_spec}
        show = Progress(step, self._last_step, enabled=distributed.is_writer(), stream=self._progress_stream)
        batches = prefetch(self._feed, step, shardings)
        self._clock.start()
        try:
            with show as self._progress, Interrupts() as interrupts:
                first = step
                while step < self._last_step:
                    # A stream may fill its buffers before the first batch.
                    distributed.doing(f"reading the batch of step {step + 1}", patient=step == first)
                    _, batch = next(batches)
                    distributed.doing(f"making step {step + 1}", patient=step == first)
                    self._profile(step)
                    measured = self._measure(step + 1, state, batch)  # the step takes the state's buffers
                    state, metrics = self._step_fn(state, batch)
                    if measured is not None:
                        state = state.replace(monitor=measured[0])
                        metrics = {**metrics, "measured": measured[1]}
                    self._read_pending()
                    step += 1
                    self._pending = (step, metrics)
                    stopping = interrupts.stop_here()
                    self._after_step(step, state, stopping)
                    if stopping or interrupts.stop_here():  # the signal may have come during an evaluation
                        self._save(step, state, last=True)
                        self._checkpointer.wait()
                        raise KeyboardInterrupt(self._farewell(step))
                distributed.doing("finishing", patient=True)
        except Exception as e:
            distributed.failing(e)
            raise
        finally:
            batches.close()
        self._checkpointer.wait()
        return state

    def _farewell(self, step: int) -> str:
        if not self._checkpointer.is_due(step, last=True):
            return f"Stopped at step {step} of {self._last_step}; nothing is saved (CheckpointConfig.save is None)."
        return (
            f"Stopped at step {step} of {self._last_step}; checkpoint_{step} is saved in {self._model_dir}. "
            "The same command resumes from it."
        )

    def close(self) -> None:
        if self._profiling:
            jax.profiler.stop_trace()
        try:
            self._checkpointer.close()
        finally:
            self._writer.close()

    _monitor_fn: Callable[[TrainState, Any], tuple[Any, Any]] | None = None

    def _measure(self, step: int, state: TrainState, batch: Any) -> tuple[Any, Any] | None:
        """The monitor's averages and values at its steps; None between."""
        if self._monitor_fn is None or not self._trainer.monitor.is_due(step):
            return None
        return self._monitor_fn(state, batch)

    # --- after a step -------------------------------------------------------------------------------------------------

    def _after_step(self, step: int, state: TrainState, stopping: bool) -> None:
        self._checkpointer.raise_errors()
        last = stopping or step == self._last_step
        evaluate = self._evaluators and not stopping and (step % self._eval_period == 0 or last)
        if not (last or evaluate or self._checkpointer.is_due(step, last)):
            return
        self._read_pending()  # also sees that the loss is finite before anything is saved
        with self._clock.paused():
            self._save(step, state, last)
            if evaluate:
                self._evaluate(step, state.params)

    def _save(self, step: int, state: TrainState, last: bool) -> None:
        """Saves if it is due; never parameters that are not finite (the loss of a step is that before its update)."""
        if not self._checkpointer.is_due(step, last):
            return
        distributed.doing(f"saving checkpoint_{step}", patient=True)
        if not self._all_finite(state.params):
            raise TrainingError(f"the parameters after step {step} are not finite: {self._advice()}")
        run = {**self._run_info, "data": self._feed.position(step)}
        self._checkpointer.save(state, run, self._feed if self._feed.has_state else None)

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
                if "loss_per_nonpadding_target_token" in metrics:
                    self._latest["valid"] = metrics["loss_per_nonpadding_target_token"]
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
            raise TrainingError(f"the loss of step {step} is {objective}: {self._advice()}")
        self._sums.add(sums, objective)
        self._latest["loss"] = float(sums["loss"] / max(sums["tokens"], 1.0))
        self._latest |= shown(measured)
        seconds = self._clock.seconds()
        tokens = self._sums.totals["all_tokens"] / max(seconds, 1e-9)
        self._progress.update(step, {**self._latest, "tokens/s": tokens})
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
        self._writer.write("train", step, {**self._sums.summary(), **timing, **mfu, **scalars, **self._skipped()})
        self._sums = MetricSums()

    def _skipped(self) -> dict[str, float]:
        """Examples with non-finite loss or gradient since the last log line, where examples are looked at."""
        name = "non_finite_examples"
        return {f"per_example/{name}": self._sums.totals[name]} if name in self._sums.totals else {}

    # --- profiling ----------------------------------------------------------------------------------------------------

    _profiling = False

    def _profile(self, step: int) -> None:
        """Starts or stops a trace; steps are counted from 1, as everywhere in the logs."""
        if self._profile_steps is None:
            return
        first, last = self._profile_steps
        if not self._profiling and first <= step + 1 <= last:
            jax.profiler.start_trace(os.path.join(self._model_dir, "profile"))
            self._profiling = True
        elif self._profiling and step + 1 > last:
            self._read_pending()
            jax.profiler.stop_trace()
            self._profiling = False


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
