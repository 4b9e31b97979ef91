"""Where causal attention goes through TPU kernels: softmax(Q Kᵀ) V block by block, so that no T x T array ever exists.

Blocks that the causal mask hides are skipped, packed rows are told apart by segment ids, and grouped-query heads read the
keys and values of their group. The kernels are our own (`attention_kernels`), or JAX's splash kernels where a head's keys
and values do not fit into vector memory. `unsupported_reason` says what the kernels cannot take: that goes through
`jax.nn.dot_product_attention`, the same function to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention

from perex_t5x import partitioning
from perex_t5x.errors import ConfigError
from perex_t5x.models import attention_blocks, attention_kernels
from perex_t5x.models.config import T5Config
from perex_t5x.models.rotary import Rotary
from perex_t5x.models.rotary import apply as apply_rotary
from perex_t5x.per_example.kernels import dispatch, tiles

CHECKPOINT_NAME = "context"  # of the kernel's results, for remat policies that save by name
JAX_SPLASH = "jax_splash"  # `T5Config.attention`: JAX's kernels, whatever ours could take
FORCED = ("splash", JAX_SPLASH)
_HEAD_AXES = ("batch", "length", "heads", "kv")
_JOINED_AXES = ("batch", "length", "joined_kv")
_ROW_AXES = ("batch", "heads", None, "length")


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
    parts = partitioning.parts(_HEAD_AXES)
    for size, part, name in zip((rows, length, config.num_heads, config.head_dim), parts, _HEAD_AXES, strict=True):
        if size % part:
            return f"{size} {name} do not divide over {part} devices"
    if config.kv_heads % parts[2]:
        return f"{config.kv_heads} key and value heads do not divide over {parts[2]} devices"
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


def joins_heads(config: T5Config) -> bool:
    """Whether `attend` takes [B, T, heads · head_dim], and rotates; else [B, T, heads, head_dim], rotated and scaled."""
    return config.attention != JAX_SPLASH and attention_blocks.joins_heads(config.head_dim)


def query_scale(scale: float, config: T5Config) -> float:
    """What the query is to be multiplied with, for logits with this scale: our kernels count in powers of two."""
    return scale if config.attention == JAX_SPLASH else scale * attention_kernels.LOG2_E


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids_BxT: jax.Array | None,
    config: T5Config,
    rotary: Rotary | None = None,
    scale: float = 1.0,
) -> jax.Array:
    """softmax(Q Kᵀ, where causal and of the same segment) V, with the query's axes.

    Args:
      query, key, value: [B, T, heads · head_dim], or [B, T, heads, head_dim]: see `joins_heads`.
      rotary, scale: rotate query and key, multiply the query with `scale`, where heads are joined.
    """
    axes = _JOINED_AXES if query.ndim == 3 else _HEAD_AXES
    extras = _extras(segment_ids_BxT, rotary)
    run = functools.partial(_on_device, scale=scale, config=config)
    return _on_each_device(run, (axes,) * 3, axes, segment_ids_BxT, rotary)(query, key, value, *extras)


def _extras(ids_BxT: jax.Array | None, rotary: Rotary | None) -> tuple[jax.Array, ...]:
    return (*(() if ids_BxT is None else (ids_BxT,)), *(rotary or ()))


def _on_each_device(
    function: Callable[..., Any], in_names: Sequence[Any], out_names: Any, ids_BxT, rotary: Rotary | None
) -> Callable[..., Any]:
    """function(query, key, value, ids, rotary, *others), where kernels can run.

    It is then one of query, key, value, the others, and `_extras`; `in_names` has the axes of all but these.
    """
    has_ids = ids_BxT is not None
    names = (*in_names, *[("batch", "length")] * has_ids)
    names += tuple(("batch" if len(x) > 1 else None, "length", None) for x in rotary or ())

    def run(*arrays: jax.Array) -> Any:
        query, key, value, *others = arrays[: len(in_names)]
        extras = arrays[len(in_names) :]
        return function(query, key, value, extras[0] if has_ids else None, extras[has_ids:] or None, *others)

    return partitioning.on_each_device(run, names, out_names)


# --- with the output projection ---------------------------------------------------------------------------------------


def takes_projection(config: T5Config, query: jax.Array) -> bool:
    """Whether `attend_and_project` can be used: our own kernels, and a head is one block."""
    blocks = _blocks(config, query) if joins_heads(config) and query.ndim == 3 else None
    return blocks is not None and blocks.block == query.shape[1]


def attend_and_project(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids_BxT: jax.Array | None,
    config: T5Config,
    rotary: Rotary | None,
    scale: float,
    kernel_ExD: jax.Array,
) -> jax.Array:
    """`attend`, then the product with the output projection's kernel.

    The gradient of that kernel needs attention's result, which the forward pass has kept with those of all layers. The
    backward kernel has it in vector memory and time to write it: the result is there once more, and need not be copied
    out of the stack for the kernel of the per-example statistics.
    """
    blocks = cast(attention_blocks.Blocks, _blocks(config, query))  # there where `takes_projection`
    how = attention_blocks.How(config.head_dim, blocks, scale, CHECKPOINT_NAME, not dispatch.for_tpu())

    def backward(query, key, value, ids_BxT, rotary, out, out_bar, lse):
        return attention_kernels.backward(how, query, key, value, ids_BxT, rotary, out, lse, out_bar, again=True)

    # Both now: how the mesh's axes are to be handled is known while the loss is traced, not when its gradient is.
    forward, others = functools.partial(attention_kernels.forward, how), (segment_ids_BxT, rotary)
    kernels = (
        _on_each_device(forward, (_JOINED_AXES,) * 3, (_JOINED_AXES, _ROW_AXES), *others),
        _on_each_device(backward, (*(_JOINED_AXES,) * 5, _ROW_AXES), (_JOINED_AXES,) * 4, *others),
    )
    return _projected(query, key, value, kernel_ExD, _extras(*others), kernels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _projected(query, key, value, kernel_ExD, extras, kernels: tuple[Callable[..., Any], ...]) -> jax.Array:
    return _projected_fwd(query, key, value, kernel_ExD, extras, kernels)[0]


def _projected_fwd(query, key, value, kernel_ExD, extras, kernels):
    out_BxTxE, lse = (checkpoint_name(x, CHECKPOINT_NAME) for x in kernels[0](query, key, value, *extras))
    y_BxTxD = jax.lax.dot_general(out_BxTxE, kernel_ExD, (((2,), (0,)), ((), ())))
    return y_BxTxD, (query, key, value, kernel_ExD, extras, out_BxTxE, lse)


def _projected_bwd(kernels, residuals, y_bar_BxTxD):
    query, key, value, kernel_ExD, extras, out_BxTxE, lse = residuals
    out_bar_BxTxE = jax.lax.dot_general(y_bar_BxTxD, kernel_ExD, (((2,), (1,)), ((), ())))
    *gradients, out_BxTxE = kernels[1](query, key, value, out_BxTxE, out_bar_BxTxE, lse, *extras)
    kernel_bar_ExD = jax.lax.dot_general(out_BxTxE, y_bar_BxTxD, (((0, 1), (0, 1)), ((), ())))
    return *gradients, kernel_bar_ExD, (None,) * len(extras)


_projected.defvjp(_projected_fwd, _projected_bwd)


# --- kernels ----------------------------------------------------------------------------------------------------------


def _blocks(config: T5Config, query: jax.Array) -> attention_blocks.Blocks | None:
    if not dispatch.for_tpu():
        return attention_blocks.interpreted(query.shape[1])
    return attention_blocks.choose(query.shape[1], config.head_dim, query.dtype.itemsize, tiles.device_kind())


def _on_device(query, key, value, ids_BxT, rotary, scale: float, config: T5Config) -> jax.Array:
    width, interpret = config.head_dim, not dispatch.for_tpu()
    blocks = None if config.attention == JAX_SPLASH else _blocks(config, query)
    if blocks is None:
        function = _by_jax
    else:
        how = attention_blocks.How(width, blocks, scale, CHECKPOINT_NAME, interpret)
        if query.ndim == 3:
            return attention_kernels.attend(query, key, value, ids_BxT, rotary, how)
        function = functools.partial(attention_kernels.attend, rotary=None, how=how)
    shape = query.shape
    if query.ndim == 3:  # not so with JAX's kernels
        query, key, value = (x.reshape(*x.shape[:2], -1, width) for x in (query, key, value))
        if rotary is not None:
            query, key = apply_rotary(query, rotary, scale), apply_rotary(key, rotary)
    if blocks is None and config.attention != JAX_SPLASH:  # JAX's kernels count in powers of e
        query = (query.astype(jnp.float32) / attention_kernels.LOG2_E).astype(query.dtype)
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    out_BxNxTxH = function(query, key, value, ids_BxT)
    return out_BxNxTxH.swapaxes(1, 2).reshape(shape)


def _by_jax(query_BxNxTxH, key_BxKxTxH, value_BxKxTxH, ids_BxT: jax.Array | None) -> jax.Array:
    """By JAX's kernels, which have one block of keys at a time in vector memory: for very long rows, and old chips."""
    _, heads, length, _ = query_BxNxTxH.shape
    block = tiles.divisor(length, 512)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    make = cast(Callable[..., Callable[..., jax.Array]], splash_attention.make_splash_mha)  # without residuals
    kernel = make(
        splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length))] * heads),
        # Not the fused backward pass: its partial sums of the query's gradient grow with the square of the length.
        block_sizes=splash_attention.BlockSizes(**dict.fromkeys(names, block)),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=CHECKPOINT_NAME,
        interpret=not dispatch.for_tpu(),
    )
    if ids_BxT is None:
        return jax.vmap(kernel)(query_BxNxTxH, key_BxKxTxH, value_BxKxTxH)
    ids_BxT = ids_BxT.astype(jnp.int32)
    return jax.vmap(kernel)(query_BxNxTxH, key_BxKxTxH, value_BxKxTxH, splash_attention.SegmentIds(ids_BxT, ids_BxT))


def _for_tpu() -> bool:
    """Whether the program is for TPUs: those of the partitioner's mesh, if it is known, or as the engine decides."""
    platform = partitioning.platform()
    return dispatch.for_tpu() if platform is None else platform == "tpu"
