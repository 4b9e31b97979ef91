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
    files = bundle.checkout(root=str(checkout))
    return Path(image.context(str(tmp_path / "t"), files, Commands(), ["mine"]))


def test_everything_that_is_copied_is_there(context):
    there = sent(context)
    assert there == {
        "commit.txt",
        "constraints.txt",
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
    """In the same order: by hash, the wheel, packages under the constraints, and a check."""
    remote = pytest.importorskip("perex_t5x.launching.gcloud.remote")
    lines = [part for part in remote.install("a").split("; ") if " -m pip " in part]
    given = [shlex.split(line[line.index(" -m pip ") + 8 :]) for line in lines]
    installs = [tuple(w for w in words[1:] if w != "--quiet") for words in given if words[0] == "install"]
    positions = [next(i for i, found in enumerate(installs) if set(step) <= set(found)) for step in bundle.PIP_STEPS]
    packages = next(i for i, found in enumerate(installs) if "--constraint=constraints.txt" in found)
    assert positions == sorted(positions) and packages > positions[1]


def test_the_base_is_the_python_that_the_constraints_are_for():
    assert instructions()[:2] == [("ARG", f"BASE_IMAGE={image.BASE_IMAGE}"), ("FROM", "${BASE_IMAGE}")]
    assert image.BASE_IMAGE == "python:3.11-slim"
    assert ("ENTRYPOINT", "[]") in instructions(), "the manifests say what runs"


def test_an_uncommitted_dockerfile_is_refused(checkout, tmp_path):
    with open(checkout / "launch" / "Dockerfile", "a", encoding="utf-8") as f:
        f.write("# mine\n")
    files = bundle.checkout(root=str(checkout))
    with pytest.raises(ConfigError, match="launch/Dockerfile has uncommitted changes"):
        image.context(str(tmp_path / "t"), files, Commands())
    made = image.context(str(tmp_path / "t"), files, Commands(), allow_uncommitted=True)
    assert Path(made, "Dockerfile").read_text().endswith("# mine\n")


DIGEST, BASE = "sha256:" + "a" * 64, "sha256:" + "b" * 64
NAME = "europe-docker.pkg.dev/p/r/n"
# Docker as far as `image` uses it: an image has a digest once it was pulled or pushed, beside those in other registries.
DOCKER = f"""
record = open(os.environ["RECORD"], "a")
print(json.dumps(sys.argv[1:]), file=record)
if sys.argv[1:3] == ["image", "inspect"]:
    pushed = any(json.loads(line)[0] == "push" for line in open(record.name))
    ours = ["elsewhere/n@sha256:0", "{NAME}@{DIGEST}"] if pushed else []
    digests = ["python@{BASE}"] if "python" in sys.argv[-1] else ours
    print(json.dumps(digests) if "json" in sys.argv[3] else digests[0])
"""


def stand_in(folder, monkeypatch, code, program="docker"):
    """First on the PATH."""
    folder.mkdir(exist_ok=True)
    (folder / program).write_text(f"#!{sys.executable}\nimport json, os, sys\n{code}")
    (folder / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(folder / "record"))
    return folder / "record"


def recorded(record):
    return [json.loads(line) for line in record.read_text().splitlines()]


def test_built_then_pushed_on_a_base_by_digest_and_named_by_digest(tmp_path, monkeypatch):
    record = stand_in(tmp_path / "bin", monkeypatch, DOCKER)
    files = bundle.Checkout(str(tmp_path), "0123456789ab")
    assert image.build("a folder", f"{NAME}:0123456789ab", files, Commands()) == f"{NAME}@{DIGEST}"
    pull, _, build, push, _ = recorded(record)
    assert pull[0] == "pull" and pull[-1] == "python:3.11-slim" and push == ["push", f"{NAME}:0123456789ab"]
    assert build[0] == "build" and build[-1] == "a folder"
    assert {"--build-arg=COMMIT=0123456789ab", f"--build-arg=BASE_IMAGE=python@{BASE}"} < set(build)
    kept = image.BuiltBy(push=False, base_image=f"python@{BASE}")
    record.unlink()
    assert image.build("a folder", f"{NAME}:1", files, Commands(), kept) == f"{NAME}:1"
    assert [argv[0] for argv in recorded(record)] == ["build"]


def test_cloud_build_does_the_same_over_there(tmp_path, monkeypatch):
    record = stand_in(tmp_path / "bin", monkeypatch, DOCKER)
    stand_in(tmp_path / "bin", monkeypatch, f"print('{DIGEST}' if 'describe' in sys.argv else '')", "gcloud")
    how = image.BuiltBy(cloud_build=True, project="my-project")
    files = bundle.Checkout(str(tmp_path), "0123456789ab")
    commands = Commands()
    assert image.build(str(tmp_path), f"{NAME}:1", files, commands, how) == f"{NAME}@{DIGEST}"
    submit, describe = commands.record
    config = json.loads((tmp_path / "cloudbuild.json").read_text())
    assert f"--config={tmp_path / 'cloudbuild.json'}" in submit and "--project=my-project" in submit
    assert describe[-2:] == (f"{NAME}:1", "--format=value(image_summary.digest)")
    [step] = config["steps"]
    assert config["images"] == [f"{NAME}:1"] and step["entrypoint"] == "bash"
    assert "$" not in "".join(step["args"]).replace("$$", "")  # Cloud Build would replace it
    subprocess.run(["bash", *(a.replace("$$", "$") for a in step["args"])], check=True, cwd=tmp_path)
    *_, build = recorded(record)
    assert {"--build-arg=COMMIT=0123456789ab", f"--build-arg=BASE_IMAGE=python@{BASE}", f"--tag={NAME}:1"} < set(build)


def test_tags_differ_for_different_contents(tmp_path):
    (tmp_path / "a").write_text("1")
    clean, dirty = bundle.Checkout("", "0123456789ab"), bundle.Checkout("", "0123456789ab-dirty")
    assert image.tag(str(tmp_path), clean, Commands()) == "0123456789ab"
    tags = [image.tag(str(tmp_path), clean, Commands(), more=True)]
    tags.append(image.tag(str(tmp_path), dirty, Commands(), more=True))
    (tmp_path / "a").write_text("2")
    tags.append(image.tag(str(tmp_path), dirty, Commands(), more=True))
    assert len({"0123456789ab", *tags}) == 4
    assert image.tag(str(tmp_path), dirty, Commands(), more=True) == tags[-1]
    assert all(re.fullmatch(r"[\w][\w.-]{0,127}", made) for made in tags)


def test_a_tag_becomes_the_digest_that_its_registry_has(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert image.pinned(f"{NAME}@{DIGEST}", Commands()) == f"{NAME}@{DIGEST}"
    assert image.pinned(f"{NAME}:1", Commands()) == f"{NAME}:1"
    assert "neither is installed" in capsys.readouterr().err
    manifest = json.dumps({"mediaType": "x", "digest": DIGEST, "size": 1})
    stand_in(tmp_path / "bin", monkeypatch, f"sys.exit(print({manifest!r}) if 'imagetools' in sys.argv else 1)")
    assert image.pinned("host:5000/p/n:1", Commands()) == f"host:5000/p/n@{DIGEST}"
    # gcloud first; if it may not, docker is asked.
    stand_in(tmp_path / "bin", monkeypatch, "sys.exit('ERROR: PERMISSION_DENIED: containeranalysis')", "gcloud")
    assert image.pinned(f"{NAME}:1", Commands()) == f"{NAME}@{DIGEST}"
    stand_in(tmp_path / "bin", monkeypatch, "sys.exit('ERROR: (gcloud...) Image was not found.')", "gcloud")
    with pytest.raises(ConfigError, match=f"--image={NAME}:1: there is no such image"):
        image.pinned(f"{NAME}:1", Commands())


def test_a_push_that_is_denied_is_explained(tmp_path, monkeypatch):
    denied = 'denied: Permission "artifactregistry.repositories.uploadArtifacts"'
    code = f"print('[]') if sys.argv[1] != 'push' else sys.exit({denied!r})"
    stand_in(tmp_path / "bin", monkeypatch, code)
    files = bundle.Checkout(str(tmp_path), "0123456789ab")
    with pytest.raises(ConfigError, match="gcloud auth configure-docker europe-docker.pkg.dev"):
        image.build("a", "europe-docker.pkg.dev/p/r/n:0123456789ab", files, Commands())


def command(**given):
    """launch/build_image.py with these flags."""
    flags = {"project": None, "repository": "host/p/r/n", "with_package": [], "allow_uncommitted": True, "push": True}
    flags["base_image"] = image.BASE_IMAGE
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
    monkeypatch.setattr(image, "tag", lambda *_: "1")
    assert command() == 0 and held == [True, True]


@pytest.mark.parametrize("name", ["Host/a", "host/a:tag", "host/a b", "host", "host/$(x)"])
def test_repositories_that_are_refused(name):
    with pytest.raises(ConfigError):
        image.check_repository(name)
