"""Leaves of a checkpoint that are read when they are asked for, as a whole or in part, whatever file they are in.

Each is behind a TensorStore: so are its views with axes moved, layers stacked or taken, and a part of a view reads that part
of the files alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from perex_t5x import background, files
from perex_t5x.checkpoint_files import DamagedError
from perex_t5x.errors import first_line, is_denied


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a checkpoint.

    Attributes:
      name: T5X's, such as 'target/decoder/decoder_norm/scale'.
      shape, dtype: as described by the checkpoint; `read` raises where the files say something else.
      stored: where it is, for people: 'msgpack', 'zarr', 'ocdbt', the name of a safetensors file.
      path: of the checkpoint, for errors.
      opener: gives a `tensorstore.TensorStore` of that shape.
      bits_as: the dtype that the stored bits are of, if the store names another one.
      origin: the name in the checkpoint, where a view has another one.

    >>> leaf = of_array("target/w", np.arange(6).reshape(2, 3))
    >>> leaf.read((slice(None), slice(1, 3))).tolist()
    [[1, 2], [4, 5]]
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    stored: str
    path: str
    opener: Callable[[], Any]
    bits_as: np.dtype | None = None
    origin: str | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def store(self) -> Any:
        """The open TensorStore; raises `DamagedError` if that is not what the checkpoint describes."""
        with reading(self.path, self.origin or self.name):
            store = self.opener()
        if tuple(store.shape) != self.shape:
            raise DamagedError(
                f"checkpoint {self.path}: {self.name} has shape {tuple(store.shape)} in its files, and {self.shape} in the "
                "checkpoint's description."
            )
        return store

    def begin(self, index: tuple[slice, ...] = ()) -> Callable[[], np.ndarray]:
        """Begins to read; the result waits for it."""
        store = self.store()
        future = (store[index] if index else store).read()

        def wait() -> np.ndarray:
            with reading(self.path, self.origin or self.name):
                array = np.asarray(future.result())
            return array.view(self.bits_as) if self.bits_as is not None else array

        return wait

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The array, or a part of it, in the memory of this process."""
        return self.begin(index)()


def of_array(name: str, array: np.ndarray, stored: str = "msgpack", path: str = "") -> Leaf:
    """A leaf that is in memory."""

    def opener() -> Any:
        import tensorstore as ts

        return ts.array(np.ascontiguousarray(array).reshape(array.shape))

    return Leaf(name, array.shape, array.dtype, stored, path, opener)


def of_store(
    name: str, shape: Sequence[int], dtype: np.dtype, stored: str, path: str, spec: dict[str, Any], **options: Any
) -> Leaf:
    """A leaf that TensorStore opens by its spec. Chunks that are missing are errors, not zeros."""

    def opener() -> Any:
        import tensorstore as ts

        return ts.open({**spec, "fill_missing_data_reads": False}, open=True, read=True).result()

    return Leaf(name, tuple(shape), np.dtype(dtype), stored, path, opener, **options)


@dataclasses.dataclass
class Contents:
    """What is in a checkpoint.

    Attributes:
      path: of the checkpoint.
      format: 'legacy', 'orbax' or 'safetensors'.
      version: of the format, for people.
      leaves: by name.
      empty: names of nodes that hold nothing: None, or a dictionary without entries.
      metadata: what a converted file remembers of where it came from.
    """

    path: str
    format: str
    version: str
    leaves: dict[str, Leaf]
    empty: dict[str, Any] = dataclasses.field(default_factory=dict)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def problems(self, *, decode: bool) -> list[str]:
        """What is wrong with the leaves, a line for each. T5X stored no checksums; those of gzip are looked at in decoding.

        Args:
          decode: read everything; else only whether the files of each leaf are there, and say of it what is said of it here.
        """
        found = []
        for leaf in self.leaves.values():
            try:
                leaf.read() if decode else leaf.store()
            except DamagedError as e:
                found.append(str(e).removeprefix(f"checkpoint {self.path} cannot be read: "))
        return found


