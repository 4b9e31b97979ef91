"""Causal attention on TPUs, forward and backward, as one Pallas kernel each.

    O = softmax₂(Q Kᵀ) V        softmax₂(s) = 2^s / Σ 2^s: the query carries scale · log₂ e

Of a head's length x length logits only a block is ever there, in vector memory; keys and values of the whole head stay in it
beside the block. A block of queries begins with the block on the diagonal, which gives every row a finite maximum (each
position sees itself), then takes the blocks to the left, which need no causal mask. The backward pass computes the logits
again from the saved log-sum-exp, block by block of keys, and adds the query's gradient up in vector memory, in float32.

Compared with `jax.experimental.pallas.ops.tpu.splash_attention`: no mask away from the diagonal, half of the diagonal block
skipped, powers of two, both cores of a v4 or v5p chip in the backward pass, and no partial sums of the query's gradient in
main memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from perex_t5x.per_example.kernels.tiles import LANES, divisor

LOG2_E = math.log2(math.e)
FORWARD, BACKWARD = "causal_attention_forward", "causal_attention_backward"  # in compiled programs and profiles
_HIDDEN = -1e30  # a logit that is masked: finite, so that differences of two of them are no NaN
_MAX_BLOCK = 1024
_NT = (((1,), (1,)), ((), ()))  # A Bᵀ
_NN = (((1,), (0,)), ((), ()))  # A B
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the kernels divide a head.

    Attributes:
      block: of queries, and of keys; divides the length.
      forward, backward: the part of a block's queries (forward) and keys (backward) that is computed at a time. Larger
        ones leave the compiler more to overlap, and skip less of the diagonal block.
      vmem: vector memory for the compiler to use.
    """

    block: int
    forward: int
    backward: int
    vmem: int


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
    # Backward: five arrays of the head in two buffers each, three sums in float32; a part's logits and what is made of them.
    lanes = -(-width // LANES) * LANES
    needed = length * lanes * (10 * itemsize + 12) + 6 * 4 * block * max(forward, backward)
    return Blocks(block, divisor(block, forward), divisor(block, backward), vmem) if needed < vmem else None


def interpreted(length: int) -> Blocks:
    """Blocks for the interpreter: small, so that short rows have several."""
    return Blocks(divisor(length, LANES), LANES, LANES, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def attend(query_BxNxTxH, key_BxKxTxH, value_BxKxTxH, ids_BxT, blocks: Blocks, name: str, interpret: Any) -> jax.Array:
    """O, [B, N, T, H]; K divides N.

    Args:
      ids_BxT: segments, which do not see each other; or None.
      name: of the results that the backward pass needs, for remat policies.
      interpret: as in `pallas_call`.
    """
    return _forward(query_BxNxTxH, key_BxKxTxH, value_BxKxTxH, ids_BxT, blocks, interpret)[0]


def _attend_fwd(query, key, value, ids_BxT, blocks, name, interpret):
    out, lse = _forward(query, key, value, ids_BxT, blocks, interpret)
    out, lse = checkpoint_name(out, name), checkpoint_name(lse, name)
    return out, (query, key, value, ids_BxT, out, lse)


def _attend_bwd(blocks, name, interpret, residuals, cotangent):
    query, key, value, ids_BxT, out, lse = residuals
    return *_backward(query, key, value, ids_BxT, out, lse, cotangent, blocks, interpret), None


attend.defvjp(_attend_fwd, _attend_bwd)


def _segments(ids_BxT: jax.Array | None, lanes_spec: Any, sublanes_spec: Any) -> tuple[list[Any], list[Any]]:
    """Ids along lanes, [B, 1, T], and along sublanes, [B, T, LANES], with their blocks."""
    if ids_BxT is None:
        return [], []
    ids_BxT = ids_BxT.astype(jnp.int32)
    along_sublanes = jnp.broadcast_to(ids_BxT[:, :, None], (*ids_BxT.shape, LANES))
    return [ids_BxT[:, None, :], along_sublanes], [lanes_spec, sublanes_spec]


def turns_and_share(num_blocks: int) -> tuple[float, float]:
    """How often the kernels' inner loop runs in a step of the grid, on average; and the share of steps that begin a head."""
    return (num_blocks - 1) / 2, 1 / num_blocks


# --- forward ----------------------------------------------------------------------------------------------------------


def _forward(
    query_BxNxTxH, key_BxKxTxH, value_BxKxTxH, ids_BxT, blocks: Blocks, interpret
) -> tuple[jax.Array, jax.Array]:
    """O, and log₂ Σ 2^logit, [B, N, 1, T]."""
    rows, heads, length, width = query_BxNxTxH.shape
    block = blocks.block
    group = heads // key_BxKxTxH.shape[1]
    of_query = pl.BlockSpec((None, None, block, width), lambda b, n, i: (b, n, i, 0))
    of_keys = pl.BlockSpec((None, None, length, width), lambda b, n, i: (b, n // group, 0, 0))
    segments, segment_specs = _segments(
        ids_BxT,
        pl.BlockSpec((None, 1, length), lambda b, n, i: (b, 0, 0)),
        pl.BlockSpec((None, block, LANES), lambda b, n, i: (b, i, 0)),
    )
    state = [pltpu.VMEM((block, LANES), jnp.float32), pltpu.VMEM((block, LANES), jnp.float32)]
    state.append(pltpu.VMEM((block, width), jnp.float32))
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, blocks=blocks, has_segments=bool(segments), num_blocks=length // block),
        grid=(rows, heads, length // block),
        in_specs=[of_query, of_keys, of_keys, *segment_specs],
        out_specs=[of_query, pl.BlockSpec((None, None, 1, block), lambda b, n, i: (b, n, 0, i))],
        out_shape=[
            jax.ShapeDtypeStruct(query_BxNxTxH.shape, query_BxNxTxH.dtype),
            jax.ShapeDtypeStruct((rows, heads, 1, length), jnp.float32),
        ],
        scratch_shapes=state if length > block else [],
        compiler_params=_compiler_params(blocks, "parallel", "parallel", "arbitrary"),
        cost_estimate=_cost(2, query_BxNxTxH, key_BxKxTxH),
        name=FORWARD,
        interpret=interpret,
    )(query_BxNxTxH, key_BxKxTxH, value_BxKxTxH, *segments)
    return out, lse


def _forward_kernel(q_ref, k_ref, v_ref, *refs, blocks: Blocks, has_segments: bool, num_blocks: int) -> None:
    segments, (out_ref, lse_ref, *state) = refs[: 2 * has_segments], refs[2 * has_segments :]
    i, block, part = pl.program_id(2), blocks.block, blocks.forward

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
        lse_QxL = jnp.broadcast_to(m_Qx1 + jnp.log2(l_Qx1), (part, LANES))
        lse_ref[:, pl.ds(first, part)] = lse_QxL.T[:1, :]

    start = _times(i, block)
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


def _backward(query, key, value, ids_BxT, out, lse, cotangent, blocks: Blocks, interpret) -> tuple[jax.Array, ...]:
    """Gradients of query, key and value."""
    rows, heads, length, width = query.shape
    block = blocks.block
    kv_heads = key.shape[1]
    group = heads // kv_heads
    delta_BxNx1xT = jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1)[:, :, None, :]
    of_head = pl.BlockSpec((None, None, length, width), lambda b, k, g, j: (b, k * group + g, 0, 0))
    of_keys = pl.BlockSpec((None, None, block, width), lambda b, k, g, j: (b, k, j, 0))
    # Its block of keys stays while the heads of the group pass by, and they pass by before the blocks of keys do.
    of_group = pl.BlockSpec((None, None, length, width), lambda b, k, g, j: (b, k, 0, 0))
    of_rows = pl.BlockSpec((None, None, 1, length), lambda b, k, g, j: (b, k * group + g, 0, 0))
    segments, segment_specs = _segments(
        ids_BxT,
        pl.BlockSpec((None, 1, length), lambda b, k, g, j: (b, 0, 0)),
        pl.BlockSpec((None, block, LANES), lambda b, k, g, j: (b, j, 0)),
    )
    return pl.pallas_call(
        functools.partial(
            _backward_kernel, blocks=blocks, has_segments=bool(segments), num_blocks=length // block, group=group
        ),
        grid=(rows, kv_heads, group, length // block),
        in_specs=[of_head, of_keys, of_keys, of_head, of_rows, of_rows, *segment_specs],
        out_specs=[of_head, of_group, of_group],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)],
        scratch_shapes=[pltpu.VMEM((length, width), jnp.float32)] * 3,
        compiler_params=_compiler_params(blocks, "parallel", "parallel", "arbitrary", "arbitrary"),
        cost_estimate=_cost(5, query, key),
        name=BACKWARD,
        interpret=interpret,
    )(query, key, value, cotangent, lse, delta_BxNx1xT, *segments)


def _backward_kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    *refs,
    blocks: Blocks,
    has_segments: bool,
    num_blocks: int,
    group: int,
) -> None:
    segments, refs = refs[: 2 * has_segments], refs[2 * has_segments :]
    dq_ref, dk_ref, dv_ref, dq_sum, dk_sum, dv_sum = refs
    g, j = pl.program_id(2), pl.program_id(3)
    block, part = blocks.block, blocks.backward
    start = _times(j, block)

    @pl.when(j == 0)
    def _() -> None:
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @pl.when((g == 0) & (j == 0))
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

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
        dq_ref[...] = (dq_sum[...] / LOG2_E).astype(dq_ref.dtype)

    @pl.when((j == num_blocks - 1) & (g == group - 1))
    def _() -> None:
        dk_ref[...] = (dk_sum[...] / LOG2_E).astype(dk_ref.dtype)
        dv_ref[...] = dv_sum[...].astype(dv_ref.dtype)


# --- both -------------------------------------------------------------------------------------------------------------


def _dot(a: jax.Array, b: jax.Array, dimensions: Any) -> jax.Array:
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _iota(shape: Sequence[int], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _times(i: Any, block: int) -> Any:
    """The first position of block i."""
    return pl.multiple_of(i * block, block)


def _compiler_params(blocks: Blocks, *semantics: str) -> Any:
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=blocks.vmem or None)


def _cost(products: int, query_BxNxTxH: jax.Array, key_BxKxTxH: jax.Array) -> pl.CostEstimate:
    """Of the visible half of the logits; query and key have a companion each (result and value, or gradients)."""
    rows, heads, length, width = query_BxNxTxH.shape
    visible = rows * heads * length * length // 2
    moved = products * (query_BxNxTxH.nbytes + key_BxKxTxH.nbytes)
    return pl.CostEstimate(flops=2 * products * visible * width, transcendentals=visible, bytes_accessed=moved)
