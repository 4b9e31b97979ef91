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
import functools
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.experiments.report.dataset import Axis, Dataset, written
from perex_t5x.files import as_path

# --- colours that stay apart for colour-blind readers, on white and on black ------------------------------------------


# Hues after Okabe and Ito, darker on white and lighter on black.
_LIGHT = ("#0072b2", "#d55e00", "#00815f", "#b8578f", "#3795cf", "#b77b00", "#6a4ca3", "#5a5a5a")
_DARK = ("#59aef0", "#ff8c4a", "#2fc79a", "#e69ac6", "#9bd4f7", "#f2c14e", "#b9a0ec", "#bdbdbd")
_DASHES = ((1, 0), (6, 3), (2, 2), (9, 3, 2, 3))
# From dark to bright with even steps, so that order is seen without hue.
_SCALE = ((68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37))


@dataclasses.dataclass(frozen=True)
class LegendEntry:
    """One line of a legend: what it stands for, and how that is drawn."""

    key: str
    light: str
    dark: str
    dash: tuple[int, ...] = (1, 0)


def distinct_colours(keys: Sequence[str]) -> list[LegendEntry]:
    """A colour each; from the ninth on with dashes, and from the 33rd on they repeat.

    >>> entries = distinct_colours([str(i) for i in range(9)])
    >>> entries[0].light == entries[8].light, entries[0].dash == entries[8].dash
    (True, False)
    """
    looks = itertools.cycle((light, dark, dash) for dash in _DASHES for light, dark in zip(_LIGHT, _DARK, strict=True))
    return [LegendEntry(key, *look) for key, look in zip(keys, looks, strict=False)]


def ordered_colours(keys: Sequence[str]) -> list[LegendEntry]:
    """Colours of one scale, in the keys' order; its pale end is left out on white, its dark end on black."""
    steps = ((key, i / max(1, len(keys) - 1)) for i, key in enumerate(keys))
    return [LegendEntry(key, _scale_at(0.8 * step), _scale_at(0.32 + 0.68 * step)) for key, step in steps]


def _scale_at(share: float) -> str:
    place = share * (len(_SCALE) - 1)
    i = min(int(place), len(_SCALE) - 2)
    mixed = (a + (b - a) * (place - i) for a, b in zip(_SCALE[i], _SCALE[i + 1], strict=True))
    return "#" + "".join(f"{round(c):02x}" for c in mixed)


# --- descriptions -----------------------------------------------------------------------------------------------------


LINE = "line"
HEIGHT = 320
LOSSES = (("loss", "mean"), ("from", "low"), ("to", "high"))  # what is said beside a point, and its field
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
    legends: dict[str, tuple[str, list[LegendEntry]]]  # field -> (its name, entries)
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
    return [
        {LINE: g.label, **{f"a{i}": written(data.axes[i].name, value) for i, value in enumerate(g.key)}}
        for g in data.groups
    ]


def legends(data: Dataset, most: int = 8) -> dict[str, tuple[str, list[LegendEntry]]]:
    """By line and by each axis. First lines if few, else an axis of few values that differ inside a folder."""
    entries = {LINE: ("each line", distinct_colours([g.label for g in data.groups]))}
    if len(data.axes) == 1 and data.axes[0].ordered:
        entries[LINE] = ("each line", ordered_colours([g.label for g in data.groups]))
    if len(data.axes) > 1:
        for i, axis in enumerate(data.axes):
            keys = [written(axis.name, value) for value in axis.values]
            entries[f"a{i}"] = (axis.name, (ordered_colours if axis.ordered else distinct_colours)(keys))
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


def quantity(field: str, title: str, form: str, **scale: Any) -> Json:
    """A channel of numbers, with its axis' title and format."""
    return {"field": field, "type": "quantitative", "title": title, "axis": {"format": form}, "scale": scale}


def tooltip(*fields: tuple[str, str] | tuple[str, str, str]) -> list[Json]:
    """(title, field, format) beside the pointer, in this order; without a format as it is."""
    return [dict(zip(("title", "field", "format"), field, strict=False)) for field in fields]


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


# --- drawing: Vega-Lite, through vl-convert, which carries its scripts and draws without a browser --------------------


FIGURE = {
    "background": "white",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#e4e4e4", "domainColor": "#666666", "tickColor": "#666666"},
}


@functools.cache
def converter() -> ModuleType:
    try:
        import vl_convert
    except ImportError:
        raise ConfigError(
            "reports need the package vl-convert-python, which is not installed: pip install 'perex_t5x[reports]'"
        ) from None
    return vl_convert


@functools.cache
def library() -> str:
    """The scripts that draw, for a <script> element."""
    # In the scripts' strings an end tag would end the element.
    return re.sub(r"</(?=script)", r"<\\/", converter().javascript_bundle(), flags=re.IGNORECASE)


def write_figures(folder: str, plots: Sequence[Plot], groups: Sequence[Mapping[str, str]]) -> list[str]:
    """Writes each plot as it stands at first, light, as SVG and PNG (at three times the size); returns the files."""
    written = []
    try:
        as_path(folder).mkdir(parents=True, exist_ok=True)
        for plot in plots:
            spec: dict[str, Any] = {**still(plot, groups), "config": FIGURE}
            svg = converter().vegalite_to_svg(spec)
            for ending, content in (("svg", svg.encode()), ("png", converter().svg_to_png(svg, scale=3))):
                written.append(os.path.join(folder, f"{plot.id}.{ending}"))
                as_path(written[-1]).write_bytes(content)
    except OSError as e:
        raise ConfigError(f"--figures={folder}: cannot be written: {e.strerror or e}.") from e
    return written
