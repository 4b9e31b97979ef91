"""Clipping of the batch gradient that means the same for all statistics."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from perex_t5x.optimizers.base import StatisticsTransformation, from_statistics
from perex_t5x.optimizers.checks import Positive, check_number
from perex_t5x.per_example.results import GradStatistics


def clip_by_global_norm(max_norm: Positive) -> StatisticsTransformation:
    """Scales all examples' gradients by c = min(1, max_norm / ‖ḡ‖): ḡ becomes c·ḡ, q becomes c²·q, signs stay.

    Stands in front of an optimizer of this package in an `optax.chain`; the optimizer recovers c from the updates, so the
    statistics need not be touched. `optax.clip_by_global_norm` there means the same. Two differences: squares do not
    overflow here, and where ‖ḡ‖ is not finite c is 1, so that non-finite coordinates do not make all others NaN.

    To clip every example by its own norm instead: `per_example.grad_statistics(..., clip_norm=...)`.

    >>> clip = clip_by_global_norm(1.0)
    >>> print(clip.update(jnp.array([3.0, 4.0]), clip.init(jnp.zeros(2)))[0])
    [0.6 0.8]
    """
    check_number("clip_by_global_norm", "max_norm", max_norm, above=True)

    def update(statistics: GradStatistics, state: Any, params: Any) -> tuple[Any, Any]:
        del params
        leaves = jax.tree.leaves(statistics.mean)
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in leaves] or [jnp.zeros(())]))
        unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
        norm = unit * jnp.sqrt(sum(jnp.sum(jnp.square(x / unit)) for x in leaves))
        c = jnp.where(norm > max_norm, max_norm / norm, 1.0)
        c = jnp.where(jnp.isfinite(norm), c, 1.0)
        return jax.tree.map(lambda x: c.astype(x.dtype) * x, statistics.mean), state

    return from_statistics("clip_by_global_norm", ("mean",), lambda params: optax.EmptyState(), update)
