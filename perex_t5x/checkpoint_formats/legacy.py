"""T5X's first format: `checkpoint`, a msgpack file of a nested dictionary, and a zarr folder for each large leaf.

    {'version': 3, 'optimizer': {'target': {...}, 'state': {'step': ..., 'param_states': {...}}}}

A leaf of the dictionary is an array, or the TensorStore spec of a folder beside the file. Read are version 3 (since June
2021), version 2, whose zarr folders hold bfloat16 as uint16, and what Orbax wrote into such a file before it had a format of
its own. T5X itself reads no older ones.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from perex_t5x import background, files
from perex_t5x.checkpoint_files import DamagedError, legacy_file
from perex_t5x.checkpoint_formats import leaves as leaves_lib
from perex_t5x.checkpoint_formats.leaves import Contents, Leaf
from perex_t5x.errors import ConfigError

VERSION = 3
_READ = (2, 3)
_PLACEHOLDER = "PLACEHOLDER://"  # Orbax's, before a folder's name
_IN_MSGPACK = 1024  # bytes; larger leaves get a folder
_CHUNK = 64 << 20  # bytes; about the size of T5X's chunks


class UnknownVersionError(ConfigError):
    """A checkpoint whose format nobody reads any more, or not yet."""


def read(path: str) -> Contents:
    """Names, shapes and dtypes of a checkpoint: of a folder with a file `checkpoint`, or of that file.

    Raises `DamagedError`, `UnknownVersionError`, or `ConfigError` for what is no checkpoint.
    """
    file = legacy_file(path)
    if file is None:
        raise ConfigError(f"{path} is no checkpoint of T5X: there is no file `checkpoint` in it.")
    tree = _read_msgpack(path, file)
    folder = os.path.dirname(file)
    version, tree = _version(path, tree)
    leaves, empty = {}, {}
    for name, value in _flatten(tree):
        if value is None or (isinstance(value, Mapping) and not value):
            empty[name] = value
        elif isinstance(value, Mapping):
            leaves[name] = _of_spec(path, folder, name, value, version)
        elif isinstance(value, str) and value.startswith(_PLACEHOLDER):
            leaves[name] = _of_folder(path, folder, name, value.removeprefix(_PLACEHOLDER))
        elif isinstance(value, np.ndarray | np.generic | int | float | bool):
            leaves[name] = leaves_lib.of_array(name, np.asarray(value), "msgpack", path)
        else:
            raise DamagedError(f"checkpoint {path} is damaged: {name} is a {type(value).__name__}, and no array.")
    if not leaves:
        raise ConfigError(f"{path}: there is no array in this checkpoint.")
    return Contents(path, "legacy", str(version), leaves, empty)


def _read_msgpack(path: str, file: str) -> dict[str, Any]:
    from flax import serialization

    with leaves_lib.reading(path, os.path.basename(file)):
        content = files.read_bytes(file)
    if content.startswith(b"model_checkpoint_path"):
        raise ConfigError(
            f"{path} is a checkpoint of TensorFlow, as Mesh TensorFlow's T5 wrote them. It is not read here: convert it "
            "with T5X's own convert_tf_checkpoint first."
        )
    with leaves_lib.reading(path, os.path.basename(file)):
        tree = serialization.msgpack_restore(content)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is no checkpoint of T5X: its msgpack file holds a {type(tree).__name__}.")
    return tree


def _version(path: str, tree: dict[str, Any]) -> tuple[int | str, dict[str, Any]]:
    """The version of a checkpoint, and its dictionary of leaves."""
    if any(isinstance(value, str) and value.startswith(_PLACEHOLDER) for _, value in _flatten(tree)):
        return "Orbax's, aggregated", tree.pop("_optimizer", {}) | tree
    version = tree.get("version", 0)
    if not isinstance(version, int) or isinstance(version, bool) or version not in _READ:
        what = "names no version: an early one of Flax" if "version" not in tree else f"has version {version!r}"
        raise UnknownVersionError(
            f"checkpoint {path} {what}. T5X's versions 2 and 3 are read; older ones T5X itself has ceased to read."
        )
    optimizer = tree.get("optimizer")
    if not isinstance(optimizer, dict):
        raise DamagedError(f"checkpoint {path} is damaged: it holds no 'optimizer'.")
    return version, optimizer


def _is_spec(value: Any) -> bool:
    return isinstance(value, Mapping) and {"driver", "kvstore", "metadata"} <= set(value)


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by name, specs and nodes without entries among them."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not _is_spec(value):
            yield from _flatten(value, f"{name}/")
        else:
            yield name, value


def _beside(path: str, folder: str, name: str, inside: Any) -> str:
    """The folder of a leaf, which is beside the msgpack file and nowhere else, whatever the file says."""
    parts = posixpath.normpath(inside).split("/") if isinstance(inside, str) and inside else [".."]
    if ".." in parts or posixpath.isabs(inside) or "\0" in inside or parts == ["."]:
        raise DamagedError(f"checkpoint {path} is damaged: {name} is said to be in {inside!r}, outside of it.")
    return f"{folder}/{'/'.join(parts)}"


def _of_spec(path: str, folder: str, name: str, spec: Mapping[str, Any], version: int | str) -> Leaf:
    with leaves_lib.reading(path, name):
        inside = spec["kvstore"].get("path", spec.get("path"))  # TensorStore 0.1.14 moved it
        shape = tuple(int(size) for size in spec["metadata"]["shape"])
        described = spec.get("dtype") or np.dtype(spec["metadata"]["dtype"]).name
        dtype = leaves_lib.dtype_of(described)
        if spec["driver"] != "zarr":
            raise ValueError(f"its driver is {spec['driver']!r}, and not 'zarr'")
    stored = {"driver": "zarr", "kvstore": leaves_lib.kvstore(_beside(path, folder, name, inside))}
    bits_as = leaves_lib.dtype_of("bfloat16") if version == 2 and dtype == np.uint16 else None
    leaf = leaves_lib.of_store(name, shape, bits_as or dtype, "zarr", path, stored, bits_as=bits_as)
    return leaf


def _of_folder(path: str, folder: str, name: str, inside: str) -> Leaf:
    """A leaf of Orbax's aggregated file, which does not say what shape it has."""
    spec = {"driver": "zarr", "kvstore": leaves_lib.kvstore(_beside(path, folder, name, inside))}
    opened = leaves_lib.of_store(name, (), np.dtype(np.float32), "zarr", path, spec)
    with leaves_lib.reading(path, name):
        store = opened.opener()
    return leaves_lib.of_store(name, store.shape, store.dtype.numpy_dtype, "zarr", path, spec)


