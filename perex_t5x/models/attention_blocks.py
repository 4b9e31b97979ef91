"""How the kernels of `attention_kernels` divide a head into blocks, and what they do with one.

A block is what stands in vector memory at a time, of queries or of keys. `choose` takes its size from the generation of
the chip; the rest are the pieces that both kernels are made of: specifications of blocks for `pallas_call`, segments, rotary
positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from perex_t5x.models.rotary import Rotary
from perex_t5x.per_example.kernels.tiles import LANES, divisor

_MAX_BLOCK = 1024
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the kernels divide a head.

    Attributes:
      block: of queries, and of keys; divides the length.
      forward, backward: the part of a block's queries (forward) and keys (backward) that is computed at a time. Larger
        ones leave the compiler more to overlap, and skip less of the diagonal block.
      vmem: vector memory for the compiler to use.
      buffers: of what the kernels read, in the backward pass: 2, or 1 where two do not fit, so that heads wait for theirs.
    """

    block: int
    forward: int
    backward: int
    vmem: int
    buffers: int = 2


@dataclasses.dataclass(frozen=True)
class How:
    """What does not depend on values, hashable.

    Attributes:
      width: of a head.
      blocks: `choose`, or `interpreted`.
      scale: of the query, where it is rotated here; otherwise it comes scaled.
      name: of the results that the backward pass needs, for remat policies.
      interpret: as in `pallas_call`.
    """

    width: int
    blocks: Blocks
    scale: float
    name: str
    interpret: Any


# By `jax.Device.device_kind`: parts of forward and backward, and vector memory. By the compiler's schedules of a head of 128
# with 1024 positions, forward and backward in cycles: on v5e parts of 512 and 256 have 3186 and 6360 (256: 3301; 512: 7181),
# on v6e parts of 512 have 2085 and 4017 (256: 2779 and 4748). Blocks of 1024 beat 512: 45.5 k and 86.0 k against 62.7 k and
# 90.8 k for 4096 positions on v5e.
_PARTS = {
    "TPU v5 lite": (512, 256, 100 * _MIB),
    "TPU v5": (512, 256, 52 * _MIB),
    "TPU v5p": (512, 256, 52 * _MIB),
    "TPU v6 lite": (512, 512, 100 * _MIB),
    "TPU7x": (512, 512, 52 * _MIB),
}


