"""The collapse of batch sizes: the collapse number, and the plot against examples seen, a panel for each scaling rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from perex_t5x.experiments.report import intervals
from perex_t5x.experiments.report.basins import is_rate
from perex_t5x.experiments.report.curves import curve_controls, curve_spec, longest_examples
from perex_t5x.experiments.report.dataset import (
    BATCH,
    RULE,
    Axis,
    Dataset,
    by_batch_size,
    final_losses,
    grouped,
    labelled,
    written,
)
from perex_t5x.experiments.report.load import LoadedRun
from perex_t5x.experiments.report.plot import Control, Json, LeftOut, Plot, coloured, in_panels, ordered_colours

TITLE = "Collapse of batch sizes"
_PANELS = 9


@dataclasses.dataclass
class Panel:
    """Runs of several batch sizes that differ in nothing else but their seeds and what the rule scales."""

    label: str
    runs: list[LoadedRun]
    result: Collapse
    warmup: float

    @property
    def loss(self) -> float:
        return float(np.mean(final_losses(self.runs) or [math.inf]))


def panels(data: Dataset) -> list[Panel]:
    """One for each rule and combination of the other axes; of several base rates the best for each."""
    axes = [axis for axis in data.axes if axis.name != BATCH and not is_rate(axis.name)]
    parts: dict[tuple, dict[str, list[LoadedRun]]] = {}
    for run in data.runs:
        if run.batch_size and len(run.evaluation[0]):
            same = parts.setdefault((run.rule, *(str(axis.of(run)) for axis in axes)), {})
            same.setdefault(_base_rate(run), []).append(run)
    chosen = []
    for by_rate in parts.values():
        by_base = {base: _panel(_label(runs[0], axes), runs) for base, runs in by_rate.items()}
        by_base = {base: panel for base, panel in by_base.items() if panel}
        if by_base:
            # A rate that was tried at a few batch sizes, to tune it, is no rival of one that was run at all of them.
            most = max(len(panel.result.batch_sizes) for panel in by_base.values())
            rivals = {base: panel for base, panel in by_base.items() if len(panel.result.batch_sizes) == most}
            base, best = min(rivals.items(), key=lambda item: item[1].loss)
            chosen.append(dataclasses.replace(best, label=f"{best.label}, {base}") if len(rivals) > 1 else best)
    return chosen


def _base_rate(run: LoadedRun) -> str:
    """The rate from which a rule scales, in words; without a rule there is none, and each batch size has its own."""
    if not run.rule:
        return ""
    return ", ".join(written(name, value) for name, value in run.values.items() if is_rate(name))


def _label(run: LoadedRun, axes: Sequence[Axis]) -> str:
    return labelled([(RULE, run.rule or "no rule"), *((axis.name, axis.of(run)) for axis in axes if axis.name != RULE)])


def _panel(label: str, runs: list[LoadedRun]) -> Panel | None:
    # A plain sweep over rates and batch sizes has no rule: each batch size then stands with its best rate.
    if not runs[0].rule:
        runs = [run for run in runs if run.learning_rate == _best_rate(runs, run.batch_size)]
        if len({run.learning_rate for run in runs}) > 1:
            label = label.replace("no rule", "each at its best rate")
    warmups = [run.warmup_steps * run.batch_size for run in runs if run.warmup_steps is not None and run.batch_size]
    warmup = float(max(warmups)) if warmups else 0.1 * longest_examples(runs)
    result = collapse([Curve.of(run) for run in runs], warmup)
    return Panel(label, runs, result, warmup) if result else None


def _best_rate(runs: list[LoadedRun], batch: int | None) -> float | None:
    by_rate = grouped((r for r in runs if r.batch_size == batch and r.finished), lambda r: r.learning_rate)
    return min(by_rate, key=lambda rate: float(np.mean(final_losses(by_rate[rate]))), default=None)


def collapse_plot(data: Dataset) -> Plot | LeftOut:
    all_panels = panels(data)
    if not all_panels:
        return LeftOut(TITLE, "it needs validation curves of two or more batch sizes that overlap after the warm-up")
    all_panels.sort(key=lambda p: (math.isnan(p.result.number), p.result.number, p.result.across_batch))
    shown = all_panels[:_PANELS]
    longest = longest_examples([run for panel in shown for run in panel.runs])
    rows = [row for panel in shown for row in _rows(panel, longest)]
    sizes = by_batch_size([run for panel in shown for run in panel.runs])
    legend = {"line": ("batch size", ordered_colours([f"batch {size}" for size in sizes]))}
    columns = ("panel", "line", "x", "mean", "low", "high", "n", "centre", "share")
    bands = any(row[6] > 1 for row in rows)
    shows = (("loss", "loss"), ("difference", "difference from the mean of batch sizes"))
    controls = [Control("choice", "show", "show", "loss", shows), *curve_controls(bands)]
    spec = curve_spec("examples seen", bands)
    spec["transform"] = [*coloured(), {"filter": "datum.share >= begin"}, *_differences()]
    if len(shown) > 1 or len(data.studies) > 1:
        spec = in_panels(spec, "panel", [_header(p) for p in shown])
    warnings = _warnings(all_panels)
    if len(all_panels) > _PANELS:
        warnings.append(f"The {_PANELS} with the smallest numbers of {len(all_panels)} are drawn.")
    return Plot("collapse", TITLE, _sentence(all_panels), spec, columns, rows, legend, controls, warnings)


def _differences() -> list[Json]:
    """Losses, or how far they are from the mean over batch sizes: what the eye cannot see in a steep curve."""
    asked = "show == 'difference' && isValid(datum.{0}) ? datum.{0} - datum.centre : datum.{0}"
    return [{"calculate": asked.format(field), "as": field} for field in ("mean", "low", "high")]


def _header(panel: Panel) -> str:
    number = panel.result.number
    return f"{panel.label}: {number:.2f}" if math.isfinite(number) else panel.label


def _rows(panel: Panel, longest: float) -> list[tuple]:
    curves: dict[int, list] = {}
    for size, runs in by_batch_size(panel.runs).items():
        runs = [run for run in runs if run.finished] or runs
        curve = intervals.mean_curve([r.evaluation for r in runs], 120)
        curves[size] = [(step * size, m) for step, m in curve if step > 0]
    rows = []
    for size, points in curves.items():
        for examples, m in points:
            centre = _centre(curves, examples)
            rows.append((_header(panel), f"batch {size}", examples, *m, centre, examples / longest))
    return rows


def _centre(curves: dict[int, list], examples: float) -> float:
    """The mean over the batch sizes whose curves are there after this number of examples."""
    reaching = [points for points in curves.values() if points and points[0][0] <= examples <= points[-1][0]]
    return float(np.mean([np.interp(examples, [x for x, _ in p], [m.mean for _, m in p]) for p in reaching]))


def _sentence(all_panels: list[Panel]) -> str:
    numbered = [p for p in all_panels if math.isfinite(p.result.number)]
    sizes = sorted({size for p in all_panels for size in p.result.batch_sizes})
    span = f"batch sizes {sizes[0]} to {sizes[-1]}"
    if not numbered:
        texts = [f"{p.label} {p.result.across_batch:.4f}" for p in all_panels[:6]]
        return (
            f"With one seed there is no collapse number; the standard deviation of the loss across {span} is, on average: "
            f"{'; '.join(texts)}."
        )
    texts = [f"{p.label} {p.result.number:.2f}" for p in numbered[:6]]
    first = numbered[0]
    text = f"Collapse number (1: {span} differ as much as seeds do): {'; '.join(texts)}."
    if len(numbered) > 1:
        text += f" The curves lie closest under {first.label}."
        if first.result.seeds < 5 and numbered[1].result.number < 2 * first.result.number:
            text += f" With {first.result.seeds} seeds, {numbered[1].label} is not clearly apart from it."
    return text + f" Curves that differ by seeds only would give about {first.result.perfect:.2f}."


def _warnings(all_panels: list[Panel]) -> list[str]:
    warnings = []
    for p in all_panels:
        if p.result.left_out:
            warnings.append(f"{p.label}: {p.result.left_out} curve(s) that failed or are too short do not count.")
        if not all(run.warmup_steps is not None for run in p.runs):
            warnings.append(f"{p.label}: the warm-up is not known; the first 10 % are taken for it.")
    if any(p.result.seeds < 3 for p in all_panels):
        warnings.append("Some batch sizes have fewer than three seeds: the across-seed deviation is rough, or missing.")
    return warnings


@dataclasses.dataclass(frozen=True)
class Curve:
    """The validation losses of one run against examples seen."""

    batch_size: int
    examples: np.ndarray | Sequence[float]
    losses: np.ndarray | Sequence[float]

    @classmethod
    def of(cls, run: LoadedRun) -> Curve:
        return cls(run.batch_size or 1, run.examples(run.evaluation[0]), run.evaluation[1])


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
