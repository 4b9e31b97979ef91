"""What of the plugin can be seen where T5X is not installed."""

import subprocess
import sys

import pytest

from perex_t5x import extras
from perex_t5x.bench import inside_t5x
from perex_t5x.errors import ConfigError
from tests.test_architecture import ours, room


@pytest.mark.skipif(extras.is_installed("t5x"), reason="T5X is installed here")
def test_importing_it_says_that_t5x_is_missing():
    program = "from perex_t5x import t5x_plugin"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: perex_t5x.t5x_plugin is for use inside T5X")
    assert "No module named 't5x'" in last and "PYTHONPATH" in last


@pytest.mark.skipif(extras.is_installed("t5x"), reason="T5X is installed here")
def test_its_benchmark_says_that_t5x_is_missing():
    with pytest.raises(ConfigError, match="--t5x needs T5X.*cannot be imported here"):
        inside_t5x.benchmark_t5x(["decoder_only"])


def test_its_benchmark_names_the_nearest_model():
    with pytest.raises(ConfigError, match="Did you mean 'decoder_only'"):
        inside_t5x.benchmark_t5x(["decoder-only"])


def test_nothing_else_imports_it():
    importers = {i.importer for i in ours() if room(i.module) == "t5x_plugin" and room(i.importer) != "t5x_plugin"}
    assert importers == {"perex_t5x.bench.inside_t5x"}
    assert all(i.lazy for i in ours() if room(i.module) == "t5x_plugin" and i.importer == "perex_t5x.bench.inside_t5x")
