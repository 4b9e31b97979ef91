"""Small checkpoints in T5X's formats, written with Flax's msgpack and TensorStore alone: not by what is tested."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts
from flax import serialization, traverse_util

VOCAB, D, HEADS, HEAD, F, LAYERS = 24, 8, 2, 3, 16, 3
JOINED = HEADS * HEAD
BF16 = np.dtype(ml_dtypes.bfloat16)


def numbers(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def _attention() -> dict[str, tuple[int, ...]]:
    shapes = {f"{name}/kernel": (D, JOINED) for name in ("query", "key", "value")}
    return shapes | {"out/kernel": (JOINED, D)}


def _layer(stack: str, gated: bool = True) -> dict[str, tuple[int, ...]]:
    names = ["attention"] if stack == "encoder" else ["self_attention", "encoder_decoder_attention"]
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        shapes |= {f"{name}/{kernel}": shape for kernel, shape in _attention().items()}
        norm = "cross_attention" if name == "encoder_decoder_attention" else name
        shapes[f"pre_{norm}_layer_norm/scale"] = (D,)
    shapes["pre_mlp_layer_norm/scale"] = (D,)
    inputs = ("wi_0", "wi_1") if gated else ("wi",)
    return shapes | {f"mlp/{wi}/kernel": (D, F) for wi in inputs} | {"mlp/wo/kernel": (F, D)}


def t5_params(dtype: Any = np.float32, *, tied: bool = False, gated: bool = True) -> dict[str, np.ndarray]:
    """A T5's parameters by name, layers unrolled."""
    shapes: dict[str, tuple[int, ...]] = {"token_embedder/embedding": (VOCAB, D)}
    for stack in ("encoder", "decoder"):
        shapes[f"{stack}/relpos_bias/rel_embedding"] = (HEADS, 32)
        shapes[f"{stack}/{stack}_norm/scale"] = (D,)
        for i in range(LAYERS):
            shapes |= {f"{stack}/layers_{i}/{name}": shape for name, shape in _layer(stack, gated).items()}
    if not tied:
        shapes["decoder/logits_dense/kernel"] = (D, VOCAB)
    return {name: numbers(shape, seed, dtype) for seed, (name, shape) in enumerate(sorted(shapes.items()))}


def decoder_params(dtype: Any = np.float32, *, tied: bool = False) -> dict[str, np.ndarray]:
    """Parameters of our decoder-only network."""
    params = t5_params(dtype, tied=tied)
    left_out = ("relpos_bias", "encoder_decoder_attention", "pre_cross_attention")
    return {
        name: array
        for name, array in params.items()
        if not name.startswith("encoder/") and not any(word in name for word in left_out)
    }


def scanned(params: dict[str, np.ndarray], axis: int) -> dict[str, np.ndarray]:
    """The same with all layers in one array along an axis, under the names of who has it there."""
    result = {name: array for name, array in params.items() if "/layers_" not in name}
    for name in params:
        if "/layers_0/" in name:
            stack = name.split("/")[0]
            layers = [params[name.replace("layers_0", f"layers_{i}")] for i in range(LAYERS)]
            result[name.replace("layers_0", stack if axis else "layers")] = np.stack(layers, axis)
    return result


def adam(params: dict[str, np.ndarray], group: str = "0/") -> dict[str, np.ndarray]:
    """Adam's state as optax has it, in T5X and here; without 'state/param_states/'."""
    state = {f"{group}count": np.array(7, np.int32)}
    for seed, (name, array) in enumerate(params.items(), 1000):
        state[f"{group}mu/{name}"] = numbers(array.shape, seed, array.dtype)
        state[f"{group}nu/{name}"] = np.abs(numbers(array.shape, seed + 1000, array.dtype))
    return state


def adafactor(params: dict[str, np.ndarray], *, momentum: bool = False, factors: bool = True) -> dict[str, np.ndarray]:
    """Adafactor's state as T5X has it, of matrices by themselves: `v_row` lacks the longest axis."""
    state = {}
    for seed, (name, array) in enumerate(params.items(), 2000):
        zero = np.zeros((1,), np.float32)
        slots = {"m": numbers(array.shape, seed) if momentum else zero, "v": zero, "v_row": zero, "v_col": zero}
        if array.ndim == 2 and factors:
            shorter, longer = np.argsort(array.shape, kind="stable")
            slots["v_row"] = numbers((array.shape[shorter],), seed + 1)
            slots["v_col"] = numbers((array.shape[longer],), seed + 2)
        else:
            slots["v"] = numbers(array.shape, seed + 3)
        state |= {f"{name}/{slot}": value for slot, value in slots.items()}
    return state


def state_dict(
    params: dict[str, np.ndarray], optimizer: dict[str, np.ndarray] | None = None, step: int = 7
) -> dict[str, np.ndarray]:
    """All leaves of a checkpoint by name."""
    leaves = {f"target/{name}": array for name, array in params.items()}
    leaves |= {f"state/param_states/{name}": array for name, array in (optimizer or {}).items()}
    return {**leaves, "state/step": np.array(step, np.int32)}


def write_legacy(
    folder: str | os.PathLike[str], leaves: dict[str, Any], *, version: Any = 3, in_msgpack: int = 64
) -> str:
    """Writes a checkpoint as T5X's first checkpointer did; returns its path."""
    folder = os.fspath(folder)
    os.makedirs(folder)
    tree: dict[str, Any] = {}
    for name, value in leaves.items():
        if not isinstance(value, np.ndarray) or value.nbytes <= in_msgpack:
            tree[name] = value
            continue
        stored = value.view(np.uint16) if version == 2 and value.dtype == BF16 else value
        inside = name.replace("/", ".") + "/"
        chunks = [max(1, size // 2) if axis == 0 else size for axis, size in enumerate(value.shape)]
        spec = {
            "driver": "zarr",
            "dtype": stored.dtype.name,
            "kvstore": {"driver": "file", "path": f"{folder}/{inside}"},
            "metadata": {"chunks": chunks, "compressor": {"id": "gzip"}, "shape": list(value.shape)},
        }
        ts.open(spec, create=True, open=True).result().write(stored).result()
        tree[name] = spec | {"kvstore": {"driver": "gfile", "path": inside}}
    nested = traverse_util.unflatten_dict(tree, sep="/")
    content = {"version": version, "optimizer": nested} if version is not None else nested
    with open(f"{folder}/checkpoint", "wb") as f:
        f.write(serialization.msgpack_serialize(content))
    return folder


def write_orbax(folder: str | os.PathLike[str], leaves: dict[str, Any]) -> str:
    """Writes a checkpoint as T5X's second checkpointer does; returns its path."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        tree = traverse_util.unflatten_dict(leaves, sep="/")
        checkpointer.save(os.path.abspath(folder), args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
    return os.fspath(folder)


def assert_same(contents: Any, leaves: dict[str, Any]) -> None:
    """Leaf by leaf, bit by bit."""
    arrays = {name: value for name, value in leaves.items() if isinstance(value, np.ndarray)}
    assert set(contents.leaves) == set(arrays)
    for name, array in arrays.items():
        read = contents.leaves[name].read()
        assert (read.dtype, read.shape) == (array.dtype, array.shape), name
        assert contents.leaves[name].dtype == array.dtype and contents.leaves[name].shape == array.shape, name
        assert np.ascontiguousarray(read).tobytes() == np.ascontiguousarray(array).tobytes(), name
    assert contents.empty == {name: value for name, value in leaves.items() if name not in arrays}
