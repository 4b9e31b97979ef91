"""Means and intervals over seeds, and curves made small enough for a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

INTERVAL = "95 % t-interval of the mean over seeds; with two seeds their range"

# Two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


class Mean(NamedTuple):
    """A mean with its interval; low and high are nan where there is one value only."""

    mean: float
    low: float
    high: float
    count: int

    def mapped(self, of: Callable[[float], float]) -> Mean:
        """Of a function that grows, such as back from the logarithm, in which ratios have even intervals."""
        return Mean(of(self.mean), of(self.low), of(self.high), self.count)


def mean_interval(values: Sequence[float] | np.ndarray) -> Mean:
    """The mean of the finite values, with a 95 % t-interval; the range of two values, none of one.

    An interval from two values would be nine times as wide as their distance.

    >>> mean_interval([1.0, 2.0])
    Mean(mean=1.5, low=1.0, high=2.0, count=2)
    >>> print("%.2f %.2f %.2f %d" % mean_interval([1.0, 2.0, 3.0]))
    2.00 -0.48 4.48 3
    """
    finite = np.asarray([v for v in values if np.isfinite(v)], float)
    n = len(finite)
    if n == 0:
        return Mean(np.nan, np.nan, np.nan, 0)
    mean = float(finite.mean())
    if n == 1:
        return Mean(mean, np.nan, np.nan, 1)
    if n == 2:
        return Mean(mean, float(finite.min()), float(finite.max()), 2)
    t = _T[n - 2] if n - 2 < len(_T) else 1.96
    half = t * float(finite.std(ddof=1)) / n**0.5
    return Mean(mean, mean - half, mean + half, n)


def words(m: Mean) -> str:
    """A mean with its interval.

    >>> words(mean_interval([1.0, 2.0]))
    '1.5000 (1.0000 to 2.0000, 2 seeds)'
    """
    if m.count == 1:
        return f"{m.mean:.4f} (one seed)"
    return f"{m.mean:.4f} ({m.low:.4f} to {m.high:.4f}, {m.count} seeds)"


def mean_curve(curves: Sequence[tuple[np.ndarray, np.ndarray]], points: int) -> list[tuple[float, Mean]]:
    """The mean of several curves (x, y), point for point; at most `points` of them.

    The points are those of the curve that has most, as far as the shortest reaches: beyond it a mean would jump.
    """
    curves = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in curves]
    curves = [(x, y) for x, y in curves if len(x)]
    if not curves:
        return []
    x = max((x for x, _ in curves), key=len)
    first, last = max(c[0] for c, _ in curves), min(c[-1] for c, _ in curves)
    x = x[(x >= first) & (x <= last)]
    if not len(x):
        x = np.asarray([last])
    x = x[thinned(len(x), points)]
    values = np.stack([np.interp(x, cx, cy) for cx, cy in curves])
    return [(float(at), mean_interval(values[:, i])) for i, at in enumerate(x)]


def thinned(length: int, points: int) -> np.ndarray:
    """Indices of at most `points` of `length`: half evenly spaced, half closer to the start, for logarithmic axes.

    >>> thinned(4, 10).tolist(), len(thinned(100_000, 50)) <= 50, int(thinned(100_000, 50)[-1])
    ([0, 1, 2, 3], True, 99999)
    """
    if length <= points:
        return np.arange(length)
    even = np.linspace(0, length - 1, points - points // 2)
    early = np.geomspace(1, length, points // 2) - 1
    return np.unique(np.concatenate([even, early]).round().astype(int))


def smoothed(values: np.ndarray, share: float = 0.05) -> np.ndarray:
    """The mean of the last `share` of all points at each point, so that single batches do not hide the course.

    >>> smoothed(np.array([4.0, 2.0, 2.0, 2.0]), share=0.5).tolist()
    [4.0, 3.0, 2.0, 2.0]
    """
    window = max(1, round(share * len(values)))
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    end = np.arange(1, len(values) + 1)
    begin = np.maximum(end - window, 0)
    number = counts[end] - counts[begin]
    return np.where(number > 0, (sums[end] - sums[begin]) / np.maximum(number, 1), np.nan)
