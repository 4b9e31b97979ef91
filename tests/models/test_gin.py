"""Every shipped model file is parsed, and its model initialised without allocating it."""

import inspect
import os

import gin
import jax
import pytest

from perex_t5x import models
from perex_t5x.errors import ConfigError
from perex_t5x.models import decoding

GIN = os.path.join(os.path.dirname(__file__), "..", "..", "gin")

MILLIONS = {"nano": 0.0642, "tiny": 0.427, "150m": 149.4, "1_2b": 1224.8, "8b": 8053.1}
MILLIONS |= {"t5_1_1_small": 77.0, "t5_1_1_base": 247.6, "t5_1_0_base": 222.9, "byt5_small": 299.6}
MILLIONS |= {"mt5_small": 300.2, "t5_decoder_base": 109.6}
LARGE = {"t5_1_0_small": 60.5, "t5_1_0_large": 737.7, "t5_1_0_3b": 2851.6, "t5_1_0_11b": 11307.3}
LARGE |= {"t5_1_1_large": 783.2, "t5_1_1_xl": 2849.8, "t5_1_1_xxl": 11135.3}
LARGE |= {"mt5_base": 582.4, "mt5_large": 1229.6, "mt5_xl": 3742.6, "mt5_xxl": 12921.1}
LARGE |= {"byt5_base": 581.7, "byt5_large": 1228.2, "byt5_xl": 3737.8, "byt5_xxl": 12906.9}
LARGE |= {"t5_decoder_large": 341.2, "t5_decoder_xl": 1223.5, "t5_decoder_xxl": 4762.3}


@gin.configurable(module="model_gin_test")
def take(model):
    return model


def load(name, *bindings):
    gin.add_config_file_search_path(GIN)
    gin.parse_config_files_and_bindings([f"models/{name}.gin"], [*bindings, "model_gin_test.take.model = %MODEL"])
    return take()


@pytest.mark.parametrize("name", [*MILLIONS, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_shipped_file(name):
    model = load(name, "DROPOUT_RATE = 0.25")
    shapes = {feature: (4, 16) for feature in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")}
    variables = jax.eval_shape(lambda key: model.get_initial_variables(key, shapes), jax.random.key(0))
    millions = sum(x.size for x in jax.tree.leaves(variables)) / 1e6
    assert millions == pytest.approx((MILLIONS | LARGE)[name], rel=0.002)
    assert model.config.dropout_rate == 0.25, "the macro reaches the network"
    assert model.loss_normalizing_factor == "NUM_REAL_TARGET_TOKENS"
    assert model.output_vocabulary is not None and model.optimizer_def is not None
    decoder_only = not name.startswith(("t5_1", "mt5", "byt5"))
    assert isinstance(model, models.DecoderOnlyModel if decoder_only else models.EncoderDecoderModel)
    converter = "DecoderFeatureConverter" if decoder_only else "EncDecFeatureConverter"
    assert model.FEATURE_CONVERTER_CLS().__name__ == converter


def test_every_shipped_model_is_counted():
    shipped = {path.removesuffix(".gin") for path in os.listdir(os.path.join(GIN, "models"))}
    assert shipped == {*MILLIONS, *LARGE}


def test_how_a_model_decodes_is_bound_as_in_t5x():
    """By `decode_fn`; and what is bound to the default one counts, though no file names it as `decode_fn`."""
    imports = "from __gin__ import dynamic_registration\nfrom perex_t5x.models import decoding\n"
    model = load("t5_decoder_base")
    assert inspect.unwrap(model.decode_fn) is decoding.temperature_sample
    assert gin.query_parameter("decoding.temperature_sample.topk") == 40
    gin.clear_config()
    with gin.unlock_config():
        gin.parse_config(imports + "decoding.temperature_sample.num_decodes = 0")
    model = load("tiny")
    with pytest.raises(ConfigError, match="num_decodes = 0"):
        model.decode_fn(decoding.Start(*[None] * len(decoding.Start._fields)))
