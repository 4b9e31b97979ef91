"""Every shipped model file is parsed, and its model initialised without allocating it."""

import os

import gin
import jax
import pytest

from perex_t5x import models

GIN = os.path.join(os.path.dirname(__file__), "..", "..", "gin")

MILLIONS = {"nano": 0.064, "tiny": 0.427, "150m": 149.4, "1_2b": 1224.8, "8b": 8053.1}
MILLIONS |= {"t5_1_1_small": 77.0, "t5_1_1_base": 247.6}


@gin.configurable(module="model_gin_test")
def take(model):
    return model


def load(name, *bindings):
    gin.add_config_file_search_path(GIN)
    gin.parse_config_files_and_bindings([f"models/{name}.gin"], [*bindings, "model_gin_test.take.model = %MODEL"])
    return take()


@pytest.mark.parametrize("name", MILLIONS)
def test_shipped_file(name):
    model = load(name, "DROPOUT_RATE = 0.25")
    shapes = {feature: (4, 16) for feature in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")}
    variables = jax.eval_shape(lambda key: model.get_initial_variables(key, shapes), jax.random.key(0))
    millions = sum(x.size for x in jax.tree.leaves(variables)) / 1e6
    assert millions == pytest.approx(MILLIONS[name], rel=0.01)
    assert model.config.dropout_rate == 0.25, "the macro reaches the network"
    assert model.loss_normalizing_factor == "NUM_REAL_TARGET_TOKENS"
    assert model.output_vocabulary is not None and model.optimizer_def is not None
    decoder_only = not name.startswith("t5")
    assert isinstance(model, models.DecoderOnlyModel if decoder_only else models.EncoderDecoderModel)
    converter = "DecoderFeatureConverter" if decoder_only else "EncDecFeatureConverter"
    assert model.FEATURE_CONVERTER_CLS().__name__ == converter
