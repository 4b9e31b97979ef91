"""Names of TPU slices, their devices, and what is known of the chips."""

import os
import re

import jax
import numpy as np
import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.hardware import chips, topology
from tests.preflight.preflight_support import compile_on_one_chip, needs_libtpu


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
    ],
)
def test_names(name, expected, num_chips):
    assert topology.canonical_topology(name) == expected
    assert topology.num_chips(expected) == num_chips


@pytest.mark.parametrize(
    "name,message",
    [
        ("v5e:3x4", "'v5e:3x4'. Did you mean 'v5e:4x4'.*\n  v5e: 1x1, 2x2, 2x4, 4x4"),
        ("v5e-255", "Did you mean 'v5e-256'"),
        ("v5p-100", "Did you mean 'v5p-128'"),
        ("v5p:2x2", "Did you mean 'v5p:2x2x1'"),
        ("v5p:5x4x4", "unknown TPU topology"),
        ("v9z:2x2", "\n  v4: .*\n  v5e: .*\n  v5p: .*\n  v6e: "),
        ("", "Write CHIP:SHAPE"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(ConfigError, match=message):
        topology.tpu_devices(name)


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'perex_t5x\[tpu\]'"):
        topology.tpu_devices("v5e:4x4")


@needs_libtpu
@pytest.mark.parametrize("name", ["v4-8", "v5e-4", "v5p-16", "v6e-8"])
def test_one_device_a_chip(name):
    devices = topology.tpu_devices(name)
    canonical = topology.canonical_topology(name)
    assert len(devices) == topology.num_chips(canonical)
    assert chips.chip_of(devices[0]).name == canonical.split(":")[0]


@needs_libtpu
def test_slices_and_the_default_backend():
    devices = topology.tpu_devices("v5e:2x4", num_slices=3)
    assert [sum(d.slice_index == i for d in devices) for i in range(3)] == [8, 8, 8]
    assert jax.default_backend() == "cpu"
    with pytest.raises(ConfigError, match="num_slices = 0"):
        topology.tpu_devices("v5e:2x4", num_slices=0)


@needs_libtpu
def test_loading_is_quiet_and_leaves_the_environment_alone(capfd):
    topology._load.cache_clear()
    flags = os.environ["XLA_FLAGS"]  # those of the tests hold one that would end libtpu's process
    assert "xla_cpu" in flags
    topology.tpu_devices("v5e:2x2")
    assert capfd.readouterr().err == ""
    assert os.environ["XLA_FLAGS"] == flags


@needs_libtpu
@pytest.mark.parametrize("name", list(chips.CHIPS))
def test_chips_are_what_the_compiler_thinks(name):
    small = next(t for t in topology.known_topologies() if t.startswith(f"{name}:"))
    with pytest.raises(jax.errors.JaxRuntimeError) as e:
        compile_on_one_chip(lambda x: x + 1, (1 << 30, 1 << 10), topology=small)
    available = float(re.search(r"exceeds available HBM \(([\d.]+)G\)", str(e.value))[1])
    np.testing.assert_allclose(chips.chip(name).hbm_bytes / 2**30, available, atol=0.005)


def test_unknown_chip():
    with pytest.raises(ConfigError, match="known are v4, v5e, v5p, v6e"):
        chips.chip("v9")
    assert chips.chip_of(jax.devices()[0]) is None
