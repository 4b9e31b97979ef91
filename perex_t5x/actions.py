"""Actions, as in T5X: they see the metrics of training and of evaluations, and may end the run.

    train_script.train.actions = {'TRAIN_EVAL': [@trainer.EarlyStoppingAction()]}
    trainer.EarlyStoppingAction:
      metric = ('my_task', 'accuracy')
      mode = 'max'

A run that is ended so is done: its last step is saved, the exit code is 0. Started again it ends at once.
"""

from __future__ import annotations

import abc
import copy
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from absl import logging

from perex_t5x import arguments, distributed
from perex_t5x.arguments import Interval
from perex_t5x.errors import ConfigError, did_you_mean

Metrics = Mapping[str, Mapping[str, float]]  # of each task; of training, {'train': ...}


class ActionMode(enum.Enum):
    """After what an action runs: the metrics of a log line, a teacher-forced evaluation, one by decoding."""

    TRAIN = 1
    TRAIN_EVAL = 2
    INFER_EVAL = 3


FOLDERS = {ActionMode.TRAIN_EVAL: "training_eval/", ActionMode.INFER_EVAL: "inference_eval/"}
TRAIN = "train"  # the name under which actions see the metrics of training


class BaseAction(abc.ABC):
    """To be subclassed. One process runs it, and tells the others."""

    task: str | None = None  # whose metrics it reads, where it is one's: a name that is not there is refused

    @abc.abstractmethod
    def run(self, train_state: Any, metrics_by_task: Metrics) -> bool:
        """Whether to end the run. `train_state` is that of the step whose metrics these are."""

    def remember(self, metrics_by_task: Metrics) -> bool:
        """As `run`, of an evaluation that was made before the run was resumed. By default nothing is remembered."""
        del metrics_by_task
        return False


def _value(task: str | None, metric: str, metrics_by_task: Metrics, action: str) -> float | None:
    """Of a metric; None, and a warning, if there is no such number."""
    known = metrics_by_task.get(task or "", {})
    if metric in known:
        return float(known[metric])
    where = f"{task!r} has {', '.join(map(repr, known))}" if known else f"there is no task {task!r}"
    near = did_you_mean(metric, known)
    logging.warning("%s did not run: there is no metric %r.%s (%s)", action, metric, near, where)
    return None


class EarlyStoppingAction(BaseAction):
    """Ends the run when a metric has not improved for a while, by T5X's rule.

    Of the last `patience` values no one is better than the one before it: lower (mode 'min') or higher ('max') by more than
    atol + rtol·|the one before|.

    Args:
      metric: (task, name), such as ('my_task', 'accuracy'); with 'TRAIN' the task is 'train'.
      mode: whether smaller ('min') or larger ('max') is better.
      patience: so many values.
      atol, rtol: what an improvement has to exceed.

    >>> action = EarlyStoppingAction(("task", "loss"), mode="min", patience=3)
    >>> [action.run(None, {"task": {"loss": loss}}) for loss in (3.0, 2.0, 2.5, 2.5)]
    [False, False, False, True]
    """

    def __init__(
        self,
        metric: tuple[str, str],
        mode: Literal["min", "max"],
        patience: Annotated[int, Interval("[2, 2147483647]")] = 3,
        atol: Annotated[float, Interval("[0, ∞)")] = 0.0,
        rtol: Annotated[float, Interval("[0, ∞)")] = 0.0,
    ):
        arguments.check("EarlyStoppingAction", arguments.hints(EarlyStoppingAction), dict(locals()))
        self.task, self._metric = metric
        self._mode, self._patience, self._atol, self._rtol = mode, patience, atol, rtol
        self._history: list[float] = []

    def run(self, train_state: Any, metrics_by_task: Metrics) -> bool:
        del train_state
        value = _value(self.task, self._metric, metrics_by_task, type(self).__name__)
        if value is None:
            return False
        self._history = [*self._history[-self._patience + 1 :], value]
        if len(self._history) < self._patience or any(map(self._is_better, self._history[1:], self._history)):
            return False
        shown = ", ".join(f"{x:.6g}" for x in self._history)
        logging.warning("%s of %s has not improved: %s. The run ends.", self._metric, self.task, shown)
        return True

    def remember(self, metrics_by_task: Metrics) -> bool:
        return self.run(None, metrics_by_task)

    def _is_better(self, value: float, former: float) -> bool:
        margin = self._atol + self._rtol * abs(former)
        return value < former - margin if self._mode == "min" else value > former + margin


