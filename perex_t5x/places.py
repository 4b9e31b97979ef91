"""Where the parameters lie on the mesh, as the step sees it: parts over the data axes, the rest left to the compiler."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from perex_t5x.partitioning import PjitPartitioner, gather_by_spec, only_axes, path_name
from perex_t5x.per_example.arguments import parameter_filter


@dataclasses.dataclass(frozen=True)
class Places:
    """
    Attributes:
      shardings: a tree like the parameters, of `NamedSharding`.
      batch_axes: the mesh axes that divide the batch.
      scatter_stages: of the partitioner.
    """

    shardings: Any
    batch_axes: tuple[str, ...]
    scatter_stages: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, partitioner: PjitPartitioner, shardings: Any) -> Places:
        return cls(shardings, partitioner.batch_axes, partitioner.scatter_stages)

    def on_data(self, parameters: str | None = None) -> Any:
        """Of each parameter, the part of its sharding that is over data axes; None for those not selected.

        Args:
          parameters: as in `per_example.grad_statistics`: a regular expression, or None for all.
        """
        wanted = parameter_filter(parameters)

        def one(path: Any, sharding: Any) -> PartitionSpec | None:
            if wanted is not None and not wanted(path_name(path)):
                return None
            return only_axes(sharding.spec, self.batch_axes)

        return jax.tree_util.tree_map_with_path(one, self.shardings)

    def summed(self) -> Any:
        """Of each parameter, the data axes it is gathered over, and its gradient therefore summed over."""
        return jax.tree.map(lambda s: self._names(s.spec), self.shardings)

    def gather(self, params: Any) -> Any:
        """All parameters whole, for a network that does not gather them where it uses them."""
        whole = functools.partial(gather_by_spec, stages=self.scatter_stages)
        return jax.tree.map(lambda x, spec: whole(x, spec, x.dtype), params, self.on_data())

    def constrain(self, tree: Any) -> Any:
        """A tree like the parameters (None where one is missing), each leaf where its parameter is."""
        if next(iter(jax.tree.leaves(self.shardings))).mesh.size == 1:
            return tree
        shardings, structure = jax.tree.flatten(self.shardings)
        leaves = structure.flatten_up_to(tree)
        return structure.unflatten(
            [
                None if x is None else jax.lax.with_sharding_constraint(x, s)
                for x, s in zip(leaves, shardings, strict=True)
            ]
        )

    def _names(self, spec: PartitionSpec) -> tuple[str, ...]:
        every = [a for axes in spec for a in ((axes,) if isinstance(axes, str) else axes or ())]
        return tuple(a for a in self.batch_axes if a in every)
