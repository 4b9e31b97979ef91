"""Where the cycles of a compiled step go, and a lower bound of them.

    python -m perex_t5x.preflight.breakdown step.optimized_hlo.txt --chip=v5e

reads the text of any compiled program (`compiled.as_text()`), also another framework's. `preflight --breakdown` compiles
ours.

Every instruction counts twice: as the compiler estimates it (A), and as the longest of what it cannot be faster than (B):

    max(its static schedule,  FLOPs of its products at peak,  bytes at the memory's full bandwidth)

Kernels count by that formula in both. The schedules of XLA's own instructions are known only where the compiler writes
them down (`kernel_cycles.Schedules`); without them B is a little lower (2 % for 1_2b). The parts of a step are recognised
by the names of modules and functions that instructions carry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perex_t5x import cli
from perex_t5x.errors import ConfigError
from perex_t5x.hardware import chips
from perex_t5x.hardware.chips import Chip
from perex_t5x.hardware.hlo.costs import memory_bytes, product_flops
from perex_t5x.hardware.hlo.program import Executed, Program
from perex_t5x.per_example.kernels import matmul

COPIES, OTHER, UNESTIMATED = "copies and layout", "other", "not estimated"
STATISTICS = "weight gradients with statistics"
CALIBRATION = (
    "Calibration: MaxText's 16B model on v5e-256, published at 61.1 % MFU, is 59.0 % by the compiler's cycles and 71.6 % by "
    "their lower bound. Nothing ran on hardware here."
)

# The first that matches decides; a copy is a copy whatever it is of.
_PARTS = (
    (STATISTICS, matmul.NAME),
    ("attention", "causal_attention"),  # our kernels; they may be called within the output projection
    ("embedding", r"embed"),
    ("head and loss", r"logits|cross_entropy|loss|jvp\(\)"),
    ("norms and rotary", r"norm\b|_norm/|rotary|rope|/(cos|sin)/"),
    ("MLP", r"/mlp|/wi(_\d)?/|/wo/"),
    ("projections", r"/(query|key|value|out|qkv_proj)(_proj)?\b"),
    ("attention", r"_attend|splash|causal_attention|attention_op|dot_product_attention|flash"),
    ("norms and rotary", r"attention|\blayers(_\d+)?/"),  # rotary is in the attention's own function; sums of residuals
    (STATISTICS, "per_example_statistics"),
)
_NO_PART_NAMES = ("optimizer", OTHER)
NAMES = tuple(dict.fromkeys([*(name for name, _ in _PARTS), *_NO_PART_NAMES, COPIES, UNESTIMATED]))


@dataclass(frozen=True)
class Part:
    """One part of a step.

    Attributes:
      name: one of `NAMES`.
      cycles: by the compiler's estimates, kernels by their schedules (A).
      recomputed: of these, what the backward pass computes again.
      bound: the lower bound (B).
      instructions: how many of the program.
    """

    name: str
    cycles: int
    recomputed: int
    bound: int
    instructions: int


def breakdown(
    program: Program, chip: Chip, kernels: Mapping[str, int], schedules: Mapping[str, int] | None = None
) -> tuple[Part, ...]:
    """The parts of a program that have instructions; their cycles add up to `program.cycles(kernels)`.

    Args:
      program: the compiled step.
      chip: that it is compiled for.
      kernels: name -> cycles of its Pallas kernels.
      schedules: name -> cycles of the static schedules of other instructions, where known.
    """
    sums = {name: [0, 0, 0, 0] for name in NAMES}
    for e, own in program.counted(kernels):
        bound = own if e.instruction.name in kernels else _bound(program, e, chip, schedules or {})
        total = sums[part_of(e)]
        recomputed = own if "rematted_computation" in e.instruction.op_name else 0
        for i, value in enumerate((own, recomputed, bound)):
            total[i] += value * e.executions
        total[3] += 1
    sums[UNESTIMATED][3] = len(program.unestimated(kernels))
    return tuple(Part(name, *values) for name, values in sums.items() if values[3])


def _bound(program: Program, e: Executed, chip: Chip, schedules: Mapping[str, int]) -> int:
    arguments = program.computations, e.instruction, e.frame.computation
    seconds = max(product_flops(*arguments) / chip.peak_flops, memory_bytes(*arguments) / chip.hbm_bytes_per_second)
    return max(schedules.get(e.instruction.name, 0), round(seconds * chip.clock_hz))


def part_of(e: Executed) -> str:
    """One of `NAMES`."""
    instruction, op_name = e.instruction, e.instruction.op_name
    moved = instruction.opcode in ("copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "reshape")
    if moved or "dynamic_update_index_in_dim" in op_name or "dynamic_index_in_dim" in op_name:
        return COPIES
    text = f"{op_name}/{instruction.name if instruction.is_kernel else ''}"
    for name, pattern in _PARTS:
        if re.search(pattern, text):
            return name
    return "optimizer" if op_name and "jvp" not in op_name and "shard_map" not in op_name else OTHER


def _main(args: Any, paths: list[str]) -> None:
    from perex_t5x.hardware.devices import use_cpu_backend

    chip = chips.chip(args.chip)
    if len(paths) != 1 or not os.path.isfile(paths[0]):
        raise ConfigError(f"give one file with the text of a compiled program, not {' '.join(paths) or 'none'}.")
    use_cpu_backend()
    # Not earlier: importing these may use a device.
    from perex_t5x.preflight import kernel_cycles, render, report_cache

    try:
        program = Program(Path(paths[0]).read_text(encoding="utf-8"))
    except ValueError as e:
        raise ConfigError(f"{paths[0]}: {e}.") from e
    cache = report_cache.ReportCache(report_cache.default_folder())
    rows = render.breakdown_rows(breakdown(program, chip, kernel_cycles.kernel_cycles(program, chip, cache)))
    print(render.markdown_table(render.BREAKDOWN, rows))


def define_flags() -> None:
    from absl import flags

    flags.DEFINE_string("chip", "v5e", f"That the program is compiled for: {', '.join(chips.CHIPS)}.")


if __name__ == "__main__":
    cli.run(_main, __doc__, flags=define_flags, positional=True)
