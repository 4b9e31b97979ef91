"""The text of a compiled program, as computations of instructions.

`compiled.as_text()` is XLA's own notation: a computation is a header, its instructions, a closing bracket; an instruction is

    %name = shape opcode(%operand, ...), attribute=..., metadata={...}, backend_config={...}

Only what the other modules need is parsed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\) -> .*\{$")
_END = re.compile(r'\}(, execution_thread="[^"]*")?\s*')
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = ")
_OPERAND = re.compile(r"%([^\s,(){}]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([^\s,)}]+)")
_CALLED_LISTS = re.compile(r"\b(branch_computations|called_computations)=\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in the program.
      opcode: 'fusion', 'while', 'all-reduce-start', ...
      shape: the result's, as written.
      operands: names of instructions of the same computation.
      literal: the text between the parentheses, for a constant or a parameter.
      attributes: the rest of the line.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @functools.cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """(role, computation) pairs: ('body', 'region_0.5'), ('calls', 'fused_computation.3'), ..."""
        called = _CALLED.findall(self.attributes)
        for role, names in _CALLED_LISTS.findall(self.attributes):
            called += [(role, name.strip().lstrip("%")) for name in names.split(",") if name.strip()]
        return tuple(called)

    def callee(self, role: str) -> str | None:
        """The computation called in this role; None if there is none."""
        return next((name for r, name in self.called if r == role), None)

    def computation(self, role: str) -> str:
        """The same of an instruction that cannot be without one: the body of a loop."""
        name = self.callee(role)
        assert name is not None, f"{self.name} has no {role}"
        return name

    def attribute(self, pattern: str) -> str | None:
        """First group of a regular expression in the attributes, or None."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @property
    def is_kernel(self) -> bool:
        """Whether it runs a Pallas kernel."""
        return self.opcode == "custom-call" and "tpu_custom_call" in self.attributes

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from: 'jit(train_step)/while/body/dot_general'."""
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"') or ""


@dataclass
class Computation:
    """Instructions by name, in order of execution where the program is scheduled."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]


def parse_computations(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations by name, and the name of the one that is the program."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in _logical_lines(text):
        if _END.fullmatch(line):
            current = None
        elif current is None:
            header = _HEADER.match(line)
            if header:
                current = computations[header[2]] = Computation(header[2])
                entry = header[2] if header[1] else entry
        else:
            start = _INSTRUCTION.match(line)
            if start:
                instruction = _instruction(start[2], line[start.end() :])
                current.instructions[instruction.name] = instruction
                if start[1]:
                    current.root = instruction.name
    if not entry:
        raise ValueError("not the text of a compiled program: it has no ENTRY computation")
    return computations, entry


def _logical_lines(text: str) -> Iterator[str]:
    """Lines with continuations joined: a kernel's configuration is written over several."""
    held = ""
    for line in text.splitlines():
        if held and line and not line[:1].isspace() and line[:1] in '"}' and not _END.fullmatch(line):
            held += line
            continue
        if held:
            yield held
        held = line
    yield held


def _instruction(name: str, rest: str) -> Instruction:
    shape_end = closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode_end = rest.index("(", shape_end)
    arguments_end = closing(rest, opcode_end)
    opcode = rest[shape_end:opcode_end].strip()
    arguments = rest[opcode_end + 1 : arguments_end]
    is_leaf = opcode in ("constant", "parameter")
    operands = () if is_leaf else tuple(_OPERAND.findall(arguments))
    return Instruction(
        name, opcode, rest[:shape_end], operands, arguments if is_leaf else "", rest[arguments_end + 1 :]
    )


def closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile({"(": r"[()]", "{": r"[{}]"}[text[start]]).finditer(text, start):
        depth += 1 if match[0] == text[start] else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"unbalanced brackets in {text[:200]!r}")


def numbers(text: str) -> tuple[int, ...]:
    """Of a list such as '4,2' or ''."""
    return tuple(int(n) for n in text.split(",") if n)


def arrays(shape: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(type, sizes) of each array of a shape; of a size that varies, its limit.

    >>> arrays("(bf16[8,128]{1,0:T(8,128)(2,1)}, f32[], s32[<=4])")
    (('bf16', (8, 128)), ('f32', ()), ('s32', (4,)))
    """
    # Layouts are in braces and may contain T(8,128), never square brackets, which enclose sizes.
    return tuple((kind, numbers(sizes.replace("<=", ""))) for kind, sizes in _ARRAY.findall(shape))


def shape_arrays(shape: str) -> list[int]:
    """Bytes of each array of a shape, without padding; tokens and other empty types are left out.

    >>> shape_arrays("(bf16[8,128]{1,0:T(8,128)(2,1)}, f32[], token[])")
    [2048, 4]
    """
    return [-(-bits * math.prod(sizes) // 8) for kind, sizes in arrays(shape) if (bits := _bits(kind))]


def _bits(kind: str) -> int:
    """Of one element: bf16 -> 16, f8e4m3fn -> 8, pred -> 8, token -> 0."""
    match = _BITS.match(kind)
    return int(match[1]) if match else {"pred": 8}.get(kind, 0)