@contextlib.contextmanager
def reading(path: str, name: str = "") -> Iterator[None]:
    """Errors of the libraries that read a checkpoint, in a line. A storage that does not answer is another matter."""
    try:
        yield
    except DamagedError:
        raise
    except Exception as e:
        ours = isinstance(e, MemoryError | ModuleNotFoundError | jax.errors.JaxRuntimeError)
        if ours or is_denied(e) or background.is_transient(e):
            raise
        text = " ".join(re.sub(r" \[[a-z_ ]+=.*", "", first_line(e)).split())  # without TensorStore's own details
        raise DamagedError(f"checkpoint {path} cannot be read: {name and f'{name}: '}{text[:300]}") from e


def kvstore(folder: str) -> dict[str, Any]:
    """TensorStore's description of a folder, here or in a bucket."""
    if files.is_remote(folder):
        from perex_t5x import buckets

        bucket, name = buckets.split(folder)
        return {"driver": "gcs", "bucket": bucket, "path": f"{name}/"}
    return {"driver": "file", "path": f"{folder.rstrip('/')}/"}


def dtype_of(name: str) -> np.dtype:
    """A dtype by its name; those of `ml_dtypes`, too.

    >>> dtype_of("bfloat16").itemsize
    2
    """
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


# --- views ------------------------------------------------------------------------------------------------------------


def renamed(leaf: Leaf, name: str) -> Leaf:
    return dataclasses.replace(leaf, name=name, origin=leaf.origin or leaf.name)


def transposed(leaf: Leaf, axes: Sequence[int], name: str | None = None) -> Leaf:
    """
    >>> transposed(of_array("w", np.zeros((2, 3))), (1, 0)).read().shape
    (3, 2)
    """
    import tensorstore as ts

    axes = tuple(axes)
    if axes == tuple(range(len(leaf.shape))):
        return leaf if name is None else renamed(leaf, name)
    shape = tuple(leaf.shape[axis] for axis in axes)
    return _view(leaf, name or leaf.name, shape, lambda: leaf.store()[ts.d[axes].transpose[:]])


def axis_moved(leaf: Leaf, source: int, destination: int, name: str | None = None) -> Leaf:
    """
    >>> axis_moved(of_array("w", np.zeros((2, 3, 4))), 0, 2).shape
    (3, 4, 2)
    """
    axes = [axis for axis in range(len(leaf.shape)) if axis != source]
    axes.insert(destination, source)
    return transposed(leaf, axes, name)


def taken(leaf: Leaf, index: int, axis: int, name: str) -> Leaf:
    """One of the layers that are stacked along an axis."""
    import tensorstore as ts

    shape = leaf.shape[:axis] + leaf.shape[axis + 1 :]
    return _view(leaf, name, shape, lambda: leaf.store()[ts.d[axis][index]])


def stacked(leaves: Sequence[Leaf], axis: int, name: str) -> Leaf:
    """Layers along a new axis. They have to agree in shape and dtype.

    >>> stacked([of_array("a", np.zeros(2)), of_array("b", np.ones(2))], 1, "both").read().tolist()
    [[0.0, 1.0], [0.0, 1.0]]
    """
    import tensorstore as ts

    first = leaves[0]
    for leaf in leaves:
        if (leaf.shape, leaf.dtype, leaf.bits_as) != (first.shape, first.dtype, first.bits_as):
            raise DamagedError(
                f"checkpoint {first.path}: layers differ: {first.name} is {first.dtype.name}{list(first.shape)}, "
                f"{leaf.name} is {leaf.dtype.name}{list(leaf.shape)}."
            )
    shape = (*first.shape[:axis], len(leaves), *first.shape[axis:])
    return _view(first, name, shape, lambda: ts.stack([leaf.store() for leaf in leaves], axis=axis))


def reshaped(leaf: Leaf, shape: Sequence[int], name: str) -> Leaf:
    """Another shape of the same numbers. TensorStore has no such view: to read a part of it, all is read.

    >>> reshaped(of_array("w", np.arange(6)), (2, 3), "w").read((slice(1, 2),)).tolist()
    [[3, 4, 5]]
    """
    shape = tuple(shape)

    def opener() -> Any:
        import tensorstore as ts

        return ts.array(np.ascontiguousarray(leaf.read()).reshape(shape))

    return dataclasses.replace(_view(leaf, name, shape, opener), bits_as=None)


def _view(leaf: Leaf, name: str, shape: tuple[int, ...], opener: Callable[[], Any]) -> Leaf:
    return dataclasses.replace(renamed(leaf, name), shape=shape, opener=opener)
