"""TPU slices: the compiler's names (v5e:4x4), the cloud's (v5e-16), and what gcloud and GKE call them. Without JAX."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.hardware.chips import CHIPS, Chip

# --- names ------------------------------------------------------------------------------------------------------------


def _topologies() -> dict[str, str]:
    """Cloud name -> topology of every slice that the cloud offers: 'v5p-128' -> 'v5p:4x4x4'."""
    return {
        f"{chip.name}-{chip.name_units * num_chips(f'{chip.name}:{shape}')}": f"{chip.name}:{shape}"
        for chip in CHIPS.values()
        for shape in chip.shapes
    }


def known_topologies(chip_name: str | None = None) -> list[str]:
    """The slices that the cloud offers, of one chip or of all, smallest first within each chip.

    >>> known_topologies()[:3], known_topologies("v6e")[-1]
    (['v4:2x2x1', 'v4:2x2x2', 'v4:2x2x4'], 'v6e:16x16')
    """
    return [topology for topology in _topologies().values() if chip_name in (None, chip_of_topology(topology).name)]


def num_chips(topology: str) -> int:
    """Chips of one slice of this topology.

    >>> num_chips("v5e:4x8")
    32
    """
    return math.prod(int(size) for size in topology.partition(":")[2].split("x"))


def num_devices(topology: str) -> int:
    """JAX devices of one slice of this topology.

    >>> num_devices("v5e:4x8"), num_devices("tpu7x:4x4x4")
    (32, 128)
    """
    return num_chips(topology) * chip_of_topology(topology).devices


def chip_of_topology(topology: str) -> Chip:
    """The chip of a topology's canonical name.

    >>> chip_of_topology("v5e:4x4").name
    'v5e'
    """
    return CHIPS[topology.partition(":")[0]]


def canonical_topology(name: str) -> str:
    """The compiler's name of a topology, from that or from a cloud name.

    v5e and v6e names count chips; v4, v5p and tpu7x names count cores, two per chip:

    >>> canonical_topology("v5litepod-256"), canonical_topology("v5p-128"), canonical_topology("v6e:4x4")
    ('v5e:16x16', 'v5p:4x4x4', 'v6e:4x4')
    """
    text = str(name).strip().lower()
    for chip in CHIPS.values():
        for alias in chip.aliases:
            text = re.sub(rf"^{re.escape(alias)}(?=[:-])", chip.name, text)
    topologies = _topologies()
    if text in topologies:
        return topologies[text]
    if text in topologies.values() or _is_larger_cube(text):
        return text
    raise ConfigError(_unknown(str(name), text))


def _is_larger_cube(text: str) -> bool:
    """Whether a shape beyond the listed ones is made of cubes of 4x4x4."""
    match = re.fullmatch(r"(\w+):(\d+)x(\d+)x(\d+)", text)
    if match is None or match[1] not in CHIPS or not CHIPS[match[1]].has_cubes:
        return False
    return all(int(size) >= 4 and int(size) % 4 == 0 for size in match.groups()[1:])


def _unknown(name: str, text: str) -> str:
    chip_name = re.split("[:-]", text)[0]
    chips = [chip_name] if chip_name in CHIPS else list(CHIPS)
    lines = [f"  {chip}: " + ", ".join(t.partition(":")[2] for t in known_topologies(chip)) for chip in chips]
    topologies = _topologies()
    hint = _nearest_size(text) or did_you_mean(text, [*topologies, *topologies.values()])
    return f"unknown TPU topology {name!r}.{hint} Write CHIP:SHAPE, such as v5e:4x4. Known are\n" + "\n".join(lines)


def _nearest_size(text: str) -> str:
    """The slice of the nearest size, where the chip is known and a size is given."""
    match = re.match("([^:-]*)(.?)(.*)", text)
    assert match is not None  # any text does
    chip_name, separator, shape = match.groups()
    size = math.prod(int(n) for n in re.findall(r"\d+", shape))
    topologies = _topologies()
    known = {pod: num_chips(t) for pod, t in topologies.items() if pod.startswith(f"{chip_name}-")}
    if not known or not shape or size < 1:
        return ""
    by_chips = separator == ":"
    nearest = min(known, key=lambda pod: abs(math.log(size / (known[pod] if by_chips else int(pod.split("-")[1])))))
    return f" Did you mean {topologies[nearest] if by_chips else nearest!r}?"


# --- what the cloud needs to know -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """One slice, as gcloud, GKE and the price list know it.

    Attributes:
      topology: the compiler's name, 'v5e:16x16'.
      accelerator_type: gcloud's name, 'v5litepod-256'; those of v4, v5p and tpu7x count cores, two per chip.
      runtime_version: image of its TPU VMs; None where the Cloud TPU API does not offer the chip.
      price: list price of a chip-hour in USD; None where not known.

    >>> pod = Slice.of("v5e-256")
    >>> pod.chips, pod.hosts, pod.accelerator_type, pod.machine_type, pod.gke_topology
    (256, 64, 'v5litepod-256', 'ct5lp-hightpu-4t', '16x16')
    >>> Slice.of("v6e-8").machine_type, Slice.of("v5p:4x4x4").accelerator_type
    ('ct6e-standard-8t', 'v5p-128')
    """

    topology: str
    accelerator_type: str
    runtime_version: str | None
    price: float | None

    @classmethod
    def of(
        cls,
        name: str,
        accelerator_type: str | None = None,
        runtime_version: str | None = None,
        price: float | None = None,
    ) -> Slice:
        """From a name such as v5e:16x16, v5e-256 or v5litepod-256; the other arguments override the table's facts."""
        if re.split("[:-]", name.strip().lower())[0] in ("v2", "v3"):
            raise ConfigError(f"--topology={name}: chips before v4 are not supported; known are {', '.join(CHIPS)}.")
        topology = canonical_topology(name)
        chip = chip_of_topology(topology)
        if price is not None and not price >= 0:
            raise ConfigError(f"--price_per_chip_hour={price}: must not be negative.")
        return cls(
            topology,
            accelerator_type or _accelerator_type(topology),
            runtime_version or chip.runtime_version,
            chip.price if price is None else price,
        )

    @property
    def chip(self) -> Chip:
        return chip_of_topology(self.topology)

    @property
    def chips(self) -> int:
        return num_chips(self.topology)

    @property
    def devices(self) -> int:
        """JAX devices."""
        return num_devices(self.topology)

    @property
    def chips_per_host(self) -> int:
        return self.chips if self.chips <= self.chip.max_chips_per_host else 4

    @property
    def hosts(self) -> int:
        return self.chips // self.chips_per_host

    @property
    def gke_accelerator(self) -> str:
        """The node label cloud.google.com/gke-tpu-accelerator."""
        return self.chip.gke_accelerator

    @property
    def gke_topology(self) -> str:
        """The node label cloud.google.com/gke-tpu-topology."""
        return self.topology.partition(":")[2]

    @property
    def machine_type(self) -> str:
        """Of a GKE node pool."""
        return f"{self.chip.gke_machine}-{self.chips_per_host}t"

    def check_tpu_api(self) -> None:
        """Raises `ConfigError` where the Cloud TPU API, and so `gcloud compute tpus`, does not offer the chip."""
        if self.runtime_version is None:
            raise ConfigError(
                f"--topology={self.topology}: gcloud's queued resources (the Cloud TPU API) do not offer {self.chip.name}. "
                "Use launch/gke.py (docs/launch_gke.md), or give --runtime_version if your project has it all the same."
            )

    def quota_id(self, spot: bool) -> str | None:
        """The Cloud Quotas id of its chips in the Cloud TPU API; None where that does not offer the chip.

        >>> Slice.of("v5e-256").quota_id(spot=True), Slice.of("v5e-8").quota_id(spot=False)
        ('TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI', 'TPUV5sLitepodServingPerProjectPerZoneForTPUAPI')
        """
        if self.chip.quota_ids is None:
            return None
        serving = "Serving" if self.chips <= self.chip.serving_quota_chips else ""
        return f"{self.chip.quota_ids[spot]}{serving}PerProjectPerZoneForTPUAPI"

    def gcloud_flags(self) -> list[str]:
        """Of `queued-resources create`. An accelerator type stands for one shape; others are requested by their shape.

        >>> Slice.of("v4:4x4x12").gcloud_flags()
        ['--type=v4', '--topology=4x4x12']
        """
        if self._by_shape:
            return [f"--type={self.chip.accelerator_type}", f"--topology={self.gke_topology}"]
        return [f"--accelerator-type={self.accelerator_type}"]

    @property
    def needs_alpha(self) -> bool:
        """Whether gcloud takes these flags in its alpha commands only: the others know the shapes of v4, not of later chips.

        >>> Slice.of("v4:4x4x12").needs_alpha, Slice.of("v5p:4x4x12").needs_alpha, Slice.of("v5p:4x4x8").needs_alpha
        (False, True, False)
        """
        return self._by_shape and not self.chip.has_released_shapes

    @property
    def _by_shape(self) -> bool:
        is_usual_name = self.accelerator_type == _accelerator_type(self.topology)
        return is_usual_name and self.topology not in known_topologies()


def _accelerator_type(topology: str) -> str:
    chip = chip_of_topology(topology)
    return f"{chip.accelerator_type}-{chip.name_units * num_chips(topology)}"
