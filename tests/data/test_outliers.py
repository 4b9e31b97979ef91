"""The task with outliers."""

import numpy as np
import pytest
import seqio
import tensorflow as tf

from perex_t5x.data import outliers


def test_a_share_of_the_examples_is_no_text():
    text = np.tile(np.arange(10, 26, dtype=np.int32), (2000, 1))
    ds = tf.data.Dataset.from_tensor_slices({"targets": text})

    def read():
        with seqio.utils.map_seed_manager(7):
            return np.stack([row["targets"] for row in outliers.replace_some(ds, share=0.25).as_numpy_iterator()])

    rows = read()
    np.testing.assert_array_equal(rows, read())
    changed = (rows != text).any(axis=1)
    repeated = (rows == rows[:, :1]).all(axis=1)
    assert changed.mean() == pytest.approx(0.25, abs=0.04) and repeated.mean() == pytest.approx(0.125, abs=0.03)
    outlying = rows[changed]
    assert outlying.min() >= 3 and outlying.max() <= 258 and rows.dtype == np.int32 and rows.shape == text.shape