# --- writing ----------------------------------------------------------------------------------------------------------


def write(folder: str, leaves: Iterable[Leaf], empty: Mapping[str, Any]) -> None:
    """Writes a checkpoint of version 3 into a local folder that is there and empty, one leaf at a time."""
    import tensorstore as ts
    from flax import serialization, traverse_util

    tree: dict[str, Any] = dict(empty)
    for leaf in leaves:
        if leaf.nbytes <= _IN_MSGPACK or 0 in leaf.shape:
            tree[leaf.name] = leaf.read()
            continue
        inside = leaf.name.replace("/", ".") + "/"
        spec = {
            "driver": "zarr",
            "dtype": leaf.dtype.name,
            "kvstore": {"driver": "file", "path": inside},
            "metadata": {
                "chunks": chunk_shape(leaf.shape, leaf.dtype.itemsize),
                "compressor": {"id": "gzip", "level": 1},
                "shape": list(leaf.shape),
            },
        }
        here = spec | {"kvstore": {"driver": "file", "path": f"{folder}/{inside}"}}
        with background.uninterrupted():
            store = ts.open(here, create=True, open=True).result()
            store.write(leaf.read()).result()
        tree[leaf.name] = spec
    nested = traverse_util.unflatten_dict(tree, sep="/")
    content = serialization.msgpack_serialize({"version": VERSION, "optimizer": nested})
    with open(os.path.join(folder, "checkpoint"), "wb") as f:  # last: with it the checkpoint is there
        f.write(content)


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Equal parts of at most 64 MiB, cut along the longest axes.

    >>> chunk_shape((512, 64), 4), chunk_shape((250112, 4096), 4)
    ([512, 64], [3908, 4096])
    """
    sizes = list(shape)
    while int(np.prod(sizes)) * itemsize > _CHUNK:
        axis = int(np.argmax(sizes))
        parts = shape[axis] // sizes[axis] + 1
        while shape[axis] % parts:
            parts += 1
        sizes[axis] = shape[axis] // parts
    return sizes
