"""The axes of the mesh, and the logical axis rules: from the names of a parameter's or activation's dimensions to mesh axes.

A parameter or activation carries *logical* axis names (`embed`, `mlp`, ...). The first rule for a name whose mesh axis is
still free applies:

    rules = standard_logical_axis_rules(activation_partitioning_dims=1, parameter_partitioning_dims=1)
    logical_to_mesh_axes(("embed", "mlp"), rules)          # PartitionSpec(None, 'model')
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jax.sharding import PartitionSpec

from perex_t5x import arguments
from perex_t5x.errors import ConfigError

MESH_AXES = ("replica", "data", "model")
DATA_AXES = ("replica", "data")
LAYERS = "layers"  # the logical axis along which a scan stacks its layers' parameters

MeshAxes = str | tuple[str, ...] | None
LogicalAxisRules = Sequence[tuple[str, MeshAxes]]


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


def standard_logical_axis_rules(
    activation_partitioning_dims: Literal[1, 2] = 1,
    parameter_partitioning_dims: Literal[1, 2] = 1,
    additional_rules: LogicalAxisRules | None = None,
) -> LogicalAxisRules:
    """Returns T5X's standard rules, as (logical axis, mesh axis) pairs in order of priority.

    Args:
      activation_partitioning_dims: 2 also shards the `embed` axis of activations over `model`.
      parameter_partitioning_dims: 2 also shards the `embed` axis of parameters over `data` (FSDP).
      additional_rules: appended, for axis names of one's own.

    >>> dict(standard_logical_axis_rules())["mlp"]
    'model'
    >>> ("embed", "data") in standard_logical_axis_rules(parameter_partitioning_dims=2)
    True
    """
    arguments.check("standard_logical_axis_rules", arguments.hints(standard_logical_axis_rules), dict(locals()))
    rules: list[tuple[str, MeshAxes]] = [("batch", DATA_AXES)]
    rules += [(name, "model") for name in ("vocab", "mlp", "heads", "joined_kv")]
    if activation_partitioning_dims == 2:
        rules.append(("embed", "model"))
    if parameter_partitioning_dims == 2:
        rules.append(("embed", "data"))
    rules += [(name, None) for name in ("embed", "kv", "length", LAYERS, "relpos_buckets")]
    return (*rules, *(additional_rules or ()))


def logical_to_mesh_axes(names: Sequence[str | None], rules: LogicalAxisRules) -> PartitionSpec:
    """Maps logical axis names to a `PartitionSpec`; a mesh axis is used at most once.

    >>> rules = [("batch", "data"), ("length", None), ("embed", "data"), ("embed", None)]
    >>> tuple(logical_to_mesh_axes(("batch", "length", "embed"), rules))
    ('data', None, None)
    """
    unknown = [n for n in names if n is not None and n not in {rule[0] for rule in rules}]
    if unknown:
        raise ConfigError(
            f"no logical axis rule for {unknown[0]!r} (axes {tuple(names)}). Add ({unknown[0]!r}, None) "
            "or a mesh axis to PjitPartitioner.logical_axis_rules, for instance through "
            "standard_logical_axis_rules.additional_rules."
        )
    spec: list[MeshAxes] = [None] * len(names)
    settled = [name is None for name in names]
    used: set[str] = set()
    for logical, mesh_axes in rules:
        for i, name in enumerate(names):
            if settled[i] or name != logical:
                continue
            wanted = names_of(mesh_axes)
            if used & set(wanted):
                continue  # a later rule for the same name may still fit
            spec[i] = mesh_axes
            settled[i] = True
            used |= set(wanted)
    return PartitionSpec(*spec)


def check_rules(rules: LogicalAxisRules) -> None:
    """Raises for a rule that names an unknown mesh axis, or shards the axis of layers over data."""
    for name, axes in rules:
        for axis in names_of(axes):
            if axis not in MESH_AXES:
                raise ConfigError(
                    f"PjitPartitioner.logical_axis_rules maps {name!r} to {axis!r}; the mesh axes are {MESH_AXES}."
                )
            if name == LAYERS and axis in DATA_AXES:
                raise ConfigError(
                    f"PjitPartitioner.logical_axis_rules maps 'layers' to {axis!r}: every device runs every layer. "
                    "Shard 'embed' over 'data' instead (standard_logical_axis_rules.parameter_partitioning_dims = 2)."
                )
