"""What analyses share: choosing runs, means over seeds, and how numbers are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from perex_t5x.experiments.report import intervals
from perex_t5x.experiments.report.dataset import Key, final_losses, grouped, losses_by_seed
from perex_t5x.experiments.report.intervals import Mean
from perex_t5x.experiments.report.load import LoadedRun


def final(runs: Sequence[LoadedRun]) -> Mean:
    """The final validation loss over seeds."""
    return intervals.mean_interval(final_losses(runs))


def rate_of(run: LoadedRun) -> float:
    """Where in its grid a run's rate stands: relative where the sweep says so, else absolute."""
    return run.values.get("rate_factor", run.values.get("learning_rate", run.learning_rate or 0.0))


def best_rate(runs: Sequence[LoadedRun]) -> float | None:
    """Of runs that differ in rate and seed: the rate of the lowest mean, among those with most finished seeds.

    Where rates were tuned on a few seeds and one was then run on all, that one is it.
    """
    by_rate = {rate: [r for r in rs if r.finished] for rate, rs in grouped(runs, rate_of).items()}
    by_rate = {rate: rs for rate, rs in by_rate.items() if rs}
    if not by_rate:
        return None
    most = max(len(rs) for rs in by_rate.values())
    full = [rate for rate, rs in by_rate.items() if len(rs) == most]
    return min(full, key=lambda rate: final(by_rate[rate]).mean)


def at_best_rate(by_arm: Mapping[Key, Sequence[LoadedRun]]) -> dict[Key, list[LoadedRun]]:
    """The finished runs of every arm at its best rate; without the arms that have none."""
    best = {arm: best_rate(runs) for arm, runs in by_arm.items()}
    at_best = {arm: [r for r in runs if r.finished and rate_of(r) == best[arm]] for arm, runs in by_arm.items()}
    return {arm: runs for arm, runs in at_best.items() if runs}


def on_edge(runs: Sequence[LoadedRun], best: float | None) -> bool:
    """Whether the rate is the smallest or largest tried; one that failed counts as tried."""
    tried = [rate_of(run) for run in runs]
    return best is not None and len(set(tried)) > 1 and best in (min(tried), max(tried))


def paired(runs: Sequence[LoadedRun], others: Sequence[LoadedRun]) -> Mean:
    """The difference of final losses, seed by seed: the same seed has the same start and the same batches.

    >>> a = [LoadedRun("a", seed=s, status="done", final_loss=2.0 + s) for s in range(3)]
    >>> b = [LoadedRun("b", seed=s, status="done", final_loss=1.5 + s) for s in range(3)]
    >>> paired(a, b).mean
    0.5
    """
    theirs = losses_by_seed(others)
    ours = [(run.seed, loss) for run in runs if (loss := run.finished_loss) is not None]
    return intervals.mean_interval([loss - theirs[seed] for seed, loss in ours if seed in theirs])


def apart(difference: Mean) -> bool:
    """Whether the interval leaves out 0; never with fewer than three seeds."""
    return difference.count > 2 and (difference.low > 0 or difference.high < 0)


def interval(m: Mean, digits: int = 4) -> str:
    """Low and high.

    >>> interval(Mean(1.5, 1.0, 2.0, 3), 2), interval(Mean(1.5, np.nan, np.nan, 1))
    ('1.00 to 2.00', 'one seed')
    """
    if not m.count:
        return "none finished"
    return "one seed" if m.count == 1 else f"{m.low:.{digits}f} to {m.high:.{digits}f}"


def signed(difference: Mean, digits: int = 4) -> str:
    """A difference with its interval.

    >>> signed(Mean(-0.5, -1.0, 0.0, 3), 1)
    '-0.5 (-1.0 to 0.0)'
    """
    return f"{difference.mean:+.{digits}f} ({interval(difference, digits)})" if difference.count else "–"


def finding(
    title: str, text: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], **more: str
) -> dict[str, Any]:
    """With a table; `more` may have `paper`, what the paper says, and `plot`, the report's plot that shows it."""
    return {"title": title, "text": text, "table": {"columns": columns, "rows": rows}, **more}


def number(value: Any, digits: int = 4) -> float | None:
    """For a table: rounded; None for what is not a number."""
    return round(float(value), digits) if value is not None and np.isfinite(value) else None
