"""Causal attention on TPUs, forward and backward, as one Pallas kernel each.

    O = softmax₂(Q Kᵀ) V        softmax₂(s) = 2^s / Σ 2^s: the query carries scale · log₂ e

Of a head's length x length logits only a block is ever there, in vector memory; keys and values of the whole head stay in it
beside the block. A block of queries begins with the block on the diagonal, which gives every row a finite maximum (each
position sees itself), then takes the blocks to the left, which need no causal mask. The backward pass computes the logits
again from the saved log-sum-exp, block by block of keys, and adds the query's gradient up in vector memory, in float32.

Heads whose width is a multiple of 128 are columns of [B, T, heads · width], as the projections' products give and take
them, and are rotated to their positions here (`rotary`): outside, both are passes over the memory, and an axis of heads
leaves half of a matrix unit of 256 columns empty. Other heads are [B, heads, T, width], rotated before.

Compared with `jax.experimental.pallas.ops.tpu.splash_attention`: no mask away from the diagonal, half of the diagonal block
skipped, powers of two, both cores of a v4 or v5p chip in the backward pass, and no partial sums of the query's gradient in
main memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from perex_t5x.models.rotary import Rotary
from perex_t5x.models.rows import examples_as_rows
from perex_t5x.per_example.kernels.tiles import LANES, divisor

LOG2_E = math.log2(math.e)
FORWARD, BACKWARD = "causal_attention_forward", "causal_attention_backward"  # in compiled programs and profiles
_HIDDEN = -1e30  # a logit that is masked: finite, so that differences of two of them are no NaN
_MAX_BLOCK = 1024
_NT = (((1,), (1,)), ((), ()))  # A Bᵀ
_NN = (((1,), (0,)), ((), ()))  # A B
_MIB = 2**20
_ROTARY = 4  # the position of the tables among the arguments of `forward` and `backward`


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend(query: jax.Array, key: jax.Array, value: jax.Array, ids_BxT, rotary: Rotary | None, how: How) -> jax.Array:
    """O, with the query's shape; the heads of key and value divide the query's.

    Args:
      query, key, value: [B, T, heads · width] where `joins_heads(width)`, else [B, heads, T, width].
      ids_BxT: segments, which do not see each other; or None.
      rotary: rotates query and key, and scales the query, if heads are joined; None: they are as they shall be.
    """
    return forward(how, query, key, value, ids_BxT, rotary)[0]


def _attend_fwd(query, key, value, ids_BxT, rotary, how):
    out, lse = (checkpoint_name(x, how.name) for x in forward(how, query, key, value, ids_BxT, rotary))
    return out, (query, key, value, ids_BxT, rotary, out, lse)


def _attend_bwd(how, residuals, cotangent):
    return *backward(how, *residuals, cotangent), None, None


attend.defvjp(_attend_fwd, _attend_bwd)


def forward(how: How, query, key, value, ids_BxT, rotary) -> tuple[jax.Array, jax.Array]:
    """O, and log₂ Σ 2^logit, [B, heads, 1, T]; without a derivative."""
    call = examples_as_rows(functools.partial(_forward, how), shared=(_ROTARY,))
    return call(query, key, value, ids_BxT, rotary)


def backward(how: How, *residuals: Any, again: bool = False) -> tuple[jax.Array, ...]:
    """Gradients of query, key and value; and O once more, if `again`, which needs a head that is one block.

    Args:
      residuals: query, key, value, ids_BxT, rotary, O, the second result of `forward`, and the cotangent of O.
    """
    return examples_as_rows(functools.partial(_backward, how, again), shared=(_ROTARY,))(*residuals)


def turns_and_share(num_blocks: int) -> tuple[float, float]:
    """How often the kernels' inner loop runs in a step of the grid, on average; and the share of steps that begin a head."""
    return (num_blocks - 1) / 2, 1 / num_blocks


# --- blocks -----------------------------------------------------------------------------------------------------------


def _heads(x: jax.Array, width: int) -> int:
    return x.shape[2] // width if x.ndim == 3 else x.shape[1]


def _length(x: jax.Array) -> int:
    return x.shape[-2]


