"""From sums over examples to T5X's metric names, and from there to TensorBoard and `metrics.jsonl`.

A step returns plain sums (`loss`, `z_loss`, `correct`, `weights`, `tokens`, `all_tokens`, `examples`), so that batches,
microbatches and hosts add up; ratios are taken once, at the end.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from perex_t5x import files
from perex_t5x.errors import TrainingError
from perex_t5x.hardware.chips import peak_flops


class MetricSums:
    """Adds up the sums of several steps on the host, in float64."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.steps = 0
        self.objective = 0.0

    def add(self, sums: Mapping[str, Any], objective: float) -> None:
        for name, value in sums.items():
            self.totals[name] = self.totals.get(name, 0.0) + float(value)
        self.objective += float(objective)
        self.steps += 1

    def summary(self) -> dict[str, float]:
        """T5X's names.

        `loss` is the objective that was optimised (normalised by the loss normalising factor), averaged over steps;
        `loss_per_nonpadding_target_token` is Σ loss / Σ target tokens, whatever the normaliser.
        """
        if not self.steps:
            return {}
        t = self.totals
        tokens, everything, weights = t["tokens"], t["all_tokens"], t["weights"]
        # The objective is Σ loss / W; its z-loss part is in the same proportion.
        scale = self.objective / t["loss"] / self.steps if t["loss"] else 0.0
        return {
            "accuracy": _ratio(t["correct"], weights),
            "loss": self.objective / self.steps,
            "cross_ent_loss": (t["loss"] - t["z_loss"]) * scale,
            "z_loss": t["z_loss"] * scale,
            "loss_per_nonpadding_target_token": _ratio(t["loss"], tokens),
            "loss_per_all_target_tokens": _ratio(t["loss"], everything),
            "cross_ent_loss_per_all_target_tokens": _ratio(t["loss"] - t["z_loss"], everything),
            "z_loss_per_all_target_tokens": _ratio(t["z_loss"], everything),
            "nonpadding_fraction": _ratio(tokens, everything),
        }

    def timing(self, seconds: float, devices: int) -> dict[str, float]:
        rate = 1.0 / max(seconds, 1e-9)
        t = self.totals
        return {
            "timing/seconds": seconds,
            "timing/seqs": t.get("examples", 0.0),
            "timing/seqs_per_second": t.get("examples", 0.0) * rate,
            "timing/seqs_per_second_per_core": t.get("examples", 0.0) * rate / devices,
            "timing/steps_per_second": self.steps * rate,
            "timing/target_tokens_per_second": t.get("all_tokens", 0.0) * rate,
            "timing/target_tokens_per_second_per_core": t.get("all_tokens", 0.0) * rate / devices,
        }


def model_flops_utilization(
    flops_per_step: float, steps_per_second: float, device_kind: str, devices: int
) -> dict[str, float]:
    """Share of the chips' peak that the model's own FLOPs use; empty where the peak is not known.

    >>> model_flops_utilization(197e12, 0.5, "TPU v5 lite", 1)
    {'timing/model_flops_utilization': 0.5}
    """
    peak = peak_flops(device_kind)
    if peak is None:
        return {}
    return {"timing/model_flops_utilization": flops_per_step * steps_per_second / (peak * devices)}


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


class MetricsWriter:
    """Writes scalars to TensorBoard (`model_dir/<name>/`) and, a line a time, to `model_dir/metrics.jsonl`.

    Only process 0 writes; on the others every call is a no-op.
    """

    def __init__(self, model_dir: str, enabled: bool = True):
        self._model_dir = model_dir
        self._enabled = enabled
        self._writers: dict[str, Any] = {}
        self._path = epath.Path(model_dir) / "metrics.jsonl"

    def writer(self, name: str) -> Any:
        """The clu writer for one folder, made on first use."""
        if name not in self._writers:
            from clu import metric_writers

            make = metric_writers.SummaryWriter if self._enabled else metric_writers.MultiWriter
            self._writers[name] = make(os.path.join(self._model_dir, name)) if self._enabled else make([])
        return self._writers[name]

    def write(self, name: str, step: int, scalars: Mapping[str, float]) -> None:
        """Writes scalars of a step under a folder's name ('train', 'training_eval/<task>')."""
        if not self._enabled:
            return
        try:
            self.writer(name).write_scalars(step, {k: np.float32(v) for k, v in scalars.items()})
            line = json.dumps({"step": step, "name": name, **{k: _json_number(v) for k, v in scalars.items()}})
            self._append(line + "\n")
        except OSError as e:
            raise TrainingError(
                f"cannot write metrics to {self._path}: {e.strerror or e}. Free some space or choose another "
                "MODEL_DIR; the run continues from its last checkpoint when started again."
            ) from e

    def _append(self, text: str) -> None:
        if "://" not in os.fspath(self._path):
            with open(self._path, "a", encoding="utf-8") as f:
                f.write(text)
        else:  # object stores cannot append
            earlier = self._path.read_text() if self._path.exists() else ""
            self._path.write_text(earlier + text)

    def forget_after(self, step: int) -> None:
        """Drops lines of steps after `step` from metrics.jsonl: a resumed run writes them again."""
        if not self._enabled or not self._path.exists():
            return
        lines = self._path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            files.write_atomically(self._path, "".join(kept))

    def close(self) -> None:
        for writer in self._writers.values():
            writer.flush()
            writer.close()


def _json_number(value: float) -> float | str:
    """JSON has no NaN; a string keeps the line readable by every parser."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return math.inf  # a half-written last line
