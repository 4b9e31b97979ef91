"""Which key each query may see, as boolean [B or 1, 1, T or 1, S] arrays; None where the causal flag says it all."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def causal(length: int) -> jax.Array:
    """[1, 1, T, T]: keys up to and including the query."""
    at_T = jnp.arange(length)
    return (at_T[:, None] >= at_T[None, :])[None, None]


def same_segment(query_segments_BxT: jax.Array, key_segments_BxS: jax.Array) -> jax.Array:
    """[B, 1, T, S]: keys of the query's own packed example."""
    return (query_segments_BxT[:, :, None] == key_segments_BxS[:, None, :])[:, None]


def decoder_self(
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
    mask = causal(length)
    if causal_attention_BxT is not None:
        prefix_BxT = causal_attention_BxT.astype(bool)
        mask = mask | (prefix_BxT[:, :, None] & prefix_BxT[:, None, :])[:, None]
    if segment_ids_BxT is not None:
        mask = mask & same_segment(segment_ids_BxT, segment_ids_BxT)
    return mask


def encoder_self(tokens_BxS: jax.Array, segment_ids_BxS: jax.Array | None) -> jax.Array:
    """Mask of encoder self-attention: keys that are tokens, of the query's own segment when packed."""
    if segment_ids_BxS is None:
        return padding(tokens_BxS)
    return same_segment(segment_ids_BxS, segment_ids_BxS)


def cross(
    encoder_tokens_BxS: jax.Array,
    encoder_segment_ids_BxS: jax.Array | None,
    decoder_segment_ids_BxT: jax.Array | None,
) -> jax.Array:
    """Mask of the decoder's attention to the encoder."""
    if encoder_segment_ids_BxS is None or decoder_segment_ids_BxT is None:
        return padding(encoder_tokens_BxS)
    return same_segment(decoder_segment_ids_BxT, encoder_segment_ids_BxS)


def padding(tokens_BxS: jax.Array) -> jax.Array:
    """[B, 1, 1, S]: keys that are tokens (ids above 0)."""
    return (tokens_BxS > 0)[:, None, None, :]


def up_to(positions_B: jax.Array, num_keys: int) -> jax.Array:
    """[B, 1, 1, S]: keys up to each row's own position, for decoding with a cache."""
    return (jnp.arange(num_keys)[None, :] <= positions_B[:, None])[:, None, None, :]