def _of_head(x: jax.Array, size: int, width: int, at: Callable[..., tuple[Any, Any, Any]], **options: Any) -> Any:
    """Blocks of `size` positions of one head of x; `at` maps the grid's indices to (row, head, block)."""
    if x.ndim == 3:
        joined = lambda *grid: (at(*grid)[0], at(*grid)[2], at(*grid)[1])  # noqa: E731
        return pl.BlockSpec((None, size, width), joined, **options)
    return pl.BlockSpec((None, None, size, width), lambda *grid: (*at(*grid), 0), **options)


def _segments(ids_BxT: jax.Array | None, lanes_spec: Any, sublanes_spec: Any) -> tuple[list[Any], list[Any]]:
    """Ids along lanes, [B, 1, T], and along sublanes, [B, T, LANES], with their blocks."""
    if ids_BxT is None:
        return [], []
    ids_BxT = ids_BxT.astype(jnp.int32)
    along_sublanes = jnp.broadcast_to(ids_BxT[:, :, None], (*ids_BxT.shape, LANES))
    return [ids_BxT[:, None, :], along_sublanes], [lanes_spec, sublanes_spec]


def _tables(rotary: Rotary | None, **options: Any) -> tuple[list[Any], list[Any]]:
    """The tables, [B or 1, T, H], with their blocks: those of a row, while its heads pass by."""
    if rotary is None:
        return [], []
    is_shared = len(rotary[0]) == 1
    spec = pl.BlockSpec((None, *rotary[0].shape[1:]), lambda b, *_: (0 if is_shared else b, 0, 0), **options)
    return list(rotary), [spec, spec]


def _split(refs: Sequence[Any], has_segments: bool, has_tables: bool) -> tuple[Any, Any, Any]:
    """The references of segments, tables, and the rest."""
    first = 2 * has_segments
    return refs[:first], refs[first : first + 2 * has_tables], refs[first + 2 * has_tables :]


