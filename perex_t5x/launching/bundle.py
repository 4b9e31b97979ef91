"""What is copied to other machines, in one folder: a wheel of the committed files, constraints.txt, jobs.json, Gin files.

bundle/perex_t5x-0.1.0-py3-none-any.whl
bundle/constraints.txt       exact versions, for --with_package
bundle/requirements_*.txt    exact versions and hashes of what hosts install: see `PIP_STEPS`
bundle/jobs.json             see `launching.spec`
bundle/gin_files/...         Gin files that are not shipped
bundle/packages/...          wheels of --with_package
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import perex_t5x
from perex_t5x.errors import ConfigError
from perex_t5x.launching.shell import CommandError, Commands
from perex_t5x.launching.spec import GIN_FOLDER, Work

# Generated, see CONTRIBUTING.md. The first is what builds the packages that have no wheel. They are built in the environment
# itself: pip installs the separate one that it would make for them without hashes.
REQUIREMENTS = ("launch/requirements_build.txt", "launch/requirements_tpu.txt")
_PARTS = ("perex_t5x", "gin", "pyproject.toml", "constraints.txt", *REQUIREMENTS, "README.md", "LICENSE")
_CODE = _PARTS[:-2]
WHEEL = f"perex_t5x-{perex_t5x.__version__}-py3-none-any.whl"
# Arguments of `pip install`, one step after another, in the bundle's folder; then packages/*.whl under constraints.txt, then
# `pip check`. The lists are complete, so nothing is resolved: pip would refuse `etils[epath]` beside a hash for `etils`.
PIP_STEPS = (
    ("--require-hashes", "--no-deps", "--only-binary=:all:", "--requirement=requirements_build.txt"),
    ("--require-hashes", "--no-deps", "--no-build-isolation", "--requirement=requirements_tpu.txt"),
    ("--no-deps", f"./{WHEEL}"),
)
_MOST_FILES = 10


@dataclass(frozen=True)
class Checkout:
    """The files that are packed.

    Attributes:
      root: of the checkout.
      commit: twelve digits; with '-dirty' if uncommitted files are included.
    """

    root: str
    commit: str

    @property
    def dirty(self) -> bool:
        return self.commit.endswith("-dirty")


def checkout(allow_uncommitted: bool = False, root: str | None = None) -> Checkout:
    """The checkout that this package is imported from. Uncommitted files are included only if `allow_uncommitted`.

    Raises:
      ConfigError: names the files that are not committed, or says that there is no checkout.
    """
    root = root or str(Path(perex_t5x.__file__).resolve().parent.parent)
    if not os.path.isfile(os.path.join(root, "pyproject.toml")) or not os.path.exists(os.path.join(root, ".git")):
        raise ConfigError(
            f"{root} is not a git checkout of perex_t5x: launchers build the package from committed files. Run the launcher "
            "from a checkout."
        )
    git = Commands()
    try:
        commit = git.read(["git", "-C", root, "rev-parse", "--short=12", "HEAD"])
        lines = git.run(["git", "-C", root, "status", "--porcelain", "--untracked-files=all", "--", *_CODE])
    except CommandError as e:
        raise ConfigError(f"git cannot read the checkout {root}:\n{e.completed.said}") from e
    changed = lines.stdout.splitlines()
    if not changed:
        return Checkout(root, commit)
    if not allow_uncommitted:
        shown = "\n".join(f"  {line}" for line in changed[:_MOST_FILES])
        more = f"\n  and {len(changed) - _MOST_FILES} more" if len(changed) > _MOST_FILES else ""
        raise ConfigError(
            f"not committed, and so not part of what would run:\n{shown}{more}\nCommit them, or include them as they are "
            "with --allow_uncommitted."
        )
    return Checkout(root, f"{commit}-dirty")


def uncommitted(paths: Sequence[str]) -> list[str]:
    """Those of the user's own Gin files and packages (copied as they are) that are not committed, each with the reason."""
    uncommitted_paths = []
    for path in dict.fromkeys(os.path.realpath(p) for p in paths):
        if path.endswith(".whl"):
            continue  # built from an unknown source
        folder = os.path.isdir(path)
        where, ignored = (path, []) if folder else (os.path.dirname(path), ["--ignored"])  # ignored in a folder: caches
        git = ["git", "-C", where, "status", "--porcelain", "--untracked-files=all", *ignored, "--", path]
        try:
            said = Commands().run(git).stdout
        except (CommandError, ConfigError):  # no repository, or no git
            uncommitted_paths.append(f"{path} (not in git)")
            continue
        if said.strip():
            uncommitted_paths.append(f"{path} (not committed)")
    return uncommitted_paths


