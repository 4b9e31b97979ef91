"""Preflight's output as one self-contained HTML page; the plots are inline SVG, without script or network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from perex_t5x.preflight.account import COMPARED, PreflightReport
from perex_t5x.preflight.breakdown import CALIBRATION
from perex_t5x.preflight.render import described, format_bytes, short_count, summary_lines, tables
from perex_t5x.preflight.search import Search
from perex_t5x.preflight.step import StepReport

_TEXT, _BAR, _ROW = 20, 18, 50  # pixels, downwards
_PLOT = 76.0  # per cent of the width, so that text keeps its size on a phone; the rest is for totals
_NEAR = 20.0  # a limit more than this many times the longest bar would leave nothing of the bars to see

_PARTS_LIGHT = ("#3b6fb6", "#5fa8d3", "#9db4c0", "#c9b458", "#b8b8b8", "#8e7cc3", "#5b9f6d", "#d1603d")
_PARTS_DARK = ("#6c9be0", "#83c5e8", "#7d929e", "#dccb70", "#7a7a7a", "#a996dc", "#7cc28f", "#ec8463")

_STYLE = """
:root { --ink: #1c2126; --dim: #626b75; --paper: #ffffff; --line: #d9dee3; --good: #22773c; --bad: #b3261e; PARTS_LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --dim: #99a2ab; --paper: #15181b; --line: #343a40; --good: #6fcf8a; --bad: #ff8a80; PARTS_DARK }
}
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1040px;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 14px; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: 3px 18px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { font-variant-numeric: tabular-nums; } td.part { padding-left: 1.2rem; color: var(--dim); }
.yes { color: var(--good); font-weight: 600; } .no { color: var(--bad); font-weight: 600; }
.dim { color: var(--dim); } code { font-size: 13px; }
svg { width: 100%; max-width: 860px; display: block; } svg text { fill: var(--ink); font-size: 13px; }
svg .limit { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 4 3; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.2rem; color: var(--dim); }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
.legend i.limit { background: var(--bad); height: 3px; vertical-align: middle; }
"""


def html_page(reports: Sequence[PreflightReport], searches: Sequence[Search], command: str) -> str:
    """The whole page; `command` is shown as what it was made with."""
    chip = reports[0].target.chip
    body = [
        "<h1>Preflight</h1>",
        *(f"<p>{escape(line)}</p>" for line in dict.fromkeys(described(r) for r in reports)),
        _summary(reports),
    ]
    if any(r.plain for r in reports):
        body.append(f'<p class="dim">Compared with {escape(COMPARED)}.</p>')
    body += [f"<p>{escape(r.name)}: {escape(r.refusal)}</p>" for r in reports if r.refusal]
    body += [f"<p>{'<br>'.join(escape(line) for line in s.lines())}</p>" for s in searches]
    memory = _stacked([(r.name, r.memory_parts()) for r in reports], format_bytes, chip.hbm_bytes if chip else None)
    body += ["<h2>Memory of a device</h2>", memory]
    timed = [(r.name, _cycle_parts(r.step, r.plain)) for r in reports if r.step and r.step.cycles]
    if timed:
        body += ["<h2>Cycles per step</h2>", _stacked(timed, short_count)]
        body.append('<p class="dim">Without collectives and instructions for which the compiler has no estimate.</p>')
        body.append(f'<p class="dim">{escape(CALIBRATION)}</p>')
    traffic = [(r.name, {f"{k} over {axes} {n}": size for (n, k, axes), size in r.traffic().items()}) for r in reports]
    if any(parts for _, parts in traffic):
        body += ["<h2>Bytes per step in collectives</h2>", _stacked(traffic, format_bytes)]
    for title, header, rows in tables(reports):
        head = "".join(f"<th>{escape(name)}</th>" for name in header)
        written = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        body.append(f"<h2>{escape(title[0].upper() + title[1:])}</h2>")
        body.append(f'<div class="wide"><table><tr>{head}</tr>{written}</table></div>')
    body.append(f'<h2>Made with</h2><p class="wide"><code>{escape(command)}</code></p>')
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>Preflight</title>"
    style = f"<style>{_style()}</style>"
    return f"<!doctype html><html lang='en'><head>{head}{style}</head><body>{''.join(body)}</body></html>\n"


def _style() -> str:
    def variables(colours: Sequence[str]) -> str:
        return " ".join(f"--part{i}: {colour};" for i, colour in enumerate(colours))

    rules = "".join(f".part{i} {{ fill: var(--part{i}); background: var(--part{i}); }}\n" for i in range(8))
    light, dark = variables(_PARTS_LIGHT), variables(_PARTS_DARK)
    return _STYLE.replace("PARTS_LIGHT", light).replace("PARTS_DARK", dark) + rules


def _cycle_parts(step: StepReport, plain: StepReport | None) -> dict[str, float]:
    if plain is None:
        return {"plain gradient": step.cycles}
    plain_part = min(plain.cycles, step.cycles)
    return {"plain gradient": plain_part, "statistics": step.cycles - plain_part}


def _summary(reports: Sequence[PreflightReport]) -> str:
    head = "".join(f"<th>{escape(r.name)}</th>" for r in reports)
    rows = []
    for label, cells in summary_lines(reports):
        part = ' class="part"' if label.startswith("  ") else ""
        marks = [f' class="{cell}"' if label == "fits" and cell in ("yes", "no") else "" for cell in cells]
        written = "".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, cells, strict=True))
        rows.append(f"<tr><td{part}>{escape(label.strip())}</td>{written}</tr>")
    return f'<div class="wide"><table><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


# --- plots ------------------------------------------------------------------------------------------------------------


def _stacked(
    bars: Sequence[tuple[str, Mapping[str, float]]], write: Callable[[Any], str], limit: float | None = None
) -> str:
    """One bar for each (label, part -> size), with its total, a legend below, and a line at `limit` if it is near.

    >>> "<svg" in _stacked([("a", {"x": 1.0})], str), "<line" in _stacked([("a", {"x": 1.0})], str, 2.0)
    (True, True)
    >>> far = _stacked([("a", {"x": 1.0})], str, 1000.0)
    >>> "<line" in far, "1000.0: a device, far beyond these bars" in far
    (False, True)
    """
    names = list(dict.fromkeys(name for _, parts in bars for name in parts))
    largest = max(sum(parts.values()) for _, parts in bars)
    near = limit if limit and (limit <= _NEAR * largest or not largest) else 0.0  # a refused step has no parts
    scale = _PLOT / (1.02 * (max(largest, near) or 1.0))
    height = _ROW * len(bars)
    body = []
    for i, (label, parts) in enumerate(bars):
        top, left = i * _ROW, 0.0
        body.append(f'<text x="0" y="{top + 14}">{escape(_short(label))}</text>')
        for name, size in parts.items():
            width = max(0.0, size) * scale
            title = f"<title>{escape(label)}, {escape(name)}: {escape(write(size))}</title>"
            position = f'x="{left:.2f}%" y="{top + _TEXT}" width="{width:.2f}%" height="{_BAR}"'
            body.append(f'<rect class="part{names.index(name) % 8}" {position}>{title}</rect>')
            left += width
        total = escape(write(sum(parts.values())))
        body.append(f'<text x="{left:.2f}%" dx="6" y="{top + _TEXT + 14}">{total}</text>')
    if near:
        x = f"{near * scale:.2f}%"
        body.append(f'<line class="limit" x1="{x}" x2="{x}" y1="0" y2="{height}"><title>{write(near)}</title></line>')
    keys = "".join(
        f'<span><i class="part{i % 8}"></i>{escape(name)}</span>' for i, name in enumerate(names) if len(names) > 1
    )
    if limit:
        mark = '<i class="limit"></i>' if near else ""
        keys += f"<span>{mark}{escape(write(limit))}: a device{'' if near else ', far beyond these bars'}</span>"
    return f'<svg height="{height}" role="img">{"".join(body)}</svg><p class="legend">{keys}</p>'


def _short(label: str) -> str:
    return label if len(label) <= 48 else label[:47] + "…"
