"""The two networks, under T5X's names: `DecoderWrapper` (decoder-only) and `Transformer` (T5's encoder-decoder).

Both are stacks of one kind of `Layer`, unrolled or scanned, with or without rematerialisation, always the same function. A
T5X Gin file that says `from t5x.examples.t5 import network`, or `t5x.examples.decoder_only`, becomes
`from perex_t5x.models import network`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from perex_t5x import partitioning
from perex_t5x.errors import ConfigError
from perex_t5x.models import attention, dropout, remat, splash
from perex_t5x.models.attention import LayerContext, MultiHeadAttention, RelativePositionBias
from perex_t5x.models.config import T5Config, TransformerConfig
from perex_t5x.models.head import Head
from perex_t5x.models.layers import Embed, MlpBlock, OutputProjection, RMSNorm, carried_rms
from perex_t5x.models.rotary import tables as rotary_tables
from perex_t5x.partitioning import constrain

Carry = tuple[jax.Array, jax.Array | None]  # of layers: x [B, T, D], and `carried_rms(x)`

__all__ = ["DecoderWrapper", "T5Config", "Transformer", "TransformerConfig"]


class DecoderWrapper(nn.Module):
    """Decoder-only network: pre-norm RMSNorm, causal or prefix attention; positions are rotary or relative.

    With a `TransformerConfig` it is T5X's: relative position bias, unscaled attention, the embedding inside the decoder.

    >>> import jax.numpy as jnp
    >>> config = T5Config(vocab_size=32, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16, num_decoder_layers=1)
    >>> network, tokens_BxT = DecoderWrapper(config), jnp.ones((2, 5), jnp.int32)
    >>> logits, variables = jax.eval_shape(network.init_with_output, jax.random.key(0), tokens_BxT)
    >>> logits.shape
    (2, 5, 32)
    """

    config: T5Config
    gathers_parameters = True
    takes_head = True

    def setup(self) -> None:
        if self.config.positions == "relative":  # T5X's parameter is decoder/token_embedder/embedding
            self.decoder = Decoder(self.config, None, has_encoder=False)
            return
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
        head: Head | None = None,
    ) -> Any:
        """Returns logits, [B, T, vocab_size], or what `head` makes; the arguments are SeqIO's features, [B, T] each."""
        return self.decoder(
            decoder_input_tokens,
            positions_BxT=decoder_positions,
            segment_ids_BxT=decoder_segment_ids,
            causal_attention_BxT=decoder_causal_attention,
            dropout_keys_B=dropout_keys_B,
            mode=mode,
            cache_length=cache_length,
            head=head,
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
    takes_head = True

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
        head: Head | None = None,
    ) -> Any:
        """Returns logits, [B, T, vocab_size], or what `head` makes; the arguments are SeqIO's features."""
        encoded_BxSxD = self.encode(encoder_input_tokens, encoder_segment_ids, dropout_keys_B)
        return self.decode(
            encoded_BxSxD,
            encoder_input_tokens,
            decoder_input_tokens,
            encoder_segment_ids=encoder_segment_ids,
            decoder_segment_ids=decoder_segment_ids,
            dropout_keys_B=dropout_keys_B,
            head=head,
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
        head: Head | None = None,
    ) -> Any:
        """Returns logits, or what `head` makes; `encoded_BxSxD` may be None in mode 'decode', which reads `cross_cache`."""
        return self.decoder(
            decoder_input_tokens,
            positions_BxT=decoder_positions,
            segment_ids_BxT=decoder_segment_ids,
            dropout_keys_B=dropout_keys_B,
            encoded_BxSxD=encoded_BxSxD,
            cross_mask=attention.cross_mask(encoder_input_tokens, encoder_segment_ids, decoder_segment_ids),
            mode=mode,
            cache_length=cache_length,
            head=head,
        )


# --- stacks ------------------------------------------------------------------------------------------------------------


