"""All runs of a report together: the axes along which they differ, and the groups that differ by seed only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from perex_t5x.experiments.report.load import LoadedRun, RunSet, differences, literal

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
_SEED_BINDINGS = ("RANDOM_SEED", "train.random_seed", "DatasetConfig.seed")
STUDY, RULE, OPTIMIZER, BATCH, RATE = "folder", "rule", "optimizer", "batch size", "learning rate"


@dataclasses.dataclass(frozen=True)
class Axis:
    """Something in which runs differ: values in order, and which of them each run has."""

    name: str
    of: Callable[[LoadedRun], Any]
    values: tuple[Any, ...]

    @property
    def ordered(self) -> bool:
        """Numbers: their colours follow their order."""
        return len(self.values) > 2 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)


@dataclasses.dataclass
class Group:
    """Runs that differ by seed only."""

    label: str
    key: tuple[Any, ...]
    runs: list[LoadedRun]

    @property
    def finished(self) -> list[LoadedRun]:
        return [run for run in self.runs if run.finished]

    @property
    def shown(self) -> list[LoadedRun]:
        """Of which curves are drawn: the finished ones, if there are any. A mean would end with the first that fails."""
        return self.finished or self.runs


@dataclasses.dataclass
class Dataset:
    studies: list[RunSet]
    runs: list[LoadedRun]
    axes: list[Axis]
    groups: list[Group]


def gather(studies: Sequence[RunSet]) -> Dataset:
    """Finds axes and groups. An axis that follows from those before it (steps from the batch size) is none of its own."""
    runs = [run for study in studies for run in study.runs]
    axes: list[Axis] = []
    for name, of in _candidates(runs):
        values = _ordered({_hashable(of(run)) for run in runs})
        if len(values) > 1 and len(_partition(runs, [*axes, Axis(name, of, values)])) > len(_partition(runs, axes)):
            axes.append(Axis(name, of, values))
    groups = [Group(_label(axes, key, members), key, members) for key, members in _partition(runs, axes).items()]
    order = {axis: {value: i for i, value in enumerate(axis.values)} for axis in axes}
    groups.sort(key=lambda g: [order[axis][value] for axis, value in zip(axes, g.key, strict=True)])
    return Dataset(list(studies), runs, axes, groups)


def _candidates(runs: Sequence[LoadedRun]) -> list[tuple[str, Callable[[LoadedRun], Any]]]:
    candidates: list[tuple[str, Callable[[LoadedRun], Any]]] = [
        (OPTIMIZER, lambda run: run.optimizer),
        (RULE, lambda run: run.rule),
        (BATCH, lambda run: run.batch_size),
        (RATE, lambda run: run.learning_rate),
    ]
    for name in dict.fromkeys(axis for run in runs for axis in run.values):
        candidates.append((name, lambda run, name=name: run.values.get(name)))
    # A sweep says what its axes are; of other runs the configurations do.
    if all(run.config and not run.values for run in runs):
        differing, _ = differences([run.config for run in runs])
        for name in differing:
            if not name.endswith(_SEED_BINDINGS):
                candidates.append((name, lambda run, name=name: literal(run.config.get(name, "None"))))
    return [*candidates, (STUDY, lambda run: run.study)]


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Runs, or others, by a key, in the order of the first of each.

    >>> by_seed = grouped([LoadedRun("a", seed=0), LoadedRun("b", seed=1)], lambda run: run.seed)
    >>> {seed: [run.name for run in runs] for seed, runs in by_seed.items()}
    {0: ['a'], 1: ['b']}
    """
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_batch_size(runs: Sequence[LoadedRun]) -> dict[int, list[LoadedRun]]:
    """Those whose batch size is known, the smallest first.

    >>> list(by_batch_size([LoadedRun("a", batch_size=16), LoadedRun("b"), LoadedRun("c", batch_size=8)]))
    [8, 16]
    """
    sizes = sorted({run.batch_size for run in runs if run.batch_size})
    return {size: [run for run in runs if run.batch_size == size] for size in sizes}


def final_losses(runs: Iterable[LoadedRun]) -> list[float]:
    """Of those that are finished."""
    return [loss for run in runs if (loss := run.finished_loss) is not None]


def losses_by_seed(runs: Iterable[LoadedRun]) -> dict[int | None, float]:
    """Seed -> final loss, of those that are finished."""
    return {run.seed: loss for run in runs if (loss := run.finished_loss) is not None}


def _partition(runs: Sequence[LoadedRun], axes: Sequence[Axis]) -> dict[tuple[Any, ...], list[LoadedRun]]:
    return grouped(runs, lambda run: tuple(_hashable(axis.of(run)) for axis in axes))


def _hashable(value: Any) -> Any:
    return value if isinstance(value, int | float | str | type(None)) else repr(value)


def _ordered(values: set[Any]) -> tuple[Any, ...]:
    numbers = sorted(v for v in values if isinstance(v, int | float))
    return (*numbers, *sorted(v for v in values if isinstance(v, str)), *(v for v in values if v is None))


def _label(axes: Sequence[Axis], key: Sequence[Any], members: Sequence[LoadedRun]) -> str:
    if not axes:
        return members[0].name if len(members) == 1 else members[0].study
    return labelled((axis.name, value) for axis, value in zip(axes, key, strict=True)) or members[0].study


def labelled(values: Iterable[tuple[str, Any]]) -> str:
    """Values of several axes in one line; what a run does not have is not mentioned.

    >>> labelled([("optimizer", "adamw"), ("rule", None), ("batch size", 8)])
    'adamw, batch 8'
    """
    return ", ".join(written(name, value) for name, value in values if value is not None)


def written(name: str, value: Any) -> str:
    """A value with as much of its axis' name as it needs.

    >>> written("optimizer", "adamw"), written("batch size", 32), written("optax.adamw.b2", 0.98)
    ('adamw', 'batch 32', 'adamw.b2 0.98')
    """
    if value is None:
        return f"no {name}"
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    if name in (OPTIMIZER, RULE, STUDY):
        return shown
    short = {BATCH: "batch", RATE: "rate"}.get(name, ".".join(name.split(".")[-2:]))
    return f"{short} {shown}"
