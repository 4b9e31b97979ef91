"""Which row stands at which place of an endless, shuffled, mixed sequence: pure index arithmetic.

Everything here is a function of (seed, place), so any host can compute any part of any batch, and a resumed run has
nothing to restore. The hash is written out, and so the same in every version of every library.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def _hash(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, elementwise on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _combine(*values: int) -> int:
    state = 0
    for value in values:
        seeded = np.array([(state + (value + 1) * _GOLDEN) & _MASK], np.uint64)
        state = int(_hash(seeded)[0])
    return state


def permutation(size: int, *key: int) -> np.ndarray:
    """A uniformly random permutation of range(size) that is a function of `key`.

    >>> permutation(8, 0, 0).tolist()
    [1, 3, 6, 5, 0, 7, 4, 2]
    """
    start = np.uint64(_combine(*key))
    numbers = _hash(start + np.arange(size, dtype=np.uint64) * np.uint64(_GOLDEN))
    order = np.argsort(numbers, kind="stable")
    return order.astype(np.uint32) if size < 2**32 else order


class EpochOrder:
    """Rows of one task: every epoch visits each row once, in a new order if `seed` is given."""

    def __init__(self, size: int, seed: int | None, component: int = 0):
        self.size = size
        self._seed = seed
        self._component = component
        # Two epochs, for the batches that lie across their border.
        self._epoch = functools.lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, seed: int, epoch: int) -> np.ndarray:
        return permutation(self.size, seed, self._component, epoch)

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Row numbers at the given places of the endless sequence."""
        if self._seed is None:
            return places % self.size
        epochs, within = np.divmod(places, self.size)
        result = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._epoch(self._seed, int(epoch))[within[chosen]]
        return result


class MixedOrder:
    """Several tasks mixed by rates, as evenly as integers allow.

    Task k's j-th row is due at time (j + ½) / r_k, with r_k its share of the total rate, and the sequence is all rows
    by due time. After n rows, task k has had n·r_k of them, to within one per other task. The rows before a time are
    counted in closed form, so that any place is found without walking there.
    """

    def __init__(self, sizes: Sequence[int], rates: Sequence[float], seed: int | None):
        self._shares = np.asarray(rates, np.float64) / np.sum(rates)
        self._orders = [EpochOrder(n, seed, component) for component, n in enumerate(sizes)]
        self._offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.size = int(np.sum(sizes))

    def _count_before(self, time: float) -> np.ndarray:
        counts = np.maximum(np.ceil(time * self._shares - 0.5), 0).astype(np.int64)
        # The same comparison as for the due times themselves, whatever the rounding above did.
        counts -= (counts > 0) & ((counts - 0.5) / self._shares >= time)
        counts += (counts + 0.5) / self._shares < time
        return counts

    def _events(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(task, number within the task) at places start..stop."""
        slack = len(self._shares) + 1
        first = self._count_before(start - slack)
        last = self._count_before(stop + slack)
        tasks = np.repeat(np.arange(len(first)), last - first)
        numbers = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        due = (numbers + 0.5) / self._shares[tasks]
        by_due = np.lexsort((tasks, due))[start - first.sum() : stop - first.sum()]
        return tasks[by_due], numbers[by_due]

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Row numbers (into the tasks' rows laid end to end) at consecutive places."""
        tasks, numbers = self._events(int(places[0]), int(places[-1]) + 1)
        result = np.empty(len(places), np.int64)
        for k, order in enumerate(self._orders):
            chosen = tasks == k
            if chosen.any():
                result[chosen] = order.rows(numbers[chosen]) + self._offsets[k]
        return result
