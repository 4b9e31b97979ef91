"""Reports of programs that were compiled before, kept on disk so that asking again is quick.

JAX's own compilation cache stores programs for devices that are not there, but cannot read them back. So the reports are
kept instead, as small JSON files. Each is named by a hash of everything it depends on: the lowered program, the devices and
their order, the versions of compiler and reader, the flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from perex_t5x import files
from perex_t5x.hardware import chips, hlo
from perex_t5x.hardware.hlo.program import Collective
from perex_t5x.preflight import step
from perex_t5x.preflight.breakdown import Part
from perex_t5x.preflight.kernel_cycles import Schedules, tuples
from perex_t5x.preflight.step import BatchSpec, DoesNotFitError, StepReport

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer


def default_folder() -> Path:
    """$XDG_CACHE_HOME/perex_t5x/preflight, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perex_t5x" / "preflight"


class ReportCache:
    """`step.compile_step` and `step.report` with a cache on disk.

    Args:
      folder: where the reports are; None: none is kept.
      schedules: where this process's compiler writes down static schedules; None: the lower bounds go without.
    """

    def __init__(self, folder: Path | None = None, schedules: Schedules | None = None):
        self._folder = folder
        self._schedules = schedules

    def report(self, trainer: Trainer, batch_spec: BatchSpec) -> StepReport:
        """The report of a trainer's step; raises `DoesNotFitError` where it does not fit."""
        lowered, options = step.lower_step(trainer, batch_spec), trainer.used_compiler_options()
        return self.report_of(lowered, trainer.partitioner.mesh, options)

    def report_of(self, lowered: Any, mesh: Mesh, options: Mapping[str, Any] | None = None) -> StepReport:
        """The report of a lowered program for the devices of a mesh; raises as `report` does.

        `options` are those that the program was given (`jax.jit(..., compiler_options=...)`), which its text does not have.
        """
        given = str(sorted((options or {}).items()))
        program = lowered.as_text(), given, str(mesh.shape), str(_devices(mesh))
        scheduled, plain = f"{_key(*program, 'schedules')}.json", f"{_key(*program)}.json"
        name = scheduled if self._schedules else plain
        # A report with schedules has all that one without them has.
        values: dict[str, Any] | None = self._read(scheduled) or (None if self._schedules else self._read(plain))
        if values is None:
            if self._schedules:
                self._schedules.clear()
            try:
                report = step.report(step.compile_lowered(lowered), mesh, self, self._schedules)
                values = {"report": dataclasses.asdict(dataclasses.replace(report, chip=None))}
            except DoesNotFitError as e:
                values = {"refusal": e.refusal}
            self._write(name, values)
        if "refusal" in values:
            raise DoesNotFitError(values["refusal"])
        return _from_json(values["report"], mesh)

    def kernel_cycles(self, kernel: str, chip: str) -> int | None:
        """Cycles of a kernel's schedule on a chip; None where not known yet."""
        return (self._read(_kernel_name(kernel, chip)) or {}).get("cycles")

    def keep_kernel_cycles(self, kernel: str, chip: str, cycles: int) -> None:
        self._write(_kernel_name(kernel, chip), {"cycles": cycles})

    def _read(self, name: str) -> dict[str, Any] | None:
        if self._folder is None:
            return None
        try:
            return json.loads((self._folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing, or cut short
            return None

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):  # a full disk is no reason to lose the result
                files.write_atomically(self._folder / name, json.dumps(values))


def _kernel_name(kernel: str, chip: str) -> str:
    return f"kernel-{_key(kernel, chip)}.json"


def _key(*parts: str) -> str:
    """A hash of these, of the compiler's version and flags, and of the source files that read its output."""
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_LIBRARY_PATH")]
    flags = [re.sub(r"--xla_jf_dump\w+=\S+", "", value).strip() for value in flags]  # change nothing in the program
    return hashlib.sha256("\0".join([*parts, *flags, *_versions(), _sources()]).encode()).hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    versions = []
    for package in ("jax", "jaxlib", "libtpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return tuple(versions)


@functools.cache
def _sources() -> str:
    """A hash of the files that read programs, and of the table of chips: a report is valid for as long as they stay."""
    folders = Path(__file__).parent, Path(hlo.__file__).parent
    paths = [*(path for folder in folders for path in sorted(folder.rglob("*.py"))), Path(chips.__file__)]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def _devices(mesh: Mesh) -> list[tuple[Any, ...]]:
    return [
        (d.device_kind, d.id, getattr(d, "coords", None), getattr(d, "slice_index", 0), getattr(d, "core_on_chip", 0))
        for d in mesh.devices.flat
    ]


def _from_json(kept: Mapping[str, Any], mesh: Mesh) -> StepReport:
    """A report from the values that `ReportCache.report_of` keeps; the chip is the mesh's."""
    values: dict[str, Any] = tuples(kept)
    collectives = tuple(Collective(**c) for c in values["collectives"])
    parts = tuple(Part(**part) for part in values["parts"])
    chip = chips.chip_of(mesh.devices.flat[0])
    return StepReport(**values | {"collectives": collectives, "parts": parts, "chip": chip})
