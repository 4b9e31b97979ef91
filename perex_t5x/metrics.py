"""From sums over examples to metrics. `perex_t5x.metric_files` has their files, whose reader and writer are named here, too.

A step returns plain sums, so that batches, microbatches and hosts add up; ratios are taken once, at the end. Which sums and
which ratios is the model's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perex_t5x.hardware.chips import peak_flops
from perex_t5x.metric_files import MetricsWriter, newest_text, read_rows, read_text

__all__ = [
    "MetricSums",
    "MetricsWriter",
    "flops_per_step",
    "loss_metric",
    "loss_of",
    "model_flops_utilization",
    "newest_text",
    "read_rows",
    "read_text",
    "summarize",
    "throughput",
]


_COUNTS = ("non_finite_examples", "non_finite_updates")  # which are not averaged


class MetricSums:
    """Adds up the sums of several steps on the host, in float64.

    Args:
      model: its metrics where it is one that `perex_t5x.models.protocol.SummarizesMetrics`; else each sum is divided by
        that of 'examples'.
      kept: `to_keep()` of sums that are continued here; None: none.
    """

    def __init__(self, model: Any, kept: Mapping[str, Any] | None = None) -> None:
        self._model = model
        kept = kept or {}
        self.totals: dict[str, float] = dict(kept.get("totals", {}))
        self.steps = int(kept.get("steps", 0))
        self.objective = float(kept.get("objective", 0.0))

    def to_keep(self) -> dict[str, Any]:
        """The sums as JSON can hold them, exactly."""
        return {"totals": dict(self.totals), "steps": self.steps, "objective": self.objective}

    def add(self, sums: Mapping[str, Any], objective: float) -> None:
        for name, value in sums.items():
            self.totals[name] = self.totals.get(name, 0.0) + float(value)
        self.objective += float(objective)
        self.steps += 1

    def add_skipped(self) -> None:
        """A step whose update was left out: it is counted, and its loss is not averaged."""
        self.totals["non_finite_updates"] = self.totals.get("non_finite_updates", 0.0) + 1.0

    def summary(self) -> dict[str, float]:
        """Metrics by name. `loss` is the objective that was optimised, averaged over steps."""
        if not self.steps:
            return {}
        return summarize(self._model, self.totals, self.objective / self.steps)

    def timing(self, seconds: float, devices: int) -> dict[str, float]:
        rate = 1.0 / max(seconds, 1e-9)
        examples = self.totals.get("examples", 0.0)
        speeds = {
            "seqs": examples,
            **{name: self.totals.get(key, 0.0) for name, key in throughput(self._model).items()},
        }
        timing = {"timing/seconds": seconds, "timing/seqs": examples, "timing/steps_per_second": self.steps * rate}
        for name, total in speeds.items():
            timing[f"timing/{name}_per_second"] = total * rate
            timing[f"timing/{name}_per_second_per_core"] = total * rate / devices
        return timing

    def speed(self, seconds: float) -> dict[str, float]:
        """What the progress line shows: examples per second, or what the model is timed by ('tokens/s')."""
        name, key = next(iter(throughput(self._model).items()), ("examples", "examples"))
        return {f"{name.rpartition('_')[2]}/s": self.totals.get(key, 0.0) / max(seconds, 1e-9)}


def summarize(model: Any, sums: Mapping[str, float], objective: float) -> dict[str, float]:
    """A model's metrics from its sums and the mean objective.

    >>> summarize(None, {"examples": 4.0, "accuracy": 3.0}, 0.5)
    {'loss': 0.5, 'accuracy': 0.75}
    """
    if hasattr(model, "summarize_metrics"):
        return model.summarize_metrics(sums, objective)
    examples = sums.get("examples", 0.0)
    kept = {name: value for name, value in sums.items() if name not in ("examples", "loss", *_COUNTS)}
    return {"loss": objective} | {name: value / examples if examples else 0.0 for name, value in kept.items()}


def loss_metric(model: Any) -> str:
    """Which of a model's metrics is shown as its loss."""
    return getattr(model, "loss_metric", "loss")


def loss_of(row: Mapping[str, Any]) -> float | None:
    """The loss in a line of `metrics.jsonl`: per target token for language models, else the objective; None without one.

    >>> loss_of({"step": 1, "loss": 0.5}), loss_of({"loss": 8.0, "loss_per_nonpadding_target_token": 2.0}), loss_of({})
    (0.5, 2.0, None)
    """
    value = row.get("loss_per_nonpadding_target_token", row.get("loss"))
    return None if value is None else float(value)


def throughput(model: Any) -> Mapping[str, str]:
    """Name -> sum of what a model is also timed by, besides examples."""
    return getattr(model, "throughput", {})


def flops_per_step(model: Any, batch_spec: Mapping[str, Any]) -> float | None:
    """FLOPs of a step with such batches; None for a model that does not count them."""
    if not hasattr(model, "flops_per_step"):
        return None
    lengths = {name: spec.shape[1] for name, spec in batch_spec.items() if len(spec.shape) > 1}
    return model.flops_per_step(next(iter(batch_spec.values())).shape[0], lengths)


def model_flops_utilization(
    flops_per_step: float | None, steps_per_second: float, device_kind: str, devices: int
) -> dict[str, float]:
    """Share of the chips' peak that the model's own FLOPs use; empty where either is not known.

    >>> model_flops_utilization(197e12, 0.5, "TPU v5 lite", 1)
    {'timing/model_flops_utilization': 0.5}
    """
    peak = peak_flops(device_kind)
    if peak is None or flops_per_step is None:
        return {}
    return {"timing/model_flops_utilization": flops_per_step * steps_per_second / (peak * devices)}
