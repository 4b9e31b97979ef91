"""The gradient of the global batch, plain or with statistics of its examples' gradients, a microbatch at a time.

The loss is L = (1/W) Σ_i ℓ_i over the B examples of the global batch, W its normaliser. Example i's gradient is scaled so
that the batch gradient is the mean: g_i = (B/W) ∇ℓ_i, with the same B and W however the batch is split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.per_example import GradStatistics

Batch = Mapping[str, jax.Array]
LossFn = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]  # (params, batch, keys, normalizer) -> (loss, sums)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradient:
    """Of a global batch: loss L, the loss's own sums over examples, gradient ∇L; what else was computed, or None."""

    loss: jax.Array
    sums: dict[str, jax.Array]
    mean: Any
    statistics: GradStatistics | None = None
    norms: jax.Array | None = None  # of g_i, or of each group's mean; in the order of the microbatches


def split_microbatches(tree: Any, count: int, group_size: int = 1) -> Any:
    """[B, ...] -> [count, B/count, ...]; microbatch j takes groups j, j+count, ... of `group_size` consecutive rows.

    Strided, so that each device keeps its own rows when the batch is sharded in contiguous blocks.

    >>> split_microbatches(jnp.arange(8), 2).tolist(), split_microbatches(jnp.arange(8), 2, group_size=2).tolist()
    ([[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1, 4, 5], [2, 3, 6, 7]])
    """

    def split(x: Any) -> Any:
        if group_size == 1:
            return jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1)
        groups = jnp.swapaxes(x.reshape(-1, count, group_size, *x.shape[1:]), 0, 1)
        return groups.reshape(count, -1, *x.shape[1:])

    return jax.tree.map(split, tree)


def plain(
    loss_fn: LossFn, params: Any, batch: Batch, keys_B: jax.Array, normalizer: jax.Array, num_microbatches: int = 1
) -> Gradient:
    """By `jax.value_and_grad`."""
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
    if num_microbatches == 1:
        (loss, sums), grads = value_and_grad(params, batch, keys_B, normalizer)
        return Gradient(loss, sums, grads)

    def one(micro: tuple[Batch, jax.Array]) -> Gradient:
        (loss, sums), grads = value_and_grad(params, *micro, normalizer)
        return Gradient(loss, sums, grads)

    micros = split_microbatches((dict(batch), keys_B), num_microbatches)
    total, _ = _accumulate(lambda micro: (one(micro), None), micros, lambda a, b: jax.tree.map(jnp.add, a, b))
    return total


def with_statistics(
    compute: Callable[..., Any],
    params: Any,
    batch: Batch,
    keys_B: jax.Array,
    normalizer: jax.Array,
    num_microbatches: int = 1,
    *,
    group_size: int = 1,
    skip: bool = False,
) -> Gradient:
    """By the per-example engine.

    Loss, sums and statistics are those of the examples that took part: with non_finite="skip", without those that were
    left out. W stays the whole batch's, so what is left counts as if the missing examples were like the others. Without
    any example the loss is NaN.

    Args:
      compute: `per_example.grad_statistics(loss_fn, ..., has_aux=True, batch_argnums=(1, 2))` with this `group_size`, and
        with non_finite="skip" if `skip`.
      params, batch, keys_B, normalizer: the loss's arguments for the whole batch.
      num_microbatches: see `split_microbatches`; groups stay whole.
    """
    batch_size = keys_B.shape[0]

    def one(micro: tuple[Batch, jax.Array]) -> tuple[Any, jax.Array | None]:
        # The engine's gradients are those of the examples' losses, so ℓ_i / (W/B) makes them (B/W) ∇ℓ_i.
        statistics, found = compute(params, *micro, normalizer / batch_size)
        kept_N = jnp.ones(found.values.shape, bool)
        if skip:
            finite_Mxb = jnp.isfinite(found.values).reshape(-1, group_size) & jnp.isfinite(found.norms)[:, None]
            kept_N = jnp.repeat(jnp.all(finite_Mxb, axis=1), group_size)
        sums = {"total": found.values, "loss_sums": found.aux}
        sums = jax.tree.map(lambda x: jnp.sum(jnp.where(kept_N, x, 0), axis=0), sums)
        return (statistics, {**sums, "non_finite": found.non_finite}), found.norms

    def add(a: Any, b: Any) -> Any:
        return GradStatistics.merge(a[0], b[0]), jax.tree.map(jnp.add, a[1], b[1])

    if num_microbatches == 1:
        (statistics, sums), norms = one((batch, keys_B))
    else:
        micros = split_microbatches((dict(batch), keys_B), num_microbatches, group_size)
        (statistics, sums), norms = _accumulate(one, micros, add)
        norms = None if norms is None else norms.reshape(-1)
    counted = {**sums["loss_sums"], "non_finite_examples": sums["non_finite"].astype(jnp.float32)}
    loss = sums["total"] / jnp.asarray(statistics.count, jnp.float32)
    return Gradient(loss, counted, statistics.mean, statistics, norms)


def _accumulate(one: Callable[[Any], tuple[Any, Any]], micros: Any, add: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Scans `one(microbatch) -> (summand, output)`; returns the total, from zeros on, and the outputs stacked."""

    def body(total: Any, micro: Any) -> tuple[Any, Any]:
        summand, output = one(micro)
        return add(total, summand), output

    first = jax.tree.map(lambda x: x[0], micros)
    shapes, _ = jax.eval_shape(one, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(body, zeros, micros)
