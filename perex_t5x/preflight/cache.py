"""What was found of programs that were compiled before, so that asking again is quick.

JAX's own compilation cache keeps programs for devices that are not there, but cannot read them back. So the reports are kept
instead, each under a hash of all that it depends on: the lowered program, the devices and their order, the versions of
compiler and reader, the flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from perex_t5x.preflight import step
from perex_t5x.preflight.chips import chip_of
from perex_t5x.preflight.hlo import Collective
from perex_t5x.preflight.step import DoesNotFitError, StepReport

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer


def default_folder() -> Path:
    """$XDG_CACHE_HOME/perex_t5x/preflight, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perex_t5x" / "preflight"


class Compiler:
    """`step.compile_step` and `step.report`, with a memory; `folder=None`: without."""

    def __init__(self, folder: Path | None = None):
        self._folder = folder

    def report(self, trainer: Trainer, batch_spec: Mapping[str, jax.ShapeDtypeStruct]) -> StepReport:
        """The report of a trainer's step; raises `DoesNotFitError` where it does not fit."""
        mesh = trainer.partitioner.mesh
        lowered = step.lower_step(trainer, batch_spec)
        path = self._folder / f"{_key(lowered.as_text(), mesh)}.json" if self._folder else None
        kept = _read(path)
        if kept is None:
            try:
                kept = {"report": _plain(step.report(step.compile_lowered(lowered), mesh))}
            except DoesNotFitError as e:
                kept = {"refusal": e.account}
            _write(path, kept)
        if "refusal" in kept:
            raise DoesNotFitError(kept["refusal"])
        return _report(kept["report"], mesh)


def _key(program: str, mesh: Mesh) -> str:
    flat = mesh.devices.flat
    devices = [
        (d.device_kind, d.id, getattr(d, "coords", None), getattr(d, "slice_index", 0), getattr(d, "core_on_chip", 0))
        for d in flat
    ]
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_LIBRARY_PATH")]
    parts = [program, str(mesh.shape), str(devices), *flags, *_versions(), _reader()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _versions() -> list[str]:
    found = []
    for package in ("jax", "jaxlib", "libtpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return found


@functools.cache
def _reader() -> str:
    """A hash of the files that read programs: what they find is kept for as long as they stay the same."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def _plain(report: StepReport) -> dict[str, Any]:
    return dataclasses.asdict(dataclasses.replace(report, chip=None))


def _report(kept: Mapping[str, Any], mesh: Mesh) -> StepReport:
    """The inverse of `_plain`; JSON makes lists of tuples."""
    collectives = tuple(
        Collective(**{name: tuple(value) if isinstance(value, list) else value for name, value in c.items()})
        for c in kept["collectives"]
    )
    changed = {
        "collectives": collectives,
        "unestimated": tuple(kept["unestimated"]),
        "chip": chip_of(mesh.devices.flat[0]),
    }
    return StepReport(**{**kept, **changed})


def _read(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or half of it
        return None


def _write(path: Path | None, kept: Mapping[str, Any]) -> None:
    if path is None:
        return
    # A full disk is no reason to lose what was found.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as f:
            json.dump(kept, f)
        os.replace(f.name, path)
