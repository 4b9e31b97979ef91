"""Sequence to sequence: T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from perex_t5x.arguments import PositiveInt
from perex_t5x.errors import ConfigError
from perex_t5x.models import decoding, losses
from perex_t5x.models.base_model import BaseTransformerModel, Batch, DecodeFn, DecoderParams, Params
from perex_t5x.models.config import encoder_decoder_flops


class EncoderDecoderModel(BaseTransformerModel):
    """A T5 model.

    Features, as `seqio.EncDecFeatureConverter` makes them: `encoder_input_tokens`, [B, S]; `decoder_input_tokens`,
    `decoder_target_tokens`, `decoder_loss_weights`, [B, T]; `*_segment_ids` and `*_positions` when packed.

    To predict, only `encoder_input_tokens` is read, and the width of `decoder_input_tokens` unless `max_decode_len`
    is given; with `prompt_with_targets` also these tokens.

    Args:
      default_decoder_params: what predictions are unless a call says otherwise.
      Others: see `BaseTransformerModel`.
    """

    REQUIRED_FEATURES = ("encoder_input_tokens", "decoder_input_tokens")
    OPTIONAL_FEATURES = ("encoder_segment_ids", "decoder_segment_ids")

    def __init__(
        self,
        module: nn.Module,
        input_vocabulary: Any,
        output_vocabulary: Any,
        optimizer_def: Any,
        loss_normalizing_factor: losses.LossNormalizingFactor = None,
        z_loss: losses.ZLoss = 0.0,
        label_smoothing: losses.Smoothing = 0.0,
        decode_fn: DecodeFn = decoding.beam_search,
        feature_converter_cls: type | None = None,
        default_decoder_params: DecoderParams | None = None,
    ):
        losses_of = loss_normalizing_factor, z_loss, label_smoothing
        super().__init__(module, optimizer_def, *losses_of, decode_fn, feature_converter_cls, default_decoder_params)
        self.input_vocabulary = input_vocabulary
        self.output_vocabulary = output_vocabulary

    @classmethod
    def FEATURE_CONVERTER_CLS(cls) -> type:  # noqa: N802 (T5X's name)
        import seqio

        return seqio.EncDecFeatureConverter

    def _attention_features(self, batch: Mapping[str, Any]) -> dict[str, bool]:
        return {"has_bias": True}

    def flops_per_step(self, batch_size: int, feature_lengths: Mapping[str, int]) -> float:
        inputs = feature_lengths.get("encoder_input_tokens") or feature_lengths["inputs"]
        targets = feature_lengths.get("decoder_target_tokens") or feature_lengths["targets"]
        return batch_size * encoder_decoder_flops(self.config, inputs, targets)

    def predict_batch_with_aux(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None = None,
        *,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool | None = None,
        num_decodes: PositiveInt | None = None,
        max_decode_len: PositiveInt | None = None,
        prompt_with_targets: bool = False,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `BaseTransformerModel.predict_batch_with_aux`.

        Args:
          prompt_with_targets: the decoder continues the targets in `decoder_input_tokens`, which end before their first
            EOS or padding; the result begins with them.
        """
        tokens, aux = self._predict(
            params,
            batch,
            rng,
            decoder_params,
            return_all_decodes,
            num_decodes,
            max_decode_len,
            prompt_with_targets=prompt_with_targets,
        )
        if prompt_with_targets:
            tokens = _after_prompts(*self._prompts(batch), tokens)
        return tokens, aux

    def _prompts(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Decoder inputs up to the first EOS, [B, L], the start token in front; and where each one's last token is."""
        tokens_BxL = jnp.asarray(batch["decoder_input_tokens"])
        is_token_BxL = (tokens_BxL > 0) & (tokens_BxL != (getattr(self.output_vocabulary, "eos_id", 1) or 1))
        in_prompt_BxL = jnp.cumprod(is_token_BxL.at[:, 0].set(True), axis=1)
        return tokens_BxL * in_prompt_BxL, jnp.sum(in_prompt_BxL, axis=1, dtype=jnp.int32) - 1

    def _start_decoding(
        self, params: Params, batch: Batch, max_decode_len: int | None, prompt_with_targets: bool = False
    ) -> decoding.Start:
        if "encoder_segment_ids" in batch:
            raise ConfigError("predictions need rows of one example each: set DatasetConfig.pack = False.")
        if "decoder_input_tokens" not in batch and (max_decode_len is None or prompt_with_targets):
            lacking = "to continue" if prompt_with_targets else "to take a length from: give max_decode_len"
            raise ConfigError(f"the batch has no 'decoder_input_tokens' {lacking}.")
        inputs_BxS = batch["encoder_input_tokens"]
        rows = inputs_BxS.shape[0]
        if prompt_with_targets:
            prompts_BxP, last_B = self._prompts(batch)
        else:
            prompts_BxP, last_B = jnp.zeros((rows, 1), jnp.int32), jnp.zeros((rows,), jnp.int32)
        width = prompts_BxP.shape[1]
        num_steps = max_decode_len or batch["decoder_input_tokens"].shape[1]
        cache_length = num_steps + (width if max_decode_len else 0)
        limit_B = jnp.full((rows,), num_steps) - (0 if max_decode_len else last_B)
        encoded_BxSxD = self.module.apply({"params": params}, inputs_BxS, method="encode")
        _, variables = self.module.apply(
            {"params": params},
            encoded_BxSxD,
            inputs_BxS,
            prompts_BxP,
            mode="prefill",
            cache_length=cache_length,
            mutable=["cache", "cross_cache"],
            method="decode",
        )

        def next_logits(tokens_B, positions_B, cache, constants):
            logits_Bx1xV, updated = self.module.apply(
                {"params": params, "cache": cache, "cross_cache": constants["cross_cache"]},
                None,
                constants["inputs_BxS"],
                tokens_B[:, None],
                decoder_positions=positions_B[:, None],
                mode="decode",
                cache_length=cache_length,
                mutable=["cache"],
                method="decode",
            )
            return logits_Bx1xV[:, 0], updated["cache"]

        return decoding.Start(
            next_logits=next_logits,
            cache=variables["cache"],
            constants={"cross_cache": variables["cross_cache"], "inputs_BxS": inputs_BxS},
            cache_batch_axis=self._cache_batch_axis,
            # The last prompt token is fed again by the first step, which rewrites the same cache entry.
            tokens_B=jnp.take_along_axis(prompts_BxP, last_B[:, None], axis=1)[:, 0],
            positions_B=last_B,
            limit_B=limit_B,
            num_steps=num_steps,
        )


def _after_prompts(prompts_BxL: jax.Array, last_B: jax.Array, tokens: jax.Array) -> jax.Array:
    """New tokens, [B, L] or [B, N, L], behind the prompts, which begin with the start token; cut at L."""
    length = tokens.shape[-1]
    at_BxL = jnp.arange(length)[None, :] - last_B[:, None]
    prompts_BxL = jnp.pad(prompts_BxL[:, 1:], ((0, 0), (0, length)))[:, :length]
    if tokens.ndim == 3:
        at_BxL, prompts_BxL = at_BxL[:, None], prompts_BxL[:, None]
    at = jnp.broadcast_to(jnp.maximum(at_BxL, 0), tokens.shape)
    return jnp.where(at_BxL < 0, prompts_BxL, jnp.take_along_axis(tokens, at, axis=-1)).astype(tokens.dtype)
