"""One compiled program for all runs that differ in nothing but learning rate and seed: both are data to it.

Many steps are made in one call, a loop on the device over batches that are given stacked; their metrics are read together.
Tracing reads the configuration that Gin holds (an optimizer's arguments are bound when it is called), so everything is
traced here, while it holds this one; compiling and running need Gin no more.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from perex_t5x import evaluation
from perex_t5x.data.feed import batch_spec, make_feed
from perex_t5x.errors import ConfigError
from perex_t5x.models.protocol import feature_converter_cls
from perex_t5x.trainer import Trainer, TrainState
from perex_t5x.utils import DatasetConfig

MOST_STEPS = 100  # in one call
_MOST_BYTES = 64 << 20  # of batches in one call


def parsed_arguments() -> dict[str, Any]:
    """The arguments of `perex_t5x.train.train` in the configuration that Gin holds, with its defaults."""
    from perex_t5x import train as train_script

    signature = inspect.signature(train_script.train).parameters
    defaults = {n: p.default for n, p in signature.items() if p.default is not inspect.Parameter.empty}
    return {**defaults, **gin.get_bindings(train_script.train)}


class Program:
    """Traces and compiles training, evaluation and initialisation of a configuration.

    Attributes:
      trainer: of the configuration.
      last_step, eval_period, stats_period: as in `perex_t5x.train`.
      length: the most steps that one call of `train` makes.
    """

    def __init__(self, arguments: Mapping[str, Any]):
        check(arguments)
        model = arguments["model"]
        self.trainer: Trainer = arguments["trainer_cls"](model=model, partitioner=arguments["partitioner"])
        self.partitioner = self.trainer.partitioner
        self.converter = feature_converter_cls(model)
        relative = arguments["relative_steps"]
        self.last_step: int = arguments["total_steps"] if relative is None else relative
        self.eval_period: int = arguments["eval_period"]
        self.stats_period: int = arguments["stats_period"] or min(self.eval_period, 100)
        self.spec = batch_spec(arguments["train_dataset_cfg"], self.converter)
        self._input_shapes = {name: s.shape for name, s in self.spec.items()}
        bytes_per_step = sum(int(np.prod(s.shape)) * s.dtype.itemsize for s in self.spec.values())
        periods = [self.eval_period, self.last_step]
        if self.trainer.monitor is not None:
            periods.append(self.trainer.monitor.period)
        self.length = max(1, min(MOST_STEPS, *periods, _MOST_BYTES // bytes_per_step))
        shapes, shardings, self.boxed_params = self.trainer.abstract_state(self._input_shapes)
        self.shapes, self.shardings = shapes, shardings
        self._lower(arguments)

    def _lower(self, arguments: Mapping[str, Any]) -> None:
        trainer, replicated = self.trainer, self.partitioner.replicated
        spec = {n: jax.ShapeDtypeStruct((self.length, *s.shape), s.dtype) for n, s in self.spec.items()}
        rates = jax.ShapeDtypeStruct((self.length,), jnp.float32)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        stacked = {name: self.stacked_sharding for name in spec}
        train = jax.jit(
            functools.partial(_many_steps, trainer),
            in_shardings=(self.shardings, stacked, replicated, replicated),
            out_shardings=(self.shardings, replicated),
            donate_argnums=0,
        )
        init = jax.jit(lambda key: trainer.init_state(key, self._input_shapes), out_shardings=self.shardings)
        key = jax.eval_shape(lambda: jax.random.key(0))
        with self.partitioner.constraints():
            self._lowered_train = train.lower(self.shapes, spec, rates, count)
            self._lowered_init = init.lower(key)
        # It compiles at once; it is short.
        self.monitor = trainer.compiled_monitor(self.shapes, self.shardings, self.spec)
        self._eval_batches: dict[str, list[Any]] = {}
        if arguments["train_eval_dataset_cfg"] is not None:
            self._lower_evaluation(arguments["train_eval_dataset_cfg"], arguments["eval_steps"])

    def _lower_evaluation(self, config: DatasetConfig, eval_steps: int | None) -> None:
        sharding, steps = self.partitioner.data_sharding, None if eval_steps == -1 else eval_steps
        for task in evaluation.task_names(config):
            named = dataclasses.replace(config, mixture_or_task_name=task)
            feed = make_feed(named, self.converter, pad_remainder=True, repeat=False)
            shardings = dict.fromkeys(feed.element_spec, sharding)
            self._eval_batches[task] = list(feed.epoch(shardings, steps))
        step = jax.jit(
            self.trainer.eval_step,
            in_shardings=(self.shardings.params, shardings),
            out_shardings=self.partitioner.replicated,
        )
        with self.partitioner.constraints():
            self._lowered_eval = step.lower(self.shapes.params, feed.element_spec)

    @property
    def stacked_sharding(self) -> NamedSharding:
        """Of batches with a leading axis of steps."""
        sharding = self.partitioner.data_sharding
        return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))

    def compile(self) -> None:
        """After this, `init`, `train` and `evaluate` can be called from any thread."""
        self._init = self._lowered_init.compile()
        self._train = self._lowered_train.compile()
        del self._lowered_init, self._lowered_train
        if self._eval_batches:
            self._eval = self._lowered_eval.compile()
            del self._lowered_eval

    def init(self, seed: int) -> TrainState:
        return self._init(jax.random.key(seed))

    def train(
        self, state: TrainState, batches: Sequence[Mapping[str, np.ndarray]], rates: np.ndarray
    ) -> tuple[TrainState, Any]:
        """Makes len(batches) steps; the metrics have a leading axis of `length`, of which so many count."""
        count = len(batches)
        padding = self.length - count
        stacked = {
            name: jax.device_put(
                np.stack([b[name] for b in batches] + [batches[0][name]] * padding), self.stacked_sharding
            )
            for name in self.spec
        }
        padded = np.concatenate([np.asarray(rates, np.float32), np.zeros(padding, np.float32)])
        return self._train(state, stacked, padded, np.int32(count))

    def placed(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """One batch, for the monitor."""
        return {name: jax.device_put(x, self.partitioner.data_sharding) for name, x in batch.items()}

    def evaluate(self, params: Any) -> dict[str, dict[str, float]]:
        """As `evaluation.TrainEvaluator.evaluate`, on batches that stay on the device."""
        found = {}
        for task, batches in self._eval_batches.items():
            outputs = [self._eval(params, batch) for batch in batches]
            found[f"training_eval/{task}"] = evaluation.summarize(self.trainer.model, jax.device_get(outputs))
        return found


def _many_steps(
    trainer: Trainer, state: TrainState, batches: Any, rates: jax.Array, count: jax.Array
) -> tuple[TrainState, Any]:
    """`count` steps; the metrics of each at its place."""

    def at(i: Any, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)

    def step(i: jax.Array, carry: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
        state, kept = carry
        state, metrics = trainer.train_step(state, at(i, batches), at(i, rates))
        kept = jax.tree.map(lambda all_, x: jax.lax.dynamic_update_index_in_dim(all_, x, i, 0), kept, metrics)
        return state, kept

    shapes = jax.eval_shape(lambda: trainer.train_step(state, at(0, batches), rates[0])[1])
    kept = jax.tree.map(lambda s: jnp.zeros((rates.shape[0], *s.shape), s.dtype), shapes)
    return jax.lax.fori_loop(0, count, step, (state, kept))


def check(arguments: Mapping[str, Any]) -> None:
    """Raises for configurations that runs in one process are not made for."""
    if arguments["infer_eval_dataset_cfg"] is not None:
        raise ConfigError(
            "--together does not evaluate by decoding (train.infer_eval_dataset_cfg): leave --together out."
        )
    restore = arguments["checkpoint_cfg"].restore
    if restore is not None and restore.path:
        raise ConfigError(
            "--together starts from scratch, not from RestoreCheckpointConfig.path: leave --together out."
        )
    if jax.process_count() > 1:
        raise ConfigError("--together is for one process.")
