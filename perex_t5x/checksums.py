"""Sizes and checksums of all files of a folder, kept in a file beside them, so that damage is found before it is used.

    checksums.write(folder)      folder/checksums.json: {"algorithm": "crc32c", "files": {"state/d/0f": [4096, "1c2d3e4f"]}}
    checksums.problems(folder)   what has changed since

CRC32C is what Cloud Storage keeps of every object: there both are one list, and no data are read. On a disk all files are
read once. A folder that is copied from one to the other is checked as well as before.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from perex_t5x import buckets, files

FILE = "checksums.json"
_UNRECORDED = (FILE, "commit_success.txt")  # written last, by us and by Orbax; the second is a mark without content
_CHUNK = 1 << 22  # bytes read at a time


@dataclass(frozen=True)
class _Entry:
    """A file as it is; its checksum is only computed where it is asked for."""

    size: int
    checksum: Callable[[], str]


def write(folder: str | os.PathLike[str]) -> None:
    """Records all files of a folder, which nobody writes any more.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files.write_atomically(f"{folder}/a/b", "123456789")
    ...     write(folder)
    ...     before = problems(folder)
    ...     files.write_atomically(f"{folder}/a/b", "123456780")
    ...     (before, problems(folder))
    ([], ['a/b: its content has changed'])
    """
    entries = _entries(folder)
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda entry: entry.checksum(), entries.values()))
    recorded = {name: [e.size, checksum] for (name, e), checksum in zip(entries.items(), sums, strict=True)}
    text = json.dumps({"algorithm": "crc32c", "files": recorded}, indent=0, sort_keys=True)
    files.write_atomically(os.path.join(folder, FILE), text + "\n")


def problems(folder: str | os.PathLike[str], *, contents: bool = True) -> list[str] | None:
    """How the files differ from what was recorded, one line each; None where nothing was recorded.

    Args:
      folder: where `write` has been.
      contents: False: only whether all are there, in their sizes; nothing is read.
    """
    path = files.as_path(os.path.join(folder, FILE))
    if not path.exists():
        return None
    try:
        content = json.loads(files.read_bytes(path))
        recorded = {name: (int(size), str(checksum)) for name, (size, checksum) in content["files"].items()}
        known = content["algorithm"] == "crc32c"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return [f"{FILE} cannot be read"]
    if not known:
        return [f"{FILE} names another algorithm than crc32c"]
    try:
        entries = _entries(folder)
    except OSError as e:
        return [f"cannot be listed: {e.strerror or e}"]
    with ThreadPoolExecutor(8) as pool:
        compared = pool.map(
            lambda name: _difference(name, *recorded[name], entry=entries.get(name), contents=contents), recorded
        )
        return [line for line in compared if line]


def _difference(name: str, size: int, checksum: str, entry: _Entry | None, contents: bool) -> str:
    if entry is None:
        return f"{name} is missing"
    if entry.size != size:
        return f"{name} has {entry.size} bytes instead of {size}"
    try:
        return "" if not contents or entry.checksum() == checksum else f"{name}: its content has changed"
    except OSError as e:
        return f"{name} cannot be read: {e.strerror or e}"


def _entries(folder: str | os.PathLike[str]) -> dict[str, _Entry]:
    found = _objects(folder) if os.fspath(folder).startswith("gs://") else _files(folder)
    return {name: entry for name, entry in sorted(found.items()) if name not in _UNRECORDED}


def _objects(folder: str | os.PathLike[str]) -> dict[str, _Entry]:
    bucket, prefix = buckets.split(folder)
    found = {}
    for blob in buckets.client(public=True).list_blobs(bucket, prefix=f"{prefix}/", **buckets.request_options()):
        name = blob.name.removeprefix(f"{prefix}/")
        if name and not name.endswith("/"):  # marks of folders
            found[name] = _Entry(blob.size, lambda crc=blob.crc32c: base64.b64decode(crc).hex())
    return found


def _files(folder: str | os.PathLike[str]) -> dict[str, _Entry]:
    root = files.as_path(folder)
    found = {}

    def walk(path: Any, prefix: str) -> None:
        for child in path.iterdir():
            if child.is_dir():
                walk(child, f"{prefix}{child.name}/")
            else:
                found[f"{prefix}{child.name}"] = _Entry(child.stat().st_size, lambda child=child: _crc32c(child))

    walk(root, "")
    return found


def of_bytes(content: bytes, before: str = "00000000") -> str:
    """The checksum of some bytes, or of these after others, whose checksum is `before`.

    >>> of_bytes(b"123456789"), of_bytes(b"6789", before=of_bytes(b"12345"))
    ('e3069283', 'e3069283')
    """
    import google_crc32c

    return f"{google_crc32c.extend(int(before, 16), content):08x}"


def _crc32c(path: Any) -> str:
    value = of_bytes(b"")
    with path.open("rb") as f:
        while chunk := f.read(_CHUNK):
            value = of_bytes(chunk, value)
    return value
