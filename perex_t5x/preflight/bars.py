"""Horizontal bars as inline SVG, drawn by hand: no script, no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

_TEXT, _BAR, _ROW = 20, 18, 50  # pixels, downwards
_PLOT = 76.0  # per cent of the width, so that text keeps its size on a phone; the rest is for totals
_NEAR = 20.0  # a limit further away than so many times the longest bar would leave nothing to see of the bars


def stacked(
    bars: Sequence[tuple[str, Mapping[str, float]]], write: Callable[[float], str], limit: float | None = None
) -> str:
    """One bar for each (label, part -> size), with its total, a legend below, and a line at `limit` if it is near.

    >>> "<svg" in stacked([("a", {"x": 1.0})], str), "<line" in stacked([("a", {"x": 1.0})], str, 2.0)
    (True, True)
    >>> far = stacked([("a", {"x": 1.0})], str, 1000.0)
    >>> "<line" in far, "1000.0: a chip, far beyond these bars" in far
    (False, True)
    """
    names = list(dict.fromkeys(name for _, parts in bars for name in parts))
    largest = max(sum(parts.values()) for _, parts in bars)
    near = bool(limit) and (limit <= _NEAR * largest or not largest)  # a refused step has no parts
    scale = _PLOT / (1.02 * (max(largest, limit if near else 0.0) or 1.0))
    height = _ROW * len(bars)
    body = []
    for i, (label, parts) in enumerate(bars):
        top, left = i * _ROW, 0.0
        body.append(f'<text x="0" y="{top + 14}">{escape(_short(label))}</text>')
        for name, size in parts.items():
            width = max(0.0, size) * scale
            title = f"<title>{escape(label)}, {escape(name)}: {escape(write(size))}</title>"
            place = f'x="{left:.2f}%" y="{top + _TEXT}" width="{width:.2f}%" height="{_BAR}"'
            body.append(f'<rect class="part{names.index(name) % 8}" {place}>{title}</rect>')
            left += width
        total = escape(write(sum(parts.values())))
        body.append(f'<text x="{left:.2f}%" dx="6" y="{top + _TEXT + 14}">{total}</text>')
    if near:
        x = f"{limit * scale:.2f}%"
        body.append(f'<line class="limit" x1="{x}" x2="{x}" y1="0" y2="{height}"><title>{write(limit)}</title></line>')
    keys = "".join(
        f'<span><i class="part{i % 8}"></i>{escape(name)}</span>' for i, name in enumerate(names) if len(names) > 1
    )
    if limit:
        mark = '<i class="limit"></i>' if near else ""
        keys += f"<span>{mark}{escape(write(limit))}: a chip{'' if near else ', far beyond these bars'}</span>"
    return f'<svg height="{height}" role="img">{"".join(body)}</svg><p class="legend">{keys}</p>'


def _short(label: str) -> str:
    return label if len(label) <= 48 else label[:47] + "…"
