"""The architectures are T5X's: its logits as literal numbers, and itself where it is installed."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from perex_t5x import models
from perex_t5x.errors import ConfigError
from perex_t5x.models import network, scalable_network
from tests.models.model_support import batch, decoder_only, encoder_decoder, jit, logits, loss_and_grads, params

DECODER = dict(vocab_size=7, emb_dim=4, num_heads=2, head_dim=2, mlp_dim=6, logits_via_embedding=True)
TOKENS = np.array([[0, 3, 5, 2, 6, 1]], np.int32)
TARGETS = np.array([[3, 5, 2, 6, 1, 4]], np.int32)  # T5X masks keys where the target is padding
INPUTS = np.array([[4, 2, 6, 0]], np.int32)


def wave(path, leaf):
    """Parameters that are a formula of their names and positions."""
    phase = sum(map(ord, jax.tree_util.keystr(path, simple=True, separator="/")))
    values = np.sin(np.arange(leaf.size, dtype=np.float64) * 1.7 + phase)
    return values.reshape(leaf.shape).astype(np.float32) * np.float32(0.8)


def apply(module, *inputs):
    boxed = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    p = jax.tree_util.tree_map_with_path(wave, nn.unbox(boxed)["params"])
    return np.asarray(jit(module.apply)({"params": p}, *inputs))[0, [0, 3, 5]]


def test_the_decoder_only_architecture_gives_t5xs_numbers():
    config = network.TransformerConfig(**DECODER, num_layers=2, mlp_activations=("gelu", "linear"))
    expected = [
        [-0.08341, -0.038849, 0.01586, 0.066425, 0.09964, 0.106829, 0.086113],
        [0.039035, -0.017355, -0.069213, -0.102992, -0.109868, -0.088047, -0.043227],
        [0.026357, 0.0732, 0.100922, 0.102284, 0.076928, 0.031478, -0.022194],
    ]
    np.testing.assert_allclose(apply(network.DecoderWrapper(config), TOKENS), expected, atol=2e-6)


def test_t5_1_0_gives_t5xs_numbers():
    """A plain ReLU MLP, named `wi`; tied embeddings, logits divided by the root of the width."""
    sizes = dict(num_encoder_layers=1, num_decoder_layers=1, mlp_activations=("relu",))
    expected = [
        [-0.101072, -0.075757, -0.030653, 0.022457, 0.069701, 0.098739, 0.101986],
        [-0.101613, -0.079793, -0.03713, 0.015231, 0.063614, 0.09538, 0.102233],
        [-0.095025, -0.058014, -0.005849, 0.047843, 0.089039, 0.106977, 0.096973],
    ]
    module = network.Transformer(network.T5Config(**DECODER, **sizes))
    np.testing.assert_allclose(apply(module, INPUTS, TOKENS), expected, atol=2e-6)


def relative(**changes):
    """The tests' decoder-only model, with T5X's positions."""
    return decoder_only(positions="relative", **changes)


def test_scanned_is_unrolled_and_packed_rows_are_single_ones():
    features = batch("decoder_only")
    unrolled, scanned = relative(num_decoder_layers=2), relative(num_decoder_layers=2, scan_layers=True)
    p = params(unrolled, features)
    stacked = models.restack(p)
    plain = logits(unrolled, p, features)
    np.testing.assert_allclose(logits(scanned, stacked, features), plain, atol=1e-5)
    tokens = np.asarray(features["decoder_input_tokens"])
    packed = np.concatenate((tokens[0, :5], tokens[2, :4]))[None]
    segments = np.array([[1] * 5 + [2] * 4], np.int32)
    both = logits(
        unrolled, p, {"decoder_input_tokens": jnp.asarray(packed), "decoder_segment_ids": jnp.asarray(segments)}
    )
    np.testing.assert_allclose(both[0, :5], plain[0, :5], atol=1e-5)
    np.testing.assert_allclose(both[0, 5:], plain[2, :4], atol=1e-5)


def test_every_layer_may_have_a_bias_of_its_own():
    """With the same in all layers it is the shared one."""
    features, two = batch("encoder_decoder"), dict(num_encoder_layers=2, num_decoder_layers=2)
    shared, own = encoder_decoder(**two), encoder_decoder(**two, relative_bias="per_layer")
    p = params(shared, features)
    moved = {name: dict(part) if isinstance(part, dict) else part for name, part in p.items()}
    for stack in ("encoder", "decoder"):
        bias = moved[stack].pop("relpos_bias")
        for layer in ("layers_0", "layers_1"):
            moved[stack][layer] = moved[stack][layer] | {"relpos_bias": bias}
    expected = logits(shared, p, features)
    np.testing.assert_allclose(logits(own, moved, features), expected, atol=1e-5)
    moved["encoder"]["layers_1"]["relpos_bias"] = jax.tree.map(np.negative, bias)
    assert np.abs(logits(own, moved, features) - expected).max() > 1e-3
    scanned = encoder_decoder(**two, relative_bias="per_layer", scan_layers=True)
    np.testing.assert_allclose(
        logits(scanned, models.restack(moved), features), logits(own, moved, features), atol=1e-5
    )


def test_the_configs_names_are_t5xs():
    config = network.TransformerConfig(vocab_size=8, num_layers=3, float32_attention_logits=True)
    assert (config.num_decoder_layers, config.dropout_rate, config.mlp_activations) == (3, 0.1, ("relu",))
    with pytest.raises(ConfigError, match="TransformerConfig.num_layers = 0"):
        network.TransformerConfig(vocab_size=8, num_layers=0)


# --- with T5X ----------------------------------------------------------------------------------------------------------


def leaves(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def named_axes(boxed):
    is_box = lambda x: isinstance(x, nn.LogicallyPartitioned)  # noqa: E731
    flat = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): box.names for path, box in flat}


def compare(ours, theirs, our_inputs, their_inputs, **kwargs):
    """Names, shapes, logical axes, logits."""
    boxed = jax.eval_shape(ours.init, jax.random.key(0), *our_inputs)["params"]
    made = jax.eval_shape(lambda: theirs.init({"params": jax.random.key(0)}, *their_inputs, enable_dropout=False))
    p = jax.tree_util.tree_map_with_path(wave, nn.unbox(boxed))
    expected = {name: x.shape for name, x in leaves(made["params"]).items()}
    assert {name: x.shape for name, x in leaves(p).items()} == expected
    axes = jax.tree.leaves(made["params_axes"], is_leaf=lambda x: hasattr(x, "names"))
    names = [
        n.removesuffix("_axes")
        for n in leaves(jax.tree.map(lambda x: 0, made["params_axes"], is_leaf=lambda x: hasattr(x, "names")))
    ]
    assert named_axes(boxed) == {name: tuple(x.names) for name, x in zip(names, axes, strict=True)}
    out = theirs.apply({"params": p}, *their_inputs, enable_dropout=False)
    np.testing.assert_allclose(ours.apply({"params": p}, *our_inputs), out, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_decoder_only_is_t5xs(t5x, tied):
    from t5x.examples.decoder_only import network as t5x_network

    sizes = DECODER | dict(num_layers=2, logits_via_embedding=tied)
    ours = network.DecoderWrapper(network.TransformerConfig(**sizes))
    theirs = t5x_network.DecoderWrapper(t5x_network.TransformerConfig(**sizes))
    segments, positions, marks = (
        np.array([[1, 1, 1, 2, 2, 2]]),
        np.array([[0, 1, 2, 0, 1, 2]]),
        np.array([[1, 1, 0, 1, 0, 0]]),
    )
    tokens = TOKENS + 1 - (TOKENS == 6)  # no padding: what T5X makes of it is another thing
    compare(ours, theirs, (tokens, positions, segments, marks), (tokens, tokens, segments, positions, marks))


@pytest.mark.parametrize("activations, tied", [(("relu",), True), (("gelu", "linear"), False)])
def test_t5_is_t5xs(t5x, activations, tied):
    from t5x.examples.t5 import network as t5x_network

    sizes = DECODER | dict(
        num_encoder_layers=2, num_decoder_layers=2, mlp_activations=activations, logits_via_embedding=tied
    )
    ours = network.Transformer(network.T5Config(**sizes))
    theirs = t5x_network.Transformer(t5x_network.T5Config(**sizes))
    compare(ours, theirs, (INPUTS, TOKENS), (INPUTS, TOKENS, TARGETS))


def test_scalable_t5_is_t5xs(t5x):
    """Its kernels have an axis for heads; here they are matrices."""
    from t5x.examples.scalable_t5 import network as t5x_network

    sizes = DECODER | dict(num_encoder_layers=2, num_decoder_layers=2, dropout_rate=0.0, scan_layers=False)
    ours = network.Transformer(scalable_network.T5Config(**sizes))
    theirs = t5x_network.Transformer(t5x_network.T5Config(**sizes))
    made = jax.eval_shape(
        lambda: theirs.init({"params": jax.random.key(0)}, INPUTS, TOKENS, TARGETS, enable_dropout=False)
    )
    p = jax.tree_util.tree_map_with_path(wave, dict(made["params"]))
    shapes = nn.unbox(jax.eval_shape(ours.init, jax.random.key(0), INPUTS, TOKENS))["params"]
    assert leaves(p).keys() == leaves(shapes).keys()
    matrices = jax.tree.map(lambda x, s: x.reshape(s.shape), p, shapes)
    expected = theirs.apply({"params": p}, INPUTS, TOKENS, TARGETS, enable_dropout=False)
    np.testing.assert_allclose(ours.apply({"params": matrices}, INPUTS, TOKENS), expected, atol=1e-5)


def test_decoder_only_loss_and_gradient_are_t5xs(t5x):
    from t5x import models as t5x_models
    from t5x.examples.decoder_only import network as t5x_network

    sizes = dict(vocab_size=24, emb_dim=16, num_heads=4, head_dim=8, mlp_dim=24, num_layers=2, dropout_rate=0.0)
    vocabulary = SimpleNamespace(eos_id=1)
    ours = models.DecoderOnlyModel(
        network.DecoderWrapper(network.TransformerConfig(**sizes)), vocabulary, None, z_loss=1e-2
    )
    module = t5x_network.DecoderWrapper(t5x_network.TransformerConfig(**sizes))
    theirs = t5x_models.DecoderOnlyModel(module, vocabulary, None, z_loss=1e-2)
    features = batch("decoder_only")
    p = params(ours, features)
    expected = jax.value_and_grad(lambda p: theirs.loss_fn(p, features, None)[0])(p)
    actual = loss_and_grads(ours, p, features)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=3e-5, rtol=1e-4), actual, expected)
