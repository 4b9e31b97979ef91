"""Mesh, logical axis rules, and the sharding of any pytree."""

from perex_t5x.partitioning.partitioner import (
    PjitPartitioner,
    constrain,
    gather,
    holds_parts,
    logical_to_mesh_axes,
    nearest_divisor,
    path_name,
    standard_logical_axis_rules,
    torus_sizes,
)

__all__ = [
    "PjitPartitioner",
    "constrain",
    "gather",
    "holds_parts",
    "logical_to_mesh_axes",
    "nearest_divisor",
    "path_name",
    "standard_logical_axis_rules",
    "torus_sizes",
]
