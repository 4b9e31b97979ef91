"""Arrays that are sharded over Explicit mesh axes, as `jax.make_mesh` makes them.

With Explicit axes the sharding of every value is part of its type, and a loss that is written for a whole batch knows the
batch's. The engine calls the loss with one example, whose axis has size one and lies on no mesh axis. So inside

- the axes over which the batch's examples are spread are manual (`jax.shard_map`): each device computes the statistics of
  the examples that it has, and one collective adds them up;
- all others are Auto: the compiler keeps values where the parameters lie.

The results leave with explicit types again: statistics like the parameters, losses and norms like the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def mesh_of(tree: Any) -> Any:
    """The mesh with Explicit axes over which an array of the tree is sharded; None if there is none."""
    for leaf in jax.tree.leaves(tree):
        mesh = getattr(getattr(_type(leaf), "sharding", None), "mesh", None)
        if mesh is not None and not mesh.empty and AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a request's arrays lie.

    Attributes:
      mesh: with Explicit axes.
      examples: the entry of the batch's specs for its leading axis.
      data_axes: Explicit axes over which examples are spread, and units of them can be: those of `examples`, or ().
    """

    mesh: Any
    examples: Any
    data_axes: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Any, batch: Any, units: int) -> Layout:
        spec = cls(mesh, None, ()).sharding_of(batch).spec
        examples = spec[0] if spec else None
        axes = examples if isinstance(examples, tuple) else () if examples is None else (examples,)
        # Where a device's part is no whole number of groups, a group would have to be computed by two.
        whole = units % math.prod(mesh.shape[a] for a in axes) == 0
        return cls(mesh, examples, axes if whole else ())

    def sharding_of(self, array: Any) -> NamedSharding:
        """How an array lies on the mesh, as results that lie like it are to."""
        sharding = getattr(_type(array), "sharding", None)
        spec = PartitionSpec() if sharding is None or sharding.mesh.empty else sharding.spec
        return NamedSharding(self.mesh, spec)

    def run(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        batched: Any,
        results: Callable[..., Any],
        averages: Any,
    ) -> Any:
        """`function(*arguments)`, as the module's docstring says.

        Args:
          batched: a prefix of the arguments' tree: which have an axis of examples in front.
          results: from the shardings of (averages, what has an axis of examples, of groups, anything else) to a tree like
            the function's result.
          averages: shardings of the first.
        """
        whole = PartitionSpec()
        if self.data_axes:
            mine = PartitionSpec(self.data_axes)
            in_specs = jax.tree.map(lambda b: mine if b else whole, batched)
            function = jax.shard_map(
                function,
                in_specs=in_specs,
                out_specs=results(whole, mine, mine, whole),
                axis_names=set(self.data_axes),
                check_vma=False,  # sums are the same everywhere after a psum, which reductions by other means do not show
            )
        explicit = tuple(
            a for a, kind in zip(self.mesh.axis_names, self.mesh.axis_types, strict=True) if kind == AxisType.Explicit
        )
        on = lambda *entries: NamedSharding(self.mesh, PartitionSpec(*entries))  # noqa: E731
        groups = on(self.examples) if self.data_axes else on()
        shardings = results(averages, on(self.examples), groups, on())
        run = jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments))
        return run(*arguments) if traced else jax.jit(run)(*arguments)  # a shard_map over some axes needs a trace


def _type(leaf: Any) -> Any:
    try:
        return jax.typeof(leaf)
    except TypeError:  # a shape, for `Compute.trace`
        return leaf
