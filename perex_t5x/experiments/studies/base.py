"""What a study is: a sweep that is run in stages, and an analysis of what they left behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perex_t5x.experiments.sweep import Sweep, axes
from perex_t5x.experiments.sweep.runs import Result, Run

if TYPE_CHECKING:
    from perex_t5x.experiments.report.folders import Study as Folder
    from perex_t5x.experiments.sweep.plan import Plan

Finding = dict[str, Any]  # title, text, paper, table, plot: see docs/reports.md
Outcomes = Sequence[tuple[Run, Result]]  # of all stages so far
Stages = Generator[list[Sweep], Outcomes, None]  # sweeps to run together; what became of them comes back


@dataclasses.dataclass(frozen=True)
class Study:
    """A question, how it is asked, and how the answer is read.

    Attributes:
      name: of the study and of its Gin file, sweeps/<name>.gin, which describes all that may be run.
      stages: which parts of the sweep are run, in which order; what is learnt in one stage may decide the next.
      analyse: findings, from the sweep's folder as reports read it.
      quick: fields of the sweep for --quick, as on the command line: 'seeds = [0, 1]'.
      quick_gin: bindings of the runs for --quick.
      measure: what else is measured once the runs are done, for instance times; writes into the folder.
    """

    name: str
    stages: Callable[[Sweep, int], Stages]
    analyse: Callable[[Folder, str], list[Finding]]
    quick: Sequence[str] = ()
    quick_gin: Sequence[str] = ()
    measure: Callable[[Plan, str, bool], None] | None = None

    @property
    def file(self) -> str:
        return f"sweeps/{self.name}.gin"


def everything(sweep: Sweep, extensions: int) -> Stages:
    """One stage, the whole sweep."""
    del extensions
    yield [sweep]


def narrowed(sweep: Sweep, arm: Mapping[str, Any], rates: Sequence[float] | None, seeds: Sequence[int]) -> Sweep:
    """The part of a sweep at some axes' values, with these rates and seeds.

    >>> whole = Sweep("a", grid={"Trainer.clip_norm": [None, 1.0]}, batch_sizes=[8, 16], rule=["sqrt", "linear"])
    >>> part = narrowed(whole, {"Trainer.clip_norm": 1.0, "batch_size": 8, "rule": "sqrt"}, [0.5, 1.0], [0])
    >>> part.grid, part.batch_sizes, part.rule, part.rate_factors
    ({'Trainer.clip_norm': [1.0]}, [8], ['sqrt'], [0.5, 1.0])
    """
    files, grid = dict(sweep.files), dict(sweep.grid)
    changed: dict[str, Any] = {"seeds": list(seeds)}
    for axis, value in arm.items():
        if axis in files:
            files[axis] = [value]
        elif axis in grid:
            grid[axis] = [value]
        elif axis == axes.RULE:
            changed["rule"] = [value]
        else:
            changed["batch_sizes"] = [value]
    if rates is not None:
        changed["rate_factors" if rate_axis(sweep) == axes.RATE_FACTOR else "learning_rates"] = list(rates)
    return dataclasses.replace(sweep, files=files, grid=grid, **changed)


def arms(sweep: Sweep, *without: str) -> list[dict[str, Any]]:
    """All combinations of a sweep's values, but for rates and seeds and the axes named.

    >>> arms(Sweep("a", files={"optimizer": ["a.gin", "b.gin"]}, batch_sizes=[8]))
    [{'optimizer': 'a.gin', 'batch_size': 8}, {'optimizer': 'b.gin', 'batch_size': 8}]
    """
    parts = {**sweep.files, **sweep.grid}
    if not isinstance(sweep.rule, str):
        parts[axes.RULE] = sweep.rule
    if sweep.batch_sizes is not None:
        parts[axes.BATCH_SIZE] = sweep.batch_sizes
    return axes.product([[{axis: v} for v in values] for axis, values in parts.items() if axis not in without])


def rate_axis(sweep: Sweep) -> str:
    """Whether the sweep's rates are absolute or relative."""
    return axes.LEARNING_RATE if sweep.learning_rates is not None else axes.RATE_FACTOR


def rates(sweep: Sweep) -> list[float]:
    """Of the sweep's grid; [1] where it has none."""
    return sorted(sweep.learning_rates or sweep.rate_factors or [1.0])


def belongs(run: Run, arm: Mapping[str, Any]) -> bool:
    """Whether a run is at these axes' values."""
    return all(axis in run.values and run.values[axis] == value for axis, value in arm.items())
