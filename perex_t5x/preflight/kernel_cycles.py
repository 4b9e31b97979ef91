"""Static schedules: the cycles of Pallas kernels, for which the compiled program has no estimate, and of all instructions.

Each kernel of a program is compiled again, alone, in a process whose compiler writes down the static schedule, and counts

    max(schedule, FLOPs / (FLOPs per cycle at peak), bytes / (bytes per cycle of the memory))

with the schedule's bundles as often as they run, and FLOPs and bytes as the kernel states them (`pl.CostEstimate`). Results
are kept: the same kernel occurs in many programs.

A bundle is what the chip starts in one cycle. The schedule (`...-final_bundles.txt`) has one per line, with branches and the
exit tests of loops:

    0x864 LB: >> { ... %p9 = scmp.ge.s32.totalorder %s1, 4 /* loop exit test */ } /* Start region 149 */
    ...
   0x17e4   : >> { ... sbr.rel (!%p9) target = $region149 }

The sum of the bundles, each as often as it runs, is the time of the kernel if it never waits for memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perex_t5x.hardware.chips import Chip
from perex_t5x.hardware.hlo.costs import backend_config, kernel_cost
from perex_t5x.hardware.hlo.program import Executed, Program
from perex_t5x.hardware.hlo.text import Instruction, arrays, closing, numbers, shape_arrays
from perex_t5x.models import attention_kernels
from perex_t5x.per_example.kernels import matmul

if TYPE_CHECKING:
    from perex_t5x.preflight.report_cache import ReportCache

_log = logging.getLogger(__name__)

_FLAGS = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=^final_bundles"
_SECONDS = 900

_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")

_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*: ?>*\s*\{")
_BRANCH = re.compile(r"sbr\.rel(?: \(!?%(\w+)\))? target = \$region(\d+)")
_EXIT = re.compile(r"%(\w+) = scmp\.ge\.[su]32\.totalorder %\w+, (\d+) /\* loop exit test \*/")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")  # `jax.experimental.pallas.ops.tpu.splash_attention`
_WINDOW = re.compile(r"The window shape is \w+\[([\d,]*)\], while the full shape is \w+\[([\d,]*)\]")

_DUMPED = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt$")

_DELAY = 4  # bundles after a branch that run regardless
_LARGE = 64  # shorter conditional parts count as if they always ran
_PIPELINE = 2  # iterations of the grid's loop without the body: the first blocks are fetched, the last written


def kernel_cycles(program: Program, chip: Chip, cache: ReportCache | None = None) -> dict[str, int]:
    """Instruction -> cycles of one run of it, for all kernels of a program that could be counted.

    A kernel that writes into a larger array is inside a fusion, which then counts as the kernel. The results are kept in
    `cache`.
    """
    executed = (e for e in program.executed(fusions=True) if e.instruction.is_kernel)
    kernels = {(e.fusion or e.instruction).name: kernel_of(e.instruction, mask_shares(program, e)) for e in executed}
    if not kernels:
        return {}
    scheduled = _scheduled({k.key: k for k in kernels.values()}, chip, cache)
    return {name: _cycles(k, scheduled[k.key], chip) for name, k in kernels.items() if k.key in scheduled}


def _cycles(kernel: Kernel, scheduled: int, chip: Chip) -> int:
    per_second = max(kernel.flops / chip.peak_flops, kernel.bytes / chip.hbm_bytes_per_second)
    return max(scheduled, round(per_second * chip.clock_hz))


def _scheduled(kernels: Mapping[str, Kernel], chip: Chip, cache: ReportCache | None) -> dict[str, int]:
    """Key -> cycles of the schedule; kernels whose compilation fails are left out, with a warning."""
    cycles = {key: known for key in kernels if cache and (known := cache.kernel_cycles(key, chip.name)) is not None}
    missing = {key: kernel for key, kernel in kernels.items() if key not in cycles}
    if not missing:
        return cycles
    try:
        fresh = dict(zip(missing, _compile_apart(list(missing.values()), chip), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        _log.warning("the schedules of %d kernel(s) could not be read, and are not counted: %s", len(missing), e)
        return cycles
    for key, count in fresh.items():
        if cache:
            cache.keep_kernel_cycles(key, chip.name, count)
    return cycles | fresh


def _compile_apart(kernels: Sequence[Kernel], chip: Chip) -> list[int]:
    """Cycles of the kernels' schedules, in a process of its own: flags of the compiler hold for a whole process."""
    with tempfile.TemporaryDirectory(prefix="perex_t5x_kernels_") as folder:
        kernels_path, cycles_path = Path(folder, "kernels.json"), Path(folder, "cycles.json")
        kernels_path.write_text(json.dumps([kernel.to_json() for kernel in kernels]))
        dump = Path(folder, "dump")
        own = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
        environment = own | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} {_FLAGS}"}
        command = [sys.executable, "-m", __name__, chip.smallest_topology, kernels_path, dump, cycles_path]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if child.returncode != 0:
            raise ValueError((child.stderr.strip().splitlines() or ["the compiler ended without a message"])[-1])
        return json.loads(cycles_path.read_text())


