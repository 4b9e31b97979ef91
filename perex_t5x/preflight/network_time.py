"""How long a program's collectives would take if no work hid them.

Within a slice a collective runs round a ring along one dimension of the torus, both ways at once: two links. With n devices
in a group, and S bytes of the whole array on one of them, what has to pass each device is

| kind | bytes |
|---|---|
| all-gather, reduce-scatter, collective-broadcast | S (n − 1) / n |
| all-reduce | 2 S (n − 1) / n |
| all-to-all | S n / 4: a quarter of the way round the ring on average |
| collective-permute | S, over one link |

Between slices the rate is a chip's share of its host's network. Latency is not counted, and devices along several dimensions
of the torus could be faster than one ring: these are rates to compare with, no measurement.
"""

from __future__ import annotations

from collections.abc import Iterable

from perex_t5x.hardware.chips import Chip
from perex_t5x.preflight.hlo.program import DCN, ICI, Collective


def seconds(collectives: Iterable[Collective], chip: Chip) -> dict[str, float]:
    """Network -> seconds a step, one collective after another.

    >>> from perex_t5x.hardware.chips import chip
    >>> gather = Collective("all-gather", "g", 10**9, 1, ("data",), (10,), 10, ICI, group_size=16)
    >>> seconds([gather], chip("v5e"))
    {'ICI': 0.09375, 'DCN': 0.0}
    """
    found = {ICI: 0.0, DCN: 0.0}
    for c in collectives:
        if c.network:
            found[c.network] += c.executions * _bytes_passing(c) / _rate(c, chip)
    return found


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
