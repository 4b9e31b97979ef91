"""What can be wrong with a sweep's description by itself; what is right of it goes on to be checked further."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perex_t5x.errors import did_you_mean
from perex_t5x.experiments.sweep import Sweep, axes, rules

Part = list[dict[str, Any]]  # settings of which one is chosen

# Bindings that have an axis of their own, which scales what depends on them.
_OWN_AXES = {"BATCH_SIZE": "batch_sizes", "BASE_LEARNING_RATE": "learning_rates", "RANDOM_SEED": "seeds"}


def parts(sweep: Sweep, slips: list[str]) -> list[Part]:
    """The factors of the product, in the order in which they stand in names; what is wrong is added to `slips`."""
    _check_single(sweep, slips)
    found: list[Part] = []
    for axis, values in _mapping(sweep.files, "files", slips).items():
        if axis in axes.OWN:
            slips.append(f"files[{axis!r}]: the name is that of another axis; give yours another.")
            continue
        found += _axis(f"files[{axis!r}]", axis, values, _is_files, "a Gin file or a list of them", slips)
    seen: set[str] = set()
    for name, values in _mapping(sweep.grid, "grid", slips).items():
        if name in _OWN_AXES:
            slips.append(f"grid[{name!r}]: use {_OWN_AXES[name]} = [...], which scales what depends on it.")
            continue
        found += _axis(f"grid[{name!r}]", name, values, _is_value, _VALUE, slips)
        seen.add(name)
    found += _zipped(sweep.zipped, seen, slips)
    if isinstance(sweep.rule, str):
        _axis("rule", axes.RULE, [sweep.rule], _is_rule, _RULE, slips)
    else:
        found += _axis("rule", axes.RULE, sweep.rule, _is_rule, _RULE, slips)
    if sweep.batch_sizes is not None:
        found += _axis("batch_sizes", axes.BATCH_SIZE, sweep.batch_sizes, _is_count, "a positive whole number", slips)
    if sweep.learning_rates is not None and sweep.rate_factors is not None:
        slips.append("learning_rates and rate_factors exclude each other: absolute rates, or multiples of the base's.")
    elif sweep.learning_rates is not None:
        found += _axis("learning_rates", axes.LEARNING_RATE, sweep.learning_rates, _is_positive, _POSITIVE, slips)
    elif sweep.rate_factors is not None:
        found += _axis("rate_factors", axes.RATE_FACTOR, sweep.rate_factors, _is_positive, _POSITIVE, slips)
    found += _axis("seeds", axes.SEED, sweep.seeds, _is_seed, "a whole number, not negative", slips)
    return found


def usable(sweep: Sweep) -> Sweep:
    """The sweep with defaults in the place of single values that are wrong, so that the rest can be checked."""
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
_RULE = f"one of {', '.join(map(repr, rules.RULES))}"


def _check_single(sweep: Sweep, slips: list[str]) -> None:
    if not isinstance(sweep.name, str) or not sweep.name or not sweep.name.replace("-", "_").isidentifier():
        slips.append(f"name = {sweep.name!r}: give letters, digits and underscores; it names the sweep's folder.")
    for name, is_right, wanted in (
        ("base_batch_size", _is_count, "a positive whole number"),
        ("base_learning_rate", _is_positive, _POSITIVE),
    ):
        value = getattr(sweep, name)
        if value is not None and not is_right(value):
            slips.append(f"{name} = {value!r}: must be {wanted}, or None for the configuration's.")
    if sweep.weight_decay_rule not in rules.WEIGHT_DECAY_RULES:
        slips.append(
            f"weight_decay_rule = {sweep.weight_decay_rule!r}: must be one of "
            f"{', '.join(map(repr, rules.WEIGHT_DECAY_RULES))}."
            f"{did_you_mean(str(sweep.weight_decay_rule), rules.WEIGHT_DECAY_RULES)}"
        )
    for name in _mapping(sweep.gin_bindings, "gin_bindings", slips):
        if not _is_value(sweep.gin_bindings[name]):
            slips.append(f"gin_bindings[{name!r}] = {sweep.gin_bindings[name]!r}: must be {_VALUE}.")


def _axis(
    where: str, axis: str, values: Any, is_right: Callable[[Any], bool], wanted: str, slips: list[str]
) -> list[Part]:
    """One part, or none if nothing of it can be used."""
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        slips.append(f"{where} = {values!r}: give a list, such as [{values!r}].")
        return []
    if not values:
        slips.append(f"{where} is empty: give at least one value, or leave it out.")
        return []
    usable: list[Any] = []
    for value in values:
        if not is_right(value):
            near = did_you_mean(value, rules.RULES) if axis == axes.RULE and isinstance(value, str) else ""
            slips.append(f"{where} has {value!r}: must be {wanted}.{near}")
        elif value in usable:
            slips.append(f"{where} has {value!r} twice.")
        else:
            usable.append(value)
    return [[{axis: value} for value in usable]] if usable else []


def _zipped(zipped: Any, seen: set[str], slips: list[str]) -> list[Part]:
    if not zipped:
        return []
    if not isinstance(zipped, Sequence) or not all(isinstance(z, Mapping) and z for z in zipped):
        slips.append(f"zipped = {zipped!r}: give a list of dictionaries, each with the bindings that go together.")
        return []
    names = list(zipped[0])
    usable: Part = []
    for i, entry in enumerate(zipped):
        if list(entry) != names and set(entry) != set(names):
            slips.append(
                f"zipped[{i}] has {', '.join(entry)}, but zipped[0] has {', '.join(names)}: give all the same."
            )
        elif dict(entry) in usable:
            slips.append(f"zipped[{i}] is the same as zipped[{usable.index(dict(entry))}].")
        elif wrong := [name for name in names if not _is_value(entry[name])]:
            slips.append(f"zipped[{i}][{wrong[0]!r}] = {entry[wrong[0]]!r}: must be {_VALUE}.")
        else:
            usable.append({name: entry[name] for name in names})
    for name in names:
        if name in seen:
            slips.append(f"{name!r} is in both grid and zipped: leave it in one of them.")
        if name in _OWN_AXES:
            slips.append(f"zipped: use {_OWN_AXES[name]} = [...] for {name}, which scales what depends on it.")
    return [usable] if usable else []


def _mapping(value: Any, where: str, slips: list[str]) -> Mapping[str, Any]:
    if not value:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        slips.append(f"{where} = {value!r}: give a dictionary of names.")
        return {}
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_rule(value: Any) -> bool:
    return isinstance(value, str) and value in rules.RULES


def _is_files(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value))


def _is_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_value, value))
    if isinstance(value, Mapping):
        return all(isinstance(k, str) for k in value) and all(map(_is_value, value.values()))
    return value is None or isinstance(value, bool | int | float | str)