# --- kernels in the text of a compiled program ------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """One `tpu_custom_call`.

    Attributes:
      name: the kernel's own, without the number that makes it unique.
      operands, results: (dtype, shape) of each.
      config: its configuration for the compiler, as JSON, including the kernel itself.
      aliases: (operand, result) that share memory.
      flops, bytes: the kernel's own `pl.CostEstimate`; without one 0 FLOPs, and its operands and results once.
      shares: of the grid's steps that compute, and that begin or end a row of blocks; None: not known, see `mask_shares`.
    """

    name: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    results: tuple[tuple[str, tuple[int, ...]], ...]
    config: str
    aliases: tuple[tuple[int, int], ...]
    flops: int
    bytes: int
    shares: tuple[float, float] | None = None

    @property
    def key(self) -> str:
        """Of the same kernel in another program."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Kernel:
        return cls(**tuples(values))


def tuples(value: Any) -> Any:
    """A value from JSON with tuples in place of its lists, at every depth.

    >>> tuples({"a": [1, [2, 3]]})
    {'a': (1, (2, 3))}
    """
    if isinstance(value, dict):
        return {name: tuples(inner) for name, inner in value.items()}
    return tuple(tuples(inner) for inner in value) if isinstance(value, list) else value


def kernel_of(instruction: Instruction, shares: tuple[float, float] | None = None) -> Kernel:
    """Reads the instruction."""
    attributes = instruction.attributes
    config, (flops, stated) = backend_config(instruction), kernel_cost(instruction)
    operands = _list(attributes, "operand_layout_constraints")
    aliases = _list(attributes, "output_to_operand_aliasing")
    passed_on = {name: config[name] for name in ("custom_call_config", "scoped_memory_configs") if name in config}
    # For TPU7x the program says which operands and results it has in main (0) and in vector memory (1). Alone, the kernel's
    # are the whole program's, which the compiler places elsewhere, and it would refuse.
    for name in ("input_memory_space_colors", "output_memory_space_colors"):
        if colors := passed_on["custom_call_config"].get(name):
            placed = [c for c in colors if str(c.get("color")) not in ("0", "1")]
            passed_on["custom_call_config"] = passed_on["custom_call_config"] | {name: placed}
    moved = sum(shape_arrays(operands)) + sum(shape_arrays(instruction.shape))
    return Kernel(
        name=re.sub(r"\.\d+$", "", instruction.name),
        operands=arrays(operands),
        results=arrays(instruction.shape),
        config=json.dumps(passed_on, sort_keys=True),
        aliases=tuple((int(operand), int(result or 0)) for result, operand in _ALIAS.findall(aliases)),
        flops=flops,
        bytes=stated or moved,
        shares=shares,
    )


def mask_shares(program: Program, e: Executed) -> tuple[float, float] | None:
    """(share of a splash kernel's blocks that its mask leaves, 1 / blocks in a row); None for any other kernel.

    The kernel's second operand says for each (query block, key block) whether its mask is empty (0), partial (1) or full
    (2). The kernel computes where it is not empty. A text in which that constant is elided, as `compiled.as_text()` does
    with large ones, counts as causal: `step.program_text` does not elide it.
    """
    splash = _SPLASH.search(f"{e.instruction.name} {e.instruction.op_name}")
    operands = arrays(_list(e.instruction.attributes, "operand_layout_constraints"))
    if not splash or len(operands) < 2 or len(operands[1][1]) != 3 or operands[1][0] not in ("s8", "s16", "s32"):
        return None  # without these operands nothing is masked
    constant, shape = program.constant(e, 1), operands[1][1]
    if constant is None:
        return None
    if "..." in constant.literal:
        runs = np.tri(*shape[1:], shape[2] - shape[1])
    else:
        values = re.sub(r"/\*.*?\*/", "", constant.literal)
        runs = np.asarray([int(n) for n in re.findall(r"\d+", values)]).reshape(shape) > 0
    row = shape[1] if splash[1] == "dkv" else shape[2]  # its grid goes over the queries of a block of keys
    return float(np.mean(runs)), 1 / row


