"""Preflight's findings as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from perex_t5x.preflight import plain, summary, table
from perex_t5x.preflight.account import Account
from perex_t5x.preflight.bars import stacked
from perex_t5x.preflight.search import Search

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


def page(accounts: Sequence[Account], searches: Sequence[Search], command: str) -> str:
    """The whole page. `command` is shown: what it was made with."""
    chip = accounts[0].place.chip
    body = [
        "<h1>Preflight</h1>",
        *(f"<p>{escape(line)}</p>" for line in dict.fromkeys(_where(a) for a in accounts)),
        _summary(accounts),
    ]
    if any(a.plain for a in accounts):
        body.append(f'<p class="dim">Compared with {escape(plain.COMPARED)}.</p>')
    body += [f"<p>{escape(a.name)}: {escape(a.refusal)}</p>" for a in accounts if a.refusal]
    body += [f"<p>{'<br>'.join(escape(line) for line in s.lines())}</p>" for s in searches]
    memory = stacked([(a.name, a.memory_parts()) for a in accounts], _bytes, chip.hbm_bytes if chip else None)
    body += ["<h2>Memory of a device</h2>", memory]
    timed = [a for a in accounts if a.report and a.report.cycles]
    if timed:
        body += ["<h2>Cycles a step</h2>", stacked([(a.name, _cycle_parts(a)) for a in timed], summary.short_count)]
        body.append('<p class="dim">Without collectives and instructions of which the compiler says nothing.</p>')
    traffic = [(a.name, {f"{k} over {axes} {n}": size for (n, k, axes), size in a.traffic().items()}) for a in accounts]
    if any(parts for _, parts in traffic):
        body += ["<h2>Bytes a step in collectives</h2>", stacked(traffic, _bytes)]
    for a in accounts:
        body += _rows(f"Collectives of {a.name}", table.HEADER, summary.collective_rows(a))
    for a in accounts:
        body += _rows(f"Statistics of {a.name}", summary.FORMS_HEADER, summary.form_rows(a.forms))
    body.append(f'<h2>Made with</h2><p class="wide"><code>{escape(command)}</code></p>')
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>Preflight</title>"
    style = f"<style>{_style()}</style>"
    return f"<!doctype html><html lang='en'><head>{head}{style}</head><body>{''.join(body)}</body></html>\n"


def _where(account: Account) -> str:
    return f"{account.place}, {account.devices} x {account.device_kind}: {account.batch}"


def _style() -> str:
    def variables(colours: Sequence[str]) -> str:
        return " ".join(f"--part{i}: {colour};" for i, colour in enumerate(colours))

    rules = "".join(f".part{i} {{ fill: var(--part{i}); background: var(--part{i}); }}\n" for i in range(8))
    light, dark = variables(_PARTS_LIGHT), variables(_PARTS_DARK)
    return _STYLE.replace("PARTS_LIGHT", light).replace("PARTS_DARK", dark) + rules


def _cycle_parts(account: Account) -> dict[str, float]:
    if account.plain is None:
        return {"plain gradient": account.report.cycles}
    plain_part = min(account.plain.cycles, account.report.cycles)
    return {"plain gradient": plain_part, "statistics": account.report.cycles - plain_part}


def _summary(accounts: Sequence[Account]) -> str:
    head = "".join(f"<th>{escape(a.name)}</th>" for a in accounts)
    rows = []
    for label, cells in summary.lines(accounts):
        part = ' class="part"' if label.startswith("  ") else ""
        marks = [f' class="{cell}"' if label == "fits" and cell in ("yes", "no") else "" for cell in cells]
        written = "".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, cells, strict=True))
        rows.append(f"<tr><td{part}>{escape(label.strip())}</td>{written}</tr>")
    return f'<div class="wide"><table><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def _rows(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    written = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return [f"<h2>{escape(title)}</h2>", f'<div class="wide"><table><tr>{head}</tr>{written}</table></div>']


def _bytes(size: float) -> str:
    return table.format_bytes(int(size))
