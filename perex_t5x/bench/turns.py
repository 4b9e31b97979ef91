"""Measures that take turns, so that whatever else a machine does falls on all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Name = TypeVar("_Name")


def in_turns(measures: Mapping[_Name, Callable[[], float]], rounds: int) -> dict[_Name, list[float]]:
    """Calls every measure once per round; returns the rounds' values by name.

    Whichever goes first may find a cooler machine, so the order alternates, too.

    >>> in_turns({"a": lambda: 1.0, "b": lambda: 2.0}, rounds=2)
    {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    values: dict[_Name, list[float]] = {name: [] for name in measures}
    for i in range(rounds):
        for name in list(measures)[:: 1 if i % 2 else -1]:
            values[name].append(measures[name]())
    return values


def temp_bytes(compiled: Any) -> int | None:
    """Memory that a compiled program needs besides its arguments and results; None where not known."""
    memory = compiled.memory_analysis()
    return None if memory is None else int(memory.temp_size_in_bytes)


def working_bytes(compiled: Any) -> int | None:
    """Memory that a compiled program needs besides its arguments, results included; None where not known."""
    memory = compiled.memory_analysis()
    return None if memory is None else int(memory.temp_size_in_bytes + memory.output_size_in_bytes)
