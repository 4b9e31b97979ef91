"""Compile the train step for a TPU slice without a TPU, and read the compiled program."""

from __future__ import annotations

import importlib
from typing import Any

# Looked up when they are used: the names of chips and slices are also wanted where JAX is not.
_MODULES = {
    "CHIPS": "chips",
    "Chip": "chips",
    "Collective": "hlo",
    "DoesNotFitError": "step",
    "Program": "hlo",
    "StepReport": "step",
    "build": "step",
    "canonical_topology": "slice_names",
    "chip": "chips",
    "chip_of": "chips",
    "compile_step": "step",
    "known_topologies": "slice_names",
    "report": "step",
    "tpu_devices": "topology",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
