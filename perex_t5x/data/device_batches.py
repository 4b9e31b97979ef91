"""From row numbers to arrays on devices: every process reads the rows of its own devices only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np

Rows = dict[str, np.ndarray]
Shardings = Mapping[str, jax.sharding.Sharding]
Spec = Mapping[str, jax.ShapeDtypeStruct]


def row_range(index: tuple[slice, ...], batch_size: int) -> tuple[int, int]:
    start, stop, _ = index[0].indices(batch_size)
    return start, stop


def place(read: Callable[[int, int], Rows], spec: Spec, shardings: Shardings) -> dict:
    """Global arrays whose rows come from `read(start, stop)`, each distinct range read once.

    Where this process holds every row, that is one read and one transfer; elsewhere each device
    shard is cut from the range it lies in.
    """
    _check_names(spec, shardings)
    if _holds_all_rows(shardings):
        batch_size = next(iter(spec.values())).shape[0]
        rows = read(0, batch_size)
        return jax.device_put(rows, {name: shardings[name] for name in rows})
    ranges: dict[tuple[int, int], Rows] = {}

    def shard(name: str, index: tuple[slice, ...]) -> np.ndarray:
        wanted = row_range(index, spec[name].shape[0])
        if wanted not in ranges:
            ranges[wanted] = read(*wanted)
        return ranges[wanted][name][(slice(None), *index[1:])]

    return {
        name: jax.make_array_from_callback(
            spec[name].shape, shardings[name], lambda index, name=name: shard(name, index)
        )
        for name in spec
    }


def _holds_all_rows(shardings: Shardings) -> bool:
    return all(s.is_fully_addressable for s in shardings.values())


def _check_names(spec: Spec, shardings: Shardings) -> None:
    if set(spec) - set(shardings):
        raise ValueError(f"no sharding for {sorted(set(spec) - set(shardings))}")
