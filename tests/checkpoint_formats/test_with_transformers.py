"""Models of Hugging Face's transformers compute the same logits as ours after conversion, in both directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from perex_t5x.checkpoint_formats import convert as convert_lib
from perex_t5x.checkpoint_formats import hugging_face, open_checkpoint
from perex_t5x.checkpoint_formats.plan import Options, make_plan
from perex_t5x.models.network import DecoderWrapper, T5Config, Transformer
from tests.checkpoint_formats import support

transformers = pytest.importorskip("transformers", reason="needs pip install transformers torch")
torch = pytest.importorskip("torch", reason="needs pip install transformers torch")
pytestmark = pytest.mark.slow

INPUTS = np.random.default_rng(0).integers(2, 90, size=(2, 9)).astype(np.int32)
TARGETS = np.random.default_rng(1).integers(2, 90, size=(2, 7)).astype(np.int32)
SIZES = {"vocab_size": 96, "emb_dim": 16, "num_heads": 4, "head_dim": 6, "mlp_dim": 24, "num_decoder_layers": 3}
T5 = {**SIZES, "num_encoder_layers": 2}
CASES = {
    "t5 1.1": (Transformer, {**T5, "mlp_activations": ("gelu", "linear")}),
    "t5 1.0": (Transformer, {**T5, "mlp_activations": ("relu",), "logits_via_embedding": True}),
    "t5 with silu, scanned": (Transformer, {**T5, "mlp_activations": ("silu", "linear"), "scan_layers": True}),
    "llama": (DecoderWrapper, {**SIZES, "mlp_activations": ("silu", "linear"), "rotary_max_wavelength": 500_000.0}),
    "llama with groups, scanned": (
        DecoderWrapper,
        {**SIZES, "mlp_activations": ("gelu", "linear"), "num_kv_heads": 2, "scan_layers": True},
    ),
    "granite": (DecoderWrapper, {**SIZES, "mlp_activations": ("silu", "linear"), "logits_via_embedding": True}),
}


def ours(network, params):
    tokens = (INPUTS, TARGETS) if isinstance(network, Transformer) else (TARGETS,)
    with jax.numpy_rank_promotion("allow"):
        return np.asarray(network.apply({"params": params}, *(jnp.asarray(t) for t in tokens)))


def theirs(model):
    model = model.eval()
    targets = torch.tensor(TARGETS, dtype=torch.long)
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            return model(input_ids=torch.tensor(INPUTS, dtype=torch.long), decoder_input_ids=targets).logits.numpy()
        return model(input_ids=targets).logits.numpy()


def unboxed(network):
    from flax import linen as nn

    tokens = (INPUTS, TARGETS) if isinstance(network, Transformer) else (TARGETS,)
    params = nn.meta.unbox(network.init(jax.random.key(0), *(jnp.asarray(t) for t in tokens))["params"])
    rng = np.random.default_rng(2)  # norms other than 1
    return jax.tree.map(lambda x: np.asarray(x) + 0.1 * rng.normal(size=x.shape).astype(np.float32), params)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_equal(tmp_path, case):
    cls, fields = CASES[case]
    network = cls(T5Config(**fields))
    params = unboxed(network)
    leaves = {f"target/{name}": array for name, array in traverse_util.flatten_dict(params, sep="/").items()}
    path = support.write_orbax(tmp_path / "checkpoint_7", {**leaves, "state/step": np.array(7, np.int32)})
    plan = make_plan(open_checkpoint(path), Options("safetensors", params_only=True, settings=fields))
    convert_lib.convert(plan, str(tmp_path / "hf"))
    model, info = transformers.AutoModelForSeq2SeqLM if cls is Transformer else transformers.AutoModelForCausalLM, {}
    model, info = model.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert all("embed_tokens" in key or key == "lm_head.weight" for key in info["missing_keys"])
    difference = np.abs(ours(network, params) - theirs(model)).max()
    print(f"{case}: {type(model).__name__}, largest difference of logits {difference:.2e}")
    assert difference < 2e-5

    # And what they have saved, with other numbers in it, into ours.
    model.save_pretrained(tmp_path / "theirs")
    contents = open_checkpoint(str(tmp_path / "theirs"))
    again = cls(T5Config(**hugging_face.t5_config(contents)))
    contents = hugging_face.in_t5x_names(contents)
    read = {name.removeprefix("target/"): leaf.read() for name, leaf in contents.leaves.items()}
    difference = np.abs(ours(again, traverse_util.unflatten_dict(read, sep="/")) - theirs(model)).max()
    assert difference < 2e-5


@pytest.mark.parametrize("kind", ["t5 1.1", "t5 1.0", "llama", "llama tied"])
def test_a_model_of_theirs(tmp_path, kind):
    """Initialised there. Tied embeddings whose logits are not divided become a projection of its own."""
    torch.manual_seed(0)
    tied = kind in ("t5 1.0", "llama tied")
    if kind.startswith("t5"):
        config = transformers.T5Config(
            vocab_size=96, d_model=16, d_kv=6, d_ff=24, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
            tie_word_embeddings=tied,
        )  # fmt: skip
        model, cls = transformers.T5ForConditionalGeneration(config), Transformer
    else:
        config = transformers.LlamaConfig(
            vocab_size=96, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-6, tie_word_embeddings=tied,
        )  # fmt: skip
        model, cls = transformers.LlamaForCausalLM(config), DecoderWrapper
    model.save_pretrained(tmp_path / "theirs")
    contents = open_checkpoint(str(tmp_path / "theirs"))
    convert_lib.convert(make_plan(contents, Options("orbax")), str(tmp_path / "checkpoint_0"))
    leaves = open_checkpoint(str(tmp_path / "checkpoint_0")).leaves
    read = {name.removeprefix("target/"): leaf.read() for name, leaf in leaves.items()}
    network = cls(T5Config(**hugging_face.t5_config(contents)))
    difference = np.abs(ours(network, traverse_util.unflatten_dict(read, sep="/")) - theirs(model)).max()
    print(f"{kind}: largest difference of logits {difference:.2e}")
    assert difference < 2e-5
