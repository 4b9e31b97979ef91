"""What would make a step fit, found by compiling: the first of a few changes, the smallest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perex_t5x.cli.spinner import Working
from perex_t5x.errors import ConfigError
from perex_t5x.preflight import memory
from perex_t5x.preflight.cases import Case
from perex_t5x.preflight.place import Place
from perex_t5x.preflight.report_cache import Compiler
from perex_t5x.preflight.step import DoesNotFitError
from perex_t5x.preflight.table import format_bytes

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer

_REMAT = "T5Config.remat_policy = 'full'"
_FSDP = "standard_logical_axis_rules.parameter_partitioning_dims = 2"


@dataclass(frozen=True)
class Change:
    """Gin bindings to add, and where to compile for."""

    bindings: tuple[str, ...]
    place: Place
    moved: bool = False

    def __str__(self) -> str:
        """The flags that a user adds."""
        pairs = (binding.split(" = ") for binding in self.bindings)
        flags = [f"--gin.{name}={value}" if value.isdigit() else f'--gin.{name}="{value}"' for name, value in pairs]
        return " ".join([*flags, *([f"--topology={self.place.topology}"] if self.moved else [])])


@dataclass(frozen=True)
class Trial:
    """A change, and what came of it.

    Attributes:
      fits: whether the step fits then.
      note: how much it takes, or why it does not fit or was not compiled.
      peak_bytes: of the step that fits; else None.
    """

    change: Change
    fits: bool
    note: str
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Search:
    """All trials for one configuration, in order; the last fits if any does."""

    name: str
    trials: tuple[Trial, ...]

    @property
    def found(self) -> Trial | None:
        return next((t for t in self.trials if t.fits), None)

    def lines(self) -> list[str]:
        found = self.found
        end = f"this fits: {found.change} ({found.note})" if found else "nothing that was tried fits."
        tried = [f"  tried {t.change}: {t.note}" for t in self.trials if not t.fits]
        return [f"{self.name} does not fit.", *tried, f"  {end}"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "found": str(self.found.change) if self.found else None,
            "trials": [
                {"change": str(t.change), "fits": t.fits, "note": t.note, "peak_bytes": t.peak_bytes}
                for t in self.trials
            ],
        }


def find(case: Case, place: Place, compiler: Compiler, working: Working) -> Search:
    """Tries the changes of `changes` until the step fits."""
    trainer, spec = case.build(place.devices())
    examples = next(iter(spec.values())).shape[0]
    trials = []
    for change in changes(trainer, examples, place):
        trials.append(_try(case, change, compiler, working))
        if trials[-1].fits:
            break
    return Search(case.name, tuple(trials))


def changes(trainer: Trainer, examples: int, place: Place) -> Iterator[Change]:
    """One at a time: microbatches x2, x4, ...; remat; FSDP; a larger slice. Then together, on larger slices, too."""
    here = [f"Trainer.num_microbatches = {n}" for n in _microbatches(trainer, examples)]
    others = []
    if trainer.model.config.remat_policy != "full":
        others.append(_REMAT)
    if not trainer.partitioner.shards_parameters_over_data and trainer.partitioner.mesh.shape["data"] > 1:
        others.append(_FSDP)
    for binding in (*here, *others):
        yield Change((binding,), place)
    for larger in place.larger():
        yield Change((), larger, moved=True)
    together = (*here[-1:], *others)
    if len(together) > 1:
        yield Change(together, place)
    # On a larger slice each chip has fewer examples, which is what microbatches are for.
    if others:
        for larger in place.larger():
            yield Change(tuple(others), larger, moved=True)


def _microbatches(trainer: Trainer, examples: int) -> list[int]:
    """Twice, four times ... as many as now, down to one group of examples a device."""
    on_device = examples // trainer.partitioner.data_parallel_size
    found, count = [], 2 * trainer.options.num_microbatches
    while on_device % count == 0 and (on_device // count) % trainer.options.group_size == 0:
        found.append(count)
        count *= 2
    return found


def _try(case: Case, change: Change, compiler: Compiler, working: Working) -> Trial:
    chip = change.place.chip
    try:
        trainer, spec = case.build(change.place.devices(), *change.bindings)
        state = sum(memory.argument_parts(trainer, spec).values())
        if state >= chip.hbm_bytes:  # no need to ask the compiler
            return Trial(change, False, f"state and batch alone take {format_bytes(state)}")
        with working(f"{case.name}: trying {change}"):
            report = compiler.report(trainer, spec)
    except DoesNotFitError as e:
        return Trial(change, False, e.account)
    except ConfigError as e:
        return Trial(change, False, f"not possible: {str(e).splitlines()[0]}")
    note = f"{format_bytes(report.peak_bytes)} of {format_bytes(chip.hbm_bytes)}, {report.seconds:.3g} s a step"
    return Trial(change, report.peak_bytes <= chip.hbm_bytes, note, report.peak_bytes)
