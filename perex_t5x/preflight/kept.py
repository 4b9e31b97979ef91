"""Small JSON files that outlive a command, each named by a hash of all that it depends on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perex_t5x import files


def default_folder() -> Path:
    """$XDG_CACHE_HOME/perex_t5x/preflight, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perex_t5x" / "preflight"


def key(*parts: str) -> str:
    """A hash of these, of the compiler's version and flags, and of the files that read what it makes."""
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_LIBRARY_PATH")]
    return hashlib.sha256("\0".join([*parts, *flags, *_versions(), _reader()]).encode()).hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    found = []
    for package in ("jax", "jaxlib", "libtpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return tuple(found)


@functools.cache
def _reader() -> str:
    """Of the files of this package: what they find is kept for as long as they stay the same."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def read(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or half of it
        return None


def write(path: Path | None, values: Mapping[str, Any]) -> None:
    if path is None:
        return
    # A full disk is no reason to lose what was found.
    with contextlib.suppress(OSError):
        files.write_atomically(path, json.dumps(values))
