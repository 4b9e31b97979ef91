"""A run's folder: can it be written, is there room, and what the model in it is."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from typing import Any

import jax
from etils import epath
from flax import linen as nn

from perex_t5x.errors import ConfigError
from perex_t5x.partitioning import path_name


def prepare(model_dir: str, checkpoint_bytes: int = 0, dry_run: bool = False) -> None:
    """Makes the folder; raises `ConfigError` if it cannot be written or has no room for one checkpoint.

    A dry run leaves no folder behind that was not there.

    Remote folders (gs://...) are left to the storage layer.
    """
    if "://" in model_dir:
        epath.Path(model_dir).mkdir(parents=True, exist_ok=True)
        return
    existed = os.path.isdir(model_dir)
    try:
        os.makedirs(model_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=model_dir) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as e:
        raise ConfigError(
            f"MODEL_DIR = {model_dir!r} cannot be written: {e.strerror or e}. Choose a folder that can, with "
            "--gin.MODEL_DIR=..., or free some space."
        ) from e
    free = shutil.disk_usage(model_dir).free
    if dry_run and not existed:
        os.rmdir(model_dir)
    # The next checkpoint is written before an old one is removed.
    if free < checkpoint_bytes:
        raise ConfigError(
            f"MODEL_DIR = {model_dir!r} has {free / 1e6:,.1f} MB free, but one checkpoint of this run takes about "
            f"{checkpoint_bytes / 1e6:,.1f} MB. Free some space or choose another folder with --gin.MODEL_DIR=..."
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


def write_model_info(model_dir: str, boxed_params: Any, shardings: Any, summary: str) -> None:
    """Writes `model-info.txt`: each parameter with shape, logical axes and mesh axes, and the summary."""
    params = jax.tree_util.tree_leaves_with_path(boxed_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))
    lines = []
    for (path, leaf), sharding in zip(params, jax.tree.leaves(shardings), strict=True):
        names = leaf.names if isinstance(leaf, nn.LogicallyPartitioned) else ()
        value = getattr(leaf, "value", leaf)
        size = math.prod(value.shape)
        name = path_name([key for key in path if getattr(key, "name", None) != "value"])
        lines.append(f"{name:<64} {size:>14,}  {tuple(value.shape)!s:<24} {tuple(names)!s:<28} {sharding.spec}")
    (epath.Path(model_dir) / "model-info.txt").write_text("\n".join([*lines, "", summary, ""]))
