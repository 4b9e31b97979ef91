"""Goodput: what each run's wall-clock time went into, over all its restarts, as one bar."""

from __future__ import annotations

from perex_t5x.experiments.report import plot
from perex_t5x.experiments.report.dataset import Dataset
from perex_t5x.experiments.report.load import LoadedRun
from perex_t5x.goodput import PHASES, Goodput, add_up_all

TITLE = "Goodput"
_MOST = 40  # bars


def goodput_bars(data: Dataset) -> plot.Plot | plot.LeftOut:
    runs = [(run, run.goodput) for run in data.runs if run.goodput is not None]
    if not runs:
        return plot.LeftOut(TITLE, "no run has recorded what its time went into")
    drawn = sorted(runs, key=lambda pair: -pair[1].wall_clock)[:_MOST]
    several = len(data.studies) > 1
    names = {id(run): f"{run.study}: {run.name}" if several else run.name for run, _ in drawn}
    rows = [
        (names[id(run)], PHASES[phase], i, seconds, goodput.shares[phase], goodput.attempts)
        for run, goodput in drawn
        for i, (phase, seconds) in enumerate(goodput.seconds.items())
        if seconds
    ]
    entries = plot.distinct_colours(list(PHASES.values())[:-1])
    entries.append(plot.LegendEntry(PHASES["down"], "#b9b9b9", "#6f6f6f"))  # the ninth colour
    warnings = [f"{_MOST} of {len(runs)} runs are drawn, those that took longest."] if len(runs) > _MOST else []
    columns = ("run", "phase", "order", "seconds", "share", "attempts")
    spec = _spec([names[id(run)] for run, _ in drawn])
    legend = {"phase": ("what time went into", entries)}
    return plot.Plot("goodput", TITLE, _sentence(runs), spec, columns, rows, legend, [], warnings)


def _spec(runs: list[str]) -> plot.Json:
    tooltip = plot.tooltip(
        ("run", "run"),
        ("time", "phase"),
        ("share", "share", ".1%"),
        ("seconds", "seconds", ",.0f"),
        ("starts", "attempts"),
    )
    x = {**plot.quantity("share", "share of the wall-clock time", ".0%", domain=[0, 1], nice=False), "stack": "zero"}
    return {
        "transform": plot.coloured(),
        "height": 20 * len(runs) + 10,
        "mark": {"type": "bar"},
        "encoding": {
            "y": {"field": "run", "type": "nominal", "sort": runs, "title": None, "axis": {"labelLimit": 220}},
            "x": x,
            "order": {"field": "order"},
            **plot.key_encoding(False),
            "tooltip": tooltip,
        },
    }


def _sentence(runs: list[tuple[LoadedRun, Goodput]]) -> str:
    total = add_up_all([goodput for _, goodput in runs])
    if len(runs) == 1:
        return f"{runs[0][0].name}: {total.line}."
    worst, goodput = min(runs, key=lambda pair: pair[1].shares["steps"])
    share = f"{goodput.shares['steps']:.1%}".replace("%", " %")
    return f"All {len(runs)} runs together: {total.line}. The lowest is {worst.name} with {share}."
