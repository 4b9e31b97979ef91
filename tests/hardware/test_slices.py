"""Names of TPU slices, and that one entry of the table of chips is enough for a new generation."""

import dataclasses

import jax
import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.hardware import chips, slices
from perex_t5x.hardware.slices import Slice


@pytest.mark.parametrize(
    "name,expected,num_chips",
    [
        ("v5e:4x4", "v5e:4x4", 16),
        ("v5e-256", "v5e:16x16", 256),
        ("v5litepod-8", "v5e:2x4", 8),
        ("V6E-16", "v6e:4x4", 16),
        ("v5p-8", "v5p:2x2x1", 4),  # cores, two to a chip
        ("v5p-128", "v5p:4x4x4", 64),
        ("v4-512", "v4:4x8x8", 256),
        ("v5p:16x16x24", "v5p:16x16x24", 6144),  # whole cubes beyond the list
        ("tpu7x-128", "tpu7x:4x4x4", 64),
        ("v7x-8", "tpu7x:2x2x1", 4),
        ("tpu7x:16x24x24", "tpu7x:16x24x24", 9216),
    ],
)
def test_names(name, expected, num_chips):
    assert slices.canonical_topology(name) == expected
    assert slices.num_chips(expected) == num_chips


@pytest.mark.parametrize(
    "name,message",
    [
        ("v5e:3x4", "'v5e:3x4'. Did you mean 'v5e:4x4'.*\n  v5e: 1x1, 2x2, 2x4, 4x4"),
        ("v5e-255", "Did you mean 'v5e-256'"),
        ("v5p-100", "Did you mean 'v5p-128'"),
        ("v5p:2x2", "Did you mean 'v5p:2x2x1'"),
        ("v5p:5x4x4", "unknown TPU topology"),
        ("v9z:2x2", "\n  v4: .*\n  v5e: .*\n  v5p: .*\n  v6e: .*\n  tpu7x: "),
        ("", "Write CHIP:SHAPE"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(ConfigError, match=message):
        slices.canonical_topology(name)


def test_unknown_chip():
    with pytest.raises(ConfigError, match="known are v4, v5e, v5p, v6e, tpu7x"):
        chips.chip("v9")
    assert chips.chip_of(jax.devices()[0]) is None


def test_tpu7x_for_the_launchers():
    found = Slice.of("tpu7x-128")
    assert (found.chips, found.devices, found.hosts, found.chips_per_host) == (64, 128, 16, 4)
    assert (found.gke_accelerator, found.gke_topology, found.machine_type) == ("tpu7x", "4x4x4", "tpu7x-standard-4t")
    assert found.price is None and found.quota_id(spot=True) is None
    with pytest.raises(ConfigError, match=r"do not offer tpu7x. Use launch/gke.py"):
        found.check_tpu_api()
    Slice.of("tpu7x-128", runtime_version="mine").check_tpu_api()
    Slice.of("v6e-8").check_tpu_api()


def test_a_new_chip_is_one_entry(monkeypatch):
    """A fictitious chip is known to metrics, preflight and the launchers once it is in the table."""
    from perex_t5x.launching.checks import Estimate
    from perex_t5x.metrics import model_flops_utilization
    from perex_t5x.preflight import overhead
    from perex_t5x.preflight.step import CompileTarget

    new = dataclasses.replace(
        chips.chip("v6e"),
        name="v8z",
        device_kinds=("TPU v8 zero",),
        peak_flops=1e16,
        devices=4,
        shapes=("2x2", "4x4", "32x32"),
        aliases=("v8zero",),
        name_units=4,
        accelerator_type="v8zeropod",
        runtime_version="v3-tpuv8",
        quota_ids=("TPUV8Z", "TPUV8ZSpot"),
        gke_accelerator="tpu-v8z-slice",
        gke_machine="ct8z-standard",
        price=9.0,
    )
    monkeypatch.setitem(chips.CHIPS, "v8z", new)
    assert model_flops_utilization(1e16, 0.5, "TPU v8 zero", 1) == {"timing/model_flops_utilization": 0.5}
    assert chips.chip_of(dataclasses.make_dataclass("Device", ["device_kind"])("TPU v8 zero")) is new
    assert slices.canonical_topology("v8zero-64") == "v8z:4x4"
    assert slices.known_topologies("v8z") == ["v8z:2x2", "v8z:4x4", "v8z:32x32"]
    with pytest.raises(ConfigError, match="v8z: 2x2, 4x4, 32x32"):
        slices.canonical_topology("v8z:3x3")
    here = CompileTarget("v8z:2x2")
    assert here.chip is new and [larger.topology for larger in here.larger()] == ["v8z:4x4", "v8z:32x32"]
    assert overhead.topologies()["v8z"] == "v8z:2x2"
    pod = Slice.of("v8z-4096")
    assert (pod.chips, pod.devices, pod.hosts, pod.accelerator_type) == (1024, 4096, 256, "v8zeropod-4096")
    assert (pod.gke_accelerator, pod.machine_type) == ("tpu-v8z-slice", "ct8z-standard-4t")
    assert pod.quota_id(spot=True) == "TPUV8ZSpotPerProjectPerZoneForTPUAPI"
    assert pod.gcloud_flags() == ["--accelerator-type=v8zeropod-4096"]
    assert "$9,216 per hour" in Estimate(pod.chips, pod.price).words()


def test_kernel_tile_sizes_are_known_for_every_chip():
    """What a new chip needs besides its entry; v4 has the general ones."""
    from perex_t5x.per_example.kernels import tiles

    assert {chip.device_kinds[0] for name, chip in chips.CHIPS.items() if name != "v4"} <= set(tiles._CHIPS)
