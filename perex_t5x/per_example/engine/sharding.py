"""Where a gradient's sums lie on mesh axes that the compiler handles (tensor parallelism).

Sums begin as zeros, of which the compiler knows no place: it would keep them whole on every device, and every device would
compute all of them. The parameters' places are given, and followed back from a gradient to where it is produced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh axis (or several, or None) for each dimension of an array; `mesh` is None inside `shard_map`."""

    axes: tuple[Any, ...]
    mesh: Mesh | None = None

    @classmethod
    def of(cls, sharding: Any, ndim: int) -> Placement | None:
        """From a `PartitionSpec` or `NamedSharding`; None where it says nothing."""
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        if spec is None or not any(spec):
            return None
        return cls((*spec, *(None,) * (ndim - len(spec))), mesh)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The array, put there."""
        spec = PartitionSpec(*self.axes)
        return jax.lax.with_sharding_constraint(x, spec if self.mesh is None else NamedSharding(self.mesh, spec))

    def before(self, eqn: core.JaxprEqn) -> Placement | None:
        """The place of what a permutation of elements moves here; None where that is not simply said."""
        old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if eqn.primitive.name == "transpose":
            axes = [None] * len(old)
            for i, k in enumerate(eqn.params["permutation"]):
                axes[k] = self.axes[i]
            return dataclasses.replace(self, axes=tuple(axes))
        if _without_ones(old) != _without_ones(new):
            return None
        kept = iter([a for a, size in zip(self.axes, new, strict=True) if size != 1])
        return dataclasses.replace(self, axes=tuple(None if size == 1 else next(kept) for size in old))

    def of_one(self) -> Placement | None:
        """Of one step's part of an array that a scan stacks."""
        return None if self.axes[0] is not None else dataclasses.replace(self, axes=self.axes[1:])

    def transposed(self) -> Placement:
        return dataclasses.replace(self, axes=self.axes[::-1])


def place(x: jax.Array, where: Placement | None) -> jax.Array:
    return x if where is None else where(x)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
