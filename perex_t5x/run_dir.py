"""A run's folder: whether all processes can write to it, whether there is room, and the model's summary in it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import logging
from etils import epath
from flax import linen as nn
from jax.tree_util import keystr

from perex_t5x import buckets, distributed, files, lease
from perex_t5x.cli import status
from perex_t5x.errors import (
    ConfigError,
    InUseError,
    TrainingError,
    UnreachableError,
    first_line,
    is_denied,
    writing_failed,
)

LOCK = ".writer"
_PROBE = ".seen_by_all_"
_WRITING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
_SECONDS = 60.0  # a network file system may take this long to show another host's new file


class WriterLock:
    """One run at a time writes to a folder. Process 0 holds the lock for all processes of the run."""

    def __init__(self, folder: str):
        self._folder = folder
        self._lease: lease.Lease | None = None
        self._handle: int | None = None  # of the folder on a file system; open, so that no other one gets its number

    def acquire(self) -> None:
        """Raises `InUseError` if another run writes to the folder; waits for one that may be gone, on another machine."""
        writer = lease.Lease(os.path.join(self._folder, LOCK))
        try:
            writer.acquire(patient=True)
        except lease.HeldError as e:
            raise self._in_use(str(e.holder)) from None
        except OSError as e:
            raise ConfigError(
                f"MODEL_DIR = {self._folder!r}: {LOCK} in it, which says who writes there, cannot be used: "
                f"{e.strerror or e}. Remove it if no run does, or choose another folder."
            ) from e
        self._lease = writer
        if not files.is_remote(self._folder):
            self._handle = os.open(self._folder, os.O_RDONLY)

    def release(self) -> None:
        """May be called twice."""
        held, self._lease = self._lease, None
        if held is not None:
            held.release()
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def raise_if_lost(self) -> None:
        """Raises `InUseError` if another run has taken over, since this one stood still for minutes.

        Raises `TrainingError` if the folder is gone: what the run wrote into another one would be all that is there.
        """
        if self._lease is not None and self._lease.is_lost:
            raise self._in_use("unknown, which has taken over from this one, as it had stood still")
        if self._handle is not None and not self._is_same_folder(self._handle):
            raise TrainingError(
                f"MODEL_DIR = {self._folder!r} was removed or replaced while the run wrote there, and with it what the run "
                "had written. Put it back if you can; the same command resumes from what it finds there."
            )

    def _is_same_folder(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self._folder))
        except FileNotFoundError:
            return False

    def _in_use(self, who: str) -> InUseError:
        return InUseError(
            f"MODEL_DIR = {self._folder!r}: another run writes there (process {who}). Wait for its end, stop it, or choose "
            "another folder with --gin.MODEL_DIR=..."
        )


def prepare(
    folder: str,
    checkpoint_bytes: int = 0,
    dry_run: bool = False,
    *,
    binding: str = "MODEL_DIR",
    lock: WriterLock | None = None,
) -> None:
    """Makes the folder, first in process 0; raises `ConfigError` if it cannot be used.

    It has to be writable, with room for one checkpoint, and the same folder for all processes. A dry run leaves no folder
    behind that was not there. In a bucket (gs://...) the process must be able to make, read, list and delete objects.

    Args:
      lock: acquired before anything in the folder is changed; None: the files are nobody else's.
    """
    if not distributed.is_writer():
        buckets.check(folder, binding, writes=False)
    if distributed.is_writer():
        _make_writable(folder, checkpoint_bytes, dry_run, binding)
    if dry_run:
        return
    if lock is not None and distributed.is_writer():
        lock.acquire()
    status.in_folder(folder)
    if distributed.group() is None:
        return
    probe = epath.Path(folder) / distributed.from_process_0("probe", lambda: _leave_probe(folder))
    deadline = time.monotonic() + _SECONDS
    while not probe.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{binding} = {folder!r}: process 0 wrote a file there that this process does not see. Checkpoints are "
                "written by all processes together, so the folder must be on storage that they share, such as gs:// or a "
                "network file system."
            )
        time.sleep(0.1)
    if not distributed.is_writer() and not files.is_remote(folder):
        _make_writable(folder, checkpoint_bytes, binding=binding)
    distributed.barrier("probe seen")
    if distributed.is_writer():
        probe.unlink()


@contextlib.contextmanager
def explained_writes(folder: str, binding: str) -> Iterator[None]:
    """Errors of writing to the folder in the block, in a line; whatever else fails there is raised as it is."""
    try:
        yield
    except Exception as e:
        # Only a write says that it has no room or no right to, and libraries of object stores name the object.
        if getattr(e, "errno", None) not in _WRITING and folder not in str(e):
            raise
        text = getattr(e, "strerror", None) or first_line(e)
        raise writing_failed(
            f"{binding} = {folder!r}: writing failed: {text}. Free some space, grant the permission or choose another "
            "folder, and start the same command again.",
            e,
        ) from e


def _leave_probe(folder: str) -> str:
    """Writes a file that only this run can have written; returns its name."""
    for old in epath.Path(folder).glob(f"{_PROBE}*"):  # of a run that was killed here
        logging.info("removing %s", old)
        old.unlink()
    name = f"{_PROBE}{uuid.uuid4().hex}"
    (epath.Path(folder) / name).write_text("")
    return name


def _make_remote(folder: str, binding: str) -> None:
    """What the client library can do, TensorFlow may not: it looks for credentials by itself."""
    try:
        epath.Path(folder).mkdir(parents=True, exist_ok=True)
    except Exception as e:
        text = (str(e).strip() or type(e).__name__).splitlines()[0]
        if not is_denied(e):
            raise UnreachableError(f"{binding} = {folder!r} cannot be made: {text}") from e
        raise ConfigError(
            f"{binding} = {folder!r}: TensorFlow may not write there, though Cloud Storage's client may: {text}. TensorFlow "
            "knows service accounts, `gcloud auth application-default login` and the machines of Google Cloud; other "
            "credentials, such as workload identity federation, it does not."
        ) from e


def _make_writable(model_dir: str, checkpoint_bytes: int, dry_run: bool = False, binding: str = "MODEL_DIR") -> None:
    buckets.check(model_dir, binding)
    if files.is_remote(model_dir):
        if not dry_run:
            _make_remote(model_dir, binding)
        return
    existed = os.path.isdir(model_dir)
    try:
        os.makedirs(model_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=model_dir) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as e:
        raise ConfigError(
            f"{binding} = {model_dir!r} cannot be written: {e.strerror or e}. Choose a folder that can, with "
            f"--gin.{binding}=..., or free some space."
        ) from e
    free = shutil.disk_usage(model_dir).free
    if dry_run and not existed:
        os.rmdir(model_dir)
    # The next checkpoint is written before an old one is removed.
    if free < checkpoint_bytes:
        raise ConfigError(
            f"{binding} = {model_dir!r} has {free / 1e6:,.1f} MB free, but one checkpoint of this run takes about "
            f"{checkpoint_bytes / 1e6:,.1f} MB. Free some space or choose another folder with --gin.{binding}=..."
        )


def tree_bytes(tree: Any) -> int:
    """Bytes of all leaves.

    >>> tree_bytes({"w": jax.ShapeDtypeStruct((2, 3), "float32")})
    24
    """
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def summarize_model(boxed_params: Any, state_shapes: Any) -> str:
    """Parameters and bytes in one line."""
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(nn.meta.unbox(boxed_params)))
    return f"{total:,} parameters; state {tree_bytes(state_shapes) / 1e6:,.1f} MB (parameters and optimizer)"


def write_model_info(model_dir: str, boxed_params: Any, shardings: Any, further: Sequence[str]) -> None:
    """Writes `model-info.txt`: each parameter with shape, logical axes and mesh axes, and further lines."""
    params = jax.tree.leaves(boxed_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))
    lines = []
    for leaf, (path, sharding) in zip(params, jax.tree_util.tree_leaves_with_path(shardings), strict=True):
        names = leaf.names if isinstance(leaf, nn.LogicallyPartitioned) else ()
        value: Any = getattr(leaf, "value", leaf)
        name, size = keystr(path, simple=True, separator="/"), math.prod(value.shape)
        lines.append(f"{name:<64} {size:>14,}  {tuple(value.shape)!s:<24} {tuple(names)!s:<28} {sharding.spec}")
    path = os.path.join(model_dir, "model-info.txt")
    files.clear_way(path)
    with _written(path):
        epath.Path(path).write_text("\n".join([*lines, "", *filter(None, further), ""]))


def append_model_info(model_dir: str, line: str) -> None:
    """Adds a line to `model-info.txt`."""
    path = epath.Path(model_dir) / "model-info.txt"
    with _written(path):
        path.write_text(f"{path.read_text()}{line}\n")


@contextlib.contextmanager
def _written(path: str | os.PathLike[str]) -> Iterator[None]:
    """An error of the file system becomes one that says which file is in the way."""
    try:
        yield
    except OSError as e:
        text = f"{os.fspath(path)} cannot be written: {e.strerror or e}. Remove it, or choose another MODEL_DIR."
        raise writing_failed(text, e) from e
