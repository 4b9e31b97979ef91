"""Hours, chip-hours and money of a launch, from preflight's seconds a step and list prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perex_t5x.hardware.slices import Slice
from perex_t5x.launching.spec import Job


@dataclass(frozen=True)
class Estimate:
    """
    Attributes:
      chips: of all slices.
      price: of a chip-hour in USD; None where not known.
      hours: of all jobs; None where it is not known.

    >>> print(Estimate(256, 1.2, 10.0).words())
    at least 10.0 hours, 2,560 chip-hours, about $3,072 at $1.2 a chip-hour (the compiler's cycles, without collectives,
    input and evaluation: a lower bound; compiling and restarts come on top)
    """

    chips: int
    price: float | None
    hours: float | None = None

    def words(self) -> str:
        if self.hours is None:
            return (
                f"{self.chips:,} chip-hours an hour, {self._dollars(self.chips, ' an hour')} (how many hours is not known "
                "without preflight)"
            )
        chip_hours = self.hours * self.chips
        hours = f"{self.hours:.1f} hours" if self.hours >= 0.1 else f"{self.hours * 60:.1f} minutes"
        return (
            f"at least {hours}, {chip_hours:,.0f} chip-hours, {self._dollars(chip_hours)} (the compiler's cycles, without "
            "collectives,\ninput and evaluation: a lower bound; compiling and restarts come on top)"
        )

    def _dollars(self, chip_hours: float, each: str = "") -> str:
        if self.price is None:
            return "list price not known: give --price_per_chip_hour"
        return f"about ${chip_hours * self.price:,.0f}{each} at ${self.price:g} a chip-hour"


def estimate(jobs: Sequence[Job], seconds: Mapping[str, float | None], kind: Slice, slices: int) -> Estimate:
    """Adds up steps times seconds a step.

    Args:
      jobs: what runs, one after another.
      seconds: of a step, by the job's name; a job that is not in it, or None, makes the hours unknown.
      kind, slices: on what.
    """
    each = [seconds.get(job.name) for job in jobs]
    hours = None if None in each else sum(s * job.train_steps for s, job in zip(each, jobs, strict=True)) / 3600
    return Estimate(kind.chips * slices, kind.price, hours)
