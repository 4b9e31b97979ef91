"""What a study is: a sweep that is run in stages, and an analysis of what they left behind."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perex_t5x.errors import ConfigError
from perex_t5x.experiments.sweep import Sweep, axes
from perex_t5x.experiments.sweep.directory import Folder
from perex_t5x.experiments.sweep.plan import Plan
from perex_t5x.experiments.sweep.runs import Result, Run, absolute
from perex_t5x.files import as_path, write_atomically

if TYPE_CHECKING:
    from perex_t5x.experiments.report.load import RunSet

Finding = dict[str, Any]  # title, text, paper, table, plot: see docs/reports.md
Outcomes = Sequence[tuple[Run, Result]]  # of all stages so far
Stages = Generator[list[Sweep], Outcomes, None]  # sweeps to run together; what became of them comes back


@dataclasses.dataclass(frozen=True)
class Pod:
    """What a study changes in its sweep at the size of a pod, besides model, mesh and data: see `studies.pod`.

    Attributes:
      batch_sizes: in place of the sweep's, as multiples of the model's batch.
      grid: in place of the sweep's; None: it stays.
      bindings: of the runs.
    """

    batch_sizes: Sequence[float] = (1.0,)
    grid: Mapping[str, Sequence[Any]] | None = None
    bindings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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
      pod: for --scale=pod.
    """

    name: str
    stages: Callable[[Sweep, int], Stages]
    analyse: Callable[[RunSet, str], list[Finding]]
    quick: Sequence[str] = ()
    quick_gin: Sequence[str] = ()
    measure: Callable[[Plan, str, bool], None] | None = None
    pod: Pod = Pod()

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


# --- tuning: the best learning rate of several arms -------------------------------------------------------------------


SEEDS = 2  # how many of the study's seeds choose the rate


@dataclass(frozen=True)
class Tuned:
    """What was found for one arm.

    Attributes:
      arm: its values of the other axes.
      losses: rate -> mean validation loss over the seeds; inf where one failed.
    """

    arm: Mapping[str, Any]
    losses: Mapping[float, float]

    @property
    def best(self) -> float:
        """The rate with the lowest loss; if all failed, the lowest rate.

        >>> Tuned({}, {1.0: 2.5, 2.0: 2.4, 4.0: math.inf}).best
        2.0
        """
        return min(sorted(self.losses), key=lambda rate: self.losses[rate])

    def beyond(self) -> list[float]:
        """What the grid lacks: the next rate beyond the edge on which the best lies. Empty if it lies inside.

        >>> Tuned({}, {1.0: 2.5, 2.0: 2.4}).beyond(), Tuned({}, {1.0: 2.5, 2.0: 2.4, 4.0: 3.0}).beyond()
        ([4.0], [])
        """
        grid = sorted(self.losses)
        if len(grid) == 1:
            return [grid[0] / 2, grid[0] * 2]
        if self.best == grid[0]:
            return [grid[0] * grid[0] / grid[1]]
        if self.best == grid[-1]:
            return [grid[-1] * grid[-1] / grid[-2]]
        return []


def tune_then_run(sweep: Sweep, extensions: int) -> Stages:
    """Tunes every arm, then runs each at its best rate on all seeds."""
    arms_tuned = yield from tune(sweep, arms(sweep), extensions)
    yield [narrowed(sweep, tuned.arm, [tuned.best], sweep.seeds) for tuned in arms_tuned]


def tune(
    sweep: Sweep, arms: Sequence[Mapping[str, Any]], extensions: int
) -> Generator[list[Sweep], Outcomes, list[Tuned]]:
    """Stages that run each arm over the sweep's rates, and further ones as long as a best lies on an edge.

    `tuned = yield from tune(...)`. At most `extensions` rates are added to an arm's grid.
    """
    seeds = list(sweep.seeds)[:SEEDS]
    grids = [rates(sweep) for _ in arms]
    waiting = list(range(len(arms)))
    tuned: list[Tuned] = [Tuned(arm, {}) for arm in arms]
    for extension in range(extensions + 1):
        outcomes = yield [narrowed(sweep, arms[i], grids[i], seeds) for i in waiting]
        for i in waiting:
            tuned[i] = Tuned(arms[i], mean_losses(outcomes, arms[i], rate_axis(sweep), grids[i], seeds))
        waiting = [i for i in waiting if tuned[i].beyond()]
        if not waiting or extension == extensions:
            break
        for i in waiting:
            grids[i] = sorted([*grids[i], *tuned[i].beyond()])
    return tuned


def mean_losses(
    outcomes: Outcomes, arm: Mapping[str, Any], axis: str, grid: Sequence[float], seeds: Sequence[int]
) -> dict[float, float]:
    """Rate -> mean final loss over the seeds, inf where a run failed."""
    losses: dict[float, list[float]] = {rate: [] for rate in grid}
    for run, result in outcomes:
        rate = run.values.get(axis, 1.0)
        if rate in losses and run.seed in seeds and belongs(run, arm):
            losses[rate].append(math.inf if result.eval_loss is None else result.eval_loss)
    return {rate: sum(values) / len(values) if values else math.inf for rate, values in losses.items()}


# --- running the stages in one folder, as one sweep that grows --------------------------------------------------------


NOTES = "study.json"


def run_stages(
    study: Study,
    sweep: Sweep,
    folder: str,
    *,
    gin_files: Sequence[str] = (),
    gin_bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    flags: Sequence[str] = (),
    parallel: int | None = None,
    extensions: int = 4,
    quick: bool = False,
    dry_run: bool = False,
    overview: Any = None,
) -> list[Result]:
    """Runs what is not yet done of all stages, and what is measured besides; returns the results of all runs.

    The whole description is checked before the first run, also what belongs to later stages.
    """
    folder = absolute(folder)
    whole = sweep.plan(gin_files, gin_bindings, search_paths, flags=flags)
    if problems := Folder(folder).check(whole):
        raise ConfigError("\n".join(problems))
    if dry_run:
        return []
    begun, stages, runs = time.monotonic(), study.stages(sweep, extensions), {}
    parts, results = next(stages), []
    programs: dict[str, Any] = {}  # a stage more is not a compilation more
    try:
        while True:
            for part in parts:
                for made in part.plan(gin_files, gin_bindings, search_paths, check=False, flags=flags).runs:
                    runs.setdefault(made.name, made)
            grown = dataclasses.replace(whole, runs=tuple(runs.values()))
            results = grown.run(folder, together=True, parallel=parallel, overview=overview, programs=programs)
            try:
                parts = stages.send(list(zip(grown.runs, results, strict=True)))
            except StopIteration:
                break
        if study.measure is not None:
            study.measure(grown, folder, quick)
    finally:
        if as_path(folder).is_dir():
            _note(folder, study.name, sweep, quick, time.monotonic() - begun)
    return results


def _note(folder: str, name: str, sweep: Sweep, quick: bool, seconds: float) -> None:
    """What the analysis cannot see in the runs; seconds are added up over all starts."""
    former = notes(folder).get("seconds", 0.0)
    save(
        folder,
        NOTES,
        {"study": name, "seeds": list(sweep.seeds), "quick": quick, "seconds": round(former + seconds, 1)},
    )


def notes(folder: str, file: str = NOTES) -> dict[str, Any]:
    """What a study has written into a file of its folder; empty where it has not been."""
    try:
        return json.loads(as_path(os.path.join(folder, file)).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def save(folder: str, file: str, content: dict[str, Any]) -> None:
    """Writes what `notes` reads."""
    write_atomically(os.path.join(folder, file), json.dumps(content, indent=1) + "\n")
