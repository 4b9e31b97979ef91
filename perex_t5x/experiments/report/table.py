"""The table of runs as HTML: how each ended, and in which bindings it differs from the others."""

from __future__ import annotations

from html import escape

from perex_t5x.experiments.report import gin_text
from perex_t5x.experiments.report.dataset import Dataset
from perex_t5x.experiments.report.load import Run

_COLUMNS = 8  # further differences go into the last cell


def runs_table(data: Dataset) -> str:
    """A table whose headers are buttons that sort it; cells carry their sort keys."""
    differing, partly = gin_text.differences([run.config for run in data.runs])
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


def _row(run: Run, own: list[str], rest: list[str], several: bool) -> str:
    error = f'<div class="reason">{escape(run.error)}</div>' if run.error else ""
    cells = [
        *([_cell(escape(run.study), run.study)] if several else []),
        _cell(f'<span class="name">{escape(run.name)}</span>', run.name),
        _cell(f'<span class="{_status_class(run.status)}">{escape(run.status)}</span>{error}', run.status),
        *(_number(value, "{:.4f}") for value in (run.final_loss, run.best_loss)),
        _number(run.seconds, "{:.1f}"),
    ]
    for name in own:
        value = run.config.get(name, "")
        known = gin_text.literal(value)
        cells.append(_cell(_wrapped(_plain(value)), known if isinstance(known, int | float) else value))
    if rest:
        here = [f"{name} = {run.config[name]}" for name in rest if name in run.config]
        lines = "<br>".join(f"<code>{_wrapped(line)}</code>" for line in here)
        shown = f"<details><summary>{len(here)} binding(s)</summary>{lines}</details>" if here else ""
        cells.append(_cell(shown, len(here)))
    return f"<tr>{''.join(cells)}</tr>"


def _status_class(status: str) -> str:
    return status if status in ("done", "failed", "stopped", "waiting") else "other"


def _plain(value: str) -> str:
    """Without quotes; a number with as many digits as one reads.

    >>> _plain("'a'"), _plain("0.0028284271247461905")
    ('a', '0.0028284')
    """
    known = gin_text.literal(value)
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
