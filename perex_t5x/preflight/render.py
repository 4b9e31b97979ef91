"""Preflight's output as text: the summary, the table of collectives, the reductions of the statistics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perex_t5x.hardware.hlo.program import DCN, ICI, Collective
from perex_t5x.per_example.coverage import kernel_cell
from perex_t5x.preflight.account import COMPARED, ParameterReduction, PreflightReport
from perex_t5x.preflight.breakdown import CALIBRATION, Part

if TYPE_CHECKING:
    from perex_t5x.preflight.search import Search

Line = tuple[str, list[str]]
Row = tuple[str, ...]
NONE = "-"
_REDUCTIONS = ("parameter", "shape on a device", "reduction", "bytes held", "kernel", "note")
_COLLECTIVES = ("collective", "axes", "where", "per step", "arrays", "type", "bytes each", "bytes per step", "over")
_SMALL = 1000  # bytes
BREAKDOWN = ("part", "cycles", "share", "of it recomputed", "lower bound", "instructions")
_WIDTH = 160  # where the output is no terminal


def show(
    reports: Sequence[PreflightReport], searches: Sequence[Search], stream: TextIO, breakdown: bool = False
) -> None:
    """Prints the table, what would make a step fit, the collectives and the reductions; also where the cycles go."""
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else _WIDTH)
    for line in dict.fromkeys(described(r) for r in reports):
        console.print(escape(line), soft_wrap=True)
    top = _table("", *(r.name for r in reports))
    for label, cells in summary_lines(reports):
        top.add_row(escape(label), *(_styled(label, cell) for cell in cells))
    console.print(top)
    if any(r.plain for r in reports):
        console.print(f"Compared with {COMPARED}.", style="dim", soft_wrap=True)
    if any(r.mfu for r in reports):
        console.print(CALIBRATION, style="dim", soft_wrap=True)
    for report in reports:
        if report.refusal:
            console.print(f"\n{escape(report.name)}: {escape(report.refusal)}", soft_wrap=True)
    for search in searches:
        console.print()
        for line in search.lines():
            console.print(escape(line), soft_wrap=True)
    for title, header, rows in tables(reports, breakdown):
        console.print(f"\n{escape(title)}", style="bold", soft_wrap=True)
        table = _table(*header)
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)


def _styled(label: str, cell: str) -> str:
    colour = {"yes": "green", "no": "bold red"}.get(cell) if label == "fits" else None
    return f"[{colour}]{escape(cell)}[/]" if colour else escape(cell)


def _table(*header: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in header:
        table.add_column(escape(name), overflow="fold")
    return table


# --- the summary ------------------------------------------------------------------------------------------------------


def described(report: PreflightReport) -> str:
    """What a configuration is compiled for, and its batch."""
    return f"{report.target}, {report.devices} x {report.device_kind}: {report.batch}"


def tables(reports: Sequence[PreflightReport], breakdown: bool = True) -> list[tuple[str, Row, list[Row]]]:
    """(title, header, rows) of the cycles' parts, collectives and reductions of every configuration that has some."""
    compiled = [(r, r.step) for r in reports if r.step]
    parts = [(f"cycles of {r.name}", BREAKDOWN, breakdown_rows(step.parts)) for r, step in compiled if breakdown]
    collectives = [
        (f"collectives of {r.name}", _COLLECTIVES, collective_rows(step.collectives, r.loops)) for r, step in compiled
    ]
    reductions = [(f"statistics of {r.name}", _REDUCTIONS, reduction_rows(r.reductions)) for r in reports]
    return [table for table in (*parts, *collectives, *reductions) if table[2]]


def breakdown_rows(parts: Sequence[Part]) -> list[Row]:
    """Rows of the table of the cycles' parts, the largest first, and their sums."""
    if not parts:
        return []
    sums = (sum(getattr(part, name) for part in parts) for name in ("cycles", "recomputed", "bound", "instructions"))
    total = Part("all", *sums)
    return [
        (
            part.name,
            short_count(part.cycles),
            f"{part.cycles / max(total.cycles, 1):.1%}",
            short_count(part.recomputed),
            short_count(part.bound),
            str(part.instructions),
        )
        for part in (*sorted(parts, key=lambda part: -part.cycles), total)
    ]


