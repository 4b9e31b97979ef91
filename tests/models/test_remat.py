"""Rematerialisation by name: what is kept, that it changes no number, and what is refused."""

import collections

import jax
import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.models import remat
from tests.models.model_support import batch, close, config, decoder_only, encoder_decoder, loss_and_grads, params

SIZES = dict(num_decoder_layers=2, scan_layers=True)


def program(model, p, features):
    return str(jax.make_jaxpr(jax.grad(lambda p: model.loss_fn(p, features)[0]))(p))


@pytest.mark.parametrize(
    "make, kind, blocks", [(decoder_only, "decoder_only", 1), (encoder_decoder, "encoder_decoder", 3)]
)
def test_every_value_has_its_name(make, kind, blocks):
    features = batch(kind)
    model = make()
    text = str(jax.make_jaxpr(model.compute_logits)(params(model, features), features))
    counts = collections.Counter({name: text.count(f"name={name}]") for name in remat.NAMES})
    layers = 1 if kind == "decoder_only" else 2
    assert counts == dict.fromkeys(remat.NAMES, blocks) | {"mlp_in": 2 * layers}


def test_named_policies_recompute_what_they_do_not_name(monkeypatch):
    features = batch("decoder_only")
    p = params(decoder_only(**SIZES), features)
    expected = loss_and_grads(decoder_only(**SIZES), p, features)
    products = {}
    for policy in ("none", "minimal_with_context", "save:mlp_in", "full"):
        model = decoder_only(remat_policy=policy, **SIZES)
        products[policy] = program(model, p, features).count("dot_general")
        if ":" in policy:
            close(loss_and_grads(model, p, features), expected, atol=1e-5)
    # Of the products with weights and the two of attention: mlp_in saves two, the other names four and two.
    assert products["full"] - products["save:mlp_in"] == 2, products
    assert products["save:mlp_in"] - products["minimal_with_context"] == 4 + 1, products
    assert "<host>" not in program(decoder_only(remat_policy="offload:mlp_in", **SIZES), p, features)
    monkeypatch.setattr(remat, "for_tpu", lambda: True)
    model = decoder_only(remat_policy="save:context; offload:mlp_in,query", **SIZES)
    text = program(model, p, features)
    assert text.count("<host>[3,9,24] =") == 2 and text.count("<host>[3,9,4,8] =") == 1, text
    close(loss_and_grads(model, p, features), expected, atol=1e-5)


@pytest.mark.parametrize(
    "policy, message",
    [
        ("save:contex", "unknown value 'contex'. Did you mean 'context'? Values: query, key, value"),
        ("save:", "unknown value ''"),
        ("keep:context", "'keep:context' is not one list of names after 'save:' or 'offload:'"),
        ("save:key;save:value", "'save:value' is not one list"),
        ("save:key,value;offload:key", "'key' is both saved and offloaded"),
        ("save_qvk", "unknown. Did you mean 'save_qkv'"),
        (3, "must be a text"),
    ],
)
def test_errors_name_the_binding_and_the_nearest_name(policy, message):
    with pytest.raises(ConfigError) as e:
        config(remat_policy=policy)
    assert str(e.value).startswith(f"T5Config.remat_policy = {policy!r}: ") and message in str(e.value)


@pytest.mark.parametrize("preset", remat.PRESETS)
def test_presets_are_lists_of_names(preset):
    values = remat.parse(preset)
    assert values.save or values.offload
    assert remat.parse(remat.PRESETS[preset]) == values


def test_auto_is_a_choice_from_the_least_recomputation_to_the_least_memory():
    features = batch("decoder_only")
    model = decoder_only(remat_policy="auto", **SIZES)
    choices = model.remat_choices()
    assert tuple(choices) == remat.LADDER and remat.LADDER[-1] == "full"
    assert {policy: choice.config.remat_policy for policy, choice in choices.items()} == {p: p for p in remat.LADDER}
    assert model.config.remat_policy == "auto" and decoder_only(remat_policy="full").remat_choices() == {}
    p = params(model, features)
    none = decoder_only(remat_policy="none", **SIZES)
    assert program(model, p, features) == program(none, p, features), "on a CPU nothing is computed again"
