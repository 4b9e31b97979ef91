"""Multi-head attention, grouped-query if configured, with the key/value cache of decoding."""

# Fields carry their shapes in their names.
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from perex_t5x.models.config import T5Config
from perex_t5x.models.layers import Dense, fan_in_init
from perex_t5x.models.positions import Rotary, apply_rotary
from perex_t5x.partitioning import constrain


@struct.dataclass
class LayerContext:
    """What every layer of a stack shares. The static fields choose one of three modes:

    - 'train': whole rows, no cache;
    - 'prefill': whole prompts; keys and values are also written to a cache of `cache_length` positions;
    - 'decode': one token per row at `positions_B`, against the cache.
    """

    mask: jax.Array | None = None
    bias: jax.Array | None = None
    rotary: Rotary | None = None
    encoded_BxSxD: jax.Array | None = None
    cross_mask: jax.Array | None = None
    positions_B: jax.Array | None = None
    dropout_keys_B: jax.Array | None = None
    is_causal: bool = struct.field(pytree_node=False, default=False)
    mode: str = struct.field(pytree_node=False, default="train")
    cache_length: int = struct.field(pytree_node=False, default=0)


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
        query_init = fan_in_init
        if not self.scaled:

            def query_init(*args):
                return fan_in_init(*args) / math.sqrt(cfg.head_dim)

        def inward(heads, init):
            return Dense(heads * cfg.head_dim, ("embed", "joined_kv"), cfg.compute_dtype, init)

        self.query = inward(cfg.num_heads, query_init)
        self.key = inward(cfg.kv_heads, fan_in_init)
        self.value = inward(cfg.kv_heads, fan_in_init)
        self.out = Dense(cfg.emb_dim, ("joined_kv", "embed"), cfg.compute_dtype)

    def self_attention(self, x_BxTxD: jax.Array, context: LayerContext) -> jax.Array:
        """Attention of the rows to themselves (in mode 'decode': to everything cached so far)."""
        query, key, value = self._query(x_BxTxD), self._split(self.key(x_BxTxD)), self._split(self.value(x_BxTxD))
        if context.rotary is not None:
            query, key = apply_rotary(query, context.rotary), apply_rotary(key, context.rotary)
        if context.mode == "prefill":
            padding = ((0, 0), (0, context.cache_length - key.shape[1]), (0, 0), (0, 0))
            self.put_variable("cache", "key", jnp.pad(key, padding))
            self.put_variable("cache", "value", jnp.pad(value, padding))
        elif context.mode == "decode":
            key, value = self._cached("key", key, context), self._cached("value", value, context)
        return self._attend(query, key, value, context.mask, context.bias, context.is_causal)

    def cross_attention(self, x_BxTxD: jax.Array, context: LayerContext) -> jax.Array:
        """Attention of the decoder's rows to the encoder's output."""
        if context.mode == "decode":
            key = self.get_variable("cross_cache", "key")
            value = self.get_variable("cross_cache", "value")
        else:
            key = self._split(self.key(context.encoded_BxSxD))
            value = self._split(self.value(context.encoded_BxSxD))
            if context.mode == "prefill":
                self.put_variable("cross_cache", "key", key)
                self.put_variable("cross_cache", "value", value)
        return self._attend(self._query(x_BxTxD), key, value, context.cross_mask, None, False)

    def _cached(self, name: str, new_Bx1xKxH: jax.Array, context: LayerContext) -> jax.Array:
        """Writes each row's new entry at that row's own position; returns the whole cache."""

        def write(row_SxKxH, new_1xKxH, position):
            return jax.lax.dynamic_update_slice_in_dim(row_SxKxH, new_1xKxH, position, axis=0)

        old_BxSxKxH = self.get_variable("cache", name)
        cached_BxSxKxH = jax.vmap(write)(old_BxSxKxH, new_Bx1xKxH, context.positions_B)
        self.put_variable("cache", name, cached_BxSxKxH)
        return cached_BxSxKxH

    def _query(self, x_BxTxD: jax.Array) -> jax.Array:
        return constrain(self._split(self.query(x_BxTxD)), ("batch", "length", "heads", "kv"))

    def _split(self, x_BxTxNH: jax.Array) -> jax.Array:
        return x_BxTxNH.reshape(*x_BxTxNH.shape[:-1], -1, self.config.head_dim)

    def _attend(self, query, key, value, mask, bias, is_causal) -> jax.Array:
        scale = 1.0 / math.sqrt(self.config.head_dim) if self.scaled else 1.0
        if self.config.compute_dtype == jnp.float64:
            y_BxTxNxH = _attend_in_double(query, key, value, mask, bias, is_causal, scale)
        else:  # softmax is float32 inside, whatever the compute dtype
            y_BxTxNxH = jax.nn.dot_product_attention(
                query, key, value, bias=bias, mask=mask, is_causal=is_causal, scale=scale
            )
        return self.out(y_BxTxNxH.reshape(*y_BxTxNxH.shape[:-2], -1))


def _attend_in_double(query_BxTxNxH, key_BxSxKxH, value_BxSxKxH, mask, bias, is_causal, scale) -> jax.Array:
    """softmax(Q Kᵀ · scale + bias, where mask) V in float64, which `jax.nn.dot_product_attention` computes in float32."""
    groups = query_BxTxNxH.shape[2] // key_BxSxKxH.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key_BxSxKxH, value_BxSxKxH))
    logits_BxNxTxS = jnp.einsum("BTNH,BSNH->BNTS", query_BxTxNxH, key) * scale
    if bias is not None:
        logits_BxNxTxS += bias
    if is_causal:
        causal_TxS = jnp.tril(jnp.ones(logits_BxNxTxS.shape[-2:], bool))[None, None]
        mask = causal_TxS if mask is None else mask & causal_TxS
    if mask is not None:
        logits_BxNxTxS = jnp.where(mask, logits_BxNxTxS, jnp.finfo(logits_BxNxTxS.dtype).min / 2)
    return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(logits_BxNxTxS, axis=-1), value)