def summary_lines(reports: Sequence[PreflightReport]) -> list[Line]:
    """(label, one cell per configuration); labels of parts of the line above are indented."""
    lines: list[Line] = [
        ("fits", [{True: "yes", False: "no", None: "not known: a CPU"}[r.fits] for r in reports]),
        ("HBM of a device", [_peak(r) for r in reports]),
        *_by_name([r.memory_parts() for r in reports]),
        ("statistics", [", ".join(r.statistics) for r in reports]),
        *_norms_first(reports),
        ("cycles per step", [_cell(r.step and r.step.cycles, short_count) for r in reports]),
        ("  lower bound", [_cell(r.step and r.step.bound, short_count) for r in reports]),
        ("seconds per step, all collectives hidden", [_cell(r.seconds, "{:.3g} s".format) for r in reports]),
        ("seconds per step, hidden as scheduled", [_cell(r.seconds_scheduled, "{:.3g} s".format) for r in reports]),
        ("seconds per step, none hidden", [_cell(r.seconds_unhidden, "{:.3g} s".format) for r in reports]),
        ("target tokens per second", [_tokens(r) for r in reports]),
        ("MFU", [_span(r.mfu_unhidden, r.mfu, "{:.1%}".format) for r in reports]),
        ("MFU, hidden as scheduled", [_cell(r.mfu_scheduled, "{:.1%}".format) for r in reports]),
        ("MFU, lower bound of the cycles", [_cell(r.mfu_bound, "{:.1%}".format) for r in reports]),
        ("statistics against the plain gradient", ["" for _ in reports]),
        ("  cycles", [_cycles_ratio(r) for r in reports]),
        ("  temporaries", [_ratio(r, r.temp_ratio) for r in reports]),
    ]
    for network in ("", ICI, DCN):
        label = f"collectives over {network}" if network else "collectives"
        if any(r.network_bytes(network) for r in reports):
            lines.append((label, [format_bytes(r.network_bytes(network)) for r in reports]))
            lines += _by_name([_traffic(r, network) for r in reports])
    kernels = [len(r.step.unestimated) if r.step else 0 for r in reports]
    if any(kernels):
        lines.append(("instructions without an estimate", [str(n) for n in kernels]))
    return lines


def _by_name(parts: Sequence[Mapping[str, int]]) -> list[Line]:
    """A line for each name -> bytes of some configuration."""
    names = dict.fromkeys(name for part in parts for name in part)
    return [(f"  {name}", [format_bytes(part[name]) if name in part else NONE for part in parts]) for name in names]


def _traffic(report: PreflightReport, network: str) -> dict[str, int]:
    return {f"{kind} over {axes}": size for (over, kind, axes), size in report.traffic().items() if over == network}


def _peak(report: PreflightReport) -> str:
    chip = report.target.chip
    if report.step is None:
        return f"more than {format_bytes(chip.hbm_bytes)}" if chip else NONE
    peak = report.step.peak_bytes
    if chip is None:
        return format_bytes(peak)
    return f"{format_bytes(peak)} of {format_bytes(chip.hbm_bytes)}, {peak / chip.hbm_bytes:.0%}"


def _ratio(report: PreflightReport, ratio: float | None) -> str:
    if ratio is None:
        return "plain itself" if report.step and not report.reductions else NONE
    return f"{ratio:.2f} x"


def _cycles_ratio(report: PreflightReport) -> str:
    step, plain = report.step, report.plain
    more = len(step.unestimated) - len(plain.unestimated) if step and plain else 0
    # Stated here, since they could reverse the ratio.
    return _ratio(report, report.cycles_ratio) + (f", {more} more not counted" if more > 0 else "")


def _cell(value: Any, write: Callable[[Any], str]) -> str:
    return write(value) if value else NONE


def _span(low: float | None, high: float | None, write: Callable[[float], str]) -> str:
    """Between no collective hidden and all of them."""
    return _range((low, high), write) if low and high else NONE


def _tokens(report: PreflightReport) -> str:
    if not report.tokens_per_second or not report.seconds_unhidden:
        return NONE
    return _span(report.target_tokens / report.seconds_unhidden, report.tokens_per_second, short_count)


