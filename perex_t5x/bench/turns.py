"""Measures that take turns, so that whatever else a machine does falls on all of them alike."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Name = TypeVar("_Name")
_Value = TypeVar("_Value")


def in_turns(
    measures: Mapping[_Name, Callable[[], _Value]], rounds: int, note: Callable[[str], None] = lambda _: None
) -> dict[_Name, list[_Value]]:
    """Calls every measure once per round; returns the rounds' values by name, and tells `note` which round begins.

    Whichever goes first may find a cooler machine, so the order alternates, too.

    >>> in_turns({"a": lambda: 1.0, "b": lambda: 2.0}, rounds=2)
    {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    values: dict[_Name, list[_Value]] = {name: [] for name in measures}
    for i in range(rounds):
        note(f"round {i + 1} of {rounds}")
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


def peak_resident_bytes() -> int:
    """The most memory that this process has had."""
    # What `getrusage` says begins with that of the process that started this one.
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status", encoding="utf-8") as f:
        return 1024 * int(next(line.split()[1] for line in f if line.startswith("VmHWM:")))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
