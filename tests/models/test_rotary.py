"""Rotary positions against their definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x.models import rotary


@pytest.mark.parametrize("wavelength", [10_000.0, 500.0])
def test_rotary_is_a_rotation_of_pairs(wavelength):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
    at = np.array([[0, 1, 2, 3, 4], [7, 8, 0, 1, 30]])
    expected = np.empty_like(x)
    for b, t, i in np.ndindex(2, 5, 4):
        angle = at[b, t] * wavelength ** (-2 * i / 8)
        pair = x[b, t, :, i] + 1j * x[b, t, :, i + 4]
        turned = pair * np.exp(1j * angle)
        expected[b, t, :, i], expected[b, t, :, i + 4] = turned.real, turned.imag
    actual = rotary.apply(jnp.asarray(x), rotary.tables(jnp.asarray(at), 8, wavelength))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_rotary_products_depend_on_the_difference_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def product(at_q, at_k):
        turned = [rotary.apply(x, rotary.tables(jnp.array([[at]]), 16)) for x, at in ((q, at_q), (k, at_k))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert product(3, 1) == pytest.approx(product(13, 11), abs=1e-4)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_halves_swapped_by_a_product_are_exact(dtype):
    magnitudes = np.exp2(np.arange(-60.0, 60.0, 7.5))  # next to each other: a sum that rounds would show
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 16)) * magnitudes, dtype)
    cotangent = x[::-1].astype(jnp.float32)
    for method in (rotary.swapped_by_product, rotary.swapped_by_halves):
        swapped, vjp = jax.vjp(functools.partial(method, dtype=jnp.float32), x)
        assert swapped.dtype == jnp.float32
        np.testing.assert_array_equal(swapped, jnp.concatenate((x[..., 8:], x[..., :8]), -1).astype(jnp.float32))
        np.testing.assert_array_equal(
            vjp(cotangent)[0], jnp.concatenate((cotangent[..., 8:], cotangent[..., :8]), -1).astype(dtype)
        )
