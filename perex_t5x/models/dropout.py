"""Dropout with one key per example.

The mask of row b is a function of that row's key, the layer, the site within the layer and the width of the row, and
of nothing else: not of the batch's size, of the row's place in it, of the mesh or of the microbatches. So an example
computed alone, as per-example gradients are, draws the mask it has in the batch.

    keys_B ── fold_in(stack) ── fold_in(layer + 1) ── fold_in(site) ── bits     (layer + 1 = 0: outside the layers)

As in T5, a mask is drawn per feature and shared along the sequence. Attention probabilities are not dropped:
`jax.nn.dot_product_attention` has no such option.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Stacks and sites have fixed numbers: adding one must not change the masks of the others.
ENCODER, DECODER = 0, 1
OUTSIDE_LAYERS = 0
AFTER_EMBEDDING, BEFORE_LOGITS = 0, 1
AFTER_SELF_ATTENTION, AFTER_CROSS_ATTENTION, INSIDE_MLP, AFTER_MLP = 0, 1, 2, 3


def fold(keys_B: jax.Array | None, number: int | jax.Array) -> jax.Array | None:
    """Folds one number into every row's key; None (no dropout) stays None."""
    if keys_B is None:
        return None
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys_B)


def dropout(x_BxTxD: jax.Array, keys_B: jax.Array | None, site: int, rate: float) -> jax.Array:
    """Zeroes each feature of a row with probability `rate` and scales the others by 1 / (1 - rate).

    The identity when `keys_B` is None or `rate` is 0.

    >>> keys_B = jax.random.split(jax.random.key(0), 3)
    >>> x_BxTxD = jnp.ones((3, 2, 4))
    >>> batch = dropout(x_BxTxD, keys_B, site=0, rate=0.5)
    >>> alone = dropout(x_BxTxD[1:2], keys_B[1:2], site=0, rate=0.5)
    >>> bool((batch[1] == alone[0]).all())
    True
    """
    if keys_B is None or rate == 0.0:
        return x_BxTxD
    width = x_BxTxD.shape[-1]
    # Compared as integers, so that the mask does not depend on the float width (jax_enable_x64).
    threshold = jnp.uint32(min(round((1.0 - rate) * 2**32), 2**32 - 1))
    bits_BxD = jax.vmap(lambda key: jax.random.bits(key, (width,), "uint32"))(fold(keys_B, site))
    keep_Bx1xD = (bits_BxD < threshold)[:, None, :]
    return jnp.where(keep_Bx1xD, x_BxTxD / (1.0 - rate), jnp.zeros_like(x_BxTxD))
