"""What varies in a sweep: axes with their values, the product of them, and a name for every run."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

BATCH_SIZE, RULE, LEARNING_RATE, RATE_FACTOR, SEED = "batch_size", "rule", "learning_rate", "rate_factor", "seed"
OWN = (BATCH_SIZE, RULE, LEARNING_RATE, RATE_FACTOR, SEED)
_SHORT = {BATCH_SIZE: "b", LEARNING_RATE: "lr", RATE_FACTOR: "x", SEED: "s", RULE: ""}


def product(parts: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """All combinations of one setting from each part; the last part varies fastest.

    >>> product([[{"a": 1}, {"a": 2}], [{"seed": 0}]])
    [{'a': 1, 'seed': 0}, {'a': 2, 'seed': 0}]
    """
    return [{k: v for part in chosen for k, v in part.items()} for chosen in itertools.product(*parts)]


def values_by_axis(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Axis -> its distinct values, in the order in which they first appear.

    >>> values_by_axis([{"b": 8, "seed": 0}, {"b": 8, "seed": 1}])
    {'b': [8], 'seed': [0, 1]}
    """
    found: dict[str, list[Any]] = {}
    for run in runs:
        for axis, value in run.items():
            values = found.setdefault(axis, [])
            if value not in values:
                values.append(value)
    return found


def names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A folder's name for every run, from its values; it does not change when an axis gets further values.

    >>> names([{"optimizer": "optimizers/adamw.gin", "batch_size": 8, "optax.adamw.b2": 0.98, "seed": 0}])
    ['adamw_b8_b2-0.98_s0']
    """
    labels = _labels(sorted({axis for run in runs for axis in run}))
    made = ["_".join(_part(labels[axis], axis, value) for axis, value in run.items()) or "run" for run in runs]
    made = [name if len(name) <= 120 else f"{name[:100]}-{_digest(run)}" for name, run in zip(made, runs, strict=True)]
    return [f"{name}-{_digest(run)}" if made.count(name) > 1 else name for name, run in zip(made, runs, strict=True)]


def _labels(axes: Sequence[str]) -> dict[str, str]:
    """Axis -> what stands for it in a name: the end of a binding's name, if that is unambiguous."""
    ends = {axis: axis.rpartition(".")[2] for axis in axes}
    clear = {axis: end if list(ends.values()).count(end) == 1 else axis for axis, end in ends.items()}
    return {axis: _SHORT.get(axis, clear[axis]) for axis in axes}


def _part(label: str, axis: str, value: Any) -> str:
    if isinstance(value, str) and value.endswith(".gin"):
        return _safe(os.path.basename(value).removesuffix(".gin"))
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return _safe(f"{label}{text}" if axis in _SHORT else f"{label}-{text}")


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-.") or "x"


def _digest(run: Mapping[str, Any]) -> str:
    return hashlib.sha256(repr(sorted(run.items(), key=lambda kv: kv[0])).encode()).hexdigest()[:8]
