"""The two networks, under T5X's names: `DecoderWrapper` (decoder-only) and `Transformer` (T5 1.1 encoder-decoder).

A T5X Gin file that says `from t5x.examples.t5 import network` becomes `from perex_t5x.models import network`.
"""

from __future__ import annotations

import jax
from flax import linen as nn

from perex_t5x.errors import ConfigError
from perex_t5x.models import masks
from perex_t5x.models.config import T5Config
from perex_t5x.models.decoder import Decoder
from perex_t5x.models.encoder import Encoder
from perex_t5x.models.layers import Embed

__all__ = ["DecoderWrapper", "T5Config", "Transformer"]


class DecoderWrapper(nn.Module):
    """Decoder-only network: pre-norm RMSNorm, rotary positions, gated MLP, causal or prefix attention.

    >>> import jax.numpy as jnp
    >>> config = T5Config(vocab_size=32, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16, num_decoder_layers=1)
    >>> network, tokens_BxT = DecoderWrapper(config), jnp.ones((2, 5), jnp.int32)
    >>> logits, variables = jax.eval_shape(network.init_with_output, jax.random.key(0), tokens_BxT)
    >>> logits.shape
    (2, 5, 32)
    """

    config: T5Config
    gathers_parameters = True

    def setup(self) -> None:
        if self.config.head_dim % 2:
            raise ConfigError(f"T5Config.head_dim = {self.config.head_dim}: rotary positions need an even number.")
        self.token_embedder = Embed(self.config)
        self.decoder = Decoder(self.config, self.token_embedder, has_encoder=False)

    def __call__(
        self,
        decoder_input_tokens: jax.Array,
        decoder_positions: jax.Array | None = None,
        decoder_segment_ids: jax.Array | None = None,
        decoder_causal_attention: jax.Array | None = None,
        dropout_keys_B: jax.Array | None = None,
        mode: str = "train",
        cache_length: int = 0,
    ) -> jax.Array:
        """Returns logits, [B, T, vocab_size]; the arguments are SeqIO's features, [B, T] each."""
        return self.decoder(
            decoder_input_tokens,
            positions_BxT=decoder_positions,
            segment_ids_BxT=decoder_segment_ids,
            causal_attention_BxT=decoder_causal_attention,
            dropout_keys_B=dropout_keys_B,
            mode=mode,
            cache_length=cache_length,
        )


class Transformer(nn.Module):
    """T5 1.1: gated-GELU MLPs, no biases, relative position bias per stack, unscaled attention.

    >>> import jax.numpy as jnp
    >>> config = T5Config(vocab_size=32, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16,
    ...                   num_encoder_layers=1, num_decoder_layers=1)
    >>> network, inputs, targets = Transformer(config), jnp.ones((2, 7), jnp.int32), jnp.ones((2, 5), jnp.int32)
    >>> logits, variables = jax.eval_shape(network.init_with_output, jax.random.key(0), inputs, targets)
    >>> logits.shape
    (2, 5, 32)
    """

    config: T5Config
    gathers_parameters = True

    def setup(self) -> None:
        if self.config.num_encoder_layers < 1:
            raise ConfigError("T5Config.num_encoder_layers = 0: an encoder-decoder needs at least one.")
        self.token_embedder = Embed(self.config)
        self.encoder = Encoder(self.config, self.token_embedder)
        self.decoder = Decoder(self.config, self.token_embedder, has_encoder=True)

    def __call__(
        self,
        encoder_input_tokens: jax.Array,
        decoder_input_tokens: jax.Array,
        encoder_segment_ids: jax.Array | None = None,
        decoder_segment_ids: jax.Array | None = None,
        dropout_keys_B: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits, [B, T, vocab_size]; the arguments are SeqIO's features."""
        encoded_BxSxD = self.encode(encoder_input_tokens, encoder_segment_ids, dropout_keys_B)
        return self.decode(
            encoded_BxSxD,
            encoder_input_tokens,
            decoder_input_tokens,
            encoder_segment_ids=encoder_segment_ids,
            decoder_segment_ids=decoder_segment_ids,
            dropout_keys_B=dropout_keys_B,
        )

    def encode(
        self,
        encoder_input_tokens: jax.Array,
        encoder_segment_ids: jax.Array | None = None,
        dropout_keys_B: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the encoder's output, [B, S, emb_dim]."""
        return self.encoder(encoder_input_tokens, segment_ids_BxS=encoder_segment_ids, dropout_keys_B=dropout_keys_B)

    def decode(
        self,
        encoded_BxSxD: jax.Array | None,
        encoder_input_tokens: jax.Array,
        decoder_input_tokens: jax.Array,
        *,
        encoder_segment_ids: jax.Array | None = None,
        decoder_segment_ids: jax.Array | None = None,
        decoder_positions: jax.Array | None = None,
        dropout_keys_B: jax.Array | None = None,
        mode: str = "train",
        cache_length: int = 0,
    ) -> jax.Array:
        """Returns logits; `encoded_BxSxD` may be None in mode 'decode', which reads `cross_cache`."""
        return self.decoder(
            decoder_input_tokens,
            positions_BxT=decoder_positions,
            segment_ids_BxT=decoder_segment_ids,
            dropout_keys_B=dropout_keys_B,
            encoded_BxSxD=encoded_BxSxD,
            cross_mask=masks.cross(encoder_input_tokens, encoder_segment_ids, decoder_segment_ids),
            mode=mode,
            cache_length=cache_length,
        )
