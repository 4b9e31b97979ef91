"""`loss_fn` and its company: what is divided by what, and what adds up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x.errors import ConfigError
from tests.models.model_support import (
    MAKE,
    TWO_LAYERS,
    batch,
    close,
    decoder_only,
    encoder_decoder,
    jit,
    logits,
    params,
)

FACTORS = ["NUM_REAL_TARGET_TOKENS", None, 7.0, "NUM_TOTAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE"]


def test_sums_from_the_logits():
    features = batch("decoder_only")
    features["decoder_loss_weights"] = features["decoder_loss_weights"].at[0, :2].set(0)
    model = decoder_only(z_loss=1e-2)
    p = params(model, features)
    loss, sums = jit(model.loss_fn)(p, features)
    computed = np.asarray(logits(model, p, features), np.float64)
    targets, weights = np.asarray(features["decoder_target_tokens"]), np.asarray(features["decoder_loss_weights"])
    log_z = np.log(np.exp(computed).sum(-1))
    nll = log_z - np.take_along_axis(computed, targets[..., None], -1)[..., 0]
    expected = {
        "loss": ((nll + 1e-2 * log_z**2) * weights).sum(),
        "z_loss": (1e-2 * log_z**2 * weights).sum(),
        "correct": ((computed.argmax(-1) == targets) * weights).sum(),
        "weights": 18,
        "tokens": 20,
        "all_tokens": 27,
        "examples": 3,
    }
    close(sums, expected)
    close(loss, expected["loss"] / 18)
    logged = model.summarize_metrics({name: float(x) for name, x in sums.items()}, float(loss))
    close(logged["loss_per_nonpadding_target_token"], expected["loss"] / 18)
    close(logged["nonpadding_fraction"], 20 / 27)
    assert {x.dtype for x in sums.values()} == {jnp.dtype("float32")}
    close(jit(model.eval_fn)(p, features)[0], loss)
    close(jit(model.score_batch)(p, features), -(nll * weights).sum(-1))


@pytest.mark.parametrize("factor", FACTORS)
def test_microbatches_add_up_to_the_batch(factor):
    features = batch("decoder_only", lengths=(9, 2, 5, 7))
    model = decoder_only(loss_normalizing_factor=factor, dropout_rate=0.2)
    p = params(model, features)
    keys = jax.random.split(jax.random.key(3), 4)
    compute = jit(jax.value_and_grad(model.loss_fn, has_aux=True) if factor == FACTORS[0] else model.loss_fn)
    whole = compute(p, features, keys)
    normalizer = model.loss_normalizer(features)
    assert normalizer.dtype == jnp.float32 and normalizer.shape == ()
    halves = [
        compute(p, {k: x[rows] for k, x in features.items()}, keys[rows], normalizer)
        for rows in (slice(0, 2), slice(2, 4))
    ]
    add = lambda a, b: jax.tree.map(jnp.add, a, b)  # noqa: E731
    close(add(halves[0], halves[1]), whole, atol=1e-5)


@pytest.mark.parametrize("kind", MAKE)
def test_examples_one_by_one_under_vmap(kind):
    features = batch(kind)
    model = MAKE[kind](dropout_rate=0.2, scan_layers=True, remat_policy="full")
    p = params(model, features)
    keys = jax.random.split(jax.random.key(3), 3)
    normalizer = model.loss_normalizer(features)
    whole = jit(jax.grad(lambda p: model.loss_fn(p, features, keys)[0]))(p)

    def one(row, key):
        alone = {name: x[None] for name, x in row.items()}
        return jax.grad(lambda p: model.loss_fn(p, alone, key, normalizer)[0])(p)

    per_example = jit(jax.vmap(one))(features, keys)
    close(jax.tree.map(lambda g: g.sum(0), per_example), whole, atol=1e-5)


def test_initial_variables_are_abstract_if_asked_and_name_a_missing_feature():
    model = encoder_decoder()
    shapes = {name: (2, 4) for name in ("encoder_input_tokens", "decoder_input_tokens")}
    abstract = jax.eval_shape(lambda key: model.get_initial_variables(key, shapes), jax.random.key(0))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(abstract))
    del shapes["encoder_input_tokens"]
    with pytest.raises(ConfigError, match=r"no 'encoder_input_tokens'.*EncDecFeatureConverter"):
        model.get_initial_variables(jax.random.key(0), shapes)


def test_flops_near_six_per_weight_and_token():
    model = decoder_only(emb_dim=64, mlp_dim=256, head_dim=16, vocab_size=128, **TWO_LAYERS)
    p = params(model, batch("decoder_only"))
    weights = sum(x.size for x in jax.tree.leaves(p["decoder"]) if x.ndim == 2)
    attention = 12 * 2 * 10 * 10 * 64
    assert model.flops_per_step(3, {"targets": 10}) == 3 * (6 * weights * 10 + attention)
    assert model.flops_per_step(3, {"targets": 6, "inputs": 4}) == model.flops_per_step(3, {"targets": 10})
    assert model.flops_per_step(3, {"decoder_target_tokens": 10}) == model.flops_per_step(3, {"targets": 10})


def test_encoder_decoder_flops_by_counting_the_products():
    model = encoder_decoder(**TWO_LAYERS)
    features = batch("encoder_decoder", length=9)
    p = params(model, features)

    def weights(stack):
        leaves = jax.tree_util.tree_leaves_with_path(p[stack])
        return sum(x.size for path, x in leaves if path[-1].key == "kernel")

    cross = "encoder_decoder_attention"
    cross_keys = 2 * sum(p["decoder"]["layers_0"][cross][n]["kernel"].size for n in ("key", "value"))
    products = weights("encoder") * 6 + (weights("decoder") - cross_keys) * 9 + cross_keys * 6
    attention = 2 * 2 * 32 * (6 * 6 + 9 * 9 + 9 * 6)
    expected = 3 * (2 * products + 2 * attention)
    assert model.flops_per_step(5, {"inputs": 6, "targets": 9}) == 5 * expected


def test_sharded_dimensions():
    assert decoder_only().sharded_dimensions() == {"num_heads": 4, "mlp_dim": 24, "vocab_size": 24}
