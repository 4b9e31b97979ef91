"""Makes statistics agree with the updates they come with: the same mask, the same scale.

A transformation in front of an optimizer in an `optax.chain` changes the updates (the mean gradient) and not the
other statistics. Two kinds of change have a clear meaning for every example, and are applied to the statistics here:

- a mask (`optax.masked`, `optax.multi_transform`): these parameters only;
- a common factor c (clipping by the global norm, `optax.scale`): every g_i became c·g_i, so q becomes c²·q.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from perex_t5x.errors import ConfigError
from perex_t5x.per_example.results import GradStatistics
from perex_t5x.per_example.statistic import BUILT_IN, Statistic, name_of, names_of


def agreeing(
    optimizer: str, statistics: GradStatistics, updates: Any, needs: Sequence[str | Statistic]
) -> GradStatistics:
    """The statistics in `needs`, masked and scaled like `updates`; `mean` is `updates` itself."""
    averages = {name: _masked_like(optimizer, statistics[name], updates) for name in names_of(needs)}
    factor = common_factor(optimizer, updates, averages["mean"])
    if factor is not None:
        for need in needs:
            name = name_of(need)
            scaling = getattr(BUILT_IN.get(name, need), "scaling", None)
            if scaling is None:
                raise ConfigError(
                    f"{optimizer}: a transformation in front of it multiplies the gradients by a factor c, and how "
                    f"{name!r} then changes is unknown. Declare it: Statistic({name!r}, fn, scaling=lambda c: ...), with "
                    "φ(c·g) = scaling(c)·φ(g)."
                )
            averages[name] = _times(scaling(factor), averages[name])
    averages["mean"] = updates
    averages = {name: at_least_float32(tree) for name, tree in averages.items()}
    return dataclasses.replace(statistics, averages=averages)


def same_mean(
    optimizer: str, statistics: GradStatistics, updates: Any, needs: Sequence[str | Statistic]
) -> GradStatistics:
    """The statistics in `needs`, as they are: what they bound would not hold for gradients that were changed in front.

    Updates that are known not to be the mean are an error; traced ones are not looked at.
    """
    averages = {name: at_least_float32(statistics[name]) for name in names_of(needs)}
    pairs = list(zip(jax.tree.leaves(updates), jax.tree.leaves(statistics["mean"]), strict=False))
    changed = any(not isinstance(u, Tracer) and not isinstance(m, Tracer) and not _equal(u, m) for u, m in pairs)
    if changed or jax.tree.structure(updates) != jax.tree.structure(statistics["mean"]):
        raise ConfigError(
            f"{optimizer}: the updates are not the statistics' mean. {optimizer} takes the gradients as they were clipped, "
            "all parameters together: put it first in the chain, outside optax.masked and multi_transform; what masks or "
            "scales goes into the optimizer inside it."
        )
    return dataclasses.replace(statistics, averages=averages)


def _equal(u: Any, m: Any) -> bool:
    return u is m or bool(jnp.array_equal(u, m, equal_nan=True))


def at_least_float32(tree: Any) -> Any:
    """Leaves of lower precision become float32."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32)), tree)


def common_factor(optimizer: str, updates: Any, mean: Any) -> jax.Array | None:
    """c with updates = c·mean; None where they are the same arrays.

    c = Σ u·ḡ / Σ ḡ² over the coordinates where both are finite, 1 where these are all 0.

    Where the numbers are known (not traced), updates that are no multiple of the mean are an error.
    """
    pairs = list(zip(jax.tree.leaves(updates), jax.tree.leaves(mean), strict=True))
    if all(u is m for u, m in pairs):
        return None
    precision = max(float(jnp.finfo(jnp.result_type(u)).eps) for u, _ in pairs)
    pairs = [_finite(*at_least_float32(pair)) for pair in pairs]
    size_u, size_m = (_largest([pair[i] for pair in pairs]) for i in (0, 1))
    pairs = [(u / size_u, m / size_m) for u, m in pairs]  # so that squares neither vanish nor overflow
    square = sum(jnp.sum(m * m) for _, m in pairs)
    slope = sum(jnp.sum(u * m) for u, m in pairs) / jnp.where(square > 0, square, 1.0)
    if not isinstance(slope, Tracer):
        residual = jnp.sqrt(sum(jnp.sum(jnp.square(u - slope * m)) for u, m in pairs))
        if residual > max(1e-3, precision) * jnp.sqrt(sum(jnp.sum(u * u) for u, _ in pairs)):
            raise ConfigError(
                f"{optimizer}: the updates are not the statistics' mean times a common factor, so it is unknown what the "
                "other statistics should be. Pass updates = stats.mean; put optax.clip, add_decayed_weights and the like "
                f"after {optimizer} in the chain; to clip every example's gradient, use "
                "per_example.grad_statistics(..., clip_norm=...)."
            )
    return jnp.where(square > 0, slope * (size_u / size_m), 1.0)


def _finite(u: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    both = jnp.isfinite(u) & jnp.isfinite(m)
    return jnp.where(both, u, 0.0), jnp.where(both, m, 0.0)


def _largest(leaves: Sequence[jax.Array]) -> jax.Array:
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in leaves]))
    return jnp.where(largest > 0, largest, 1.0)


def _times(factor: jax.Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: factor.astype(jnp.result_type(x, jnp.float32)) * x, tree)


def _masked_like(optimizer: str, tree: Any, updates: Any) -> Any:
    """`tree` with `optax.MaskedNode` where `updates` has one."""

    def is_masked(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    try:
        masked = jax.tree.map(lambda u, t: u if is_masked(u) else t, updates, tree, is_leaf=is_masked)
        same = jax.tree.structure(masked) == jax.tree.structure(updates)
        same &= [jnp.shape(x) for x in jax.tree.leaves(masked)] == [jnp.shape(x) for x in jax.tree.leaves(updates)]
    except (ValueError, TypeError):
        same = False
    if not same:
        raise ConfigError(
            f"{optimizer}: the statistics' trees do not have the structure and shapes of the updates. Both come from one "
            "call of per_example.grad_statistics, and nothing in between may flatten or reshape the updates (optax.flatten)."
        )
    return masked
