"""The axes of the mesh, and how shardings name them."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

MESH_AXES = ("replica", "data", "model")
DATA_AXES = ("replica", "data")

MeshAxes = str | tuple[str, ...] | None


def names_of(axes: MeshAxes) -> tuple[str, ...]:
    """Mesh axes as a tuple, however they are given.

    >>> names_of("data"), names_of(("replica", "data")), names_of(None)
    (('data',), ('replica', 'data'), ())
    """
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def only_axes(spec: PartitionSpec, wanted: Sequence[str]) -> PartitionSpec:
    """A `PartitionSpec` without mesh axes other than `wanted`.

    >>> tuple(only_axes(PartitionSpec(None, "data", "model"), ("replica", "data")))
    (None, 'data', None)
    """

    def only(axes: MeshAxes) -> MeshAxes:
        kept = tuple(a for a in names_of(axes) if a in wanted)
        return kept[0] if len(kept) == 1 else kept or None

    return PartitionSpec(*map(only, spec))
