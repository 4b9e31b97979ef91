"""Rate-loss basins: the final validation loss against the learning rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from perex_t5x.experiments.report import intervals, plot
from perex_t5x.experiments.report.dataset import RATE, STUDY, Dataset, final_losses, labelled, losses_by_seed
from perex_t5x.experiments.report.load import LoadedRun

TITLE = "Rate-loss basins"


@dataclasses.dataclass
class Basin:
    """Final losses of one optimizer and batch size at each rate tried."""

    label: str
    study: str
    runs: dict[float, list[LoadedRun]]

    def means(self) -> dict[float, intervals.Mean]:
        losses_by_rate = {rate: final_losses(runs) for rate, runs in sorted(self.runs.items())}
        return {rate: intervals.mean_interval(losses) for rate, losses in losses_by_rate.items() if losses}

    def best(self) -> float:
        """The rate with the lowest mean, over the seeds that all rates have: a few more at one of them would decide it."""
        losses = {rate: losses_by_seed(runs) for rate, runs in self.runs.items()}
        losses = {rate: by_seed for rate, by_seed in sorted(losses.items()) if by_seed}
        shared = set.intersection(*(set(by_seed) for by_seed in losses.values()))
        means = {rate: math.fsum(by_seed[s] for s in shared or by_seed) / len(shared or by_seed)
                 for rate, by_seed in losses.items()}  # fmt: skip
        return min(means, key=lambda rate: means[rate])

    def on_edge(self) -> bool:
        """The best rate is the smallest or largest tried; a diverged rate beyond it counts as tried."""
        return self.best() in (min(self.runs), max(self.runs))


def find(data: Dataset) -> list[Basin]:
    """One basin for each combination of the other axes that has at least two finished rates."""
    others = [axis for axis in data.axes if not is_rate(axis.name)]
    basins: dict[tuple, Basin] = {}
    for run in (run for group in data.groups for run in group.runs):  # in the groups' order, and so with their colours
        if not run.learning_rate:
            continue
        key = (*(axis.of(run) for axis in others), run.study)
        label = labelled((axis.name, axis.of(run)) for axis in others if axis.name != STUDY) or run.study
        basin = basins.setdefault(tuple(map(str, key)), Basin(label, run.study, {}))
        basin.runs.setdefault(run.learning_rate, []).append(run)
    return [basin for basin in basins.values() if len(basin.means()) > 1]


def at_best_rate(data: Dataset) -> set[int]:
    """Indices of the groups that have the best rate of their basin, and of those that are in none."""
    best = {id(run) for basin in find(data) for run in basin.runs[basin.best()]}
    inside = {id(run) for basin in find(data) for runs in basin.runs.values() for run in runs}
    return {g for g, group in enumerate(data.groups) if id(group.runs[0]) in best or id(group.runs[0]) not in inside}


def is_rate(axis: str) -> bool:
    """Whether an axis of a sweep stands for learning rates."""
    name = axis.lower()
    return axis == RATE or name.endswith("learning_rate") or name.startswith("rate")


def rate_loss_basins(data: Dataset) -> plot.Plot | plot.LeftOut:
    basins = find(data)
    if not basins:
        rates = {run.learning_rate for run in data.runs if run.finished}
        why = "no optimizer and batch size has finished runs at two or more learning rates"
        return plot.LeftOut(TITLE, why if rates else "no run has finished with a validation loss")
    rows, warnings = [], []
    ceiling = _ceiling([m.mean for b in basins for m in b.means().values()])
    above = 0
    for basin in basins:
        best, means = basin.best(), basin.means()
        for rate, members in sorted(basin.runs.items()):
            broken = sum(r.status == "failed" or (r.status == "done" and r.final_loss is None) for r in members)
            m = means.get(rate, intervals.Mean(math.nan, math.nan, math.nan, 0))
            above += m.mean > ceiling
            high = min(m.high, ceiling) if m.high == m.high else m.high
            rows.append((basin.label, basin.study, rate, m.mean, m.low, high, m.count, rate == best, broken, ceiling))
        if basin.on_edge():
            warnings.append(
                f"{basin.label}: the best rate, {best:.3g}, lies on the edge of the grid; a better one may lie beyond."
            )
    if above:
        warnings.append(f"{above} point(s) lie above the plot, beyond a loss of {ceiling:.3g}.")
    labels = list(dict.fromkeys(b.label for b in basins))
    studies = list(dict.fromkeys(b.study for b in basins))
    columns = ("line", "panel", "rate", "mean", "low", "high", "n", "best", "failed", "ceiling")
    spec = _spec(ceiling)
    if len(studies) > 1:
        spec = plot.in_panels(spec, "panel", studies)
    legend = {"line": ("each line", plot.distinct_colours(labels))}
    return plot.Plot("basins", TITLE, _sentence(basins), spec, columns, rows, legend, warnings=warnings)


def _ceiling(losses: Sequence[float]) -> float:
    """Above this a loss only hides the basins' form: six times as far from the best as the lower half is."""
    ranked = sorted(losses)
    middle = ranked[(len(ranked) - 1) // 2]
    return min(ranked[-1], ranked[0] + max(6 * (middle - ranked[0]), 0.05 * abs(ranked[0]))) + 1e-3 * abs(ranked[0])


def _spec(ceiling: float) -> plot.Json:
    x = plot.quantity("rate", "learning rate", "~g", type="log", nice=False, padding=14)
    y = {"type": "quantitative", "scale": {"zero": False}, "title": "final validation loss"}
    mean = {**y, "field": "mean"}
    losses = ((name, field, ".4f") for name, field in plot.LOSSES)
    tooltip = plot.tooltip(
        ("run", "line"), ("learning rate", "rate", ".4g"), *losses, ("seeds", "n"), ("failed", "failed")
    )
    inside = f"isValid(datum.mean) && datum.mean <= {ceiling!r}"
    colour = plot.key_encoding(False)
    span = {"y": {**y, "field": "low"}, "y2": {"field": "high"}, **colour}
    best = {"condition": {"test": "datum.best", "value": 160}, "value": 45}
    shape = {"condition": {"test": "datum.best", "value": "diamond"}, "value": "circle"}
    point = {"y": mean, **colour, "size": best, "shape": shape, "tooltip": tooltip}
    cross = {"type": "point", "shape": "cross", "angle": 45, "size": 70, "filled": True}

    def layer(mark: plot.Json, encoding: plot.Json, *filters: str) -> plot.Json:
        return {"transform": [{"filter": test} for test in filters], "mark": mark, "encoding": encoding}

    return {
        "transform": plot.coloured(),
        "height": plot.HEIGHT,
        "encoding": {"x": x, "detail": {"field": "line", "type": "nominal"}},
        "layer": [
            layer({"type": "line", "strokeWidth": 2}, {"y": mean, **plot.key_encoding()}, inside),
            layer({"type": "rule", "strokeWidth": 1.5}, span, inside, "isValid(datum.low)"),
            layer({"type": "point", "filled": True, "opacity": 1}, point, inside),
            layer(cross, {"y": {**y, "field": "ceiling"}, **colour, "tooltip": tooltip}, "datum.failed > 0"),
        ],
    }


def _sentence(basins: Sequence[Basin]) -> str:
    ranked = sorted(basins, key=lambda b: b.means()[b.best()].mean)
    texts = [f"{b.label}: best {intervals.words(b.means()[b.best()])} at rate {b.best():.3g}" for b in ranked[:6]]
    more = f"; and {len(ranked) - 6} more" if len(ranked) > 6 else ""
    failed = any(run.status == "failed" for basin in basins for runs in basin.runs.values() for run in runs)
    crosses = " Crosses at the top are rates at which a run failed." if failed else ""
    return f"Each at its own best rate (diamonds), lowest first: {'; '.join(texts)}{more}.{crosses}"
