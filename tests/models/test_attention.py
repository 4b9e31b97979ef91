import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x.models import attention
from tests.models.model_support import config


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
    actual = attention.apply_rotary(jnp.asarray(x), attention.rotary_tables(jnp.asarray(at), 8, wavelength))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_rotary_products_depend_on_the_difference_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def product(at_q, at_k):
        turned = [
            attention.apply_rotary(x, attention.rotary_tables(jnp.array([[at]]), 16))
            for x, at in ((q, at_q), (k, at_k))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert product(3, 1) == pytest.approx(product(13, 11), abs=1e-4)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_quarter_turn_by_a_product_is_exact(dtype):
    magnitudes = np.exp2(np.arange(-60.0, 60.0, 7.5))  # next to each other: a sum that rounds would show
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 16)) * magnitudes, dtype)
    cotangent = x[::-1].astype(jnp.float32)
    for method in (attention.turned_by_product, attention.turned_by_halves):
        turned, vjp = jax.vjp(functools.partial(method, dtype=jnp.float32), x)
        assert turned.dtype == jnp.float32
        np.testing.assert_array_equal(turned, jnp.concatenate((-x[..., 8:], x[..., :8]), -1).astype(jnp.float32))
        np.testing.assert_array_equal(
            vjp(cotangent)[0], jnp.concatenate((cotangent[..., 8:], -cotangent[..., :8]), -1).astype(dtype)
        )


def scalar_bucket(relative, bidirectional, buckets=32, far=128):
    """One relative position at a time, from the definition."""
    result = 0
    if bidirectional:
        buckets //= 2
        if relative > 0:
            result += buckets
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = buckets // 2
    if distance < exact:
        return result + distance
    steps = np.log(np.float32(distance / exact) + np.finfo(np.float32).eps) / np.log(far / exact) * (buckets - exact)
    return result + min(exact + int(steps), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets(bidirectional):
    relative = np.arange(-300, 301)
    expected = [scalar_bucket(int(r), bidirectional) for r in relative]
    actual = attention.relative_buckets(relative, bidirectional=bidirectional)
    np.testing.assert_array_equal(actual, expected)
    assert actual.min() == 0 and actual.max() == 31


def test_relative_bias_of_one_position_is_a_row_of_the_whole():

    module = attention.RelativePositionBias(config(), bidirectional=False)
    rows = jnp.arange(6)[None]
    variables = module.init(jax.random.key(0), rows, 6, 6)
    whole = module.apply(variables, rows, 6, 6)
    assert whole.shape == (1, 4, 6, 6)
    table = variables["params"]["rel_embedding"].value
    np.testing.assert_allclose(whole[0, :, 4, 1], table[:, 3])
    some = module.apply(variables, jnp.array([[4], [0]]), 6, 6)
    np.testing.assert_allclose(some[:, :, 0], whole[0, :, jnp.array([4, 0])].reshape(2, 4, 6))
