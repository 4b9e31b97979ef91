"""Cycles of a kernel from its static schedule, as the TPU compiler writes it (`...-final_bundles.txt`).

A bundle is what the chip starts in one cycle. The text has one to a line, with branches and the loops' exit tests:

    0x864 LB: >> { ... %p9 = scmp.ge.s32.totalorder %s1, 4 /* loop exit test */ } /* Start region 149 */
    ...
   0x17e4   : >> { ... sbr.rel (!%p9) target = $region149 }

Σ bundles, each as often as it runs, is the time of the kernel if memory never keeps it waiting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*: ?>*\s*\{")
_BRANCH = re.compile(r"sbr\.rel(?: \(!?%(\w+)\))? target = \$region(\d+)")
_EXIT = re.compile(r"%(\w+) = scmp\.ge\.[su]32\.totalorder %\w+, (\d+) /\* loop exit test \*/")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_WINDOW = re.compile(r"The window shape is \w+\[([\d,]*)\], while the full shape is \w+\[([\d,]*)\]")

_DELAY = 4  # bundles after a branch that run all the same
_LARGE = 64  # shorter conditional parts count as if they always ran
_PIPELINE = 2  # turns of the grid's loop in which the body rests: the first blocks come in, the last go out


@dataclass(frozen=True)
class Schedule:
    """What the text of one kernel says.

    Attributes:
      bundles: in the text.
      loops: (first bundle, last bundle, turns), outermost first; turns None where they are not a constant.
      parts: (first bundle, last bundle) of what a branch can skip, in order, large ones only, without the grid's body.
      body: (first, last) of the grid's body; None where the kernel has no grid.
      windows: (block, array) shapes of what the pipeline moves.
    """

    bundles: int
    loops: tuple[tuple[int, int, int | None], ...]
    parts: tuple[tuple[int, int], ...]
    body: tuple[int, int] | None
    windows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def cycles(self, shares: Sequence[float] | None = None) -> int:
        """Each bundle as often as it runs.

        Args:
          shares: of the grid's steps in which each of `parts` runs; None: all of them, which is an upper bound.
        """
        times = np.ones(self.bundles)
        for first, last, turns in self.loops:
            times[first : last + 1] *= turns or 1
        if self.body is not None:
            turns = self.loops[0][2] or 1
            times[self.body[0] : self.body[1] + 1] *= max(turns - _PIPELINE, 0) / turns
        for (first, last), share in zip(self.parts, shares or (1.0,) * len(self.parts), strict=True):
            times[first : last + 1] *= share
        return round(float(np.sum(times)))


def parse(text: str) -> Schedule:
    """Reads the text of one kernel."""
    lines = _bundles(text)
    starts = {int(n): i for i, line in enumerate(lines) for n in _START.findall(line)}
    tests = {name: int(limit) for line in lines for name, limit in _EXIT.findall(line)}
    loops, skips = [], []
    for i, line in enumerate(lines):
        for predicate, region in _BRANCH.findall(line):
            target = starts.get(int(region))
            if target is None:
                continue
            if target <= i:
                loops.append((target, min(i + _DELAY, len(lines) - 1), tests.get(predicate)))
            elif target - 1 - (i + _DELAY) >= _LARGE:
                skips.append((i + _DELAY + 1, target - 1))
    loops.sort(key=lambda loop: (loop[0], -loop[1]))
    body = None
    if loops:
        first, last, _ = loops[0]
        inside = [s for s in skips if first <= s[0] and s[1] <= last]
        widest = max(inside, key=lambda s: s[1] - s[0], default=None)
        # The grid's body holds all that the loop does, but for the blocks' coming and going.
        if widest is not None and 2 * (widest[1] - widest[0]) > last - first:
            body = widest
    windows = dict.fromkeys((_sizes(block), _sizes(array)) for block, array in _WINDOW.findall(text))
    return Schedule(len(lines), tuple(loops), tuple(s for s in skips if s != body), body, tuple(windows))


def _bundles(text: str) -> list[str]:
    """The lines of bundles, each with the comments that run on below it."""
    found: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            found.append(line)
        elif found:
            found[-1] += "\n" + line
    return found


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def chunks_of(schedule: Schedule) -> tuple[int, int]:
    """(examples, chunks of the sequence) of a kernel of `per_example.kernels.products`."""
    block, array = next((b, a) for b, a in schedule.windows if len(a) == 3)
    return array[0], math.ceil(array[1] / block[1])
