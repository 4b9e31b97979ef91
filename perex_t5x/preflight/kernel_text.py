"""Pallas kernels in the text of a compiled program: all that is needed to compile one of them alone."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from perex_t5x.preflight.hlo.text import Instruction, shape_arrays

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")


@dataclass(frozen=True)
class Kernel:
    """One `tpu_custom_call`.

    Attributes:
      name: the kernel's own, without the number that makes it unique.
      operands, results: (dtype, shape) of each.
      config: what the compiler is told of it, as JSON; the kernel itself is in it.
      aliases: (operand, result) that share memory.
      flops, bytes: what the kernel says of itself (`pl.CostEstimate`); 0 FLOPs, and its operands and results once, where
        it says nothing.
    """

    name: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    results: tuple[tuple[str, tuple[int, ...]], ...]
    config: str
    aliases: tuple[tuple[int, int], ...]
    flops: int
    bytes: int

    @property
    def key(self) -> str:
        """Of the same kernel in another program."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Kernel:
        def arrays(items: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
            return tuple((dtype, tuple(shape)) for dtype, shape in items)

        changed = {name: arrays(values[name]) for name in ("operands", "results")}
        return cls(**{**values, **changed, "aliases": tuple((a, b) for a, b in values["aliases"])})


def is_kernel(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes


def kernel_of(instruction: Instruction) -> Kernel:
    """Reads the instruction."""
    attributes = instruction.attributes
    start = attributes.index("backend_config=") + len("backend_config=")
    config, _ = json.JSONDecoder().raw_decode(attributes, start)
    operands, aliases = (
        _list(attributes, name) for name in ("operand_layout_constraints", "output_to_operand_aliasing")
    )
    cost = config["custom_call_config"].get("cost_estimate", {})
    kept = {name: config[name] for name in ("custom_call_config", "scoped_memory_configs") if name in config}
    moved = sum(shape_arrays(operands)) + sum(shape_arrays(instruction.shape))
    return Kernel(
        name=re.sub(r"\.\d+$", "", instruction.name),
        operands=_arrays(operands),
        results=_arrays(instruction.shape),
        config=json.dumps(kept, sort_keys=True),
        aliases=tuple((int(operand), int(result or 0)) for result, operand in _ALIAS.findall(aliases)),
        flops=int(cost.get("flops", 0)),
        bytes=int(cost.get("bytes_accessed", 0)) or moved,
    )


def _list(attributes: str, name: str) -> str:
    """What stands between the braces after this name; '' if it is not there."""
    _, found, rest = attributes.partition(f"{name}={{")
    depth, end = 1 if found else 0, 0
    while depth:
        depth += {"{": 1, "}": -1}.get(rest[end], 0)
        end += 1
    return rest[: max(end - 1, 0)]


def _arrays(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((dtype, tuple(int(s) for s in sizes.split(",") if s)) for dtype, sizes in _ARRAY.findall(text))
