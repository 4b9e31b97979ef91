"""Compile the train step for a TPU slice without a TPU, and read the compiled program."""

from __future__ import annotations

import importlib
from typing import Any

# Imported on demand: the names of chips and slices are also needed where JAX is not installed.
_MODULES = {
    "CHIPS": "hardware.chips",
    "Chip": "hardware.chips",
    "Collective": "preflight.hlo.program",
    "CompileTarget": "preflight.step",
    "DoesNotFitError": "preflight.step",
    "PreflightReport": "preflight.account",
    "Program": "preflight.hlo.program",
    "ReportCache": "preflight.report_cache",
    "StepReport": "preflight.step",
    "build": "preflight.step",
    "canonical_topology": "hardware.slices",
    "chip": "hardware.chips",
    "chip_of": "hardware.chips",
    "compile_step": "preflight.step",
    "known_topologies": "hardware.slices",
    "measure": "preflight.account",
    "report": "preflight.step",
    "tpu_devices": "hardware.devices",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"perex_t5x.{_MODULES[name]}"), name)
