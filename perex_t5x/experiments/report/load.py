"""From the folders on the command line to runs: a sweep, a run, or a folder of either.

The text of config.gin and metrics.jsonl is enough: the modules that a configuration imports need not be installed, and
nothing is executed.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard

import numpy as np

from perex_t5x import buckets
from perex_t5x.errors import ConfigError
from perex_t5x.files import as_path, is_remote, read_bytes
from perex_t5x.goodput import Goodput
from perex_t5x.goodput import of_run as goodput_of_run
from perex_t5x.metrics import loss_of, read_text

# --- one run's folder -------------------------------------------------------------------------------------------------


_EVAL = "training_eval/"
_MONITORED = ("per_example/snr/", "per_example/noise_scale_smoothed/")
Config = dict[str, str]  # binding -> value, both as written
Curve = tuple[np.ndarray, np.ndarray]  # steps, values
_LARGEST = 2**63  # number that a report counts with
_EMPTY: Curve = (np.empty(0), np.empty(0))


@dataclasses.dataclass
class LoadedRun:
    """A run as the report sees it; what is not known is None or empty."""

    name: str
    study: str = ""
    status: str = "waiting"  # done, failed, stopped, waiting
    error: str = ""
    values: dict[str, Any] = dataclasses.field(default_factory=dict)  # of a sweep's axes, without seeds
    rule: str | None = None
    optimizer: str | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    seed: int | None = None
    seconds: float | None = None
    final_loss: float | None = None
    best_loss: float | None = None
    length: int | None = None  # target tokens of an example, padding included
    warmup_steps: int | None = None
    config: Config = dataclasses.field(default_factory=dict)
    evaluation: Curve = _EMPTY
    evaluated: dict[str, int] = dataclasses.field(default_factory=dict)  # task -> the last step with a validation loss
    training: Curve = _EMPTY
    monitored: dict[str, Curve] = dataclasses.field(default_factory=dict)
    goodput: Goodput | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def finished_loss(self) -> float | None:
        """The final loss of a run that is done, which is what comparisons are made of; None for others."""
        return self.final_loss if self.status == "done" else None

    @property
    def finished(self) -> bool:
        """Done, with a finite final loss."""
        return self.finished_loss is not None

    @property
    def steps(self) -> int:
        """The last one that was logged."""
        return max((int(x[-1]) for x, _ in (self.training, self.evaluation) if len(x)), default=0)

    @property
    def missing_evaluation(self) -> str:
        """What the last step lacks of its validation; "" if it has all of it, or the run has none."""
        last = min(self.evaluated.values(), default=0)
        expected = self.evaluated or lookup(self.config, "train.train_eval_dataset_cfg") is not None
        if not expected or last >= self.steps:
            return ""
        found = f"the last validation loss is of step {last}" if last else "there is no validation loss"
        return f"{found}, and the last step is {self.steps}: start the same again, which makes up for the evaluation"

    def examples(self, steps: np.ndarray) -> np.ndarray:
        return steps * float(self.batch_size or 1)


def read_run(folder: str, name: str, bindings: Mapping[str, str] | None = None) -> LoadedRun:
    """Reads a run's folder; one that is not there yet is a run that waits.

    `bindings` stand for the configuration as long as the run has written none.
    """
    run = LoadedRun(name)
    run.config = parse_gin(_text(os.path.join(folder, "config.gin"))) or dict(bindings or {})
    _from_config(run)
    try:
        _from_metrics(run, read_text(folder))
    except OSError as e:
        if is_remote(folder):
            raise
        run.notes.append(f"{name}: its metrics cannot be read: {e.strerror or e}")
    run.goodput = goodput_of_run(folder)
    if run.steps:
        total = lookup(run.config, "TRAIN_STEPS", "train.total_steps")
        run.status = "done" if isinstance(total, int) and run.steps >= total else "stopped"
        if run.status == "done" and run.missing_evaluation:
            run.status, run.error = "stopped", run.missing_evaluation
    finite = run.evaluation[1][np.isfinite(run.evaluation[1])]
    if len(finite):
        run.best_loss = float(finite.min())
        last = float(run.evaluation[1][-1])
        run.final_loss = last if math.isfinite(last) else None
        if run.final_loss is None:
            run.status, run.error = "failed", f"the validation loss at step {run.steps} is {last}"
    return run


def _text(path: str) -> str:
    try:
        return read_bytes(path).decode(errors="replace")
    except OSError:
        return ""


def _from_config(run: LoadedRun) -> None:
    def integer(*names: str) -> int | None:
        value = lookup(run.config, *names)
        return int(value) if _is_number(value) else None

    run.batch_size = integer("train/utils.DatasetConfig.batch_size", "BATCH_SIZE")
    rate = lookup(run.config, "create_learning_rate_scheduler.base_learning_rate", "BASE_LEARNING_RATE")
    run.learning_rate = float(rate) if _is_number(rate) else None
    run.seed = integer("RANDOM_SEED", "train.random_seed")
    run.warmup_steps = integer("create_learning_rate_scheduler.warmup_steps", "WARMUP_STEPS")
    lengths = lookup(run.config, "TASK_FEATURE_LENGTHS", "DatasetConfig.task_feature_lengths")
    length = lengths.get("targets") if isinstance(lengths, dict) else None
    run.length = int(length) if _is_number(length) else None
    optimizer = lookup(run.config, "OPTIMIZER")
    run.optimizer = optimizer.lstrip("@").removesuffix("()").rpartition(".")[2] if isinstance(optimizer, str) else None


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is one that a report can count with; what a configuration says may be anything."""
    return isinstance(value, int | float) and abs(value) < _LARGEST  # which neither nan nor inf is


