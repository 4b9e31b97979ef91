"""Exact statistics of per-example gradients for any JAX loss; depends on jax alone.

from perex_t5x import per_example

compute = per_example.grad_statistics(loss_fn, ("mean", "mean_square"))
stats, aux = compute(params, batch)
"""

from perex_t5x.per_example import curvature, metrics
from perex_t5x.per_example.coverage import Coverage, coverage
from perex_t5x.per_example.grad_statistics import grad_statistics
from perex_t5x.per_example.independent import check_independent
from perex_t5x.per_example.metrics import Metric
from perex_t5x.per_example.results import GradStatistics, PerExample, Sensitivity
from perex_t5x.per_example.statistic import Statistic

__all__ = [
    "Coverage",
    "GradStatistics",
    "Metric",
    "PerExample",
    "Sensitivity",
    "Statistic",
    "check_independent",
    "coverage",
    "curvature",
    "grad_statistics",
    "metrics",
]
