"""Learning curves: validation and train loss against examples seen, tokens or steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perex_t5x.experiments.report import basins, intervals, plot
from perex_t5x.experiments.report.dataset import Dataset, Group, final_losses
from perex_t5x.experiments.report.load import LoadedRun

TITLE = "Learning curves"
_POINTS = 12_000  # of all curves together: more make a page slow
_MANY = 8  # lines, of which more are hard to tell apart


def learning_curves(data: Dataset) -> plot.Plot | plot.LeftOut:
    points = int(np.clip(_POINTS / (2 * len(data.groups)), 12, 150))
    longest = longest_examples(data.runs)
    rows = [row for g, group in enumerate(data.groups) for row in _rows(g, group, points, longest)]
    kinds = [kind for kind in ("validation", "train") if any(row[1] == kind for row in rows)]
    if not rows:
        return plot.LeftOut(TITLE, "no run has logged a loss yet")
    begun = [run for run in data.runs if len(run.training[0]) or len(run.evaluation[0])]
    against = [("steps", "steps")]
    if all(run.batch_size for run in begun):
        if all(run.length for run in begun):
            against.insert(0, ("tokens", "target tokens, padding included"))
        against.insert(0, ("examples", "examples seen"))
    names = {"validation": "validation loss", "train": "train loss, smoothed"}
    bands = any(row[8] > 1 for row in rows)
    controls = [
        plot.Control("choice", "kind", "show", kinds[0], tuple((kind, names[kind]) for kind in kinds)),
        plot.Control("choice", "against", "against", against[0][0], tuple(against)),
        *curve_controls(bands),
    ]
    spec = curve_spec(against[0][1], bands)
    best = basins.at_best_rate(data)
    if len(best) < len(data.groups):
        controls.append(plot.Control("flag", "tuned", "best rates only", len(data.groups) > _MANY))
        rows = [(*row, row[0] in best) for row in rows]
        spec["transform"].append({"filter": "datum.best || !tuned"})
    columns = ("g", "kind", "examples", "tokens", "steps", "mean", "low", "high", "n", "share", "panel", "best")
    studies = [study.name for study in data.studies]
    if len(studies) > 1:
        spec = plot.in_panels(spec, "panel", studies)
    columns, text, warnings = columns[: len(rows[0])], _sentence(data), _warnings(data, kinds)
    return plot.Plot("curves", TITLE, text, spec, columns, rows, plot.legends(data), controls, warnings)


def curve_controls(bands: bool) -> list[plot.Control]:
    """What can be switched in every plot of `curve_spec`."""
    begin = ((0, "the start"), (0.1, "10 % of the run"), (0.5, "half of the run"))
    controls = [plot.Control("choice", "begin", "from", 0.1, begin), plot.Control("log", "log", "logarithmic", False)]
    return [*controls, plot.Control("flag", "band", "seed bands", True)] if bands else controls


def curve_spec(title: str, bands: bool) -> plot.Json:
    """Lines with bands behind them and points that show themselves under the pointer."""
    x = plot.quantity("x", title, "~s", nice=False)
    y = {"type": "quantitative", "scale": {"zero": False}, "title": "loss"}
    band = {
        "transform": [{"filter": "band && isValid(datum.low)"}],
        "mark": {"type": "area", "opacity": 0.16, "clip": True},
        "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}, **plot.key_encoding(False)},
    }
    line = {
        "mark": {"type": "line", "strokeWidth": 2, "clip": True},
        "encoding": {"y": {**y, "field": "mean"}, **plot.key_encoding()},
    }
    words = [("run", "line", ""), *((name, field, ".4f") for name, field in plot.LOSSES), ("seeds", "n", "d")]
    point = plot.nearest_point({**y, "field": "mean"}, [*words, ("at", "x", ",.0f")])
    return {
        "transform": [
            *plot.coloured(),
            {"filter": "datum.kind == kind && datum.share >= begin"},
            {"calculate": "datum[against]", "as": "x"},
        ],
        "height": plot.HEIGHT,
        "encoding": {"x": x, "detail": {"field": "line", "type": "nominal"}},
        "layer": [*([band] if bands else []), line, point],
    }


def _rows(g: int, group: Group, points: int, longest: float) -> list[tuple]:
    rows: list[tuple] = []
    run = group.shown[0]
    batch, length = float(run.batch_size or 1), run.length
    for kind in ("validation", "train"):
        curves = [r.evaluation if kind == "validation" else r.training for r in group.shown]
        if kind == "train":
            curves = [(x, intervals.smoothed(y)) for x, y in curves]
        curve = [(x, m) for x, m in intervals.mean_curve(curves, points) if x > 0]  # step 0 has no place on a log axis
        for step, m in curve:
            examples = step * batch
            tokens = examples * length if length else None
            share = examples / longest
            rows.append((g, kind, examples, tokens, step, m.mean, m.low, m.high, m.count, share, run.study))
    return rows


def longest_examples(runs: Sequence[LoadedRun]) -> float:
    """The examples seen by the run that went furthest."""
    return max(
        (float(run.examples(x)[-1]) for run in runs for x, _ in (run.evaluation, run.training) if len(x)), default=1.0
    )


def _sentence(data: Dataset) -> str:
    finals = [(intervals.mean_interval(final_losses(g.runs)), g) for g in data.groups if g.finished]
    if not finals:
        return "No run has finished with a validation loss, so there is nothing to rank yet."
    best, group = min(finals, key=lambda f: f[0].mean)
    if len(finals) == 1:
        return f"{group.label} ends at a validation loss of {intervals.words(best)}."
    worst, last = max(finals, key=lambda f: f[0].mean)
    text = f"Of {len(finals)} settings, {group.label} ends lowest, at a validation loss of {intervals.words(best)}; "
    text += f"{last.label} highest, at {intervals.words(worst)}."
    rivals = [g.label for m, g in finals if g is not group and m.low <= best.high and best.low <= m.high]
    if rivals:
        others = "one other" if len(rivals) == 1 else f"{len(rivals)} others"
        text += f" The lowest one's interval overlaps with that of {others}: seeds alone may explain their order."
    if best.count == 1:
        text += " One seed: how much of this is chance cannot be said."
    return text


def _warnings(data: Dataset, kinds: Sequence[str]) -> list[str]:
    warnings = []
    silent = sum(not len(run.evaluation[0]) for run in data.runs)
    if "validation" not in kinds:
        warnings.append("No run has evaluated: the curves are train losses.")
    elif silent:
        warnings.append(
            f"{silent} of {len(data.runs)} runs have no evaluation and are missing from the validation curves."
        )
    if broken := sum(run.status == "failed" for run in data.runs):
        warnings.append(
            f"{broken} run(s) failed: they are drawn where no other seed has finished, and the table has the reasons."
        )
    return warnings
