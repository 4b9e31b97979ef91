"""Small models and batches that the tests of this folder share."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from perex_t5x import models
from perex_t5x.models import attention, layers, rotary

VOCAB = 24
EOS = 1
TWO_LAYERS = dict(num_encoder_layers=2, num_decoder_layers=2)


def jit(function):
    """`jax.jit` that compiles ten times faster: these programs run once, for microseconds."""
    options = {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_llvm_disable_expensive_passes": True,
    }
    return jax.jit(function, compiler_options=options)


def config(**changes) -> models.T5Config:
    sizes = dict(
        vocab_size=VOCAB,
        emb_dim=16,
        num_heads=4,
        head_dim=8,
        mlp_dim=24,
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
    return models.T5Config(**(sizes | changes))


def decoder_only(loss_normalizing_factor="NUM_REAL_TARGET_TOKENS", z_loss=0.0, bidirectional=False, **changes):
    return models.DecoderOnlyModel(
        models.DecoderWrapper(config(**changes)),
        SimpleNamespace(eos_id=EOS),
        None,
        loss_normalizing_factor=loss_normalizing_factor,
        z_loss=z_loss,
        inputs_bidirectional_attention=bidirectional,
    )


def encoder_decoder(loss_normalizing_factor="NUM_REAL_TARGET_TOKENS", z_loss=0.0, **changes):
    vocabulary = SimpleNamespace(eos_id=EOS)
    return models.EncoderDecoderModel(
        models.Transformer(config(**changes)),
        vocabulary,
        vocabulary,
        None,
        loss_normalizing_factor=loss_normalizing_factor,
        z_loss=z_loss,
    )


def as_for_tpu(monkeypatch) -> None:
    """Has layers take the forms that they take in programs for TPUs; the same functions, which a CPU computes, too."""
    for module in (attention, layers, rotary):
        monkeypatch.setattr(module, "for_tpu", lambda: True)


MAKE = {"decoder_only": decoder_only, "encoder_decoder": encoder_decoder}


def batch(kind: str, lengths=(9, 4, 7), length=9, seed=0) -> dict[str, jax.Array]:
    """Rows of different token counts, padded with 0 on the right."""
    draw = np.random.default_rng(seed)
    rows = len(lengths)
    targets = np.zeros((rows, length), np.int32)
    for row, n in enumerate(lengths):
        targets[row, :n] = draw.integers(2, VOCAB, n)
    features = {
        "decoder_target_tokens": targets,
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }
    if kind == "encoder_decoder":
        inputs = draw.integers(2, VOCAB, (rows, 6)).astype(np.int32)
        inputs[0, 4:] = 0
        features["encoder_input_tokens"] = inputs
    return jax.tree.map(jnp.asarray, features)


def boxed_params(model, features):
    shapes = {name: x.shape for name, x in features.items()}
    return jax.eval_shape(lambda key: model.get_initial_variables(key, shapes), jax.random.key(1))["params"]


def params(model, features):
    """Values of the initialisers' sizes, drawn by numpy: nothing to compile."""
    draw = np.random.default_rng(1)

    def value(path, leaf):
        name = path[-1].key
        if name == "scale":
            return 1 + 0.1 * draw.normal(size=leaf.shape).astype(np.float32)
        fan_in = leaf.shape[-2] if name == "kernel" else 1
        return draw.normal(size=leaf.shape).astype(np.float32) / np.float32(np.sqrt(fan_in))

    return jax.tree_util.tree_map_with_path(value, nn.unbox(boxed_params(model, features)))


def logits(model, p, features, keys=None):
    return jit(model.compute_logits)(p, features, keys)


def loss_and_grads(model, p, features, keys=None):
    return jit(jax.value_and_grad(lambda p: model.loss_fn(p, features, keys)[0]))(p)


def close(actual, expected, atol=2e-6, rtol=2e-5):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=atol, rtol=rtol), actual, expected)
