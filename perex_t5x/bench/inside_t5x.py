"""Time of training steps inside T5X, with its own trainer and with ours, and of the same models outside of T5X, in our own
trainer: `python -m perex_t5x.bench --t5x=...`"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from perex_t5x.bench.turns import in_turns
from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.train import timed
from perex_t5x.trainer import Trainer
from perex_t5x.training_setup import Setup

MODELS = ("decoder_only", "encoder_decoder")
OWN_STEP = "t5x adamw"  # the baseline: T5X's trainer, and its own wrapper of `optax.adamw`


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the model and the batch; of an encoder-decoder, layers in each half and tokens on each side."""

    width: int = 256
    mlp: int = 1024
    heads: int = 4
    layers: int = 4
    vocabulary: int = 4096
    length: int = 512
    examples: int = 16


def benchmark_t5x(
    models: Sequence[str], rounds: int = 5, examples: int = 16, layers: int = 4, steps: int = 1
) -> list[dict[str, Any]]:
    """Times T5X's example models under each trainer and optimizer, taking turns; prints one JSON line for each model.

    The devices are T5X's data axis. A round's time is that of `steps` steps of `trainer.train`, logs of metrics included.

    Args:
      models: some of `MODELS`.
      rounds: in which all trainers take turns.
      examples, layers: of the batch and the model.
      steps: in each round.
    """
    for name in models:
        if name not in MODELS:
            raise ConfigError(f"--t5x={name}: not one of {', '.join(MODELS)}.{did_you_mean(name, MODELS)}")
    try:
        from perex_t5x import t5x_plugin  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"--t5x needs T5X. {e}") from None
    results = []
    for name in models:
        size = Size(layers=layers, examples=examples)
        feed, trainers = _trainers(name, size)
        measures = {kind: functools.partial(_seconds, trainer, feed, steps) for kind, trainer in trainers.items()}
        in_turns(measures, 1)  # compile and warm up
        both = in_turns(measures, rounds)
        times, processor = ({kind: [pair[i] for pair in pairs] for kind, pairs in both.items()} for i in (0, 1))
        ratios, processor_ratios = _ratios(times), _ratios(processor)
        result = {
            "model": f"t5x {name}",
            **dataclasses.asdict(size),
            "devices": jax.device_count(),
            "rounds": rounds,
            "t5x_step_seconds": statistics.median(times[OWN_STEP]) / steps,
            "time": {k: statistics.median(values) for k, values in ratios.items()},
            "processor_time": {k: statistics.median(values) for k, values in processor_ratios.items()},
            "time_all": ratios,
        }
        print(json.dumps(result), flush=True)
        for kind, ratio in result["time"].items():
            processor_ratio = result["processor_time"][kind]
            line = f"  {name:15} {kind:32} time {ratio:.3f}  processor time {processor_ratio:.3f}"
            print(line, file=sys.stderr, flush=True)
        results.append(result)
        for trainer in trainers.values():
            trainer.close()
    return results


def _seconds(trainer: Any, feed: Iterator[Mapping[str, np.ndarray]], steps: int) -> tuple[float, float]:
    """Of the wall clock, and of all processors together: the latter depends less on what else the machine does."""
    begun = time.process_time()
    seconds = timed(lambda: trainer.train(feed, steps).result())[1]
    return seconds, time.process_time() - begun


