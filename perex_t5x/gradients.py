"""The gradient of the global batch, plain or with statistics of its examples' gradients, on each device a part of the batch.

The loss is L = (1/W) Σ_i ℓ_i over the B examples of the global batch, W its normaliser. Example i's gradient is scaled so
that the batch gradient is the mean: g_i = (B/W) ∇ℓ_i, with the same B and W however the batch is split.

Both functions run on one device's rows, inside `jax.shard_map` where `data_axes` are manual: each device sums over its own
examples, microbatch by microbatch, and one collective at the end adds the devices' sums. What has been gathered inside the
loss (FSDP) arrives summed over the devices that it was gathered from, as this device's part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.per_example import GradStatistics, collectives
from perex_t5x.per_example.engine import shard_map

Batch = Mapping[str, jax.Array]
LossFn = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]  # (params, batch, keys, normalizer) -> (loss, sums)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradient:
    """Of a global batch: loss L, the loss's own sums over examples, gradient ∇L; what else was computed, or None."""

    loss: Any
    sums: Any
    mean: Any
    statistics: GradStatistics | None = None
    norms: Any = None  # of g_i, or of each group's mean; in the order of the batch


def split_microbatches(tree: Any, count: int) -> Any:
    """[B, ...] -> [count, B/count, ...].

    >>> split_microbatches(jnp.arange(6), 2).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), tree)


def plain(
    loss_fn: LossFn,
    params: Any,
    batch: Batch,
    keys_B: jax.Array,
    normalizer: jax.Array,
    num_microbatches: int = 1,
    *,
    data_axes: Sequence[str] = (),
    summed: Any = None,
    transport: Any = None,
) -> Gradient:
    """By `jax.value_and_grad`.

    Args:
      loss_fn, params, batch, keys_B: with this device's rows.
      normalizer: W of the global batch.
      num_microbatches: gradients add up over so many parts of the rows.
      data_axes: manual mesh axes over which devices share the batch.
      summed: a tree like the parameters: the data axes over which a gathered parameter's gradient arrives summed.
      transport: dtype in which sums travel; None: their own.
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

    def one(rows: tuple[Batch, jax.Array]) -> tuple[Any, Any]:
        return value_and_grad(params, *rows, normalizer)

    if num_microbatches == 1:
        total = one((batch, keys_B))
    else:
        micros = split_microbatches((dict(batch), keys_B), num_microbatches)
        total = _accumulate(one, micros)
    scalars, grads = total
    leaves, tree = jax.tree.flatten(grads)
    done = [()] * len(leaves) if summed is None else tree.flatten_up_to(summed)
    left = [tuple(a for a in data_axes if a not in axes) for axes in done]
    loss, sums = collectives.sum_over(scalars, data_axes)
    return Gradient(loss, sums, tree.unflatten(collectives.sum_each_over(leaves, left, transport)))


def with_statistics(
    compute: Callable[..., Any],
    params: Any,
    batch: Batch,
    keys_B: jax.Array,
    normalizer: jax.Array,
    *,
    group_size: int = 1,
    skip: bool = False,
    data_axes: Sequence[str] = (),
) -> Gradient:
    """By the per-example engine.

    Loss, sums and statistics are those of the examples that took part: with non_finite="skip", without those that were
    left out. W stays the whole batch's, so what is left counts as if the missing examples were like the others. Without
    any example the loss is NaN. The norms are those of this device's examples.

    Args:
      compute: `per_example.grad_statistics(loss_fn, ..., has_aux=True, batch_argnums=(1, 2))` with this `group_size`, these
        `data_axes`, and with non_finite="skip" if `skip`.
      params, batch, keys_B: the loss's arguments for this device's rows.
      normalizer: W of the global batch.
    """
    batch_size = keys_B.shape[0] * shard_map.num_devices(data_axes)
    # The engine's gradients are those of the examples' losses, so ℓ_i / (W/B) makes them (B/W) ∇ℓ_i.
    statistics, found = compute(params, batch, keys_B, normalizer / batch_size)
    kept_N = jnp.ones(found.values.shape, bool)
    if skip:
        finite_Mxb = jnp.isfinite(found.values).reshape(-1, group_size) & jnp.isfinite(found.norms)[:, None]
        kept_N = jnp.repeat(jnp.all(finite_Mxb, axis=1), group_size)
    sums = {"total": found.values, "loss_sums": found.aux}
    sums = jax.tree.map(lambda x: jnp.sum(jnp.where(kept_N, x, 0), axis=0), sums)
    sums = collectives.sum_over(sums, data_axes)
    counted = {**sums["loss_sums"], "non_finite_examples": found.non_finite.astype(jnp.float32)}
    loss = sums["total"] / jnp.asarray(statistics.count, jnp.float32)
    return Gradient(loss, counted, statistics.mean, statistics, found.norms)


def _accumulate(one: Callable[[Any], Any], micros: Any) -> Any:
    """Σ one(microbatch)."""

    def add(total: Any, micro: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(micro)), None

    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], micros))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(add, zeros, micros)[0]
