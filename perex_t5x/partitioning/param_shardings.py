"""Where the parameters lie on the mesh, as the step sees it: parts over the data axes, the rest left to the compiler."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from perex_t5x.partitioning import PjitPartitioner, path_name
from perex_t5x.partitioning.axes import names_of
from perex_t5x.partitioning.gather import gather_by_spec
from perex_t5x.per_example.engine.arguments import parameter_filter


@dataclasses.dataclass(frozen=True)
class Places:
    """
    Attributes:
      partitioner: the mesh.
      shardings: a tree like the parameters, of `NamedSharding`.
    """

    partitioner: PjitPartitioner
    shardings: Any

    def on_data(self, parameters: str | None = None) -> Any:
        """Of each parameter, its sharding over the axes that divide the batch; None for those not selected.

        Args:
          parameters: as in `per_example.grad_statistics`: a regular expression, or None for all.
        """
        wanted = parameter_filter(parameters)

        def one(path: Any, sharding: NamedSharding) -> PartitionSpec | None:
            if wanted is not None and not wanted(path_name(path)):
                return None
            return self.partitioner.divided(sharding.spec)[0]

        return jax.tree_util.tree_map_with_path(one, self.shardings)

    def automatic(self) -> Any:
        """Of each parameter, its sharding over the axes that the compiler sees to; on one device None."""
        mesh = self.partitioner.mesh
        if mesh.size == 1:
            return None
        specs = jax.tree.map(lambda s: self.partitioner.divided(s.spec)[1], self.shardings)
        if self.partitioner.batch_axes:
            return specs
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def summed(self) -> Any:
        """Of each parameter, the data axes it is gathered over, and its gradient therefore summed over."""

        def names(sharding: NamedSharding) -> tuple[str, ...]:
            spec, _ = self.partitioner.divided(sharding.spec)
            every = [a for axes in spec for a in names_of(axes)]
            return tuple(a for a in self.partitioner.batch_axes if a in every)

        return jax.tree.map(names, self.shardings)

    def gather(self, params: Any) -> Any:
        """All parameters whole, for a network that does not gather them where it uses them."""

        def whole(part: jax.Array, sharding: NamedSharding) -> jax.Array:
            manual, automatic = self.partitioner.divided(sharding.spec)
            stages = self.partitioner.scatter_stages
            return gather_by_spec(part, manual, part.dtype, stages=stages, automatic=automatic)

        return jax.tree.map(whole, params, self.shardings)

    def constrain(self, tree: Any) -> Any:
        """A tree like the parameters (None where one is missing), each leaf where its parameter is."""
        if self.partitioner.mesh.size == 1:
            return tree
        shardings, structure = jax.tree.flatten(self.shardings)
        leaves = structure.flatten_up_to(tree)
        return structure.unflatten(
            [
                None if x is None else jax.lax.with_sharding_constraint(x, s)
                for x, s in zip(leaves, shardings, strict=True)
            ]
        )
