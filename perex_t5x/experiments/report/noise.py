"""What monitored runs say of signal and noise: the critical batch size over training, and SNR histograms of layers."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from perex_t5x.experiments.report import intervals, plot
from perex_t5x.experiments.report.dataset import Dataset

NOISE_TITLE, SNR_TITLE = "Critical batch size over training", "Signal to noise of single examples"
_NOISE, _SNR = "noise_scale_smoothed/", "snr/"
_MISSING = "no run was monitored: add --gin_file=runs/monitor.gin to the training"
_PARTS = ("first third", "second third", "last third")
_LAYERS = 12


def _layers(data: Dataset, prefix: str) -> list[str]:
    """Names of the monitored groups of parameters, all of them together first."""
    names = {key.removeprefix(prefix) for run in data.runs for key in run.monitored if key.startswith(prefix)}
    return sorted(names, key=lambda name: (name != "all", name))


def noise_scale(data: Dataset) -> plot.Plot | plot.LeftOut:
    layers = _layers(data, _NOISE)
    if not layers:
        return plot.LeftOut(NOISE_TITLE, _MISSING)
    rows, hidden = [], 0
    points = int(np.clip(12_000 / (len(data.groups) * len(layers)), 12, 120))
    for g, group in enumerate(data.groups):
        batch = float(group.runs[0].batch_size or 1)
        for layer in layers:
            curves = [run.monitored[_NOISE + layer] for run in group.shown if _NOISE + layer in run.monitored]
            hidden += sum(int((~(np.isfinite(y) & (y > 0))).sum()) for _, y in curves)
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = [(x, np.where(y > 0, np.log(y), np.nan)) for x, y in curves]
            for step, m in intervals.mean_curve(logs, points):
                if step > 0:
                    rows.append((g, layer, step * batch, *(math.exp(v) for v in m[:3]), m.count))
    if not rows:
        return plot.LeftOut(NOISE_TITLE, "no measurement saw a signal: every noise scale is infinite")
    columns = ("g", "layer", "x", "mean", "low", "high", "n")
    sizes = sorted({run.batch_size for run in data.runs if run.batch_size and run.monitored})
    controls = [
        plot.Control("choice", "layer", "layers", layers[0], tuple((name, name) for name in layers)),
        plot.Control("log", "log", "logarithmic", False),
    ]
    warnings = [f"{hidden} measurement(s) saw no signal (infinite noise scale) and are not drawn."] if hidden else []
    sentence, spec = _noise_sentence(data, layers[0], sizes), _noise_spec(sizes)
    return plot.Plot("noise_scale", NOISE_TITLE, sentence, spec, columns, rows, plot.legends(data), controls, warnings)


def _noise_spec(sizes: list[int]) -> plot.Json:
    x = plot.quantity("x", "examples seen", "~s", nice=False)
    y = plot.quantity("mean", "noise scale (examples)", "~s", type="log", nice=False, padding=8)
    words = [("run", "line", ""), ("noise scale", "mean", ".3s"), ("seeds", "n", "d"), ("examples seen", "x", ",.0f")]
    curves = {"x": x, "y": y, "detail": {"field": "line", "type": "nominal"}}
    used = {"values": [{"size": size, "label": f"batch {size}"} for size in sizes]}
    at = {"y": {"field": "size", "type": "quantitative"}}
    label = {"type": "text", "align": "left", "baseline": "bottom", "dx": 3, "dy": -2, "fontSize": 10, "opacity": 0.8}
    return {
        "transform": [*plot.coloured(), {"filter": "datum.layer == layer"}],
        "height": plot.HEIGHT,
        "layer": [
            {"data": used, "mark": {"type": "rule", "strokeDash": [2, 4], "opacity": 0.6}, "encoding": at},
            {"data": used, "mark": label, "encoding": {**at, "x": {"value": 0}, "text": {"field": "label"}}},
            {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {**curves, **plot.key_encoding()}},
            plot.nearest_point(y, words, x),
        ],
    }


def _noise_sentence(data: Dataset, layer: str, sizes: list[int]) -> str:
    early, late = [], []
    for run in data.runs:
        _, values = run.monitored.get(_NOISE + layer, (None, np.empty(0)))
        finite = values[np.isfinite(values) & (values > 0)]
        if len(finite) >= 6:
            third = len(finite) // 3
            early.append(np.median(finite[:third]))
            late.append(np.median(finite[-third:]))
    if not early:
        return "Too few measurements to say how the noise scale moves: fewer than six in every run."
    begin, end = float(np.median(early)), float(np.median(late))
    move = "grows" if end > 1.2 * begin else "falls" if end < begin / 1.2 else "stays about the same"
    text = f"The noise scale ({layer}) {move}: from {begin:.3g} examples in the first third to {end:.3g} in the last"
    if sizes:
        under, over = [s for s in sizes if s < end], [s for s in sizes if s >= end]
        parts = ([f"{_listed(under)} below"] if under else []) + ([f"{_listed(over)} above"] if over else [])
        text += f". Of the batch sizes used (dotted) {' and '.join(parts)} the late one"
    return text + "; thirds are compared by their medians."


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) + (" lies" if len(sizes) == 1 else " lie")


def snr_histograms(data: Dataset) -> plot.Plot | plot.LeftOut:
    layers = _layers(data, _SNR)
    if not layers:
        return plot.LeftOut(SNR_TITLE, _MISSING)
    drawn = layers[:_LAYERS]
    measured: list[tuple[int, str, str, float]] = []
    zeros = total = 0
    for g, group in enumerate(data.groups):
        for run in group.runs:
            for layer in drawn:
                _, values = run.monitored.get(_SNR + layer, (None, np.empty(0)))
                for i, value in enumerate(values):
                    total += 1
                    if value > 0 and math.isfinite(value):
                        measured.append((g, layer, _PARTS[min(2, 3 * i // len(values))], math.log10(value)))
                    else:
                        zeros += 1
    if not measured:
        return plot.LeftOut(SNR_TITLE, "no measurement saw a signal: every SNR is 0")
    logs = np.asarray([m[3] for m in measured])
    low, high = float(np.quantile(logs, 0.005)), float(logs.max()) + 1e-6
    width = max((high - low) / 24, 0.02)
    bins = np.clip(((logs - low) // width).astype(int), 0, None)
    counts = Counter((g, layer, part, int(b)) for (g, layer, part, _), b in zip(measured, bins, strict=True))
    rows = [
        (g, layer, part, 10 ** (low + b * width), 10 ** (low + (b + 1) * width), n)
        for (g, layer, part, b), n in sorted(counts.items())
    ]
    legend = {"part": ("part of the run", plot.ordered_colours(_PARTS)), **plot.legends(data)}
    if len(data.groups) == 1:
        legend = {"part": legend["part"]}
    warnings = [f"{zeros} of {total} measurements saw no signal (SNR 0) and are not drawn."] if zeros else []
    if len(layers) > _LAYERS:
        warnings.append(f"{_LAYERS} of {len(layers)} groups of parameters are drawn.")
    spec = plot.in_panels(_snr_spec(), "layer", drawn)
    columns = ("g", "layer", "part", "from", "to", "count")
    return plot.Plot("snr", SNR_TITLE, _snr_sentence(measured, drawn), spec, columns, rows, legend, [], warnings)


def _snr_spec() -> plot.Json:
    x = plot.quantity("from", "SNR", "~g", type="log", nice=False)
    x["axis"]["tickCount"] = 4
    tooltip = plot.tooltip(("which", "key"), ("SNR from", "from", ".3g"), ("to", "to", ".3g"), ("measurements", "all"))
    y = {"field": "all", "type": "quantitative", "stack": "zero", "title": "measurements"}
    total = {"aggregate": [{"op": "sum", "field": "count", "as": "all"}], "groupby": ["layer", "from", "to", "key"]}
    return {
        "transform": [*plot.coloured(), total],
        "height": 130,
        "mark": {"type": "bar", "orient": "vertical", "binSpacing": 0.5},
        "encoding": {"x": x, "x2": {"field": "to"}, "y": y, **plot.key_encoding(False), "tooltip": tooltip},
    }


def _snr_sentence(measured: list[tuple[int, str, str, float]], layers: list[str]) -> str:
    def middle(layer: str, part: str | None = None) -> float | None:
        logs = [m[3] for m in measured if m[1] == layer and part in (None, m[2])]
        return 10 ** float(np.median(logs)) if logs else None

    medians = {layer: value for layer in layers if layer != "all" and (value := middle(layer))}
    texts = []
    if len(medians) > 1:
        best, worst = max(medians, key=lambda name: medians[name]), min(medians, key=lambda name: medians[name])
        texts.append(
            f"The median SNR is largest in {best} ({medians[best]:.3g}) and smallest in {worst} ({medians[worst]:.3g})"
        )
    begin, end = middle(layers[0], _PARTS[0]), middle(layers[0], _PARTS[-1])
    if begin and end:
        texts.append(
            f"for {layers[0]} it goes from {begin:.3g} in the first third of the runs to {end:.3g} in the last"
        )
    text = "; ".join(texts) or f"The median SNR ({layers[0]}) is {10 ** float(np.median([m[3] for m in measured])):.3g}"
    return text[0].upper() + text[1:] + "."
