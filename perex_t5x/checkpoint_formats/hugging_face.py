"""Names and configuration of Hugging Face's models, for the architectures that they and we share.

| here | there |
|---|---|
| `models.Transformer`: T5 1.0, T5 1.1, mT5, byT5 | `T5ForConditionalGeneration` |
| the same with a position bias in each layer, as T5X's scalable T5 | `UMT5ForConditionalGeneration` |
| `models.DecoderWrapper` with a gated MLP | `LlamaForCausalLM`; with tied embeddings `GraniteForCausalLM` |

Kernels there are transposed. Rotary positions are the same, of pairs (i, i + head_dim / 2), so heads need no permutation.
Granite is a Llama that divides its logits by a number, as ours does when tied. A converted model is the same function; what
has no counterpart is refused by its name.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from perex_t5x.checkpoint_formats import leaves as leaves_lib
from perex_t5x.checkpoint_formats.leaves import Contents, Leaf
from perex_t5x.errors import ConfigError

_EPSILON = 1e-6  # of our norms
_ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}
_GATED = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A leaf's name here and there; `{i}` is the number of a layer."""

    here: str
    there: str
    transposed: bool


def _t5() -> tuple[Pair, ...]:
    pairs = [Pair("token_embedder/embedding", "shared.weight", False)]
    blocks = {
        "encoder": [("attention", "SelfAttention")],
        "decoder": [("self_attention", "SelfAttention"), ("encoder_decoder_attention", "EncDecAttention")],
    }
    for stack, attentions in blocks.items():
        for number, (ours, theirs) in enumerate(attentions):
            layer = f"{stack}.block.{{i}}.layer.{number}"
            norm = "pre_cross_attention_layer_norm" if ours == "encoder_decoder_attention" else f"pre_{ours}_layer_norm"
            pairs.append(Pair(f"{stack}/layers_{{i}}/{norm}/scale", f"{layer}.layer_norm.weight", False))
            for kernel, letter in _ATTENTION.items():
                here = f"{stack}/layers_{{i}}/{ours}/{kernel}/kernel"
                pairs.append(Pair(here, f"{layer}.{theirs}.{letter}.weight", True))
        layer = f"{stack}.block.{{i}}.layer.{len(attentions)}"
        pairs.append(Pair(f"{stack}/layers_{{i}}/pre_mlp_layer_norm/scale", f"{layer}.layer_norm.weight", False))
        for kernel in ("wi", "wi_0", "wi_1", "wo"):
            here = f"{stack}/layers_{{i}}/mlp/{kernel}/kernel"
            pairs.append(Pair(here, f"{layer}.DenseReluDense.{kernel}.weight", True))
        pairs.append(Pair(f"{stack}/{stack}_norm/scale", f"{stack}.final_layer_norm.weight", False))
    pairs.append(Pair("decoder/logits_dense/kernel", "lm_head.weight", True))
    return tuple(pairs)


def _biases(each_layer: bool) -> tuple[Pair, ...]:
    """T5's position bias is in its first layer there, and serves all; UMT5 has one in each layer."""
    here, number = ("layers_{i}/", "{i}") if each_layer else ("", "0")
    name = "layer.0.SelfAttention.relative_attention_bias.weight"
    return tuple(
        Pair(f"{stack}/{here}relpos_bias/rel_embedding", f"{stack}.block.{number}.{name}", True)
        for stack in ("encoder", "decoder")
    )


def _llama() -> tuple[Pair, ...]:
    here, there = "decoder/layers_{i}", "model.layers.{i}"
    return (
        Pair("token_embedder/embedding", "model.embed_tokens.weight", False),
        Pair(f"{here}/pre_self_attention_layer_norm/scale", f"{there}.input_layernorm.weight", False),
        Pair(f"{here}/pre_mlp_layer_norm/scale", f"{there}.post_attention_layernorm.weight", False),
        *(
            Pair(f"{here}/self_attention/{kernel}/kernel", f"{there}.self_attn.{letter}_proj.weight", True)
            for kernel, letter in _ATTENTION.items()
        ),
        *(Pair(f"{here}/mlp/{kernel}/kernel", f"{there}.mlp.{name}.weight", True) for kernel, name in _GATED.items()),
        Pair("decoder/decoder_norm/scale", "model.norm.weight", False),
        Pair("decoder/logits_dense/kernel", "lm_head.weight", True),
    )


PAIRS: dict[str, tuple[Pair, ...]] = {
    "t5": _t5() + _biases(each_layer=False),
    "umt5": _t5() + _biases(each_layer=True),
    "llama": _llama(),
    "granite": _llama(),
}
TRAIN_STATE = ("state", "rng", "flax_mutables")  # what is beside 'target' in a checkpoint
_LOGITS = "target/decoder/logits_dense/kernel"
_TIED_COPIES = re.compile(r"(encoder|decoder)\.embed_tokens\.weight|.*\.rotary_emb\.inv_freq")


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)"))


