"""Attention: multi-head, grouped-query if configured, with the cache of decoding; its masks and its positions.

Masks are boolean, [B or 1, 1, T or 1, S]: which key each query may see. None means plainly causal. Positions are rotary
embeddings (decoder-only) or T5's relative position bias.
"""

# Fields carry their shapes in their names.
from __future__ import annotations

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from perex_t5x.models import splash
from perex_t5x.models.config import T5Config
from perex_t5x.models.layers import Dense, fan_in_init, parameter
from perex_t5x.models.remat import named
from perex_t5x.models.rotary import Rotary
from perex_t5x.models.rotary import apply as apply_rotary
from perex_t5x.partitioning import constrain
from perex_t5x.per_example.kernels.dispatch import for_tpu


@struct.dataclass
class LayerContext:
    """What every layer of a stack shares. The static fields choose one of three modes:

    - 'train': whole rows, no cache;
    - 'prefill': whole prompts; keys and values are also written to a cache of `cache_length` positions;
    - 'decode': one token per row at `positions_B`, against the cache.

    With `relative_positions_BxT` every layer has a bias of its own, of queries at these positions to `relative_keys` keys.
    With `splash` self-attention is causal within the segments of `segment_ids_BxT`, by kernels, without a mask or a bias.
    """

    mask: jax.Array | None = None
    bias: jax.Array | None = None
    rotary: Rotary | None = None
    encoded_BxSxD: jax.Array | None = None
    cross_mask: jax.Array | None = None
    positions_B: jax.Array | None = None
    dropout_keys_B: jax.Array | None = None
    segment_ids_BxT: jax.Array | None = None
    relative_positions_BxT: jax.Array | None = None
    relative_keys: int = struct.field(pytree_node=False, default=0)
    is_causal: bool = struct.field(pytree_node=False, default=False)
    mode: str = struct.field(pytree_node=False, default="train")
    cache_length: int = struct.field(pytree_node=False, default=0)
    splash: bool = struct.field(pytree_node=False, default=False)


