"""Builds and pushes the container image of the committed files.

    ./launch/build_image.py --repository=europe-docker.pkg.dev/PROJECT/perex/perex
    ./launch/build_image.py --repository=... --cloud_build      without Docker on this machine

The image's tag is the commit; its whole name is the only line on stdout, for --image of the launchers.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from perex_t5x.errors import ConfigError
from perex_t5x.launching import bundle, names
from perex_t5x.launching.shell import PUSH_DENIED, CommandError, Commands
from perex_t5x.launching.spec import Work

FILES = ("launch/Dockerfile", "launch/.dockerignore")
_REPOSITORY = re.compile(r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+")
_IMAGE = re.compile(_REPOSITORY.pattern + r"(:[\w][\w.-]{0,127}|@sha256:[0-9a-f]{64})", re.ASCII)
_HOUR = 3600


def define_flags() -> None:
    flags.DEFINE_string("repository", None, "Where the image is pushed, without a tag: HOST/PROJECT/REPOSITORY/NAME.")
    flags.DEFINE_bool("push", True, "Push the image; with --nopush it stays on this machine.")
    flags.DEFINE_bool("cloud_build", False, "Let Google Cloud Build build and push it.")
    flags.DEFINE_string("project", None, "With --cloud_build: the project that builds.")
    flags.DEFINE_bool("allow_uncommitted", False, "Include uncommitted files as they are.")
    flags.DEFINE_list("with_package", [], "More wheels or project folders to install, such as your own tasks.")
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
    name = f"{repository}:{files.commit}"
    with bundle.alone(target, args.dry_run):
        built = context(target, files, commands, args.with_package, args.allow_uncommitted)
        image = build(built, name, files, commands, args.push, args.cloud_build, args.project)
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


def check_image(image: str) -> str:
    """
    >>> check_image("europe-docker.pkg.dev/my-project/perex/perex:1ced5d4")
    'europe-docker.pkg.dev/my-project/perex/perex:1ced5d4'
    """
    if not _IMAGE.fullmatch(image):
        raise ConfigError(f"--image={image!r}: write HOST/PROJECT/REPOSITORY/NAME:TAG.")
    return image


def context(
    target: str,
    files: bundle.Checkout,
    commands: Commands,
    with_package: Sequence[str] = (),
    allow_uncommitted: bool = False,
    gin_files: Mapping[str, str] | None = None,
) -> str:
    """The folder that Docker builds from: the Dockerfile, a wheel of the committed files, what it requires.

    Raises:
      ConfigError: the Dockerfile has uncommitted changes.
    """
    texts = {os.path.basename(name): _text(files, name, allow_uncommitted) for name in FILES}
    if not commands.dry_run:
        os.makedirs(target, exist_ok=True)
    work = Work("image", "", (), gin_files=gin_files or {})
    folder = bundle.build(work, target, files, commands, with_package, archive=False)
    for name, text in texts.items():
        commands.write(os.path.join(folder, name), text)
    return folder


def build(
    folder: str,
    image: str,
    files: bundle.Checkout,
    commands: Commands,
    push: bool = True,
    cloud_build: bool = False,
    project: str | None = None,
) -> str:
    """Builds, and pushes; returns the image's name."""
    if cloud_build:
        where = [f"--project={project}"] if project else []
        _run(commands, ["gcloud", "builds", "submit", folder, f"--tag={image}", "--timeout=1h", "--quiet", *where])
        return image
    if shutil.which("docker") is None and not commands.dry_run:
        raise ConfigError(
            "docker is not installed, or not on the PATH: install it (https://docs.docker.com/engine/install), or use "
            "--cloud_build."
        )
    argument = f"--build-arg=COMMIT={files.commit}"
    _run(commands, ["docker", "build", "--platform=linux/amd64", f"--tag={image}", argument, folder])
    if push:
        _run(commands, ["docker", "push", image])
    return image


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
