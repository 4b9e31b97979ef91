"""Preflight's findings as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perex_t5x.preflight import plain, summary, table
from perex_t5x.preflight.account import Account
from perex_t5x.preflight.search import Search

_WIDTH = 160  # where the output is no terminal


def show(accounts: Sequence[Account], searches: Sequence[Search], stream: TextIO) -> None:
    """Prints the table, the remedies for what does not fit, the collectives and the coverage."""
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else _WIDTH)
    for line in dict.fromkeys(f"{a.place}, {a.devices} x {a.device_kind}: {a.batch}" for a in accounts):
        console.print(escape(line), soft_wrap=True)
    top = _table("", *(a.name for a in accounts))
    for label, cells in summary.lines(accounts):
        styled = [_styled(label, cell) for cell in cells]
        top.add_row(escape(label), *styled)
    console.print(top)
    if any(a.plain for a in accounts):
        console.print(f"Compared with {plain.COMPARED}.", style="dim", soft_wrap=True)
    for account in accounts:
        if account.refusal:
            console.print(f"\n{escape(account.name)}: {escape(account.refusal)}", soft_wrap=True)
    for search in searches:
        console.print()
        for line in search.lines():
            console.print(escape(line), soft_wrap=True)
    for account in accounts:
        _print_rows(console, f"collectives of {account.name}", table.HEADER, summary.collective_rows(account))
    for account in accounts:
        _print_rows(console, f"statistics of {account.name}", summary.FORMS_HEADER, summary.form_rows(account.forms))


def _styled(label: str, cell: str) -> str:
    colour = {"yes": "green", "no": "bold red"}.get(cell) if label == "fits" else None
    return f"[{colour}]{escape(cell)}[/]" if colour else escape(cell)


def _print_rows(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    console.print(f"\n{escape(title)}", style="bold", soft_wrap=True)
    found = _table(*header)
    for row in rows:
        found.add_row(*(escape(cell) for cell in row))
    console.print(found)


def _table(*header: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in header:
        made.add_column(escape(name), overflow="fold")
    return made
