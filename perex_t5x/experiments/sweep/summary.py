"""What a sweep says at its end: the best of each axis value, and where to look."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from perex_t5x.experiments.sweep import axes
from perex_t5x.experiments.sweep.runs import DONE, FAILED, Result, Run

_MOST_ROWS = 40


def best_table(runs: Sequence[Run], results: Sequence[Result]) -> str:
    """For every value of every axis but the seed: the best mean over seeds of the last validation loss, and its setting."""
    means = _means(runs, results)
    lines = [f"{'axis':<24} {'value':<24} {'validation loss':>15}  at"]
    for axis, values in axes.values_by_axis([run.values for run in runs]).items():
        if axis == axes.SEED or len(values) < 2:
            continue
        for value in values:
            here = [(loss, setting) for setting, loss in means.items() if dict(setting).get(axis) == repr(value)]
            shown = f"{min(here)[0]:>15.4f}  {_at(min(here)[1], axis)}" if here else f"{'-':>15}"
            lines.append(f"{axis:<24} {value!s:<24} {shown}".rstrip())
    if len(lines) == 1:
        return "\n".join(f"validation loss {loss:.4f}  {_at(setting, '')}".rstrip() for setting, loss in means.items())
    return "\n".join(lines[:_MOST_ROWS])


def _means(runs: Sequence[Run], results: Sequence[Result]) -> dict[tuple[tuple[str, str], ...], float]:
    """Setting without seed -> mean over seeds; a setting with a run that failed is left out."""
    found: dict[tuple[tuple[str, str], ...], list[float | None]] = {}
    for run, result in zip(runs, results, strict=True):
        if result.status in (DONE, FAILED):
            setting = tuple((axis, repr(value)) for axis, value in run.values.items() if axis != axes.SEED)
            found.setdefault(setting, []).append(result.eval_loss)
    return {s: sum(losses) / len(losses) for s, losses in found.items() if None not in losses}


def _at(setting: tuple[tuple[str, str], ...], axis: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting if name != axis)


def closing_words(folder: str, runs: Sequence[Run], results: Sequence[Result]) -> str:
    """The end of a sweep's output."""
    count = {status: sum(r.status == status for r in results) for status in ("done", "failed", "waiting", "stopped")}
    states = ", ".join(f"{n} {status}" for status, n in count.items() if n)
    failed = [f"  {r.name}: {r.error}" for r in results if r.status == FAILED]
    parts = ["", f"{len(results)} runs: {states}.", *failed[:10]]
    if len(failed) > 10:
        parts.append(f"  and {len(failed) - 10} more, see results.csv")
    if count["done"]:
        parts += ["", best_table(runs, results)]
    parts += [
        "",
        f"results  {folder}/results.csv",
        f"report   python -m perex_t5x.experiments.report {shlex.quote(folder)}",
    ]
    return "\n".join(parts)
