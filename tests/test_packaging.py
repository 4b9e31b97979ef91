"""The wheel and the sdist: what is in them, and that they work in fresh environments, the core alone and with each extra."""

from __future__ import annotations

import email
import os
import re
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import perex_t5x
from tests.test_core import readme_example

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Nothing of this checkout: neither its path nor what its environment says.
ENV = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {"JAX_PLATFORMS": "cpu"}


def run(*command, cwd=None, fails=False):
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=ENV, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout + done.stderr


def make_environment(folder: Path) -> Path:
    """Its `bin`."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


@pytest.fixture(scope="session")
def distributions(tmp_path_factory):
    """(wheel, sdist); the wheel is built from the sdist, as an index's users would have to."""
    folder = tmp_path_factory.mktemp("dist")
    binaries = make_environment(folder / "env")
    run(binaries / "pip", "install", "--quiet", "build")
    run(binaries / "python", "-m", "build", "--outdir", folder / "out", ROOT)
    (wheel,) = (folder / "out").glob("*.whl")
    (sdist,) = (folder / "out").glob("*.tar.gz")
    return wheel, sdist


def test_version_comes_from_one_place():
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?", perex_t5x.__version__)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## (\[?{re.escape(perex_t5x.__version__)}\]?|Unreleased)", changelog, re.MULTILINE)
    found = [
        path
        for path in (*(ROOT / "perex_t5x").rglob("*.py"), ROOT / "pyproject.toml")
        if f'"{perex_t5x.__version__}"' in path.read_text()
    ]
    assert found == [ROOT / "perex_t5x" / "__init__.py"]


def test_every_dependency_has_an_exact_version():
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    wanted = [*PROJECT["dependencies"], *(d for extra in PROJECT["optional-dependencies"].values() for d in extra)]
    names = {re.match(r"[\w.-]+", d)[0].lower().replace("_", "-") for d in wanted} - {"perex-t5x"}
    assert names <= pinned


@pytest.mark.slow
def test_what_is_in_the_distributions(distributions):
    wheel, sdist = distributions
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        (metadata_name,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(opened.read(metadata_name))
        (entry_points,) = (opened.read(n).decode() for n in names if n.endswith("entry_points.txt"))
    assert metadata["Version"] == perex_t5x.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert {e.replace("-", "_") for e in metadata.get_all("Provides-Extra")} == set(PROJECT["optional-dependencies"])
    assert entry_points.strip() == "[console_scripts]\nperex = perex_t5x.cli.dispatch:main"
    tracked = run("git", "ls-files", "perex_t5x", "gin", cwd=ROOT).splitlines()
    expected = {name if name.startswith("perex_t5x") else f"perex_t5x/{name}" for name in tracked}
    assert expected <= names and "perex_t5x/py.typed" in names
    assert not [n for n in names if not n.startswith(("perex_t5x/", "perex_t5x-"))]  # a top-level gin/ above all
    with tarfile.open(sdist) as opened:
        files = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    parts = (
        "perex_t5x",
        "gin",
        "tests",
        "docs",
        "launch",
        "constraints.txt",
        "pyproject.toml",
        "mkdocs.yml",
        "*.md",
        "LICENSE",
    )
    assert files - {"PKG-INFO", ".gitignore"} == set(run("git", "ls-files", *parts, cwd=ROOT).splitlines())


@pytest.fixture
def install(distributions, tmp_path):
    """install(extra) -> the `bin` of a fresh environment with the wheel and that extra, under the constraints."""

    def make(extra: str = "") -> Path:
        binaries = make_environment(tmp_path / "env")
        wheel = f"{distributions[0]}[{extra}]" if extra else str(distributions[0])
        run(binaries / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
        run(binaries / "pip", "check")
        return binaries

    return make


# The examples of all public functions of the core; that of `dp_epsilon` has an extra of its own.
DOCTESTS = """
import doctest, importlib, pkgutil
from perex_t5x import optimizers, per_example
tried = 0
for package in (per_example, optimizers):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("differential_privacy"):
            result = doctest.testmod(importlib.import_module(found.name), optionflags=doctest.ELLIPSIS)
            assert not result.failed, found.name
            tried += result.attempted
assert tried > 100, tried
"""


@pytest.mark.slow
def test_the_core_alone(install, tmp_path):
    binaries = install()
    listed = run(binaries / "pip", "list").lower()
    assert "optax" in listed and not re.search(r"^(flax|tensorflow|seqio|gin-config|rich)\b", listed, re.MULTILINE)
    run(binaries / "python", "-c", readme_example(), cwd=tmp_path)
    run(binaries / "python", "-c", DOCTESTS, cwd=tmp_path)
    assert run(binaries / "perex", "--version", cwd=tmp_path).startswith(f"perex_t5x {perex_t5x.__version__}, ")
    said = run(binaries / "perex", "train", cwd=tmp_path, fails=True)
    assert said.startswith("ERROR: perex_t5x.train needs the extra [train]: ") and said.count("\n") == 1
    assert "_perex" in run(binaries / "perex", "completion", "bash", cwd=tmp_path)
    # Typed: a type checker reads the package's own annotations.
    run(binaries / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", "pyright")
    (tmp_path / "use.py").write_text(
        "from perex_t5x import per_example\nreveal_type(per_example.Statistic('a', abs, scaling=abs).name)\n"
    )
    said = run(binaries / "pyright", "--pythonpath", binaries / "python", "use.py", cwd=tmp_path)
    assert 'is "str"' in said and "0 errors" in said


TRAINING = [
    "train", "--gin_file=runs/quickstart.gin", "--gin.MODEL_DIR=run", "--gin.TRAIN_STEPS=2", "--gin.BATCH_SIZE=8",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "commands"),
    [
        ("train", [TRAINING, ["checkpoints", "verify", "run"], ["completion", "zsh"]]),
        ("gcs", ["import google.cloud.storage", [*TRAINING, "--dry_run"]]),
        ("gcs_hns", ["import google.cloud.storage_control_v2"]),
        ("tpu", [["preflight", *TRAINING[1:], "--topology=v5e:2x2", "--no_search"]]),
        ("reports", [TRAINING, ["report", "run", "--out=page.html", "--figures=figures"]]),
        ("convert", ["import safetensors.numpy", ["checkpoints", "--help"]]),
        (
            "dp",
            [
                "from perex_t5x.optimizers import dp_epsilon as e\nassert e(noise_multiplier=1.0, steps=1, delta=1e-5) < 10"
            ],
        ),
        ("launch", ["import xmanager.xm, yaml\nimport perex_t5x.launching.gke.command"]),
    ],
)
def test_each_extra(install, tmp_path, extra, commands):
    """In a folder of the user's: with what the extra is for, and with nothing of this checkout."""
    binaries = install(extra)
    for command in commands:
        words = ["python", "-c", command] if isinstance(command, str) else ["perex", *command]
        run(binaries / words[0], *words[1:], cwd=tmp_path)


def test_every_extra_is_tried():
    tried = {extra for mark in test_each_extra.pytestmark if mark.name == "parametrize" for extra, _ in mark.args[1]}
    assert tried | {"dev", "docs"} == set(PROJECT["optional-dependencies"])  # the last two are for this repository
