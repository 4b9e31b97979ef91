"""The report as one HTML page that needs nothing else: style, script, the plotting library and the data are inside."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from perex_t5x.experiments.report import intervals
from perex_t5x.experiments.report.dataset import Dataset
from perex_t5x.experiments.report.load import LoadedRun, RunSet, differences, literal
from perex_t5x.experiments.report.plot import LeftOut, Plot, described, group_fields, library


def page(title: str, data: Dataset, plots: Sequence[Plot | LeftOut], command: str) -> str:
    """The whole page. `command` is shown: what it was made with."""
    drawn = [plot for plot in plots if isinstance(plot, Plot)]
    body = [
        f'<header><h1>{escape(title)}</h1><button type="button" id="theme">dark</button></header>',
        f"<p>{_counted(data)}</p>",
        *(_study(study, len(data.studies) > 1) for study in data.studies),
        *(_finding(f, {plot.id for plot in drawn}) for study in data.studies for f in study.findings),
        "<noscript><p class='warning'>The plots are drawn by a script, which is switched off here.</p></noscript>",
        *(_plot(plot) if isinstance(plot, Plot) else _left_out(plot) for plot in plots),
        "<section><h2>Runs</h2>",
        '<p class="dim">Bindings in which the configurations differ; a header sorts.</p>',
        runs_table(data),
        *(f'<p class="dim">{escape(note)}</p>' for note in _notes(data)),
        "</section>",
        f"<h2>Made with</h2><p><code>{escape(command)}</code></p>",
        f'<p class="dim">Intervals: {escape(intervals.INTERVAL)}.</p>',
    ]
    content = {"groups": group_fields(data), "plots": [described(plot) for plot in drawn]}
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<link rel='icon' href='data:,'>"  # or a browser asks the server for one
        f"<title>{escape(title)}</title><style>{_file('page.css')}</style>"
    )
    scripts = [f'<script type="application/json" id="content">{_embedded(content)}</script>']
    if drawn:
        scripts.append(f"<script>{library()}</script>")
    scripts.append(f"<script>{_file('page.js')}</script>")
    inside = f"<main>{''.join(body)}</main>{''.join(scripts)}"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{inside}</body></html>\n"


def _file(name: str) -> str:
    return resources.files("perex_t5x.experiments.report").joinpath(name).read_text(encoding="utf-8")


def _embedded(content: Any) -> str:
    """JSON that no text inside can end early."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _counted(data: Dataset) -> str:
    states = Counter(run.status for run in data.runs)
    parts = ", ".join(f"{count} {escape(status)}" for status, count in sorted(states.items()))
    return f"{len(data.runs)} run{'s' if len(data.runs) > 1 else ''}: {parts}."


def _study(study: RunSet, several: bool) -> str:
    lines = [f"<p><strong>{escape(study.title)}</strong> ({len(study.runs)} runs)</p>"] if several else []
    if study.question:
        lines.append(f"<p>{escape(study.question)}</p>")
    lines += [f'<p class="dim">{escape(fact)}</p>' for fact in study.facts]
    return f'<div class="study">{"".join(lines)}</div>' if lines else ""


