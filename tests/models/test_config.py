import jax.numpy as jnp
import pytest

from perex_t5x import models
from perex_t5x.errors import ConfigError


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(num_heads=8, num_kv_heads=3), ["num_kv_heads = 3", "num_heads = 8", "1, 2, 4, 8"]),
        (dict(remat_policy="minimum"), ["remat_policy", "Did you mean 'minimal'", "dots_saveable"]),
        (dict(remat_policy="save_only_these_names"), ["remat_policy", "Known"]),
        (dict(mlp_activations=("gelo", "linear")), ["mlp_activations", "Did you mean 'gelu'"]),
        (dict(mlp_activations=()), ["mlp_activations", "empty"]),
        (dict(rotary_max_wavelength=0.0), ["rotary_max_wavelength = 0.0", "above 1"]),
        (dict(dropout_rate=1.0), ["dropout_rate = 1.0", "[0, 1)"]),
        (dict(dropout_rate=-0.1), ["dropout_rate"]),
        (dict(dtype="bfloat"), ["dtype", "Did you mean 'bfloat16'"]),
        (dict(dtype=jnp.int32), ["dtype", "int32"]),
        (dict(emb_dim=0), ["emb_dim = 0"]),
        (dict(num_decoder_layers=2.5), ["num_decoder_layers = 2.5", "whole number"]),
    ],
)
def test_slips_are_named(changes, words):
    with pytest.raises(ConfigError) as error:
        models.T5Config(vocab_size=32, **changes)
    for word in words:
        assert word in str(error.value)


def test_dtypes_and_lists_are_canonical():
    config = models.T5Config(vocab_size=32, dtype=jnp.bfloat16, mlp_activations=["relu"])
    assert config == models.T5Config(vocab_size=32, dtype="bfloat16", mlp_activations=("relu",))
    assert config.wide_dtype == jnp.float32
    assert models.T5Config(vocab_size=32, dtype="float64").wide_dtype == jnp.float64
    hash(config)
