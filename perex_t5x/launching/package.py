"""What travels to other machines, in one folder: a wheel of the committed files, constraints.txt, jobs.json, Gin files.

bundle/perex_t5x-0.1.0-py3-none-any.whl
bundle/constraints.txt       exact versions
bundle/jobs.json             see `launching.jobs`
bundle/gin_files/...         Gin files that are not shipped
bundle/packages/...          wheels of --with_package
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import perex_t5x
from perex_t5x.errors import ConfigError
from perex_t5x.launching import gin_files
from perex_t5x.launching.commands import CommandError, Commands
from perex_t5x.launching.jobs import Work

_PARTS = ("perex_t5x", "gin", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
WHEEL = f"perex_t5x-{perex_t5x.__version__}-py3-none-any.whl"
_MOST_FILES = 10


@dataclass(frozen=True)
class Checkout:
    """The files that are packed.

    Attributes:
      root: of the checkout.
      commit: twelve digits; with '-dirty' where uncommitted files are taken along.
    """

    root: str
    commit: str

    @property
    def dirty(self) -> bool:
        return self.commit.endswith("-dirty")


def checkout(allow_uncommitted: bool = False, root: str | None = None) -> Checkout:
    """The checkout that this package is imported from; nothing uncommitted goes along without being asked for.

    Raises:
      ConfigError: names the files that are not committed, or says that there is no checkout.
    """
    root = root or str(Path(perex_t5x.__file__).resolve().parent.parent)
    if not os.path.isfile(os.path.join(root, "pyproject.toml")) or not os.path.exists(os.path.join(root, ".git")):
        raise ConfigError(
            f"{root} is not a git checkout of perex_t5x: launching builds the package from committed files. Run the "
            "launcher of a checkout."
        )
    git = Commands()
    try:
        commit = git.read(["git", "-C", root, "rev-parse", "--short=12", "HEAD"])
        lines = git.run(["git", "-C", root, "status", "--porcelain", "--untracked-files=all", "--", *_PARTS[:4]])
    except CommandError as e:
        raise ConfigError(f"git cannot read the checkout {root}:\n{e.completed.said}") from e
    changed = [line for line in lines.stdout.splitlines() if _counts(line)]
    if not changed:
        return Checkout(root, commit)
    if not allow_uncommitted:
        shown = "\n".join(f"  {line}" for line in changed[:_MOST_FILES])
        more = f"\n  and {len(changed) - _MOST_FILES} more" if len(changed) > _MOST_FILES else ""
        raise ConfigError(
            f"not committed, and so not part of what would run:\n{shown}{more}\nCommit them, or take them along as they "
            "are with --allow_uncommitted."
        )
    return Checkout(root, f"{commit}-dirty")


def _counts(line: str) -> bool:
    """Whether a line of `git status --porcelain` is about a file that would be packed."""
    return not line.startswith("??") or line.rstrip('"').endswith((".py", ".gin"))


def folder(name: str) -> str:
    """Where a launch of this name is prepared."""
    base = os.environ.get("PEREX_T5X_LAUNCH_DIR") or os.path.join("~", ".cache", "perex_t5x", "launch")
    return os.path.join(os.path.abspath(os.path.expanduser(base)), name)


def build(
    work: Work, target: str, files: Checkout, commands: Commands, with_package: Sequence[str] = (), archive: bool = True
) -> str:
    """Fills `target`/bundle and returns its path; with `archive` that of `target`/bundle.tar.gz.

    In a dry run the commands are printed, and nothing is written.
    """
    source, bundle = os.path.join(target, "source"), os.path.join(target, "bundle")
    if not commands.dry_run:
        for path in (source, bundle):
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(path)
    _copy_source(files, target, source, commands)
    _wheel(source, bundle, commands)
    for package in with_package:
        _wheel(os.path.abspath(package), os.path.join(bundle, "packages"), commands)
    if not commands.dry_run:
        shutil.copy(os.path.join(source, "constraints.txt"), bundle)
        _write(os.path.join(bundle, "commit.txt"), files.commit + "\n")
        write_jobs(work, bundle)
    if not archive:
        return bundle
    packed = os.path.join(target, "bundle.tar.gz")
    commands.run(["tar", "-czf", packed, "-C", bundle, "."])
    return packed


def write_jobs(work: Work, target: str) -> None:
    """Writes jobs.json, and the Gin files that travel along beside it."""
    _write(os.path.join(target, "jobs.json"), work.to_json())
    for name, path in work.gin_files.items():
        copy = os.path.join(target, gin_files.FOLDER, name)
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        shutil.copy(path, copy)


def _copy_source(files: Checkout, target: str, source: str, commands: Commands) -> None:
    packed = os.path.join(target, "source.tar")
    git = ["git", "-C", files.root]
    if not files.dirty:
        commands.run([*git, "archive", "--format=tar", f"--output={packed}", files.commit, *_PARTS])
    else:
        listing = commands.read([*git, "ls-files", "--cached", "--others", "--exclude-standard", "--", *_PARTS])
        names = os.path.join(target, "source.txt")
        if not commands.dry_run:
            _write(names, "".join(f"{n}\n" for n in listing.splitlines() if os.path.exists(f"{files.root}/{n}")))
        commands.run(["tar", "-cf", packed, "-C", files.root, f"--files-from={names}"])
    commands.run(["tar", "-xf", packed, "-C", source])


def _wheel(source: str, target: str, commands: Commands) -> None:
    """Builds a project's wheel, or copies one that is built."""
    if source.endswith(".whl"):
        commands.run(["mkdir", "-p", target])
        commands.run(["cp", source, target])
        return
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={target}", source]
    done = commands.run(argv, check=False, timeout=900)
    if done.returncode != 0:
        raise ConfigError(
            f"the wheel of {source} cannot be built. pip fetches the build backend (hatchling) from the package registry: "
            f"is it reachable?\n{done.said}"
        )


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
