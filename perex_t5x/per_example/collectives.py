"""Sums over devices, of arrays that every device has whole; optionally sent in fewer bits than they are added in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def sum_over(tree: Any, axes: Sequence[str], transport: Any = None) -> Any:
    """Σ over devices, the same on all of them.

    Args:
      tree: arrays of each device.
      axes: manual axes of the `shard_map` around.
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
        part = scatter_over(flat, axes, 0, transport).astype(transport)
        whole = jax.lax.all_gather(part, axes, tiled=True, to="invarying")
        return whole[: x.size].reshape(x.shape).astype(x.dtype)

    return jax.tree.map(one, tree)


def scatter_over(x: jax.Array, axes: Sequence[str], dimension: int, transport: Any = None) -> jax.Array:
    """Σ over devices, of which each gets its part along `dimension`: a reduce-scatter. See `sum_over`."""
    axes = tuple(axes)
    if transport is None or not _narrows(x, transport):
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
    devices = jax.lax.axis_size(axes)
    pieces = x.reshape(*x.shape[:dimension], devices, x.shape[dimension] // devices, *x.shape[dimension + 1 :])
    mine = jax.lax.all_to_all(pieces.astype(transport), axes, dimension, dimension)
    return jnp.sum(mine.astype(x.dtype), axis=dimension)


def _narrows(x: jax.Array, transport: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(transport).itemsize < x.dtype.itemsize
