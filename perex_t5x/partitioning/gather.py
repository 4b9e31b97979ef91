"""FSDP: sharded parameters gathered inside the step, each where it is used; their gradients are reduce-scattered."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from perex_t5x.partitioning.rules import names_of
from perex_t5x.per_example import collectives

_NONE: Mapping[str, tuple[int, ...]] = MappingProxyType({})


def gather_by_spec(
    shard: jax.Array,
    spec: PartitionSpec,
    dtype: Any,
    sent_as: Any = None,
    stages: Mapping[str, tuple[int, ...]] = _NONE,
    automatic: PartitionSpec | None = None,
    transport: Any = None,
) -> jax.Array:
    """The whole parameter, in `dtype`, from this device's shard: an all-gather.

    Its gradient is a reduce-scatter in the parameter's own dtype, or sent in a narrower one.

    Args:
      shard: this device's part along the axes that are sharded over data axes.
      spec: its sharding over the manual axes.
      dtype: of the result.
      sent_as: dtype to send it in, if it is not `dtype`.
      stages: `PjitPartitioner.scatter_stages`.
      automatic: its sharding over the other axes.
      transport: dtype to send the gradient in; see `perex_t5x.per_example.collectives`. None: its own.
    """
    sharded = tuple((i, axes) for i, axes in enumerate(spec) if axes)
    if not sharded:
        return shard.astype(dtype)
    sent_as = jnp.dtype(sent_as or dtype)
    transport = None if transport is None else jnp.dtype(transport)
    how = _Gather(sharded, tuple(stages.items()), automatic, jnp.dtype(dtype), sent_as, shard.dtype, transport)
    return _gathered(shard, how)


@dataclasses.dataclass(frozen=True)
class _Gather:
    """The arguments of `gather_by_spec`, hashable; `sharded` has (dimension, mesh axes) pairs."""

    sharded: tuple
    stages: tuple
    automatic: PartitionSpec | None
    dtype: Any
    sent_as: Any
    own_dtype: Any
    transport: Any

    def on_shards(self, function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        """The function with further axes manual: along automatic axes XLA would gather its collectives' operands first."""
        names = {a for axes in self.automatic or () for a in names_of(axes)}
        if not names:
            return function
        return jax.shard_map(
            function, in_specs=self.automatic, out_specs=self.automatic, axis_names=names, check_vma=False
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(shard: jax.Array, how: _Gather) -> jax.Array:
    def gather(x: jax.Array) -> jax.Array:
        for i, axes in how.sharded:
            x = jax.lax.all_gather(x, axes, axis=i, tiled=True)
        return x

    return how.on_shards(gather)(shard.astype(how.sent_as)).astype(how.dtype)


def _gathered_backward(how: _Gather, _: None, whole: jax.Array) -> tuple[jax.Array]:
    def scatter(x: jax.Array) -> jax.Array:
        for i, axes in reversed(how.sharded):
            stages = dict(how.stages).get(axes, ()) if isinstance(axes, str) else ()
            x = collectives.scatter_over(x, names_of(axes), i, how.transport, stages)
        return x

    return (how.on_shards(scatter)(whole.astype(how.own_dtype)),)


_gathered.defvjp(lambda shard, how: (_gathered(shard, how), None), _gathered_backward)


def keep_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy for `jax.checkpoint`: parameters are gathered again in the backward pass, the rest is kept."""
    return primitive.name not in ("all_gather", "shard_map")
