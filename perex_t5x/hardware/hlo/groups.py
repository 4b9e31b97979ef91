"""The groups of devices of a collective, and the mesh axes that they correspond to.

The numbers in a program are positions in the mesh, counted row by row: device 5 of a mesh (data 4, model 2) is data 2,
model 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from perex_t5x.hardware.hlo.text import numbers

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})?\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:,? ?device_ids=\((.*?)\)(?= \{))? \{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_BRACES = re.compile(r"\{([\d,]+)\}")


def parse_groups(attributes: str, num_devices: int) -> Groups:
    """The groups of an instruction's `replica_groups`, or the pairs of its `source_target_pairs`.

    >>> parse_groups("replica_groups={{0,2},{1,3}}", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("replica_groups=[2,2]<=[2,2]T(1,0), use_global_device_ids=true", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("replica_groups={}", 3)
    ((0, 1, 2),)
    """
    listed = _LISTED.search(attributes)
    if listed and listed[1]:
        return tuple(numbers(group) for group in _BRACES.findall(listed[1]))
    if iota := _IOTA.search(attributes):
        return _rows(_iota(iota[2], iota[3]).reshape(numbers(iota[1])))
    if mesh := _MESH.search(attributes):
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    if listed or "replica_groups=" not in attributes:
        return (tuple(range(num_devices)),)
    raise ValueError(f"replica groups in an unknown notation: {attributes[:200]}")


def _rows(grid: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in grid)


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """`[2,4]T(1,0)`: the numbers from 0 in this shape, transposed."""
    grid = np.arange(math.prod(numbers(sizes))).reshape(numbers(sizes))
    return grid.transpose(numbers(order)) if order else grid


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> Groups:
    """`mesh['a'=2,'b'=4] {'a'}`, where `'b':(2)2` stands for the part of size 2 of b that has 2 parts before it."""
    sizes = {name: int(size) for name, size, _, _ in _AXIS.findall(axes)}
    parts: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}  # (parts before it, its size), in order
    for name, _, before, size in _AXIS.findall(grouped):
        parts[name].append((int(before or 1), int(size or sizes[name])))
    shape, places = [], {}
    for name, size in sizes.items():
        done = 1
        for before, part in sorted(parts[name]):
            if before > done:
                shape.append(before // done)
            places[name, before] = len(shape)
            shape.append(part)
            done = before * part
        shape.append(size // done)
    chosen = [places[name, int(before or 1)] for name, _, before, _ in _AXIS.findall(grouped)]
    ids = _device_ids(device_ids) if device_ids else np.arange(math.prod(sizes.values()))
    rest = [i for i in range(len(shape)) if i not in chosen]
    grid = ids.reshape(shape).transpose(*rest, *chosen)
    return _rows(grid.reshape(-1, math.prod(shape[i] for i in chosen)))


def _device_ids(text: str) -> np.ndarray:
    iota = re.fullmatch(r"\[?([\d,]+)\]?T\(([\d,]+)\)", text)
    return _iota(iota[1], iota[2]).reshape(-1) if iota else np.array(numbers(text))


def mesh_axes(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the members of a group differ, in the mesh's order.

    >>> mesh_axes(((0, 2, 4, 6), (1, 3, 5, 7)), {"replica": 1, "data": 4, "model": 2})
    ('data',)
    """
    sizes = tuple(mesh_shape.values())
    differ = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group), sizes))
        differ |= np.any(places != places[:, :1], axis=1)
    return tuple(name for name, does in zip(mesh_shape, differ, strict=True) if does)
