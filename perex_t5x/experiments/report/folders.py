"""From the folders on the command line to studies: a sweep, a run, or a folder of either."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.experiments.report import gin_text
from perex_t5x.experiments.report import load as runs

_SEEDS = {"seed", "seeds", "random_seed"}


@dataclasses.dataclass
class Study:
    """Runs that belong together, with what their sweep says of itself."""

    name: str
    title: str
    question: str = ""
    facts: list[str] = dataclasses.field(default_factory=list)
    runs: list[runs.Run] = dataclasses.field(default_factory=list)
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def load(paths: Sequence[str]) -> list[Study]:
    """Reads all folders; raises one `ConfigError` for everything that is wrong with them."""
    studies: list[Study] = []
    slips = [] if paths else ["no folder given: python -m perex_t5x.experiments.report DIR..."]
    for path in paths:
        try:
            studies += _load(path)
        except ConfigError as e:
            slips.append(str(e))
    if slips:
        shown = slips if len(slips) == 1 else [f"{i}. {slip}" for i, slip in enumerate(slips, 1)]
        raise ConfigError("\n".join(shown))
    _name_apart(studies)
    return studies


def _load(path: str) -> list[Study]:
    if not os.path.isdir(path):
        raise ConfigError(f"{path}: there is no such folder. Give a sweep's folder, a run's, or a folder of runs.")
    if os.path.exists(os.path.join(path, "sweep.json")):
        return [_sweep(path)]
    name = os.path.basename(os.path.abspath(path))
    if _is_run(path):
        return [Study(name, name, runs=[runs.read(path, name)])]
    inside = sorted(entry.path for entry in os.scandir(path) if entry.is_dir())
    found = [Study(name, name, runs=[runs.read(p, os.path.basename(p)) for p in inside if _is_run(p)])]
    found += [_sweep(p) for p in inside if os.path.exists(os.path.join(p, "sweep.json"))]
    found = [study for study in found if study.runs]
    if not found:
        raise ConfigError(
            f"{path}: no sweep.json, no metrics.jsonl and no config.gin here or one folder below. Give the folder that "
            "a sweep (--dir) or a training (MODEL_DIR) has written."
        )
    return found


def _is_run(path: str) -> bool:
    return any(os.path.exists(os.path.join(path, name)) for name in ("metrics.jsonl", "config.gin"))


def _sweep(path: str) -> Study:
    description = _json(os.path.join(path, "sweep.json"))
    entries = description.get("runs") if isinstance(description, dict) else None
    if not (isinstance(entries, list) and entries and all(isinstance(e, dict) and e.get("name") for e in entries)):
        raise ConfigError(
            f"{os.path.join(path, 'sweep.json')}: not the description of a sweep: `runs` must be a list of runs with names."
        )
    name = str(description.get("name") or os.path.basename(os.path.abspath(path)))
    study = Study(name, str(description.get("title") or name), str(description.get("question") or ""))
    rule = description.get("rule")
    if rule:
        base = f"batch {description.get('base_batch_size')}, rate {description.get('base_learning_rate')}"
        shown = ", ".join(map(str, rule)) if isinstance(rule, list) else rule
        study.facts.append(f"scaling rule: {shown} (base: {base})")
    if description.get("weight_decay"):
        study.facts.append(f"weight decay: {description['weight_decay']}")
    results = _results(os.path.join(path, "results.csv"))
    for entry in entries:
        run = _sweep_run(path, entry, rule)
        _take_result(run, _result(os.path.join(path, "runs", run.name, "result.json")) or results.get(run.name) or {})
        study.runs.append(run)
    known = {run.optimizer for run in study.runs if run.optimizer}
    if len(known) == 1:  # a run that has not begun has written no configuration, but will have the same
        for run in study.runs:
            run.optimizer = next(iter(known))
    if os.path.exists(findings := os.path.join(path, "findings.json")):
        found = _json(findings)
        study.findings = [f for f in found if isinstance(f, dict)] if isinstance(found, list) else []
    return study


def _sweep_run(path: str, entry: dict[str, Any], rule: Any) -> runs.Run:
    name = str(entry.get("name"))
    bindings = gin_text.parse("\n".join(map(str, entry.get("bindings") or ())))
    run = runs.read(os.path.join(path, "runs", name), name, bindings)
    run.batch_size = entry.get("batch_size") or run.batch_size
    run.learning_rate = entry.get("learning_rate") or run.learning_rate
    run.seed = entry.get("seed") if entry.get("seed") is not None else run.seed
    values = entry.get("values") or {}
    run.values = {axis: _short(value) for axis, value in values.items() if axis.lower() not in _SEEDS}
    chosen = run.values.pop("rule", rule)
    run.rule = chosen if isinstance(chosen, str) else None
    if "optimizer" in run.values:  # an axis of Gin files; its names tell more than the function's
        run.optimizer = str(run.values.pop("optimizer"))
    return run


def _short(value: Any) -> Any:
    """A Gin file by its bare name.

    >>> _short("optimizers/adamw.gin"), _short(0.1)
    ('adamw', 0.1)
    """
    is_file = isinstance(value, str) and value.endswith(".gin")
    return os.path.basename(value).removesuffix(".gin") if is_file else value


def _take_result(run: runs.Run, row: dict[str, Any]) -> None:
    """The sweep's own word on a run goes before what its metrics look like."""
    if not row:
        return
    run.status = str(row.get("status") or run.status)
    run.error = str(row.get("error") or run.error)

    def finite(key: str, otherwise: float | None) -> float | None:
        value = runs.number(row.get(key))  # of an empty cell: nan
        return value if math.isfinite(value) else otherwise

    run.seconds = finite("seconds", run.seconds)
    run.best_loss = finite("best_eval_loss", run.best_loss)
    run.final_loss = None if run.status == "failed" else finite("eval_loss", run.final_loss)


def _results(path: str) -> dict[str, dict[str, Any]]:
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8", errors="replace", newline="") as f:
        return {row["name"]: row for row in csv.DictReader(f) if row.get("name")}


def _result(path: str) -> dict[str, Any]:
    found = _json(path) if os.path.exists(path) else {}
    return found if isinstance(found, dict) else {}


def _json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read: {e}. Mend it, or run what wrote it again.") from e


def _name_apart(studies: Sequence[Study]) -> None:
    """Two folders of one name get numbers; runs learn whose they are."""
    seen: dict[str, int] = {}
    for study in studies:
        seen[study.name] = seen.get(study.name, 0) + 1
        if seen[study.name] > 1:
            study.name = f"{study.name} ({seen[study.name]})"
        for run in study.runs:
            run.study = study.name
