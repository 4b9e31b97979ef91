"""The lists with hashes that hosts and images install from: complete, of the tested versions, from any index."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from perex_t5x.launching import bundle

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"([a-z0-9-]+)==(\S+) ((?:\\\n {4}--hash=sha256:[0-9a-f]{64} ?)+)\n")


def listed(name):
    """Package -> version of a list, all of whose lines are understood."""
    text = "".join(line for line in (ROOT / name).read_text().splitlines(True) if not line.startswith("#"))
    found = LINE.findall(text)
    assert LINE.sub("", text) == "", "each line is a version with its hashes"
    return {package: version for package, version, _ in found}


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def closure(python):
    """What perex_t5x[tpu] needs with this Python on Linux, by the metadata of what is installed here."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    environment |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [*project["dependencies"], *project["optional-dependencies"]["tpu"]]
    todo, done = [Requirement(line) for line in own], set()
    needed = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in done:
                continue
            done.add((name, extra))
            if name == "perex-t5x":
                todo += [Requirement(line) for line in project["optional-dependencies"].get(extra, [])]
                continue
            needed.add(name)
            of_package = [Requirement(line) for line in importlib.metadata.requires(name) or []]
            todo += [r for r in of_package if r.marker is None or r.marker.evaluate({**environment, "extra": extra})]
    return needed


@pytest.mark.parametrize("name", bundle.REQUIREMENTS)
def test_the_versions_are_those_of_the_constraints(name):
    known = constraints()
    assert listed(name).items() <= known.items()


def test_no_index_is_named():
    for name in bundle.REQUIREMENTS:
        assert not re.search(r"://|--(extra-)?index|--find-links", (ROOT / name).read_text())


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_everything_that_a_host_needs_is_listed(python):
    build, tpu = (set(listed(name)) for name in bundle.REQUIREMENTS)
    needed = closure(python)
    assert {"jax", "libtpu", "tensorflow", "google-cloud-storage"} <= needed <= tpu
    assert {"setuptools", "wheel"} <= build


@pytest.mark.slow
def test_a_host_can_install_and_import_it(tmp_path):
    """As `PIP_STEPS` do, in a new environment. Downloads about 1 GB."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    for step in bundle.PIP_STEPS[:2]:
        kept = [word.replace("--requirement=", f"--requirement={ROOT}/launch/") for word in step]
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", *kept], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for argv in (["-m", "pip", "check"], ["-c", "import perex_t5x.launching.worker, perex_t5x.train"]):
        done = subprocess.run([python, *argv], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
