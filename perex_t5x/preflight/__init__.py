"""Compile the train step for a TPU slice without a TPU, and read the compiled program."""

from __future__ import annotations

import importlib
from typing import Any

# Looked up when they are used: the names of chips and slices are also wanted where JAX is not.
_MODULES = {
    "CHIPS": "hardware.chips",
    "Chip": "hardware.chips",
    "Collective": "preflight.hlo.program",
    "DoesNotFitError": "preflight.step",
    "Program": "preflight.hlo.program",
    "StepReport": "preflight.step",
    "build": "preflight.step",
    "canonical_topology": "hardware.slices",
    "chip": "hardware.chips",
    "chip_of": "hardware.chips",
    "compile_step": "preflight.step",
    "known_topologies": "hardware.slices",
    "report": "preflight.step",
    "tpu_devices": "hardware.devices",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"perex_t5x.{_MODULES[name]}"), name)