def _from_metrics(run: LoadedRun, text: str) -> None:
    training: dict[int, float] = {}
    evaluation: dict[int, list[float]] = {}
    monitored: dict[str, dict[int, float]] = {}
    unreadable = 0
    lines = text.splitlines()
    for i, line in enumerate(lines):
        try:
            row = json.loads(line)
            step, name = int(row["step"]), str(row["name"])
            if abs(step) >= _LARGEST:
                raise ValueError("no step")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            unreadable += bool(line.strip()) and i + 1 < len(lines)  # the last one may be half-written
            continue
        if name == "train":
            if (loss := loss_of(row)) is not None:
                training[step] = loss
            for key in row:
                if key.startswith(_MONITORED):
                    monitored.setdefault(key.removeprefix("per_example/"), {})[step] = number(row[key])
        elif name.startswith(_EVAL) and (loss := loss_of(row)) is not None:
            run.evaluated[name] = max(step, run.evaluated.get(name, 0))
            evaluation.setdefault(step, []).append(loss)
    run.training = _curve(training)
    run.evaluation = _curve({step: float(np.mean(values)) for step, values in evaluation.items()})
    run.monitored = {key: _curve(values) for key, values in monitored.items()}
    if unreadable:
        run.notes.append(f"{run.name}: {unreadable} line(s) of metrics.jsonl cannot be read and are left out")
    if len(run.evaluated) > 1:
        run.notes.append(f"{run.name}: the validation loss is the mean of {len(run.evaluated)} tasks'")


def number(value: Any) -> float:
    """Metrics that are not finite are written as strings.

    >>> number("nan"), number(1), number(None)
    (nan, 1.0, nan)
    """
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _curve(values: Mapping[int, float]) -> Curve:
    steps = sorted(values)
    return np.asarray(steps, float), np.asarray([values[s] for s in steps], float)


# --- sweeps, and folders of runs --------------------------------------------------------------------------------------


_SEEDS = {"seed", "seeds", "random_seed"}


@dataclasses.dataclass
class RunSet:
    """Runs that belong together, with what their sweep says of itself."""

    name: str
    title: str
    question: str = ""
    facts: list[str] = dataclasses.field(default_factory=list)
    runs: list[LoadedRun] = dataclasses.field(default_factory=list)
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def load_folders(paths: Sequence[str]) -> list[RunSet]:
    """Reads all folders; raises one `ConfigError` for everything that is wrong with them."""
    studies: list[RunSet] = []
    problems = [] if paths else ["no folder given: python -m perex_t5x.experiments.report DIR..."]
    for path in paths:
        try:
            studies += _load(path)
        except ConfigError as e:
            problems.append(str(e))
    if problems:
        shown = problems if len(problems) == 1 else [f"{i}. {problem}" for i, problem in enumerate(problems, 1)]
        raise ConfigError("\n".join(shown))
    _name_apart(studies)
    return studies


