"""Do learning curves of different batch sizes fall onto one another, and under which rule for the learning rate?

The rate is tuned at the base batch size; then all rules and batch sizes are run from it. The smallest and the largest batch
size are tuned as well: how their best rates lie to each other is an exponent, of which the rules are guesses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from perex_t5x.experiments.report import dataset, intervals
from perex_t5x.experiments.report.collapse import Collapse, Curve, Panel, collapse
from perex_t5x.experiments.report.collapse import panels as collapse_panels
from perex_t5x.experiments.report.intervals import Mean
from perex_t5x.experiments.report.load import LoadedRun, RunSet
from perex_t5x.experiments.studies import analysis
from perex_t5x.experiments.studies.base import Finding, Pod, Stages, Study, arms, narrowed, tune
from perex_t5x.experiments.sweep import Sweep, axes

_PAPER = (
    "η ∝ √B gives similar learning curves, against examples seen, over a wide range of batch sizes; it breaks at large "
    "batch sizes, and is said to hold even where μ² dominates."
)


def stages(sweep: Sweep, extensions: int) -> Stages:
    """Tunes at the base batch size and at both ends, then runs everything from the base's best rate."""
    sizes = sorted(sweep.batch_sizes or [])
    base = sweep.base_batch_size or sizes[len(sizes) // 2]
    first = {} if isinstance(sweep.rule, str) else {axes.RULE: sweep.rules[0]}
    tuned = [{**first, axes.BATCH_SIZE: size} for size in dict.fromkeys([base, sizes[0], sizes[-1]])]
    best = yield from tune(sweep, tuned, extensions)
    yield [narrowed(sweep, arm, [best[0].best], sweep.seeds) for arm in arms(sweep)]


def analyse(folder: RunSet, path: str) -> list[Finding]:
    del path
    panels = collapse_panels(dataset.gather([folder]))
    findings = [_collapse_finding(panels), *_range_finding(panels), _where_finding(panels)] if panels else []
    return [*findings, *_exponent_finding(folder.runs)]


# --- the collapse numbers ---------------------------------------------------------------------------------------------


def _collapse_finding(panels: Sequence[Panel]) -> Finding:
    ranked = sorted(panels, key=lambda p: (math.isnan(p.result.number), p.result.number, p.result.across_batch))
    rows = []
    plain = next((p for p in ranked if p.runs[0].rule == "sqrt"), None)
    for panel in ranked:
        number = jackknife(panel.runs, lambda runs, p=panel: _log_number(p, runs)).mapped(math.exp)
        rows.append(
            [panel.label, analysis.number(panel.result.number, 2), analysis.interval(number, 2),
             analysis.number(panel.result.across_batch), analysis.number(panel.result.across_seed), _beside(plain, panel)]
        )  # fmt: skip
    best, sizes = ranked[0], ranked[0].result.batch_sizes
    text = f"Over batch sizes {sizes[0]} to {sizes[-1]} the curves lie closest under {best.label}"
    text += f" ({best.result.number:.2f})" if math.isfinite(best.result.number) else ""
    for other in ranked[1:]:
        ratio = jackknife([*best.runs, *other.runs], lambda runs, o=other: _log_ratio(best, o, runs))
        clear = "" if analysis.apart(ratio) else ", which is not clearly apart"
        text += f"; {other.label} {other.result.number:.2f}{clear}"
    text += (
        f". Curves that differ by seeds only would give {best.result.perfect:.2f}. Intervals are jackknife t-intervals over "
        "the seeds; 'apart' compares the deviations across batch sizes, in the loss's unit, seed by seed."
    )
    columns = ["rule", "collapse number", "interval", "sd across batch sizes", "sd across seeds",
               "sd across batch sizes, times sqrt's"]  # fmt: skip
    title = f"Closest under the {best.label} rule"
    return analysis.finding(title, text, columns, rows, paper=_PAPER, plot="collapse")


def _collapse(panel: Panel, runs: Sequence[LoadedRun]) -> Collapse | None:
    """Of those of the panel's runs that are among these."""
    mine = {id(run) for run in panel.runs}
    return collapse([Curve.of(run) for run in runs if id(run) in mine], panel.warmup)


def _log_number(panel: Panel, runs: Sequence[LoadedRun]) -> float:
    """Not a number where the runs have no collapse number: without one seed, a batch size may have no curve."""
    part = _collapse(panel, runs)
    return math.log(part.number) if part is not None else math.nan


def _beside(plain: Panel | None, panel: Panel) -> str:
    """How far batch sizes lie apart, beside the square-root rule."""
    if plain is None or plain is panel:
        return "–" if plain is None else "1"
    m = jackknife([*plain.runs, *panel.runs], lambda runs: _log_ratio(plain, panel, runs)).mapped(math.exp)
    return f"{m.mean:.2f} ({analysis.interval(m, 2)})"


def _log_ratio(one: Panel, other: Panel, runs: Sequence[LoadedRun]) -> float:
    """Not a number as in `_log_number`."""
    parts = _collapse(other, runs), _collapse(one, runs)
    if parts[0] is None or parts[1] is None:
        return math.nan
    return math.log(parts[0].across_batch / parts[1].across_batch)


def jackknife(runs: Sequence[LoadedRun], of: Callable[[Sequence[LoadedRun]], float]) -> Mean:
    """A number with an interval from leaving out one seed at a time; with none where the others alone have no number.

    >>> runs = [LoadedRun("a", seed=s, final_loss=float(s)) for s in range(3)]
    >>> m = jackknife(runs, lambda rs: float(np.mean([r.final_loss for r in rs])))
    >>> same = analysis.intervals.mean_interval([0.0, 1.0, 2.0])
    >>> abs(m.low - same.low) < 1e-9, m.mean
    (True, 1.0)
    """
    seeds = dict.fromkeys(run.seed for run in runs)
    n, whole = len(seeds), of(runs)
    left = [of([run for run in runs if run.seed != seed]) for seed in seeds] if n >= 3 else []
    if not left or not all(map(math.isfinite, left)):
        return Mean(whole, math.nan, math.nan, 1)
    # As pseudo-values, of which an ordinary interval is taken; their mean is the estimate less its bias.
    m = intervals.mean_interval([n * whole - (n - 1) * value for value in left])
    return Mean(whole, m.low - m.mean + whole, m.high - m.mean + whole, n)


# --- where curves part ------------------------------------------------------------------------------------------------


def _range_finding(panels: Sequence[Panel]) -> list[Finding]:
    """The collapse number as more and more of the larger batch sizes count."""
    sizes = sorted({size for panel in panels for size in panel.result.batch_sizes})
    ends = sizes[2:]
    if len(ends) < 2:
        return []
    rows, reach = [], {}
    for panel in panels:
        cells: list[Any] = [panel.label]
        for end in ends:
            part = _collapse(panel, [run for run in panel.runs if run.batch_size and run.batch_size <= end])
            number = part.number if part is not None else math.nan
            cells.append(analysis.number(number, 2))
            if number <= 1:
                reach[panel.label] = end
        rows.append(cells)
    said = [f"{label} up to {end}" for label, end in sorted(reach.items(), key=lambda item: -item[1])]
    text = (
        f"Collapse numbers of the batch sizes from {sizes[0]} to ... At most 1, so that batch sizes differ no more than "
        f"seeds do: {', '.join(said) or 'nowhere'}."
    )
    columns = ["rule", *(f"to {end}" for end in ends)]
    return [analysis.finding("How far each rule reaches", text, columns, rows, paper=_PAPER, plot="collapse")]


def _where_finding(panels: Sequence[Panel]) -> Finding:
    """The largest batch size against the smallest, along the run."""
    shares = (0.2, 0.5, 1.0)
    rows = []
    for panel in panels:
        low, high = panel.result.batch_sizes[0], panel.result.batch_sizes[-1]
        cells: list[Any] = [panel.label]
        for share in shares:
            m = intervals.mean_interval(_gaps(panel, low, high, share * panel.result.last))
            cells.append(f"{m.mean:+.3f} ({analysis.interval(m, 3)})")
        rows.append(cells)
    sizes = panels[0].result.batch_sizes
    text = (
        f"Validation loss at batch size {sizes[-1]} less that at {sizes[0]}, seed by seed, at a fifth, a half and the end "
        "of the run: above 0 the large batch is behind. A rule that is right early and wrong late, or the other way round, "
        "shows here and not in the one number."
    )
    columns = ["rule", *(f"{share:.0%} of the examples" for share in shares)]
    return analysis.finding("Where the curves part", text, columns, rows, plot="collapse")


def _gaps(panel: Panel, low: int, high: int, examples: float) -> list[float]:
    def at(size: int) -> dict[Any, float]:
        runs = [run for run in panel.runs if run.batch_size == size and run.finished]
        return {r.seed: float(np.interp(examples, r.examples(r.evaluation[0]), r.evaluation[1])) for r in runs}

    small, large = at(low), at(high)
    return [large[seed] - small[seed] for seed in large if seed in small]


# --- the exponent -----------------------------------------------------------------------------------------------------


def _exponent_finding(runs: Sequence[LoadedRun]) -> list[Finding]:
    """How the best rate follows the batch size, from the basins of those that were tuned."""
    first = next((run.rule for run in runs), None)
    rows, points = [], []
    for size, of_size in dataset.by_batch_size([r for r in runs if r.rule == first]).items():
        by_rate = analysis.grouped([r for r in of_size if r.finished], lambda r: r.learning_rate)
        # The best rate was run with more seeds than the others: compared are those that all have.
        seeds = set.intersection(*({r.seed for r in group} for group in by_rate.values())) if by_rate else set()
        losses = {rate: analysis.final([r for r in group if r.seed in seeds]).mean
                  for rate, group in by_rate.items() if rate is not None}  # fmt: skip
        best = lowest(losses)
        if best is not None:
            points.append((math.log(size), math.log(best)))
            grid = sorted(losses)
            edge = min(losses, key=lambda r: losses[r]) in (grid[0], grid[-1])
            rows.append(
                [size, analysis.number(best, 5), analysis.number(min(losses.values())), "yes" if edge else "no"]
            )
    if len(points) < 2:
        return []
    x, y = np.asarray(points).T
    slope = float(np.polyfit(x, y, 1)[0])
    text = (
        f"Each batch size tuned for itself, the best rate grows as B^{slope:.2f} between {rows[0][0]} and {rows[-1][0]} "
        "(0.5: the square-root rule, 1: the linear one, 0: the constant one). The best rate is the minimum of a parabola "
        "through the lowest point of the basin and its neighbours."
    )
    columns = ["batch size", "best rate", "loss at the best rate tried", "on the edge"]
    title = f"The best rate grows as B^{slope:.2f}"
    return [analysis.finding(title, text, columns, rows, paper="η ∝ √B.", plot="basins")]


def lowest(losses: dict[float, float]) -> float | None:
    """The minimum of a parabola, in the logarithm of the rate, through the best rate and its neighbours.

    On an edge it is the best rate itself; None with fewer than three rates.

    >>> round(lowest({1.0: 2.0, 2.0: 1.0, 4.0: 2.0}), 3), lowest({1.0: 1.0, 2.0: 2.0, 4.0: 3.0})
    (2.0, 1.0)
    """
    grid = sorted(rate for rate, loss in losses.items() if math.isfinite(loss))
    if len(grid) < 3:
        return None
    i = min(range(len(grid)), key=lambda j: losses[grid[j]])
    if i in (0, len(grid) - 1):
        return grid[i]
    x = [math.log(rate) for rate in grid[i - 1 : i + 2]]
    a, b, _ = np.polyfit(x, [losses[rate] for rate in grid[i - 1 : i + 2]], 2)
    return math.exp(-b / (2 * a))


STUDY = Study(
    "sqrt_scaling",
    stages,
    analyse,
    quick=[
        "batch_sizes = [2, 8, 32]",
        "rule = ['sqrt', 'linear']",
        "rate_factors = [1.0, 2.0, 4.0]",
        "seeds = [0, 1, 2]",
    ],
    quick_gin=["TRAIN_STEPS = 128", "WARMUP_STEPS = 16", "EVAL_PERIOD = 16", "EVAL_STEPS = 8"],
    pod=Pod(batch_sizes=[0.5, 1.0, 2.0, 4.0]),
)
