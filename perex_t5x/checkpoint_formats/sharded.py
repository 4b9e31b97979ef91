"""Reads leaves onto a mesh: each process the parts that its devices hold, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from perex_t5x.checkpoint_formats.leaves import Leaf

_AT_ONCE = 1 << 30  # bytes that are being read, in the memory of a process
_Index = Any  # tuple[slice, ...]
_Parts = dict[tuple[tuple[int, int], ...], Callable[[], np.ndarray]]


def read_sharded(leaves: Mapping[str, Leaf], into: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads each leaf with the dtype and the sharding wanted of it; their shapes are equal.

    >>> from perex_t5x.checkpoint_formats.leaves import of_array
    >>> sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    >>> wanted = jax.ShapeDtypeStruct((2,), np.float32, sharding=sharding)
    >>> read_sharded({"w": of_array("w", np.arange(2))}, {"w": wanted})["w"].tolist()
    [0.0, 1.0]
    """
    result = {}
    for names in _batches(leaves, into):
        begun = {name: _begin(leaves[name], into[name]) for name in names}
        for name in names:
            result[name] = _assembled(begun.pop(name), into[name])
    return result


def _batches(leaves: Mapping[str, Leaf], into: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name, leaf in leaves.items():
        own = sum(math.prod(stop - start for start, stop in key) for key in _keys(into[name])) * leaf.dtype.itemsize
        if batch and size + own > _AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += own
    if batch:
        yield batch


def _key(index: _Index, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def _keys(wanted: jax.ShapeDtypeStruct) -> set[tuple[tuple[int, int], ...]]:
    indices = wanted.sharding.addressable_devices_indices_map(wanted.shape).values()
    return {_key(index, wanted.shape) for index in indices}


def _begin(leaf: Leaf, wanted: jax.ShapeDtypeStruct) -> _Parts:
    return {key: leaf.begin(tuple(slice(*bounds) for bounds in key)) for key in _keys(wanted)}


def _assembled(parts: _Parts, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    arrays = {key: wait().astype(wanted.dtype) for key, wait in parts.items()}
    return jax.make_array_from_callback(
        wanted.shape, wanted.sharding, lambda index: arrays[_key(index, wanted.shape)], dtype=wanted.dtype
    )
