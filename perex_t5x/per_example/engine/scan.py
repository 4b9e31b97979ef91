"""`jax.lax.scan` whose stacked results are written into memory that has not been filled with zeros before.

Each step writes all of its own part, so what was there does not matter. For large stacks, such as the statistics of all
layers, the zeros would take about as long as writing the results. The compiler reserves unfilled memory at the start of the
program, though, and zeros only just before the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from perex_t5x.per_example.engine import shard_map


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    *,
    length: int,
    reverse: bool,
    unroll: int | bool,
) -> tuple[Any, Any]:
    """As `jax.lax.scan`.

    >>> scan(lambda total, x: (total + x, total), jnp.float32(0), jnp.arange(3.0), length=3, reverse=False, unroll=1)
    (Array(3., dtype=float32), Array([0., 0., 1.], dtype=float32))
    """
    # The compiler does not divide unfilled memory over devices: with automatic axes every device would hold the whole stack.
    if not _is_for_one_device():
        return jax.lax.scan(step, carry, xs, length=length, reverse=reverse, unroll=unroll)
    traced, shapes = jax.make_jaxpr(step, return_shape=True)(carry, jax.tree.map(lambda x: x[0], xs))
    body, structure = core.jaxpr_as_fun(traced), jax.tree.structure(shapes)

    # Traced once, to know the stacks' shapes. The traced body is what runs, not the step, whose side effects (the engine's
    # notes about reductions) would happen twice.
    def again(carry: Any, x: Any) -> tuple[Any, Any]:
        return jax.tree.unflatten(structure, body(*jax.tree.leaves((carry, x))))

    num_stacked = len(jax.tree.leaves(shapes[1]))
    stacks = [_unfilled(length, aval) for aval in traced.out_avals[len(traced.out_avals) - num_stacked :]]

    def write(state: tuple[Any, list[jax.Array]], x: Any) -> tuple[Any, None]:
        carry, stacks = state
        at, x = x
        new_carry, ys = again(carry, x)
        # Of a carry that each step updates in place, XLA makes one buffer.
        stacks = [
            jax.lax.dynamic_update_index_in_dim(stack, y, at, axis=0)
            for stack, y in zip(stacks, jax.tree.leaves(ys), strict=True)
        ]
        return (new_carry, stacks), None

    (carry, stacks), _ = jax.lax.scan(
        write, (carry, stacks), (jnp.arange(length), xs), length=length, reverse=reverse, unroll=unroll
    )
    return carry, jax.tree.unflatten(jax.tree.structure(shapes[1]), stacks)


def _unfilled(length: int, aval: Any) -> jax.Array:
    return shard_map.vary(jax.lax.empty((length, *aval.shape), aval.dtype), aval.manual_axis_type.varying)


def _is_for_one_device() -> bool:
    """Whether enclosing `shard_map`s say what one device has: automatic axes, if any, have one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and all(mesh.shape[a] == 1 for a in shard_map.automatic_axes())
