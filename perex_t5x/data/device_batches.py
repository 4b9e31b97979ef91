"""Batches on devices: every process reads only the rows of its own devices, in a thread ahead of the training step."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from perex_t5x.data.feed import Feed

Rows = dict[str, np.ndarray]
Shardings = Mapping[str, jax.sharding.Sharding]
Spec = Mapping[str, jax.ShapeDtypeStruct]


class EndOfData(IndexError):  # noqa: N818 (an end, not an error)
    """Asked for a batch behind the last one of a feed that does not repeat."""


def row_range(index: tuple[slice, ...], batch_size: int) -> tuple[int, int]:
    start, stop, _ = index[0].indices(batch_size)
    return start, stop


def rows_of_processes(sharding: jax.sharding.Sharding, batch_size: int) -> dict[int, tuple[tuple[int, int], ...]]:
    """Process -> the rows of the batch that its devices hold, as ascending ranges (start, stop) that do not touch.

    On a pod the hosts are blocks of chips, so that a host's rows are rarely one range.
    """
    ranges: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
    for device, index in sharding.devices_indices_map((batch_size, 1)).items():
        ranges[device.process_index].add(row_range(index, batch_size))
    return {process: _joined(sorted(held)) for process, held in sorted(ranges.items())}


def _joined(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """
    >>> _joined([(0, 2), (2, 4), (8, 10)])
    ((0, 4), (8, 10))
    """
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def make_global_batch(read: Callable[[int, int], Rows], spec: Spec, shardings: Shardings) -> dict:
    """Global arrays whose rows come from `read(start, stop)`, each distinct range read once.

    Where this process holds every row, that is one read and one transfer; elsewhere each device's shard is sliced from
    the range that contains it.
    """
    if missing := set(spec) - set(shardings):
        raise ValueError(f"no sharding for {sorted(missing)}")
    if _holds_all_rows(shardings):
        batch_size = next(iter(spec.values())).shape[0]
        rows = read(0, batch_size)
        return jax.device_put(rows, {name: shardings[name] for name in rows})
    ranges: dict[tuple[int, int], Rows] = {}

    def shard(name: str, index: Any) -> np.ndarray:  # slices; JAX's type has a None, too, which it never gives
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


class prefetch(Iterator):  # noqa: N801 (used like a function: `for step, batch in prefetch(...)`)
    """Iterates over (step, batch) from `start_step`; a background thread stays up to `buffer` batches ahead.

    An exception of the feed is raised where the batch would have been. `close()` (or leaving a `with` block) stops the
    thread and waits for it; it may be called twice.
    """

    def __init__(self, feed: Feed, start_step: int, shardings: Shardings | None = None, buffer: int = 2):
        if buffer < 1:
            raise ValueError(f"buffer = {buffer}: must be at least 1")
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=buffer)
        self._stop = threading.Event()
        self._finished = False
        self._thread = threading.Thread(
            target=self._work, args=(feed, start_step, shardings), name="prefetch", daemon=True
        )
        self._thread.start()

    def _put(self, kind: str, value: Any) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put((kind, value), timeout=0.1)
                return not self._stop.is_set()
            except queue.Full:
                continue
        return False

    def _work(self, feed: Feed, step: int, shardings: Shardings | None) -> None:
        try:
            while self._put("batch", (step, feed.batch(step, shardings))):
                step += 1
        except EndOfData:
            self._put("end", None)
        except BaseException as e:
            self._put("error", e)

    def __next__(self) -> tuple[int, dict[str, Any]]:
        if self._finished:
            raise StopIteration
        kind, value = self._queue.get()
        if kind == "batch":
            return value
        self._finished = True
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        self._finished = True
        self._stop.set()
        with contextlib.suppress(queue.Empty):  # makes room, so that a thread that waits for it ends at once
            while True:
                self._queue.get_nowait()
        self._thread.join()

    def __enter__(self) -> prefetch:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
