"""Orbax's format, which T5X's later checkpoints and ours are in: `state/`, OCDBT or a zarr folder for each leaf.

Names, shapes and dtypes come from Orbax; leaves are opened with TensorStore, so that a part of one can be read, and seen
with its axes in another order. A checkpoint is written as `perex_t5x.saving` does, with checksums.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from perex_t5x import background, checksums, files
from perex_t5x.checkpoint_files import RECORDED
from perex_t5x.checkpoint_formats import leaves as leaves_lib
from perex_t5x.checkpoint_formats.leaves import Contents, Leaf

_METADATA = "_METADATA"


def read(path: str) -> Contents:
    """Names, shapes and dtypes of a checkpoint, `checkpoint_<step>/` with `state/` in it, or such a `state/` itself."""
    import orbax.checkpoint as ocp
    from etils import epath
    from flax import traverse_util

    folder = path if (files.as_path(path) / _METADATA).exists() else f"{path}/state"
    with leaves_lib.reading(path):
        tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder)).tree
        described = json.loads(files.read_bytes(f"{folder}/{_METADATA}"))
        flat = traverse_util.flatten_dict(tree, sep="/", keep_empty_nodes=True)
    ocdbt = (files.as_path(folder) / "manifest.ocdbt").exists()
    driver = "zarr3" if described.get("use_zarr3") else "zarr"
    leaves, empty = {}, {}
    value: Any
    for name, value in flat.items():
        if value is None or value is traverse_util.empty_node:
            empty[name] = None if value is None else {}
            continue
        with leaves_lib.reading(path, name):
            shape, dtype = tuple(value.shape), value.dtype
        inside = name.replace("/", ".")
        store = leaves_lib.kvstore(folder if ocdbt else f"{folder}/{inside}")
        if ocdbt:
            store = {"driver": "ocdbt", "base": store, "path": f"{inside}/"}
        spec = {"driver": driver, "kvstore": store}
        leaves[name] = leaves_lib.of_store(name, shape, dtype, "ocdbt" if ocdbt else "zarr", path, spec)
    return Contents(path, "orbax", f"{'OCDBT' if ocdbt else 'files'}, {driver}", leaves, empty)


def write(folder: str, leaves: Iterable[Leaf], empty: Mapping[str, Any]) -> None:
    """Writes a checkpoint into a local folder that is not there. All leaves are in memory at once: Orbax takes a tree."""
    import jax
    import orbax.checkpoint as ocp
    from flax import traverse_util

    from perex_t5x import saving  # noqa: F401 (once imported, it hides what Orbax's threads print of a write that fails)

    flat = {leaf.name: leaf.read() for leaf in leaves}
    tree = traverse_util.unflatten_dict({**flat, **empty}, sep="/")
    # Nobody changes these arrays while they are written: there is no need of copies.
    handler = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, handler), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    state = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(state=state)) as checkpointer:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(tree))
        with background.uninterrupted():
            checkpointer.save(os.path.abspath(folder), args=args, custom_metadata=RECORDED)
    with open(os.path.join(folder, "commit_success.txt"), "w", encoding="utf-8"):
        pass  # what a checkpoint in a bucket is known by
    checksums.write(folder)
