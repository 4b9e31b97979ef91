"""Mesh, logical axis rules, and the sharding of any pytree.

axes             names of the mesh axes                   mesh         the device mesh
rules            logical axis names to mesh axes          partitioner  `PjitPartitioner`, and what models call of it
param_shardings  the parameters inside the step           gather       sharded parameters made whole (FSDP)
"""

from perex_t5x.partitioning.mesh import nearest_divisor, torus_sizes
from perex_t5x.partitioning.param_shardings import ParamShardings
from perex_t5x.partitioning.partitioner import (
    PjitPartitioner,
    activation_sharding,
    constrain,
    gather_parameter,
    has_sharded_parameters,
    knows_devices,
    like_params,
    on_each_device,
    parts,
    platform,
)
from perex_t5x.partitioning.rules import logical_to_mesh_axes, standard_logical_axis_rules

__all__ = [
    "ParamShardings",
    "PjitPartitioner",
    "activation_sharding",
    "constrain",
    "gather_parameter",
    "has_sharded_parameters",
    "knows_devices",
    "like_params",
    "logical_to_mesh_axes",
    "nearest_divisor",
    "on_each_device",
    "parts",
    "platform",
    "standard_logical_axis_rules",
    "torus_sizes",
]
