"""The configurations that preflight compiles, and the search for a change that makes one fit.

The search compiles a few changes, the smallest first, and stops at the first that fits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from perex_t5x import gin_utils
from perex_t5x.cli.progress import Working
from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.hardware.chips import Chip
from perex_t5x.models import remat
from perex_t5x.preflight import step
from perex_t5x.preflight.account import argument_parts
from perex_t5x.preflight.render import format_bytes
from perex_t5x.preflight.report_cache import ReportCache
from perex_t5x.preflight.step import BatchSpec, CompileTarget, DoesNotFitError

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer

_REMAT = "T5Config.remat_policy = 'full'"
_FSDP = "standard_logical_axis_rules.parameter_partitioning_dims = 2"


@dataclass(frozen=True)
class Case:
    """Gin files and bindings under a name."""

    name: str
    files: tuple[str, ...]
    bindings: tuple[str, ...] = ()
    search_paths: tuple[str, ...] = ()

    def parse(self, *changes: str) -> None:
        """Parses them; `changes` are bindings that win over all others."""
        step.parse_gin(self.files, (*self.bindings, *changes), self.search_paths)

    def with_bindings(self, *added: str) -> Case:
        return replace(self, bindings=(*self.bindings, *added))

    def build(self, devices: Sequence[Any], *changes: str) -> tuple[Trainer, BatchSpec]:
        self.parse(*changes)
        return step.build_parsed(devices)


def cases(
    files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str], compare: Sequence[str]
) -> list[Case]:
    """One case, or one for every entry of `compare`: the same with an optimizer or Gin files added.

    >>> [case.files for case in cases(["a.gin"], [], [], ["adamw", "b.gin+c.gin"])]
    [('a.gin', 'optimizers/adamw.gin'), ('a.gin', 'b.gin', 'c.gin')]
    """
    common = (tuple(bindings), tuple(search_paths))
    if not compare:
        names = [name.removesuffix(".gin") for name in files]
        shown = [os.path.basename(name) for name in names if not name.startswith("runs/")]
        return [Case(" + ".join(shown) or names[0], tuple(files), *common)]
    columns = []
    for entry in compare:
        added = [part if part.endswith(".gin") else _optimizer_file(part) for part in entry.split("+")]
        columns.append(Case(entry.replace(".gin", ""), (*files, *added), *common))
    return columns


def _optimizer_file(name: str) -> str:
    known = sorted(path.stem for path in (Path(gin_utils.shipped_gin_dir()) / "optimizers").glob("*.gin"))
    if name not in known:
        raise ConfigError(
            f"--compare: {name!r} is neither a shipped optimizer nor a file that ends in .gin.{did_you_mean(name, known)} "
            f"Optimizers: {', '.join(known)}."
        )
    return f"optimizers/{name}.gin"


# --- what would fit ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Gin bindings to add, and what to compile for."""

    bindings: tuple[str, ...]
    target: CompileTarget
    moved: bool = False

    def __str__(self) -> str:
        """The flags that a user adds."""
        pairs = (binding.split(" = ") for binding in self.bindings)
        flags = [f"--gin.{name}={value}" if value.isdigit() else f'--gin.{name}="{value}"' for name, value in pairs]
        return " ".join([*flags, *([f"--topology={self.target.topology}"] if self.moved else [])])


@dataclass(frozen=True)
class Trial:
    """A change and its outcome.

    Attributes:
      fits: whether the step fits then.
      note: how much it takes, or why it does not fit or was not compiled.
      peak_bytes, cycles: of the step that fits; else None.
    """

    change: Change
    fits: bool
    note: str
    peak_bytes: int | None = None
    cycles: int | None = None


@dataclass(frozen=True)
class Search:
    """All trials for one configuration, in order; the last fits if any does."""

    name: str
    trials: tuple[Trial, ...]

    @property
    def found(self) -> Trial | None:
        return next((t for t in self.trials if t.fits), None)

    def lines(self) -> list[str]:
        fitting = self.found
        end = f"this fits: {fitting.change} ({fitting.note})" if fitting else "nothing that was tried fits."
        tried = [f"  tried {t.change}: {t.note}" for t in self.trials if not t.fits]
        return [f"{self.name} does not fit.", *tried, f"  {end}"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "found": str(self.found.change) if self.found else None,
            "trials": [{**vars(t), "change": str(t.change)} for t in self.trials],
        }


