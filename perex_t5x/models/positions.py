"""Where a token stands: rotary embeddings (decoder-only) and T5's relative position bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from perex_t5x.models.config import T5Config
from perex_t5x.models.parameters import parameter

Rotary = tuple[jax.Array, jax.Array]


def rotary_tables(positions_BxT: jax.Array, head_dim: int, max_wavelength: float = 10_000.0) -> Rotary:
    """Returns (sin, cos), [B, T, 1, head_dim / 2], of position · max_wavelength^(-2i / head_dim), in float32."""
    exponents_F = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies_F = jnp.asarray(max_wavelength**-exponents_F, jnp.float32)
    angles_BxTxF = positions_BxT.astype(jnp.float32)[..., None] * frequencies_F[None, None, :]
    angles_BxTx1xF = angles_BxTxF[:, :, None, :]
    return jnp.sin(angles_BxTx1xF), jnp.cos(angles_BxTx1xF)


def apply_rotary(x_BxTxNxH: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotates each pair (x_i, x_{i + H/2}) by its position's angle; products of two rotated vectors depend on the
    difference of their positions only."""
    sin, cos = rotary
    wide = jnp.promote_types(x_BxTxNxH.dtype, jnp.float32)
    first, second = jnp.split(x_BxTxNxH.astype(wide), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x_BxTxNxH.dtype)


def relative_buckets(
    relative_positions: np.ndarray, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> np.ndarray:
    """T5's bucket of each (key position - query position).

    Half of the buckets hold one distance each, the other half grow logarithmically up to `max_distance`, and all
    beyond share the last. Bidirectional: one such half range for keys before the query, one for keys after. Causal:
    keys after the query all fall into bucket 0 (the mask hides them).

    >>> relative_buckets(np.array([0, -1, -15, -16, -200, 3]), bidirectional=False)
    array([ 0,  1, 15, 16, 31,  0])
    """
    distance = -np.asarray(relative_positions)
    offset = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = np.where(distance < 0, num_buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(distance, 0)
    exact = num_buckets // 2
    # float32 with its epsilon, as T5 computes it: the borders between buckets depend on the rounding.
    ratio = distance.astype(np.float32) / exact + np.finfo(np.float32).eps
    grown = exact + (np.log(ratio) / np.log(max_distance / exact) * (num_buckets - exact)).astype(np.int32)
    return offset + np.where(distance < exact, distance, np.minimum(grown, num_buckets - 1))


class RelativePositionBias(nn.Module):
    """A learned number per head and bucket of relative position, added to the attention logits of every layer."""

    config: T5Config
    bidirectional: bool
    num_buckets: int = 32
    max_distance: int = 128

    @nn.compact
    def __call__(self, query_positions_BxT: jax.Array, num_keys: int, max_queries: int) -> jax.Array:
        """Returns [B, heads, T, num_keys] for queries at the given positions (below `max_queries`)."""
        wide = self.config.wide_dtype
        rel_embedding_NxR = parameter(
            self,
            "rel_embedding",
            nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
            ("heads", "relpos_buckets"),
            (self.config.num_heads, self.num_buckets),
            wide,
        )
        # Every possible difference once, in numpy: exact borders, and positions may still be traced (decoding).
        table = relative_buckets(
            np.arange(-(max_queries - 1), num_keys),
            bidirectional=self.bidirectional,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        keys_1x1xS = jnp.arange(num_keys)[None, None, :]
        relative_BxTxS = keys_1x1xS - query_positions_BxT[:, :, None]
        buckets_BxTxS = jnp.asarray(table, jnp.int32)[relative_BxTxS + (max_queries - 1)]
        # A product with one-hot vectors: its gradient is a product too, where a gather's would be a scatter.
        one_hot_BxTxSxR = jax.nn.one_hot(buckets_BxTxS, self.num_buckets, dtype=wide)
        return jnp.einsum("NR,BTSR->BNTS", rel_embedding_NxR, one_hot_BxTxSxR)