def folder(name: str) -> str:
    """Where a launch of this name is prepared on this machine."""
    base = os.environ.get("PEREX_T5X_LAUNCH_DIR") or os.path.join("~", ".cache", "perex_t5x", "launch")
    return os.path.join(os.path.abspath(os.path.expanduser(base)), name)


@contextlib.contextmanager
def alone(target: str, dry_run: bool = False) -> Iterator[None]:
    """Locks `target` while it is filled and read: a second launch of the same name waits."""
    if dry_run:
        yield
        return
    os.makedirs(target, exist_ok=True)
    with open(os.path.join(target, "lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        yield


def check_packages(paths: Sequence[str]) -> None:
    """Raises `ConfigError` for a --with_package that cannot be built or copied."""
    for path in paths:
        wheel = path.endswith(".whl") and os.path.isfile(path)
        project = any(os.path.isfile(os.path.join(path, name)) for name in ("pyproject.toml", "setup.py"))
        if not wheel and not project:
            raise ConfigError(f"--with_package={path}: neither a wheel nor a folder with a pyproject.toml or setup.py.")


def build(
    work: Work, target: str, files: Checkout, commands: Commands, with_package: Sequence[str] = (), archive: bool = True
) -> str:
    """Fills `target`/bundle and returns its path; with `archive` that of `target`/bundle.tar.gz.

    All of it by commands: those that a dry run prints do the same when pasted into a shell.
    """
    source, bundle = os.path.join(target, "source"), os.path.join(target, "bundle")
    commands.run(["rm", "-rf", source, bundle])
    commands.run(["mkdir", "-p", source, bundle])
    _copy_source(files, target, source, commands)
    _wheel(source, bundle, commands)
    for package in with_package:
        _wheel(os.path.abspath(package), os.path.join(bundle, "packages"), commands)
    commands.run(["cp", *(os.path.join(source, name) for name in ("constraints.txt", *REQUIREMENTS)), bundle])
    commands.write(os.path.join(bundle, "commit.txt"), files.commit)
    write_jobs(work, bundle, commands)
    if not archive:
        return bundle
    packed = os.path.join(target, "bundle.tar.gz")
    commands.run(["tar", "-czf", packed, "-C", bundle, "."])
    return packed


def write_jobs(work: Work, target: str, commands: Commands) -> None:
    """Writes jobs.json, and beside it the Gin files that are not shipped with the package."""
    commands.write(os.path.join(target, "jobs.json"), work.to_json(None if commands.dry_run else 1).rstrip("\n"))
    for name, path in work.gin_files.items():
        copy = os.path.join(target, GIN_FOLDER, name)
        commands.run(["mkdir", "-p", os.path.dirname(copy)])
        commands.run(["cp", os.path.abspath(path), copy])


def _copy_source(files: Checkout, target: str, source: str, commands: Commands) -> None:
    packed = os.path.join(target, "source.tar")
    git = ["git", "-C", files.root]
    if not files.dirty:
        commands.run([*git, "archive", "--format=tar", f"--output={packed}", files.commit, *_PARTS])
    else:
        # Runs in a dry run, too: the list is part of the next command.
        words = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_PARTS]
        listing = [n for n in Commands().run(words).stdout.split("\0") if n and os.path.lexists(f"{files.root}/{n}")]
        commands.run(["tar", "-cf", packed, "-C", files.root, "--", *dict.fromkeys(listing)])
    commands.run(["tar", "-xf", packed, "-C", source])


def _wheel(source: str, target: str, commands: Commands) -> None:
    """Builds a project's wheel, or copies a given wheel."""
    if source.endswith(".whl"):
        commands.run(["mkdir", "-p", target])
        commands.run(["cp", source, target])
        return
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={target}", source]
    done = commands.run(argv, check=False, timeout=900)
    if done.returncode != 0:
        raise ConfigError(
            f"the wheel of {source} cannot be built. pip downloads the build backend (hatchling): is the package index "
            f"reachable?\n{done.said}"
        )
