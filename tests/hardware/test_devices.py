"""Devices to compile for, and that the compiler agrees with the table of chips."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.hardware import devices
from perex_t5x.hardware.chips import CHIPS, chip, chip_of
from perex_t5x.hardware.slices import canonical_topology, num_chips, num_devices
from tests.preflight.support import compile_on_one_chip, needs_libtpu


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'perex_t5x\[tpu\]'"):
        devices.tpu_devices("v5e:4x4")


@needs_libtpu
@pytest.mark.parametrize("name", ["v4-8", "v5e-4", "v5p-16", "v6e-8", "tpu7x-8", "tpu7x-128"])
def test_devices_of_a_slice(name):
    found = devices.tpu_devices(name)
    canonical = canonical_topology(name)
    assert chip_of(found[0]).name == canonical.split(":")[0]
    assert len(found) == num_devices(canonical)
    cores = 2 if name.startswith("tpu7x") else 1  # JAX shows each core of a TPU7x chip as a device
    assert len(found) == cores * num_chips(canonical)
    assert len({tuple(d.coords) for d in found}) == num_chips(canonical)


@needs_libtpu
def test_slices_and_the_default_backend():
    found = devices.tpu_devices("v5e:2x4", num_slices=3)
    assert [sum(d.slice_index == i for d in found) for i in range(3)] == [8, 8, 8]
    assert jax.default_backend() == "cpu"
    with pytest.raises(ConfigError, match="num_slices = 0"):
        devices.tpu_devices("v5e:2x4", num_slices=0)


@needs_libtpu
def test_loading_is_quiet_and_leaves_the_environment_alone(capfd):
    devices._load.cache_clear()
    flags = os.environ["XLA_FLAGS"]  # those of the tests hold one that would end libtpu's process
    assert "xla_cpu" in flags
    devices.tpu_devices("v5e:2x2")
    assert capfd.readouterr().err == ""
    assert os.environ["XLA_FLAGS"] == flags


@needs_libtpu
@pytest.mark.parametrize("name", list(CHIPS))
def test_memory_is_what_the_compiler_allows(name):
    with pytest.raises(jax.errors.JaxRuntimeError) as e:
        compile_on_one_chip(lambda x: x + 1, (1 << 30, 1 << 10), topology=chip(name).smallest_topology)
    available = float(re.search(r"exceeds available HBM \(([\d.]+)G\)", str(e.value))[1])
    np.testing.assert_allclose(chip(name).hbm_bytes / 2**30, available, atol=0.005)


def test_importing_is_light():
    code = "import sys, perex_t5x.hardware.devices; print([m for m in ('jax', 'numpy', 'absl') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
