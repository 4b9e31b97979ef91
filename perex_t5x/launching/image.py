"""Builds and pushes the container image of the committed files.

    ./launch/build_image.py --repository=europe-docker.pkg.dev/PROJECT/perex/perex
    ./launch/build_image.py --repository=... --cloud_build      without Docker on this machine

The only line on stdout is the image by its digest, NAME@sha256:..., for --image of the launchers: a tag can be moved, a
digest cannot. The tag is the commit, with a fingerprint of the contents if there is more in it than that commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.launching import bundle, names
from perex_t5x.launching.shell import GONE, PUSH_DENIED, CommandError, Commands, say
from perex_t5x.launching.spec import Work

FILES = ("launch/Dockerfile", "launch/.dockerignore")
_REPOSITORY = re.compile(r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# Registries that gcloud can read.
_OF_GOOGLE = re.compile(r"([a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)/.*")
BASE_IMAGE = "python:3.11-slim"
_HOUR = 3600


def define_flags() -> None:
    flags.DEFINE_string("repository", None, "Where the image is pushed, without a tag: HOST/PROJECT/REPOSITORY/NAME.")
    flags.DEFINE_bool("push", True, "Push the image; with --nopush it stays on this machine.")
    flags.DEFINE_bool("cloud_build", False, "Let Google Cloud Build build and push it.")
    flags.DEFINE_string("project", None, "With --cloud_build: the project that builds.")
    flags.DEFINE_bool("allow_uncommitted", False, "Include uncommitted files as they are.")
    flags.DEFINE_list("with_package", [], "More wheels or project folders to install, such as your own tasks.")
    flags.DEFINE_string("base_image", BASE_IMAGE, "The image to build on; its digest of today is used, and recorded.")
    flags.DEFINE_bool("dry_run", False, "Print the commands, and run none.")


def main(args: Any) -> int:
    """launch/build_image.py"""
    if args.cloud_build and not args.push:
        raise ConfigError("--cloud_build and --nopush exclude each other: Cloud Build always pushes the image.")
    if args.project:
        names.check_project(args.project)
    repository = check_repository(args.repository)
    bundle.check_packages(args.with_package)
    files = bundle.checkout(args.allow_uncommitted)
    commands = Commands(args.dry_run)
    target = bundle.folder(f"image-{files.commit}")
    with bundle.alone(target, args.dry_run):
        folder = context(target, files, commands, args.with_package, args.allow_uncommitted)
        name = f"{repository}:{tag(folder, files, commands, bool(args.with_package or args.allow_uncommitted))}"
        build_with = BuiltBy(args.push, args.cloud_build, args.project, args.base_image)
        image = build(folder, name, files, commands, build_with)
    if not args.dry_run:
        print(image)
    return 0


def check_repository(repository: str | None) -> str:
    """
    >>> check_repository("europe-docker.pkg.dev/my-project/perex/perex")
    'europe-docker.pkg.dev/my-project/perex/perex'
    """
    if not repository:
        raise ConfigError(
            "--repository is missing, such as --repository=europe-docker.pkg.dev/PROJECT/perex/perex, created with\n  "
            "gcloud artifacts repositories create perex --repository-format=docker --location=europe"
        )
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigError(
            f"--repository={repository!r}: write HOST/PROJECT/REPOSITORY/NAME, in lower case and without a tag (the commit "
            "becomes the tag)."
        )
    return repository


def context(
    target: str,
    files: bundle.Checkout,
    commands: Commands,
    with_package: Sequence[str] = (),
    allow_uncommitted: bool = False,
) -> str:
    """The folder that Docker builds from: the Dockerfile, a wheel of the committed files, what it requires.

    Raises:
      ConfigError: the Dockerfile has uncommitted changes.
    """
    texts = {os.path.basename(name): _text(files, name, allow_uncommitted) for name in FILES}
    if not commands.dry_run:
        os.makedirs(target, exist_ok=True)
    folder = bundle.build(Work("image", "", ()), target, files, commands, with_package, archive=False)
    for name, text in texts.items():
        commands.write(os.path.join(folder, name), text)
    return folder


def tag(folder: str, files: bundle.Checkout, commands: Commands, more: bool = False) -> str:
    """Different for different contents: with `more` than the commit in it, a fingerprint of the folder follows."""
    if not more:
        return files.commit
    if commands.dry_run:
        return f"{files.commit}-FINGERPRINT"  # known once the folder is filled
    contents = hashlib.sha256()
    for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
        contents.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        contents.update(path.read_bytes())
    return f"{files.commit}-{contents.hexdigest()[:12]}"


@dataclass(frozen=True)
class BuiltBy:
    """How an image is built: as the flags of these names."""

    push: bool = True
    cloud_build: bool = False
    project: str | None = None
    base_image: str = BASE_IMAGE


def build(folder: str, image: str, files: bundle.Checkout, commands: Commands, how: BuiltBy | None = None) -> str:
    """Builds, and pushes; returns the image by its digest. One that is not pushed has only its name."""
    how = how or BuiltBy()
    if how.cloud_build:
        where = [f"--project={how.project}"] if how.project else []
        config = os.path.join(folder, "cloudbuild.json")
        commands.write(config, cloud_build_config(image, files.commit, how.base_image))
        _run(commands, ["gcloud", "builds", "submit", folder, f"--config={config}", "--quiet", *where])
        return _by_digest(image, "" if commands.dry_run else _from_gcloud(image, commands))
    if shutil.which("docker") is None and not commands.dry_run:
        raise ConfigError(
            "docker is not installed, or not on the PATH: install it (https://docs.docker.com/engine/install), or use "
            "--cloud_build."
        )
    base = how.base_image
    if "@" not in base:
        _run(commands, ["docker", "pull", "--quiet", "--platform=linux/amd64", base])
        base = _from_docker(base, commands) or base
    arguments = [f"--build-arg=BASE_IMAGE={base}", f"--build-arg=COMMIT={files.commit}"]
    _run(commands, ["docker", "build", "--platform=linux/amd64", f"--tag={image}", *arguments, folder])
    if not how.push:
        return image
    _run(commands, ["docker", "push", image])
    pushed = _from_docker(image, commands)
    if not pushed and not commands.dry_run:
        raise TrainingError(f"{image} is pushed, but docker does not say under which digest.")
    return pushed or image


def cloud_build_config(image: str, commit: str, base: str) -> str:
    """What Cloud Build runs, as JSON: the same as `build` does with Docker here. It replaces $NAME, so $$ stands for $."""
    script = (
        'docker pull --quiet "$1"; base=$(docker image inspect --format="{{index .RepoDigests 0}}" "$1"); '
        'docker build --tag="$2" --build-arg=BASE_IMAGE="$base" --build-arg=COMMIT="$3" .'
    )
    arguments = ["-euc", script.replace("$", "$$"), "build", base, image, commit]
    step = {"name": "gcr.io/cloud-builders/docker", "entrypoint": "bash", "args": arguments}
    return json.dumps({"steps": [step], "images": [image], "timeout": f"{_HOUR}s"})


def pinned(image: str, commands: Commands) -> str:
    """The image by its digest, as its registry has it now; by its tag, with a note, if that cannot be read from here.

    Raises:
      ConfigError: the registry has no such image.
    """
    if "@" in image:
        return image
    why = "its registry can be read with gcloud or docker buildx, and neither is installed here"
    if _OF_GOOGLE.fullmatch(image) and (commands.dry_run or shutil.which("gcloud")):
        try:
            return _by_digest(image, _from_gcloud(image, commands))
        except CommandError as e:
            if e.completed.matches(GONE):
                raise ConfigError(f"--image={image}: there is no such image:\n{e.completed.said}") from e
            why = e.completed.said.strip()
    if not commands.dry_run and shutil.which("docker"):
        argv = ["docker", "buildx", "imagetools", "inspect", image, "--format={{json .Manifest}}"]
        done = commands.run(argv, check=False, timeout=120)
        if done.returncode == 0 and (digest := _DIGEST.search(json.loads(done.stdout).get("digest", ""))):
            return _by_digest(image, digest[0])
        why = done.said.strip()
    if not commands.dry_run:
        say(f"note: the digest of {image} is not known, so pods run whatever the tag names when they start: {why}")
    return image


def _from_gcloud(image: str, commands: Commands) -> str:
    argv = ["gcloud", "artifacts", "docker", "images", "describe", image, "--format=value(image_summary.digest)"]
    return commands.read(argv, timeout=120)


def _from_docker(image: str, commands: Commands) -> str:
    """NAME@sha256:... of an image that was pulled or pushed; '' if Docker knows none."""
    said = commands.read(["docker", "image", "inspect", "--format={{json .RepoDigests}}", image], dry="[]")
    name = _name(image).removeprefix("docker.io/").removeprefix("library/")  # which Docker leaves out
    return next((known for known in json.loads(said) if known.partition("@")[0] == name), "")


def _by_digest(image: str, digest: str) -> str:
    """
    >>> _by_digest("host:5000/p/n:tag", "sha256:" + "0" * 64)[:25]
    'host:5000/p/n@sha256:0000'
    """
    return f"{_name(image)}@{digest}" if _DIGEST.fullmatch(digest) else image


def _name(image: str) -> str:
    """Without tag and digest."""
    return re.sub(r"(:[\w.-]+)?(@.*)?$", "", image, flags=re.ASCII)


def _run(commands: Commands, argv: list[str]) -> None:
    print(f"{' '.join(argv[:2])} ... this takes minutes", file=sys.stderr, flush=True)
    try:
        commands.run(argv, timeout=_HOUR)
    except CommandError as e:
        if e.completed.matches(PUSH_DENIED):
            host = argv[-1].partition("/")[0]
            raise ConfigError(
                f"{e}\nDocker may lack credentials: gcloud auth configure-docker {host if '.' in host else 'HOST'}"
            ) from e
        raise


def _text(files: bundle.Checkout, name: str, allow_uncommitted: bool) -> str:
    """The committed text of a file; the current one if `allow_uncommitted`."""
    path = Path(files.root, name)
    try:
        committed = Commands().run(["git", "-C", files.root, "show", f"HEAD:{name}"]).stdout
    except CommandError:
        committed = None
    current = path.read_text(encoding="utf-8") if path.exists() else None
    if current is not None and current != committed and not allow_uncommitted:
        raise ConfigError(f"{name} has uncommitted changes. Commit it, or give --allow_uncommitted.")
    text = current if allow_uncommitted and current is not None else committed
    if text is None:
        raise ConfigError(f"{path} is missing.")
    return text
