"""T5's encoder stack: bidirectional self-attention with one relative position bias for all layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from perex_t5x.models import dropout, masks
from perex_t5x.models.attention import LayerContext, MultiHeadAttention
from perex_t5x.models.config import T5Config
from perex_t5x.models.layers import Embed, MlpBlock, RMSNorm
from perex_t5x.models.positions import RelativePositionBias
from perex_t5x.models.stack import apply_layers
from perex_t5x.partitioning import constrain


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and MLP, each added to its input."""

    config: T5Config

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, layer_index: jax.Array | int, context: LayerContext):
        cfg = self.config
        keys_B = dropout.fold(context.dropout_keys_B, layer_index + 1)

        y_BxSxD = RMSNorm(cfg, name="pre_attention_layer_norm")(x_BxSxD)
        y_BxSxD = MultiHeadAttention(cfg, scaled=False, name="attention").self_attention(y_BxSxD, context)
        y_BxSxD = dropout.dropout(y_BxSxD, keys_B, dropout.AFTER_SELF_ATTENTION, cfg.dropout_rate)
        x_BxSxD = constrain(x_BxSxD + y_BxSxD, ("batch", "length", "embed"))

        y_BxSxD = RMSNorm(cfg, name="pre_mlp_layer_norm")(x_BxSxD)
        y_BxSxD = MlpBlock(cfg, name="mlp")(y_BxSxD, keys_B)
        y_BxSxD = dropout.dropout(y_BxSxD, keys_B, dropout.AFTER_MLP, cfg.dropout_rate)
        return constrain(x_BxSxD + y_BxSxD, ("batch", "length", "embed")), None


class Encoder(nn.Module):
    """Tokens to vectors, [B, S, emb_dim]."""

    config: T5Config
    token_embedder: Embed

    @nn.compact
    def __call__(
        self,
        tokens_BxS: jax.Array,
        *,
        segment_ids_BxS: jax.Array | None = None,
        dropout_keys_B: jax.Array | None = None,
    ) -> jax.Array:
        cfg = self.config
        length = tokens_BxS.shape[1]
        relpos_bias = RelativePositionBias(cfg, bidirectional=True, name="relpos_bias")
        stack_keys_B = dropout.fold(dropout_keys_B, dropout.ENCODER)
        outer_keys_B = dropout.fold(stack_keys_B, dropout.OUTSIDE_LAYERS)
        x_BxSxD = self.token_embedder(tokens_BxS)
        x_BxSxD = dropout.dropout(x_BxSxD, outer_keys_B, dropout.AFTER_EMBEDDING, cfg.dropout_rate)
        context = LayerContext(
            mask=masks.encoder_self(tokens_BxS, segment_ids_BxS),
            bias=relpos_bias(jnp.arange(length)[None, :], num_keys=length, max_queries=length),
            dropout_keys_B=stack_keys_B,
        )
        x_BxSxD = apply_layers(EncoderLayer, cfg, cfg.num_encoder_layers, x_BxSxD, context)
        x_BxSxD = RMSNorm(cfg, name="encoder_norm")(x_BxSxD)
        return dropout.dropout(x_BxSxD, outer_keys_B, dropout.BEFORE_LOGITS, cfg.dropout_rate)
