"""What varies in a sweep: axes with their values, checked; their product; and a name for every run."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perex_t5x.errors import did_you_mean
from perex_t5x.experiments.sweep import Sweep, scaling

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
    by_axis: dict[str, list[Any]] = {}
    for run in runs:
        for axis, value in run.items():
            values = by_axis.setdefault(axis, [])
            if value not in values:
                values.append(value)
    return by_axis


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


# --- checking a sweep's description -----------------------------------------------------------------------------------


Part = list[dict[str, Any]]  # settings of which one is chosen

# Bindings that have an axis of their own, which scales what depends on them.
_OWN_AXES = {"BATCH_SIZE": "batch_sizes", "BASE_LEARNING_RATE": "learning_rates", "RANDOM_SEED": "seeds"}


def parts(sweep: Sweep, problems: list[str]) -> list[Part]:
    """The factors of the product, in the order in which they stand in names; what is wrong is added to `problems`."""
    _check_single(sweep, problems)
    collected: list[Part] = []
    for axis, values in _mapping(sweep.files, "files", problems).items():
        if axis in OWN:
            problems.append(f"files[{axis!r}]: the name is taken by a built-in axis; choose another.")
            continue
        collected += _axis(f"files[{axis!r}]", axis, values, _is_files, "a Gin file or a list of them", problems)
    seen: set[str] = set()
    for name, values in _mapping(sweep.grid, "grid", problems).items():
        if name in _OWN_AXES:
            problems.append(f"grid[{name!r}]: use {_OWN_AXES[name]} = [...], which scales what depends on it.")
            continue
        collected += _axis(f"grid[{name!r}]", name, values, _is_value, _VALUE, problems)
        seen.add(name)
    collected += _zipped(sweep.zipped, seen, problems)
    one_rule = isinstance(sweep.rule, str)
    rules = _axis("rule", RULE, [sweep.rule] if one_rule else sweep.rule, _is_rule, _RULE, problems)
    collected += [] if one_rule else rules
    if sweep.batch_sizes is not None:
        collected += _axis("batch_sizes", BATCH_SIZE, sweep.batch_sizes, _is_count, "a positive whole number", problems)
    if sweep.learning_rates is not None and sweep.rate_factors is not None:
        problems.append(
            "learning_rates and rate_factors are mutually exclusive: give absolute rates, or multiples of the base rate."
        )
    elif sweep.learning_rates is not None:
        collected += _axis("learning_rates", LEARNING_RATE, sweep.learning_rates, _is_positive, _POSITIVE, problems)
    elif sweep.rate_factors is not None:
        collected += _axis("rate_factors", RATE_FACTOR, sweep.rate_factors, _is_positive, _POSITIVE, problems)
    collected += _axis("seeds", SEED, sweep.seeds, _is_seed, "a whole number, not negative", problems)
    return collected


def usable(sweep: Sweep) -> Sweep:
    """The sweep with defaults in place of invalid single values, so that the rest can be checked."""
    named = sweep.rule if isinstance(sweep.rule, list | tuple) else [sweep.rule]
    return dataclasses.replace(
        sweep,
        base_batch_size=sweep.base_batch_size if _is_count(sweep.base_batch_size) else None,
        base_learning_rate=sweep.base_learning_rate if _is_positive(sweep.base_learning_rate) else None,
        rule=[rule for rule in named if _is_rule(rule)] or "sqrt",
        files=_mapping(sweep.files, "", []),
        gin_bindings=_mapping(sweep.gin_bindings, "", []),
    )


_VALUE = "a number, a string, a truth value, None, or a list of them (a reference is written as a string: '@name')"
_POSITIVE = "a positive number"
_RULE = f"one of {', '.join(map(repr, scaling.RULES))}"


def _check_single(sweep: Sweep, problems: list[str]) -> None:
    if not isinstance(sweep.name, str) or not sweep.name or not sweep.name.replace("-", "_").isidentifier():
        problems.append(f"name = {sweep.name!r}: give letters, digits and underscores; it names the sweep's folder.")
    for name, is_right, wanted in (
        ("base_batch_size", _is_count, "a positive whole number"),
        ("base_learning_rate", _is_positive, _POSITIVE),
    ):
        value = getattr(sweep, name)
        if value is not None and not is_right(value):
            problems.append(f"{name} = {value!r}: must be {wanted}, or None for the configuration's.")
    if sweep.weight_decay_rule not in scaling.WEIGHT_DECAY_RULES:
        problems.append(
            f"weight_decay_rule = {sweep.weight_decay_rule!r}: must be one of "
            f"{', '.join(map(repr, scaling.WEIGHT_DECAY_RULES))}."
            f"{did_you_mean(str(sweep.weight_decay_rule), scaling.WEIGHT_DECAY_RULES)}"
        )
    for name in _mapping(sweep.gin_bindings, "gin_bindings", problems):
        if not _is_value(sweep.gin_bindings[name]):
            problems.append(f"gin_bindings[{name!r}] = {sweep.gin_bindings[name]!r}: must be {_VALUE}.")


def _axis(
    where: str, axis: str, values: Any, is_right: Callable[[Any], bool], wanted: str, problems: list[str]
) -> list[Part]:
    """The axis as a part of the product; empty if none of its values is valid."""
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        problems.append(f"{where} = {values!r}: give a list, such as [{values!r}].")
        return []
    if not values:
        problems.append(f"{where} is empty: give at least one value, or leave it out.")
        return []
    usable: list[Any] = []
    for value in values:
        if not is_right(value):
            near = did_you_mean(value, scaling.RULES) if axis == RULE and isinstance(value, str) else ""
            problems.append(f"{where} has {value!r}: must be {wanted}.{near}")
        elif value in usable:
            problems.append(f"{where} has {value!r} twice.")
        else:
            usable.append(value)
    return [[{axis: value} for value in usable]] if usable else []


def _zipped(zipped: Any, seen: set[str], problems: list[str]) -> list[Part]:
    if not zipped:
        return []
    if not isinstance(zipped, Sequence) or not all(isinstance(z, Mapping) and z for z in zipped):
        problems.append(f"zipped = {zipped!r}: give a list of dictionaries, each with the bindings that go together.")
        return []
    names = list(zipped[0])
    usable: Part = []
    for i, entry in enumerate(zipped):
        if list(entry) != names and set(entry) != set(names):
            problems.append(
                f"zipped[{i}] has {', '.join(entry)}, but zipped[0] has {', '.join(names)}: give all the same."
            )
        elif dict(entry) in usable:
            problems.append(f"zipped[{i}] is the same as zipped[{usable.index(dict(entry))}].")
        elif wrong := [name for name in names if not _is_value(entry[name])]:
            problems.append(f"zipped[{i}][{wrong[0]!r}] = {entry[wrong[0]]!r}: must be {_VALUE}.")
        else:
            usable.append({name: entry[name] for name in names})
    for name in names:
        if name in seen:
            problems.append(f"{name!r} is in both grid and zipped: leave it in one of them.")
        if name in _OWN_AXES:
            problems.append(f"zipped: use {_OWN_AXES[name]} = [...] for {name}, which scales what depends on it.")
    return [usable] if usable else []


def _mapping(value: Any, where: str, problems: list[str]) -> Mapping[str, Any]:
    if not value:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        problems.append(f"{where} = {value!r}: give a dictionary of names.")
        return {}
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_rule(value: Any) -> bool:
    return isinstance(value, str) and value in scaling.RULES


def _is_files(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value))


def _is_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_value, value))
    if isinstance(value, Mapping):
        return all(isinstance(k, str) for k in value) and all(map(_is_value, value.values()))
    return value is None or isinstance(value, bool | int | float | str)
