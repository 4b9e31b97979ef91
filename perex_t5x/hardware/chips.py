"""TPU chips: one entry for each generation, holding every fact about it that this package uses.

A new generation is one `Chip` in `CHIPS`, and its kernel tile sizes in `per_example/kernels/tiles.py`.

`hbm_bytes` is what the TPU compiler lets one program use (its out-of-memory message says so), a little less than the chip
carries. `clock_hz` converts the compiler's cycles to seconds: the peak divided by the FLOPs that the matrix units do in
a cycle. The compiler's own estimates of large products and copies stay 10 to 30 % below peak and bandwidth at these clocks,
for every chip alike. Network rates are the published ones of a chip or a pod, divided by its links or chips; v4's share of
the data-centre network is assumed to equal v5p's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perex_t5x.errors import ConfigError

_GIB = 2**30
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation of chips. Memory, compute and rates are those of one JAX device.

    Attributes:
      name: the prefix of the compiler's topology names, 'v5e' in 'v5e:4x4'.
      device_kinds: what `jax.Device.device_kind` may say; the first is the compiler's.
      devices: JAX devices per chip. One, except where each core is a device of its own.
      hbm_bytes: memory that a program can use.
      peak_flops: bfloat16 FLOPs per second.
      clock_hz: cycles per second.
      hbm_bytes_per_second: memory bandwidth.
      link_bytes_per_second: of one link to a neighbour in the torus, one way.
      dcn_bytes_per_second: share of the network between slices, one way.
      shapes: of the slices that the cloud offers, smallest first.
      has_cubes: whether any larger shape made of 4x4x4 cubes is offered, too.
      name_units: what the number in a slice's cloud name counts, per chip: 1 for chips, 2 for cores.
      aliases: other prefixes that users write.
      topology_options: extra arguments of `jax.experimental.topologies.get_topology_desc`.
      max_chips_per_host: a slice of up to this many chips is a single host; larger slices have 4 chips per host.
      accelerator_type: prefix of gcloud's accelerator types.
      runtime_version: image of the TPU VMs; None where the Cloud TPU API (`gcloud compute tpus`) does not offer the chip.
      quota_ids: Cloud Quotas ids (on demand, spot) of the Cloud TPU API; None where it does not offer the chip.
      serving_quota_chips: slices of up to this many chips have a quota of their own ("Serving").
      has_released_shapes: whether gcloud takes --type and --topology outside its alpha commands.
      gke_accelerator: GKE's node label cloud.google.com/gke-tpu-accelerator.
      gke_machine: GKE's machine type without the number of chips.
      price: list price of a chip-hour in USD, on demand in a US region, as known in 2025; None where not known.
    """

    name: str
    device_kinds: tuple[str, ...]
    hbm_bytes: int
    peak_flops: float
    clock_hz: float
    hbm_bytes_per_second: float
    link_bytes_per_second: float
    dcn_bytes_per_second: float
    shapes: tuple[str, ...]
    accelerator_type: str
    gke_accelerator: str
    gke_machine: str
    devices: int = 1
    has_cubes: bool = False
    name_units: int = 1
    aliases: tuple[str, ...] = ()
    topology_options: tuple[tuple[str, str], ...] = ()
    max_chips_per_host: int = 4
    runtime_version: str | None = None
    quota_ids: tuple[str, str] | None = None
    serving_quota_chips: int = 0
    has_released_shapes: bool = False
    price: float | None = None

    @property
    def smallest_topology(self) -> str:
        """'v5e:1x1', 'v5p:2x2x1': what a program for one device is compiled with."""
        return f"{self.name}:{self.shapes[0]}"


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            device_kinds=("TPU v4",),
            hbm_bytes=int(30.75 * _GIB),
            peak_flops=275e12,
            clock_hz=1.05e9,
            hbm_bytes_per_second=1.228e12,
            link_bytes_per_second=5e10,
            dcn_bytes_per_second=6.25e9,
            shapes=_CUBIC,
            has_cubes=True,
            name_units=2,
            topology_options=(("chip_config_name", "megacore"),),  # one device per chip, as JAX shows it on v4
            accelerator_type="v4",
            runtime_version="tpu-ubuntu2204-base",
            quota_ids=("TPUV4sPod", "TPUV4sPreemptiblePod"),
            has_released_shapes=True,
            gke_accelerator="tpu-v4-podslice",
            gke_machine="ct4p-hightpu",
            price=3.22,
        ),
        Chip(
            name="v5e",
            device_kinds=("TPU v5 lite", "TPU v5e"),
            hbm_bytes=int(15.75 * _GIB),
            peak_flops=197e12,
            clock_hz=1.5e9,
            hbm_bytes_per_second=8.19e11,
            link_bytes_per_second=5e10,
            dcn_bytes_per_second=3.125e9,
            shapes=_FLAT,
            aliases=("v5litepod", "v5lite"),
            max_chips_per_host=8,
            accelerator_type="v5litepod",
            runtime_version="v2-alpha-tpuv5-lite",
            quota_ids=("TPUV5sLitepod", "TPUV5sPreemptibleLitepod"),
            serving_quota_chips=8,
            gke_accelerator="tpu-v5-lite-podslice",
            gke_machine="ct5lp-hightpu",
            price=1.20,
        ),
        Chip(
            name="v5p",
            device_kinds=("TPU v5", "TPU v5p"),
            hbm_bytes=int(95.73 * _GIB),
            peak_flops=459e12,
            clock_hz=1.75e9,
            hbm_bytes_per_second=2.765e12,
            link_bytes_per_second=1e11,
            dcn_bytes_per_second=6.25e9,
            shapes=_CUBIC,
            has_cubes=True,
            name_units=2,
            accelerator_type="v5p",
            runtime_version="v2-alpha-tpuv5",
            quota_ids=("TPUV5P", "TPUV5PPreemptible"),
            gke_accelerator="tpu-v5p-slice",
            gke_machine="ct5p-hightpu",
            price=4.20,
        ),
        Chip(
            name="v6e",
            device_kinds=("TPU v6 lite", "TPU v6e"),
            hbm_bytes=int(31.24 * _GIB),
            peak_flops=918e12,
            clock_hz=1.75e9,
            hbm_bytes_per_second=1.64e12,
            link_bytes_per_second=1e11,
            dcn_bytes_per_second=1.25e10,
            shapes=_FLAT,
            aliases=("v6lite",),
            max_chips_per_host=8,
            accelerator_type="v6e",
            runtime_version="v2-alpha-tpuv6e",
            quota_ids=("TPUV6E", "TPUV6EPreemptible"),
            gke_accelerator="tpu-v6e-slice",
            gke_machine="ct6e-standard",
            price=2.70,
        ),
        # Each of the two cores is a JAX device with half of the chip's memory, compute and network. Published for a chip:
        # 2307 TFLOPs, 7380 GB/s, 1200 GB/s over six links both ways, 100 Gb/s between slices. Offered by GKE and Compute
        # Engine, not by the Cloud TPU API. No list price that could be checked.
        Chip(
            name="tpu7x",
            device_kinds=("TPU7x",),
            devices=2,
            hbm_bytes=int(94.74 * _GIB),
            peak_flops=2307e12 / 2,
            clock_hz=2.2e9,
            hbm_bytes_per_second=7.38e12 / 2,
            link_bytes_per_second=1e11 / 2,
            dcn_bytes_per_second=1.25e10 / 2,
            shapes=_CUBIC,
            has_cubes=True,
            name_units=2,
            aliases=("v7x",),
            accelerator_type="tpu7x",
            gke_accelerator="tpu7x",
            gke_machine="tpu7x-standard",
        ),
    )
}

# Devices that train, but that nothing is compiled for from here. One of the two cores of a v2 or v3 chip is a device.
_OTHER_PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
}


def chip(name: str) -> Chip:
    """The chip of this name.

    >>> chip("v5e").hbm_bytes / 2**30
    15.75
    """
    if name not in CHIPS:
        raise ConfigError(f"unknown TPU chip {name!r}: known are {', '.join(CHIPS)}.")
    return CHIPS[name]


def chip_of(device: Any) -> Chip | None:
    """The chip behind a JAX device; None for a CPU and for chips that are not in the table."""
    return _of_kind(getattr(device, "device_kind", ""))


def peak_flops(device_kind: str) -> float | None:
    """bfloat16 FLOPs per second of one JAX device, from the vendors' data sheets; None where not known.

    >>> peak_flops("TPU v5 lite"), peak_flops("TPU7x"), peak_flops("cpu")
    (197000000000000.0, 1153500000000000.0, None)
    """
    known = _of_kind(device_kind)
    return _OTHER_PEAK_FLOPS.get(device_kind) if known is None else known.peak_flops


def _of_kind(device_kind: str) -> Chip | None:
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)