def search(case: Case, target: CompileTarget, cache: ReportCache, working: Working) -> Search:
    """Tries `changes` in order until the step fits."""
    trainer, spec = case.build(target.devices())
    examples = next(iter(spec.values())).shape[0]
    trials = []
    for change in changes(trainer, examples, target):
        trials.append(_try(case, change, cache, working))
        if trials[-1].fits:
            break
    return Search(case.name, tuple(trials))


@dataclass(frozen=True)
class RematChoice:
    """T5Config.remat_policy = 'auto', resolved: all policies that were compiled, and the best, if any fits."""

    name: str
    trials: tuple[Trial, ...]
    best: Trial | None

    @property
    def bindings(self) -> tuple[str, ...]:
        """Of the best; where none fits, of the one that needs the least memory."""
        return (self.best or self.trials[-1]).change.bindings

    def lines(self) -> list[str]:
        tried = [f"  {t.change}: {t.note}" for t in self.trials]
        end = f"  taken: {self.best.change}" if self.best else "  none of them fits."
        return [f"{self.name}: T5Config.remat_policy = 'auto'", *tried, end]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "best": str(self.best.change) if self.best else None,
            "trials": [{**vars(t), "change": str(t.change)} for t in self.trials],
        }


def choose_remat(
    case: Case, policies: Sequence[str], target: CompileTarget, cache: ReportCache, working: Working, *, all: bool
) -> RematChoice:
    """Compiles the step with these policies: with all of them, or with those that the trainer would try."""
    trials: dict[str, Trial] = {}

    def attempt(policy: str) -> remat.Attempt:
        change = Change((f"T5Config.remat_policy = '{policy}'",), target)
        trials[policy] = trial = _try(case, change, cache, working)
        return remat.Attempt(policy, trial.fits, trial.note, trial.cycles)

    best = remat.choose(policies, attempt, all).best
    return RematChoice(case.name, tuple(trials.values()), best and trials[best.policy])


def changes(trainer: Trainer, examples: int, target: CompileTarget) -> Iterator[Change]:
    """One at a time: microbatches x2, x4, ...; remat; FSDP; a larger slice. Then together, on larger slices, too."""
    here = [f"Trainer.num_microbatches = {n}" for n in _microbatches(trainer, examples)]
    others = []
    config = getattr(trainer.model, "config", None)  # a model of one's own may have none
    if getattr(config, "remat_policy", "full") != "full":
        others.append(_REMAT)
    if not trainer.partitioner.shards_parameters_over_data and trainer.partitioner.mesh.shape["data"] > 1:
        others.append(_FSDP)
    for binding in (*here, *others):
        yield Change((binding,), target)
    for larger in target.larger():
        yield Change((), larger, moved=True)
    together = (*here[-1:], *others)
    if len(together) > 1:
        yield Change(together, target)
    # Without microbatches: on a larger slice each device already has fewer examples.
    if others:
        for larger in target.larger():
            yield Change(tuple(others), larger, moved=True)


def _microbatches(trainer: Trainer, examples: int) -> list[int]:
    """Twice, four times ... as many as now, down to one group of examples per device."""
    on_device = examples // trainer.partitioner.data_parallel_size
    counts, count = [], 2 * trainer.options.num_microbatches
    while on_device % count == 0 and (on_device // count) % trainer.options.group_size == 0:
        counts.append(count)
        count *= 2
    return counts


def _try(case: Case, change: Change, cache: ReportCache, working: Working) -> Trial:
    chip = cast(Chip, change.target.chip)  # fake CPU devices fit every step, and have no choice of remat policies
    try:
        trainer, spec = case.build(change.target.devices(), *change.bindings)
        state = sum(argument_parts(trainer, spec).values())
        if state >= chip.hbm_bytes:  # no need to ask the compiler
            return Trial(change, False, f"state and batch alone take {format_bytes(state)}")
        with working(f"{case.name}: trying {change}"):
            report = cache.report(trainer, spec)
    except DoesNotFitError as e:
        return Trial(change, False, e.refusal)
    except ConfigError as e:
        return Trial(change, False, f"not possible: {str(e).splitlines()[0]}")
    seconds = report.cycles / chip.clock_hz
    note = f"{format_bytes(report.peak_bytes)} of {format_bytes(chip.hbm_bytes)}, {seconds:.3g} s per step"
    return Trial(change, report.peak_bytes <= chip.hbm_bytes, note, report.peak_bytes, report.cycles)
