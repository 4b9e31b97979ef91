"""Compile the train step for a TPU slice without a TPU, and read the compiled program."""

from perex_t5x.preflight.chips import CHIPS, Chip, chip, chip_of
from perex_t5x.preflight.hlo import Collective, Program
from perex_t5x.preflight.step import DoesNotFitError, StepReport, build, compile_step, report
from perex_t5x.preflight.topology import canonical_topology, known_topologies, tpu_devices

__all__ = [
    "CHIPS",
    "Chip",
    "Collective",
    "DoesNotFitError",
    "Program",
    "StepReport",
    "build",
    "canonical_topology",
    "chip",
    "chip_of",
    "compile_step",
    "known_topologies",
    "report",
    "tpu_devices",
]