class MultiHeadAttention(nn.Module):
    """softmax(Q Kᵀ · s + bias, where mask) V, then an output projection; all kernels are 2-D (embed x joined_kv).

    `scaled` is True for s = 1 / sqrt(head_dim). T5 has s = 1 and starts with queries smaller by that factor instead:
    the same function at the start, another one to train.

    Both methods keep the cache in flax collections, `cache` (self-attention, changes with every token) and
    `cross_cache` (keys and values of the encoder's output, constant); every leaf is [batch, length, kv_heads,
    head_dim], with `layers` in front when scanned.
    """

    config: T5Config
    scaled: bool

    def setup(self) -> None:
        cfg = self.config

        def smaller(*args: Any) -> jax.Array:
            return fan_in_init(*args) / math.sqrt(cfg.head_dim)

        def inward(heads, init):
            return Dense((heads, cfg.head_dim), ("embed", "joined_kv"), cfg.compute_dtype, init)

        self.query = inward(cfg.num_heads, fan_in_init if self.scaled else smaller)
        self.key = inward(cfg.kv_heads, fan_in_init)
        self.value = inward(cfg.kv_heads, fan_in_init)
        self.out = Dense((cfg.emb_dim,), ("joined_kv", "embed"), cfg.compute_dtype, num_inputs=2)

    def self_attention(self, x_BxTxD: jax.Array, context: LayerContext) -> jax.Array:
        """Attention of the rows to themselves (in mode 'decode': to everything cached so far)."""
        if context.splash and context.mode == "train" and splash.joins_heads(self.config):
            return self._by_joined_heads(x_BxTxD, context)
        query, key, value = self._query(x_BxTxD), self.key(x_BxTxD), self.value(x_BxTxD)
        if context.rotary is not None:
            # The kernels take a scaled query: scaled here, in float32, it is rounded no more often than without.
            query = apply_rotary(query, context.rotary, self._kernels_scale if context.splash else 1.0)
            key = apply_rotary(key, context.rotary)
        query, key, value = named(query, "query"), named(key, "key"), named(value, "value")
        if context.mode == "prefill":
            padding = ((0, 0), (0, context.cache_length - key.shape[1]), (0, 0), (0, 0))
            self.put_variable("cache", "key", jnp.pad(key, padding))
            self.put_variable("cache", "value", jnp.pad(value, padding))
        elif context.mode == "decode":
            key, value = self._cached("key", key, context), self._cached("value", value, context)
        if context.splash:
            # The kernels name their results, "context", themselves.
            return self.out(splash.attend(query, key, value, context.segment_ids_BxT, self.config))
        return self._attend(query, key, value, context.mask, context.bias, context.is_causal)

    def _by_joined_heads(self, x_BxTxD: jax.Array, context: LayerContext) -> jax.Array:
        """By kernels that take all heads side by side, and rotate them."""
        layers = {"query": self.query, "key": self.key, "value": self.value}
        axes = ("batch", "length", "joined_kv")
        joined = [named(constrain(layer(x_BxTxD, joined=True), axes), name) for name, layer in layers.items()]
        others = context.segment_ids_BxT, self.config, context.rotary, self._kernels_scale
        query, key, value = joined
        if not splash.takes_projection(self.config, query):
            return self.out(splash.attend(query, key, value, *others), joined=True)

        def product(query_BxTxE: jax.Array, kernel_ExD: jax.Array, *_) -> jax.Array:
            return splash.attend_and_project(query_BxTxE, key, value, *others, kernel_ExD)

        return self.out(query, joined=True, product=product)

    def cross_attention(self, x_BxTxD: jax.Array, context: LayerContext) -> jax.Array:
        """Attention of the decoder's rows to the encoder's output."""
        if context.mode == "decode":
            key = self.get_variable("cross_cache", "key")
            value = self.get_variable("cross_cache", "value")
        else:
            encoded_BxSxD = cast(jax.Array, context.encoded_BxSxD)  # None in mode 'decode' alone
            key, value = self.key(encoded_BxSxD), self.value(encoded_BxSxD)
            key, value = named(key, "key"), named(value, "value")
            if context.mode == "prefill":
                self.put_variable("cross_cache", "key", key)
                self.put_variable("cross_cache", "value", value)
        query = named(self._query(x_BxTxD), "query")
        return self._attend(query, key, value, context.cross_mask, None, False)

    def _cached(self, name: str, new_Bx1xKxH: jax.Array, context: LayerContext) -> jax.Array:
        """Writes each row's new entry at that row's own position; returns the whole cache."""

        def write(row_SxKxH, new_1xKxH, position):
            return jax.lax.dynamic_update_slice_in_dim(row_SxKxH, new_1xKxH, position, axis=0)

        old_BxSxKxH = self.get_variable("cache", name)
        cached_BxSxKxH = jax.vmap(write)(old_BxSxKxH, new_Bx1xKxH, context.positions_B)
        self.put_variable("cache", name, cached_BxSxKxH)
        return cached_BxSxKxH

    def _query(self, x_BxTxD: jax.Array) -> jax.Array:
        return constrain(self.query(x_BxTxD), ("batch", "length", "heads", "kv"))

    def _attend(self, query, key, value, mask, bias, is_causal) -> jax.Array:
        cfg, scale = self.config, self._scale
        # JAX's has an axis for groups of heads even where there are none, around which XLA copies on CPUs; and its softmax
        # is float32, whatever the compute dtype.
        if cfg.compute_dtype == jnp.float64 or (cfg.kv_heads == cfg.num_heads and not for_tpu()):
            y_BxTxNxH = attend(query, key, value, mask, bias, is_causal, scale)
        else:
            y_BxTxNxH = jax.nn.dot_product_attention(
                query, key, value, bias=bias, mask=mask, is_causal=is_causal, scale=scale
            )
        return self.out(named(y_BxTxNxH, "context"))

    @property
    def _scale(self) -> float:
        return 1.0 / math.sqrt(self.config.head_dim) if self.scaled else 1.0

    @property
    def _kernels_scale(self) -> float:
        return splash.query_scale(self._scale, self.config)


def attend(query_BxTxNxH, key_BxSxKxH, value_BxSxKxH, mask, bias, is_causal, scale) -> jax.Array:
    """softmax(Q Kᵀ · scale + bias, where mask) V, with the softmax in the dtype of the query, but at least float32."""
    wide = jnp.promote_types(query_BxTxNxH.dtype, jnp.float32)
    groups = query_BxTxNxH.shape[2] // key_BxSxKxH.shape[2]
    key, value = key_BxSxKxH, value_BxSxKxH
    if groups > 1:
        key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    logits_BxNxTxS = jnp.einsum("BTNH,BSNH->BNTS", query_BxTxNxH, key, preferred_element_type=wide)
    if scale != 1.0:
        logits_BxNxTxS *= scale
    if bias is not None:
        logits_BxNxTxS += bias
    if is_causal:
        causal_1x1xTxS = causal_mask(logits_BxNxTxS.shape[-1])
        mask = causal_1x1xTxS if mask is None else mask & causal_1x1xTxS
    if mask is not None:
        logits_BxNxTxS = jnp.where(mask, logits_BxNxTxS, jnp.finfo(wide).min / 2)
    probs_BxNxTxS = jax.nn.softmax(logits_BxNxTxS, axis=-1).astype(value.dtype)
    return jnp.einsum("BNTS,BSNH->BTNH", probs_BxNxTxS, value)


# --- masks -------------------------------------------------------------------------------------------------------------


def causal_mask(length: int) -> jax.Array:
    """[1, 1, T, T]: keys up to and including the query."""
    at_T = jnp.arange(length)
    return (at_T[:, None] >= at_T[None, :])[None, None]


def same_segment_mask(query_segments_BxT: jax.Array, key_segments_BxS: jax.Array) -> jax.Array:
    """[B, 1, T, S]: keys of the query's own packed example."""
    return (query_segments_BxT[:, :, None] == key_segments_BxS[:, None, :])[:, None]


