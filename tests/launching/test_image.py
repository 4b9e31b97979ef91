"""The image: what its Dockerfile names is in the folder it is built from, and that holds committed files alone."""

import fcntl
import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.launching import bundle, image
from perex_t5x.launching.shell import Commands

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "launch" / "Dockerfile"


def instructions(path=DOCKERFILE):
    """(word, rest) of every instruction, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def sent(folder):
    """Files that Docker sees, by .dockerignore: the last pattern that matches a path or a folder above it decides."""
    patterns = [p for p in (folder / ".dockerignore").read_text().splitlines() if p and not p.startswith("#")]
    found = set()
    for path in (p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder)
        above = [str(name), *(str(p) for p in name.parents if str(p) != ".")]
        hidden = False
        for pattern in patterns:
            if any(fnmatch.fnmatchcase(a, pattern.removeprefix("!")) for a in above):
                hidden = not pattern.startswith("!")
        if not hidden:
            found.add(str(name))
    return found


def git(root, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with our Dockerfile; its wheel is an empty file of the right name."""
    root = tmp_path / "checkout"
    (root / "perex_t5x").mkdir(parents=True)
    (root / "gin").mkdir()
    (root / "launch").mkdir()
    (root / "perex_t5x" / "__init__.py").write_text("")
    (root / "gin" / "a.gin").write_text("")
    for name in ("constraints.txt", "README.md", "LICENSE", "pyproject.toml", *bundle.REQUIREMENTS, *image.FILES):
        (root / name).write_text((ROOT / name).read_text())
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")

    def wheel(source, target, commands):
        os.makedirs(target, exist_ok=True)
        name = bundle.WHEEL if source.endswith("source") else "mine-1.0-py3-none-any.whl"
        Path(target, name).write_text("")

    monkeypatch.setattr(bundle, "_wheel", wheel)
    return root


@pytest.fixture
def context(checkout, tmp_path):
    own = tmp_path / "own.gin"
    own.write_text("A = 1\n")
    files = bundle.checkout(root=str(checkout))
    made = image.context(str(tmp_path / "t"), files, Commands(), ["mine"], gin_files={"mine/own.gin": str(own)})
    return Path(made)


def test_everything_that_is_copied_is_there(context):
    there = sent(context)
    assert there == {
        "commit.txt",
        "constraints.txt",
        "gin_files/mine/own.gin",
        "packages/mine-1.0-py3-none-any.whl",
        bundle.WHEEL,
        "requirements_build.txt",
        "requirements_tpu.txt",
    }
    copied = [rest.split()[:-1] for word, rest in instructions(context / "Dockerfile") if word == "COPY"]
    assert copied
    for source in (s for sources in copied for s in sources if s != "."):
        assert source in there
    assert (context / "constraints.txt").read_text() == (ROOT / "constraints.txt").read_text()


def installs(context, tmp_path):
    """The arguments of every `pip install` that the Dockerfile's shell runs in a folder."""
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(f"#!{sys.executable}\nimport json, sys; print(json.dumps(sys.argv[1:]))")
    fake.chmod(0o755)
    given = []
    for run in [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]:
        env = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
        said = subprocess.run(["/bin/sh", "-c", run], cwd=context, env=env, capture_output=True, text=True, check=True)
        given += [json.loads(line) for line in said.stdout.splitlines()]
    assert all(argv[:4] == ["-m", "pip", "install", "--quiet"] for argv in given)
    return [tuple(argv[4:]) for argv in given]


def test_the_shell_installs_by_hash_then_packages_under_the_constraints(context, tmp_path):
    mine = ("--constraint=constraints.txt", "./packages/mine-1.0-py3-none-any.whl")
    assert installs(context, tmp_path) == [*bundle.PIP_STEPS, mine]
    (context / "packages" / "mine-1.0-py3-none-any.whl").unlink()
    (context / "packages").rmdir()
    assert installs(context, tmp_path) == [*bundle.PIP_STEPS]


