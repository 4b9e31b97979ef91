"""Horizontal bars as inline SVG, drawn by hand: no script, no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

_LABEL, _PLOT, _VALUE, _ROW = 220, 560, 150, 34  # pixels


def stacked(
    bars: Sequence[tuple[str, Mapping[str, float]]], write: Callable[[float], str], limit: float | None = None
) -> str:
    """One bar for each (label, part -> size), with its total, a legend below, and a line at `limit`.

    >>> "<svg" in stacked([("a", {"x": 1.0})], str)
    True
    """
    names = list(dict.fromkeys(name for _, parts in bars for name in parts))
    largest = max([sum(parts.values()) for _, parts in bars] + [limit or 0]) or 1.0
    scale = _PLOT / (1.02 * largest)
    height = _ROW * len(bars) + 8
    body = []
    for i, (label, parts) in enumerate(bars):
        top, left = i * _ROW + 4, float(_LABEL)
        body.append(f'<text x="{_LABEL - 8}" y="{top + 18}" text-anchor="end">{escape(_short(label))}</text>')
        for name, size in parts.items():
            width = max(0.0, size) * scale
            title = f"<title>{escape(label)}, {escape(name)}: {escape(write(size))}</title>"
            colour = f"part{names.index(name) % 8}"
            body.append(
                f'<rect class="{colour}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 10}">{title}</rect>'
            )
            left += width
        body.append(f'<text x="{left + 6:.1f}" y="{top + 18}">{escape(write(sum(parts.values())))}</text>')
    if limit:
        x = _LABEL + limit * scale
        body.append(
            f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"><title>{write(limit)}</title></line>'
        )
    keys = "".join(
        f'<span><i class="part{i % 8}"></i>{escape(name)}</span>' for i, name in enumerate(names) if len(names) > 1
    )
    if limit:
        keys += f'<span><i class="limit"></i>{escape(write(limit))}: a chip</span>'
    width = _LABEL + _PLOT + _VALUE
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(body)}</svg><p class="legend">{keys}</p>'


def _short(label: str) -> str:
    return label if len(label) <= 28 else label[:27] + "…"
