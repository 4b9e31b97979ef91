"""Carries a plan out: everything is written under a temporary name, and gets its own at the end, or nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator

from perex_t5x import extras, files
from perex_t5x.checkpoint_formats import legacy, orbax, safetensors_files
from perex_t5x.checkpoint_formats.leaves import Leaf
from perex_t5x.checkpoint_formats.plan import Plan
from perex_t5x.errors import ConfigError, NoSpaceError, first_line, is_full_disk, writing_failed

# Written last into a bucket, where files appear one by one: without them there is no checkpoint.
_MARKS = ("commit_success.txt", "checkpoint", safetensors_files.INDEX, safetensors_files.MODEL)


def check_target(target: str, plan: Plan) -> None:
    """Raises `ConfigError` where something is in the way, and where an extra is missing."""
    if plan.options.to == "safetensors":
        extras.require("convert", "--to=safetensors")
    if files.as_path(target).exists() or os.path.lexists(target):
        raise ConfigError(f"{target} exists already. Name another target, or remove it first.")


def convert(plan: Plan, target: str, *, max_shard_bytes: int = 5_000_000_000) -> None:
    """Writes a checkpoint, a folder or a file. Raises before anything is at `target` if that fails.

    Args:
      target: must not exist. Of safetensors, a name that ends in '.safetensors' gives one file with all leaves.
      max_shard_bytes: above this size a model gets several files, and their index.
    """
    check_target(target, plan)
    with _staged(target) as staging, _explained(target):
        if plan.options.to == "legacy":
            os.mkdir(staging)
            legacy.write(staging, plan.leaves, plan.empty)
        elif plan.options.to == "orbax":
            orbax.write(staging, plan.leaves, plan.empty)
        elif target.endswith(".safetensors"):
            safetensors_files.write_file(staging, _targets(plan), plan.metadata)
        else:
            os.mkdir(staging)
            _write_folder(plan, staging, max_shard_bytes)


def _targets(plan: Plan, *, model: bool | None = None) -> list[Leaf]:
    return [s.leaf for s in plan.steps if s.leaf is not None and model in (None, s.is_model)]


def _write_folder(plan: Plan, folder: str, max_shard_bytes: int) -> None:
    safetensors_files.write_model(folder, _targets(plan, model=True), plan.metadata, max_shard_bytes)
    if rest := _targets(plan, model=False):
        safetensors_files.write_file(os.path.join(folder, safetensors_files.TRAIN_STATE), rest, {})
    if plan.config is not None:
        text = json.dumps(plan.config, indent=2, sort_keys=True)
        files.write_atomically(os.path.join(folder, safetensors_files.CONFIG), text + "\n")


@contextlib.contextmanager
def _staged(target: str) -> Iterator[str]:
    """A local name to write under; at the end it becomes the target, after an error nothing is left of it."""
    if files.is_remote(target):
        with tempfile.TemporaryDirectory(prefix="perex_t5x_") as folder:
            staging = os.path.join(folder, "converted")
            yield staging
            with _explained(target):
                _upload(staging, target)
        return
    parent = os.path.dirname(target)
    missing = parent
    made = []
    while missing and not os.path.lexists(missing):
        made.append(missing)
        missing = os.path.dirname(missing)
    staging = f"{target}.{os.getpid()}.converting"
    try:
        with _explained(target):
            os.makedirs(parent, exist_ok=True)
        yield staging
        with _explained(target):
            if os.path.lexists(target):
                raise ConfigError(f"{target} exists by now: another process has made it.")
            os.rename(staging, target)
    except BaseException:
        if os.path.isdir(staging):
            shutil.rmtree(staging, ignore_errors=True)
        for leftover in _beside(staging):
            shutil.rmtree(leftover, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(staging)
        for folder in made:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        raise


def _beside(staging: str) -> list[str]:
    """What Orbax has not finished."""
    parent, name = os.path.split(staging)
    with contextlib.suppress(OSError):
        return [os.path.join(parent, n) for n in os.listdir(parent) if n.startswith(f"{name}.orbax-checkpoint-tmp")]
    return []


def _upload(staging: str, target: str) -> None:
    from etils import epath

    remote = epath.Path(target)
    if os.path.isfile(staging):
        epath.Path(staging).copy(remote)
        return
    names = [
        os.path.relpath(os.path.join(folder, name), staging)
        for folder, _, inside in os.walk(staging)
        for name in inside
    ]  # fmt: skip
    try:
        for name in sorted(names, key=lambda name: (name in _MARKS, name)):
            (remote / name).parent.mkdir(parents=True, exist_ok=True)
            epath.Path(staging, name).copy(remote / name)
    except BaseException:
        with contextlib.suppress(Exception):
            remote.rmtree()
        raise


@contextlib.contextmanager
def _explained(target: str) -> Iterator[None]:
    """Errors of writing, as ours."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as e:
        # TensorStore's and Orbax's errors are no OSErrors.
        full = next((words for words in ("No space left on device", "Disk quota exceeded") if words in str(e)), None)
        if full or is_full_disk(e):
            raise NoSpaceError(f"cannot write {target}: {full or first_line(e)}. Nothing is left of it.") from e
        message = f"cannot write {target}: {first_line(e)[:300]}. Nothing is left of it."
        if isinstance(e, MemoryError) or not isinstance(e, OSError | ValueError):
            raise
        raise writing_failed(message, e) from e
