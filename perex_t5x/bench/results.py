"""What was measured, as rows in benchmarks.json; the ratios that are made of them, and when one is too large."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

from perex_t5x import files
from perex_t5x.bench.engine_sections import AXES, JAX
from perex_t5x.bench.programs import OURS, PLAIN
from perex_t5x.bench.trainer_sections import BASELINES
from perex_t5x.errors import ConfigError

Row = Mapping[str, Any]
_PACKAGES = ("perex_t5x", "jax", "jaxlib", "optax", "flax", "jax_privacy")


def versions() -> dict[str, str]:
    """Of everything that is measured in this process; those of PyTorch's are in its rows."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def machine() -> str:
    """The processor and its cores."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as f:
        name = next(line.partition(":")[2].strip() for line in f if line.startswith("model name"))
    return f"{name}, {os.cpu_count()} cores"


def read(path: str) -> dict[str, Any]:
    """The sections of a benchmarks.json; none where there is no such file."""
    try:
        found = json.loads(files.read_bytes(path))
        return {name: dict(section) for name, section in found["sections"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"{path}: not a benchmarks.json of this command: {e}. Remove it, or name another.") from None


def write(path: str, sections: Mapping[str, Any]) -> None:
    files.write_atomically(path, json.dumps({"sections": sections}, indent=1) + "\n")


# --- ratios -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A program of a section, at its best microbatch size, beside its framework's plain gradient.

    Attributes:
      time: the median of the rounds' ratios, of the fastest size; `low` and `high` are their quartiles.
      size: the fastest one; None: all examples at once.
      memory: at that size.
      least: of all sizes, and `least_size` where that is.
      seconds: of the fastest size; `least_bytes`: of the smallest.
    """

    framework: str
    peer: str
    statistic: str
    time: float
    low: float
    high: float
    size: int | None
    memory: float
    least: float
    least_size: int | None
    seconds: float
    least_bytes: float


def ratios(rows: Iterable[Row]) -> list[Ratio]:
    """One for each (framework, peer, statistic) that was measured; of one section, and of one point of it.

    >>> head = {"framework": "JAX", "size": None}
    >>> plain = {**head, "peer": PLAIN, "statistic": PLAIN, "seconds": [2.0, 2.0], "bytes": 8}
    >>> ours = {**head, "peer": OURS, "statistic": "norms", "seconds": [1.0, 1.0], "bytes": 4}
    >>> [(r.peer, r.time, r.memory) for r in ratios([plain, ours])]
    [('plain gradient', 1.0, 1.0), ('perex_t5x', 0.5, 0.5)]
    """
    measured = [row for row in rows if "seconds" in row]
    bases = {r["framework"]: r for r in measured if r["peer"] == PLAIN and r["size"] is None}
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in measured:
        if row["framework"] in bases:
            groups.setdefault((row["framework"], row["peer"], row["statistic"]), []).append(row)
    return [_ratio(key, group, bases[key[0]]) for key, group in groups.items()]


def _ratio(key: tuple[str, str, str], group: Sequence[Row], base: Row) -> Ratio:
    fastest = min(group, key=lambda row: statistics.median(row["seconds"]))
    smallest = min(group, key=lambda row: row["bytes"])
    low, time, high = quartiles([a / b for a, b in zip(fastest["seconds"], base["seconds"], strict=True)])
    return Ratio(
        *key,
        time=time,
        low=low,
        high=high,
        size=fastest["size"],
        memory=fastest["bytes"] / base["bytes"],
        least=smallest["bytes"] / base["bytes"],
        least_size=smallest["size"],
        seconds=statistics.median(fastest["seconds"]),
        least_bytes=smallest["bytes"],
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """
    >>> quartiles([1.0, 2.0, 3.0]), quartiles([1.0])
    ((1.5, 2.0, 2.5), (1.0, 1.0, 1.0))
    """
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of a straight line through (log x, log y): y grows with x to this power.

    >>> exponent([(1, 3.0), (2, 12.0), (4, 48.0)])
    2.0
    """
    x, y = ([math.log(p[i]) for p in points] for i in (0, 1))
    return round(statistics.linear_regression(x, y).slope, 6)


# --- too large --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cost:
    """Something of ours beside its baseline in the same run, as a ratio."""

    name: str
    baseline: str
    value: float


def costs(sections: Mapping[str, Any]) -> list[Cost]:
    """All that a check looks at: our time and memory beside the best peer's in JAX, a step beside the bare loop's, a start
    beside its imports."""
    found = []
    for name, section in sections.items():
        rows = section["rows"]
        if name == "startup":
            seconds = {r["peer"]: statistics.median(r["seconds"]) for r in rows}
            found += [Cost(f"startup, {ours}", base, seconds[ours] / seconds[base]) for ours, base in BASELINES.items()]
        elif name in ("overhead", "processes"):
            found += _step_costs(name, rows)
        else:
            for value in sorted({row.get("value", 0) for row in rows}):
                where = name if name not in AXES else f"{name} {value}"
                found += _engine_costs(where, ratios(r for r in rows if r.get("value", 0) == value))
    return found


def _engine_costs(where: str, found: Sequence[Ratio]) -> list[Cost]:
    costs = []
    in_jax = [r for r in found if r.framework == JAX and r.peer != PLAIN]
    for ours in (r for r in in_jax if r.peer == OURS):
        peers = [r for r in in_jax if r.statistic == ours.statistic and r.peer != OURS]
        for what, field in (("time", "time"), ("memory", "least")):
            if peers:
                best = min(peers, key=lambda r: getattr(r, field))
                value = getattr(ours, field) / getattr(best, field)
                costs.append(Cost(f"{where}, {ours.statistic}, {what}", best.peer, value))
    return costs


def _step_costs(name: str, rows: Sequence[Row]) -> list[Cost]:
    by_peer = {row["peer"]: row for row in rows if "seconds" in row}
    if not {"perex_t5x", "bare JAX loop"} <= set(by_peer):
        return []
    ours, bare = by_peer["perex_t5x"]["seconds"], by_peer["bare JAX loop"]["seconds"]
    value = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    return [Cost(f"{name}, step", "bare JAX loop", value)]


def too_large(sections: Mapping[str, Any], factor: float, reference: Mapping[str, Any] | None = None) -> list[str]:
    """Sentences on every cost that is more than `factor`, or more than `factor` times that of `reference`."""
    problems = []
    before = {cost.name: cost.value for cost in costs(reference or {})}
    for cost in costs(sections):
        is_startup = cost.name.startswith("startup")  # there is more to do than to import
        if not is_startup and cost.value > factor:
            problems.append(f"{cost.name}: {cost.value:.2f} times that of {cost.baseline}")
        if cost.name in before and cost.value > factor * before[cost.name]:
            problems.append(f"{cost.name}: {cost.value:.2f} times {cost.baseline}; it was {before[cost.name]:.2f}")
    return problems
