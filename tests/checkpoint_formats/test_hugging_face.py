"""Hugging Face's names and configurations: what has a counterpart, and what is refused by its name."""

import json

import numpy as np
import pytest

from perex_t5x.checkpoint_formats import convert as convert_lib
from perex_t5x.checkpoint_formats import hugging_face, open_checkpoint
from perex_t5x.checkpoint_formats.plan import Options, make_plan
from perex_t5x.checkpoint_formats.settings import settings_of
from perex_t5x.errors import ConfigError
from tests.checkpoint_formats import support

LLAMA = {"head_dim": support.HEAD, "mlp_activations": ("silu", "linear")}


def plan_of(folder, params, settings=LLAMA, **options):
    path = support.write_legacy(folder / "checkpoint_7", {f"target/{name}": a for name, a in params.items()})
    return make_plan(open_checkpoint(path), Options("safetensors", settings=settings, **options))


def test_names_of_a_t5(tmp_path):
    plan = plan_of(tmp_path, support.t5_params(), {})
    names = {leaf.name: leaf.shape for leaf in plan.leaves}
    assert len(names) == len(support.t5_params())
    assert names["shared.weight"] == (24, 8) and names["lm_head.weight"] == (24, 8)
    assert names["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] == (32, 2)
    assert names["decoder.block.2.layer.2.DenseReluDense.wo.weight"] == (8, 16)
    assert names["decoder.block.1.layer.1.EncDecAttention.q.weight"] == (6, 8)
    config = plan.config
    assert (config["model_type"], config["feed_forward_proj"], config["tie_word_embeddings"]) == (
        "t5",
        "gated-gelu",
        False,
    )
    assert (config["d_kv"], config["num_heads"], config["num_layers"], config["num_decoder_layers"]) == (3, 2, 3, 3)
    plain = plan_of(tmp_path / "plain", support.t5_params(tied=True, gated=False), {}).config
    assert (plain["feed_forward_proj"], plain["tie_word_embeddings"]) == ("relu", True)


def test_names_of_a_decoder(tmp_path):
    plan = plan_of(tmp_path, support.decoder_params(), {**LLAMA, "rotary_max_wavelength": 5e5})
    names = {leaf.name: leaf.shape for leaf in plan.leaves}
    assert names["model.layers.2.self_attn.o_proj.weight"] == (8, 6)
    assert names["model.layers.0.mlp.down_proj.weight"] == (8, 16)
    assert plan.config["architectures"] == ["LlamaForCausalLM"] and plan.config["rope_theta"] == 5e5
    tied = plan_of(tmp_path / "tied", support.decoder_params(tied=True)).config
    assert tied["architectures"] == ["GraniteForCausalLM"] and tied["logits_scaling"] == pytest.approx(8**0.5)


def _with(name, shape):
    return {**support.decoder_params(), name: np.zeros(shape, np.float32)}


REFUSED = {
    "relative positions": (
        _with("decoder/relpos_bias/rel_embedding", (2, 32)),
        LLAMA,
        "a decoder with relative positions",
    ),
    "unknown leaf": (_with("decoder/extra/bias", (2,)), LLAMA, "decoder/extra/bias. --names=t5x writes a flat file"),
    "plain MLP": (
        {n.replace("wi_0", "wi"): a for n, a in support.decoder_params().items() if "wi_1" not in n},
        LLAMA,
        "a plain MLP",
    ),
    "activations": (
        support.decoder_params(),
        {**LLAMA, "mlp_activations": ("linear", "silu")},
        r"\('linear', 'silu'\)",
    ),
    "no head_dim": (support.decoder_params(), {}, "needs T5Config.head_dim.*--set=head_dim="),
    "another head_dim": (support.decoder_params(), {**LLAMA, "head_dim": 4}, "does not divide the 6 columns"),
    "groups in a T5": (
        {n: a[:, :3] if n.endswith(("key/kernel", "value/kernel")) else a for n, a in support.t5_params().items()},
        {},
        "T5 with grouped-query attention",
    ),
    "activations of a T5": (support.t5_params(), {"mlp_activations": ("silu", "gelu")}, r"\('silu', 'gelu'\)"),
    "no embedding": ({"w": np.zeros((2, 2), np.float32)}, {}, "no token_embedder/embedding"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_counterpart_is_refused(tmp_path, case):
    params, settings, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        plan_of(tmp_path, params, settings)
    if case in ("relative positions", "unknown leaf", "no embedding"):  # a flat file takes anything
        plan = plan_of(tmp_path / "flat", params, settings, names="t5x")
        convert_lib.convert(plan, str(tmp_path / "flat.safetensors"))
        support.assert_same(
            open_checkpoint(str(tmp_path / "flat.safetensors")), {f"target/{n}": a for n, a in params.items()}
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rms_norm_eps": 1e-5},
            "rms_norm_eps = 1e-05 has no counterpart here, where it is 1e-06.*--ignore=rms_norm_eps",
        ),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_scaling = 'llama3'"),
        ({"model_type": "mistral"}, "models of type 'mistral' are not known"),
    ],
)
def test_what_computes_something_else_there(tmp_path, changes, message):
    plan = plan_of(tmp_path, support.decoder_params())
    convert_lib.convert(plan, str(tmp_path / "hf"))
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    contents = open_checkpoint(str(tmp_path / "hf"))
    with pytest.raises(ConfigError, match=message):
        make_plan(contents, Options("orbax"))
    if "rms_norm_eps" in changes:
        assert make_plan(contents, Options("orbax", ignore=("rms_norm_eps",))).leaves


def test_tied_llamas_get_a_projection_of_their_own(tmp_path):
    params = support.decoder_params()
    convert_lib.convert(plan_of(tmp_path, {n: a for n, a in params.items() if "logits" not in n}), str(tmp_path / "hf"))
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "llama"}))
    contents = open_checkpoint(str(tmp_path / "hf"))
    logits = hugging_face.in_t5x_names(contents).leaves["target/decoder/logits_dense/kernel"].read()
    np.testing.assert_array_equal(logits, params["token_embedder/embedding"].T)
    assert hugging_face.t5_config(contents)["logits_via_embedding"] is False
    (made,) = [s for s in make_plan(contents, Options("orbax")).steps if not s.sources]
    assert made.what == "made: a copy of the embedding"


def test_settings_come_from_the_run(tmp_path):
    path = support.write_legacy(tmp_path / "checkpoint_7", {"target/w": np.zeros((9, 9), np.float32)})
    contents = open_checkpoint(path)
    assert settings_of(contents, None, {"head_dim": 5}) == {"head_dim": 5}
    (tmp_path / "config.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from t5x.examples.t5 import network\n"
        "DROPOUT_RATE = 0.1\n"
        "network.T5Config:\n    dropout_rate = %DROPOUT_RATE\n    head_dim = 64\n"
        "network.T5Config.mlp_activations = ('silu', 'linear')\n"
        "network.Transformer.config = @network.T5Config()\n"
    )
    expected = {"dropout_rate": 0.1, "head_dim": 5, "mlp_activations": ("silu", "linear")}
    assert settings_of(contents, None, {"head_dim": 5}) == expected
    (tmp_path / "other.gin").write_text("T5Config.head_dim = \n")
    with pytest.raises(ConfigError, match="other.gin cannot be read as a Gin file"):
        settings_of(contents, str(tmp_path / "other.gin"), {})
