"""What was found of programs that were compiled before, so that asking again is quick.

JAX's own compilation cache keeps programs for devices that are not there, but cannot read them back. So the reports are kept
instead, each under a hash of all that it depends on: the lowered program, the devices and their order, the versions of
compiler and reader, the flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from perex_t5x.hardware.chips import chip_of
from perex_t5x.preflight import kept, step
from perex_t5x.preflight.hlo.program import Collective
from perex_t5x.preflight.step import DoesNotFitError, StepReport

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer


class Compiler:
    """`step.compile_step` and `step.report`, with a memory; `folder=None`: without."""

    def __init__(self, folder: Path | None = None):
        self._folder = folder

    def report(self, trainer: Trainer, batch_spec: Mapping[str, jax.ShapeDtypeStruct]) -> StepReport:
        """The report of a trainer's step; raises `DoesNotFitError` where it does not fit."""
        return self.report_of(step.lower_step(trainer, batch_spec), trainer.partitioner.mesh)

    def report_of(self, lowered: Any, mesh: Mesh) -> StepReport:
        """The report of a lowered program for the devices of a mesh; raises as `report` does."""
        path = self._folder / f"{_key(lowered.as_text(), mesh)}.json" if self._folder else None
        found = kept.read(path)
        if found is None:
            try:
                found = {"report": _plain(step.report(step.compile_lowered(lowered), mesh, self._folder))}
            except DoesNotFitError as e:
                found = {"refusal": e.account}
            kept.write(path, found)
        if "refusal" in found:
            raise DoesNotFitError(found["refusal"])
        return _report(found["report"], mesh)


def _key(program: str, mesh: Mesh) -> str:
    devices = [
        (d.device_kind, d.id, getattr(d, "coords", None), getattr(d, "slice_index", 0), getattr(d, "core_on_chip", 0))
        for d in mesh.devices.flat
    ]
    return kept.key(program, str(mesh.shape), str(devices))


def _plain(report: StepReport) -> dict[str, Any]:
    return dataclasses.asdict(dataclasses.replace(report, chip=None))


def _report(values: Mapping[str, Any], mesh: Mesh) -> StepReport:
    """The inverse of `_plain`; JSON makes lists of tuples."""
    collectives = tuple(
        Collective(**{name: tuple(value) if isinstance(value, list) else value for name, value in c.items()})
        for c in values["collectives"]
    )
    changed = {
        "collectives": collectives,
        "unestimated": tuple(values["unestimated"]),
        "chip": chip_of(mesh.devices.flat[0]),
    }
    return StepReport(**{**values, **changed})