def translate(name: str, pairs: tuple[Pair, ...], *, back: bool = False) -> tuple[str, bool] | None:
    """The other name, and whether the leaf is transposed; None for a name that is not among the pairs.

    >>> translate("decoder/layers_3/mlp/wi_0/kernel", PAIRS["llama"])
    ('model.layers.3.mlp.gate_proj.weight', True)
    >>> translate("encoder.block.0.layer.1.layer_norm.weight", PAIRS["t5"], back=True)
    ('encoder/layers_0/pre_mlp_layer_norm/scale', False)
    """
    for pair in pairs:
        source, target = (pair.there, pair.here) if back else (pair.here, pair.there)
        if match := _pattern(source).fullmatch(name):
            return target.replace("{i}", match.groupdict().get("i") or ""), pair.transposed
    return None


# --- to Hugging Face --------------------------------------------------------------------------------------------------


def architecture_of(parameters: Mapping[str, Leaf]) -> str:
    """The architecture of a checkpoint's parameters, by their names without 'target/', layers unrolled; or `ConfigError`."""
    if "token_embedder/embedding" not in parameters:
        raise ConfigError(_no_counterpart("it has no token_embedder/embedding"))
    biases = [name for name in parameters if name.endswith("relpos_bias/rel_embedding")]
    if any(name.startswith("encoder/") for name in parameters):
        architecture = "umt5" if any("/layers_" in name for name in biases) else "t5"
    elif biases:
        raise ConfigError(_no_counterpart("a decoder with relative positions (relpos_bias)"))
    else:
        architecture = "llama" if "decoder/logits_dense/kernel" in parameters else "granite"
    if unknown := [name for name in parameters if translate(name, PAIRS[architecture]) is None]:
        plain = "a plain MLP (mlp_activations of one entry)"
        what = plain if any("/mlp/wi/" in name for name in unknown) else f"{unknown[0]}"
        raise ConfigError(_no_counterpart(what))
    widths = {name.split("/")[-2]: leaf.shape[-1] for name, leaf in parameters.items() if "attention/" in name}
    if architecture in ("t5", "umt5") and widths.get("key") != widths.get("query"):
        raise ConfigError(_no_counterpart("T5 with grouped-query attention (num_kv_heads)"))
    return architecture


def _no_counterpart(what: str) -> str:
    why = f"Hugging Face's libraries have no model for this checkpoint: {what}."
    return f"{why} --names=t5x writes a flat file under T5X's names."


