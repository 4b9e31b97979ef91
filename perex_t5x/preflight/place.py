"""Where a step is compiled for: a TPU slice, several, or fake CPU devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from perex_t5x.errors import ConfigError
from perex_t5x.hardware.chips import Chip
from perex_t5x.hardware.devices import tpu_devices
from perex_t5x.hardware.slices import canonical_topology, chip_of_topology, known_topologies, num_chips


@dataclass(frozen=True)
class Place:
    """
    Attributes:
      topology: of one slice, 'v5e:4x4'; '' for fake CPU devices.
      slices: how many of them.
      cpus: how many fake CPU devices; 0 for TPU slices.
    """

    topology: str
    slices: int = 1
    cpus: int = 0

    def devices(self) -> list[Any]:
        return jax.devices("cpu")[: self.cpus] if self.cpus else tpu_devices(self.topology, self.slices)

    @property
    def chip(self) -> Chip | None:
        return chip_of_topology(self.topology) if self.topology else None

    def larger(self) -> Iterator[Place]:
        """The larger slices of the same chip, in order of size.

        >>> [place.topology for place in Place("v5e:8x8").larger()]
        ['v5e:8x16', 'v5e:16x16']
        """
        if not self.topology:
            return
        for name in known_topologies(self.chip.name):
            if num_chips(name) > num_chips(self.topology):
                yield replace(self, topology=name)

    def __str__(self) -> str:
        """
        >>> str(Place("v5e:4x4", 2)), str(Place("", cpus=8))
        ('2 x v5e:4x4', '8 fake CPU devices')
        """
        if self.cpus:
            return f"{self.cpus} fake CPU devices"
        return self.topology if self.slices == 1 else f"{self.slices} x {self.topology}"


def find(args: Any, default: str | None, default_slices: int) -> Place:
    """What the flags name, or else the Gin files with their macros TOPOLOGY and NUM_SLICES."""
    if args.devices:
        return Place("", cpus=args.devices)
    name = args.topology or default
    if not name:
        raise ConfigError(
            "nothing to compile for: give --topology=v5e:4x4, a mesh file with a TOPOLOGY such as meshes/v5e_16.gin, or "
            "--devices=8 for fake CPU devices."
        )
    return Place(canonical_topology(name), default_slices if args.slices is None else args.slices)
