"""One training step: (state, batch) -> (state, metrics), and what is needed to run it on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from flax.serialization import from_state_dict, to_state_dict

from perex_t5x.errors import ConfigError
from perex_t5x.optimizers.learning_rate import drive_learning_rate, rate_of_built
from perex_t5x.partitioning import PjitPartitioner, path_name
from perex_t5x.schedules import Schedule, as_schedule

Batch = Mapping[str, jax.Array]


@struct.dataclass
class TrainState:
    """All that a step reads and writes. `rng` is the raw data of the run's base key."""

    step: jax.Array
    params: Any
    opt_state: Any
    rng: jax.Array

    def state_dict(self) -> dict[str, Any]:
        """The nested dictionary that a checkpoint holds, with T5X's names."""
        return {
            "target": to_state_dict(self.params),
            "state": {"step": self.step, "param_states": to_state_dict(self.opt_state)},
            "rng": self.rng,
        }

    def from_state_dict(self, saved: Mapping[str, Any]) -> TrainState:
        """The inverse of `state_dict`, with this state's structure."""
        return TrainState(
            step=saved["state"]["step"],
            params=from_state_dict(self.params, saved["target"]),
            opt_state=from_state_dict(self.opt_state, saved["state"]["param_states"]),
            rng=saved["rng"],
        )


