"""The command `python -m perex_t5x.experiments.study`: every study's --quick, and messages."""

import json
import os
import subprocess
import sys

import pytest

from perex_t5x.experiments import studies


def command(*arguments, timeout=1000):
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-m", "perex_t5x.experiments.study", *arguments]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout)


def test_messages():
    ended = command("sqrt_scalling")
    assert ended.returncode == 2 and "Did you mean 'sqrt_scaling'" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", studies.NAMES)
def test_quick(tmp_path, name):
    folder = tmp_path / name
    ended = command(name, "--quick", f"--dir={folder}")
    assert ended.returncode == 0, ended.stderr
    findings = json.loads((folder / "findings.json").read_text())
    assert findings and all(f["title"] in ended.stdout for f in findings)
    assert (folder / "report.html").exists()
    begun = os.stat(folder / "results.csv").st_size
    only = command(name, "--analyse_only", f"--dir={folder}")
    assert only.returncode == 0 and json.loads((folder / "findings.json").read_text()) == findings
    assert os.stat(folder / "results.csv").st_size == begun