def decoder_self_mask(
    length: int, segment_ids_BxT: jax.Array | None, causal_attention_BxT: jax.Array | None
) -> jax.Array | None:
    """Mask of decoder self-attention; None means plainly causal.

    Padding needs no mask of its own: it stands to the right of the tokens, or has segment 0 when packed.

    Args:
      length: T.
      segment_ids_BxT: packed rows: 1, 2, ... per example, 0 for padding.
      causal_attention_BxT: prefix language models (SeqIO's `decoder_causal_attention`): the positions marked 1 see
        each other in both directions.
    """
    if segment_ids_BxT is None and causal_attention_BxT is None:
        return None
    mask = causal_mask(length)
    if causal_attention_BxT is not None:
        prefix_BxT = causal_attention_BxT.astype(bool)
        mask = mask | (prefix_BxT[:, :, None] & prefix_BxT[:, None, :])[:, None]
    if segment_ids_BxT is not None:
        mask = mask & same_segment_mask(segment_ids_BxT, segment_ids_BxT)
    return mask


def encoder_self_mask(tokens_BxS: jax.Array, segment_ids_BxS: jax.Array | None) -> jax.Array:
    """Mask of encoder self-attention: keys that are tokens, of the query's own segment when packed."""
    if segment_ids_BxS is None:
        return padding_mask(tokens_BxS)
    return same_segment_mask(segment_ids_BxS, segment_ids_BxS)


def cross_mask(
    encoder_tokens_BxS: jax.Array, encoder_segment_ids_BxS: jax.Array | None, decoder_segment_ids_BxT: jax.Array | None
) -> jax.Array:
    """Mask of the decoder's attention to the encoder."""
    if encoder_segment_ids_BxS is None or decoder_segment_ids_BxT is None:
        return padding_mask(encoder_tokens_BxS)
    return same_segment_mask(decoder_segment_ids_BxT, encoder_segment_ids_BxS)


def padding_mask(tokens_BxS: jax.Array) -> jax.Array:
    """[B, 1, 1, S]: keys that are tokens (ids above 0)."""
    return (tokens_BxS > 0)[:, None, None, :]


def cache_mask(positions_B: jax.Array, num_keys: int) -> jax.Array:
    """[B, 1, 1, S]: keys up to each row's own position, for decoding with a cache."""
    return (jnp.arange(num_keys)[None, :] <= positions_B[:, None])[:, None, None, :]


# --- positions ---------------------------------------------------------------------------------------------------------


def relative_buckets(
    relative_positions: np.ndarray, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> np.ndarray:
    """T5's bucket of each (key position - query position).

    Half of the buckets hold one distance each, the other half grow logarithmically up to `max_distance`, and all
    beyond share the last. Bidirectional: one such half range for keys before the query, one for keys after. Causal:
    keys after the query all fall into bucket 0 (the mask hides them).

    >>> relative_buckets(np.array([0, -1, -15, -16, -200, 3]), bidirectional=False)
    array([ 0,  1, 15, 16, 31,  0])
    """
    distance = -np.asarray(relative_positions)
    offset = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = np.where(distance < 0, num_buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(distance, 0)
    exact = num_buckets // 2
    # float32 with its epsilon, as T5 computes it: the borders between buckets depend on the rounding.
    ratio = distance.astype(np.float32) / exact + np.finfo(np.float32).eps
    grown = exact + (np.log(ratio) / np.log(max_distance / exact) * (num_buckets - exact)).astype(np.int32)
    return offset + np.where(distance < exact, distance, np.minimum(grown, num_buckets - 1))


class RelativePositionBias(nn.Module):
    """A learned number per head and bucket of relative position, added to the attention logits of every layer."""

    config: T5Config
    bidirectional: bool
    num_buckets: int = 32
    max_distance: int = 128

    @nn.compact
    def __call__(self, query_positions_BxT: jax.Array, num_keys: int, max_queries: int) -> jax.Array:
        """Returns [B, heads, T, num_keys] for queries at the given positions (below `max_queries`)."""
        wide = self.config.wide_dtype
        rel_embedding_NxR = parameter(
            self,
            "rel_embedding",
            nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
            ("heads", "relpos_buckets"),
            (self.config.num_heads, self.num_buckets),
            wide,
        )
        # Every possible difference once, in numpy: exact borders, and positions may still be traced (decoding).
        table = relative_buckets(
            np.arange(-(max_queries - 1), num_keys),
            bidirectional=self.bidirectional,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        keys_1x1xS = jnp.arange(num_keys)[None, None, :]
        relative_BxTxS = keys_1x1xS - query_positions_BxT[:, :, None]
        buckets_BxTxS = jnp.asarray(table, jnp.int32)[relative_BxTxS + (max_queries - 1)]
        # A product with one-hot vectors: its gradient is a product too, where a gather's would be a scatter.
        one_hot_BxTxSxR = jax.nn.one_hot(buckets_BxTxS, self.num_buckets, dtype=wide)
        return jnp.einsum("NR,BTSR->BNTS", rel_embedding_NxR, one_hot_BxTxSxR)
