"""Do learning curves of different batch sizes fall onto one curve? A number for it.

With v(b, s, x) the validation loss of batch size b and seed s after x examples seen, interpolated linearly onto common
points x after the warm-up, and sd with n − 1 in its denominator:

    across_batch = mean over x of  sd over b of  mean over s of  v(b, s, x)
    across_seed  = mean over x of  mean over b of  sd over s of  v(b, s, x)
    collapse number = across_batch / across_seed

1 says that batch sizes differ as much as seeds do. Curves that are the same but for the seed do not give 0: a mean over S
seeds still moves by sd/√S, so the number is then about 1/√S (`perfect`).

Few seeds: a batch size with one seed counts in `across_batch` and not in `across_seed`; if no batch size has two, there is
no number (nan) and `across_batch`, in units of the loss, is all that can be said. With two or three seeds the sd of one
batch size is uncertain by half of it or more; as a rule of thumb, not a test, numbers that differ by less than a factor of
two then say little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Curve:
    """The validation losses of one run against examples seen."""

    batch_size: int
    examples: Sequence[float]
    losses: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Collapse:
    """What was found, and from what."""

    number: float  # nan where it cannot be said
    across_batch: float
    across_seed: float
    perfect: float  # about what curves that differ by seeds only would give
    batch_sizes: tuple[int, ...]
    seeds: int  # the fewest of any batch size
    first: float  # examples seen, of the common range
    last: float
    left_out: int  # curves that are not finite or too short


def collapse(curves: Sequence[Curve], warmup_examples: float = 0.0, points: int = 100) -> Collapse | None:
    """The collapse number of curves under one scaling rule; None with fewer than two batch sizes or no common range.

    Args:
      curves: one for each batch size and seed. One that has fewer than two points, is not finite after the warm-up, or ends
        before half of the longest one is left out and counted.
      warmup_examples: the range begins here, or where the last curve begins if that is later.
      points: how many common points, evenly spaced in examples seen.

    >>> x = np.linspace(0, 1000, 21)
    >>> shifts = {8: 0.0, 16: 0.2, 32: 0.4}
    >>> curves = [Curve(b, x, 2 - x / 1000 + shifts[b] + seed) for b in shifts for seed in (-0.1, 0.1)]
    >>> found = collapse(curves, warmup_examples=100)
    >>> print(f"{found.number:.3f} = {found.across_batch:.3f} / {found.across_seed:.3f}")
    1.414 = 0.200 / 0.141
    >>> print(collapse(curves[:2]))  # one batch size
    None
    """
    longest = max((max(c.examples, default=0.0) for c in curves), default=0.0)
    usable = [c for c in curves if _usable(c, warmup_examples, longest / 2)]
    sizes = tuple(sorted({c.batch_size for c in usable}))
    if len(sizes) < 2:
        return None
    first = max(warmup_examples, *(min(c.examples) for c in usable))
    last = min(max(c.examples) for c in usable)
    if last <= first:
        return None
    grid_X = np.linspace(first, last, points)
    means, deviations, seeds = [], [], []
    for size in sizes:
        losses_SxX = np.stack([_interpolated(c, grid_X) for c in usable if c.batch_size == size])
        means.append(losses_SxX.mean(axis=0))
        seeds.append(len(losses_SxX))
        if len(losses_SxX) > 1:
            deviations.append(losses_SxX.std(axis=0, ddof=1))
    across_batch = float(np.std(means, axis=0, ddof=1).mean())
    across_seed = float(np.mean(deviations)) if deviations else float("nan")
    number = across_batch / across_seed if across_seed > 0 else float("nan")
    perfect = float(np.sqrt(np.mean(1 / np.asarray(seeds))))
    left_out = len(curves) - len(usable)
    return Collapse(number, across_batch, across_seed, perfect, sizes, min(seeds), first, last, left_out)


def _usable(curve: Curve, start: float, reach: float) -> bool:
    x, y = np.asarray(curve.examples, float), np.asarray(curve.losses, float)
    return len(x) > 1 and x.max() >= reach and bool(np.isfinite(y[x >= start]).all())


def _interpolated(curve: Curve, grid_X: np.ndarray) -> np.ndarray:
    x, y = np.asarray(curve.examples, float), np.asarray(curve.losses, float)
    order = np.argsort(x)
    finite = np.isfinite(y[order])
    return np.interp(grid_X, x[order][finite], y[order][finite])
