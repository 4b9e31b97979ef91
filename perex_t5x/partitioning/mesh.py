"""The device mesh: three axes, always present: `replica` (slices over the data-centre network), `data` and `model`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from perex_t5x.errors import ConfigError
from perex_t5x.partitioning.rules import MESH_AXES


def make_mesh(
    num_partitions: int | None,
    model_parallel_submesh: Sequence[int] | None,
    ici_mesh_shape: Sequence[int] | None,
    dcn_mesh_shape: Sequence[int] | None,
    devices: list[Any],
) -> Mesh:
    num_slices = len({getattr(d, "slice_index", 0) for d in devices})
    dcn = _three("dcn_mesh_shape", dcn_mesh_shape) if dcn_mesh_shape else (num_slices, 1, 1)
    across = math.prod(dcn)
    if len(devices) % across:
        raise ConfigError(
            f"PjitPartitioner.dcn_mesh_shape = {dcn} asks for {across} slices, which does not divide the "
            f"{len(devices)} device(s) here. The nearest that does: {(nearest_divisor(len(devices), across), 1, 1)}."
        )
    within = len(devices) // across
    if ici_mesh_shape:
        ici = _three("ici_mesh_shape", ici_mesh_shape)
        if math.prod(ici) != within:
            raise ConfigError(
                f"PjitPartitioner.ici_mesh_shape = {ici} has {math.prod(ici)} devices, but there are {within} in a slice. "
                f"The nearest that fits: ici_mesh_shape = {_nearest_shape(within, ici)}."
            )
    else:
        ici = (1, *_mesh_shape(within, num_partitions, model_parallel_submesh))
    if num_slices > 1:
        grid = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices=devices, allow_split_physical_axes=True)
        return Mesh(np.asarray(grid), MESH_AXES)
    shape = tuple(i * d for i, d in zip(ici, dcn, strict=True))
    if shape[2] == 1 and all(hasattr(d, "coords") for d in devices):
        # In the order of the torus: each of `replica` and `data` takes whole lines, planes or blocks of it.
        grid = np.array(sorted(devices, key=lambda d: (*d.coords, d.id))).reshape(shape)
    else:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES)


def _mesh_shape(
    num_devices: int, num_partitions: int | None, model_parallel_submesh: Sequence[int] | None
) -> tuple[int, int]:
    """Returns (data, model) sizes for the devices of one slice."""
    given = f"num_partitions = {num_partitions}"
    if model_parallel_submesh:
        given = f"model_parallel_submesh = {tuple(model_parallel_submesh)}"
        submesh = math.prod(model_parallel_submesh)
        if num_partitions not in (None, 1, submesh):
            raise ConfigError(
                f"PjitPartitioner.num_partitions = {num_partitions} and model_parallel_submesh = "
                f"{tuple(model_parallel_submesh)} (product {submesh}) disagree: give one of them."
            )
        num_partitions = submesh
    model = num_partitions or 1
    if model < 1 or num_devices % model:
        nearest = nearest_divisor(num_devices, model)
        raise ConfigError(
            f"PjitPartitioner.{given} does not divide the {num_devices} device(s) here. The nearest "
            f"that does: num_partitions = {nearest} (mesh data {num_devices // nearest} x model {nearest})."
        )
    return num_devices // model, model


def _three(name: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """Accepts (data, model) as T5X does, or (replica, data, model)."""
    shape = tuple(int(s) for s in shape)
    if len(shape) == 2:
        shape = (1, *shape)
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError(
            f"PjitPartitioner.{name} = {shape}: give (replica, data, model) or (data, model), all positive."
        )
    return shape


def _nearest_shape(devices: int, wanted: Sequence[int]) -> tuple[int, int, int]:
    """The mesh shape for this many devices whose sizes have the ratios nearest to 1 with those wanted.

    >>> _nearest_shape(8, (1, 3, 2)), _nearest_shape(8, (2, 4, 2))
    ((1, 4, 2), (1, 4, 2))
    """
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    shapes = [
        (r, d, devices // r // d) for r in divisors for d in divisors if devices // r % d == 0 and r * d <= devices
    ]
    return min(shapes, key=lambda shape: (sum(abs(math.log(a / b)) for a, b in zip(shape, wanted, strict=True)), shape))


def nearest_divisor(whole: int, wanted: int) -> int:
    return min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: (abs(d - wanted), d))


def torus_sizes(coordinates: Sequence[Sequence[int] | None]) -> tuple[int, ...]:
    """Sizes of the box that devices fill in a torus, slowest dimension first; () if they do not fill one in order.

    >>> torus_sizes([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]), torus_sizes([(0, 1), (0, 2)])
    ((2, 3), (2,))
    >>> torus_sizes([(0, 0), (0, 1), (1, 1), (1, 0)]), torus_sizes([None, None])
    ((), ())
    """
    known = [c for c in coordinates if c is not None]
    if len(known) < len(coordinates):
        return ()
    places = [sorted(set(values)) for values in zip(*known, strict=True)]
    used = [k for k, values in enumerate(places) if len(values) > 1]
    for order in itertools.permutations(used):
        expected = itertools.product(*(places[k] for k in order))
        if [tuple(c[k] for k in order) for c in known] == list(expected):
            return tuple(len(places[k]) for k in order)
    return ()
