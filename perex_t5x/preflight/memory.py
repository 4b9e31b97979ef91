"""The arguments of a step on one device, part by part, before anything is compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer

PARAMETERS, OPTIMIZER, OTHER, BATCH = "parameters", "optimizer state", "other state", "batch"


def argument_parts(trainer: Trainer, batch_spec: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, int]:
    """Bytes of parameters, optimizer state, other state (step, RNG, the monitor's averages) and batch on one device.

    As many as the numbers take; the chip's memory comes in tiles, and the compiler's count of the arguments has their
    padding, too.
    """
    shapes, shardings, _ = trainer.abstract_state({name: spec.shape for name, spec in batch_spec.items()})
    rows = {name: trainer.partitioner.data_sharding for name in batch_spec}
    other = ("step", "rng", "monitor")
    return {
        PARAMETERS: bytes_on_device(shapes.params, shardings.params),
        OPTIMIZER: bytes_on_device(shapes.opt_state, shardings.opt_state),
        OTHER: sum(bytes_on_device(getattr(shapes, name), getattr(shardings, name)) for name in other),
        BATCH: bytes_on_device(dict(batch_spec), rows),
    }


def bytes_on_device(shapes: Any, shardings: Any) -> int:
    """Bytes of a tree's arrays on one device.

    >>> sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    >>> bytes_on_device({"w": jax.ShapeDtypeStruct((3, 4), "float32")}, {"w": sharding})
    48
    """
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(where.shard_shape(x.shape)) * x.dtype.itemsize for x, where in leaves)
