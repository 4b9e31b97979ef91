"""T5X's own example models, tiny, on a mesh of 4 x 2 of the 8 devices, and trainers for them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import seqio
from t5x import models, partitioning, utils
from t5x.examples.decoder_only import network as decoder_only
from t5x.examples.scalable_t5 import network as scalable_t5
from t5x.examples.t5 import network as t5

VOCABULARY = seqio.ByteVocabulary()
SIZES = {"vocab_size": 264, "emb_dim": 16, "num_heads": 4, "head_dim": 8, "mlp_dim": 32}
BATCH, INPUTS, TARGETS = 16, 12, 16


def decoder_only_model(optimizer_def: Any, dropout_rate: float = 0.0, **options: Any) -> models.DecoderOnlyModel:
    config = decoder_only.TransformerConfig(num_layers=2, dropout_rate=dropout_rate, **SIZES)
    return models.DecoderOnlyModel(decoder_only.DecoderWrapper(config), VOCABULARY, optimizer_def, **options)


def encoder_decoder_model(optimizer_def: Any, dropout_rate: float = 0.0, **options: Any) -> models.EncoderDecoderModel:
    config = t5.T5Config(num_encoder_layers=1, num_decoder_layers=1, dropout_rate=dropout_rate, **SIZES)
    return models.EncoderDecoderModel(t5.Transformer(config), VOCABULARY, VOCABULARY, optimizer_def, **options)


def scalable_model(optimizer_def: Any, **options: Any) -> models.EncoderDecoderModel:
    """Its layers are scanned and rematerialised."""
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dropout_rate": 0.0, "remat_policy": "minimal"}
    module = scalable_t5.Transformer(scalable_t5.T5Config(**layers, **SIZES))
    return models.EncoderDecoderModel(module, VOCABULARY, VOCABULARY, optimizer_def, **options)


MODELS = {"decoder_only": decoder_only_model, "encoder_decoder": encoder_decoder_model}


class Partitioner(partitioning.PjitPartitioner):
    """T5X ignores `num_partitions` on CPUs; this one does not, and data x model are 4 x 2."""

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return jax.sharding.Mesh(np.array(jax.devices()).reshape(-1, self._num_partitions), ("data", "model"))


def make_partitioner(parameter_dims: int = 1, model: int = 2) -> Partitioner:
    return Partitioner(model, logical_axis_rules=partitioning.standard_logical_axis_rules(1, parameter_dims))


def batches(model: models.BaseModel, seed: int = 0, size: int = BATCH) -> Any:
    """Rows of very different lengths, as T5X's feature converters make them."""
    rng = np.random.default_rng(seed)
    while True:
        lengths = rng.integers(1, TARGETS + 1, size)
        weights = (np.arange(TARGETS)[None] < lengths[:, None]).astype(np.int32)
        targets = rng.integers(3, 40, (size, TARGETS)).astype(np.int32) * weights
        shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        batch = {"decoder_target_tokens": targets, "decoder_input_tokens": shifted, "decoder_loss_weights": weights}
        if isinstance(model, models.EncoderDecoderModel):
            batch["encoder_input_tokens"] = rng.integers(3, 40, (size, INPUTS)).astype(np.int32)
        else:
            batch["decoder_causal_attention"] = (np.arange(TARGETS)[None] < 3).astype(np.int32) * weights
        yield batch


def initializer(model: models.BaseModel, partitioner: Partitioner) -> utils.TrainStateInitializer:
    batch = next(batches(model))
    return utils.TrainStateInitializer(
        optimizer_def=model.optimizer_def,
        init_fn=model.get_initial_variables,
        input_shapes={name: x.shape for name, x in batch.items()},
        input_types={name: x.dtype for name, x in batch.items()},
        partitioner=partitioner,
    )


def make_trainer(cls: Any, model: models.BaseModel, partitioner: Partitioner | None = None, **options: Any) -> Any:
    partitioner = partitioner or make_partitioner()
    states = initializer(model, partitioner)
    options = {"learning_rate_fn": lambda step: 0.01 / (1.0 + 0.1 * step), "num_microbatches": None, **options}
    return cls(
        model=model,
        train_state=states.from_scratch(jax.random.PRNGKey(0)),
        partitioner=partitioner,
        eval_names=["small"],
        summary_dir=None,
        train_state_axes=states.train_state_axes,
        rng=jax.random.PRNGKey(1),
        **options,
    )


def train(trainer: Any, steps: int, seed: int = 0) -> list[dict[str, float]]:
    """Every step's metrics, by name."""
    feed = batches(trainer._model, seed)
    history = []
    for _ in range(steps):
        summary = trainer.train(feed, 1).result()
        history.append({name: float(value.value) for name, value in summary.items()})
    return history