def config_of(architecture: str, parameters: Mapping[str, Leaf], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json.

    Args:
      parameters: without 'target/', layers unrolled.
      settings: fields of `T5Config` that shapes do not tell.
    """
    vocab_size, emb_dim = parameters["token_embedder/embedding"].shape
    common = {
        "dtype": parameters["token_embedder/embedding"].dtype.name,
        "eos_token_id": 1,
        "model_type": architecture,
        "pad_token_id": 0,
        "vocab_size": vocab_size,
    }
    depth = {
        stack: 1
        + max(int(name.split("/")[1].split("_")[1]) for name in parameters if name.startswith(f"{stack}/layers_"))
        for stack in ("encoder", "decoder")
        if any(name.startswith(f"{stack}/layers_") for name in parameters)
    }
    layer = "decoder/layers_0"
    query = parameters[f"{layer}/self_attention/query/kernel"].shape[1]
    key = parameters[f"{layer}/self_attention/key/kernel"].shape[1]
    mlp_dim = parameters[f"{layer}/mlp/wo/kernel"].shape[0]
    if architecture in ("t5", "umt5"):
        bias = next(leaf for name, leaf in parameters.items() if name.endswith("relpos_bias/rel_embedding"))
        num_heads, buckets = bias.shape
        name = {"t5": "T5ForConditionalGeneration", "umt5": "UMT5ForConditionalGeneration"}[architecture]
        return common | {
            "architectures": [name],
            "d_ff": mlp_dim,
            "d_kv": query // num_heads,
            "d_model": emb_dim,
            "decoder_start_token_id": 0,
            "dropout_rate": float(settings.get("dropout_rate", 0.0)),
            "feed_forward_proj": _feed_forward(parameters, settings),
            "is_encoder_decoder": True,
            "layer_norm_epsilon": _EPSILON,
            "num_decoder_layers": depth["decoder"],
            "num_heads": num_heads,
            "num_layers": depth["encoder"],
            "relative_attention_max_distance": 128,
            "relative_attention_num_buckets": buckets,
            "tie_word_embeddings": "decoder/logits_dense/kernel" not in parameters,
        }
    head_dim = _needed("head_dim", settings)
    theta = float(settings.get("rotary_max_wavelength", 10_000.0))
    gates = tuple(_needed("mlp_activations", settings))
    act = {"silu": "silu", "swish": "silu", "gelu": "gelu_pytorch_tanh", "relu": "relu"}.get(gates[0])
    if len(gates) != 2 or gates[1] != "linear" or act is None:
        raise ConfigError(_no_counterpart(f"T5Config.mlp_activations = {gates!r}; ('silu', 'linear') has one"))
    if query % head_dim:
        raise ConfigError(
            f"head_dim = {head_dim} does not divide the {query} columns of {layer}/self_attention/query/kernel."
        )
    llama = common | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "head_dim": head_dim,
        "hidden_act": act,
        "hidden_size": emb_dim,
        "intermediate_size": mlp_dim,
        "max_position_embeddings": int(settings.get("max_length", 2048)),
        "mlp_bias": False,
        "num_attention_heads": query // head_dim,
        "num_hidden_layers": depth["decoder"],
        "num_key_value_heads": key // head_dim,
        "rms_norm_eps": _EPSILON,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "tie_word_embeddings": False,
    }
    if architecture == "llama":
        return llama
    return llama | {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 1.0 / math.sqrt(head_dim),
        "embedding_multiplier": 1.0,
        "logits_scaling": math.sqrt(emb_dim),
        "residual_multiplier": 1.0,
        "tie_word_embeddings": True,
    }


def _needed(name: str, settings: Mapping[str, Any]) -> Any:
    if name not in settings:
        raise ConfigError(
            f"Hugging Face's config.json needs T5Config.{name}, which the checkpoint's shapes do not tell, and there is no "
            f"config.gin of its run beside it. Name that with --config_gin, or say it: --set={name}=..."
        )
    return settings[name]


def _feed_forward(parameters: Mapping[str, Leaf], settings: Mapping[str, Any]) -> str:
    """Hugging Face's word for a T5's MLP. 'gelu' is the tanh approximation here, which they call 'gelu_new'."""
    is_gated = "decoder/layers_0/mlp/wi_0/kernel" in parameters
    default = ("gelu", "linear") if is_gated else ("relu",)  # those of T5 1.1 and of T5 1.0
    gates = tuple(settings.get("mlp_activations", default))
    word = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}.get(gates[0])
    if word is None or len(gates) != 1 + is_gated or (is_gated and gates[1] != "linear"):
        raise ConfigError(_no_counterpart(f"T5Config.mlp_activations = {gates!r}"))
    if is_gated:
        return f"gated-{'gelu' if word == 'gelu_new' else word}"
    return word


# --- from Hugging Face ------------------------------------------------------------------------------------------------


def in_t5x_names(contents: Contents, ignore: tuple[str, ...] = ()) -> Contents:
    """The same checkpoint under T5X's names, layers unrolled; as it is where it has these names.

    Args:
      ignore: settings of config.json that may differ from what our networks compute.
    """
    leaves = {}
    for name, found in names_here(contents, ignore).items():
        if found is not None:
            leaf, (here, is_transposed) = contents.leaves[name], found
            leaves[here] = (
                leaves_lib.transposed(leaf, (1, 0), here) if is_transposed else leaves_lib.renamed(leaf, here)
            )
    if _architecture_there(contents) is not None and _head(contents) == "copied":
        leaves[_LOGITS] = leaves_lib.transposed(leaves["target/token_embedder/embedding"], (1, 0), _LOGITS)
    return dataclasses.replace(contents, leaves=leaves)


def names_here(contents: Contents, ignore: tuple[str, ...] = ()) -> dict[str, tuple[str, bool] | None]:
    """T5X's name of each leaf, and whether that is transposed; None for one that is computed from others."""
    architecture = _architecture_there(contents)
    if architecture is None:
        return {name: (name, False) for name in contents.leaves}
    if "config" in contents.metadata:
        _check_config(contents.path, contents.metadata["config"], ignore)
    head = _head(contents)
    found: dict[str, tuple[str, bool] | None] = {}
    for name in contents.leaves:
        if name.split("/")[0] in TRAIN_STATE:
            found[name] = name, False
            continue
        if _TIED_COPIES.fullmatch(name) or (head != "own" and name == "lm_head.weight"):
            found[name] = None
            continue
        other = translate(name, PAIRS[architecture], back=True)
        if other is None:
            raise ConfigError(f"{contents.path}: {name} has no counterpart in our networks ({architecture}).")
        found[name] = f"target/{other[0]}", other[1]
    return found


def _head(contents: Contents) -> str:
    """What the output projection of a model there is: 'own'; 'tied' to the embedding, with logits that are divided, as ours
    is when tied; or 'copied', tied without that, which here is a projection of its own."""
    config, has_own = contents.metadata.get("config", {}), "lm_head.weight" in contents.leaves
    model_type, ties = config.get("model_type"), config.get("tie_word_embeddings", not has_own)
    if model_type in ("t5", None) and "shared.weight" in contents.leaves:
        # transformers 5 writes that each T5 is tied, and says with another word which divide.
        divides = config.get("scale_decoder_outputs", ties)
        if divides:
            return "tied"
        return "own" if has_own else "copied"
    if model_type in ("mt5", "umt5"):
        return "own" if has_own else "copied"
    if not ties:
        return "own"
    return "tied" if model_type in ("granite", None) else "copied"


def _architecture_there(contents: Contents) -> str | None:
    if contents.format != "safetensors" or any(name.startswith("target/") for name in contents.leaves):
        return None
    model_type = contents.metadata.get("config", {}).get("model_type")
    if model_type is not None:
        known = {"mt5": "t5"}.get(model_type, model_type)
        if known not in PAIRS:
            raise ConfigError(
                f"{contents.path}: models of type {model_type!r} are not known; these are: {', '.join(PAIRS)}."
            )
        return known
    if "shared.weight" in contents.leaves:
        has_biases = sum("decoder" in name and "relative_attention_bias" in name for name in contents.leaves)
        return "umt5" if has_biases > 1 else "t5"
    if "model.embed_tokens.weight" in contents.leaves:
        return "llama" if "lm_head.weight" in contents.leaves else "granite"
    if any(name.startswith("state/") for name in contents.leaves):
        return None
    some = ", ".join(sorted(contents.leaves)[:3])
    raise ConfigError(f"{contents.path}: its names ({some}, ...) are neither T5X's nor those of a T5 or a Llama.")


def _check_config(path: str, config: Mapping[str, Any], ignore: tuple[str, ...]) -> None:
    """Raises `ConfigError` where a model there computes what our networks do not."""
    wanted: dict[str, tuple[Any, ...]] = {
        "rms_norm_eps": (_EPSILON,),
        "layer_norm_epsilon": (_EPSILON,),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "rope_scaling": (None,),
        "relative_attention_max_distance": (128,),
        "relative_attention_num_buckets": (32,),
        "embedding_multiplier": (1.0,),
        "residual_multiplier": (1.0,),
    }
    values = dict(config)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        values["rope_scaling"] = rope["rope_type"]
    elif isinstance(values.get("rope_scaling"), Mapping) and values["rope_scaling"].get("rope_type") == "default":
        values["rope_scaling"] = None
    if config.get("model_type") == "granite" and "hidden_size" in config:
        wanted["logits_scaling"] = (math.sqrt(config["hidden_size"]),)
        if config.get("head_dim"):
            wanted["attention_multiplier"] = (1.0 / math.sqrt(config["head_dim"]),)
    for name, allowed in wanted.items():
        if name in values and values[name] not in allowed and name not in ignore:
            raise ConfigError(
                f"{path}/config.json: {name} = {values[name]!r} has no counterpart here, where it is {allowed[0]!r}: the "
                f"converted model would be another function. `convert --ignore={name}` converts it nevertheless."
            )


def t5_config(contents: Contents) -> dict[str, Any]:
    """The fields of `T5Config` that make the model of a config.json."""
    config, tied = contents.metadata["config"], _head(contents) == "tied"
    if config.get("model_type") in ("t5", "mt5", "umt5"):
        feed = str(config.get("feed_forward_proj", "relu"))
        word = feed.removeprefix("gated-").replace("gelu_new", "gelu")
        return {
            "vocab_size": config["vocab_size"],
            "emb_dim": config["d_model"],
            "num_heads": config["num_heads"],
            "head_dim": config["d_kv"],
            "mlp_dim": config["d_ff"],
            "num_encoder_layers": config["num_layers"],
            "num_decoder_layers": config.get("num_decoder_layers") or config["num_layers"],
            "mlp_activations": (word, "linear") if feed.startswith("gated-") else (word,),
            "logits_via_embedding": tied,
        }
    rope = config.get("rope_parameters") or {}
    return {
        "vocab_size": config["vocab_size"],
        "emb_dim": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "mlp_dim": config["intermediate_size"],
        "num_decoder_layers": config["num_hidden_layers"],
        "mlp_activations": (str(config.get("hidden_act", "silu")).replace("gelu_pytorch_tanh", "gelu"), "linear"),
        "rotary_max_wavelength": rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        "logits_via_embedding": tied,
    }
