"""What is known of TPU chips: memory, speed, clock, networks.

`hbm_bytes` is what the TPU compiler lets one program have (it says so when a program does not fit), a little less than
what the chip carries. `clock_hz` turns the compiler's cycles into seconds: the peak divided by the products that the matrix
units make in a cycle. The compiler's own estimates of large products and copies stay 10 to 30 % below peak and bandwidth at
these clocks, for every chip alike. Rates of the networks are those that the makers publish for a chip or a pod, divided by
its links or chips; v4's share of the data-centre network is taken to be v5p's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perex_t5x.errors import ConfigError

_GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One generation of chips. JAX shows every chip as one device.

    Attributes:
      name: as in a topology's name, 'v5e'.
      device_kind: what `jax.Device.device_kind` says.
      dims: of the torus, 2 or 3.
      hbm_bytes: memory that a program can use.
      peak_flops: of bfloat16 products, a second.
      clock_hz: cycles a second.
      hbm_bytes_per_second: memory bandwidth.
      link_bytes_per_second: of one link to a neighbour in the torus, one way.
      dcn_bytes_per_second: a chip's share of the network between slices, one way.
    """

    name: str
    device_kind: str
    dims: int
    hbm_bytes: int
    peak_flops: float
    clock_hz: float
    hbm_bytes_per_second: float
    link_bytes_per_second: float
    dcn_bytes_per_second: float


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "TPU v4", 3, int(30.75 * _GIB), 275e12, 1.05e9, 1.228e12, 5e10, 6.25e9),
        Chip("v5e", "TPU v5 lite", 2, int(15.75 * _GIB), 197e12, 1.5e9, 8.19e11, 5e10, 3.125e9),
        Chip("v5p", "TPU v5", 3, int(95.73 * _GIB), 459e12, 1.75e9, 2.765e12, 1e11, 6.25e9),
        Chip("v6e", "TPU v6 lite", 2, int(31.24 * _GIB), 918e12, 1.75e9, 1.64e12, 1e11, 1.25e10),
    )
}


def chip_of(device: Any) -> Chip | None:
    """The chip behind a JAX device; None for a CPU and for chips that are not in the table."""
    kind = getattr(device, "device_kind", "")
    return next((chip for chip in CHIPS.values() if chip.device_kind == kind), None)


def chip(name: str) -> Chip:
    """The chip of this name.

    >>> chip("v5e").hbm_bytes / 2**30
    15.75
    """
    if name not in CHIPS:
        raise ConfigError(f"unknown TPU chip {name!r}: known are {', '.join(CHIPS)}.")
    return CHIPS[name]
