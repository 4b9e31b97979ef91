"""Parameter shardings inside the step's `shard_map`: manual over the data axes, automatic over `model`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from perex_t5x.partitioning.gather import gather_by_spec
from perex_t5x.partitioning.partitioner import PjitPartitioner
from perex_t5x.partitioning.rules import names_of
from perex_t5x.per_example.engine.arguments import parameter_filter


@dataclasses.dataclass(frozen=True)
class ParamShardings:
    """The parameters' shardings, split the way the step needs them.

    Attributes:
      partitioner: the mesh.
      shardings: a tree like the parameters, of `NamedSharding`.
    """

    partitioner: PjitPartitioner
    shardings: Any

    def manual_specs(self, parameters: str | None = None) -> Any:
        """Each parameter's `PartitionSpec` over the axes that divide the batch; None for parameters not selected.

        Args:
          parameters: as in `per_example.grad_statistics`: a regular expression, or None for all.
        """
        is_selected = parameter_filter(parameters)

        def manual(path: Any, sharding: NamedSharding) -> PartitionSpec | None:
            if is_selected is not None and not is_selected(keystr(path, simple=True, separator="/")):
                return None
            return self.partitioner.divided(sharding.spec)[0]

        return jax.tree_util.tree_map_with_path(manual, self.shardings)

    def auto_specs(self) -> Any:
        """Each parameter's sharding over the axes that are left to the compiler; None on one device.

        `PartitionSpec`s where the data axes are manual, since they then refer to the `shard_map`'s mesh; else
        `NamedSharding`s.
        """
        mesh = self.partitioner.mesh
        if mesh.size == 1:
            return None
        specs = jax.tree.map(lambda s: self.partitioner.divided(s.spec)[1], self.shardings)
        if self.partitioner.batch_axes:
            return specs
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def gathered_axes(self) -> Any:
        """The data axes over which each parameter is gathered, so that its gradient arrives summed over them."""

        def axes_of(sharding: NamedSharding) -> tuple[str, ...]:
            spec, _ = self.partitioner.divided(sharding.spec)
            used = [a for axes in spec for a in names_of(axes)]
            return tuple(a for a in self.partitioner.batch_axes if a in used)

        return jax.tree.map(axes_of, self.shardings)

    def gather(self, params: Any, transport: Any = None) -> Any:
        """All parameters whole, for a model that does not gather them where it uses them; see `gather_by_spec`."""

        def whole(shard: jax.Array, sharding: NamedSharding) -> jax.Array:
            manual, automatic = self.partitioner.divided(sharding.spec)
            stages = self.partitioner.scatter_stages
            return gather_by_spec(shard, manual, shard.dtype, stages=stages, automatic=automatic, transport=transport)

        return jax.tree.map(whole, params, self.shardings)

    def constrain(self, tree: Any) -> Any:
        """A tree like the parameters (None where one is missing), each leaf with its parameter's sharding."""
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
