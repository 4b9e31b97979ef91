"""Between Adam and MicroAdam: an optimizer for any balance of the expected gradient and its variance."""

from __future__ import annotations

from typing import Any

from perex_t5x.optimizers import descend, scale_by_moments
from perex_t5x.optimizers.base import Mask, StatisticsTransformation


def adam_between(
    learning_rate: Any,
    a: float = 1.0,
    b: float | str = 0.25,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    mask: Mask | None = None,
) -> StatisticsTransformation:
    """Adam's step with v averaging a·μ̂² + b·σ̂², see `optimizers.scale_by_moments`.

    (1, "1/B") is Adam, (1, 1) MicroAdam, (0, 1) MicroAdamVar, (1, 0) MicroAdamMSQ; other arguments as theirs.

    >>> adam_between(0.1).needs
    ('mean', 'mean_square')
    """
    direction = scale_by_moments(a, b, b1, b2, eps, name="adam_between")
    return descend(direction, learning_rate, weight_decay, mask)
