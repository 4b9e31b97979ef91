"""safetensors: one flat file, or several with an index, as Hugging Face's libraries read and write them.

A converted model is a folder: `model.safetensors` and `config.json`; what those libraries have no use for, such as the
optimizer's state, is in `train_state.safetensors` beside it, so that nothing is lost. A file's metadata remembers, under
the key `perex_t5x`, how it was made, for the way back.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from perex_t5x import extras, files
from perex_t5x.checkpoint_files import DamagedError
from perex_t5x.checkpoint_formats import leaves as leaves_lib
from perex_t5x.checkpoint_formats.leaves import Contents, Leaf
from perex_t5x.errors import ConfigError

MODEL, INDEX, TRAIN_STATE = "model.safetensors", "model.safetensors.index.json", "train_state.safetensors"
CONFIG = "config.json"
_KEY = "perex_t5x"  # of our own lines in a file's metadata
_DTYPES = {
    "BF16": "bfloat16", "BOOL": "bool", "F16": "float16", "F32": "float32", "F64": "float64", "I16": "int16", "I32": "int32",
    "I64": "int64", "I8": "int8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "U8": "uint8",
}  # fmt: skip


def is_here(path: str) -> bool:
    """Whether a path is such a file, or a folder with one."""
    if path.endswith(".safetensors"):
        return files.as_path(path).exists()
    return any((files.as_path(path) / name).exists() for name in (MODEL, INDEX, TRAIN_STATE))


def read(path: str) -> Contents:
    """Names as they are in the files; `metadata` is that of `write`, and the folder's config.json as 'config'."""
    extras.require("convert", path)
    leaves: dict[str, Leaf] = {}
    metadata: dict[str, Any] = {}
    for file in _files(path):
        own = _read_file(path, _local(file), leaves)
        metadata = {**own, **metadata, "empty": {**metadata.get("empty", {}), **own.get("empty", {})}}
    config = files.as_path(path) / CONFIG
    if not path.endswith(".safetensors") and config.exists():
        with leaves_lib.reading(path, CONFIG):
            metadata["config"] = json.loads(files.read_bytes(config))
    return Contents(path, "safetensors", "1", leaves, metadata.get("empty", {}), metadata)


def _files(path: str) -> list[str]:
    if path.endswith(".safetensors"):
        return [path]
    folder, found = files.as_path(path), []
    if (folder / INDEX).exists():
        with leaves_lib.reading(path, INDEX):
            names = sorted(set(json.loads(files.read_bytes(folder / INDEX))["weight_map"].values()))
        for name in names:
            if not isinstance(name, str) or os.path.basename(name) != name:
                raise DamagedError(f"checkpoint {path} is damaged: {INDEX} names {name!r}, outside of it.")
            if not (folder / name).exists():
                raise DamagedError(f"checkpoint {path} is damaged: {name} is missing.")
        found += names
    elif (folder / MODEL).exists():
        found.append(MODEL)
    if (folder / TRAIN_STATE).exists():
        found.append(TRAIN_STATE)
    return [f"{path}/{name}" for name in found]


def _local(file: str) -> str:
    """The file itself, or a copy of it for the time of this process: the library maps files into memory."""
    if not files.is_remote(file):
        return file
    import atexit

    folder = tempfile.mkdtemp(prefix="perex_t5x_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = os.path.join(folder, os.path.basename(file))
    with files.as_path(file).open("rb") as source, open(copy, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 24)
    return copy


def _read_file(path: str, file: str, leaves: dict[str, Leaf]) -> dict[str, Any]:
    """Adds a file's leaves; returns its metadata."""
    import safetensors

    stored = os.path.basename(file)
    with leaves_lib.reading(path, stored), safetensors.safe_open(file, "np") as f:
        recorded = f.metadata() or {}
        metadata = json.loads(recorded[_KEY]) if _KEY in recorded else {}
        for name in f.keys():  # noqa: SIM118 (it is no dictionary)
            described = f.get_slice(name)
            dtype, shape = described.get_dtype(), tuple(described.get_shape())
            if dtype not in _DTYPES:
                raise DamagedError(f"checkpoint {path}: {name} in {stored} is of {dtype}, which is not read.")
            if name in leaves:
                raise DamagedError(f"checkpoint {path} is damaged: {name} is in two files.")
            opener = _opener(file, name)
            leaves[name] = Leaf(name, shape, leaves_lib.dtype_of(_DTYPES[dtype]), stored, path, opener)
    return metadata


def _opener(file: str, name: str) -> Any:
    def opener() -> Any:
        import ml_dtypes  # noqa: F401 (NumPy knows bfloat16 by it)
        import safetensors
        import tensorstore as ts

        with safetensors.safe_open(file, "np") as f:
            return ts.array(f.get_tensor(name))

    return opener


# --- writing ----------------------------------------------------------------------------------------------------------


def write_file(file: str, leaves: Iterable[Leaf], metadata: Mapping[str, Any]) -> None:
    """Writes one file; its leaves are in memory at once."""
    from safetensors.numpy import save_file

    tensors = {leaf.name: np.ascontiguousarray(leaf.read()).reshape(leaf.shape) for leaf in leaves}
    for name, array in tensors.items():
        if array.dtype.name not in _DTYPES.values():
            raise ConfigError(f"{name} is of {array.dtype.name}, which safetensors cannot hold.")
    # transformers refuses files that do not say which framework's layout they have.
    with _os_errors():
        save_file(tensors, file, metadata={"format": "pt", _KEY: json.dumps(metadata, sort_keys=True)})
    os.chmod(file, 0o666 & ~_umask())  # the library makes files that nobody else may read


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """The library reports a full disk as an error of its own."""
    import re

    import safetensors

    try:
        yield
    except safetensors.SafetensorError as e:
        code = re.search(r"os error (\d+)", str(e))
        raise OSError(int(code[1]) if code else 5, str(e)) from e


def write_model(folder: str, leaves: Sequence[Leaf], metadata: Mapping[str, Any], most_bytes: int) -> None:
    """Writes `model.safetensors`, or above a size several files and their index."""
    shards: list[list[Leaf]] = [[]]
    for leaf in leaves:
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + leaf.nbytes > most_bytes:
            shards.append([])
        shards[-1].append(leaf)
    if len(shards) == 1:
        write_file(os.path.join(folder, MODEL), shards[0], metadata)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(os.path.join(folder, name), shard, metadata if number == 1 else {})
        weight_map |= dict.fromkeys((leaf.name for leaf in shard), name)
    index = {"metadata": {"total_size": sum(leaf.nbytes for leaf in leaves)}, "weight_map": weight_map}
    files.write_atomically(os.path.join(folder, INDEX), json.dumps(index, indent=2, sort_keys=True) + "\n")
