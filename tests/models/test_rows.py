"""Examples as rows, against one example at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x.models.rows import examples_as_rows


@pytest.mark.parametrize("in_axes", [(0, None, None), (0, 0, None), (None, 0, None), (0, 0, 0)])
def test_what_is_not_mapped_is_there_for_all_rows(in_axes):
    def function(x_BxT, y_BxT, table_1xT):
        assert len(x_BxT) == len(y_BxT)  # a kernel reads them row by row
        return x_BxT * y_BxT + table_1xT

    draw = np.random.default_rng(0)
    arguments = [jnp.asarray(draw.normal(size=(3, 1, 5) if axis == 0 else (1, 5)), jnp.float32) for axis in in_axes]
    actual = jax.vmap(examples_as_rows(function, shared=(2,)), in_axes)(*arguments)
    np.testing.assert_array_equal(actual, jax.vmap(function, in_axes)(*arguments))
