"""TPU slices as the cloud, its clusters and its price list know them."""

from __future__ import annotations

from dataclasses import dataclass

from perex_t5x.errors import ConfigError
from perex_t5x.hardware import slices


@dataclass(frozen=True)
class _Generation:
    """What slices of one chip have in common. The machine is completed with the chips of a host.

    `price` is the list price of a chip-hour in USD, on demand in a US region, as known in 2025.
    """

    accelerator: str
    units: int  # of the accelerator type's number, a chip
    runtime: str
    gke_accelerator: str
    machine: str
    price: float


_GENERATIONS = {
    "v4": _Generation("v4", 2, "tpu-ubuntu2204-base", "tpu-v4-podslice", "ct4p-hightpu", 3.22),
    "v5e": _Generation("v5litepod", 1, "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", "ct5lp-hightpu", 1.20),
    "v5p": _Generation("v5p", 2, "v2-alpha-tpuv5", "tpu-v5p-slice", "ct5p-hightpu", 4.20),
    "v6e": _Generation("v6e", 1, "v2-alpha-tpuv6e", "tpu-v6e-slice", "ct6e-standard", 2.70),
}


@dataclass(frozen=True)
class Slice:
    """One slice.

    Attributes:
      topology: the compiler's name, 'v5e:16x16'.
      accelerator_type: gcloud's name, 'v5litepod-256'; those of v4 and v5p count cores, two to a chip.
      runtime_version: of a TPU VM's image.
      price: list price of a chip-hour in USD.

    >>> pod = Slice.of("v5e-256")
    >>> pod.chips, pod.hosts, pod.accelerator_type, pod.machine_type, pod.gke_topology
    (256, 64, 'v5litepod-256', 'ct5lp-hightpu-4t', '16x16')
    >>> Slice.of("v6e-8").machine_type, Slice.of("v5p:4x4x4").accelerator_type
    ('ct6e-standard-8t', 'v5p-128')
    """

    topology: str
    accelerator_type: str
    runtime_version: str
    price: float

    @classmethod
    def of(
        cls,
        name: str,
        accelerator_type: str | None = None,
        runtime_version: str | None = None,
        price: float | None = None,
    ) -> Slice:
        """From a name such as v5e:16x16, v5e-256 or v5litepod-256; the others replace what is known of it."""
        chip = name.strip().lower().partition(":")[0].partition("-")[0]
        if chip in ("v2", "v3"):
            raise ConfigError(
                f"--topology={name}: chips before v4 are not known here; known are {', '.join(_GENERATIONS)}. XManager's "
                "Vertex executor knows v2 and v3, see docs/launch_xmanager.md."
            )
        topology = slices.canonical_topology(name)
        generation = _GENERATIONS[topology.partition(":")[0]]
        if price is not None and not price >= 0:
            raise ConfigError(f"--price_per_chip_hour={price}: must not be negative.")
        units = generation.units * slices.num_chips(topology)
        return cls(
            topology,
            accelerator_type or f"{generation.accelerator}-{units}",
            runtime_version or generation.runtime,
            generation.price if price is None else price,
        )

    @property
    def chip(self) -> str:
        """'v5e'."""
        return self.topology.partition(":")[0]

    @property
    def chips(self) -> int:
        return slices.num_chips(self.topology)

    @property
    def chips_a_host(self) -> int:
        """4; of v5e and v6e a host of up to 8 is a slice by itself."""
        return self.chips if self.chip in ("v5e", "v6e") and self.chips <= 8 else 4

    @property
    def hosts(self) -> int:
        return self.chips // self.chips_a_host

    @property
    def gke_accelerator(self) -> str:
        """The node label cloud.google.com/gke-tpu-accelerator."""
        return _GENERATIONS[self.chip].gke_accelerator

    @property
    def gke_topology(self) -> str:
        """The node label cloud.google.com/gke-tpu-topology."""
        return self.topology.partition(":")[2]

    @property
    def machine_type(self) -> str:
        """Of a GKE node pool."""
        return f"{_GENERATIONS[self.chip].machine}-{self.chips_a_host}t"

    def gcloud_flags(self) -> list[str]:
        """Of `queued-resources create`. An accelerator type stands for one shape; others are asked for by their shape.

        >>> Slice.of("v4:4x4x12").gcloud_flags()
        ['--type=v4', '--topology=4x4x12']
        """
        if self._by_shape:
            return [f"--type={_GENERATIONS[self.chip].accelerator}", f"--topology={self.gke_topology}"]
        return [f"--accelerator-type={self.accelerator_type}"]

    @property
    def needs_alpha(self) -> bool:
        """Whether gcloud takes these flags in its alpha commands only: the others know the shapes of v4, not of later chips.

        >>> Slice.of("v4:4x4x12").needs_alpha, Slice.of("v5p:4x4x12").needs_alpha, Slice.of("v5p:4x4x8").needs_alpha
        (False, True, False)
        """
        return self._by_shape and self.chip != "v4"

    @property
    def _by_shape(self) -> bool:
        generation = _GENERATIONS[self.chip]
        plain = f"{generation.accelerator}-{generation.units * self.chips}"
        return self.accelerator_type == plain and self.topology not in slices.known_topologies()
