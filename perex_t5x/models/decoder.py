"""The decoder stack, of the decoder-only network (rotary) and of T5 (relative bias, cross-attention)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from perex_t5x.models import dropout, masks
from perex_t5x.models.attention import LayerContext, MultiHeadAttention
from perex_t5x.models.config import T5Config
from perex_t5x.models.layers import Dense, Embed, MlpBlock, RMSNorm
from perex_t5x.models.positions import RelativePositionBias, rotary_tables
from perex_t5x.models.stack import apply_layers
from perex_t5x.partitioning import constrain


class DecoderLayer(nn.Module):
    """Pre-norm self-attention, cross-attention in an encoder-decoder, MLP; each added to its input."""

    config: T5Config
    has_encoder: bool

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, layer_index: jax.Array | int, context: LayerContext):
        cfg = self.config
        keys_B = dropout.fold(context.dropout_keys_B, layer_index + 1)

        y_BxTxD = RMSNorm(cfg, name="pre_self_attention_layer_norm")(x_BxTxD)
        attention = MultiHeadAttention(cfg, scaled=not self.has_encoder, name="self_attention")
        y_BxTxD = attention.self_attention(y_BxTxD, context)
        y_BxTxD = dropout.dropout(y_BxTxD, keys_B, dropout.AFTER_SELF_ATTENTION, cfg.dropout_rate)
        x_BxTxD = constrain(x_BxTxD + y_BxTxD, ("batch", "length", "embed"))

        if self.has_encoder:
            y_BxTxD = RMSNorm(cfg, name="pre_cross_attention_layer_norm")(x_BxTxD)
            attention = MultiHeadAttention(cfg, scaled=False, name="encoder_decoder_attention")
            y_BxTxD = attention.cross_attention(y_BxTxD, context)
            y_BxTxD = dropout.dropout(y_BxTxD, keys_B, dropout.AFTER_CROSS_ATTENTION, cfg.dropout_rate)
            x_BxTxD = constrain(x_BxTxD + y_BxTxD, ("batch", "length", "embed"))

        y_BxTxD = RMSNorm(cfg, name="pre_mlp_layer_norm")(x_BxTxD)
        y_BxTxD = MlpBlock(cfg, name="mlp")(y_BxTxD, keys_B)
        y_BxTxD = dropout.dropout(y_BxTxD, keys_B, dropout.AFTER_MLP, cfg.dropout_rate)
        return constrain(x_BxTxD + y_BxTxD, ("batch", "length", "embed")), None


class Decoder(nn.Module):
    """Tokens to logits. `has_encoder` makes it T5's: relative bias and cross-attention instead of rotary."""

    config: T5Config
    token_embedder: Embed
    has_encoder: bool

    @nn.compact
    def __call__(
        self,
        tokens_BxT: jax.Array,
        *,
        positions_BxT: jax.Array | None = None,
        segment_ids_BxT: jax.Array | None = None,
        causal_attention_BxT: jax.Array | None = None,
        dropout_keys_B: jax.Array | None = None,
        encoded_BxSxD: jax.Array | None = None,
        cross_mask: jax.Array | None = None,
        mode: str = "train",
        cache_length: int = 0,
    ) -> jax.Array:
        """Returns logits, [B, T, vocab_size], in at least float32.

        Args:
          positions_BxT: position of each token; None is 0, 1, ... In mode 'decode' it is required, [B, 1].
          mode, cache_length: see `LayerContext`; in mode 'decode' it is the length of the cache given.
        """
        cfg = self.config
        length = tokens_BxT.shape[1]
        if mode == "decode":
            mask = masks.up_to(positions_BxT[:, 0], cache_length)
        else:
            mask = masks.decoder_self(length, segment_ids_BxT, causal_attention_BxT)
        if positions_BxT is None:
            positions_BxT = jnp.arange(length)[None, :]

        rotary = bias = None
        if not self.has_encoder:
            rotary = rotary_tables(positions_BxT, cfg.head_dim)
        else:
            relpos_bias = RelativePositionBias(cfg, bidirectional=False, name="relpos_bias")
            # Distances within a packed example are those within the row: no need of its own positions.
            at = positions_BxT if mode == "decode" else jnp.arange(length)[None, :]
            keys = cache_length if mode == "decode" else length
            bias = relpos_bias(at, num_keys=keys, max_queries=keys)

        stack_keys_B = dropout.fold(dropout_keys_B, dropout.DECODER)
        outer_keys_B = dropout.fold(stack_keys_B, dropout.OUTSIDE_LAYERS)
        x_BxTxD = self.token_embedder(tokens_BxT)
        x_BxTxD = dropout.dropout(x_BxTxD, outer_keys_B, dropout.AFTER_EMBEDDING, cfg.dropout_rate)
        context = LayerContext(
            mask=mask,
            bias=bias,
            rotary=rotary,
            encoded_BxSxD=encoded_BxSxD,
            cross_mask=cross_mask,
            positions_B=positions_BxT[:, 0] if mode == "decode" else None,
            dropout_keys_B=stack_keys_B,
            is_causal=mask is None,
            mode=mode,
            cache_length=cache_length,
        )
        x_BxTxD = apply_layers(
            DecoderLayer, cfg, cfg.num_decoder_layers, x_BxTxD, context, has_encoder=self.has_encoder
        )
        x_BxTxD = RMSNorm(cfg, name="decoder_norm")(x_BxTxD)
        x_BxTxD = dropout.dropout(x_BxTxD, outer_keys_B, dropout.BEFORE_LOGITS, cfg.dropout_rate)
        if cfg.logits_via_embedding:
            logits_BxTxV = self.token_embedder.attend(x_BxTxD)
        else:
            dense = Dense(cfg.vocab_size, ("embed", "vocab"), cfg.wide_dtype, name="logits_dense")
            logits_BxTxV = dense(x_BxTxD)
        return constrain(logits_BxTxV, ("batch", "length", "vocab"))
