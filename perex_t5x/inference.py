"""Restores a checkpoint's parameters, and runs a model function over examples in batches on a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from perex_t5x import checkpoint_files, checkpoints, distributed
from perex_t5x.data.feed import batch_spec, spec_of
from perex_t5x.errors import ConfigError
from perex_t5x.models.protocol import Model, feature_converter_cls, sharded_dimensions
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.train_state import TrainState
from perex_t5x.utils import DatasetConfig, RestoreCheckpointConfig

# Arguments of T5X's evaluate and infer: name -> (default, why it has no effect).
IGNORED_OF_T5X: dict[str, tuple[Any, str]] = {
    "train_state_initializer_cls": (None, "restore_checkpoint_cfg says what is read"),
    "use_orbax": (True, "a checkpoint is read in the format that it has"),
}

Example = dict[str, np.ndarray]


def paths_to_restore(config: RestoreCheckpointConfig) -> list[str]:
    """The checkpoints that a restore configuration names; at least one, or a `ConfigError`."""
    if not config.path:
        raise ConfigError(
            "RestoreCheckpointConfig.path is empty: give a checkpoint or a run's folder, with --gin.CHECKPOINT_PATH=..."
        )
    return checkpoints.checkpoint_paths(config.path, config.mode)


def restore_params(
    model: Model,
    partitioner: PjitPartitioner,
    path: str,
    config: RestoreCheckpointConfig,
    dataset_cfg: DatasetConfig,
    fallback_init_rng: int | None = None,
) -> Any:
    """Reads the parameters alone, sharded as the partitioner says.

    Args:
      fallback_init_rng: the seed of parameters that the checkpoint has not; None: they are refused.
    """
    config, fallback = _with_fallback(config, fallback_init_rng), fallback_init_rng is not None
    shapes, shardings = check_params(model, partitioner, path, config, dataset_cfg, fallback)
    restored = checkpoints.restore(path, shapes, shardings, config, parts=("target",))
    params = checkpoints.merge(shapes, restored).params
    is_missing = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    if fallback and any(map(is_missing, jax.tree.leaves(params))):
        inputs = _input_shapes(model, dataset_cfg)
        seed: Any = fallback_init_rng
        initial = jax.jit(
            lambda: nn.meta.unbox(model.get_initial_variables(jax.random.key(seed), inputs)["params"]),
            out_shardings=shardings.params,
        )()
        params = jax.tree.map(lambda x, fresh: fresh if is_missing(x) else x, params, initial)
    return params


def _with_fallback(config: RestoreCheckpointConfig, fallback_init_rng: int | None) -> RestoreCheckpointConfig:
    return config if fallback_init_rng is None else dataclasses.replace(config, fallback_to_scratch=True)


def _input_shapes(model: Model, dataset_cfg: DatasetConfig) -> dict[str, tuple[int, ...]]:
    required = getattr(model, "REQUIRED_FEATURES", None)
    if required is not None:  # parameters do not depend on lengths, which may be left open
        return {name: (1, 8) for name in required}
    return {name: spec.shape for name, spec in batch_spec(dataset_cfg, feature_converter_cls(model)).items()}


def check_params(
    model: Model,
    partitioner: PjitPartitioner,
    path: str,
    config: RestoreCheckpointConfig,
    dataset_cfg: DatasetConfig,
    fallback: bool = False,
) -> tuple[TrainState, TrainState]:
    """Shapes and shardings of a model's parameters. Raises `ConfigError` if `restore_params` would; reads no arrays.

    Args:
      fallback: whether the checkpoint may lack some.
    """
    config = dataclasses.replace(config, fallback_to_scratch=config.fallback_to_scratch or fallback)
    partitioner.check_model(sharded_dimensions(model))
    inputs = _input_shapes(model, dataset_cfg)
    key = jax.eval_shape(lambda: jax.random.key(0))
    boxed = jax.eval_shape(lambda k: model.get_initial_variables(k, inputs)["params"], key)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = TrainState(scalar, nn.meta.unbox(boxed), {}, scalar)
    shardings = TrainState(partitioner.replicated, partitioner.params_shardings(boxed), {}, partitioner.replicated)
    if refusal := distributed.from_process_0(f"is {path} valid", lambda: checkpoint_files.refusal(path)):
        raise checkpoint_files.DamagedError(f"RestoreCheckpointConfig.path = {config.path!r}: {refusal}")
    given = checkpoints.leaves_given(path, shapes, config, parts=("target",))
    if not fallback and (missing := sorted(set(checkpoints.flatten({"target": shapes.params})) - given)):
        raise ConfigError(f"checkpoint {path} gives no value for {missing[0]} and {len(missing) - 1} more.")
    return shapes, shardings


def check_outputs(
    fn: Callable[..., Any],
    model: Model,
    partitioner: PjitPartitioner,
    config: DatasetConfig,
    what: str,
    for_metrics: bool = True,
) -> None:
    """Raises `ConfigError` if `fn(params, batch, keys_B)`, which predicts or scores, would; it is traced, not run.

    So what is bound to the model's own methods is refused now, and not at the first evaluation.

    Args:
      what: begins the message.
      for_metrics: SeqIO's metrics take one result of each example.
    """
    partitioner.check_model(sharded_dimensions(model))
    converter = feature_converter_cls(model)(pack=False)
    lengths = config.task_feature_lengths or dict.fromkeys(
        converter.TASK_FEATURES, 16
    )  # those of the data, any will do
    batch = spec_of(config, converter, lengths)
    shapes = {name: x.shape for name, x in batch.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(lambda k: nn.meta.unbox(model.get_initial_variables(k, shapes)["params"]), key)
    try:
        outputs = BatchRunner(fn, partitioner, config.batch_size).outputs(params, batch)
    except ConfigError as e:
        raise ConfigError(f"{what}: {e}") from e
    ranks = [len(x.shape) for x in jax.tree.leaves(outputs)]
    if for_metrics and ranks not in ([1], [2, 1]):  # scores; tokens and their scores
        raise ConfigError(
            f"{what}: gives arrays of {' and '.join(map(str, ranks))} dimensions, and one result for each example is "
            "needed. Is return_all_decodes bound?"
        )


class BatchRunner:
    """Runs `fn(params, batch, keys_B)` over examples in batches of one size; the last is filled up with zeros.

    Each example has its own key, fold_in(seed, its index), so samples do not depend on the batch size.
    """

    def __init__(self, fn: Callable[..., Any], partitioner: PjitPartitioner, batch_size: int, seed: int = 0):
        partitioner.check_batch(batch_size, "DatasetConfig.batch_size")
        self._partitioner, self._batch_size = partitioner, batch_size
        self._key = jax.random.key(seed)
        self._fn = jax.jit(self._traced(fn), out_shardings=partitioner.replicated)

    def _traced(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def run(params: Any, batch: Any, indices_B: jax.Array) -> Any:
            keys_B = jax.vmap(lambda i: jax.random.fold_in(self._key, i))(indices_B)
            with self._partitioner.constraints():
                return fn(params, batch, keys_B)

        return run

    def outputs(self, params: Any, batch: Any) -> Any:
        """Shapes of what comes out for one batch; nothing is computed."""
        return self._fn.eval_shape(params, batch, jax.ShapeDtypeStruct((self._batch_size,), jnp.uint32))

    def __call__(self, params: Any, examples: Iterable[tuple[int, Example]]) -> Iterator[tuple[int, Any]]:
        """Yields (index, result) of each example, results as numpy."""
        waiting: list[tuple[int, Example]] = []
        for item in examples:
            waiting.append(item)
            if len(waiting) == self._batch_size:
                yield from self._run(params, waiting)
                waiting = []
        if waiting:
            yield from self._run(params, waiting)

    def _run(self, params: Any, items: list[tuple[int, Example]]) -> Iterator[tuple[int, Any]]:
        indices = np.array([index for index, _ in items], np.uint32)
        fill = self._batch_size - len(items)
        sharding = self._partitioner.data_sharding

        def place(rows: np.ndarray) -> jax.Array:
            padded = np.pad(rows, [(0, fill)] + [(0, 0)] * (rows.ndim - 1))
            return jax.make_array_from_callback(padded.shape, sharding, lambda index: padded[index])

        batch = {name: place(np.stack([example[name] for _, example in items])) for name in items[0][1]}
        results = jax.device_get(self._fn(params, batch, place(indices)))
        for row, index in enumerate(indices):
            yield int(index), jax.tree.map(lambda x, row=row: x[row], results)