def _list(attributes: str, name: str) -> str:
    """The text between the braces after this name; '' where the name is missing."""
    match = re.search(rf"{name}=(?={{)", attributes)
    return attributes[match.end() + 1 : closing(attributes, match.end())] if match else ""


# --- schedules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """The static schedule of one kernel.

    Attributes:
      bundles: in the text.
      loops: (first bundle, last bundle, trip count), outermost first; the count is None where it is not a constant.
      parts: (first bundle, last bundle) of the parts that a branch can skip, in order, large ones only, without the
        grid's body.
      body: (first, last) of the grid's body; None where the kernel has no grid.
      windows: (block, array) shapes that the pipeline moves.
    """

    bundles: int
    loops: tuple[tuple[int, int, float | None], ...]
    parts: tuple[tuple[int, int], ...]
    body: tuple[int, int] | None
    windows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def cycles(self, shares: Sequence[float] | None = None) -> int:
        """Each bundle as often as it runs.

        Args:
          shares: of the grid's steps in which each of `parts` runs; None: all of them, which is an upper bound.
        """
        times = np.ones(self.bundles)
        for first, last, turns in self.loops:
            times[first : last + 1] *= 1 if turns is None else turns
        if self.body is not None:
            turns = self.loops[0][2] or 1
            times[self.body[0] : self.body[1] + 1] *= max(turns - _PIPELINE, 0) / turns
        for (first, last), share in zip(self.parts, shares or (1.0,) * len(self.parts), strict=True):
            times[first : last + 1] *= share
        return round(float(np.sum(times)))


def parse_schedule(text: str) -> Schedule:
    """Reads the text of one kernel."""
    lines = _bundles(text)
    starts = {int(n): i for i, line in enumerate(lines) for n in _START.findall(line)}
    tests = {name: int(limit) for line in lines for name, limit in _EXIT.findall(line)}
    loops, skips = [], []
    for i, line in enumerate(lines):
        for predicate, region in _BRANCH.findall(line):
            target = starts.get(int(region))
            if target is None:
                continue
            if target <= i:
                loops.append((target, min(i + _DELAY, len(lines) - 1), tests.get(predicate)))
            elif target - 1 - (i + _DELAY) >= _LARGE:
                skips.append((i + _DELAY + 1, target - 1))
    loops.sort(key=lambda loop: (loop[0], -loop[1]))
    body = None
    if loops:
        first, last, _ = loops[0]
        inside = [s for s in skips if first <= s[0] and s[1] <= last]
        widest = max(inside, key=lambda s: s[1] - s[0], default=None)
        # The grid's body is everything that the loop does, except for fetching and writing blocks.
        if widest is not None and 2 * (widest[1] - widest[0]) > last - first:
            body = widest
    windows = dict.fromkeys((numbers(block), numbers(array)) for block, array in _WINDOW.findall(text))
    return Schedule(len(lines), tuple(loops), tuple(s for s in skips if s != body), body, tuple(windows))


def _bundles(text: str) -> list[str]:
    """The lines of bundles, each with the comments that continue below it."""
    bundles: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            bundles.append(line)
        elif bundles:
            bundles[-1] += "\n" + line
    return bundles


def chunks_of(schedule: Schedule) -> tuple[int, int]:
    """(examples, chunks of the sequence) of a kernel of `per_example.kernels.matmul`."""
    block, array = next((b, a) for b, a in schedule.windows if len(a) == 3)
    return array[0], math.ceil(array[1] / block[1])


class Schedules:
    """The static schedules of all instructions of the programs that this process compiles for TPUs.

    The compiler writes them into a temporary folder: hundreds of megabytes for a large model, and more than twice the time
    to compile. Its flags hold for a whole process and from its first use on, so create this before any TPU is described.
    """

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="perex_t5x_schedules_", ignore_cleanup_errors=True)
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={self._folder.name} {_FLAGS}"
        os.environ["LIBTPU_INIT_ARGS"] = flags.strip()

    def clear(self) -> None:
        """Forgets what was compiled so far."""
        for path in Path(self._folder.name).iterdir():
            path.unlink()

    def of(self, program: Program) -> dict[str, int]:
        """Instruction -> cycles of one run, for the program that was compiled last; kernels are not among them.

        The compiler schedules equal instructions once, so one that is missing has the schedule of its like.
        """
        texts = {m[1]: path for path in sorted(Path(self._folder.name).iterdir()) if (m := _DUMPED.match(path.name))}
        counted = {e.instruction.name: e for e, _ in program.counted()}
        cycles = {name: parse_schedule(texts[name].read_text()).cycles() for name in counted if name in texts}
        alike = {_signature(counted[name]): count for name, count in cycles.items()}
        return {name: alike[_signature(e)] for name, e in counted.items() if _signature(e) in alike} | cycles


def _signature(e: Executed) -> tuple[Any, ...]:
    """Equal for instructions that do the same."""
    instruction = e.instruction
    operands = tuple(e.frame.computation[name].shape for name in instruction.operands)
    return instruction.opcode, instruction.shape, operands, instruction.attribute(r'"estimated_cycles":"(\d+)"')


# --- in that process --------------------------------------------------------------------------------------------------


def schedule_cycles(kernel: Kernel, text: str) -> int:
    """Cycles of a kernel's schedule.

    Conditional parts count by their share of the grid's steps for our own kernel and for splash attention, and at every
    step for any other.
    """
    schedule = parse_schedule(text)
    # Sums that the kernel adds to are written in place: its only aliases.
    shares = matmul.shares(*chunks_of(schedule), bool(kernel.aliases)) if kernel.name == matmul.NAME else None
    if kernel.shares is not None:
        shares = _block_shares(schedule, *kernel.shares)
    if any(name in kernel.name for name in (attention_kernels.FORWARD, attention_kernels.BACKWARD)):
        schedule, shares = _attention(schedule)
    return schedule.cycles(shares if shares is not None and len(shares) == len(schedule.parts) else None)


def _attention(schedule: Schedule) -> tuple[Schedule, list[float]]:
    """Of our attention kernels: their inner loop takes the blocks beside the diagonal, more or fewer in each step."""
    num_blocks = max(array[-2] // block[-2] for block, array in schedule.windows if len(array) > 2)
    turns, begins = attention_kernels.turns_and_share(num_blocks)
    loops = tuple((first, last, turns if count is None else count) for first, last, count in schedule.loops)
    spans = {(first, last) for first, last, _ in loops}  # of a loop the text also says that it may not run at all
    first, last = schedule.body or (0, schedule.bundles)
    shares = [begins if first <= part[0] and part[1] <= last and part not in spans else 1.0 for part in schedule.parts]
    return dataclasses.replace(schedule, loops=loops), shares


def _block_shares(schedule: Schedule, computed: float, row: float) -> list[float]:
    """Of each part: the widest in the grid's body computes a block, those beside it begin or end a row of blocks."""
    first, last = schedule.body or (0, schedule.bundles)
    inside = [part for part in schedule.parts if first <= part[0] and part[1] <= last]
    block = max(inside, key=lambda part: part[1] - part[0], default=None)

    def share(part: tuple[int, int]) -> float:
        if part == block:
            return computed
        return row if block and part in inside and (part[1] < block[0] or block[1] < part[0]) else 1.0

    return [share(part) for part in schedule.parts]


