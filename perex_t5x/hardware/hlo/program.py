"""The cycles and collectives of a compiled program, multiplied by the trip counts of its loops.

    program = Program(compiled.as_text())
    program.cycles()                                  # TPU: the compiler's estimates, summed
    for c in program.collectives(mesh):
        print(c.kind, c.axes, c.bytes, c.loops, c.executions)

Works on the optimized text of TPU and CPU programs. Estimates of cycles exist for TPU only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from jax.sharding import Mesh

from perex_t5x.hardware.hlo.groups import Groups, mesh_axes, parse_groups
from perex_t5x.hardware.hlo.loops import Frame, TripCounts
from perex_t5x.hardware.hlo.text import Instruction, arrays, parse_computations, shape_arrays

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
ICI, DCN = "ICI", "DCN"  # within a slice; between slices, over the data-centre network

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OFFLOADED = ("call-start", "custom-call-start")
_NO_ESTIMATE = 2**63 - 1  # written for TPU7x where there is none
_WINDOWED = re.compile(r"windowed_dot_general_body_(ag|rs)")
_TRANSFERS = {"ONE_TO_ONE": "collective-permute"}  # of the network between slices; the others are named alike
_WINDOWED_KINDS = {"ag": "all-gather", "rs": "reduce-scatter"}


@dataclass(frozen=True)
class Collective:
    """One collective of a program, however often it runs.

    Attributes:
      kind: one of `KINDS`.
      name: of the instruction.
      bytes: of the whole array on one device, the larger of operand and result: an all-gather's result, a
        reduce-scatter's operand. Several arrays in one collective are added up.
      arrays: how many arrays it carries.
      axes: mesh axes that it runs over, in the mesh's order; empty without a mesh.
      loops: trip counts of the loops around it, outermost first; None for one that depends on data.
      executions: how often it runs in total; loops that depend on data count once.
      network: 'ICI', or 'DCN' where it connects several slices; '' on a CPU.
      group_size: how many devices take part.
      dtypes: of the arrays, each once.
      part_of: 'all-gather' or 'reduce-scatter' for the permutations into which the compiler has broken one, to
        overlap it with the product that uses it; else ''.
      op_name: where in the traced function it comes from.
      hidden_seconds: of a step, while others compute; see `perex_t5x.preflight.overlap`.
    """

    kind: str
    name: str
    bytes: int
    arrays: int
    axes: tuple[str, ...]
    loops: tuple[int | None, ...]
    executions: int
    network: str = ""
    group_size: int = 1
    dtypes: tuple[str, ...] = ()
    part_of: str = ""
    op_name: str = field(default="", compare=False)
    hidden_seconds: float = field(default=0.0, compare=False)

    @property
    def kind_name(self) -> str:
        """`kind`, or what the compiler made the permutation from."""
        return f"{self.part_of}, as permutes" if self.part_of else self.kind

    @property
    def bytes_per_step(self) -> int:
        return self.bytes * self.executions


@dataclass(frozen=True)
class Executed:
    """One occurrence of an instruction: the loops around it, and the fusion it is in, if any."""

    instruction: Instruction
    frame: Frame
    loops: tuple[int | None, ...]
    fusion: Instruction | None = None

    @property
    def executions(self) -> int:
        return math.prod(1 if trips is None else trips for trips in self.loops)


class Program:
    """A compiled program, from `compiled.as_text()`."""

    def __init__(self, text: str):
        self.computations, self.entry = parse_computations(text)
        self.num_partitions = int((re.search(r"num_partitions=(\d+)", text[: text.find("\n")]) or [0, 1])[1])
        self._trips = TripCounts(self.computations)

    def executed(self, fusions: bool = False, offloaded: bool = False) -> Iterator[Executed]:
        """All instructions that run, in order, those in loops once.

        Args:
          fusions: also the inner instructions of fusions.
          offloaded: also those of calls that a sparse core runs at the same time, such as TPU7x's all-gathers and scatters.
        """
        yield from self._executed(Frame(self.computations[self.entry]), (), fusions, offloaded)

    def _executed(
        self, frame: Frame, loops: tuple, fusions: bool, offloaded: bool, fusion: Instruction | None = None
    ) -> Iterator[Executed]:
        called: list[str] | tuple[str, ...]
        for instruction in frame.computation:
            yield Executed(instruction, frame, loops, fusion)
            inside, outermost = loops, fusion
            if instruction.opcode == "fusion":
                called, outermost = [instruction.computation("calls")] if fusions else [], fusion or instruction
            else:
                called = [] if fusion else _run_by(instruction, offloaded)
            if instruction.opcode == "while":
                inside = (*loops, self._trips.of(frame, instruction))
            for name in called:
                inner = self._trips.enter(frame, instruction, name)
                yield from self._executed(inner, inside, fusions, offloaded, outermost)

    def cycles(self, kernels: Mapping[str, int] | None = None) -> int:
        """The compiler's estimates of all instructions, each as often as it runs; of a conditional, its longest branch.

        Collectives, copies between memories, scatters and gathers have no estimate: see `unestimated`.

        Args:
          kernels: name -> cycles of Pallas kernels, which have none either: see `kernel_cycles`.
        """
        return _total(self.counted(kernels))

    def counted(self, kernels: Mapping[str, int] | None = None) -> list[tuple[Executed, int]]:
        """The instructions that `cycles` adds up, with the cycles of one run of each."""
        return self._counted(Frame(self.computations[self.entry]), (), kernels or {})

    def instruction_cycles(self, frame: Frame, instruction: Instruction, kernels: Mapping[str, int]) -> int:
        """Of one instruction of a frame, with everything that it runs; loops multiplied out."""
        return _total(self._counted_in(frame, instruction, (), kernels))

    def _counted(self, frame: Frame, loops: tuple, kernels: Mapping[str, int]) -> list[tuple[Executed, int]]:
        return [entry for i in frame.computation for entry in self._counted_in(frame, i, loops, kernels)]

    def _counted_in(
        self, frame: Frame, instruction: Instruction, loops: tuple, kernels: Mapping[str, int]
    ) -> list[tuple[Executed, int]]:
        own = _estimate(instruction)
        own = kernels.get(instruction.name) if own is None else own
        if own is not None:
            return [(Executed(instruction, frame, loops), own)]
        inside = (*loops, self._trips.of(frame, instruction)) if instruction.opcode == "while" else loops
        inner = [self._trips.enter(frame, instruction, name) for name in _run_by(instruction)]
        called = [self._counted(computation, inside, kernels) for computation in inner]
        if instruction.opcode == "conditional":
            return max(called, key=_total, default=[])
        return [entry for entries in called for entry in entries]

    def unestimated(self, kernels: Collection[str] = ()) -> list[Executed]:
        """Kernels, except those given, and fusions without an estimate of cycles; collectives are not among them."""
        return [
            e
            for e in self.executed(offloaded=True)
            if _estimate(e.instruction) is None
            and (e.instruction.is_kernel or _has_no_estimate(e.instruction))
            and e.instruction.name not in kernels
            and not e.instruction.name.startswith("async-collective")
        ]

    def constant(self, e: Executed, operand: int) -> Instruction | None:
        """The constant that an instruction's operand is a copy of; None where it is anything else."""
        return self._trips.constant(e.frame, e.instruction.operands[operand])

    def data_dependent_loops(self) -> list[str]:
        """Names of loops whose trip count is unknown; everything in them is counted once."""
        loops = (e for e in self.executed() if e.instruction.opcode == "while")
        return [e.instruction.name for e in loops if self._trips.of(e.frame, e.instruction) is None]

    def collectives(self, mesh: Mesh | None = None) -> list[Collective]:
        """All collectives, in order; with the mesh also which axes they join and over which network."""
        numbers = _DeviceNumbers(mesh, self.num_partitions)
        collectives = (self._collective(e, numbers) for e in self.executed(fusions=True, offloaded=True))
        return [c for c in collectives if c is not None]

    def _collective(self, e: Executed, numbers: _DeviceNumbers) -> Collective | None:
        instruction, attributes = e.instruction, e.instruction.attributes
        if instruction.opcode == "send" and "megascale" in attributes:
            # Traffic between slices goes through the host: one send and one recv for each collective.
            transfer = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"') or ""
            kind = _TRANSFERS.get(transfer, transfer.lower().replace("_", "-"))
            return self._make(e, kind, [e.frame.computation[instruction.operands[0]]], *numbers.between_slices())
        kind = instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            return None
        if '"async_collective_fusion_config"' in attributes and '"flag_start":"-1"' not in attributes:
            return None  # the middle or the end of one that another fusion started
        groups = parse_groups(attributes, self.num_partitions)
        computation, names = e.frame.computation, instruction.operands
        if kind == "all-reduce" and _is_scattered(e):
            # Of the fusion's operand: inside it is padded.
            caller, parent = e.frame.caller, e.frame.parent
            assert caller is not None and parent is not None, "only a fusion's parts are scattered"
            kind, computation, names = "reduce-scatter", parent.computation, caller.operands
        return self._make(e, kind, [computation[name] for name in names], *numbers.of(groups, kind))

    def _make(
        self, e: Executed, kind: str, operands: list[Instruction], axes: tuple[str, ...], group_size: int, network: str
    ) -> Collective:
        shapes = [operand.shape for operand in operands]
        sizes = [size for shape in shapes for size in shape_arrays(shape)]
        windowed = _WINDOWED.search(e.frame.computation.name)
        return Collective(
            kind=kind,
            name=e.instruction.name,
            bytes=sum(sizes) * (group_size if kind == "all-gather" else 1),
            arrays=len(sizes),
            axes=axes,
            loops=e.loops,
            executions=e.executions,
            network=network,
            group_size=group_size,
            dtypes=tuple(sorted({dtype for shape in shapes for dtype, _ in arrays(shape)})),
            part_of=_WINDOWED_KINDS[windowed[1]] if windowed and kind == "collective-permute" else "",
            op_name=e.instruction.op_name or (e.fusion.op_name if e.fusion else ""),
        )