class TerminateOnNanAction(BaseAction):
    """Ends the run when a metric is NaN or infinite. (The training loss needs none: `perex_t5x.bad_numbers`.)

    Args:
      task: whose; with 'TRAIN' it is 'train'.
      metric: its name.

    >>> TerminateOnNanAction("task").run(None, {"task": {"loss": float("nan")}})
    True
    """

    def __init__(self, task: str, metric: str = "loss"):
        arguments.check("TerminateOnNanAction", arguments.hints(TerminateOnNanAction), dict(locals()))
        self.task, self._metric = task, metric

    def run(self, train_state: Any, metrics_by_task: Metrics) -> bool:
        del train_state
        value = _value(self.task, self._metric, metrics_by_task, type(self).__name__)
        if value is None or math.isfinite(value):
            return False
        logging.warning("%s of %s is %s. The run ends.", self._metric, self.task, value)
        return True


ActionMap = Mapping[str | ActionMode, Sequence[BaseAction]]


class Actions:
    """A run's actions, each with a memory of its own.

    Args:
      actions: {'TRAIN' | 'TRAIN_EVAL' | 'INFER_EVAL': actions}; None: none.
      tasks: of each mode, the names of what is evaluated: an action for another is refused. None: not checked.
    """

    def __init__(self, actions: ActionMap | None = None, tasks: Mapping[ActionMode, Sequence[str]] | None = None):
        self._by_mode: dict[ActionMode, list[BaseAction]] = {}
        for key, several in (actions or {}).items():
            name = key.name if isinstance(key, ActionMode) else str(key)
            if name not in ActionMode.__members__:
                raise ConfigError(
                    f"train.actions: {key!r} is none of {', '.join(ActionMode.__members__)}."
                    f"{did_you_mean(name, ActionMode.__members__)}"
                )
            listed: list[Any] = list(several) if isinstance(several, list | tuple) else [several]
            if wrong := [action for action in listed if not isinstance(action, BaseAction)]:
                raise ConfigError(
                    f"train.actions[{name!r}]: {wrong[0]!r} is no action. Give a list, such as "
                    "[@trainer.TerminateOnNanAction()]."
                )
            mode = ActionMode[name]
            for action in listed if tasks is not None else ():
                _check_task(action, mode, [TRAIN] if mode is ActionMode.TRAIN else (tasks or {}).get(mode, ()))
            self._by_mode[mode] = copy.deepcopy(listed)

    def __contains__(self, mode: ActionMode) -> bool:
        return bool(self._by_mode.get(mode))

    def run(self, mode: ActionMode, train_state: Any, metrics_by_task: Metrics) -> bool:
        """Whether an action ends the run. All processes ask at the same places, and get the same answer."""
        if mode not in self or not metrics_by_task:
            return False

        def every() -> bool:
            return any([bool(action.run(train_state, metrics_by_task)) for action in self._by_mode[mode]])

        return distributed.from_process_0("what actions say", every)

    def run_evaluation(self, train_state: Any, results: Metrics) -> bool:
        """The same of an evaluation, {folder: metrics}."""
        return any([self.run(mode, train_state, _of(folder, results)) for mode, folder in FOLDERS.items()])

    def remember(self, rows: Sequence[tuple[str, int, Mapping[str, Any]]]) -> bool:
        """Shows actions the metrics that were written before the run was resumed; whether they had ended it by then.

        Args:
          rows: (folder, step, metrics), in order.
        """
        ended = False
        for step in sorted({step for _, step, _ in rows}):
            results = {folder: values for folder, at, values in rows if at == step}
            seen = {mode: _of(folder, results) for mode, folder in FOLDERS.items()}
            seen[ActionMode.TRAIN] = {TRAIN: results[TRAIN]} if "loss" in results.get(TRAIN, {}) else {}
            said = [
                action.remember(metrics)
                for mode, metrics in seen.items()
                if metrics
                for action in self._by_mode.get(mode, ())
            ]
            ended = any(said)  # of the newest step: at an older one it did not end
        return ended


def _of(folder: str, results: Metrics) -> dict[str, Mapping[str, float]]:
    return {name.removeprefix(folder): metrics for name, metrics in results.items() if name.startswith(folder)}


def _check_task(action: BaseAction, mode: ActionMode, known: Sequence[str]) -> None:
    if action.task is None or action.task in known:
        return
    name = f"train.actions[{mode.name!r}]: {type(action).__name__}"
    if not known:
        raise ConfigError(
            f"{name} would never run: nothing is evaluated so. Bind the evaluation's dataset_cfg, or leave it out."
        )
    raise ConfigError(
        f"{name} reads metrics of {action.task!r}.{did_you_mean(action.task, known)} There are {', '.join(known)}."
    )
