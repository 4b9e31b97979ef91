"""How long collectives take at published rates, and how much of that the compiled program's schedule hides.

The text of a compiled TPU program is in the order in which it runs. A collective in it is either synchronous, and nothing
else runs meanwhile, or it has a start and an end, in one of three notations:

    all-gather-start ... all-gather-done              also async-start; the hardware, or a sparse core, works by itself, and
                                                      everything in between hides it
    async-collective-start ... async-collective-done  a fusion whose collective has "flag_start":"-1", others with the same
                                                      channel, the end: the core issues the transfers itself, from inside the
                                                      fusions that carry it, and only these hide it
    send ... recv-done                                between slices, through the host
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from perex_t5x.hardware.chips import Chip
from perex_t5x.hardware.hlo.program import DCN, ICI, KINDS, Collective, Executed, Program
from perex_t5x.hardware.hlo.text import Instruction

_WRAPPERS = ("fusion", "async-start", "call-start", "custom-call-start")  # they run what they call, once
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CARRIED = '"async_collective_fusion_config"'


def network_seconds(collectives: Iterable[Collective], chip: Chip) -> dict[str, float]:
    """Network -> seconds per step of all collectives, one after another, at published rates.

    Within a slice a collective runs round a ring along one dimension of the torus, both ways at once: two links. With n
    devices in a group, and S bytes of the whole array on one of them, the bytes that pass each device are

    | kind | bytes |
    |---|---|
    | all-gather, reduce-scatter, collective-broadcast | S (n − 1) / n |
    | all-reduce | 2 S (n − 1) / n |
    | all-to-all | S n / 4: a quarter of the way round the ring on average |
    | collective-permute | S, over one link |

    Between slices the rate is a device's share of its host's network. Latency is not counted, and a group along several
    dimensions of the torus could be faster than one ring: numbers to compare with, not measurements.

    >>> from perex_t5x.hardware.chips import chip
    >>> gather = Collective("all-gather", "g", 10**9, 1, ("data",), (10,), 10, ICI, group_size=16)
    >>> network_seconds([gather], chip("v5e"))
    {'ICI': 0.09375, 'DCN': 0.0}
    """
    seconds = {ICI: 0.0, DCN: 0.0}
    for c in collectives:
        if c.network:
            seconds[c.network] += c.executions * _seconds(c, chip)
    return seconds


def _seconds(c: Collective, chip: Chip) -> float:
    """Of one execution."""
    return _bytes_passing(c) / _rate(c, chip) if c.network else 0.0


def _bytes_passing(c: Collective) -> float:
    if c.kind == "collective-permute":
        return c.bytes
    if c.kind.endswith("all-to-all"):
        return c.bytes * c.group_size / 4
    rounds = 2 if c.kind == "all-reduce" else 1
    return rounds * c.bytes * (c.group_size - 1) / c.group_size


def _rate(c: Collective, chip: Chip) -> float:
    if c.network == DCN:
        return chip.dcn_bytes_per_second
    return chip.link_bytes_per_second * (1 if c.kind == "collective-permute" else 2)


# --- the schedule -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _InFlight:
    """A collective between its start and its end, in one computation."""

    collective: Collective
    start: str  # the instruction
    seconds: float  # still to go
    channel: str | None  # of a collective that only fusions with this channel advance; None: everything does


def with_hidden_seconds(
    program: Program, collectives: Sequence[Collective], chip: Chip, kernels: Mapping[str, int]
) -> tuple[Collective, ...]:
    """The program's collectives, each with the seconds of a step in which others compute.

    Instructions count with the compiler's cycles, and kernels with those given; without an estimate they hide nothing.
    Collectives of one network that are in flight at the same time share its links: the first started is the first done. One
    that is started in a loop's turn and ended in the next counts as not hidden.
    """
    by_name = {c.name: c for c in collectives}
    hidden: dict[str, float] = defaultdict(float)
    for computation in _by_computation(program):
        in_flight: list[_InFlight] = []
        for e in computation:
            inside = list(_collectives_in(program, e.instruction))
            in_flight = [flight for flight in in_flight if not _is_end(e, inside, flight)]
            if _is_start(e.instruction, inside):
                for i in inside:
                    if c := by_name.get(i.name):
                        carried = _channel(i) if e.instruction.opcode == "fusion" else None
                        in_flight.append(_InFlight(c, e.instruction.name, _seconds(c, chip), carried))
                if any(i.name in by_name for i in inside):
                    continue
            if in_flight:
                seconds = program.instruction_cycles(e.frame, e.instruction, kernels) / chip.clock_hz
                for flight, part in _advance(in_flight, {_channel(i) for i in inside}, seconds):
                    hidden[flight.collective.name] += part * e.executions
    return tuple(dataclasses.replace(c, hidden_seconds=hidden.get(c.name, 0.0)) for c in collectives)


def _advance(
    in_flight: Iterable[_InFlight], channels: set[str | None], seconds: float
) -> Iterator[tuple[_InFlight, float]]:
    """The collectives that an instruction of this duration advances, and by how many seconds."""
    left = {ICI: seconds, DCN: seconds}
    for flight in in_flight:
        network = flight.collective.network
        if network in left and (flight.channel is None or flight.channel in channels):
            part = min(flight.seconds, left[network])
            flight.seconds -= part
            left[network] -= part
            yield flight, part


def _by_computation(program: Program) -> list[list[Executed]]:
    """The instructions of each computation that runs, in order, once for each of its calls."""
    found: dict[int, list[Executed]] = defaultdict(list)
    for e in program.executed():
        found[id(e.frame)].append(e)
    return list(found.values())


def _collectives_in(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """The collectives that an instruction is, or that a fusion or an asynchronous call contains."""
    if instruction.opcode.removesuffix("-start") in KINDS or _is_send(instruction):
        yield instruction
    elif instruction.opcode in _WRAPPERS:
        for _, name in instruction.called:
            for inner in program.computations[name]:
                yield from _collectives_in(program, inner)


def _is_start(instruction: Instruction, inside: Sequence[Instruction]) -> bool:
    if instruction.opcode == "fusion":
        return any(_CARRIED in i.attributes for i in inside)
    return bool(inside) and (instruction.opcode.endswith("-start") or _is_send(instruction))


def _is_end(e: Executed, inside: Sequence[Instruction], flight: _InFlight) -> bool:
    instruction = e.instruction
    if instruction.opcode == "fusion":
        return instruction.name.startswith("async-collective-done") and flight.channel in map(_channel, inside)
    if instruction.opcode == "recv-done":
        sent, received = (
            e.frame.computation.instructions.get(name) for name in (flight.start, instruction.operands[0])
        )
        return sent is not None and received is not None and _transfer(sent) == _transfer(received) is not None
    return (
        instruction.opcode.endswith("-done")
        and instruction.opcode != "send-done"
        and flight.start in instruction.operands
    )


def _is_send(instruction: Instruction) -> bool:
    return instruction.opcode == "send" and "megascale" in instruction.attributes


def _transfer(instruction: Instruction) -> str | None:
    """The rendezvous that a `send` between slices and its `recv` share."""
    return instruction.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"')


def _channel(instruction: Instruction) -> str | None:
    channel = _CHANNEL.search(instruction.attributes)
    return channel[1] if channel else None
