"""FSDP: sharded parameters gathered inside the step, each where it is used; their gradients are reduce-scattered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from perex_t5x.partitioning.axes import names_of
from perex_t5x.per_example import collectives

_NONE: Mapping[str, tuple[int, ...]] = MappingProxyType({})


def gather_by_spec(
    part: jax.Array,
    spec: PartitionSpec,
    dtype: Any,
    sent_as: Any = None,
    stages: Mapping[str, tuple[int, ...]] = _NONE,
    automatic: PartitionSpec | None = None,
) -> jax.Array:
    """The whole parameter, in `dtype`, from this device's shard: an all-gather.

    Its gradient is a reduce-scatter in the parameter's own dtype.

    Args:
      part: this device's shard, along the axes that are sharded over data axes.
      spec: its sharding over the manual axes.
      dtype: of the result.
      sent_as: dtype to send it in, if it is not `dtype`.
      stages: `PjitPartitioner.scatter_stages`.
      automatic: its sharding over the other axes.
    """
    sharded = tuple((i, axes) for i, axes in enumerate(spec) if axes)
    if not sharded:
        return part.astype(dtype)
    how = (sharded, tuple(stages.items()), automatic, jnp.dtype(dtype), jnp.dtype(sent_as or dtype), part.dtype)
    return _gathered(part, *how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5, 6))
def _gathered(
    part: jax.Array, sharded: tuple, stages: tuple, automatic: Any, dtype: Any, sent_as: Any, own_dtype: Any
) -> jax.Array:
    def gather(x: jax.Array) -> jax.Array:
        for i, axes in sharded:
            x = jax.lax.all_gather(x, axes, axis=i, tiled=True)
        return x

    return _on_parts(gather, automatic)(part.astype(sent_as)).astype(dtype)


def _on_parts(
    function: Callable[[jax.Array], jax.Array], spec: PartitionSpec | None
) -> Callable[[jax.Array], jax.Array]:
    """The function with further axes manual: along automatic axes XLA would gather its collectives' operands first."""
    names = {a for axes in spec or () for a in names_of(axes)}
    if not names:
        return function
    return jax.shard_map(function, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False)


def _gathered_forward(part: jax.Array, *how: Any) -> tuple[jax.Array, None]:
    return _gathered(part, *how), None


def _gathered_backward(
    sharded: tuple,
    stages: tuple,
    automatic: Any,
    dtype: Any,
    sent_as: Any,
    own_dtype: Any,
    _: None,
    whole: jax.Array,
) -> tuple[jax.Array]:
    def scatter(x: jax.Array) -> jax.Array:
        for i, axes in reversed(sharded):
            one = isinstance(axes, str)
            x = collectives.scatter_over(
                x, (axes,) if one else axes, i, stages=dict(stages).get(axes, ()) if one else ()
            )
        return x

    return (_on_parts(scatter, automatic)(whole.astype(own_dtype)),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def keep_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy for `jax.checkpoint`: parameters are gathered again in the backward pass, the rest is kept."""
    return primitive.name not in ("all_gather", "shard_map")