class _Stack(nn.Module):
    """What the encoder and the decoder share: embedding in front of the layers, a norm behind them, dropout at both."""

    config: T5Config
    shared_embedder: Embed | None  # None: one of the stack's own

    def _embed(
        self, embedder: Embed, tokens_BxT: jax.Array, dropout_keys_B: jax.Array | None, stack: int
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Returns embedded tokens, and the keys of dropout inside and outside the layers."""
        stack_keys_B = dropout.fold(dropout_keys_B, stack)
        outer_keys_B = dropout.fold(stack_keys_B, dropout.OUTSIDE_LAYERS)
        x_BxTxD = embedder(tokens_BxT)
        x_BxTxD = dropout.dropout(x_BxTxD, outer_keys_B, dropout.AFTER_EMBEDDING, self.config.dropout_rate)
        return x_BxTxD, stack_keys_B, outer_keys_B

    def _normed(self, carry: Carry, outer_keys_B: jax.Array | None, name: str) -> jax.Array:
        x_BxTxD = RMSNorm(self.config, name=name)(*carry)
        return dropout.dropout(x_BxTxD, outer_keys_B, dropout.BEFORE_LOGITS, self.config.dropout_rate)


class Encoder(_Stack):
    """T5's encoder, tokens to vectors: bidirectional self-attention with one relative position bias for all layers."""

    @nn.compact
    def __call__(
        self,
        tokens_BxS: jax.Array,
        *,
        segment_ids_BxS: jax.Array | None = None,
        dropout_keys_B: jax.Array | None = None,
    ) -> jax.Array:
        """Returns [B, S, emb_dim]."""
        cfg = self.config
        length = tokens_BxS.shape[1]
        positions_1xS = jnp.arange(length)[None, :]
        per_layer = cfg.relative_bias == "per_layer"
        bias = None if per_layer else _relative_bias(cfg, positions_1xS, length, bidirectional=True)
        embedder = cast(Embed, self.shared_embedder)  # an encoder has none of its own
        x_BxSxD, stack_keys_B, outer_keys_B = self._embed(embedder, tokens_BxS, dropout_keys_B, dropout.ENCODER)
        context = LayerContext(
            mask=attention.encoder_self_mask(tokens_BxS, segment_ids_BxS),
            bias=bias,
            relative_positions_BxT=positions_1xS if per_layer else None,
            relative_keys=length,
            dropout_keys_B=stack_keys_B,
        )
        kind = {"self_attention": "attention", "scaled": False, "has_encoder": False}
        carry = apply_layers(cfg, cfg.num_encoder_layers, x_BxSxD, context, **kind)
        return self._normed(carry, outer_keys_B, "encoder_norm")


class Decoder(_Stack):
    """Tokens to logits. `has_encoder` makes it T5's: relative bias and cross-attention."""

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
        head: Head | None = None,
    ) -> Any:
        """Returns logits, [B, T, vocab_size], in at least float32, or what `head` makes of what they are made of.

        Args:
          positions_BxT: position of each token; None is 0, 1, ... In mode 'decode' it is required, [B, 1].
          mode, cache_length: see `LayerContext`; in mode 'decode' it is the length of the cache given.
        """
        cfg = self.config
        rows, length = tokens_BxT.shape
        is_relative = self.has_encoder or cfg.positions == "relative"
        features = {"has_bias": is_relative, "has_prefix": causal_attention_BxT is not None}
        # While parameters are made, any attention will do: the program may be on other devices than the model's.
        by_splash = not self.is_initializing() and splash.use(cfg, rows, length, mode, **features)
        if by_splash:
            mask = None
        elif mode == "decode":
            mask = attention.cache_mask(cast(jax.Array, positions_BxT)[:, 0], cache_length)
        else:
            mask = attention.decoder_self_mask(length, segment_ids_BxT, causal_attention_BxT)
        if positions_BxT is None:
            positions_BxT = jnp.arange(length)[None, :]

        rotary = bias = None
        # Distances within a packed example are those within the row: no need of its own positions.
        at_BxT = positions_BxT if mode == "decode" else jnp.arange(length)[None, :]
        keys = cache_length if mode == "decode" else length
        per_layer = is_relative and cfg.relative_bias == "per_layer"
        if not is_relative:
            rotary = rotary_tables(positions_BxT, cfg.head_dim, cfg.rotary_max_wavelength)
        elif not per_layer:
            bias = _relative_bias(cfg, at_BxT, keys, bidirectional=False)

        embedder = self.shared_embedder or Embed(cfg, name="token_embedder")
        x_BxTxD, stack_keys_B, outer_keys_B = self._embed(embedder, tokens_BxT, dropout_keys_B, dropout.DECODER)
        context = LayerContext(
            mask=mask,
            bias=bias,
            rotary=rotary,
            encoded_BxSxD=encoded_BxSxD,
            cross_mask=cross_mask,
            positions_B=positions_BxT[:, 0] if mode == "decode" else None,
            dropout_keys_B=stack_keys_B,
            segment_ids_BxT=segment_ids_BxT if by_splash else None,
            relative_positions_BxT=at_BxT if per_layer else None,
            relative_keys=keys,
            is_causal=mask is None,
            mode=mode,
            cache_length=cache_length,
            splash=by_splash,
        )
        kind = {"self_attention": "self_attention", "scaled": not is_relative, "has_encoder": self.has_encoder}
        carry = apply_layers(cfg, cfg.num_decoder_layers, x_BxTxD, context, **kind)
        x_BxTxD = self._normed(carry, outer_keys_B, "decoder_norm")
        if cfg.logits_via_embedding:
            return embedder.attend(x_BxTxD, head)
        return OutputProjection(cfg, name="logits_dense")(x_BxTxD, head)


def _relative_bias(config: T5Config, positions_BxT: jax.Array, keys: int, bidirectional: bool) -> jax.Array:
    """[B, heads, T, keys]; call it inside a compact method."""
    bias = RelativePositionBias(config, bidirectional=bidirectional, name="relpos_bias")
    return bias(positions_BxT, num_keys=keys, max_queries=keys)