def _main(topology: str, kernels_path: str, dump: str, cycles_path: str) -> None:
    import jax

    from perex_t5x.hardware.devices import tpu_devices

    sharding = jax.sharding.SingleDeviceSharding(tpu_devices(topology)[0])
    results = []
    for kernel in (Kernel.from_json(values) for values in json.loads(Path(kernels_path).read_text())):
        before = set(Path(dump).glob("*final_bundles.txt"))
        _compile(kernel, sharding)
        texts = sorted(set(Path(dump).glob("*ffi_call*-final_bundles.txt")) - before)
        results.append(schedule_cycles(kernel, texts[-1].read_text()))
    Path(cycles_path).write_text(json.dumps(results))


def _compile(kernel: Kernel, sharding: Any) -> None:
    import jax

    def struct(item: tuple[str, tuple[int, ...]], **where: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(item[1], _dtype(item[0]), **where)

    call = jax.ffi.ffi_call(
        "tpu_custom_call",
        [struct(x) for x in kernel.results],
        custom_call_api_version=1,
        legacy_backend_config=kernel.config,
        input_output_aliases=dict(kernel.aliases),
    )
    jax.jit(call).lower(*(struct(x, sharding=sharding) for x in kernel.operands)).compile()


def _dtype(name: str) -> Any:
    """Of XLA's name: bf16, f32, s32, pred, ..."""
    import jax.numpy as jnp

    kinds = {"f": "float", "s": "int", "u": "uint"}
    long = {"bf16": "bfloat16", "pred": "bool"}.get(name) or kinds[name[0]] + name[1:]
    return jnp.dtype(long)


if __name__ == "__main__":
    _main(*sys.argv[1:])
