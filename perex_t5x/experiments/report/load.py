"""One run's folder, read: its losses, what was monitored, its configuration."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from perex_t5x.experiments.report import gin_text

LOSS = "loss_per_nonpadding_target_token"
_EVAL = "training_eval/"
_MONITORED = ("per_example/snr/", "per_example/noise_scale_smoothed/")
Curve = tuple[np.ndarray, np.ndarray]  # steps, values
_EMPTY: Curve = (np.empty(0), np.empty(0))


@dataclasses.dataclass
class Run:
    """A run as the report sees it; what is not known is None or empty."""

    name: str
    study: str = ""
    status: str = "waiting"  # done, failed, stopped, waiting
    error: str = ""
    values: dict[str, Any] = dataclasses.field(default_factory=dict)  # of a sweep's axes, without seeds
    rule: str | None = None
    optimizer: str | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    seed: int | None = None
    seconds: float | None = None
    final_loss: float | None = None
    best_loss: float | None = None
    length: int | None = None  # target tokens of an example, padding included
    warmup_steps: int | None = None
    config: gin_text.Config = dataclasses.field(default_factory=dict)
    evaluation: Curve = _EMPTY
    training: Curve = _EMPTY
    monitored: dict[str, Curve] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Done, with a finite final loss: what comparisons are made of."""
        return self.status == "done" and self.final_loss is not None

    def examples(self, steps: np.ndarray) -> np.ndarray:
        return steps * float(self.batch_size or 1)


def read(folder: str, name: str, bindings: Mapping[str, str] | None = None) -> Run:
    """Reads a run's folder; one that is not there yet is a run that waits.

    `bindings` stand for the configuration as long as the run has written none.
    """
    run = Run(name)
    run.config = gin_text.parse(_text(os.path.join(folder, "config.gin"))) or dict(bindings or {})
    _from_config(run)
    path = os.path.join(folder, "metrics.jsonl")
    if os.path.exists(path):
        _from_metrics(run, _text(path))
    steps = max((int(x[-1]) for x, _ in (run.training, run.evaluation) if len(x)), default=0)
    if steps:
        total = gin_text.lookup(run.config, "TRAIN_STEPS", "train.total_steps")
        run.status = "done" if isinstance(total, int) and steps >= total else "stopped"
    finite = run.evaluation[1][np.isfinite(run.evaluation[1])]
    if len(finite):
        run.best_loss = float(finite.min())
        last = float(run.evaluation[1][-1])
        run.final_loss = last if math.isfinite(last) else None
        if run.final_loss is None:
            run.status, run.error = "failed", f"the validation loss at step {steps} is {last}"
    return run


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read()
    except OSError:
        return ""


def _from_config(run: Run) -> None:
    def integer(*names: str) -> int | None:
        value = gin_text.lookup(run.config, *names)
        return int(value) if isinstance(value, int | float) else None

    run.batch_size = integer("train/utils.DatasetConfig.batch_size", "BATCH_SIZE")
    rate = gin_text.lookup(run.config, "create_learning_rate_scheduler.base_learning_rate", "BASE_LEARNING_RATE")
    run.learning_rate = float(rate) if isinstance(rate, int | float) else None
    run.seed = integer("RANDOM_SEED", "train.random_seed")
    run.warmup_steps = integer("create_learning_rate_scheduler.warmup_steps", "WARMUP_STEPS")
    lengths = gin_text.lookup(run.config, "TASK_FEATURE_LENGTHS", "DatasetConfig.task_feature_lengths")
    run.length = lengths.get("targets") if isinstance(lengths, dict) else None
    optimizer = gin_text.lookup(run.config, "OPTIMIZER")
    run.optimizer = optimizer.lstrip("@").removesuffix("()").rpartition(".")[2] if isinstance(optimizer, str) else None


def _from_metrics(run: Run, text: str) -> None:
    training: dict[int, float] = {}
    evaluation: dict[int, list[float]] = {}
    monitored: dict[str, dict[int, float]] = {}
    tasks, unreadable = set(), 0
    lines = text.splitlines()
    for i, line in enumerate(lines):
        try:
            row = json.loads(line)
            step, name = int(row["step"]), str(row["name"])
        except (ValueError, KeyError, TypeError):
            unreadable += bool(line.strip()) and i + 1 < len(lines)  # the last one may be half-written
            continue
        if name == "train":
            if LOSS in row:
                training[step] = number(row[LOSS])
            for key in row:
                if key.startswith(_MONITORED):
                    monitored.setdefault(key.removeprefix("per_example/"), {})[step] = number(row[key])
        elif name.startswith(_EVAL) and LOSS in row:
            tasks.add(name)
            evaluation.setdefault(step, []).append(number(row[LOSS]))
    run.training = _curve(training)
    run.evaluation = _curve({step: float(np.mean(values)) for step, values in evaluation.items()})
    run.monitored = {key: _curve(values) for key, values in monitored.items()}
    if unreadable:
        run.notes.append(f"{run.name}: {unreadable} line(s) of metrics.jsonl cannot be read and are left out")
    if len(tasks) > 1:
        run.notes.append(f"{run.name}: the validation loss is the mean of {len(tasks)} tasks'")


def number(value: Any) -> float:
    """Metrics that are not finite are written as strings.

    >>> number("nan"), number(1), number(None)
    (nan, 1.0, nan)
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _curve(values: Mapping[int, float]) -> Curve:
    steps = sorted(values)
    return np.asarray(steps, float), np.asarray([values[s] for s in steps], float)