def _norms_first(reports: Sequence[PreflightReport]) -> list[Line]:
    """How clipping and skipping get the norms; nothing where no configuration clips or skips."""
    cells = [r.reductions[0].holding if r.reductions else "" for r in reports]
    return [("norms before statistics", cells)] if any(cells) else []


def reduction_rows(reductions: Iterable[ParameterReduction]) -> list[Row]:
    """Rows of the table of reductions; layers with equal rows are one row."""
    groups: Counter[Row] = Counter()
    for r in reductions:
        row = (
            re.sub(r"(layers)_\d+", r"\1_*", r.parameter),
            " x ".join(map(str, r.shape)),
            f"{r.reduction}; for the norms {r.norm_reduction}" if r.norm_reduction else r.reduction,
            format_bytes(r.transient_bytes),
            kernel_cell(r.kernel),
            r.note,
        )
        groups[row] += 1
    return [(f"{row[0]} ({n} layers)" if n > 1 else row[0], *row[1:]) for row, n in groups.items()]


# --- collectives ------------------------------------------------------------------------------------------------------


def collective_rows(collectives: Sequence[Collective], loops: Mapping[str, int], each: bool = False) -> list[Row]:
    """Rows of the table of collectives, in the program's order.

    Collectives of the same kind, axes, loops and type are one row, unless `each`; those of a few numbers stay apart.

    Args:
      collectives: from `Program.collectives`.
      loops: name -> turns of the loops with a name, outermost first: see `account.loop_sizes`.
      each: one row for each.
    """
    groups: dict[Any, list[Collective]] = {}
    for c in collectives:
        key = (c.kind_name, c.axes, _where(c.loops, loops), c.dtypes, c.network, c.bytes < _SMALL)
        groups.setdefault((*key, c.name) if each else key, []).append(c)
    return [
        (
            kind,
            ", ".join(axes) or NONE,
            where,
            str(sum(c.executions for c in members)),
            _range([c.arrays for c in members], str),
            ", ".join(dtypes),
            _range([c.bytes for c in members], format_bytes),
            format_bytes(sum(c.bytes_per_step for c in members)),
            network or NONE,
        )
        for (kind, axes, where, dtypes, network, *_), members in groups.items()
    ]


def _where(trips: Sequence[int | None], loops: Mapping[str, int]) -> str:
    """Where in the step a collective with these loops around it runs.

    A loop whose first or last turn the compiler has peeled off still counts as the same loop.

    >>> loops = {"microbatch": 4, "layer": 12}
    >>> [_where(trips, loops) for trips in ((), (4,), (4, 12), (11,), (4, 7))]
    ['once', 'per microbatch', 'per microbatch, layer', 'per layer', 'per microbatch, turn of 7']
    """
    names, words = list(loops), []
    for turns in trips:
        name = next((n for n in names if loops[n] > 1 and turns in (loops[n], loops[n] - 1)), None)
        if name is None:
            words.append("turn of a loop" if turns is None else f"turn of {turns}")
            continue
        words.append(name)
        names = names[names.index(name) + 1 :]
    return "per " + ", ".join(words) if words else "once"


def _range(values: Sequence[float], write: Callable[[Any], str]) -> str:
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low} to {high}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table.

    >>> print(markdown_table(("part", "cycles"), [("MLP", "7")]))
    | part | cycles |
    | --- | --- |
    | MLP | 7 |
    """
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def collectives_text(table: Sequence[Sequence[str]], markdown: bool = False) -> str:
    """Rows of `collective_rows` below their header, in columns or as Markdown."""
    if markdown:
        return markdown_table(_COLLECTIVES, table)
    lines = [_COLLECTIVES, *table]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


# --- numbers ----------------------------------------------------------------------------------------------------------


def format_bytes(size: int) -> str:
    """In units of 1000.

    >>> format_bytes(512), format_bytes(12_345), format_bytes(6_291_456)
    ('512 B', '12.3 kB', '6.29 MB')
    """
    return f"{size} B" if size < 1000 else f"{short_count(size)}B"


def short_count(value: float) -> str:
    """
    >>> short_count(69_300_000), short_count(512)
    ('69.3 M', '512')
    """
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f}"
