"""Rotary positions: each pair (x_i, x_{i + H/2}) of a head is rotated by an angle that grows with the position.

    y = x · cos + swapped(x) · sin        swapped(x) = (x_{i + H/2}, x_i); sin is negated in the first half of a head

Products of two rotated vectors depend on the difference of their positions only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x.per_example.kernels.dispatch import for_tpu

Rotary = tuple[jax.Array, jax.Array]  # (sin, cos), float32, [B or 1, T, H]


def tables(positions_BxT: jax.Array, head_dim: int, max_wavelength: float = 10_000.0) -> Rotary:
    """Returns (sin, cos) of position · max_wavelength^(-2i / head_dim), i < head_dim / 2, twice; the first sin negated.

    Both halves of a head are rotated by the same angles.
    """
    exponents_F = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies_H = jnp.asarray(np.tile(max_wavelength**-exponents_F, 2), jnp.float32)
    sign_H = jnp.asarray(np.repeat([-1.0, 1.0], head_dim // 2), jnp.float32)
    angles_BxTxH = positions_BxT.astype(jnp.float32)[..., None] * frequencies_H[None, None, :]
    found = jnp.sin(angles_BxTxH) * sign_H[None, None, :], jnp.cos(angles_BxTxH)
    # Once, not in every layer: XLA would rather compute them again than read them.
    return jax.lax.optimization_barrier(found) if for_tpu() else found


def apply(x_BxTxNxH: jax.Array, rotary: Rotary, scale: float = 1.0) -> jax.Array:
    """The rotated heads, times `scale`; computed in at least float32, rounded once.

    >>> x_1x1x1x2 = jnp.array([[[[1.0, 0.0]]]])
    >>> [round(float(x), 3) for x in apply(x_1x1x1x2, tables(jnp.array([[2]]), 2)).ravel()]  # by 2 radians
    [-0.416, 0.909]
    """
    sin, cos = (x_BxTxH[:, :, None, :] * scale for x_BxTxH in rotary)
    wide = jnp.promote_types(x_BxTxNxH.dtype, jnp.float32)
    swapped = swapped_by_product(x_BxTxNxH, wide) if for_tpu() else swapped_by_halves(x_BxTxNxH, wide)
    return (x_BxTxNxH.astype(wide) * cos + swapped * sin).astype(x_BxTxNxH.dtype)


def swapped_by_halves(x_BxTxNxH: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """(x_{i + H/2}, x_i)."""
    first, second = jnp.split(x_BxTxNxH.astype(dtype), 2, axis=-1)
    return jnp.concatenate((second, first), axis=-1)


def swapped_by_product(x_BxTxNxH: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The same as a product with a matrix that has a single 1 in each row and column: exact.

    On TPUs half a head is less than a row of a tile, so that halves are copied; the product is next to nothing.
    """
    half = x_BxTxNxH.shape[-1] // 2
    eye_FxF, zero_FxF = np.eye(half), np.zeros((half, half))
    swap_HxH = jnp.asarray(np.block([[zero_FxF, eye_FxF], [eye_FxF, zero_FxF]]), x_BxTxNxH.dtype)
    # The matrix units multiply bfloat16: what is wider goes through them in parts, none of them dropped.
    precision = None if x_BxTxNxH.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(
        x_BxTxNxH, swap_HxH, (((x_BxTxNxH.ndim - 1,), (0,)), ((), ())), precision, preferred_element_type=dtype
    )