def _load(path: str) -> list[RunSet]:
    buckets.check(path, "the folder", writes=False)
    if not as_path(path).is_dir():
        raise ConfigError(f"{path}: there is no such folder. Give a sweep's folder, a run's, or a folder of runs.")
    if _exists(path, "sweep.json"):
        return [_sweep(path)]
    name = os.path.basename(os.path.abspath(path))
    if _is_run(path):
        return [RunSet(name, name, runs=[read_run(path, name)])]
    inside = sorted(os.fspath(entry) for entry in as_path(path).iterdir() if entry.is_dir())
    runs = _at_once(lambda p: read_run(p, os.path.basename(p)) if _is_run(p) else None, inside)
    run_sets = [RunSet(name, name, runs=[run for run in runs if run is not None])]
    run_sets += [_sweep(p) for p in inside if _exists(p, "sweep.json")]
    run_sets = [study for study in run_sets if study.runs]
    if not run_sets:
        raise ConfigError(
            f"{path}: no sweep.json, no metrics.jsonl and no config.gin here or one folder below. Give the folder that "
            "a sweep (--dir) or a training (MODEL_DIR) has written."
        )
    return run_sets


def _is_run(path: str) -> bool:
    return any(_exists(path, name) for name in ("metrics.jsonl", "metrics", "config.gin"))


def _exists(*parts: str) -> bool:
    return as_path(os.path.join(*parts)).exists()


