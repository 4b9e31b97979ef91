"""Lower bounds of an instruction's time: its products, and the bytes that it must move; and what kernels state of theirs.

All are read from the text. Nothing of what an instruction keeps in the chip's own memory (layouts with `S(1)`) is counted;
an operand of which only a slice is read counts as that slice, and a result that is written into an operand as the part
that is written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from perex_t5x.hardware.chips import Chip
from perex_t5x.hardware.hlo.program import Program
from perex_t5x.hardware.hlo.text import Computation, Instruction, arrays, shape_arrays

_ON_CHIP = re.compile(r"[a-z]\w*\[[\d,<=]*\](?:\{[^}]*S\([1-9]\d*\)[^}]*\})")
_SAME = ("bitcast", "copy", "convert", "reshape")  # of these only the operand's users matter


def stated_cycles(program: Program, chip: Chip) -> int:
    """The compiler's cycles of a program, its kernels by the costs that they state.

    A kernel's static schedule says more, but has to be compiled for (`preflight`). To compare programs that run the same
    kernels, more or less often, this is enough.
    """
    kernels = {}
    for e in program.executed(fusions=True):
        if e.instruction.is_kernel:
            flops, size = kernel_cost(e.instruction)
            seconds = max(flops / chip.peak_flops, size / chip.hbm_bytes_per_second)
            kernels[(e.fusion or e.instruction).name] = round(seconds * chip.clock_hz)
    return program.cycles(kernels)


def kernel_cost(kernel: Instruction) -> tuple[int, int]:
    """FLOPs and bytes as a Pallas kernel states them (`pl.CostEstimate`); 0 where it does not."""
    cost = backend_config(kernel)["custom_call_config"].get("cost_estimate", {})
    return int(cost.get("flops", 0)), int(cost.get("bytes_accessed", 0))


def backend_config(instruction: Instruction) -> dict[str, Any]:
    """What the compiler was told of an instruction, and what it has decided."""
    start = instruction.attributes.index("backend_config=") + len("backend_config=")
    return json.JSONDecoder().raw_decode(instruction.attributes, start)[0]


def product_flops(computations: Mapping[str, Computation], instruction: Instruction, within: Computation) -> int:
    """FLOPs of the matrix products and convolutions of an instruction, and of those inside it if it is a fusion."""
    if instruction.opcode == "dot":
        lhs = _sizes(within[instruction.operands[0]])
        summed = _numbers(instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}"))
        return 2 * math.prod(_sizes(instruction)) * math.prod(lhs[d] for d in summed)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, *(_sizes(within[name]) for name in instruction.operands[:2]))
    if instruction.opcode != "fusion":
        return 0
    inside = computations[instruction.computation("calls")]
    return sum(product_flops(computations, inner, inside) for inner in inside)


def _convolution_flops(instruction: Instruction, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> int:
    """Multiplications by padding and by the zeros between dilated elements do not count: batched products have many."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None, "every convolution has them"
    left, right, out = labels.groups()
    sizes = _sizes(instruction)
    window = dict(re.findall(r"(\w+)=([\d_x-]+)", instruction.attribute(r"window=\{([^}]*)\}") or ""))
    spatial = [label for label in sorted(left) if label.isdigit()]

    def each(name: str, default: str) -> list[str]:
        return window[name].split("x") if name in window else [default] * len(spatial)

    flops = 2 * sizes[out.index("b")] * sizes[out.index("f")] * rhs[right.index("i")]
    of_each = zip(
        spatial, each("stride", "1"), each("pad", "0_0"), each("lhs_dilate", "1"), each("rhs_dilate", "1"), strict=True
    )
    for label, stride, pad, lhs_dilate, rhs_dilate in of_each:
        low, spread = int(pad.split("_")[0]), int(lhs_dilate)
        extent = (lhs[left.index(label)] - 1) * spread + 1
        flops *= sum(
            0 <= at < extent and at % spread == 0
            for o in range(sizes[out.index(label)])
            for k in range(rhs[right.index(label)])
            for at in [o * int(stride) + k * int(rhs_dilate) - low]
        )
    return flops


def memory_bytes(computations: Mapping[str, Computation], instruction: Instruction, within: Computation) -> int:
    """Bytes that an instruction reads from the chip's memory and writes to it, each array once."""
    operands = {name: within[name] for name in instruction.operands}
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return _bytes(instruction.shape) * (1 + _is_outside(operands[instruction.operands[0]]))
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _bytes(operands[instruction.operands[1]].shape)
    if instruction.opcode != "fusion":
        return _bytes(instruction.shape) + sum(_bytes(o.shape) for o in operands.values())
    inside = computations[instruction.computation("calls")]
    read = {}
    for i, name in enumerate(instruction.operands):
        if _is_outside(operands[name]):
            read[name] = read.get(name, 0) + _read(computations, inside, i)
    whole = {name: _bytes(o.shape) for name, o in operands.items()}
    return sum(min(size, whole[name]) for name, size in read.items()) + _written(computations, instruction, inside)


def _read(computations: Mapping[str, Computation], inside: Computation, parameter: int) -> int:
    """Bytes that a fusion reads of its parameter of this number."""
    name = next(i.name for i in inside if i.opcode == "parameter" and int(i.literal) == parameter)
    total, names = 0, [name]
    for current in names:
        for user in _users(inside, current):
            first = user.operands[0] == current
            if user.opcode in _SAME:
                names.append(user.name)
            elif user.opcode in ("dynamic-slice", "slice", "gather") and first:
                total += _size(user)
            elif user.opcode == "dynamic-update-slice" and first:
                continue  # written in place
            elif user.opcode == "fusion":
                called = computations[user.computation("calls")]
                total += sum(_read(computations, called, i) for i, o in enumerate(user.operands) if o == current)
            else:
                return _size(inside[name])
    return min(total, _size(inside[name]))


def _written(computations: Mapping[str, Computation], instruction: Instruction, inside: Computation) -> int:
    """Bytes that a fusion writes to the memory."""
    root = inside[inside.root]
    results = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    shapes = _elements(instruction.shape)
    return sum(_update(computations, inside, r) for r, s in zip(results, shapes, strict=True) if not _ON_CHIP.match(s))


def _update(computations: Mapping[str, Computation], inside: Computation, result: Instruction) -> int:
    """Bytes of a result of a fusion that are new."""
    if result.opcode in _SAME:
        return min(_size(result), _update(computations, inside, inside[result.operands[0]]))
    if result.opcode == "dynamic-update-slice":
        return _size(inside[result.operands[1]])
    if result.opcode == "fusion":
        called = computations[result.computation("calls")]
        if called[called.root].opcode != "tuple":
            return _update(computations, called, called[called.root])
    return _size(result)


def _users(computation: Computation, name: str) -> Iterator[Instruction]:
    return (i for i in computation if name in i.operands)


def _elements(shape: str) -> list[str]:
    """The arrays of a shape, with their layouts."""
    return re.findall(r"[a-z]\w*\[[\d,<=]*\](?:\{[^}]*\})?", shape)


def _is_outside(instruction: Instruction) -> bool:
    return any(not _ON_CHIP.match(array) for array in _elements(instruction.shape))


def _bytes(shape: str) -> int:
    """Of the arrays that are not in the chip's own memory."""
    return sum(shape_arrays(_ON_CHIP.sub("", shape)))


def _size(instruction: Instruction) -> int:
    return sum(shape_arrays(instruction.shape))


def _sizes(instruction: Instruction) -> tuple[int, ...]:
    return arrays(instruction.shape)[0][1]


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in (text or "").split(",") if n]
