import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x.models import dropout, restack
from tests.models.model_support import MAKE, TWO_LAYERS, batch, close, jit, logits, params


def row(tree, b):
    return jax.tree.map(lambda x: x[b : b + 1], tree)


def test_rate_and_scale():
    keys = jax.random.split(jax.random.key(0), 64)
    y = np.asarray(dropout.dropout(jnp.ones((64, 3, 100)), keys, site=2, rate=0.3))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1) / np.float32(0.7)}
    assert np.mean(y == 0) == pytest.approx(0.3, abs=0.02)
    assert (y == y[:, :1]).all(), "a mask is shared along the sequence"
    other = np.asarray(dropout.dropout(jnp.ones((64, 3, 100)), keys, site=3, rate=0.3))
    assert (y != other).any()


def test_masks_do_not_depend_on_the_float_width():
    key = jax.random.split(jax.random.key(0), 2)
    narrow = dropout.dropout(jnp.ones((2, 1, 50)), key, 0, 0.5)
    with jax.enable_x64(True):
        wide = dropout.dropout(jnp.ones((2, 1, 50), jnp.float64), key, 0, 0.5)
    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("kind", MAKE)
def test_a_row_alone_draws_the_masks_it_has_in_the_batch(kind):
    features = batch(kind)
    model = MAKE[kind](dropout_rate=0.4)
    p = params(model, features)
    keys = jax.random.split(jax.random.key(5), 3)
    compute = jit(model.compute_logits)
    whole = compute(p, features, keys)
    assert float(jnp.abs(whole - logits(model, p, features)).max()) > 0.1
    for b in range(3):
        close(compute(p, row(features, b), keys[b]), whole[b : b + 1], atol=1e-5)
    order = jnp.array([2, 0, 1])
    close(compute(p, {k: x[order] for k, x in features.items()}, keys[order]), whole[order], atol=1e-5)


@pytest.mark.parametrize("kind", MAKE)
def test_scanned_layers_draw_the_masks_of_unrolled_ones(kind):
    features = batch(kind)
    keys = jax.random.split(jax.random.key(5), 3)
    unrolled = MAKE[kind](dropout_rate=0.4, **TWO_LAYERS)
    p = params(unrolled, features)
    scanned = MAKE[kind](dropout_rate=0.4, scan_layers=True, **TWO_LAYERS)
    close(logits(scanned, restack(p), features, keys), logits(unrolled, p, features, keys), atol=1e-5)


def test_layers_and_sites_draw_different_masks():
    keys = jax.random.split(jax.random.key(0), 1)
    ones = jnp.ones((1, 1, 64))
    seen = set()
    for stack in (dropout.ENCODER, dropout.DECODER):
        for layer in range(3):
            for site in range(4):
                folded = dropout.fold(dropout.fold(keys, stack), layer)
                seen.add(np.asarray(dropout.dropout(ones, folded, site, 0.5)).tobytes())
    assert len(seen) == 2 * 3 * 4


@pytest.mark.parametrize(
    "keys, words",
    [
        (jax.random.key(0), "3 rows"),
        (jax.random.split(jax.random.key(0), 2), "3 rows"),
        (jax.random.PRNGKey(0), "typed keys"),
    ],
)
def test_keys_of_the_wrong_kind_are_refused(keys, words):
    features = batch("decoder_only")
    model = MAKE["decoder_only"](dropout_rate=0.1)
    with pytest.raises(ValueError, match=words):
        model.loss_fn({}, features, keys)