def _ratios(times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Round by round, to the baseline's."""
    return {k: [t / base for t, base in zip(values, times[OWN_STEP], strict=True)] for k, values in times.items()}


def _trainers(name: str, size: Size) -> tuple[Iterator[Any], dict[str, Any]]:
    """Batches, and trainers by name."""
    import optax
    import t5x.optimizers  # pyright: ignore[reportMissingImports]
    import t5x.trainer  # pyright: ignore[reportMissingImports]
    from t5x import partitioning, utils  # pyright: ignore[reportMissingImports]

    from perex_t5x import optimizers, t5x_plugin

    partitioner = _partitioner(partitioning)
    batch = _batch(name, size)
    rate = 1e-3

    def trainer(cls: Callable[..., Any], optimizer_def: Any, **options: Any) -> Any:
        model = _model(name, size, optimizer_def)
        states = utils.TrainStateInitializer(
            optimizer_def=optimizer_def,
            init_fn=model.get_initial_variables,
            input_shapes={k: x.shape for k, x in batch.items()},
            input_types={k: x.dtype for k, x in batch.items()},
            partitioner=partitioner,
        )
        state = states.from_scratch(jax.random.PRNGKey(0))
        key = jax.random.PRNGKey(1)
        axes = states.train_state_axes
        return cls(
            model, state, partitioner, (), None, axes, key, learning_rate_fn=lambda _: rate, num_microbatches=None, **options
        )  # fmt: skip

    ours = t5x_plugin.PerExampleTrainer
    trainers = {
        OWN_STEP: trainer(t5x.trainer.Trainer, t5x.optimizers.adamw(learning_rate=rate)),
        "adamw": trainer(ours, t5x_plugin.PerExampleOptimizer(optax.adamw)),
        "adamw, monitor": trainer(ours, t5x_plugin.PerExampleOptimizer(optax.adamw), monitor=True),
        "micro_adam": trainer(ours, t5x_plugin.micro_adam()),
        "micro_adam, all at once": trainer(ours, t5x_plugin.micro_adam(), microbatch_size=None),
        "outside, adamw": _Outside(name, size, optax.adamw, batch),
        "outside, micro_adam": _Outside(name, size, optimizers.micro_adam, batch, microbatch_size="auto"),
        "outside, micro_adam, all at once": _Outside(name, size, optimizers.micro_adam, batch),
    }

    def feed() -> Iterator[Any]:
        while True:
            yield batch

    return feed(), trainers


class _Outside:
    """Our own trainer with our own network of the same architecture and sizes, called as T5X's trainers are."""

    def __init__(self, name: str, size: Size, optimizer_def: Any, batch: Mapping[str, Any], **options: Any):
        trainer = Trainer(_own_model(name, size, optimizer_def), PjitPartitioner(num_partitions=1), 1e-3, **options)
        spec = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}
        setup = Setup(trainer, spec, *trainer.abstract_state({k: x.shape for k, x in spec.items()}))
        self._step = trainer.compiled_step(setup.shapes, setup.shardings, spec)
        self._state = setup.init(jax.random.key(0))
        self._sharding = trainer.partitioner.data_sharding

    def train(self, feed: Iterator[Mapping[str, np.ndarray]], steps: int) -> _Outside:
        for batch in itertools.islice(feed, steps):
            self._state, self._metrics = self._step(self._state, jax.device_put(batch, self._sharding))
        return self

    def result(self) -> Any:
        return jax.device_get(self._metrics)

    def close(self) -> None:
        del self._state


def _sizes(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "emb_dim": size.width,
        "num_heads": size.heads,
        "head_dim": size.width // size.heads,
        "mlp_dim": size.mlp,
        "mlp_activations": ("gelu", "linear"),
        "logits_via_embedding": False,
        "dropout_rate": 0.0,
    }


_LOSS = {"loss_normalizing_factor": "NUM_REAL_TARGET_TOKENS", "z_loss": 1e-4}


def _own_model(name: str, size: Size, optimizer_def: Any) -> Any:
    import seqio

    from perex_t5x import models

    vocabulary = seqio.ByteVocabulary()
    if name == "decoder_only":
        module = models.DecoderWrapper(models.TransformerConfig(num_layers=size.layers, **_sizes(size)))
        return models.DecoderOnlyModel(module, vocabulary, optimizer_def, **_LOSS)
    layers = {"num_encoder_layers": size.layers, "num_decoder_layers": size.layers}
    module = models.Transformer(models.T5Config(positions="relative", **layers, **_sizes(size)))
    return models.EncoderDecoderModel(module, vocabulary, vocabulary, optimizer_def, **_LOSS)


def _partitioner(partitioning: Any) -> Any:
    class DataPartitioner(partitioning.PjitPartitioner):
        """On CPUs T5X takes all devices for its model axis."""

        @functools.cached_property
        def mesh(self) -> jax.sharding.Mesh:
            return jax.sharding.Mesh(np.array(jax.devices()).reshape(-1, 1), ("data", "model"))

    return DataPartitioner(num_partitions=1)


def _model(name: str, size: Size, optimizer_def: Any) -> Any:
    import seqio
    from t5x import models  # pyright: ignore[reportMissingImports]

    vocabulary = seqio.ByteVocabulary()
    if name == "decoder_only":
        from t5x.examples.decoder_only import network  # pyright: ignore[reportMissingImports]

        module = network.DecoderWrapper(network.TransformerConfig(num_layers=size.layers, **_sizes(size)))
        return models.DecoderOnlyModel(module, vocabulary, optimizer_def, **_LOSS)
    from t5x.examples.t5 import network  # pyright: ignore[reportMissingImports]

    config = network.T5Config(num_encoder_layers=size.layers, num_decoder_layers=size.layers, **_sizes(size))
    return models.EncoderDecoderModel(network.Transformer(config), vocabulary, vocabulary, optimizer_def, **_LOSS)


def _batch(name: str, size: Size) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (size.examples, size.length)
    weights = (np.arange(size.length) < rng.integers(size.length // 2, size.length + 1, (size.examples, 1))).astype(
        np.int32
    )
    targets = rng.integers(3, size.vocabulary, shape).astype(np.int32) * weights
    batch = {
        "decoder_target_tokens": targets,
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        "decoder_loss_weights": weights,
    }
    if name == "encoder_decoder":
        batch["encoder_input_tokens"] = rng.integers(3, size.vocabulary, shape).astype(np.int32)
    return batch
