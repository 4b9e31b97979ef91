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

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from perex_t5x.models import attention_blocks
from perex_t5x.models.attention_blocks import How
from perex_t5x.models.rotary import Rotary
from perex_t5x.models.rows import examples_as_rows
from perex_t5x.per_example.kernels.tiles import LANES

LOG2_E = math.log2(math.e)
FORWARD, BACKWARD = "causal_attention_forward", "causal_attention_backward"  # in compiled programs and profiles
_HIDDEN = -1e30  # a logit that is masked: finite, so that differences of two of them are no NaN
_NT = (((1,), (1,)), ((), ()))  # A Bᵀ
_NN = (((1,), (0,)), ((), ()))  # A B
_ROTARY = 4  # the position of the tables among the arguments of `forward` and `backward`


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


# --- forward ----------------------------------------------------------------------------------------------------------


def _forward(how: How, query, key, value, ids_BxT, rotary) -> tuple[jax.Array, jax.Array]:
    rows, length, width, blocks = query.shape[0], attention_blocks.length(query), how.width, how.blocks
    heads, block = attention_blocks.heads(query, width), blocks.block
    group = heads // attention_blocks.heads(key, width)
    num_blocks = length // block
    of_query = attention_blocks.of_head(query, block, width, lambda b, n, i: (b, n, i))
    of_keys = attention_blocks.of_head(key, length, width, lambda b, n, i: (b, n // group, 0))
    segments, segment_specs = attention_blocks.segments(
        ids_BxT,
        pl.BlockSpec((None, 1, length), lambda b, n, i: (b, 0, 0)),
        pl.BlockSpec((None, block, LANES), lambda b, n, i: (b, i, 0)),
    )
    tables, table_specs = attention_blocks.tables(rotary)
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
        compiler_params=attention_blocks.compiler_params(blocks, "parallel", "parallel", "arbitrary"),
        cost_estimate=attention_blocks.cost(2, query, key, width),
        name=FORWARD,
        interpret=how.interpret,
    )(query, key, value, *segments, *tables)
    return out, lse


def _forward_kernel(
    q_ref, k_ref, v_ref, *refs, how: How, has_segments: bool, has_tables: bool, num_blocks: int
) -> None:
    segments, tables, (out_ref, lse_ref, *state) = attention_blocks.split(refs, has_segments, has_tables)
    i, block, part = pl.program_id(2), how.blocks.block, how.blocks.forward
    start = attention_blocks.times(i, block)
    if has_tables:
        q_rotated, k_rotated, *state = state
        pl.when(i == 0)(lambda: attention_blocks.rotate(k_ref, k_rotated, tables, 0, block))
        attention_blocks.rotate(q_ref, q_rotated, tables, start, block, how.scale)
        q_ref, k_ref = q_rotated, k_rotated

    def logits(first: int, keys: Any, diagonal: bool) -> jax.Array:
        """Of `part` queries and the keys of a slice, without those that are hidden."""
        s_QxK = attention_blocks.dot(q_ref[pl.ds(first, part), :], k_ref[keys, :], _NT)
        visible = None
        if diagonal:
            visible = attention_blocks.iota(s_QxK.shape, 0) >= attention_blocks.iota(s_QxK.shape, 1)
        if has_segments:
            k_ids_1xK, q_ids_QxL = segments[0][:, keys], segments[1][pl.ds(first, part), :1]
            same = q_ids_QxL == k_ids_1xK
            visible = same if visible is None else visible & same
        return s_QxK if visible is None else jnp.where(visible, s_QxK, _HIDDEN)

    def weighted(p_QxK: jax.Array, keys: Any) -> jax.Array:
        return attention_blocks.dot(p_QxK.astype(v_ref.dtype), v_ref[keys, :], _NN)

    def finish(first: int, m_Qx1, l_Qx1, o_QxH) -> None:
        out_ref[pl.ds(first, part), :] = (o_QxH * (1.0 / l_Qx1)).astype(out_ref.dtype)
        lse_ref[:, pl.ds(first, part)] = attention_blocks.as_row(m_Qx1 + jnp.log2(l_Qx1))

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
        keys = pl.ds(attention_blocks.times(j, block), block)
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
    rows, length, width, blocks = query.shape[0], attention_blocks.length(query), how.width, how.blocks
    block, kv_heads = blocks.block, attention_blocks.heads(key, width)
    group, num_blocks = attention_blocks.heads(query, width) // kv_heads, length // block
    read = {} if blocks.buffers == 2 else {"pipeline_mode": pl.Buffered(blocks.buffers)}
    at_head = lambda b, k, g, j: (b, k * group + g, 0)  # noqa: E731
    of_head = attention_blocks.of_head(query, length, width, at_head, **read)
    of_keys = attention_blocks.of_head(key, block, width, lambda b, k, g, j: (b, k, j))
    # Its block of keys stays while the heads of the group pass by, and they pass by before the blocks of keys do.
    of_group = attention_blocks.of_head(key, length, width, lambda b, k, g, j: (b, k, 0))
    of_rows = pl.BlockSpec((None, None, 1, length), lambda b, k, g, j: (b, k * group + g, 0, 0))
    segments, segment_specs = attention_blocks.segments(
        ids_BxT,
        pl.BlockSpec((None, 1, length), lambda b, k, g, j: (b, 0, 0)),
        pl.BlockSpec((None, block, LANES), lambda b, k, g, j: (b, j, 0)),
    )
    tables, table_specs = attention_blocks.tables(rotary, **read)
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
        out_specs=[attention_blocks.of_head(query, length, width, at_head), of_group, of_group]
        + [attention_blocks.of_head(out, length, width, at_head)] * again,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value, out)[: 3 + again]],
        scratch_shapes=[pltpu.VMEM((length, width), jnp.float32)] * 3
        + [pltpu.VMEM((1, length), jnp.float32), *rotated],
        compiler_params=attention_blocks.compiler_params(
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
        cost_estimate=attention_blocks.cost(5, query, key, width),
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
    segments, tables, refs = attention_blocks.split(refs, has_segments, has_tables)
    if again:
        refs[3][...] = out_ref[...]
        refs = (*refs[:3], *refs[4:])
    dq_ref, dk_ref, dv_ref, dq_sum, dk_sum, dv_sum, delta_ref, *rotated = refs
    g, j = pl.program_id(2), pl.program_id(3)
    block, part = how.blocks.block, how.blocks.backward
    start = attention_blocks.times(j, block)

    @pl.when(j == 0)
    def _() -> None:
        dq_sum[...] = jnp.zeros_like(dq_sum)

        def delta(k: Any, _: None) -> None:
            """Σ O · ∂O of each position."""
            at = pl.ds(attention_blocks.times(k, block), block)
            product_QxH = out_ref[at, :].astype(jnp.float32) * do_ref[at, :].astype(jnp.float32)
            delta_ref[:, at] = attention_blocks.as_row(jnp.sum(product_QxH, axis=1, keepdims=True))

        attention_blocks.for_blocks(num_blocks, delta)
        if has_tables:
            attention_blocks.rotate(q_ref, rotated[0], tables, 0, block, how.scale)

    @pl.when((g == 0) & (j == 0))
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    if has_tables:
        attention_blocks.rotate(k_ref, rotated[1], tables, start, block)
        q_ref, k_ref = rotated

    def add(first: int, queries: Any, diagonal: bool) -> None:
        """Of `part` keys and the queries of a slice."""
        keys = pl.ds(first, part)
        at = pl.ds(start + first, part)
        k_KxH, q_QxH, do_QxH = k_ref[keys, :], q_ref[queries, :], do_ref[queries, :]
        s_KxQ = attention_blocks.dot(k_KxH, q_QxH, _NT)
        visible = None
        if diagonal:
            visible = attention_blocks.iota(s_KxQ.shape, 0) <= attention_blocks.iota(s_KxQ.shape, 1)
        if has_segments:
            same = segments[1][keys, :1] == segments[0][:, queries]
            visible = same if visible is None else visible & same
        p_KxQ = jnp.exp2(s_KxQ - lse_ref[:, queries])
        if visible is not None:
            p_KxQ = jnp.where(visible, p_KxQ, 0.0)
        dv_sum[at, :] += attention_blocks.dot(p_KxQ.astype(do_QxH.dtype), do_QxH, _NN)
        dp_KxQ = attention_blocks.dot(v_ref[keys, :], do_QxH, _NT)
        ds_KxQ = ((dp_KxQ - delta_ref[:, queries]) * p_KxQ).astype(q_QxH.dtype)
        dk_sum[at, :] += attention_blocks.dot(ds_KxQ, q_QxH, _NN)
        dq_sum[queries, :] += attention_blocks.dot(ds_KxQ.T, k_KxH, _NN)

    for first in range(0, block, part):
        add(first, pl.ds(start + first, part), True)
        if first + part < block:
            add(first, pl.ds(start + first + part, block - first - part), False)

    def add_block(i: Any, _: None) -> None:
        for first in range(0, block, part):
            add(first, pl.ds(attention_blocks.times(i, block), block), False)

    if num_blocks > 1:
        jax.lax.fori_loop(j + 1, num_blocks, add_block, None)

    # The logits count in powers of two: d(2^s) = ln 2 · 2^s ds.
    @pl.when(j == num_blocks - 1)
    def _() -> None:
        attention_blocks.rotate_back(dq_sum, dq_ref, tables, block, (how.scale if has_tables else 1.0) / LOG2_E)

    @pl.when((j == num_blocks - 1) & (g == group - 1))
    def _() -> None:
        attention_blocks.rotate_back(dk_sum, dk_ref, tables, block, 1.0 / LOG2_E)
        dv_ref[...] = dv_sum[...].astype(dv_ref.dtype)
