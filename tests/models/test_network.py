"""The networks as functions: names, packing, prefixes, scan and remat, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from perex_t5x.models import restack
from tests.models.model_support import (
    MAKE,
    TWO_LAYERS,
    VOCAB,
    as_for_tpu,
    batch,
    boxed_params,
    close,
    decoder_only,
    encoder_decoder,
    jit,
    logits,
    loss_and_grads,
    params,
)


def axes(boxed):
    is_box = lambda x: isinstance(x, nn.LogicallyPartitioned)  # noqa: E731
    flat = flatten_dict(boxed, sep="/", is_leaf=lambda _, x: is_box(x))
    return {name: (box.names, box.value.shape) for name, box in flat.items()}


def test_decoder_only_parameter_names_and_axes():
    found = axes(boxed_params(decoder_only(num_kv_heads=2), batch("decoder_only")))
    layer = "decoder/layers_0/"
    assert found == {
        "token_embedder/embedding": (("vocab", "embed"), (24, 16)),
        layer + "pre_self_attention_layer_norm/scale": (("embed",), (16,)),
        layer + "self_attention/query/kernel": (("embed", "joined_kv"), (16, 32)),
        layer + "self_attention/key/kernel": (("embed", "joined_kv"), (16, 16)),
        layer + "self_attention/value/kernel": (("embed", "joined_kv"), (16, 16)),
        layer + "self_attention/out/kernel": (("joined_kv", "embed"), (32, 16)),
        layer + "pre_mlp_layer_norm/scale": (("embed",), (16,)),
        layer + "mlp/wi_0/kernel": (("embed", "mlp"), (16, 24)),
        layer + "mlp/wi_1/kernel": (("embed", "mlp"), (16, 24)),
        layer + "mlp/wo/kernel": (("mlp", "embed"), (24, 16)),
        "decoder/decoder_norm/scale": (("embed",), (16,)),
        "decoder/logits_dense/kernel": (("embed", "vocab"), (16, 24)),
    }


def test_encoder_decoder_parameter_names():
    features = batch("encoder_decoder")
    found = axes(boxed_params(encoder_decoder(**TWO_LAYERS), features))
    for name in (
        "encoder/relpos_bias/rel_embedding",
        "encoder/layers_1/attention/query/kernel",
        "encoder/layers_0/pre_attention_layer_norm/scale",
        "encoder/layers_0/pre_mlp_layer_norm/scale",
        "encoder/layers_0/mlp/wi_0/kernel",
        "encoder/encoder_norm/scale",
        "decoder/relpos_bias/rel_embedding",
        "decoder/layers_1/self_attention/out/kernel",
        "decoder/layers_1/encoder_decoder_attention/key/kernel",
        "decoder/layers_1/pre_cross_attention_layer_norm/scale",
        "decoder/decoder_norm/scale",
        "decoder/logits_dense/kernel",
        "token_embedder/embedding",
    ):
        assert name in found
    assert found["decoder/relpos_bias/rel_embedding"] == (("heads", "relpos_buckets"), (4, 32))
    scanned = axes(boxed_params(encoder_decoder(scan_layers=True, **TWO_LAYERS), features))
    assert scanned["decoder/layers/mlp/wo/kernel"] == (("layers", "mlp", "embed"), (2, 24, 16))
    assert scanned["encoder/layers/pre_mlp_layer_norm/scale"] == (("layers", "embed"), (2, 16))


@pytest.mark.parametrize("kind, smaller_queries", [("decoder_only", 1), ("encoder_decoder", 8**-0.5)])
def test_initial_values(kind, smaller_queries):
    features = batch(kind)
    model = MAKE[kind](scan_layers=True, emb_dim=64, num_heads=8, vocab_size=64, **TWO_LAYERS)
    shapes = {name: x.shape for name, x in features.items()}
    p = nn.unbox(jit(lambda key: model.get_initial_variables(key, shapes))(jax.random.key(0))["params"])
    layers = p["decoder"]["layers"]
    deviations = {
        "embedding": (p["token_embedder"]["embedding"], 1.0),
        "query": (layers["self_attention"]["query"]["kernel"], smaller_queries / 8),
        "key": (layers["self_attention"]["key"]["kernel"], 1 / 8),
        "wo": (layers["mlp"]["wo"]["kernel"], 24**-0.5),
        "logits": (p["decoder"]["logits_dense"]["kernel"], 1 / 8),
    }
    for name, (value, expected) in deviations.items():
        assert float(np.std(value)) == pytest.approx(expected, rel=0.1), name
    assert (np.asarray(layers["pre_mlp_layer_norm"]["scale"]) == 1).all()
    key = np.asarray(layers["self_attention"]["key"]["kernel"])
    assert (key[0] != key[1]).any(), "scanned layers start differently"


def test_tied_output_has_no_projection_and_learns_through_the_embedding():
    features = batch("decoder_only")
    model = decoder_only(logits_via_embedding=True)
    p = params(model, features)
    assert "logits_dense" not in p["decoder"]
    grad = loss_and_grads(model, p, features)[1]["token_embedder"]["embedding"]
    used = np.isin(np.arange(VOCAB), np.asarray(features["decoder_input_tokens"]))
    assert not used.all()
    assert (np.abs(grad).max(-1) > 0).all(), "unused inputs still get a gradient, as outputs"


@pytest.mark.parametrize(
    "kind, variants",
    [
        ("decoder_only", [(False, "minimal"), (True, "none"), (True, "dots_saveable")]),
        ("encoder_decoder", [(True, "full")]),
    ],
)
def test_scan_and_remat_change_no_number(kind, variants):
    features = batch(kind)
    plain = MAKE[kind](z_loss=1e-3, **TWO_LAYERS)
    p = params(plain, features)
    loss, grads = loss_and_grads(plain, p, features)
    for scan, remat in variants:
        model = MAKE[kind](z_loss=1e-3, scan_layers=scan, remat_policy=remat, **TWO_LAYERS)
        other_loss, other_grads = loss_and_grads(model, restack(p) if scan else p, features)
        close(other_loss, loss)
        close(other_grads, restack(grads) if scan else grads, atol=1e-5)


@pytest.mark.parametrize(
    "kind, changes, atol",
    [
        ("decoder_only", {"num_kv_heads": 2}, 2e-6),
        pytest.param("decoder_only", {"dtype": "bfloat16"}, 0.02, marks=pytest.mark.slow),
        pytest.param("encoder_decoder", {}, 2e-6, marks=pytest.mark.slow),
    ],
)
def test_the_form_for_tpus_is_the_same_function(kind, changes, atol, monkeypatch):
    features, model = batch(kind), MAKE[kind](z_loss=1e-3, **changes)
    p = params(model, features)
    expected = logits(model, p, features), *loss_and_grads(model, p, features)
    as_for_tpu(monkeypatch)
    products = str(jax.make_jaxpr(model.compute_logits)(p, features)).split("dot_general")
    assert any("[3,9,4,8] = " in line[-40:] for line in products), "heads are an axis of the product itself"
    close((logits(model, p, features), *loss_and_grads(model, p, features)), expected, atol=atol)


def test_remat_does_recompute():
    features = batch("decoder_only")
    p = params(decoder_only(), features)

    def products(policy):
        model = decoder_only(remat_policy=policy)
        return str(jax.make_jaxpr(jax.grad(lambda p: model.loss_fn(p, features)[0]))(p)).count("dot_general")

    assert products("full") > products("minimal") > products("none")


def packed(features, kind):
    """Rows 1 and 2 (4 and 7 tokens) of the batch in one row of 12."""
    pairs = [("decoder_input_tokens", "decoder", 12), ("decoder_target_tokens", "decoder", 12)]
    if kind == "encoder_decoder":
        pairs.append(("encoder_input_tokens", "encoder", 14))
    result = {}
    for name, side, width in pairs:
        counts = (4, 7) if side == "decoder" else (6, 6)
        parts = [features[name][1, : counts[0]], features[name][2, : counts[1]]]
        ids = np.repeat([1, 2], counts)
        at = np.concatenate([np.arange(n) for n in counts])
        pad = (0, width - sum(counts))
        result[name] = jnp.asarray(np.pad(np.concatenate(parts), pad))[None]
        result[f"{side}_segment_ids"] = jnp.asarray(np.pad(ids, pad))[None]
        result[f"{side}_positions"] = jnp.asarray(np.pad(at, pad))[None]
    return result


@pytest.mark.parametrize("kind", MAKE)
def test_packed_examples_see_themselves_only(kind):
    features = batch(kind)
    model = MAKE[kind]()
    p = params(model, features)
    alone = logits(model, p, features)
    together = logits(model, p, packed(features, kind))
    close(together[0, :4], alone[1, :4], atol=1e-5)
    close(together[0, 4:11], alone[2, :7], atol=1e-5)


@pytest.mark.parametrize("kind", MAKE)
def test_the_future_is_hidden(kind):
    features = batch(kind)
    model = MAKE[kind]()
    p = params(model, features)
    changed = features | {"decoder_input_tokens": features["decoder_input_tokens"].at[:, 5].set(3)}
    before, after = logits(model, p, features), logits(model, p, changed)
    close(after[:, :5], before[:, :5])
    assert float(jnp.abs(after - before)[:, 5:].max()) > 1e-3


def test_prefix_attention_is_bidirectional_where_marked():
    features = batch("decoder_only") | {"decoder_causal_attention": jnp.array([[1, 1, 1, 1, 0, 0, 0, 0, 0]] * 3)}
    changed = features | {"decoder_input_tokens": features["decoder_input_tokens"].at[:, 3].set(3)}
    prefix, causal = decoder_only(bidirectional=True), decoder_only()
    p = params(causal, features)

    def difference(model):
        return np.abs(logits(model, p, features) - logits(model, p, changed)).max((0, 2))

    assert (difference(prefix) > 1e-4).all(), "earlier marked positions see position 3"
    assert (difference(causal)[:3] == 0).all()
    later = features | {"decoder_input_tokens": features["decoder_input_tokens"].at[:, 5].set(3)}
    close(logits(prefix, p, later)[:, :5], logits(prefix, p, features)[:, :5])


def test_encoder_padding_is_not_seen():
    features = batch("encoder_decoder")
    model = encoder_decoder()
    p = params(model, features)
    longer = features | {"encoder_input_tokens": jnp.pad(features["encoder_input_tokens"], ((0, 0), (0, 3)))}
    close(logits(model, p, longer), logits(model, p, features), atol=1e-5)


def test_grouped_queries_equal_repeated_key_heads():
    features = batch("decoder_only")
    grouped, full = decoder_only(num_kv_heads=2), decoder_only()
    p = params(grouped, features)

    def repeat(path, kernel):
        if {"key", "value"} & {entry.key for entry in path}:
            return jnp.repeat(kernel.reshape(16, 2, 8), 2, axis=1).reshape(16, 32)
        return kernel

    expanded = jax.tree_util.tree_map_with_path(repeat, p)
    close(logits(grouped, p, features), logits(full, expanded, features), atol=1e-5)


@pytest.mark.parametrize("kind", MAKE)
def test_bfloat16_computes_near_float32_with_float32_logits_and_parameters(kind):
    features = batch(kind)
    p = params(MAKE[kind](), features)
    model = MAKE[kind](dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(boxed_params(model, features))} == {jnp.dtype("float32")}
    computed = logits(model, p, features)
    assert computed.dtype == jnp.float32
    close(computed, logits(MAKE[kind](), p, features), atol=0.15)
    assert {g.dtype for g in jax.tree.leaves(loss_and_grads(model, p, features)[1])} == {jnp.dtype("float32")}


@pytest.mark.parametrize("kind", MAKE)
def test_float64_under_x64(kind):
    features = batch(kind)
    p = params(MAKE[kind](), features)
    loss = loss_and_grads(MAKE[kind](), p, features)[0]
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), p)
        model = MAKE[kind](dtype="float64", scan_layers=True)
        wide_loss, grads = loss_and_grads(model, restack(wide), features)
        assert wide_loss.dtype == jnp.float64
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float64")}
    np.testing.assert_allclose(wide_loss, loss, rtol=1e-5)


def test_an_id_outside_the_embedding_shows():
    features = batch("decoder_only")
    model = decoder_only()
    p = params(model, features)
    bad = features | {"decoder_input_tokens": features["decoder_input_tokens"].at[0, 2].set(VOCAB)}
    assert np.isnan(logits(model, p, bad)[0]).any() and not np.isnan(logits(model, p, bad)[1:]).any()