class _DeviceNumbers:
    """Maps the device numbers in a program's groups to the axes of a mesh and to the slices of its devices."""

    def __init__(self, mesh: Mesh | None, num_partitions: int):
        self._mesh = mesh
        if mesh is None:
            return
        devices = list(mesh.devices.flat)
        self._on_tpu = devices[0].platform == "tpu"
        self._slice_of = [getattr(d, "slice_index", 0) or 0 for d in devices]
        self._members = list(range(len(devices)))
        if num_partitions < len(devices):
            # With several slices each has its own program, whose numbers count the devices of that slice.
            self._members = [i for i in self._members if self._slice_of[i] == self._slice_of[0]]

    def of(self, groups: Groups, kind: str) -> tuple[tuple[str, ...], int, str]:
        """(axes, devices in a group, network)."""
        size = 2 if kind == "collective-permute" else len(groups[0])
        if self._mesh is None:
            return (), size, ""
        groups = tuple(tuple(self._members[i] for i in group) for group in groups)
        crosses = any(len({self._slice_of[i] for i in group}) > 1 for group in groups)
        network = "" if not self._on_tpu else DCN if crosses else ICI
        return mesh_axes(groups, self._mesh.shape), size, network

    def between_slices(self) -> tuple[tuple[str, ...], int, str]:
        """(axes along which slices differ, number of slices, network)."""
        if self._mesh is None:
            return (), 0, DCN
        grid = np.asarray(self._slice_of).reshape(self._mesh.devices.shape)
        names = self._mesh.axis_names
        differ = [bool(np.any(grid != np.take(grid, [0], axis=i))) for i in range(grid.ndim)]
        return tuple(name for name, does in zip(names, differ, strict=True) if does), len(set(self._slice_of)), DCN


def _total(counted: list[tuple[Executed, int]]) -> int:
    return sum(own * e.executions for e, own in counted)


def _estimate(instruction: Instruction) -> int | None:
    """The compiler's cycles of an instruction itself; None where it gives none."""
    cycles = _CYCLES.search(instruction.attributes)
    return int(cycles[1]) if cycles and int(cycles[1]) != _NO_ESTIMATE else None


def _has_no_estimate(instruction: Instruction) -> bool:
    """Whether it takes time for which the compiler has no estimate."""
    return "kind=kCustom" in instruction.attributes or f'"estimated_cycles":"{_NO_ESTIMATE}"' in instruction.attributes


def _run_by(instruction: Instruction, offloaded: bool = False) -> list[str]:
    """The computations that an instruction runs; not the functions of a reduction."""
    opcodes = ("while", "call", "conditional", "async-start", "custom-call")
    if instruction.opcode in (*opcodes, *(_OFFLOADED if offloaded else ())):
        return [name for _, name in instruction.called]
    return []


def _is_scattered(e: Executed) -> bool:
    """Whether a fusion keeps only this device's part of an all-reduce: some TPUs write a reduce-scatter that way."""
    return e.fusion is not None and any(i.opcode == "dynamic-slice" for i in e.frame.computation)
