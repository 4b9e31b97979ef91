"""Rows of one task in a bucket, addressed by number, with a cache on the local disk in front.

In the bucket the rows are a Zarr array of bytes [rows, bytes of a row] in parts of 64 MB, which TensorStore writes and
reads: a read fetches only the blocks (128 kB) that hold the wanted rows, many at a time, each with its checksum. `copy.json`
is written last: without it there is no copy. ArrayRecord, the format of local copies, is read from local and mounted files
only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from perex_t5x.errors import ConfigError, UnreachableError

_META = "copy.json"
_ARRAY = "rows"
_BLOCK_BYTES = 128 << 10
_PART_BYTES = 64 << 20
_MOST_ROWS = 1 << 40  # the array's declared size; how many there are is in copy.json, as it is known only at the end
_INDEX_BYTES = 64 << 20  # of memory, for the parts' indices and the blocks read last
_CHECKSUM_BYTES = 4


def exists(directory: str) -> bool:
    return _read_meta(directory) is not None


def _read_meta(directory: str) -> dict[str, Any] | None:
    import tensorstore

    with _explained(directory):
        found = tensorstore.KvStore.open(f"{directory}/").result().read(_META).result()
    if found.state != "value":
        return None
    try:
        return json.loads(found.value)
    except ValueError as e:
        raise _damaged(directory, f"{_META} is no JSON") from e


def write(directory: str, chunks: Iterable[np.ndarray], dtype: np.dtype) -> None:
    """Writes a copy; a killed writer leaves parts without `copy.json`, which the next one overwrites."""
    import tensorstore

    block = max(1, _BLOCK_BYTES // dtype.itemsize)
    part = max(1, _PART_BYTES // (block * dtype.itemsize)) * block
    sharding = {
        "chunk_shape": [block, dtype.itemsize],
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }
    metadata = {
        "shape": [_MOST_ROWS, dtype.itemsize],
        "data_type": "uint8",
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [part, dtype.itemsize]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    spec = _spec(directory) | {"metadata": metadata, "store_data_equal_to_fill_value": True}
    # Another run may write the same copy at this moment: the same parts with the same content.
    with _explained(directory):
        array = tensorstore.open(spec, create=True, open=True).result()
    sha, num_rows, writing = hashlib.sha256(), 0, None
    for rows in _parts(chunks, part):
        content = rows.tobytes()
        sha.update(content)
        data = np.frombuffer(content, np.uint8).reshape(len(rows), dtype.itemsize)
        with _explained(directory):
            if writing is not None:
                writing.result()
            writing = array[num_rows : num_rows + len(rows)].write(data)
        num_rows += len(rows)
    meta = {"num_rows": num_rows, "fingerprint": sha.hexdigest(), "block_rows": block}
    with _explained(directory):
        if writing is not None:
            writing.result()
        tensorstore.KvStore.open(f"{directory}/").result().write(_META, json.dumps(meta).encode()).result()


def _parts(chunks: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """The same rows in arrays of `size` rows; the last may have fewer.

    >>> [x.tolist() for x in _parts([np.arange(3), np.arange(3, 4), np.arange(4, 9)], 4)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    """
    held: list[np.ndarray] = []
    for chunk in chunks:
        held.append(chunk)
        while sum(map(len, held)) >= size:
            rows = np.concatenate(held)
            yield rows[:size]
            held = [rows[size:]]
    if rest := [x for x in held if len(x)]:
        yield np.concatenate(rest)


class BucketStore:
    """Rows in a bucket. A block that was read once is read from the local disk the next time.

    Args:
      directory: of the copy, gs://...
      dtype: of a row.
      cache_bytes: how much of the local disk the cache of all such copies may take; 0: no cache.
    """

    def __init__(self, directory: str, dtype: np.dtype, cache_bytes: int = 0):
        import tensorstore

        self.dtype, self._directory = dtype, directory
        meta = _read_meta(directory)
        if meta is None:
            raise _damaged(directory, f"there is no {_META}")
        with _explained(directory):
            limits = tensorstore.Context({"cache_pool": {"total_bytes_limit": _INDEX_BYTES}})
            spec = _spec(directory) | {"recheck_cached_data": False, "recheck_cached_metadata": False}
            self._array = tensorstore.open(spec, open=True, read=True, context=limits).result()
        self.fingerprint, self._size, self._block = meta["fingerprint"], meta["num_rows"], meta["block_rows"]
        if self._array.shape[1] != dtype.itemsize:
            raise _damaged(directory, f"its rows have {self._array.shape[1]} bytes instead of {dtype.itemsize}")
        self.num_bytes = self._size * dtype.itemsize
        self._cache = None
        if cache_bytes > 0:  # named by the content: a copy that is written again may differ
            name = f"{os.path.basename(directory)}-{self.fingerprint[:16]}"
            self._cache = BlockCache(local_folder(), name, dtype.itemsize, cache_bytes)
        self.where = f"in {directory}" + (f", blocks read once also in {self._cache.folder}" if self._cache else "")

    def __len__(self) -> int:
        return self._size

    def read(self, numbers: np.ndarray) -> np.ndarray:
        wanted = np.asarray(numbers) // self._block
        distinct = {int(b) for b in wanted}
        blocks: dict[int, bytes] = {}
        if self._cache:
            cached = {b: self._cache.read(b, self._rows_of(b)) for b in distinct}
            blocks = {b: data for b, data in cached.items() if data is not None}
        missing = [b for b in distinct if b not in blocks]
        with _explained(self._directory):
            reads = [self._array[b * self._block : b * self._block + self._rows_of(b)].read() for b in missing]
            for b, reading in zip(missing, reads, strict=True):
                blocks[b] = np.ascontiguousarray(reading.result()).tobytes()
                if self._cache:
                    self._cache.write(b, blocks[b])
        records = np.empty(len(wanted), self.dtype)
        for i, (number, b) in enumerate(zip(numbers, wanted, strict=True)):
            records[i] = np.frombuffer(
                blocks[int(b)], self.dtype, 1, (int(number) % self._block) * self.dtype.itemsize
            )[0]
        return records

    def _rows_of(self, block: int) -> int:
        return min(self._block, self._size - block * self._block)


# --- the local disk ---------------------------------------------------------------------------------------------------


def local_folder() -> Path:
    """$XDG_CACHE_HOME/perex_t5x/rows, by default in ~/.cache; in the temporary folder where that cannot be written."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perex_t5x" / "rows"
    with contextlib.suppress(OSError):
        usual.mkdir(parents=True, exist_ok=True)
    return usual if os.access(usual, os.W_OK) else Path(tempfile.gettempdir()) / f"perex_t5x_rows_{os.getuid()}"


class BlockCache:
    """Blocks of one copy on the local disk, one file each: written beside its place and renamed, with a checksum.

    Processes of a host share it. All copies together take at most `limit` bytes: those that were opened longest ago are
    removed first; once this copy alone fills the limit, no more is stored. What is missing or damaged is just read again.
    """

    def __init__(self, root: Path, name: str, row_bytes: int, limit: int):
        self.folder, self._row_bytes = root / name, row_bytes
        self._left, self._lock = 0, threading.Lock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.utime(self.folder)
            self._left = limit - _make_room(root, name, limit)
        except OSError as e:
            logging.warning("no cache of rows in %s: %s", self.folder, e)

    def read(self, block: int, rows: int) -> bytes | None:
        try:
            content = self._path(block).read_bytes()
        except OSError:
            return None
        data, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        return data if checksum == _checksum(data) and len(data) == rows * self._row_bytes else None

    def write(self, block: int, data: bytes) -> None:
        with self._lock:
            if self._left < len(data):
                return
            self._left -= len(data)
        path = self._path(block)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(data + _checksum(data))
            temporary.replace(path)
        except OSError as e:  # a full disk: the rows are still in the bucket
            with self._lock:
                self._left = 0
            logging.warning("no more rows are stored in %s: %s", self.folder, e)
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _path(self, block: int) -> Path:
        return self.folder / f"{block // 4096:06d}" / f"{block:010d}"


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "little")


