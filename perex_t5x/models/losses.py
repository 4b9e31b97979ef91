"""Cross entropy with z-loss and label smoothing, and what a batch's loss is divided by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, NamedTuple, cast

import jax
import jax.numpy as jnp

from perex_t5x.arguments import Interval
from perex_t5x.errors import ConfigError, did_you_mean

LossNormalizingFactor = Annotated[float, Interval("(0, ∞)")] | str | None
ZLoss = Annotated[float, Interval("[0, ∞)")]
Smoothing = Annotated[float, Interval("[0, 1)")]

NORMALIZERS = ("NUM_REAL_TARGET_TOKENS", "NUM_TOTAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE")


class TokenLosses(NamedTuple):
    """Per token, [B, T], unweighted."""

    loss: jax.Array  # z-loss included
    z_loss: jax.Array
    log_likelihood: jax.Array  # log p(target), without smoothing
    correct: jax.Array  # bool: no other token has a larger logit


class LogitSums(NamedTuple):
    """Of each token's logits."""

    max_BxT: jax.Array
    log_z_BxT: jax.Array  # log Σ_v exp(logit_v)
    target_BxT: jax.Array  # the target's logit
    total_BxT: jax.Array | None  # Σ_v logit_v, where labels are smoothed


def cross_entropy(
    logits_BxTxV: jax.Array, targets_BxT: jax.Array, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> TokenLosses:
    """Cross entropy of each token.

    With log Z = log Σ_v exp(logit_v), smoothing ε, low = ε / (V - 1) and target distribution q = 1 - ε at the target
    and low elsewhere:

        loss = -Σ_v q_v (logit_v - log Z) - H(q) + z_loss · (log Z)²

    H(q), the least value of the first term, is subtracted as in T5X, so that a perfect prediction has loss 0.

    >>> logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25]]]))
    >>> round(float(cross_entropy(logits, jnp.array([[1]])).loss[0, 0]), 4)
    1.3863
    """
    sums = logit_sums(logits_BxTxV, targets_BxT, bool(label_smoothing))
    return token_losses(sums, logits_BxTxV.shape[-1], z_loss, label_smoothing)


def logit_sums(logits_BxTxV: jax.Array, targets_BxT: jax.Array, with_total: bool) -> LogitSums:
    """What the loss of each token needs to know of its logits."""
    # A comparison instead of a gather: it fuses with the sum, its gradient is no scatter, and a sharded vocabulary
    # needs one small reduction only.
    is_target_BxTxV = jnp.arange(logits_BxTxV.shape[-1])[None, None, :] == targets_BxT[:, :, None]
    target_BxT = jnp.sum(jnp.where(is_target_BxTxV, logits_BxTxV, 0), axis=-1)
    max_BxT = jax.lax.stop_gradient(jnp.max(logits_BxTxV, axis=-1))
    log_z_BxT = max_BxT + jnp.log(jnp.sum(jnp.exp(logits_BxTxV - max_BxT[:, :, None]), axis=-1))
    return LogitSums(max_BxT, log_z_BxT, target_BxT, jnp.sum(logits_BxTxV, axis=-1) if with_total else None)


def token_losses(sums: LogitSums, size: int, z_loss: float, label_smoothing: float) -> TokenLosses:
    """The losses of tokens over a vocabulary of this size; see `cross_entropy`."""
    expected_logit_BxT, entropy = sums.target_BxT, 0.0
    if label_smoothing:
        confidence, low = 1.0 - label_smoothing, label_smoothing / (size - 1)
        total_BxT = cast(jax.Array, sums.total_BxT)  # there where labels are smoothed
        expected_logit_BxT = confidence * sums.target_BxT + low * (total_BxT - sums.target_BxT)
        entropy = -(confidence * math.log(confidence) + (size - 1) * low * math.log(low))
    z_loss_BxT = z_loss * jnp.square(sums.log_z_BxT)
    return TokenLosses(
        loss=sums.log_z_BxT - expected_logit_BxT - entropy + z_loss_BxT,
        z_loss=z_loss_BxT,
        log_likelihood=sums.target_BxT - sums.log_z_BxT,
        correct=sums.target_BxT >= sums.max_BxT,
    )


def raw_loss_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
    """The batch's `decoder_loss_weights` in float32, or 1 for every target that is not padding."""
    weights_BxT = batch.get("decoder_loss_weights")
    if weights_BxT is None:
        weights_BxT = batch["decoder_target_tokens"] > 0
    return weights_BxT.astype(jnp.float32)


def loss_weights(batch: Mapping[str, jax.Array], factor: LossNormalizingFactor) -> jax.Array:
    """Weight of each token in the loss; with 'AVERAGE_PER_SEQUENCE' every sequence's weights sum to 1.

    A sequence is a row, or a segment of it when the row is packed. Rows do not depend on each other.
    """
    weights_BxT = raw_loss_weights(batch)
    if factor != "AVERAGE_PER_SEQUENCE":
        return weights_BxT
    segments_BxT = batch.get("decoder_segment_ids")
    if segments_BxT is None:
        total = jnp.sum(weights_BxT, axis=-1, keepdims=True)
    else:
        same_BxTxT = segments_BxT[:, :, None] == segments_BxT[:, None, :]
        total = jnp.sum(jnp.where(same_BxTxT, weights_BxT[:, None, :], 0.0), axis=-1)
    return jnp.where(total > 0, weights_BxT / jnp.where(total > 0, total, 1.0), 0.0)


def normalizer(batch: Mapping[str, jax.Array], factor: LossNormalizingFactor) -> jax.Array:
    """W of the batch given: what its summed loss is divided by. 1 where there is nothing to count.

    | factor | W |
    |---|---|
    | None | 1 |
    | a number | the number |
    | 'NUM_REAL_TARGET_TOKENS' | the sum of the loss weights; without them, targets that are not padding |
    | 'NUM_TOTAL_TARGET_TOKENS' | all targets, B · T |
    | 'AVERAGE_PER_SEQUENCE' | sequences that have any weight (see `loss_weights`) |

    >>> batch = {"decoder_target_tokens": jnp.array([[5, 1, 0, 0], [7, 8, 9, 1]])}
    >>> [float(normalizer(batch, f)) for f in (None, 10, *NORMALIZERS)]
    [1.0, 10.0, 6.0, 8.0, 2.0]
    """
    targets_BxT = batch["decoder_target_tokens"]
    if factor == "NUM_REAL_TARGET_TOKENS":
        total = jnp.sum(raw_loss_weights(batch))
        return jnp.where(total > 0, total, 1.0)
    if factor == "NUM_TOTAL_TARGET_TOKENS":
        return jnp.float32(targets_BxT.size)
    if factor == "AVERAGE_PER_SEQUENCE":
        # The weights of each sequence sum to 1 up to rounding: the sum is the number of sequences.
        return jnp.maximum(jnp.sum(loss_weights(batch, factor)), 1.0)
    return jnp.float32(1.0 if factor is None else factor)


def check_loss_arguments(model: str, factor: LossNormalizingFactor, z_loss: float, label_smoothing: float) -> None:
    """Raises a `ConfigError` that names the binding of the argument that is not usable."""
    if isinstance(factor, str):
        if factor not in NORMALIZERS:
            raise ConfigError(
                f"{model}.loss_normalizing_factor: unknown {factor!r}.{did_you_mean(factor, NORMALIZERS)} "
                f"Give None, a number, or one of {', '.join(NORMALIZERS)}."
            )
    elif factor is not None and not factor > 0:
        raise ConfigError(f"{model}.loss_normalizing_factor = {factor!r}: must be positive.")
    if z_loss < 0:
        raise ConfigError(f"{model}.z_loss = {z_loss!r}: must not be negative (T5 uses 0.0001).")
    if not 0.0 <= label_smoothing < 1.0:
        raise ConfigError(f"{model}.label_smoothing = {label_smoothing!r}: must be in [0, 1).")
