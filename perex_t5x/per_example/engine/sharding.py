"""Shardings of a gradient's sums over mesh axes that the compiler handles (tensor parallelism).

Sums begin as zeros, which have no sharding that the compiler could propagate: it would keep them whole on every device, and
every device would compute all of them. So the parameters' shardings are given, and followed back from a gradient to where it
is produced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from perex_t5x.per_example.engine import jaxprs


@dataclasses.dataclass(frozen=True)
class AutoSharding:
    """A mesh axis (or several, or None) for each dimension of an array; `mesh` is None inside `shard_map`."""

    axes: tuple[Any, ...]
    mesh: Any = None  # a Mesh or an AbstractMesh

    @classmethod
    def of(cls, sharding: Any, ndim: int) -> AutoSharding | None:
        """From a `PartitionSpec` or `NamedSharding`; None where it says nothing."""
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        if spec is None or not any(spec):
            return None
        return cls((*spec, *(None,) * (ndim - len(spec))), mesh)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The array, constrained to this sharding."""
        spec = PartitionSpec(*self.axes)
        return jax.lax.with_sharding_constraint(x, spec if self.mesh is None else NamedSharding(self.mesh, spec))

    def before_permutation(self, eqn: core.JaxprEqn) -> AutoSharding | None:
        """The sharding of a permutation's operand, given its result's; None where it is not simply expressed."""
        old, new = jaxprs.shape_of(eqn.invars[0]), jaxprs.shape_of(eqn.outvars[0])
        if eqn.primitive.name == "transpose":
            axes = [None] * len(old)
            for i, k in enumerate(eqn.params["permutation"]):
                axes[k] = self.axes[i]
            return dataclasses.replace(self, axes=tuple(axes))
        # A reshape that splits or joins dimensions would split or join mesh axes, too. No constraint is better than a wrong
        # one, which the compiler would obey by moving data.
        if _without_ones(old) != _without_ones(new):
            return None
        kept = iter([a for a, size in zip(self.axes, new, strict=True) if size != 1])
        return dataclasses.replace(self, axes=tuple(None if size == 1 else next(kept) for size in old))

    def without_leading(self) -> AutoSharding | None:
        """Of one step's part of an array that a scan stacks; None where the stack itself is divided over devices."""
        return None if self.axes[0] is not None else dataclasses.replace(self, axes=self.axes[1:])

    def transposed(self) -> AutoSharding:
        return dataclasses.replace(self, axes=self.axes[::-1])


def constrain(x: jax.Array, sharding: AutoSharding | None) -> jax.Array:
    return x if sharding is None else sharding(x)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
