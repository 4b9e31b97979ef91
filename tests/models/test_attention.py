import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x.models import attention
from tests.models.model_support import config


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