def _at_once(read: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """`read` of each, several at a time: in a bucket a small file takes as long as a large one."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(read, items))


# What sweep.json says of a run: whether a value is one, and what it is to be.
_ENTRY: dict[str, tuple[Callable[[Any], bool], str]] = {
    "batch_size": (_is_number, "number"),
    "learning_rate": (_is_number, "number"),
    "seed": (_is_number, "number"),
    "values": (lambda value: isinstance(value, dict), "object"),
    "bindings": (lambda value: isinstance(value, list), "list"),
}


def _sweep(path: str) -> RunSet:
    description = _json(os.path.join(path, "sweep.json"))
    entries = description.get("runs") if isinstance(description, dict) else None
    if not (isinstance(entries, list) and entries and all(isinstance(e, dict) and e.get("name") for e in entries)):
        raise ConfigError(
            f"{os.path.join(path, 'sweep.json')}: not the description of a sweep: `runs` must be a list of runs with names."
        )
    for entry in entries:
        for key, (fits, kind) in _ENTRY.items():
            if entry.get(key) is not None and not fits(entry[key]):
                raise ConfigError(
                    f"{os.path.join(path, 'sweep.json')}: run {entry['name']!r} has {key} = {str(entry[key])[:80]}, "
                    f"which is no {kind}. Fix it, or rerun the command that wrote it."
                )
    name = str(description.get("name") or os.path.basename(os.path.abspath(path)))
    study = RunSet(name, str(description.get("title") or name), str(description.get("question") or ""))
    rule = description.get("rule")
    if rule:
        base = f"batch {description.get('base_batch_size')}, rate {description.get('base_learning_rate')}"
        shown = ", ".join(map(str, rule)) if isinstance(rule, list) else rule
        study.facts.append(f"scaling rule: {shown} (base: {base})")
    if description.get("weight_decay"):
        study.facts.append(f"weight decay: {description['weight_decay']}")
    results = _results(os.path.join(path, "results.csv"))

    def read(entry: dict[str, Any]) -> LoadedRun:
        run = _sweep_run(path, entry, rule)
        _take_result(run, _result(os.path.join(path, "runs", run.name, "result.json")) or results.get(run.name) or {})
        return run

    study.runs += _at_once(read, entries)
    known = {run.optimizer for run in study.runs if run.optimizer}
    if len(known) == 1:  # a run that has not begun has written no configuration, but will have the same
        for run in study.runs:
            run.optimizer = next(iter(known))
    if _exists(path, "findings.json"):
        content = _json(os.path.join(path, "findings.json"))
        study.findings = [f for f in content if isinstance(f, dict)] if isinstance(content, list) else []
    return study


def _sweep_run(path: str, entry: dict[str, Any], rule: Any) -> LoadedRun:
    name = str(entry.get("name"))
    bindings = parse_gin("\n".join(map(str, entry.get("bindings") or ())))
    run = read_run(os.path.join(path, "runs", name), name, bindings)
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


def _take_result(run: LoadedRun, row: dict[str, Any]) -> None:
    """The sweep's own word on a run, if there is one, goes before what its metrics look like."""
    run.status = str(row.get("status") or run.status)
    run.error = str(row.get("error") or run.error)

    def finite(key: str, otherwise: float | None) -> float | None:
        value = number(row.get(key))  # of an empty cell: nan
        return value if math.isfinite(value) else otherwise

    run.seconds = finite("seconds", run.seconds)
    run.best_loss = finite("best_eval_loss", run.best_loss)
    run.final_loss = None if run.status == "failed" else finite("eval_loss", run.final_loss)


def _results(path: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in csv.DictReader(io.StringIO(_text(path), newline="")) if row.get("name")}


def _result(path: str) -> dict[str, Any]:
    content = _json(path) if _exists(path) else {}
    return content if isinstance(content, dict) else {}


def _json(path: str) -> Any:
    try:
        return json.loads(read_bytes(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} cannot be read: {e}. Fix it, or rerun the command that wrote it.") from e


def _name_apart(studies: Sequence[RunSet]) -> None:
    """Two folders of one name get numbers; runs learn whose they are."""
    seen: dict[str, int] = {}
    for study in studies:
        seen[study.name] = seen.get(study.name, 0) + 1
        if seen[study.name] > 1:
            study.name = f"{study.name} ({seen[study.name]})"
        for run in study.runs:
            run.study = study.name


# --- the text of config.gin -------------------------------------------------------------------------------------------


_BINDING = re.compile(r"^([\w./]+)\s*=\s*(.*)$")
_PLACES = {"MODEL_DIR"}  # differs for every run, and says nothing


def parse_gin(text: str) -> Config:
    r"""Binding -> value, both as written; a value over several lines becomes one.

    >>> parse_gin("import optax\n# Macros:\nBATCH_SIZE = 16\noptax.adamw.b1 = \\\n    0.9\nX = [1,\n     2]\n")
    {'BATCH_SIZE': '16', 'optax.adamw.b1': '0.9', 'X': '[1, 2]'}
    """
    config: Config = {}
    name = None
    for line in text.splitlines():
        match = _BINDING.match(line)
        if match:
            name = match[1]
            config[name] = match[2].rstrip("\\").strip()
        elif not line.startswith((" ", "\t")) or line.lstrip().startswith("#"):
            name = None
        elif name:
            config[name] = f"{config[name]} {line.strip().rstrip(chr(92))}".strip()
    return config


def lookup(config: Mapping[str, str], *names: str) -> Any:
    """The value of the first of these names that is bound, macros followed; None if none is.

    A name stands for every binding that ends in it: 'DatasetConfig.batch_size' for 'utils.DatasetConfig.batch_size'.

    >>> lookup({"B": "16", "train/utils.DatasetConfig.batch_size": "%B"}, "train/utils.DatasetConfig.batch_size")
    16
    >>> lookup({"OPTIMIZER": "@optax.adamw"}, "OPTIMIZER")
    '@optax.adamw'
    """
    for name in names:
        for key, value in config.items():
            if key == name or key.endswith((f".{name}", f"/{name}")):
                return literal(_followed(config, value))
    return None


def _followed(config: Mapping[str, str], value: str) -> str:
    for _ in range(10):  # a macro may name another; a circle ends here
        value = config.get(value[1:], value) if value.startswith("%") else value
    return value


def literal(value: str) -> Any:
    """A Python value if the text is one, else the text."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last three: keys, depth, more depth
        return value


def differences(configs: Sequence[Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Names of the bindings that differ: those that all configurations have, and those that only some have.

    >>> differences([{"B": "8", "a.x": "1", "c": "1"}, {"B": "16", "b.y": "2", "c": "1"}])
    (['B'], ['a.x', 'b.y'])
    """
    configs = [c for c in configs if c]  # a run that has not begun has none
    names = dict.fromkeys(name for config in configs for name in config if name not in _PLACES)
    everywhere = [n for n in names if all(n in c for c in configs)]
    differing = [n for n in everywhere if len({c[n] for c in configs}) > 1]
    return differing, [n for n in names if n not in set(everywhere)]