def _finding(finding: dict[str, Any], drawn: set[str]) -> str:
    lines = [f"<h2>{escape(str(finding.get('title') or 'Finding'))}</h2>"]
    if finding.get("text"):
        lines.append(f"<p>{escape(str(finding['text']))}</p>")
    if finding.get("paper"):
        lines.append(f'<p class="paper"><strong>The paper:</strong> {escape(str(finding["paper"]))}</p>')
    table = finding.get("table")
    if isinstance(table, dict) and isinstance(table.get("rows"), list):
        head = "".join(f'<th scope="col">{escape(str(c))}</th>' for c in table.get("columns") or ())
        rows = "".join(
            "<tr>" + "".join(f"<td>{_shown(c)}</td>" for c in row) + "</tr>"
            for row in table["rows"]
            if isinstance(row, list)
        )
        lines.append(f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>')
    if str(finding.get("plot")) in drawn:
        lines.append(f'<p><a href="#{escape(finding["plot"])}">the plot</a></p>')
    return f'<section class="finding">{"".join(lines)}</section>'


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return escape(f"{value:.5g}" if isinstance(value, float) else str(value))


def _plot(plot: Plot) -> str:
    warnings = "".join(f'<p class="warning">{escape(text)}</p>' for text in plot.warnings[:6])
    if len(plot.warnings) > 6:
        rest = "".join(f"<p>{escape(text)}</p>" for text in plot.warnings[6:])
        warnings += f'<details class="warning"><summary>{len(plot.warnings) - 6} more</summary>{rest}</details>'
    return (
        f'<section class="plot" id="{plot.id}"><h2>{escape(plot.title)}</h2><div class="controls"></div>'
        f'<div class="legend" role="group" aria-label="{escape(plot.title)}: what is shown"></div>'
        f'<div class="view" role="img" aria-label="{escape(plot.title)}. {escape(plot.sentence)}"></div>'
        f'<p class="says">{escape(plot.sentence)}</p>{warnings}</section>'
    )


def _left_out(plot: LeftOut) -> str:
    why = f'<p class="dim">Not drawn: {escape(plot.why)}.</p>'
    return f'<section class="missing"><h2>{escape(plot.title)}</h2>{why}</section>'


def _notes(data: Dataset) -> list[str]:
    notes = [note for run in data.runs for note in run.notes]
    return notes[:10] + ([f"... and {len(notes) - 10} more notes"] if len(notes) > 10 else [])


# --- the table of runs ------------------------------------------------------------------------------------------------


_COLUMNS = 8  # further differences go into the last cell


def runs_table(data: Dataset) -> str:
    """A table whose headers are buttons that sort it; cells carry their sort keys."""
    differing, partly = differences([run.config for run in data.runs])
    own, rest = differing[:_COLUMNS], [*differing[_COLUMNS:], *partly]
    several = len(data.studies) > 1
    heads = [*(["folder"] if several else []), "run", "status", "final loss", "best loss", "seconds", *own]
    heads += ["other differences"] if rest else []
    head = "".join(
        f'<th scope="col"><button type="button">{_wrapped(name)}<span aria-hidden="true"></span></button></th>'
        for name in heads
    )
    body = "".join(_row(run, own, rest, several) for run in data.runs)
    return f'<div class="wide"><table id="runs"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(run: LoadedRun, own: list[str], rest: list[str], several: bool) -> str:
    error = f'<div class="reason">{escape(run.error)}</div>' if run.error else ""
    state = run.status if run.status in ("done", "failed", "stopped", "waiting") else "other"
    cells = [
        *([_cell(escape(run.study), run.study)] if several else []),
        _cell(f'<span class="name">{escape(run.name)}</span>', run.name),
        _cell(f'<span class="{state}">{escape(run.status)}</span>{error}', run.status),
        *(_number(value, "{:.4f}") for value in (run.final_loss, run.best_loss)),
        _number(run.seconds, "{:.1f}"),
    ]
    for name in own:
        value = run.config.get(name, "")
        known = literal(value)
        cells.append(_cell(_wrapped(_plain(value)), known if isinstance(known, int | float) else value))
    if rest:
        here = [f"{name} = {run.config[name]}" for name in rest if name in run.config]
        lines = "<br>".join(f"<code>{_wrapped(line)}</code>" for line in here)
        shown = f"<details><summary>{len(here)} binding(s)</summary>{lines}</details>" if here else ""
        cells.append(_cell(shown, len(here)))
    return f"<tr>{''.join(cells)}</tr>"


def _plain(value: str) -> str:
    """Without quotes; a number with as many digits as one reads.

    >>> _plain("'a'"), _plain("0.0028284271247461905")
    ('a', '0.0028284')
    """
    known = literal(value)
    return f"{known:.5g}" if isinstance(known, float) else known if isinstance(known, str) else value


def _wrapped(text: str) -> str:
    """Long dotted names may break after their dots."""
    return escape(text).replace(".", ".<wbr>") if any(c.isalpha() for c in text) else escape(text)


def _number(value: float | None, form: str) -> str:
    return _cell("–" if value is None else form.format(value), "" if value is None else value)


def _cell(html: str, key: object) -> str:
    number = isinstance(key, int | float) and not isinstance(key, bool)
    mark = ' class="number"' if number or html == "–" else ""
    return f'<td{mark} data-key="{escape(str(key))}">{html}</td>'