def _make_room(root: Path, name: str, limit: int) -> int:
    """Removes half-written files, and other copies until `limit` is kept. Returns the bytes that are left of all copies."""
    sizes: dict[Path, int] = {}
    for copy in sorted((c for c in root.iterdir() if c.is_dir()), key=lambda c: c.stat().st_mtime):
        sizes[copy] = 0
        for path in (Path(top, name) for top, _, names in os.walk(copy) for name in names):
            with contextlib.suppress(OSError):  # another process may remove it
                if path.suffix == ".tmp" and not os.path.exists(f"/proc/{path.name.split('.')[-3]}"):
                    path.unlink()
                else:
                    sizes[copy] += path.stat().st_size
    for copy in list(sizes):
        if sum(sizes.values()) > limit and copy.name != name:
            shutil.rmtree(copy, ignore_errors=True)
            del sizes[copy]
    return sum(sizes.values())


# --- errors -----------------------------------------------------------------------------------------------------------


def _spec(directory: str) -> dict[str, Any]:
    # A part that is missing must not be read as zeros.
    return {"driver": "zarr3", "kvstore": f"{directory}/{_ARRAY}/", "fill_missing_data_reads": False}


def _damaged(directory: str, reason: str) -> ConfigError:
    return ConfigError(
        f"The copy of the data in {directory} is damaged: {reason}. Remove it (gcloud storage rm --recursive {directory}); "
        "the next run writes it again."
    )


@contextlib.contextmanager
def _explained(directory: str) -> Iterator[None]:
    """TensorStore's errors, as ours. It retries what passes by itself, for minutes, before it gives up."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as e:
        text = str(e).splitlines()[0] if str(e) else type(e).__name__
        if text.startswith(("DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION", "OUT_OF_RANGE")):
            raise _damaged(directory, text) from e
        if text.startswith("PERMISSION_DENIED") or "permission" in text.lower():
            raise ConfigError(f"DatasetConfig.cache_dir: {directory} cannot be used: {text}") from e
        raise UnreachableError(f"DatasetConfig.cache_dir: {directory} cannot be read or written: {text}") from e
