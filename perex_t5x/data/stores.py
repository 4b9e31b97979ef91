"""Where the rows of one task are kept: in memory, in an ArrayRecord file read through Grain, or in a bucket."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import numpy as np
from absl import logging

from perex_t5x import buckets, distributed, files
from perex_t5x.data import bucket_rows
from perex_t5x.data import rows as rows_lib
from perex_t5x.errors import ConfigError, TrainingError, is_full_disk

_DATA = "rows.array_record"
_META = "copy.json"

# Feeds over the same rows (training and its evaluation, a benchmark's two loops) share one copy
# for as long as one of them lives.
_shared: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class MemoryStore:
    """Rows in one array of records."""

    where = "in memory"

    def __init__(self, chunks: Iterable[np.ndarray], dtype: np.dtype):
        self.dtype = dtype
        self._records = np.concatenate([np.empty(0, dtype), *chunks])
        self.num_bytes = self._records.nbytes
        self.fingerprint = hashlib.sha256(rows_lib.raw_bytes(self._records)).hexdigest()

    def __len__(self) -> int:
        return len(self._records)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        return self._records[numbers]


class ArrayRecordStore:
    """Rows in an ArrayRecord file, one record per row, read through Grain."""

    where = "as ArrayRecord"

    def __init__(self, directory: str, dtype: np.dtype):
        import grain

        content = files.read_bytes(os.path.join(directory, _META))
        self.dtype = dtype
        try:
            meta = json.loads(content)
            self.fingerprint, self._size = str(meta["fingerprint"]), int(meta["num_rows"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
            raise ConfigError(
                f"The copy in {directory} cannot be read ({_META}: {e}): delete that folder and start again."
            ) from e
        path = os.path.join(directory, _DATA)
        self.where = f"as ArrayRecord in {directory}"
        self.num_bytes = os.path.getsize(path)
        if not os.path.isfile(path):  # a pipe would be waited for
            raise ConfigError(f"The copy in {directory} cannot be read ({_DATA} is no file): delete that folder.")
        try:
            self._source = cast(Any, grain.sources.ArrayRecordDataSource([path]))  # its own types leave its methods out
            found = len(self._source)
        except Exception as e:  # of a native library, of no particular class
            raise ConfigError(
                f"The copy in {directory} cannot be read ({_DATA}: {e}): delete that folder and start again."
            ) from e
        if found != self._size:
            raise ConfigError(
                f"The copy in {directory} holds {found} rows instead of {self._size}: "
                "delete that folder and start again."
            )

    def __len__(self) -> int:
        return self._size

    def read(self, numbers: np.ndarray) -> np.ndarray:
        try:
            records = self._source.__getitems__([int(n) for n in numbers])
            return np.frombuffer(b"".join(records), self.dtype)
        except Exception as e:  # of a native library, which compares checksums
            text = (str(e).strip() or type(e).__name__).splitlines()[0][:300]
            raise TrainingError(
                f"{self.where}: rows cannot be read: {text}. Delete that folder and start again."
            ) from e


def _remove_abandoned(cache_dir: str, name: str) -> None:
    """Removes what killed writers of this copy on this host left behind."""
    mine = f".{name}.{socket.gethostname()}."
    for entry in os.listdir(cache_dir):
        if entry.startswith(mine):
            pid = entry[len(mine) :].split(".")[0]
            if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and os.path.isdir("/proc"):
                shutil.rmtree(os.path.join(cache_dir, entry), ignore_errors=True)


def write_copy(directory: str, chunks: Iterable[np.ndarray]) -> None:
    """Writes a copy into `directory`: there in whole, or not at all."""
    from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue] (compiled)

    cache_dir, name = os.path.split(directory)
    os.makedirs(cache_dir, exist_ok=True)
    _remove_abandoned(cache_dir, name)
    unique = f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    partial = os.path.join(cache_dir, f".{name}.{unique}")
    os.mkdir(partial)
    try:
        writer = array_record_module.ArrayRecordWriter(os.path.join(partial, _DATA), "group_size:1")
        sha, num_rows = hashlib.sha256(), 0
        try:
            for chunk in chunks:
                sha.update(rows_lib.raw_bytes(chunk))
                for record in chunk:
                    writer.write(record.tobytes())
                num_rows += len(chunk)
        finally:
            writer.close()
        with open(os.path.join(partial, _META), "w") as f:
            json.dump({"num_rows": num_rows, "fingerprint": sha.hexdigest()}, f)
        try:
            os.rename(partial, directory)
        except OSError:
            if not os.path.exists(os.path.join(directory, _META)):
                raise
            # Another run was faster; its copy has the same name because it has the same content.
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _open_copy(directory: str, chunks: Callable[[], Iterable[np.ndarray]], dtype: np.dtype):
    def write_if_missing() -> None:
        if not os.path.exists(os.path.join(directory, _META)):
            logging.info("Writing an index-addressed copy to %s", directory)
            write_copy(directory, chunks())

    try:
        if jax.process_index() == 0:
            write_if_missing()
        distributed.barrier("copy of the data")
        write_if_missing()  # where the folder is on each host's own disk
        return ArrayRecordStore(directory, dtype)
    except OSError as e:
        if is_full_disk(e):
            raise
        raise ConfigError(
            f"DatasetConfig.cache_dir: the copy in {directory} can be neither read nor written: {e.strerror or e}. Delete "
            "that folder, or choose another cache_dir."
        ) from e


def _open_in_bucket(
    cfg: Any, name: str, chunks: Callable[[], Iterable[np.ndarray]], dtype: np.dtype
) -> bucket_rows.BucketStore:
    """Written by process 0, if it is not there; read by all, each the rows that it needs."""
    binding, directory = "DatasetConfig.cache_dir", f"{cfg.cache_dir.rstrip('/')}/{name}"
    buckets.check(cfg.cache_dir, binding, writes=False)
    if jax.process_index() == 0 and not bucket_rows.exists(directory):
        buckets.check(cfg.cache_dir, binding)
        logging.info("Writing an index-addressed copy to %s", directory)
        bucket_rows.write(directory, chunks(), dtype)
    distributed.barrier("copy of the data")
    return bucket_rows.BucketStore(directory, dtype, cfg.local_cache_bytes)


def open_store(
    task: Any, converter: Any, split: str, lengths: Mapping[str, int], cfg: Any, spec: Any
) -> MemoryStore | ArrayRecordStore | bucket_rows.BucketStore:
    """The rows of a task: read into memory, or found or written in `cfg.cache_dir`."""
    dtype = rows_lib.row_dtype(task, spec)

    def chunks() -> Iterable[np.ndarray]:
        return rows_lib.read_rows(task, converter, split, lengths, cfg, dtype)

    if cfg.cache_dir is None:
        shared = _shared.setdefault(task, weakref.WeakValueDictionary())
        key = (split, repr(lengths), type(converter), converter.pack)
        key += (cfg.trim_output_features, cfg.use_cached, str(dtype))
        store = shared.get(key)
        if store is None:
            store = shared[key] = MemoryStore(chunks(), dtype)
        return store
    files.check_path(cfg.cache_dir, "DatasetConfig.cache_dir")
    remote = files.is_remote(cfg.cache_dir)
    if remote and not cfg.cache_dir.startswith("gs://"):
        raise ConfigError(
            f"DatasetConfig.cache_dir = {cfg.cache_dir!r}: a copy is kept in a local or mounted folder or in a bucket "
            "(gs://BUCKET/FOLDER). Use one of these, or None to keep the copy in memory."
        )
    key = rows_lib.copy_key(task, converter, split, lengths, cfg, dtype)
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{task.name}-{split}")
    name = f"{safe}-{key[:16]}"
    if remote:
        return _open_in_bucket(cfg, name, chunks, dtype)
    return _open_copy(os.path.join(os.path.abspath(cfg.cache_dir), name), chunks, dtype)
