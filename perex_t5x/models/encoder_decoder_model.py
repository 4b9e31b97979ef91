"""Sequence to sequence: T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from perex_t5x.errors import ConfigError
from perex_t5x.models import decoding, losses
from perex_t5x.models.base_model import BaseTransformerModel, Batch, Params
from perex_t5x.models.config import encoder_decoder_flops


class EncoderDecoderModel(BaseTransformerModel):
    """A T5 model.

    Features, as `seqio.EncDecFeatureConverter` makes them: `encoder_input_tokens`, [B, S]; `decoder_input_tokens`,
    `decoder_target_tokens`, `decoder_loss_weights`, [B, T]; `*_segment_ids` and `*_positions` when packed.

    To predict, only `encoder_input_tokens` is read, and the width of `decoder_input_tokens` unless `max_decode_len`
    is given.

    Args: see `BaseTransformerModel`.
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
    ):
        super().__init__(module, optimizer_def, loss_normalizing_factor, z_loss, label_smoothing)
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

    def _start_decoding(self, params: Params, batch: Batch, max_decode_len: int | None) -> decoding.Start:
        if "encoder_segment_ids" in batch:
            raise ConfigError("predictions need rows of one example each: set DatasetConfig.pack = False.")
        if max_decode_len is None:
            if "decoder_input_tokens" not in batch:
                raise ConfigError("the batch has no 'decoder_input_tokens' to take a length from: give max_decode_len.")
            max_decode_len = batch["decoder_input_tokens"].shape[1]
        inputs_BxS = batch["encoder_input_tokens"]
        rows = inputs_BxS.shape[0]
        encoded_BxSxD = self.module.apply({"params": params}, inputs_BxS, method="encode")
        start_B = jnp.zeros((rows,), jnp.int32)
        _, variables = self.module.apply(
            {"params": params},
            encoded_BxSxD,
            inputs_BxS,
            start_B[:, None],
            mode="prefill",
            cache_length=max_decode_len,
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
                cache_length=max_decode_len,
                mutable=["cache"],
                method="decode",
            )
            return logits_Bx1xV[:, 0], updated["cache"]

        return decoding.Start(
            next_logits=next_logits,
            cache=variables["cache"],
            constants={"cross_cache": variables["cross_cache"], "inputs_BxS": inputs_BxS},
            cache_batch_axis=self._cache_batch_axis,
            tokens_B=start_B,
            positions_B=start_B,
            limit_B=jnp.full((rows,), max_decode_len),
            num_steps=max_decode_len,
        )