# --- layers ------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Pre-norm self-attention, cross-attention if `has_encoder`, MLP; each added to its input.

    Attributes:
      config: sizes.
      self_attention: T5X's name of the block: 'self_attention' in a decoder, 'attention' in the encoder.
      scaled: see `MultiHeadAttention`.
      has_encoder: whether it attends to `context.encoded_BxSxD`.
    """

    config: T5Config
    self_attention: str
    scaled: bool
    has_encoder: bool

    @nn.compact
    def __call__(self, carry: Carry, layer_index: jax.Array | int, context: LayerContext) -> tuple[Carry, None]:
        cfg = self.config
        x_BxTxD, inverse_BxTx1 = carry
        keys_B = dropout.fold(context.dropout_keys_B, layer_index + 1)
        if context.relative_positions_BxT is not None:
            where = context.relative_positions_BxT, context.relative_keys
            is_encoder = self.self_attention == "attention"
            context = dataclasses.replace(context, bias=_relative_bias(cfg, *where, bidirectional=is_encoder))

        def add(x_BxTxD: jax.Array, y_BxTxD: jax.Array, site: int) -> jax.Array:
            y_BxTxD = dropout.dropout(y_BxTxD, keys_B, site, cfg.dropout_rate)
            return constrain(x_BxTxD + y_BxTxD, ("batch", "length", "embed"))

        y_BxTxD = RMSNorm(cfg, name=f"pre_{self.self_attention}_layer_norm")(x_BxTxD, inverse_BxTx1)
        block = MultiHeadAttention(cfg, scaled=self.scaled, name=self.self_attention)
        x_BxTxD = add(x_BxTxD, block.self_attention(y_BxTxD, context), dropout.AFTER_SELF_ATTENTION)
        # The sum, not the projection: the norm and its derivative need nothing else.
        x_BxTxD, inverse_BxTx1 = remat.named((x_BxTxD, carried_rms(x_BxTxD, cfg)), "out")
        if self.has_encoder:
            y_BxTxD = RMSNorm(cfg, name="pre_cross_attention_layer_norm")(x_BxTxD, inverse_BxTx1)
            block = MultiHeadAttention(cfg, scaled=False, name="encoder_decoder_attention")
            x_BxTxD = add(x_BxTxD, block.cross_attention(y_BxTxD, context), dropout.AFTER_CROSS_ATTENTION)
            x_BxTxD, inverse_BxTx1 = remat.named((x_BxTxD, carried_rms(x_BxTxD, cfg)), "out")
        y_BxTxD = RMSNorm(cfg, name="pre_mlp_layer_norm")(x_BxTxD, inverse_BxTx1)
        x_BxTxD = add(x_BxTxD, MlpBlock(cfg, name="mlp")(y_BxTxD, keys_B), dropout.AFTER_MLP)
        return (x_BxTxD, carried_rms(x_BxTxD, cfg)), None


def apply_layers(config: T5Config, num_layers: int, x_BxTxD: jax.Array, context: LayerContext, **kwargs) -> Carry:
    """Applies `num_layers` layers; call it inside a compact method.

    Parameters are `layers_0`, `layers_1`, ... unrolled, or one `layers` whose leaves have a leading axis `layers`
    when `config.scan_layers`. `restack` turns the first into the second.

    Args:
      kwargs: given to `Layer`, beside `config`.
    """
    policy = remat.policy_for_jax(config.remat_policy, gathers=partitioning.has_sharded_parameters())
    layer_cls = Layer
    if policy is not None and context.mode == "train":
        # A scan's body cannot be merged with its own recomputation; unrolled layers could be, and must not.
        layer_cls = nn.remat(layer_cls, policy=policy, prevent_cse=not config.scan_layers)
    carry = x_BxTxD, carried_rms(x_BxTxD, config)
    if not config.scan_layers:
        for i in range(num_layers):
            carry, _ = layer_cls(config=config, name=f"layers_{i}", **kwargs)(carry, i, context)
        return carry
    scanned_cls = nn.scan(
        layer_cls,
        variable_axes={"params": 0, "cache": 0, "cross_cache": 0},
        split_rngs={"params": True},
        in_axes=cast(Any, (0, nn.broadcast)),  # said to be one number
        length=num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    scanned = scanned_cls(config=config, name="layers", **kwargs)
    carry, _ = scanned(carry, jnp.arange(num_layers, dtype=jnp.int32), context)
    return carry


def restack(params: dict) -> dict:
    """Turns unrolled parameters (`layers_0`, ...) into scanned ones (`layers`, leading axis of layers).

    >>> import numpy as np
    >>> unrolled = {"decoder": {"layers_0": {"w": np.zeros(3)}, "layers_1": {"w": np.ones(3)}}}
    >>> restack(unrolled)["decoder"]["layers"]["w"].shape
    (2, 3)
    """
    result, layers = {}, {}
    for name, value in params.items():
        prefix, _, number = name.rpartition("_")
        if prefix == "layers" and number.isdigit():
            layers[int(number)] = value
        else:
            result[name] = restack(value) if isinstance(value, dict) else value
    if layers:
        result["layers"] = jax.tree.map(lambda *x: jnp.stack(x), *(layers[i] for i in sorted(layers)))
    return result
