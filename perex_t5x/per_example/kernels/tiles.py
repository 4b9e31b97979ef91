"""Sizes of the kernels' blocks, for each generation of chips.

A large tile of the gradient reads its operands fewer times; its sums, two buffers each, must fit into the vector memory. The
preferred sizes were found with the TPU compiler: with these the matrix units are the limit, not the memory. On v5e, for
S_8x1024x1024ᵀ R_8x1024x4096 in bfloat16, the schedule of a tile of 1024 x 1024 has 16.8 k cycles an example, and the matrix
units need 16.4 k at least; reading and writing takes 9.6 k. The faster units of v6e want larger tiles, all of one at a time:
for S_8x1024x2048ᵀ R_8x1024x6144 a tile of 1024 x 3072 takes 1.08 of the units' time, in parts of 1024 x 1024 1.16.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

LANES = 128
_MIB = 2**20
_MAX_CHUNK = 2048  # positions of the sequence at once; the loop over them is unrolled


@dataclasses.dataclass(frozen=True)
class _Chip:
    """Vector memory that a kernel may use, the preferred rows and columns of a tile, and those of a part of it at most."""

    vmem: int
    rows: int
    columns: int
    part_rows: int = 256
    part_columns: int = 1536


# By `jax.Device.device_kind`. Two cores of a v4 or v5p chip share the tiles: smaller ones leave work for both.
_CHIPS = {
    "TPU v5 lite": _Chip(100 * _MIB, 1024, 1024),
    "TPU v5": _Chip(52 * _MIB, 512, 1024),
    "TPU v5p": _Chip(52 * _MIB, 512, 1024),
    "TPU v6 lite": _Chip(100 * _MIB, 1024, 3072, part_rows=1024, part_columns=3072),
    "TPU7x": _Chip(52 * _MIB, 1024, 2048, part_rows=1024),  # one of the chip's two cores
}
_OTHER = _Chip(12 * _MIB, 512, 512)  # as little as any of them has


@dataclasses.dataclass(frozen=True)
class Tile:
    """A block of the gradient, and how it is computed.

    Attributes:
      rows, columns: of the gradient and of the sums, in vector memory while all examples pass by.
      part_rows, part_columns: what is computed at a time within it: values that the registers and their spills can hold.
      chunk: positions of the sequence at a time.
      vmem: vector memory for the compiler to use.
    """

    rows: int
    columns: int
    part_rows: int
    part_columns: int
    chunk: int
    vmem: int


def device_kind() -> str:
    """The kind of device that is compiled for: of the mesh around, else JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def vector_memory(kind: str) -> int:
    """Bytes of vector memory that a kernel may use on this kind of device.

    >>> vector_memory("TPU v5 lite") // 2**20
    100
    """
    return _CHIPS.get(kind, _OTHER).vmem


def padded_length(length: int) -> int:
    """The sequence's length in the kernel: one that does not fit at once is cut into equal chunks, multiples of 128.

    >>> padded_length(1023), padded_length(2049)
    (1023, 2176)
    """
    return length if length <= _MAX_CHUNK else -(-length // LANES) * LANES


def choose(
    rows: int, columns: int, length: int, itemsize: int, num_sums: int, has_initial: bool, kind: str, num_read: int = 0
) -> Tile | None:
    """The tile for g_n = S_nᵀ R_n of this shape; None where no tile fits into the vector memory.

    `num_read`: how many arrays of this shape are read besides.

    >>> tile = choose(1024, 4096, 1024, 2, 2, False, "TPU v5 lite")
    >>> tile.rows, tile.columns, tile.chunk
    (1024, 1024, 1024)
    """
    chip = _CHIPS.get(kind, _OTHER)
    prefer_rows, prefer_columns = chip.rows, chip.columns
    length = padded_length(length)
    chunk = divisor(length, _MAX_CHUNK)
    # From the preferred sizes down, until the buffers fit: first shorter chunks, which cost only the additions between them,
    # then smaller tiles, which read the operands more often.
    while True:
        tile_rows, tile_columns = _side(rows, prefer_rows, 256), _side(columns, prefer_columns, LANES)
        area = tile_rows * tile_columns * 4
        # Two of each block: Pallas loads the next one while the kernel works on this one.
        buffers = 2 * chunk * (tile_rows + tile_columns) * itemsize
        blocks = num_sums * (2 if has_initial else 1) + num_read
        buffers += 2 * blocks * area + (area if chunk < length else 0)
        part_rows, part_columns = divisor(tile_rows, chip.part_rows), divisor(tile_columns, chip.part_columns)
        parts = 2 * part_rows * part_columns * 4  # what is spilled, generously
        if buffers + parts <= chip.vmem:
            return Tile(tile_rows, tile_columns, part_rows, part_columns, chunk, chip.vmem)
        if chunk > 512 and (smaller := divisor(length, chunk // 2)) < chunk:
            chunk = smaller
        elif prefer_rows >= prefer_columns and prefer_rows > LANES:
            prefer_rows //= 2
        elif prefer_columns > LANES:
            prefer_columns //= 2
        else:
            return None


def _side(size: int, preferred: int, step: int) -> int:
    """A tile's side near the preferred one, with little of the last tile wasted."""

    # Padded length (work in the last tile is wasted) times the traffic per row, which falls with the side.
    def cost(side: int) -> float:
        return math.ceil(size / side) * side * (1 + LANES / side)

    return min([LANES, *range(step, preferred + preferred // 2, step)], key=cost)


def divisor(length: int, limit: int) -> int:
    """The largest divisor up to `limit` that is a multiple of 128; the length itself if that is within the limit."""
    if length <= limit:
        return length
    return max(d for d in range(LANES, limit + 1, LANES) if length % d == 0)


def rounded_to(dtype: Any, precision: Any) -> Any:
    """To what a TPU's matrix units round the factors of a product: at default precision, float32 to bfloat16.

    >>> rounded_to(jnp.dtype("float32"), None), rounded_to(jnp.dtype("float32"), jax.lax.Precision.HIGHEST)
    (dtype(bfloat16), dtype('float32'))
    """
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    is_default = all(p is None or p == jax.lax.Precision.DEFAULT for p in pair)
    return jnp.dtype(jnp.bfloat16) if is_default and dtype == jnp.float32 else dtype