def _rotate(x_ref: Any, out_ref: Any, tables: Sequence[Any], start: Any, block: int, scale: float = 1.0) -> None:
    """Writes the rotated rows of x, which begin at position `start`, block by block."""
    sin_ref, cos_ref = tables

    def some(k: Any, _: None) -> None:
        here = pl.ds(_times(k, block), block)
        at = pl.ds(pl.multiple_of(start + k * block, block), block)
        x = x_ref[here, :].astype(jnp.float32)
        y = x * cos_ref[at, :] + _swapped(x) * sin_ref[at, :]
        out_ref[here, :] = (y if scale == 1.0 else y * scale).astype(out_ref.dtype)

    _for_blocks(x_ref.shape[0] // block, some)


def _rotate_back(sum_ref: Any, out_ref: Any, tables: Sequence[Any], block: int, scale: float) -> None:
    """Writes `scale` times the rows of a gradient; with tables, the gradient with respect to what was rotated."""

    def some(k: Any, _: None) -> None:
        at = pl.ds(_times(k, block), block)
        y = sum_ref[at, :] * scale
        if tables:
            sin_ref, cos_ref = tables
            y = y * cos_ref[at, :] + _swapped(y * sin_ref[at, :])
        out_ref[at, :] = y.astype(out_ref.dtype)

    _for_blocks(sum_ref.shape[0] // block, some)


def _swapped(x_TxH: jax.Array) -> jax.Array:
    """The halves of the head swapped."""
    return pltpu.roll(x_TxH, x_TxH.shape[1] // 2, 1)


def _for_blocks(count: int, body: Callable[[Any, None], None]) -> None:
    if count == 1:
        body(0, None)
    else:
        jax.lax.fori_loop(0, count, body, None)


def _as_row(x_Tx1: jax.Array) -> jax.Array:
    """[T, 1] -> [1, T]."""
    return jnp.broadcast_to(x_Tx1, (x_Tx1.shape[0], LANES)).T[:1, :]


# --- forward ----------------------------------------------------------------------------------------------------------


def _forward(how: How, query, key, value, ids_BxT, rotary) -> tuple[jax.Array, jax.Array]:
    rows, length, width, blocks = query.shape[0], _length(query), how.width, how.blocks
    heads, block = _heads(query, width), blocks.block
    group = heads // _heads(key, width)
    num_blocks = length // block
    of_query = _of_head(query, block, width, lambda b, n, i: (b, n, i))
    of_keys = _of_head(key, length, width, lambda b, n, i: (b, n // group, 0))
    segments, segment_specs = _segments(
        ids_BxT,
        pl.BlockSpec((None, 1, length), lambda b, n, i: (b, 0, 0)),
        pl.BlockSpec((None, block, LANES), lambda b, n, i: (b, i, 0)),
    )
    tables, table_specs = _tables(rotary)
    scratch = [pltpu.VMEM((block, width), query.dtype), pltpu.VMEM((length, width), key.dtype)] if tables else []
    if num_blocks > 1:
        scratch += [pltpu.VMEM((block, LANES), jnp.float32)] * 2 + [pltpu.VMEM((block, width), jnp.float32)]
    out, lse = pl.pallas_call(
        functools.partial(
            _forward_kernel, how=how, has_segments=bool(segments), has_tables=bool(tables), num_blocks=num_blocks
        ),
        grid=(rows, heads, num_blocks),
        in_specs=[of_query, of_keys, of_keys, *segment_specs, *table_specs],
        out_specs=[of_query, pl.BlockSpec((None, None, 1, block), lambda b, n, i: (b, n, 0, i))],
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((rows, heads, 1, length), jnp.float32),
        ],
        scratch_shapes=scratch,
        compiler_params=_compiler_params(blocks, "parallel", "parallel", "arbitrary"),
        cost_estimate=_cost(2, query, key, width),
        name=FORWARD,
        interpret=how.interpret,
    )(query, key, value, *segments, *tables)
    return out, lse


def _forward_kernel(
    q_ref, k_ref, v_ref, *refs, how: How, has_segments: bool, has_tables: bool, num_blocks: int
) -> None:
    segments, tables, (out_ref, lse_ref, *state) = _split(refs, has_segments, has_tables)
    i, block, part = pl.program_id(2), how.blocks.block, how.blocks.forward
    start = _times(i, block)
    if has_tables:
        q_rotated, k_rotated, *state = state
        pl.when(i == 0)(lambda: _rotate(k_ref, k_rotated, tables, 0, block))
        _rotate(q_ref, q_rotated, tables, start, block, how.scale)
        q_ref, k_ref = q_rotated, k_rotated

    def logits(first: int, keys: Any, diagonal: bool) -> jax.Array:
        """Of `part` queries and the keys of a slice, without those that are hidden."""
        s_QxK = _dot(q_ref[pl.ds(first, part), :], k_ref[keys, :], _NT)
        visible = None
        if diagonal:
            visible = _iota(s_QxK.shape, 0) >= _iota(s_QxK.shape, 1)
        if has_segments:
            k_ids_1xK, q_ids_QxL = segments[0][:, keys], segments[1][pl.ds(first, part), :1]
            same = q_ids_QxL == k_ids_1xK
            visible = same if visible is None else visible & same
        return s_QxK if visible is None else jnp.where(visible, s_QxK, _HIDDEN)

    def weighted(p_QxK: jax.Array, keys: Any) -> jax.Array:
        return _dot(p_QxK.astype(v_ref.dtype), v_ref[keys, :], _NN)

    def finish(first: int, m_Qx1, l_Qx1, o_QxH) -> None:
        out_ref[pl.ds(first, part), :] = (o_QxH * (1.0 / l_Qx1)).astype(out_ref.dtype)
        lse_ref[:, pl.ds(first, part)] = _as_row(m_Qx1 + jnp.log2(l_Qx1))

    for first in range(0, block, part):
        # Left of the diagonal within the block, and on it.
        slices = [(pl.ds(start, first), False)] * bool(first) + [(pl.ds(start + first, part), True)]
        s = [logits(first, keys, diagonal) for keys, diagonal in slices]
        m_Qx1 = functools.reduce(jnp.maximum, (jnp.max(x, axis=1, keepdims=True) for x in s))
        p = [jnp.exp2(x - m_Qx1) for x in s]
        l_Qx1 = sum(jnp.sum(x, axis=1, keepdims=True) for x in p)
        o_QxH = sum(weighted(x, keys) for x, (keys, _) in zip(p, slices, strict=True))
        if num_blocks == 1:
            finish(first, m_Qx1, l_Qx1, o_QxH)
            continue
        m_ref, l_ref, o_ref = (ref.at[pl.ds(first, part), :] for ref in state)
        m_ref[...], l_ref[...] = (jnp.broadcast_to(x, (part, LANES)) for x in (m_Qx1, l_Qx1))
        o_ref[...] = o_QxH
    if num_blocks == 1:
        return

    def add_block(j: Any, _: None) -> None:
        keys = pl.ds(_times(j, block), block)
        for first in range(0, block, part):
            m_ref, l_ref, o_ref = (ref.at[pl.ds(first, part), :] for ref in state)
            s_QxK = logits(first, keys, False)
            m_QxL = m_ref[...]
            new_QxL = jnp.maximum(m_QxL, jnp.max(s_QxK, axis=1, keepdims=True))
            p_QxK = jnp.exp2(s_QxK - new_QxL[:, :1])
            shrink_QxL = jnp.exp2(m_QxL - new_QxL)
            m_ref[...] = new_QxL
            l_ref[...] = shrink_QxL * l_ref[...] + jnp.sum(p_QxK, axis=1, keepdims=True)
            o_ref[...] = shrink_QxL[:, :1] * o_ref[...] + weighted(p_QxK, keys)

    jax.lax.fori_loop(0, i, add_block, None)
    for first in range(0, block, part):
        m_QxL, l_QxL, o_QxH = (ref[pl.ds(first, part), :] for ref in state)
        finish(first, m_QxL[:, :1], l_QxL[:, :1], o_QxH)


# --- backward ---------------------------------------------------------------------------------------------------------


def _backward(how: How, again: bool, query, key, value, ids_BxT, rotary, out, lse, cotangent) -> tuple[jax.Array, ...]:
    rows, length, width, blocks = query.shape[0], _length(query), how.width, how.blocks
    block, kv_heads = blocks.block, _heads(key, width)
    group, num_blocks = _heads(query, width) // kv_heads, length // block
    read = {} if blocks.buffers == 2 else {"pipeline_mode": pl.Buffered(blocks.buffers)}
    at_head = lambda b, k, g, j: (b, k * group + g, 0)  # noqa: E731
    of_head = _of_head(query, length, width, at_head, **read)
    of_keys = _of_head(key, block, width, lambda b, k, g, j: (b, k, j))
    # Its block of keys stays while the heads of the group pass by, and they pass by before the blocks of keys do.
    of_group = _of_head(key, length, width, lambda b, k, g, j: (b, k, 0))
    of_rows = pl.BlockSpec((None, None, 1, length), lambda b, k, g, j: (b, k * group + g, 0, 0))
    segments, segment_specs = _segments(
        ids_BxT,
        pl.BlockSpec((None, 1, length), lambda b, k, g, j: (b, 0, 0)),
        pl.BlockSpec((None, block, LANES), lambda b, k, g, j: (b, j, 0)),
    )
    tables, table_specs = _tables(rotary, **read)
    rotated = [pltpu.VMEM((length, width), query.dtype), pltpu.VMEM((block, width), key.dtype)] if tables else []
    return pl.pallas_call(
        functools.partial(
            _backward_kernel,
            how=how,
            has_segments=bool(segments),
            has_tables=bool(tables),
            num_blocks=num_blocks,
            group=group,
            again=again,
        ),
        grid=(rows, kv_heads, group, num_blocks),
        in_specs=[of_head, of_keys, of_keys, of_head, of_head, of_rows, *segment_specs, *table_specs],
        out_specs=[_of_head(query, length, width, at_head), of_group, of_group]
        + [_of_head(out, length, width, at_head)] * again,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value, out)[: 3 + again]],
        scratch_shapes=[pltpu.VMEM((length, width), jnp.float32)] * 3
        + [pltpu.VMEM((1, length), jnp.float32), *rotated],
        compiler_params=_compiler_params(
            blocks,
            "parallel",
            "parallel",
            "arbitrary",
            "arbitrary",
            # Slices of what all layers have kept: read from there, not copied before. Not where the kernel takes blocks at
            # places that are known only as it runs: with that the compiler fails.
            allow_input_fusion=(num_blocks == 1,) * 4
            + (False, num_blocks == 1)
            + (False,) * (len(segments) + len(tables)),
        ),
        cost_estimate=_cost(5, query, key, width),
        name=BACKWARD,
        interpret=how.interpret,
    )(query, key, value, out, cotangent, lse, *segments, *tables)


def _backward_kernel(
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    do_ref,
    lse_ref,
    *refs,
    how: How,
    has_segments: bool,
    has_tables: bool,
    num_blocks: int,
    group: int,
    again: bool,
) -> None:
    segments, tables, refs = _split(refs, has_segments, has_tables)
    if again:
        refs[3][...] = out_ref[...]
        refs = (*refs[:3], *refs[4:])
    dq_ref, dk_ref, dv_ref, dq_sum, dk_sum, dv_sum, delta_ref, *rotated = refs
    g, j = pl.program_id(2), pl.program_id(3)
    block, part = how.blocks.block, how.blocks.backward
    start = _times(j, block)

    @pl.when(j == 0)
    def _() -> None:
        dq_sum[...] = jnp.zeros_like(dq_sum)

        def delta(k: Any, _: None) -> None:
            """Σ O · ∂O of each position."""
            at = pl.ds(_times(k, block), block)
            product_QxH = out_ref[at, :].astype(jnp.float32) * do_ref[at, :].astype(jnp.float32)
            delta_ref[:, at] = _as_row(jnp.sum(product_QxH, axis=1, keepdims=True))

        _for_blocks(num_blocks, delta)
        if has_tables:
            _rotate(q_ref, rotated[0], tables, 0, block, how.scale)

    @pl.when((g == 0) & (j == 0))
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    if has_tables:
        _rotate(k_ref, rotated[1], tables, start, block)
        q_ref, k_ref = rotated

    def add(first: int, queries: Any, diagonal: bool) -> None:
        """Of `part` keys and the queries of a slice."""
        keys = pl.ds(first, part)
        at = pl.ds(start + first, part)
        k_KxH, q_QxH, do_QxH = k_ref[keys, :], q_ref[queries, :], do_ref[queries, :]
        s_KxQ = _dot(k_KxH, q_QxH, _NT)
        visible = None
        if diagonal:
            visible = _iota(s_KxQ.shape, 0) <= _iota(s_KxQ.shape, 1)
        if has_segments:
            same = segments[1][keys, :1] == segments[0][:, queries]
            visible = same if visible is None else visible & same
        p_KxQ = jnp.exp2(s_KxQ - lse_ref[:, queries])
        if visible is not None:
            p_KxQ = jnp.where(visible, p_KxQ, 0.0)
        dv_sum[at, :] += _dot(p_KxQ.astype(do_QxH.dtype), do_QxH, _NN)
        dp_KxQ = _dot(v_ref[keys, :], do_QxH, _NT)
        ds_KxQ = ((dp_KxQ - delta_ref[:, queries]) * p_KxQ).astype(q_QxH.dtype)
        dk_sum[at, :] += _dot(ds_KxQ, q_QxH, _NN)
        dq_sum[queries, :] += _dot(ds_KxQ.T, k_KxH, _NN)

    for first in range(0, block, part):
        add(first, pl.ds(start + first, part), True)
        if first + part < block:
            add(first, pl.ds(start + first + part, block - first - part), False)

    def add_block(i: Any, _: None) -> None:
        for first in range(0, block, part):
            add(first, pl.ds(_times(i, block), block), False)

    if num_blocks > 1:
        jax.lax.fori_loop(j + 1, num_blocks, add_block, None)

    # The logits count in powers of two: d(2^s) = ln 2 · 2^s ds.
    @pl.when(j == num_blocks - 1)
    def _() -> None:
        _rotate_back(dq_sum, dq_ref, tables, block, (how.scale if has_tables else 1.0) / LOG2_E)

    @pl.when((j == num_blocks - 1) & (g == group - 1))
    def _() -> None:
        _rotate_back(dk_sum, dk_ref, tables, block, 1.0 / LOG2_E)
        dv_ref[...] = dv_sum[...].astype(dv_ref.dtype)


# --- both -------------------------------------------------------------------------------------------------------------


def _dot(a: jax.Array, b: jax.Array, dimensions: Any) -> jax.Array:
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _iota(shape: Sequence[int], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _times(i: Any, block: int) -> Any:
    """The first position of block i."""
    return pl.multiple_of(i * block, block)


def _compiler_params(blocks: Blocks, *semantics: str, **others: Any) -> Any:
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=blocks.vmem or None, **others)


def _cost(products: int, query: jax.Array, key: jax.Array, width: int) -> pl.CostEstimate:
    """Of the visible half of the logits; query and key have a companion each (result and value, or gradients)."""
    visible = query.size // width * _length(query) // 2
    moved = products * (query.nbytes + key.nbytes)
    return pl.CostEstimate(flops=2 * products * visible * width, transcendentals=visible, bytes_accessed=moved)