def test_it_installs_as_tpu_vms_do():
    remote = pytest.importorskip("perex_t5x.launching.gcloud.remote")
    [line] = [part for part in remote.install("a").split("; ") if "pip install" in part and "--constraint" in part]
    words = shlex.split(line)
    words = words[words.index("pip") :]
    assert words[:4] == ["pip", "install", "--quiet", "--constraint=constraints.txt"]
    assert words[4] == f"./{bundle.WHEEL}[tpu]"


def test_the_base_is_the_python_that_the_constraints_are_for():
    assert ("FROM", "python:3.11-slim") in instructions()
    assert ("ENTRYPOINT", "[]") in instructions(), "the manifests say what runs"


def test_an_uncommitted_dockerfile_is_refused(checkout, tmp_path):
    with open(checkout / "launch" / "Dockerfile", "a", encoding="utf-8") as f:
        f.write("# mine\n")
    files = bundle.checkout(root=str(checkout))
    with pytest.raises(ConfigError, match="launch/Dockerfile has uncommitted changes"):
        image.context(str(tmp_path / "t"), files, Commands())
    made = image.context(str(tmp_path / "t"), files, Commands(), allow_uncommitted=True)
    assert Path(made, "Dockerfile").read_text().endswith("# mine\n")


def docker(folder, monkeypatch, code):
    """A stand-in, first on the PATH."""
    folder.mkdir()
    (folder / "docker").write_text(f"#!{sys.executable}\nimport json, sys\n{code}")
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_built_then_pushed(tmp_path, monkeypatch):
    record = tmp_path / "record"
    docker(tmp_path / "bin", monkeypatch, f"print(json.dumps(sys.argv[1:]), file=open({str(record)!r}, 'a'))")
    files = bundle.Checkout(str(tmp_path), "0123456789ab")
    assert image.build("a folder", "host/p/r/n:0123456789ab", files, Commands()) == "host/p/r/n:0123456789ab"
    first, second = [json.loads(line) for line in record.read_text().splitlines()]
    assert first[0] == "build" and first[-1] == "a folder" and "--build-arg=COMMIT=0123456789ab" in first
    assert second == ["push", "host/p/r/n:0123456789ab"]


def test_a_push_that_is_denied_is_explained(tmp_path, monkeypatch):
    code = "if sys.argv[1] == 'push': sys.exit('denied: Permission \"artifactregistry.repositories.uploadArtifacts\"')"
    docker(tmp_path / "bin", monkeypatch, code)
    files = bundle.Checkout(str(tmp_path), "0123456789ab")
    with pytest.raises(ConfigError, match="gcloud auth configure-docker europe-docker.pkg.dev"):
        image.build("a", "europe-docker.pkg.dev/p/r/n:0123456789ab", files, Commands())


def command(**given):
    """launch/build_image.py with these flags."""
    flags = {"project": None, "repository": "host/p/r/n", "with_package": [], "allow_uncommitted": True, "push": True}
    return image.main(SimpleNamespace(**flags | {"cloud_build": False, "dry_run": False} | given))


def test_cloud_build_cannot_but_push():
    with pytest.raises(ConfigError, match="--cloud_build and --nopush"):
        command(cloud_build=True, push=False)


def test_two_builds_of_one_commit_take_turns(tmp_path, monkeypatch):
    """The second would empty the folder that Docker is reading for the first."""
    held = []

    def busy(*_):
        with open(Path(bundle.folder(f"image-{bundle.checkout(True).commit}"), "lock"), "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
        return "host/p/r/n:1"

    monkeypatch.setenv("PEREX_T5X_LAUNCH_DIR", str(tmp_path))
    monkeypatch.setattr(image, "context", busy)
    monkeypatch.setattr(image, "build", busy)
    assert command() == 0 and held == [True, True]


@pytest.mark.parametrize("name", ["Host/a", "host/a:tag", "host/a b", "host", "host/$(x)"])
def test_repositories_that_are_refused(name):
    with pytest.raises(ConfigError):
        image.check_repository(name)


@pytest.mark.parametrize("name", ["host/a", "host/a:$(x)", "host/a: b", "host/a:b;c"])
def test_images_that_are_refused(name):
    with pytest.raises(ConfigError):
        image.check_image(name)
