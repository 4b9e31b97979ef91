"""Writing a run's checkpoints: which steps are saved, which are kept, and what is done about a write that fails.

A save stops the loop only while the arrays are copied; a thread writes them. A write that fails is tried again, at a later
step, while training continues: a full disk may be emptied, a permission granted, an outage end. The last save of a run is
waited for, and ends the run with an error if it fails for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from perex_t5x import checksums, distributed, files
from perex_t5x.checkpoint_files import PREFIX, RECORDED, absolute, is_whole, newest, step_of, tidy
from perex_t5x.cli import status
from perex_t5x.errors import ConfigError, TrainingError, did_you_mean, first_line, is_denied, writing_failed
from perex_t5x.train_state import TrainState
from perex_t5x.utils import SaveCheckpointConfig

_AGREED_STEPS = 10  # several processes ask process 0 at every tenth step whether the minutes are over
_LAST_WAITS = (1.0, 2.0, 4.0)  # seconds between tries of a run's last save; the notice of a preemption is 30 s


def seconds_until_retry(failures: int) -> float:
    """The back-off after so many failed saves in a row, while training continues.

    >>> [seconds_until_retry(failures) for failures in (1, 2, 3, 7, 20)]
    [10.0, 20.0, 40.0, 600.0, 600.0]
    """
    return min(10.0 * 2.0 ** min(failures - 1, 20), 600.0)


def steps_to_keep(steps: Collection[int], config: SaveCheckpointConfig | None, values: Mapping[int, float]) -> set[int]:
    """Which of a run's checkpoints stay: the newest, every m-th, and the best.

    Args:
      steps: all there are.
      config: says how many of each.
      values: of the metric, at the steps that were evaluated. Others, and those that are not finite, are not among the best.

    >>> losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.5}
    >>> sorted(steps_to_keep([10, 20, 30, 40, 50], SaveCheckpointConfig(keep=1, keep_best=1), losses))
    [20, 50]
    >>> sorted(steps_to_keep([10, 20, 30, 40, 50], SaveCheckpointConfig(keep=2, keep_every=30), losses))
    [30, 40, 50]
    """
    if config is None or config.keep is None:
        return set(steps)
    kept = set(sorted(steps)[-config.keep :])
    if config.keep_every:
        kept |= {step for step in steps if step % config.keep_every == 0}
    if config.keep_unmeasured:
        kept |= {step for step in steps if step not in values}
    if config.keep_best:
        sign = 1 if config.keep_best_mode == "min" else -1
        measured = [step for step in steps if math.isfinite(values.get(step, math.nan))]
        kept |= set(sorted(measured, key=lambda step: (sign * values[step], -step))[: config.keep_best])
    return kept


class _Preserved:
    """`steps_to_keep`, as Orbax asks for it when a save begins; it removes the others once that is committed."""

    def __init__(self, config: SaveCheckpointConfig | None, values: Mapping[int, float]):
        self._config, self._values = config, values

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = [info.step for info in checkpoints]
        if self._config is None or self._config.keep is None:
            return [True] * len(steps)
        kept = distributed.from_process_0(
            "checkpoints to keep", lambda: sorted(steps_to_keep(steps, self._config, self._values))
        )
        return [step in kept for step in steps]


class _FeedHandler(ocp.CheckpointHandler):
    """Lets a streaming feed write its iterator's state inside Orbax's commit."""

    def save(self, directory: epath.Path, args: FeedSave) -> None:
        args.feed.save_state(os.fspath(directory), args.step)

    def restore(self, directory: epath.Path, args: Any = None) -> None:
        raise NotImplementedError("a feed restores its own state: see data_dir")


@ocp.args.register_with_handler(_FeedHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class FeedSave(ocp.args.CheckpointArgs):
    feed: Any = None
    step: int = 0


def _with_checksums(base: type) -> type:
    """An Orbax commit that stores checksums of all files first. Orbax finalizes in process 0, once all have written."""

    class Committing(base):
        async def finalize(self) -> None:
            if step_of(self.get_final().name) is not None:  # not one of the parts of a checkpoint
                # Orbax would write the time of the commit into its metadata later, and change what is recorded.
                metadata, self._checkpoint_metadata_store = self._checkpoint_metadata_store, None
                if metadata is not None:
                    await asyncio.to_thread(metadata.wait_until_finished)
                    path = self.get() / "_CHECKPOINT_METADATA"
                    await asyncio.to_thread(metadata.update, path, commit_timestamp_nsecs=time.time_ns())
                    await asyncio.to_thread(metadata.wait_until_finished)
                await asyncio.to_thread(checksums.write, self.get())
            await super().finalize()

    return Committing


# By whether a folder is in an object store, as Orbax would choose.
_COMMITS = {
    True: _with_checksums(ocp.path.atomicity.CommitFileTemporaryPath),
    False: _with_checksums(ocp.path.atomicity.AtomicRenameTemporaryPath),
}


def _hide_late_writes() -> None:
    """Keeps stack traces of writes that have nobody to tell of their end from being printed.

    The first write that fails ends the event loop of Orbax's thread. TensorStore's threads report each of the others to that
    loop, find it closed, and hand that to `sys.unraisablehook`, though the failure is already known and reported.
    """
    former = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not (unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"):
            former(unraisable)

    sys.unraisablehook = hook


_hide_late_writes()

# Orbax knows one save at a time in a process: its threads find each other by the number of the newest.
_saving = threading.Lock()


class Checkpointer:
    """Writes and prunes a run's own checkpoints.

    Args:
      model_dir: the run's folder.
      config: when to save, and how; None: never.
      in_background: `save` returns once the arrays are copied; False: once all is written, for several runs in a process.
      guard: called before a write and after each step; raises if the folder has become another run's.
      best_metric: what `config.keep_best` goes by, `<folder>/<metric>`, or a metric of the first folder that has it.
      evaluations: (folder, step, metrics) of evaluations of an earlier start.
    """

    def __init__(
        self,
        model_dir: str,
        config: SaveCheckpointConfig | None,
        in_background: bool = True,
        guard: Callable[[], None] = lambda: None,
        best_metric: str = "loss",
        evaluations: Sequence[tuple[str, int, Mapping[str, Any]]] = (),
    ):
        self._config, self._in_background, self._guard = config, in_background, guard
        self._model_dir = absolute(model_dir)
        self._best_metric, self._values = best_metric, dict[int, float]()
        for folder, step, metrics in evaluations:
            self._note_value(folder, step, metrics)
        self._saved_at = time.monotonic()
        self._by_time: tuple[int, bool] = (-1, False)  # whether a step is saved because of the time
        self._begun: int | None = None  # the step that is being written
        self._error: TrainingError | None = None  # of the newest save, if that has failed
        self._retry_at = math.inf
        self._last_tries = 0
        self.failures = 0  # in a row
        self._manager: ocp.CheckpointManager | None = None
        try:
            self._open()
        except Exception as e:
            raise self._explained(e) from e

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is not None:
            return self._manager
        if self._config is not None and distributed.is_writer():
            # The others wait in Orbax until the folder is made, and look into it then.
            tidy(self._model_dir, prunes=self._config.keep is not None)
        options = ocp.CheckpointManagerOptions(
            step_prefix=PREFIX,
            preservation_policy=_Preserved(self._config, self._values),
            create=True,
            temporary_path_class=_COMMITS[files.is_remote(self._model_dir)],
        )
        self._manager = ocp.CheckpointManager(self._model_dir, options=options)
        return self._manager

    def latest_step(self) -> int | None:
        """The newest whole checkpoint; a half-written one does not count."""
        if self._manager is not None:
            return self._manager.latest_step()
        path = newest(self._model_dir)
        return None if path is None else step_of(path)

    # --- when ---------------------------------------------------------------------------------------------------------

    def is_due(self, step: int, last: bool) -> bool:
        """Whether this step is to be saved. All processes ask at the same places, and get the same answer."""
        if self._config is None:
            return False
        if last or bool(self._config.period and step % self._config.period == 0):
            return True
        if step in (self._config.checkpoint_steps or ()):
            return True
        if self._by_time[0] != step:
            self._by_time = (step, self._is_time(step))
        return self._by_time[1]

    def _is_time(self, step: int) -> bool:
        if self._error is not None:
            return time.monotonic() >= self._retry_at
        minutes = None if self._config is None else self._config.period_minutes
        if minutes is None:
            return False
        several = jax.process_count() > 1
        if several and step % _AGREED_STEPS:
            return False
        return distributed.from_process_0("time to save", lambda: time.monotonic() - self._saved_at >= 60 * minutes)

    # --- what is kept -------------------------------------------------------------------------------------------------

    def evaluated(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Takes the metrics of a step, by folder. Raises `ConfigError` if the one that counts is not among them."""
        if self._config is None or not self._config.keep_best:
            return
        for folder, metrics in results.items():
            self._note_value(folder, step, metrics)
        if self._config.keeps_best_of_training:
            return
        if step not in self._values and results:
            known = [f"{folder}/{name}" for folder, metrics in results.items() for name in metrics]
            raise ConfigError(
                f"SaveCheckpointConfig.keep_best_metric = {self._best_metric!r}: the evaluation of step {step} has no such "
                f"metric.{did_you_mean(self._best_metric, known)} It has {', '.join(known)}."
            )

    def trained(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes a log line of training."""
        if self._config is not None and self._config.keeps_best_of_training:
            self._note_value("train", step, metrics)

    def _note_value(self, folder: str, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if self._best_metric in (f"{folder}/{name}", name) and isinstance(value, int | float):
                self._values.setdefault(step, float(value))

    # --- writing ------------------------------------------------------------------------------------------------------

    def save(self, state: TrainState, run: Mapping[str, Any], feed: Any = None) -> None:
        """Saves everything at the state's step. Raises if this has failed too often, see `SaveCheckpointConfig.retries`."""
        step = int(state.step)
        self._guard()
        self._saved_at = time.monotonic()
        tree = state.state_dict()
        if self._config is not None and self._config.dtype is not None:
            dtype = np.dtype(self._config.dtype)
            tree["target"] = jax.tree.map(lambda x: _cast(x, dtype), tree["target"])
        for transformation in self._config.state_transformation_fns if self._config else ():
            tree = _transformed(transformation, tree)
        items = {"state": ocp.args.PyTreeSave(tree), "run": ocp.args.JsonSave(dict(run))}
        if feed is not None:
            items["data"] = FeedSave(feed, step)
        self.settle()  # the one before it
        try:
            with contextlib.nullcontext() if self._in_background else _saving:
                if self._has(step):
                    return
                self._begun = step
                self._open().save(step, args=ocp.args.Composite(**items), custom_metadata=RECORDED)
                if not self._in_background:
                    self._open().wait_until_finished()
        except Exception as e:
            self._failed(e, step)
        else:
            if not self._in_background:
                self._succeeded()

    def _has(self, step: int) -> bool:
        """Whether a step is saved. Orbax lists what it found by its name."""
        manager = self._open()
        if step not in manager.all_steps():
            return False
        path = os.path.join(self._model_dir, f"{PREFIX}_{step}")
        if distributed.from_process_0(f"is {PREFIX}_{step} whole", lambda: is_whole(path)):
            return True
        if distributed.is_writer():
            tidy(self._model_dir)
        manager.reload()
        return False

    def poll(self) -> None:
        """Looks for the error of a write in the background, and does not wait. Raises it if there were too many."""
        self._guard()
        if self._begun is None or self._manager is None:
            return
        if jax.process_count() > 1:
            # The end of a save waits for all processes; one that has failed must not.
            try:
                self._manager.check_for_errors()
            except Exception as e:
                self._failed(e, self._begun)
        elif not self._manager.is_saving_in_progress():
            # Not `check_for_errors`: it would take the error from Orbax's thread, which then removed old checkpoints.
            self.settle()

    def settle(self) -> bool:
        """Waits for the write that is under way; returns whether the newest save is stored. Raises as `save` does."""
        if self._begun is not None and self._manager is not None:
            try:
                self._manager.wait_until_finished()
            except Exception as e:
                self._failed(e, self._begun)
            else:
                self._succeeded()
        return self._error is None

    def wait_to_retry(self) -> None:
        """Waits before the last save of a run is tried again; raises its error if that was done often enough."""
        if self._last_tries >= len(_LAST_WAITS) and self._error is not None:
            raise self._error
        time.sleep(_LAST_WAITS[self._last_tries])
        self._last_tries += 1

    def wait(self) -> None:
        """Blocks until everything is on disk; raises if the newest save is not."""
        if not self.settle() and self._error is not None:
            raise self._error

    def close(self) -> None:
        self.wait()
        if self._manager is not None:
            self._manager.close()

    def _succeeded(self) -> None:
        if self.failures:
            logging.info("%s_%d is written, after %d saves that failed", PREFIX, self._begun, self.failures)
        self._begun, self._error, self.failures = None, None, 0

    def _failed(self, e: Exception, step: int) -> None:
        """Counts a failed save; raises unless it is to be tried again."""
        self._begun = None
        self.failures += 1
        status.save_failed()
        error = self._explained(e)
        retries = self._config.retries if self._config else 0
        # Several processes cannot tell whether all of them have failed: they end, and are started again.
        if jax.process_count() > 1 or isinstance(e, jax.errors.JaxRuntimeError) or self.failures > retries:
            raise error from e
        self._error, wait = error, seconds_until_retry(self.failures)
        self._retry_at = time.monotonic() + wait
        logging.warning(
            "%s_%d could not be written to %s: %s. Earlier checkpoints are complete. Training continues, and a later "
            "step is saved: tried again in %.0f s, or when the next save is due (%d of %d times).",
            PREFIX, step, self._model_dir, first_line(e), wait, self.failures, retries,
        )  # fmt: skip
        manager, self._manager = self._manager, None  # the next save begins with one that knows of no failure
        if manager is not None:
            with contextlib.suppress(Exception):
                manager.close()

    def _explained(self, e: Exception) -> TrainingError:
        """The error for a failed write that says what is safe."""
        if isinstance(e, TrainingError):
            return e
        cause = "a permission is missing" if is_denied(e) else "the disk is full or the folder is gone"
        return writing_failed(
            f"writing a checkpoint to {self._model_dir} failed: {first_line(e)}. Earlier checkpoints are complete. If "
            f"{cause}, fix that and start the same command again: it resumes from the newest one.",
            e,
        )


def _transformed(transformation: Callable[..., Any], tree: dict[str, Any]) -> dict[str, Any]:
    """What one of `SaveCheckpointConfig.state_transformation_fns` makes of a state."""
    name = getattr(transformation, "__name__", repr(transformation))
    made = transformation(tree, jax.tree.map(lambda _: None, tree))
    made = made[0] if isinstance(made, tuple) else made  # T5X's return the second argument, too
    if not isinstance(made, Mapping) or "state" not in made:
        raise ConfigError(
            f"SaveCheckpointConfig.state_transformation_fns: {name} returned {type(made).__name__}, not a state "
            "{'target': ..., 'state': ...}."
        )
    return dict(made)


def _cast(x: Any, dtype: np.dtype) -> Any:
    """Casts floating-point leaves; float64 is left alone, since narrowing it would lose bits unasked."""
    if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) and x.dtype != np.float64:
        return x.astype(dtype)
    return x
