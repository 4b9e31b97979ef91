"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from perex_t5x.errors import ConfigError


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in an object store.

    >>> is_remote("gs://bucket/run"), is_remote("/tmp/run")
    (True, False)
    """
    return "://" in os.fspath(path)


def check_path(path: str | os.PathLike[str], setting: str) -> None:
    """Raises `ConfigError` for what is meant to be in a bucket and would be a local folder named 'gs:'.

    >>> check_path("gs:/bucket/run", "MODEL_DIR")
    Traceback (most recent call last):
    perex_t5x.errors.ConfigError: MODEL_DIR = 'gs:/bucket/run': a bucket is written gs://bucket/run.
    """
    path = os.fspath(path)
    if path.startswith("gs:") and not re.match(r"gs://[^/]", path):
        raise ConfigError(f"{setting} = {path!r}: a bucket is written gs://{path[3:].strip('/') or 'BUCKET/FOLDER'}.")


def as_path(path: str | os.PathLike[str]) -> Any:
    """A path with the methods of `pathlib.Path`, also in an object store."""
    if is_remote(path):
        from etils import epath

        return epath.Path(path)
    return Path(path)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file; `OSError` where there is none, also for a name that no file can have, and for what is no file:
    a pipe in the place of one would be waited for without end.

    >>> read_bytes("/dev/zero")
    Traceback (most recent call last):
    OSError: [Errno 22] not a file: '/dev/zero'
    """
    try:
        found = as_path(path)
        if not is_remote(path) and found.exists() and not found.is_file():
            raise OSError(errno.EINVAL, "not a file", os.fspath(path))
        return found.read_bytes()
    except ValueError as e:  # zero bytes, or halves of characters, in the name
        raise OSError(errno.EINVAL, str(e), os.fspath(path)) from None


def _is_open_file(path: str | os.PathLike[str]) -> bool:
    """Whether `path` stands for what a process has open, such as /dev/stdout: that is written to, wherever it leads.
    (/dev/shm is a folder like any other.)"""
    return os.path.abspath(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """A text file that replaces `path` once the block has ended without an error; until then, and after an error, `path` is
    as it was. Its folder is made if it does not exist. In an object store (gs://...) it is one upload: an object appears
    whole or not at all, and folders are no more than parts of names."""
    if is_remote(path):
        text = io.StringIO()
        yield text
        as_path(path).write_bytes(text.getvalue().encode())
        return
    target = Path(os.path.realpath(path))  # a link stays a link
    if _is_open_file(path) or (target.exists() and not target.is_file()):
        with open(path, "w", encoding="utf-8") as f:
            yield f
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename cannot cross file systems; a name of its own, since others may write it at once.
    temporary = Path(f"{os.fspath(target)}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as f:
            yield f
            f.flush()
            with contextlib.suppress(OSError):  # not every file system can
                os.fsync(f.fileno())  # else a crash of the machine may leave the new name without its content
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes a whole text file; a reader sees the former one or the new one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(f"{folder}/a/b.json", "{}")
    ...     os.listdir(f"{folder}/a")
    ['b.json']
    """
    with atomic_writer(path) as f:
        f.write(text)


def clear_way(path: str | os.PathLike[str]) -> None:
    """Moves what is in the place of a file and is none, such as a folder, to `path`.damaged, with a warning.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     os.makedirs(f"{folder}/config.gin")
    ...     clear_way(f"{folder}/config.gin")
    ...     os.listdir(folder)
    ['config.gin.damaged']
    """
    if is_remote(path) or not os.path.lexists(path) or os.path.isfile(path):
        return  # in an object store a folder is a part of names, and in nobody's way
    target = free_path(path, "damaged")
    logging.getLogger("absl").warning("%s is not a file: moved to %s", path, target)
    os.rename(path, target)


def free_path(path: str | os.PathLike[str], suffix: str) -> str:
    """`path`.suffix, or with a number if that is taken.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(f"{folder}/a.damaged", "")
    ...     os.path.basename(free_path(f"{folder}/a", "damaged"))
    'a.damaged_2'
    """
    target, number = f"{os.fspath(path)}.{suffix}", 1
    while as_path(target).exists():
        number += 1
        target = f"{os.fspath(path)}.{suffix}_{number}"
    return target