def example_keys(rng: jax.Array, step: jax.Array, batch_size: int) -> jax.Array:
    """One key per example of the global batch: fold_in(fold_in(base, step), index of the example).

    A function of the example's place in the global batch alone, so that meshes, microbatches and single examples all
    draw the same dropout masks.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(batch_size, dtype=jnp.uint32))


def split_microbatches(tree: Any, count: int) -> Any:
    """[B, ...] -> [count, B/count, ...]; microbatch j takes rows j, j+count, ...

    Strided, so that each device keeps its own rows when the batch is sharded in contiguous blocks.
    """
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), tree)


class WeightMetricsComputer:
    """Root mean squares per parameter: `weight_rms/`, `weight_gradient_rms/`, `weight_update_rms/`; overall norms."""

    def __call__(self, params: Any, grads: Any, updates: Any) -> dict[str, jax.Array]:
        metrics = {
            "weight_gradient_norm": optax.global_norm(grads),
            "weight_update_norm": optax.global_norm(updates),
            "weight_norm": optax.global_norm(params),
        }
        for kind, tree in (("weight", params), ("weight_gradient", grads), ("weight_update", updates)):
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                metrics[f"{kind}_rms/{path_name(path)}"] = jnp.sqrt(jnp.mean(jnp.square(leaf)))
        return metrics


class Trainer:
    """Runs a model's loss on a mesh with its optimizer.

    Args:
      model: see `perex_t5x.models`; gives `loss_fn`, `loss_normalizer`, `optimizer_def`.
      partitioner: the mesh and its rules.
      learning_rate_fn: a schedule (ours or optax's) or a number; drives the model's optimizer.
      num_microbatches: splits the global batch in time; gradients add up, so it changes no number. None: one.
      weight_metrics_computer: extra metrics from (params, grads, updates); None: none.
    """

    def __init__(
        self,
        model: Any,
        partitioner: PjitPartitioner,
        learning_rate_fn: float | Schedule,
        num_microbatches: int | None = None,
        weight_metrics_computer: Callable[[Any, Any, Any], dict[str, jax.Array]] | None = None,
    ):
        if num_microbatches is not None and num_microbatches < 1:
            raise ConfigError(f"Trainer.num_microbatches = {num_microbatches}: must be None or at least 1.")
        self.model = model
        self.partitioner = partitioner
        self.learning_rate_fn = as_schedule(learning_rate_fn)
        self.num_microbatches = num_microbatches or 1
        self.weight_metrics_computer = weight_metrics_computer
        self.optimizer = drive_learning_rate(model.optimizer_def)

    # --- the step -----------------------------------------------------------------------------------------------------

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """One update. L = (1/W) Σ_i ℓ_i with W from the whole global batch."""
        rate = self.learning_rate_fn(state.step)
        loss, sums, grads = self.loss_and_gradients(state, batch)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params, rate)
        params = optax.apply_updates(state.params, updates)
        metrics: dict[str, Any] = {"objective": loss, "sums": sums, "scalars": {}}
        used_rate = rate if self.optimizer.uses_rate else rate_of_built(opt_state)
        if used_rate is not None:
            metrics["scalars"]["learning_rate/current"] = used_rate
        if self.weight_metrics_computer is not None:
            metrics["scalars"] |= self.weight_metrics_computer(state.params, grads, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    def loss_and_gradients(self, state: TrainState, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array], Any]:
        """Loss, metric sums and gradient of the global batch, a microbatch at a time."""
        batch_size = next(iter(batch.values())).shape[0]
        keys_B = example_keys(state.rng, state.step, batch_size)
        normalizer = self.model.loss_normalizer(batch)
        value_and_grad = jax.value_and_grad(self.model.loss_fn, has_aux=True)
        if self.num_microbatches == 1:
            (loss, sums), grads = value_and_grad(state.params, batch, keys_B, normalizer)
            return loss, sums, grads

        def add(total: Any, micro: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            (loss, sums), grads = value_and_grad(state.params, *micro, normalizer)
            return jax.tree.map(jnp.add, total, (loss, sums, grads)), None

        micros = split_microbatches((dict(batch), keys_B), self.num_microbatches)
        one = jax.tree.map(lambda x: x[0], micros)
        shapes = jax.eval_shape(lambda m: value_and_grad(state.params, *m, normalizer), one)
        (loss_shape, sums_shape), grads_shape = shapes
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (loss_shape, sums_shape, grads_shape))
        total, _ = jax.lax.scan(add, zeros, micros)
        return total

    def eval_step(self, params: Any, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Teacher-forced loss and metric sums, without dropout."""
        return self.model.eval_fn(params, batch)

    # --- state and its place on the mesh ------------------------------------------------------------------------------

    def init_state(self, seed_key: jax.Array, input_shapes: Mapping[str, tuple[int, ...]]) -> TrainState:
        """A fresh state; traceable. The parameters' and the dropout's keys are independent."""
        params_key, run_key = jax.random.split(seed_key)
        params = nn.meta.unbox(self.model.get_initial_variables(params_key, input_shapes)["params"])
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.optimizer.init(params),
            rng=jax.random.key_data(run_key),
        )

    def abstract_state(self, input_shapes: Mapping[str, tuple[int, ...]]) -> tuple[TrainState, TrainState, Any]:
        """Returns (shapes, shardings) of the state, and the parameters with their logical axis names."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        boxed = jax.eval_shape(lambda k: self.model.get_initial_variables(k, input_shapes)["params"], key)
        shapes = jax.eval_shape(lambda k: self.init_state(k, input_shapes), key)
        params_shardings = self.partitioner.params_shardings(boxed)
        replicated = self.partitioner.replicated
        shardings = TrainState(
            step=replicated,
            params=params_shardings,
            opt_state=self.partitioner.shardings_like_params(shapes.opt_state, params_shardings, shapes.params),
            rng=replicated,
        )
        return shapes, shardings, boxed

    def check_batch_size(self, batch_size: int, binding: str = "train/utils.DatasetConfig.batch_size") -> None:
        """Raises unless the global batch splits evenly over microbatches and data shards."""
        if batch_size % self.num_microbatches:
            raise ConfigError(
                f"{binding} = {batch_size} is not divisible by Trainer.num_microbatches = {self.num_microbatches}."
            )
        shards = self.partitioner.data_parallel_size
        micro = batch_size // self.num_microbatches
        if micro % shards:
            per = f" in each of {self.num_microbatches} microbatches" if self.num_microbatches > 1 else ""
            step = shards * self.num_microbatches
            lower, upper = batch_size // step * step, -(-batch_size // step) * step
            nearest = f"{upper}" if lower == 0 else f"{lower} or {upper}"
            raise ConfigError(
                f"{binding} = {batch_size} (the global batch) gives {micro} examples{per}, not divisible by the "
                f"{shards} data shards of the mesh. Nearest that is: {nearest}."
            )

    def compiled_step(self, shapes: TrainState, shardings: TrainState, batch_spec: Mapping[str, Any]) -> Any:
        """Compiles the step ahead of time; the state's buffers are donated."""
        batch_sharding = {name: self.partitioner.data_sharding for name in batch_spec}
        step = jax.jit(
            self.train_step,
            in_shardings=(shardings, batch_sharding),
            out_shardings=(shardings, self.partitioner.replicated),
            donate_argnums=0,
        )
        with self.partitioner.constraints():
            return step.lower(shapes, dict(batch_spec)).compile()

    def compiled_eval(self, params_shapes: Any, params_shardings: Any, batch_spec: Mapping[str, Any]) -> Any:
        """Compiles the evaluation step ahead of time."""
        batch_sharding = {name: self.partitioner.data_sharding for name in batch_spec}
        step = jax.jit(
            self.eval_step,
            in_shardings=(params_shardings, batch_sharding),
            out_shardings=self.partitioner.replicated,
        )
        with self.partitioner.constraints():
            return step.lower(params_shapes, dict(batch_spec)).compile()
