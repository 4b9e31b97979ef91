"""Language models: plain (causal) and prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from perex_t5x.errors import ConfigError
from perex_t5x.models import decoding, losses
from perex_t5x.models.base_model import BaseTransformerModel, Batch, DecodeFn, Params
from perex_t5x.models.config import decoder_only_flops


class DecoderOnlyModel(BaseTransformerModel):
    """A decoder-only language model.

    Features, as `seqio.DecoderFeatureConverter` makes them, [B, T]: `decoder_input_tokens`, `decoder_target_tokens`,
    `decoder_loss_weights`; `decoder_segment_ids` and `decoder_positions` when packed; `decoder_causal_attention` (1 on
    the input part) when the task has inputs. In a packed row each example sees itself only.

    To predict, the prompt of each row is the part marked by `decoder_causal_attention`; without that feature, all
    tokens up to the padding of `decoder_input_tokens`; or plain `inputs`, [B, P], with `max_decode_len`.

    Args:
      inputs_bidirectional_attention: True lets the marked part attend in both directions (a prefix language model).
      Others: see `BaseTransformerModel`.
    """

    REQUIRED_FEATURES = ("decoder_input_tokens",)
    OPTIONAL_FEATURES = ("decoder_positions", "decoder_segment_ids")

    def __init__(
        self,
        module: nn.Module,
        vocabulary: Any,
        optimizer_def: Any,
        loss_normalizing_factor: losses.LossNormalizingFactor = None,
        z_loss: losses.ZLoss = 0.0,
        label_smoothing: losses.Smoothing = 0.0,
        inputs_bidirectional_attention: bool = False,
        decode_fn: DecodeFn = decoding.temperature_sample,
        feature_converter_cls: type | None = None,
    ):
        losses_of = loss_normalizing_factor, z_loss, label_smoothing
        super().__init__(module, optimizer_def, *losses_of, decode_fn, feature_converter_cls)
        self.vocabulary = self.input_vocabulary = self.output_vocabulary = vocabulary
        self.inputs_bidirectional_attention = inputs_bidirectional_attention

    @classmethod
    def FEATURE_CONVERTER_CLS(cls) -> type:  # noqa: N802 (T5X's name)
        import seqio

        return seqio.DecoderFeatureConverter

    def flops_per_step(self, batch_size: int, feature_lengths: Mapping[str, int]) -> float:
        length = feature_lengths.get("decoder_target_tokens")
        if length is None:  # Lengths of the task's features: the converter joins inputs and targets in one row.
            length = feature_lengths["targets"] + feature_lengths.get("inputs", 0)
        return batch_size * decoder_only_flops(self.config, length)

    def _attention_features(self, batch: Mapping[str, Any]) -> dict[str, bool]:
        has_bias = self.config.positions == "relative"
        return {
            "has_bias": has_bias,
            "has_prefix": self.inputs_bidirectional_attention and "decoder_causal_attention" in batch,
        }

    def _network_inputs(self, batch: Batch) -> dict[str, Any]:
        marks_BxT = batch.get("decoder_causal_attention") if self.inputs_bidirectional_attention else None
        return super()._network_inputs(batch) | {"decoder_causal_attention": marks_BxT}

    def _prompts(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns prompts as decoder inputs, [B, P], and the position of each one's last token, [B]."""
        if "decoder_segment_ids" in batch:
            raise ConfigError("predictions need rows of one example each: set DatasetConfig.pack = False.")
        tokens_BxP = batch.get("decoder_input_tokens")
        if tokens_BxP is None:
            tokens_BxP = jnp.pad(batch["inputs"], ((0, 0), (1, 0)))  # The start token, 0, in front.
        marks_BxP = batch.get("decoder_causal_attention")
        if marks_BxP is not None:
            return tokens_BxP * marks_BxP.astype(tokens_BxP.dtype), jnp.sum(marks_BxP, axis=-1, dtype=jnp.int32) - 1
        return tokens_BxP, jnp.sum(tokens_BxP[:, 1:] > 0, axis=-1, dtype=jnp.int32)

    def _start_decoding(self, params: Params, batch: Batch, max_decode_len: int | None) -> decoding.Start:
        prompts_BxP, last_B = self._prompts(batch)
        rows, width = prompts_BxP.shape
        if "decoder_input_tokens" not in batch and max_decode_len is None:
            raise ConfigError("prompts given as 'inputs' leave no room in the row: give max_decode_len.")
        if max_decode_len is None:
            cache_length, limit_B, num_steps = width, width - last_B, width
        else:
            cache_length, num_steps = width + max_decode_len, max_decode_len
            limit_B = jnp.full((rows,), max_decode_len)
        causal_attention_BxP = None
        if self.inputs_bidirectional_attention:
            causal_attention_BxP = (jnp.arange(width)[None, :] <= last_B[:, None]).astype(jnp.int32)
        _, variables = self.module.apply(
            {"params": params},
            prompts_BxP,
            decoder_causal_attention=causal_attention_BxP,
            mode="prefill",
            cache_length=cache_length,
            mutable=["cache"],
        )

        def next_logits(tokens_B, positions_B, cache, _):
            logits_Bx1xV, updated = self.module.apply(
                {"params": params, "cache": cache},
                tokens_B[:, None],
                decoder_positions=positions_B[:, None],
                mode="decode",
                cache_length=cache_length,
                mutable=["cache"],
            )
            return logits_Bx1xV[:, 0], updated["cache"]

        return decoding.Start(
            next_logits=next_logits,
            cache=variables["cache"],
            constants={},
            cache_batch_axis=self._cache_batch_axis,
            # The last prompt token is fed again by the first step, which rewrites the same cache entry.
            tokens_B=jnp.take_along_axis(prompts_BxP, last_B[:, None], axis=1)[:, 0],
            positions_B=last_B,
            limit_B=limit_B,
            num_steps=num_steps,
        )
