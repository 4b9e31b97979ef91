"""Where causal attention goes through TPU kernels: softmax(Q Kᵀ) V block by block, so that no T x T array ever exists.

Blocks that the causal mask hides are skipped, packed rows are told apart by segment ids, and grouped-query heads read the
keys and values of their group. The kernels are our own (`attention_kernels`), or JAX's splash kernels where a head's keys
and values do not fit into vector memory. `unsupported_reason` says what the kernels cannot take: that goes through
`jax.nn.dot_product_attention`, the same function to rounding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention

from perex_t5x import partitioning
from perex_t5x.errors import ConfigError
from perex_t5x.models import attention_kernels
from perex_t5x.models.config import T5Config
from perex_t5x.per_example.kernels import dispatch, tiles

CHECKPOINT_NAME = "context"  # of the kernel's results, for remat policies that save by name
JAX_SPLASH = "jax_splash"  # `T5Config.attention`: JAX's kernels, whatever ours could take
FORCED = ("splash", JAX_SPLASH)
_HEAD_AXES = ("batch", "heads", "length", "kv")


def unsupported_reason(
    config: T5Config, rows: int, length: int, *, has_bias: bool = False, has_prefix: bool = False
) -> str:
    """Why splash attention is not used for whole rows of this length; empty where it is.

    Args:
      rows: of the batch, as the program being traced sees it.
      has_bias: logits have a bias added (T5's relative positions).
      has_prefix: some positions see each other in both directions.
    """
    if config.attention == "xla":
        return "T5Config.attention = 'xla'"
    if has_bias:
        return "it has no relative position bias"
    if has_prefix:
        return "a prefix that is seen in both directions is not causal"
    if config.compute_dtype not in (jnp.bfloat16, jnp.float32):
        return f"it has no {config.dtype}"
    if length % tiles.LANES:
        return f"a length of {length}, not a multiple of {tiles.LANES}"
    sizes = (rows, config.num_heads, length, config.head_dim), (rows, config.kv_heads, length, config.head_dim)
    for size, part, name in zip(sizes[0], partitioning.parts(_HEAD_AXES), _HEAD_AXES, strict=True):
        if size % part:
            return f"{size} {name} do not divide over {part} devices"
    if config.kv_heads % partitioning.parts(_HEAD_AXES)[1]:
        return f"{config.kv_heads} key and value heads do not divide over {partitioning.parts(_HEAD_AXES)[1]} devices"
    if config.attention == "auto" and not _for_tpu():
        return dispatch.NOT_FOR_TPUS
    if _for_tpu() and not partitioning.knows_devices():
        return "outside of a partitioner's mesh it is not known how arrays are divided over devices"
    return ""


def use(config: T5Config, rows: int, length: int, mode: str, **features: bool) -> bool:
    """Whether attention of the rows to themselves goes through the kernels; raises where it must and cannot.

    Args:
      mode: of the `LayerContext`. One token at a time never goes through them; prompts do where they can.
    """
    if mode == "decode":
        return False
    reason = unsupported_reason(config, rows, length, **features)
    if reason and config.attention in FORCED and mode == "train":
        raise ConfigError(
            f"T5Config.attention = {config.attention!r} cannot be used here: {reason}. With 'auto' the model falls back "
            "to XLA's."
        )
    return not reason


def description(config: T5Config, rows: int, length: int, **features: bool) -> str:
    """One line on which attention a training step uses; raises as `use` does."""
    if use(config, rows, length, "train", **features):
        whose = ", JAX's" if config.attention == JAX_SPLASH else ""
        return f"attention: splash kernels{whose}" + ("" if _for_tpu() else f", interpreted ({dispatch.NOT_FOR_TPUS})")
    return f"attention: XLA's, not splash kernels ({unsupported_reason(config, rows, length, **features)})"


def query_scale(scale: float, by_jax: bool = False) -> float:
    """What the query is to be multiplied with before `attend`, for logits with this scale."""
    return scale if by_jax else scale * attention_kernels.LOG2_E


def attend(
    query_BxNxTxH: jax.Array,
    key_BxKxTxH: jax.Array,
    value_BxKxTxH: jax.Array,
    segment_ids_BxT: jax.Array | None,
    by_jax: bool = False,
) -> jax.Array:
    """softmax(Q Kᵀ, where causal and of the same segment) V, [B, N, T, H]; the query has the factor `query_scale`.

    Args:
      by_jax: JAX's kernels instead of ours.
    """
    segments = () if segment_ids_BxT is None else (segment_ids_BxT,)
    names = (_HEAD_AXES,) * 3 + (("batch", "length"),) * len(segments)
    return partitioning.on_each_device(_by_jax if by_jax else _on_device, names, _HEAD_AXES)(
        query_BxNxTxH, key_BxKxTxH, value_BxKxTxH, *segments
    )


def _on_device(query_BxNxTxH, key_BxKxTxH, value_BxKxTxH, *segments: jax.Array) -> jax.Array:
    _, _, length, width = query_BxNxTxH.shape
    interpret = not dispatch.for_tpu()
    blocks = attention_kernels.choose(length, width, query_BxNxTxH.dtype.itemsize, tiles.device_kind())
    if interpret:
        blocks = attention_kernels.interpreted(length)
    if blocks is None:
        # Those count in powers of e.
        query_BxNxTxH = (query_BxNxTxH.astype(jnp.float32) / attention_kernels.LOG2_E).astype(query_BxNxTxH.dtype)
        return _by_jax(query_BxNxTxH, key_BxKxTxH, value_BxKxTxH, *segments)
    ids_BxT = segments[0] if segments else None
    return attention_kernels.attend(
        query_BxNxTxH, key_BxKxTxH, value_BxKxTxH, ids_BxT, blocks, CHECKPOINT_NAME, interpret
    )


def _by_jax(query_BxNxTxH, key_BxKxTxH, value_BxKxTxH, *segments: jax.Array) -> jax.Array:
    """The same by JAX's kernels, which have one block of keys at a time in vector memory: for very long rows, old chips."""
    _, heads, length, _ = query_BxNxTxH.shape
    block = tiles.divisor(length, 512)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length))] * heads),
        # Not the fused backward pass: its partial sums of the query's gradient grow with the square of the length.
        block_sizes=splash_attention.BlockSizes(**dict.fromkeys(names, block)),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=CHECKPOINT_NAME,
        interpret=not dispatch.for_tpu(),
    )
    if not segments:
        return jax.vmap(kernel)(query_BxNxTxH, key_BxKxTxH, value_BxKxTxH)
    ids_BxT = segments[0].astype(jnp.int32)
    return jax.vmap(kernel)(query_BxNxTxH, key_BxKxTxH, value_BxKxTxH, splash_attention.SegmentIds(ids_BxT, ids_BxT))


def _for_tpu() -> bool:
    """Whether the program is for TPUs: those of the partitioner's mesh, if it is known, or as the engine decides."""
    platform = partitioning.platform()
    return dispatch.for_tpu() if platform is None else platform == "tpu"
