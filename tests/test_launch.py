"""launch/setup.sh with a stand-in for Python: nothing is installed twice, and what is half-made is made again."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Behaves as `python -m venv DIR`, `python -m pip install ...`, and as the checks; writes down what it was asked.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$LOG"
case "$1 $2" in
  "-c "*) exit 0 ;;
  "--version ") echo "Python 3.11.0"; exit 0 ;;
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 0 ;;
  "-m pip") [ -e "$FAIL" ] && exit 1; touch "$(dirname "$0")/../packages"; exit 0 ;;
  "- "*) cat > /dev/null; [ -e "$(dirname "$0")/../packages" ]; exit $? ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "a checkout"
    (root / "launch").mkdir(parents=True)
    for name in ("launch/setup.sh", "pyproject.toml", "constraints.txt"):
        (root / name).write_text((ROOT / name).read_text())
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def setup(extra):
        log = tmp_path / "log"
        log.write_text("")
        env = {**os.environ, "PYTHON": str(python), "LOG": str(log), "FAIL": str(tmp_path / "fail")}
        command = f'set -euo pipefail; source "$1/launch/setup.sh"; setup_venv "{extra}"'
        result = subprocess.run(["bash", "-c", command, "bash", str(root)], env=env, capture_output=True, text=True)
        calls = [c for c in log.read_text().splitlines() if "pip install" in c or "-m venv" in c]
        return result, calls

    setup.root, setup.fail = root, tmp_path / "fail"
    return setup


def test_first_run_installs_and_second_does_nothing(project):
    result, calls = project("")
    assert result.returncode == 0, result.stderr
    assert [c.split()[1] for c in calls] == ["venv", "pip"]
    assert "-c" in calls[1] and "constraints.txt" in calls[1]
    result, calls = project("")
    assert result.returncode == 0 and calls == [] and result.stdout == ""


def test_another_extra_is_added_to_the_same_environment(project):
    project("")
    _, calls = project("dev")
    assert len(calls) == 1 and "[dev]" in calls[0]
    assert project("dev")[1] == [] and project("")[1] == []


def test_half_made_environment_is_made_anew(project):
    project.fail.touch()
    result, _ = project("")
    assert result.returncode == 1 and "installation failed" in result.stderr
    project.fail.unlink()
    result, calls = project("")
    assert result.returncode == 0 and "incomplete or broken" in result.stdout
    assert [c.split()[1] for c in calls] == ["venv", "pip"]


def test_broken_environment_is_made_anew(project):
    project("")
    (project.root / ".venv" / "packages").unlink()
    result, calls = project("")
    assert result.returncode == 0 and "incomplete or broken" in result.stdout and len(calls) == 2
    (project.root / ".venv" / "bin" / "python").unlink()  # the interpreter it was made with is gone
    result, calls = project("")
    assert result.returncode == 0 and len(calls) == 2


def test_changed_requirements_are_installed(project):
    project("dev")
    with open(project.root / "constraints.txt", "a", encoding="utf-8") as f:
        f.write("# newer\n")
    _, calls = project("")
    assert [c.split()[1] for c in calls] == ["pip"]
    assert len(project("dev")[1]) == 1  # the extra's own packages may have changed, too


def test_missing_python_is_explained(tmp_path):
    command = f'source "{ROOT}/launch/setup.sh"; find_python'
    result = subprocess.run(["/bin/bash", "-c", command], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode != 0 and "Python 3.11 or newer with venv is needed" in result.stderr


@pytest.mark.parametrize("name", ["launch/quickstart", "launch/test", ".ci/run"])
def test_scripts_can_be_run(name):
    assert os.access(ROOT / name, os.X_OK)
    assert subprocess.run(["bash", "-n", str(ROOT / name)]).returncode == 0
