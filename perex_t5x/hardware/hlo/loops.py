"""Trip counts of the loops of a compiled program.

Where XLA has not written the count down, it follows from the text: the condition compares a counter with a limit, the
body adds a constant to it, the loop starts with its first value. Limits and first values may come from outside, through
tuples, copies, fusions and enclosing loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from perex_t5x.hardware.hlo.text import Computation, Instruction

_PASSING = {"copy", "bitcast", "convert", "reshape", "optimization-barrier", "copy-start", "copy-done"}
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}


@dataclass(frozen=True)
class Frame:
    """A computation at one of its calls, which binds its parameters."""

    computation: Computation
    caller: Instruction | None = None
    parent: Frame | None = None


class _Source(NamedTuple):
    """Where a value comes from: an instruction of a frame, and the element of its tuple."""

    frame: Frame
    instruction: Instruction
    path: tuple[int, ...]


class TripCounts:
    """Answers `of(frame, while instruction)` for the computations of one program."""

    def __init__(self, computations: Mapping[str, Computation]):
        self._computations = computations

    def enter(self, frame: Frame, instruction: Instruction, name: str) -> Frame:
        """The frame of a computation that an instruction calls."""
        return Frame(self._computations[name], instruction, frame)

    def of(self, frame: Frame, loop: Instruction) -> int | None:
        """How often a loop's body runs; None if that depends on data."""
        known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        if known is not None:
            return int(known)
        condition = self.enter(frame, loop, loop.computation("condition"))
        test = self._source(condition, condition.computation.root)
        if test.instruction.opcode != "compare":
            return None
        direction = test.instruction.attribute(r"direction=(\w+)")
        sides = [self._source(test.frame, operand) for operand in test.instruction.operands]
        for side, other, way in ((0, 1, direction), (1, 0, _FLIPPED.get(direction or ""))):
            counter = sides[side]
            if counter.frame is not condition or counter.instruction.opcode != "parameter":
                continue
            limit = self._value(test.frame, test.instruction.operands[other])
            first = self._value(frame, loop.operands[0], counter.path)
            step = self._step(frame, loop, counter.path)
            if limit is not None and first is not None and step is not None and way is not None:
                return _count(first, limit, step, way)
        return None

    def _step(self, frame: Frame, loop: Instruction, path: tuple[int, ...]) -> int | None:
        """What one iteration adds to an element of the loop's tuple; None if it is not a constant."""
        body = self.enter(frame, loop, loop.computation("body"))
        end = self._source(body, body.computation.root, path)
        if self._is_element(end, body, path):
            return 0
        if end.instruction.opcode not in ("add", "subtract"):
            return None
        sides = [self._source(end.frame, operand) for operand in end.instruction.operands]
        for i, side in enumerate(sides):
            if self._is_element(side, body, path):
                step = self._value(end.frame, end.instruction.operands[1 - i])
                if end.instruction.opcode == "add":
                    return step
                return -step if i == 0 and step is not None else None
        return None

    @staticmethod
    def _is_element(source: _Source, frame: Frame, path: tuple[int, ...]) -> bool:
        """Whether a source is the element `path` of the frame's own parameter."""
        return source.frame is frame and source.instruction.opcode == "parameter" and source.path == path

    def _source(self, frame: Frame, name: str, path: tuple[int, ...] = ()) -> _Source:
        """Follows a value back through copies, tuples, fusions and calls, to the instruction that produces it."""
        while True:
            instruction = frame.computation[name]
            opcode = instruction.opcode
            if opcode in _PASSING:
                name = instruction.operands[0]
            elif opcode == "get-tuple-element":
                path = (int(instruction.attribute(r"index=(\d+)") or 0), *path)
                name = instruction.operands[0]
            elif opcode == "tuple" and path:
                name, path = instruction.operands[path[0]], path[1:]
            elif opcode in ("fusion", "call"):
                role = "calls" if instruction.callee("calls") else "to_apply"
                frame = self.enter(frame, instruction, instruction.computation(role))
                name = frame.computation.root
            elif opcode == "parameter" and frame.caller and frame.parent and frame.caller.opcode in ("fusion", "call"):
                name = frame.caller.operands[int(instruction.literal)]
                frame = frame.parent
            elif opcode == "while" and path and self._step(frame, instruction, path) == 0:
                name = instruction.operands[0]  # what a loop carries unchanged
            else:
                return _Source(frame, instruction, path)

    def constant(self, frame: Frame, name: str) -> Instruction | None:
        """The constant that a value is a copy of; None where it is computed, or an argument of the program."""
        _, instruction, _ = self._origin(frame, name)
        return instruction if instruction.opcode == "constant" else None

    def _origin(self, frame: Frame, name: str, path: tuple[int, ...] = ()) -> _Source:
        """`_source`, also out of the loops that carry the value unchanged."""
        frame, instruction, path = source = self._source(frame, name, path)
        caller, parent = frame.caller, frame.parent
        carried = instruction.opcode == "parameter" and path and caller and parent and caller.opcode == "while"
        if caller and parent and carried and self._step(parent, caller, path) == 0:
            return self._origin(parent, caller.operands[0], path)
        return source

    def _value(self, frame: Frame, name: str, path: tuple[int, ...] = ()) -> int | None:
        """An integer that is known from the text alone; None otherwise."""
        frame, instruction, path = self._origin(frame, name, path)
        if instruction.opcode == "constant":
            return int(instruction.literal) if instruction.literal.lstrip("-").isdigit() else None
        if instruction.opcode in ("add", "subtract", "multiply") and not path:
            a, b = (self._value(frame, operand) for operand in instruction.operands)
            if a is None or b is None:
                return None
            return {"add": a + b, "subtract": a - b, "multiply": a * b}[instruction.opcode]
        return None


def _count(first: int, limit: int, step: int, direction: str) -> int | None:
    """Trip count of `for (i = first; i direction limit; i += step)`.

    >>> _count(0, 5, 1, "LT"), _count(4, 0, -1, "GE"), _count(0, 5, 2, "LT"), _count(3, 3, 1, "LT")
    (5, 5, 3, 0)
    """
    if direction in ("LE", "GE"):
        limit, direction = (limit + 1, "LT") if direction == "LE" else (limit - 1, "GT")
    distance = limit - first
    if (direction == "LT" and step > 0) or (direction == "GT" and step < 0):
        return max(-(-distance // step), 0)
    if direction == "NE" and step and distance % step == 0 and distance // step >= 0:
        return distance // step
    return None
