"""Finds the best learning rate of several arms; a grid whose best lies on its edge is extended and tried again."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perex_t5x.experiments.studies.base import Outcomes, belongs, narrowed, rate_axis, rates
from perex_t5x.experiments.sweep import Sweep

SEEDS = 2  # the first so many of the study's choose the rate


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


def tune(
    sweep: Sweep, arms: Sequence[Mapping[str, Any]], extensions: int
) -> Generator[list[Sweep], Outcomes, list[Tuned]]:
    """Stages that run each arm over the sweep's rates, and further ones as long as a best lies on an edge.

    `found = yield from tune(...)`. At most `extensions` rates are added to an arm's grid.
    """
    seeds = list(sweep.seeds)[:SEEDS]
    grids = [rates(sweep) for _ in arms]
    waiting = list(range(len(arms)))
    found: list[Tuned] = [Tuned(arm, {}) for arm in arms]
    for extension in range(extensions + 1):
        outcomes = yield [narrowed(sweep, arms[i], grids[i], seeds) for i in waiting]
        for i in waiting:
            found[i] = Tuned(arms[i], mean_losses(outcomes, arms[i], rate_axis(sweep), grids[i], seeds))
        waiting = [i for i in waiting if found[i].beyond()]
        if not waiting or extension == extensions:
            break
        for i in waiting:
            grids[i] = sorted([*grids[i], *found[i].beyond()])
    return found


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