def choose(length: int, width: int, itemsize: int, kind: str) -> Blocks | None:
    """The blocks for rows of this length and heads of this width; None where a head does not fit into vector memory."""
    if kind not in _PARTS:
        return None
    forward, backward, vmem = _PARTS[kind]
    block = divisor(length, _MAX_BLOCK)
    lanes = -(-width // LANES) * LANES
    # Backward: three gradients in two buffers each, the rotated query; three sums in float32; a part's logits and what is
    # made of them. And what is read: query, result, its cotangent, and two tables in float32.
    head = length * lanes
    for buffers, part in ((2, backward), (1, backward), (1, 256)):
        part = divisor(block, part)
        if head * (7 * itemsize + 12) + 6 * 4 * block * part + buffers * head * (3 * itemsize + 8) < vmem:
            return Blocks(block, divisor(block, forward), part, vmem, buffers)
    return None


def interpreted(length: int) -> Blocks:
    """Blocks for the interpreter: small, so that short rows have several."""
    return Blocks(divisor(length, LANES), LANES, LANES, 0)


def joins_heads(width: int) -> bool:
    """Whether heads of this width are columns of [B, T, heads · width]: a block has whole registers of columns."""
    return width % LANES == 0


def heads(x: jax.Array, width: int) -> int:
    return x.shape[2] // width if x.ndim == 3 else x.shape[1]


def length(x: jax.Array) -> int:
    return x.shape[-2]


def of_head(x: jax.Array, size: int, width: int, at: Callable[..., tuple[Any, Any, Any]], **options: Any) -> Any:
    """Blocks of `size` positions of one head of x; `at` maps the grid's indices to (row, head, block)."""
    if x.ndim == 3:
        joined = lambda *grid: (at(*grid)[0], at(*grid)[2], at(*grid)[1])  # noqa: E731
        return pl.BlockSpec((None, size, width), joined, **options)
    return pl.BlockSpec((None, None, size, width), lambda *grid: (*at(*grid), 0), **options)


def segments(ids_BxT: jax.Array | None, lanes_spec: Any, sublanes_spec: Any) -> tuple[list[Any], list[Any]]:
    """Ids along lanes, [B, 1, T], and along sublanes, [B, T, LANES], with their blocks."""
    if ids_BxT is None:
        return [], []
    ids_BxT = ids_BxT.astype(jnp.int32)
    along_sublanes = jnp.broadcast_to(ids_BxT[:, :, None], (*ids_BxT.shape, LANES))
    return [ids_BxT[:, None, :], along_sublanes], [lanes_spec, sublanes_spec]


def tables(rotary: Rotary | None, **options: Any) -> tuple[list[Any], list[Any]]:
    """The tables, [B or 1, T, H], with their blocks: those of a row, while its heads pass by."""
    if rotary is None:
        return [], []
    is_shared = len(rotary[0]) == 1
    spec = pl.BlockSpec((None, *rotary[0].shape[1:]), lambda b, *_: (0 if is_shared else b, 0, 0), **options)
    return list(rotary), [spec, spec]


def split(refs: Sequence[Any], has_segments: bool, has_tables: bool) -> tuple[Any, Any, Any]:
    """The references of segments, tables, and the rest."""
    first = 2 * has_segments
    return refs[:first], refs[first : first + 2 * has_tables], refs[first + 2 * has_tables :]


def rotate(x_ref: Any, out_ref: Any, tables: Sequence[Any], start: Any, block: int, scale: float = 1.0) -> None:
    """Writes the rotated rows of x, which begin at position `start`, block by block."""
    sin_ref, cos_ref = tables

    def some(k: Any, _: None) -> None:
        here = pl.ds(times(k, block), block)
        at = pl.ds(pl.multiple_of(start + k * block, block), block)
        x = x_ref[here, :].astype(jnp.float32)
        y = x * cos_ref[at, :] + swapped(x) * sin_ref[at, :]
        out_ref[here, :] = (y if scale == 1.0 else y * scale).astype(out_ref.dtype)

    for_blocks(x_ref.shape[0] // block, some)


def rotate_back(sum_ref: Any, out_ref: Any, tables: Sequence[Any], block: int, scale: float) -> None:
    """Writes `scale` times the rows of a gradient; with tables, the gradient with respect to what was rotated."""

    def some(k: Any, _: None) -> None:
        at = pl.ds(times(k, block), block)
        y = sum_ref[at, :] * scale
        if tables:
            sin_ref, cos_ref = tables
            y = y * cos_ref[at, :] + swapped(y * sin_ref[at, :])
        out_ref[at, :] = y.astype(out_ref.dtype)

    for_blocks(sum_ref.shape[0] // block, some)


def swapped(x_TxH: jax.Array) -> jax.Array:
    """The halves of the head swapped."""
    return pltpu.roll(x_TxH, x_TxH.shape[1] // 2, 1)


def for_blocks(count: int, body: Callable[[Any, None], None]) -> None:
    if count == 1:
        body(0, None)
    else:
        jax.lax.fori_loop(0, count, body, None)


def as_row(x_Tx1: jax.Array) -> jax.Array:
    """[T, 1] -> [1, T]."""
    return jnp.broadcast_to(x_Tx1, (x_Tx1.shape[0], LANES)).T[:1, :]


def dot(a: jax.Array, b: jax.Array, dimensions: Any) -> jax.Array:
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def iota(shape: Sequence[int], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def times(i: Any, block: int) -> Any:
    """The first position of block i."""
    return pl.multiple_of(i * block, block)


def compiler_params(blocks: Blocks, *semantics: Literal["parallel", "arbitrary"], **others: Any) -> Any:
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=blocks.vmem or None, **others)


def cost(products: int, query: jax.Array, key: jax.Array, width: int) -> pl.CostEstimate:
    """Of the visible half of the logits; query and key have a companion each (result and value, or gradients)."""
    visible = query.size // width * length(query) // 2
    moved = products * (query.nbytes + key.nbytes)
    return pl.CostEstimate(flops=2 * products * visible * width, transcendentals=visible, bytes_accessed=moved)
