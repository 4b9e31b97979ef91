"""A plot, described once: for the page, where a script draws it, and for figures, where nothing moves.

A description is a Vega-Lite specification without data. Its rows are joined with the groups' labels and axis values when it
is drawn, so that these are stored once. Specifications read the parameters

| parameter | what it is |
|---|---|
| `colour` | the field that colours tell apart: `line` or one of the axes |
| `hidden` | the values of that field that are switched off |
| others | those of the plot's own controls |
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from perex_t5x.experiments.report import colours
from perex_t5x.experiments.report.dataset import Axis, Dataset, written

LINE = "line"
HEIGHT = 320
_LONGEST_LEGEND = 16  # of a figure; the page's scrolls
Json = dict[str, Any]


@dataclasses.dataclass
class Control:
    """Something to switch: a parameter with its choices, the x axis' kind ('log'), or yes and no ('flag')."""

    kind: str  # "choice", "flag", "log"
    name: str
    label: str
    value: Any
    options: tuple[tuple[Any, str], ...] = ()


@dataclasses.dataclass
class Plot:
    id: str
    title: str
    sentence: str
    spec: Json
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    legends: dict[str, tuple[str, list[colours.Entry]]]  # field -> (its name, entries)
    controls: list[Control] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    @property
    def colour(self) -> str:
        """The field coloured at first."""
        return next(iter(self.legends))


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A plot that has no data, and why."""

    title: str
    why: str


def group_fields(data: Dataset) -> list[dict[str, str]]:
    """What rows of each group are joined with: its label as `line`, its axis values as `a0`, `a1`, ..."""
    found = []
    for group in data.groups:
        values = [written(axis.name, value) for axis, value in zip(data.axes, group.key, strict=True)]
        found.append({LINE: group.label, **{f"a{i}": value for i, value in enumerate(values)}})
    return found


def legends(data: Dataset, most: int = 8) -> dict[str, tuple[str, list[colours.Entry]]]:
    """By line and by each axis. First lines if few, else an axis of few values that differ inside a folder."""
    entries = {LINE: ("each line", colours.distinct([g.label for g in data.groups]))}
    if len(data.axes) == 1 and data.axes[0].ordered:
        entries[LINE] = ("each line", colours.ordered([g.label for g in data.groups]))
    if len(data.axes) > 1:
        for i, axis in enumerate(data.axes):
            keys = [written(axis.name, value) for value in axis.values]
            entries[f"a{i}"] = (axis.name, (colours.ordered if axis.ordered else colours.distinct)(keys))
    first = LINE
    if len(data.groups) > most or len(data.studies) > 1:
        few = [i for i, axis in enumerate(data.axes) if len(axis.values) <= most + 4 and _differs_inside(data, axis)]
        first = f"a{few[0]}" if few and f"a{few[0]}" in entries else LINE
    return {first: entries.pop(first), **entries}


def _differs_inside(data: Dataset, axis: Axis) -> bool:
    """Where folders have panels of their own, what differs between them only needs no colours."""
    return any(len({str(axis.of(run)) for run in study.runs}) > 1 for study in data.studies)


def shorter(value: Any) -> Any:
    """Five digits are enough to draw; what is not finite is no point."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def described(plot: Plot) -> Json:
    """The plot for the page's script."""
    return {
        "id": plot.id,
        "spec": plot.spec,
        "columns": list(plot.columns),
        "rows": [[shorter(value) for value in row] for row in plot.rows],
        "legends": [
            {"field": field, "name": name, "entries": [dataclasses.asdict(e) for e in entries]}
            for field, (name, entries) in plot.legends.items()
        ],
        "controls": [dataclasses.asdict(control) for control in plot.controls],
    }


def still(plot: Plot, groups: Sequence[Mapping[str, str]], width: int = 460) -> Json:
    """The whole specification as it stands at first, for figures: light, with its legend drawn."""
    spec = copy.deepcopy(plot.spec)
    records = [{c: shorter(v) for c, v in zip(plot.columns, row, strict=True)} for row in plot.rows]
    spec["data"] = {"values": [{**(groups[r["g"]] if r.get("g") is not None else {}), **r} for r in records]}
    spec["params"] = parameters(plot)
    name, entries = plot.legends[plot.colour]
    domain = [entry.key for entry in entries]
    legend = {"title": None if plot.colour == LINE else name, "symbolOpacity": 1}
    if any("strokeDash" in encoding for encoding in encodings(spec)):
        legend["symbolType"] = "stroke"
    scales = {
        "color": {"domain": domain, "range": [entry.light for entry in entries]},
        "strokeDash": {"domain": domain, "range": [list(entry.dash) for entry in entries]},
    }
    for encoding in encodings(spec):
        for channel, scale in scales.items():
            if encoding.get(channel, {}).get("field") == "key":
                encoding[channel] |= {"scale": scale, "legend": legend if 1 < len(entries) <= _LONGEST_LEGEND else None}
    unit = spec.get("spec", spec)
    unit["width"], unit["height"] = (width if unit is spec else width * 2 // 3), unit.get("height", HEIGHT)
    return spec


def parameters(plot: Plot) -> list[Json]:
    own = [{"name": c.name, "value": c.value} for c in plot.controls if c.kind != "log"]
    return [{"name": "colour", "value": plot.colour}, {"name": "hidden", "value": []}, *own]


def encodings(spec: Any) -> list[Json]:
    """All encodings inside a specification."""
    if isinstance(spec, list):
        return [e for part in spec for e in encodings(part)]
    if not isinstance(spec, dict):
        return []
    own = [spec["encoding"]] if isinstance(spec.get("encoding"), dict) else []
    return own + [e for name in ("spec", "layer") for e in encodings(spec.get(name))]


def coloured() -> list[Json]:
    """The transformation every plot begins with: colour's field becomes `key`, and what is switched off goes."""
    return [{"calculate": "datum[colour]", "as": "key"}, {"filter": "indexof(hidden, datum.key) < 0"}]


def key_encoding(dashes: bool = True) -> Json:
    """Colour and dash by `key`; the page draws its own legend, of buttons."""
    color = {"field": "key", "type": "nominal", "legend": None}
    return {"color": color, "strokeDash": dict(color)} if dashes else {"color": color}


def in_panels(unit: Json, field: str, order: Sequence[str]) -> Json:
    """One panel for each value of a field, with common axes; the page decides how many go side by side."""
    transform = unit.pop("transform", [])
    facet = {"field": field, "type": "nominal", "title": None, "sort": list(order), "header": {"labelFontSize": 12}}
    return {"transform": transform, "facet": facet, "columns": min(3, len(order)), "spec": unit}


def nearest_point(y: Json, fields: Sequence[tuple[str, str, str]], x: Json | None = None) -> Json:
    """A layer of points of which the one nearest to the pointer shows itself, with these (name, field, format) beside it.

    The words are an expression: Vega-Lite's own do not find fields without a format here, since they look for them in the
    pointer's cell and not in its point.
    """
    parts = []
    for name, field, form in fields:
        value = f"(datum.datum || datum)['{field}']"
        shown = f"format({value}, '{form}')" if form else f"toString({value})"
        parts.append(f"isValid({value}) ? {{'{name}': {shown}}} : {{}}")
    select = {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}
    return {
        "params": [{"name": "hover", "select": select}],
        "mark": {"type": "point", "filled": True, "size": 70},
        "encoding": {
            **({"x": x} if x else {}),
            "y": y,
            "detail": {"field": LINE, "type": "nominal"},
            "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0},
            "tooltip": {"value": {"expr": f"merge({', '.join(parts)})"}},
            **key_encoding(False),
        },
    }
