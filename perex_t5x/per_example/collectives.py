"""Sums over devices, of arrays that every device has in full; optionally sent in a narrower dtype than they are added in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def sum_over(tree: Any, axes: Sequence[str], transport: Any = None) -> Any:
    """Σ over devices, the same on all of them.

    Args:
      tree: arrays of each device.
      axes: manual axes of the enclosing `shard_map`.
      transport: a narrower dtype to send floating arrays in. They are still added in their own: each device receives
        everybody's pieces of one part, adds them up, and sends the sum on.
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
        flat = x.reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % devices))
        # A psum in the narrow dtype would add in it, too: scatter (each device adds up one part, wide), then gather.
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
    axes = tuple(axes)
    # Along the leading axis: TPUs scatter whole tiles, and would otherwise send everything to every device and slice there.
    x = jnp.moveaxis(x, dimension, 0)
    if transport is None or not _narrows(x, transport):
        mine = x
        for groups in _groups(stages) if len(stages) > 1 else (None,):
            mine = jax.lax.psum_scatter(mine, axes, scatter_dimension=0, tiled=True, axis_index_groups=groups)
    else:
        pieces = x.reshape(jax.lax.axis_size(axes), -1, *x.shape[1:])
        mine = jnp.sum(jax.lax.all_to_all(pieces.astype(transport), axes, 0, 0).astype(x.dtype), axis=0)
    return jnp.moveaxis(mine, 0, dimension)


def _groups(stages: Sequence[int]) -> list[list[list[int]]]:
    """For each stage, its groups of devices.

    >>> _groups((2, 3))
    [[[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]]
    """
    numbers = np.arange(math.prod(stages)).reshape(stages)
    return [np.moveaxis(numbers, k, -1).reshape(-1, size).tolist() for k, size in enumerate(stages)]


def _narrows(x: jax.Array, transport: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(transport).itemsize < x.dtype.itemsize
