"""The lines of preflight's table, the same in the terminal and in HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from perex_t5x.per_example.coverage import kernel_cell
from perex_t5x.preflight import table
from perex_t5x.preflight.account import Account
from perex_t5x.preflight.forms import ParameterForm
from perex_t5x.preflight.hlo.program import DCN, ICI
from perex_t5x.preflight.table import format_bytes

Line = tuple[str, list[str]]
NONE = "-"
FORMS_HEADER = ("parameter", "shape on a device", "form", "bytes held", "kernel", "note")


def lines(accounts: Sequence[Account]) -> list[Line]:
    """(label, one cell for each configuration); labels of parts of the line above are indented."""
    found: list[Line] = [
        ("fits", [_fits(a) for a in accounts]),
        ("HBM of a chip", [_peak(a) for a in accounts]),
        *_by_key(accounts, Account.memory_parts, format_bytes),
        ("statistics", [", ".join(a.statistics) for a in accounts]),
        ("cycles a step", [_cell(a.report and a.report.cycles, short_count) for a in accounts]),
        ("seconds a step, all collectives hidden", [_cell(a.seconds, "{:.3g} s".format) for a in accounts]),
        ("seconds a step, none hidden", [_cell(a.seconds_unhidden, "{:.3g} s".format) for a in accounts]),
        ("target tokens a second", [_tokens(a) for a in accounts]),
        ("MFU", [_span(a.mfu_unhidden, a.mfu, "{:.1%}".format) for a in accounts]),
        ("statistics against the plain gradient", ["" for _ in accounts]),
        ("  cycles", [_cycles_ratio(a) for a in accounts]),
        ("  temporaries", [_ratio(a, a.temp_ratio) for a in accounts]),
    ]
    for network in ("", ICI, DCN):
        label = f"collectives over {network}" if network else "collectives"
        if any(a.network_bytes(network) for a in accounts):
            found.append((label, [format_bytes(a.network_bytes(network)) for a in accounts]))
            found += _by_key(accounts, lambda a, network=network: _traffic(a, network), format_bytes)
    kernels = [len(a.report.unestimated) if a.report else 0 for a in accounts]
    if any(kernels):
        found.append(("instructions without an estimate", [str(n) for n in kernels]))
    return found


def _by_key(
    accounts: Sequence[Account], parts_of: Callable[[Account], dict[str, int]], write: Callable[[int], str]
) -> list[Line]:
    """A line for each part that a configuration has."""
    parts = [parts_of(a) for a in accounts]
    names = dict.fromkeys(name for part in parts for name in part)
    return [(f"  {name}", [write(part[name]) if name in part else NONE for part in parts]) for name in names]


def _traffic(account: Account, network: str) -> dict[str, int]:
    return {f"{kind} over {axes}": size for (over, kind, axes), size in account.traffic().items() if over == network}


def _fits(account: Account) -> str:
    return {True: "yes", False: "no", None: "not known: a CPU"}[account.fits]


def _peak(account: Account) -> str:
    chip = account.place.chip
    if account.report is None:
        return f"more than {format_bytes(chip.hbm_bytes)}" if chip else NONE
    peak = account.report.peak_bytes
    return (
        f"{format_bytes(peak)} of {format_bytes(chip.hbm_bytes)}, {peak / chip.hbm_bytes:.0%}"
        if chip
        else (format_bytes(peak))
    )


def _ratio(account: Account, ratio: float | None) -> str:
    if ratio is None:
        return "plain itself" if account.report and not account.forms else NONE
    return f"{ratio:.2f} x"


def _cycles_ratio(account: Account) -> str:
    more = len(account.report.unestimated) - len(account.plain.unestimated) if account.plain else 0
    # Said here, since they could turn the ratio over.
    return _ratio(account, account.cycles_ratio) + (f", {more} more not counted" if more > 0 else "")


def _cell(value: Any, write: Callable[[Any], str]) -> str:
    return write(value) if value else NONE


def _span(low: float | None, high: float | None, write: Callable[[float], str]) -> str:
    """Between no collective hidden and all of them."""
    if not low or not high:
        return NONE
    ends = dict.fromkeys((write(low), write(high)))
    return " to ".join(ends)


def _tokens(account: Account) -> str:
    if not account.seconds:
        return NONE
    return _span(account.target_tokens / account.seconds_unhidden, account.tokens_per_second, short_count)


def short_count(value: float) -> str:
    """
    >>> short_count(69_300_000), short_count(512)
    ('69.3 M', '512')
    """
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f}"


def form_rows(forms: Iterable[ParameterForm]) -> list[tuple[str, ...]]:
    """Coverage below `FORMS_HEADER`; layers whose parameters are alike are one line."""
    groups: dict[tuple[str, ...], int] = {}
    for f in forms:
        name = re.sub(r"(layers)_\d+", r"\1_*", f.parameter)
        form = f"{f.form}; for the norms {f.norm_form}" if f.norm_form else f.form
        row = (
            name,
            " x ".join(map(str, f.shape)),
            form,
            format_bytes(f.transient_bytes),
            kernel_cell(f.kernel),
            f.note,
        )
        groups[row] = groups.get(row, 0) + 1
    return [(f"{row[0]} ({n} layers)" if n > 1 else row[0], *row[1:]) for row, n in groups.items()]


def collective_rows(account: Account) -> list[tuple[str, ...]]:
    """Below `table.HEADER`."""
    return table.rows(account.report.collectives, account.loops) if account.report else []
