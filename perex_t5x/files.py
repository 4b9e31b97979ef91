"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO]:
    """A file that replaces `path` once the block has ended without an error; until then, and after an error, `path` is as
    it was. Its folder is made if it does not exist."""
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # In the same folder, since a rename cannot cross file systems; a name of its own, since others may write it at once.
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())  # else a crash of the machine may leave the new name without its content
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file; on object stores (gs://...) through `epath`, since a write there is whole in any case."""
    if "://" in os.fspath(path):
        from etils import epath

        epath.Path(path).parent.mkdir(parents=True, exist_ok=True)
        epath.Path(path).write_text(text)
        return
    with atomic_writer(path) as f:
        f.write(text)
