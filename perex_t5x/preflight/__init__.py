"""Compile the train step for a TPU slice without a TPU, and read the compiled program."""

from __future__ import annotations

import importlib
from typing import Any

from perex_t5x.cli import flags as cli_flags
from perex_t5x.errors import ConfigError

# Imported on demand: the names of chips and slices are also needed where JAX is not installed.
_MODULES = {
    "CHIPS": "hardware.chips",
    "Chip": "hardware.chips",
    "Collective": "hardware.hlo.program",
    "CompileTarget": "preflight.step",
    "DoesNotFitError": "preflight.step",
    "PreflightReport": "preflight.account",
    "Program": "hardware.hlo.program",
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


def define_flags() -> None:
    """Those that the commands of this package share."""
    from absl import flags

    cli_flags.define_training_flags()
    flags.DEFINE_string("topology", None, "TPU slice to compile for: v5e:4x4, or by its cloud name v5e-16.")
    flags.DEFINE_integer("slices", None, "Number of such slices, joined by the data-centre network.")
    flags.DEFINE_integer("devices", None, "Compile for this number of fake CPU devices instead.")


def start(args: Any) -> None:
    """Checks the shared flags and makes the CPU the backend. Before importing anything that may use a device."""
    if not args.gin_file:
        raise ConfigError("no --gin_file given: those of a training, such as models/150m.gin and runs/pretrain.gin.")
    if args.devices is not None and args.topology:
        raise ConfigError("--devices (fake CPU devices) and --topology (a TPU slice) exclude each other.")
    if args.devices is not None and args.devices < 1:
        raise ConfigError(f"--devices={args.devices}: must be at least 1.")
    from perex_t5x.cli import gin_command
    from perex_t5x.hardware.devices import use_cpu_backend

    use_cpu_backend(args.devices)
    gin_command.load_training(args)
