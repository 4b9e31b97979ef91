"""Sums over devices, of arrays that every device has in full; optionally sent in a narrower dtype.

What rounding to a narrower dtype costs depends on how the sum is formed, with unit roundoff u (2^-9 for bfloat16):

    all-to-all       every device's pieces of a part are sent to the device that adds them up, in the wide dtype: each addend
                     is rounded once, |error| <= u Σ_i |x_i|
    reduce-scatter   partial sums travel round the ring and are rounded at each hop, at most n - 1 times more:
                     |error| <= u Σ_i |x_i| + u Σ_k |x_1 + ... + x_k|

On a ring of n devices an all-to-all passes n/4 times the bytes of a reduce-scatter, half of them in bfloat16. So up to
`EXACT_DEVICES` the additions are exact at no more than the time of a reduce-scatter in float32; beyond, where it would take
longer than not narrowing at all, partial sums are rounded, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EXACT_DEVICES = 8  # n/4 of half the bytes: an all-to-all in bfloat16 takes as long as a reduce-scatter in float32


def sum_over(tree: Any, axes: Sequence[str], transport: Any = None) -> Any:
    """Σ over devices, the same on all of them.

    Args:
      tree: arrays of each device.
      axes: manual axes of the enclosing `shard_map`.
      transport: a narrower dtype to send floating arrays in; see the module for what is rounded, once more than there
        since the sum itself is sent.
    """
    axes = tuple(axes)
    if not axes or not jax.tree.leaves(tree):
        return tree
    if transport is None:
        return jax.lax.psum(tree, axes)

    def one(x: jax.Array) -> jax.Array:
        if not _narrows(x, transport):
            return jax.lax.psum(x, axes)
        devices = jax.lax.axis_size(axes)
        if devices > EXACT_DEVICES:
            return jax.lax.psum(x.astype(transport), axes).astype(x.dtype)
        # A psum in the narrow dtype would add in it: scatter (each device adds up one part, wide), then gather.
        flat = x.reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % devices))
        part = scatter_over(flat, axes, 0, transport).astype(transport)
        whole = jax.lax.all_gather(part, axes, tiled=True, to="invarying")
        return whole[: x.size].reshape(x.shape).astype(x.dtype)

    return jax.tree.map(one, tree)


def sum_each_over(trees: Sequence[Any], axes: Sequence[Sequence[str]], transport: Any = None) -> list[Any]:
    """`sum_over` of several trees, each over its own axes; those with the same axes are sent together."""
    received = list(trees)
    axes_of_each = [tuple(a) for a in axes]
    for over in sorted(set(axes_of_each)):
        mine = [i for i, a in enumerate(axes_of_each) if a == over]
        for i, tree in zip(mine, sum_over([trees[i] for i in mine], over, transport), strict=True):
            received[i] = tree
    return received


def scatter_over(
    x: jax.Array, axes: Sequence[str], dimension: int, transport: Any = None, stages: Sequence[int] = ()
) -> jax.Array:
    """Σ over devices, of which each gets its part along `dimension`: a reduce-scatter.

    Args:
      x, axes, transport: as in `sum_over`.
      stages: sizes whose product is the number of devices, for one axis: reduce-scatters within groups of these sizes, one
        after the other, with the same result. With a device's number in digits of these sizes, the k-th is over the
        devices that differ in the k-th digit alone.
    """
    # Along the leading axis: TPUs scatter whole tiles, and would otherwise send everything to every device and slice there.
    x = jnp.moveaxis(x, dimension, 0)
    for groups in _groups(stages) if len(stages) > 1 else (None,):
        x = scatter_within(x, tuple(axes), groups, transport)
    return jnp.moveaxis(x, 0, dimension)


def scatter_within(x: jax.Array, axes: tuple[str, ...], groups: Any = None, transport: Any = None) -> jax.Array:
    """Σ over the devices of each group (None: all of the axes), each of which gets its part of the leading dimension."""
    if transport is None or not _narrows(x, transport):
        return jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True, axis_index_groups=groups)
    devices = jax.lax.axis_size(axes) if groups is None else len(groups[0])
    sent = x.astype(transport)
    if devices > EXACT_DEVICES:
        sums = jax.lax.psum_scatter(sent, axes, scatter_dimension=0, tiled=True, axis_index_groups=groups)
        return sums.astype(x.dtype)
    pieces = sent.reshape(devices, -1, *x.shape[1:])
    received = jax.lax.all_to_all(pieces, axes, 0, 0, axis_index_groups=groups)
    return jnp.sum(received.astype(x.dtype), axis=0)


def _groups(stages: Sequence[int]) -> list[list[list[int]]]:
    """For each stage, its groups of devices.

    >>> _groups((2, 3))
    [[[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]]
    """
    numbers = np.arange(math.prod(stages)).reshape(stages)
    return [np.moveaxis(numbers, k, -1).reshape(-1, size).tolist() for k, size in enumerate(stages)]


def _narrows(x: jax.Array, transport: Any) -> bool:
    # Scalars are losses, counts and sums of weights, which everything is divided by; nothing is gained by rounding them.
    return x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(transport).itemsize < x.dtype.itemsize
