"""Attention in double precision: JAX's own, which is single inside, to its precision; NumPy's to that of float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x.models.attention import LayerContext, MultiHeadAttention, attend
from tests.models.model_support import batch, config, decoder_only, encoder_decoder, logits, params

ROWS, LENGTH, KEYS, HEADS, WIDTH = 3, 6, 7, 4, 8

CASES = {
    "plain": {},
    "scaled": {"scale": 0.35},
    "mask of keys": {"mask": (ROWS, 1, 1, KEYS)},
    "mask of pairs": {"mask": (ROWS, 1, LENGTH, KEYS)},
    "bias": {"bias": (1, HEADS, LENGTH, KEYS)},
    "mask and bias": {"mask": (ROWS, 1, LENGTH, KEYS), "bias": (1, HEADS, LENGTH, KEYS)},
    "causal": {"is_causal": True, "keys": LENGTH},
    "causal, masked": {"is_causal": True, "keys": LENGTH, "mask": (ROWS, 1, LENGTH, LENGTH)},
    "a row that sees nothing": {"mask": (ROWS, 1, LENGTH, KEYS), "unseen": True},
    "grouped heads": {"kv_heads": 2, "mask": (ROWS, 1, LENGTH, KEYS)},
    "one head of keys, causal, bias": {"kv_heads": 1, "is_causal": True, "keys": LENGTH, "bias": (1, HEADS, 6, 6)},
}


def make(kv_heads=HEADS, keys=KEYS, mask=None, bias=None, is_causal=False, scale=1.0, unseen=False):
    """Arguments of attention in float64, by NumPy. Every query sees the first key; with `unseen`, none of the last row."""
    draw = np.random.default_rng(0)
    query = draw.normal(size=(ROWS, LENGTH, HEADS, WIDTH))
    key, value = draw.normal(size=(2, ROWS, keys, kv_heads, WIDTH))
    if mask is not None:
        mask = draw.random(mask) < 0.6
        mask[..., 0] = True
        mask[-1] = mask[-1] & (not unseen)
    bias = None if bias is None else draw.normal(size=bias)
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": mask,
        "bias": bias,
        "is_causal": is_causal,
        "scale": scale,
    }


def by_numpy(query, key, value, mask, bias, is_causal, scale):
    """One query and head at a time."""
    out = np.zeros(query.shape)
    group = query.shape[2] // key.shape[2]
    for b, t, n in np.ndindex(*query.shape[:3]):
        score = key[b, :, n // group] @ query[b, t, n] * scale
        if bias is not None:
            score = score + bias[0, n, t]
        seen = np.ones(len(score), bool)
        if mask is not None:
            seen &= mask[b, 0, t if mask.shape[2] > 1 else 0]
        if is_causal:
            seen &= np.arange(len(score)) <= t
        if not seen.any():  # as JAX has it: all alike
            seen, score = ~seen, np.zeros(len(score))
        weight = np.where(seen, np.exp(score - score[seen].max()), 0.0)
        out[b, t, n] = weight @ value[b, :, n // group] / weight.sum()
    return out


def in_double(arguments):
    computed = jax.jit(attend, static_argnames=("is_causal", "scale"))
    return computed(
        *(None if x is None else jnp.asarray(x) for x in list(arguments.values())[:5]), **settings(arguments)
    )


def settings(arguments):
    return {name: arguments[name] for name in ("is_causal", "scale")}


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_numpy(case):
    """To 1e-12: nothing in it is single."""
    arguments = make(**CASES[case])
    with jax.enable_x64(True):
        found = in_double(arguments)
        assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, by_numpy(**arguments), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_jax(case):
    """To 1e-6: the same function, with the same meaning of mask, bias and groups of heads."""
    arguments = make(**CASES[case])
    with jax.enable_x64(True):
        found = in_double(arguments)
    arrays = {k: v for k, v in arguments.items() if isinstance(v, np.ndarray)}
    single = {k: jnp.asarray(v, bool if k == "mask" else jnp.float32) for k, v in arrays.items()}
    wanted = jax.nn.dot_product_attention(**single, **settings(arguments))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


def test_the_gradient_is_double_too():
    """Against a central difference, which in single precision would not be seen at 1e-8."""
    arguments = make(**CASES["mask and bias"])
    direction = np.random.default_rng(1).normal(size=arguments["query"].shape)

    with jax.enable_x64(True):

        def along(step):
            moved = arguments["query"] + step * direction
            fixed = (arguments["key"], arguments["value"], arguments["mask"], arguments["bias"], False, 1.0)
            return jnp.sum(attend(moved, *fixed) ** 2)

        step = 1e-4
        slope = (along(step) - along(-step)) / (2 * step)
        np.testing.assert_allclose(jax.grad(along)(0.0), slope, rtol=1e-7)


@pytest.mark.parametrize("scaled", [True, False])
def test_the_layer_takes_it_for_float64_alone(scaled):
    """A layer in float64 is that of float32 to its precision, and has the digits that float32 has not."""
    x = np.random.default_rng(2).normal(size=(2, 5, 16))
    found = {}
    with jax.enable_x64(True):
        for dtype in ("float32", "float64"):
            layer = MultiHeadAttention(config(dtype=dtype, num_kv_heads=2), scaled=scaled)
            context = LayerContext(is_causal=True)
            arguments = (jnp.asarray(x, dtype), context)
            weights = layer.init(jax.random.key(0), *arguments, method="self_attention")
            found[dtype] = layer.apply(weights, *arguments, method="self_attention")
            assert found[dtype].dtype == dtype
    difference = np.max(np.abs(found["float64"] - found["float32"]))
    assert 1e-12 < difference < 1e-5


@pytest.mark.parametrize("make_model,kind", [(decoder_only, "decoder_only"), (encoder_decoder, "encoder_decoder")])
def test_whole_networks_are_double(make_model, kind):
    """Logits move in proportion with parameters that move by 1e-9: a float32 anywhere on the way would show."""
    features = batch(kind)
    weights = params(make_model(), features)
    with jax.enable_x64(True):
        model = make_model(dtype="float64")
        at = lambda step: logits(model, jax.tree.map(lambda x: np.float64(x) * (1.0 + step), weights), features)  # noqa: E731
        plain, near, far = at(0.0), at(1e-9), at(2e-9)
        assert plain.dtype == jnp.float64
    moved = np.max(np.abs(near - plain))
    assert moved > 1e-10
    np.testing.assert_allclose(far - plain, 2 * (near - plain), rtol=0, atol=1e-5 * moved)
    single = logits(make_model(), weights, features)
    np.testing.assert_allclose(plain, single, rtol=0, atol=1e-4)
