"""One training step: (state, batch) -> (state, metrics), and what is needed to run it on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from flax.serialization import from_state_dict, to_state_dict

from perex_t5x import device_gradients, optimizers, per_example, trainer_checks
from perex_t5x.gradients import Gradient
from perex_t5x.monitoring import Monitor
from perex_t5x.optimizers.learning_rate import drive_learning_rate, rate_of_built
from perex_t5x.partitioning import PjitPartitioner, path_name
from perex_t5x.partitioning.param_shardings import Places
from perex_t5x.schedules import Schedule, as_schedule

Batch = Mapping[str, jax.Array]
example_keys = device_gradients.example_keys


@struct.dataclass
class TrainState:
    """All that a step reads and writes. `rng` is the raw data of the run's base key, `monitor` the monitor's averages."""

    step: jax.Array
    params: Any
    opt_state: Any
    rng: jax.Array
    monitor: Any = None

    def state_dict(self) -> dict[str, Any]:
        """The nested dictionary that a checkpoint holds, with T5X's names."""
        state = {"step": self.step, "param_states": to_state_dict(self.opt_state)}
        if self.monitor is not None:
            state["monitor"] = self.monitor
        return {"target": to_state_dict(self.params), "state": state, "rng": self.rng}

    def from_state_dict(self, saved: Mapping[str, Any]) -> TrainState:
        """The inverse of `state_dict`, with this state's structure."""
        return TrainState(
            step=saved["state"]["step"],
            params=from_state_dict(self.params, saved["target"]),
            opt_state=from_state_dict(self.opt_state, saved["state"]["param_states"]),
            rng=saved["rng"],
            monitor=None if self.monitor is None else from_state_dict(self.monitor, saved["state"]["monitor"]),
        )


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

    The optimizer says which statistics of the examples' gradients it needs. If that is their mean alone, and nothing below
    asks for more, the step is that of the plain batch gradient.

    Args:
      model: see `perex_t5x.models`; gives `loss_fn`, `loss_normalizer`, `optimizer_def`.
      partitioner: the mesh and its rules.
      learning_rate_fn: a schedule (ours or optax's) or a number; drives the model's optimizer.
      num_microbatches: splits the global batch in time; gradients add up, so it changes no number. None: one. Every device
        sums over its own examples first: whatever the number, one collective a step.
      weight_metrics_computer: extra metrics from (params, grads, updates); None: none.
      microbatch_size: examples that the per-example engine takes at a time on each device; None: as many as
        `num_microbatches` leaves. 'auto': the engine's choice for the platform. Changes no number beyond rounding.
      group_size: so many consecutive examples, on one device, count as one in the statistics.
      clip_norm: every example's gradient (B/W) ∇ℓ_i is scaled to at most this norm. None: no clipping.
      non_finite: 'keep'; or 'skip': examples whose loss or gradient is not finite are left out and counted.
      statistics: `per_example.Statistic` objects for optimizers that need others than the built-in ones.
      monitor: measures the examples' gradients every so many steps; None: never.
      transport_dtype: 'bfloat16' halves what the sums over devices send; they are still added in float32. None: float32.
      kernels: whether TPUs use Pallas kernels for the statistics; False: XLA's forms. Changes no number beyond rounding.
    """

    def __init__(
        self,
        model: Any,
        partitioner: PjitPartitioner,
        learning_rate_fn: float | Schedule,
        num_microbatches: int | None = None,
        weight_metrics_computer: Callable[[Any, Any, Any], dict[str, jax.Array]] | None = None,
        *,
        microbatch_size: int | str | None = None,
        group_size: int = 1,
        clip_norm: float | None = None,
        non_finite: str = "keep",
        statistics: Sequence[per_example.Statistic] = (),
        monitor: Monitor | None = None,
        transport_dtype: str | None = None,
        kernels: bool = True,
    ):
        self.model = model
        self.partitioner = partitioner
        self.learning_rate_fn = as_schedule(learning_rate_fn)
        self.num_microbatches = 1 if num_microbatches is None else num_microbatches
        self.weight_metrics_computer = weight_metrics_computer
        self.microbatch_size, self.group_size = microbatch_size, group_size
        self.clip_norm, self.non_finite = clip_norm, non_finite
        self.statistics = trainer_checks.as_statistics(statistics)
        self.monitor = monitor
        self.transport_dtype, self.kernels = transport_dtype, kernels
        trainer_checks.check_arguments(self)
        self.optimizer = drive_learning_rate(model.optimizer_def)

    # --- the step -----------------------------------------------------------------------------------------------------

    def train_step(
        self, state: TrainState, batch: Batch, learning_rate: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """One update. L = (1/W) Σ_i ℓ_i with W from the whole global batch.

        `learning_rate` None: the schedule's; else it takes the schedule's place, so that one program serves many rates.
        """
        rate = self.learning_rate_fn(state.step) if learning_rate is None else learning_rate
        gradient = self.gradient(state, batch)
        updates, opt_state = self.optimizer.update(
            gradient.mean, state.opt_state, state.params, rate, statistics=gradient.statistics
        )
        params = optax.apply_updates(state.params, updates)
        metrics: dict[str, Any] = {"objective": gradient.loss, "sums": gradient.sums, "scalars": {}}
        metrics["scalars"] |= {f"per_example/{name}": x for name, x in optimizers.logged(opt_state).items()}
        used_rate = rate if self.optimizer.uses_rate else rate_of_built(opt_state)
        if used_rate is not None:
            metrics["scalars"]["learning_rate/current"] = used_rate
        if self.weight_metrics_computer is not None:
            metrics["scalars"] |= self.weight_metrics_computer(state.params, gradient.mean, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    def gradient(self, state: TrainState, batch: Batch) -> Gradient:
        """Loss, metric sums, gradient, and the statistics that the optimizer needs; a microbatch at a time."""
        if self.has_plain_gradient(state.params):
            return device_gradients.plain(self, state, batch)
        needs = self.needs(state.params)
        return device_gradients.with_statistics(self, state, batch, needs, clip_norm=self.clip_norm)

    def has_plain_gradient(self, params: Any) -> bool:
        """Whether the mean is all that is asked for, so that examples need not be told apart; `params` may be shapes."""
        return self.needs(params) == ("mean",) and self.clip_norm is None and self.non_finite == "keep"

    def monitor_step(self, state: TrainState, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        """What the monitor sees of the step that `train_step` would make: its new averages, and values to log."""
        wanted = {"norms": self.monitor.norms, "parameters": self.monitor.parameters}
        found = device_gradients.with_statistics(self, state, batch, self.monitor.statistics, **wanted)
        return self.monitor.measured(state.monitor, found)

    def needs(self, params: Any) -> tuple[str, ...]:
        """Names of the statistics that the optimizer reads; `params` may be shapes."""
        if self._needs is None:
            self._needs = optimizers.needs_of(self.model.optimizer_def, params)
        return self._needs

    _needs: tuple[str, ...] | None = None

    def places(self, batch: Batch) -> Places:
        """Where the parameters lie; `batch` may be shapes."""
        if self._places is None:
            shapes = {name: tuple(x.shape) for name, x in batch.items()}
            key = jax.eval_shape(lambda: jax.random.key(0))
            boxed = jax.eval_shape(lambda k: self.model.get_initial_variables(k, shapes)["params"], key)
            self._places = Places(self.partitioner, self.partitioner.params_shardings(boxed))
        return self._places

    _places: Places | None = None

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
            monitor=None if self.monitor is None else self.monitor.init(params),
        )

    def abstract_state(self, input_shapes: Mapping[str, tuple[int, ...]]) -> tuple[TrainState, TrainState, Any]:
        """Returns (shapes, shardings) of the state, and the parameters with their logical axis names."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        boxed = jax.eval_shape(lambda k: self.model.get_initial_variables(k, input_shapes)["params"], key)
        shapes = jax.eval_shape(lambda k: self.init_state(k, input_shapes), key)
        trainer_checks.check_statistics(self, shapes, next(iter(input_shapes.values()))[0])
        params_shardings = self.partitioner.params_shardings(boxed)
        self._places = Places(self.partitioner, params_shardings)
        replicated = self.partitioner.replicated
        shardings = TrainState(
            step=replicated,
            params=params_shardings,
            opt_state=self.partitioner.shardings_like_params(shapes.opt_state, params_shardings, shapes.params),
            rng=replicated,
            monitor=jax.tree.map(lambda _: replicated, shapes.monitor),
        )
        return shapes, shardings, boxed

    def check_batch_size(self, batch_size: int, binding: str = "train/utils.DatasetConfig.batch_size") -> None:
        """Raises unless the global batch splits evenly over microbatches, data shards and groups."""
        trainer_checks.check_batch_size(self, batch_size, binding)

    def compiled_step(self, shapes: TrainState, shardings: TrainState, batch_spec: Mapping[str, Any]) -> Any:
        """Compiles the step ahead of time; the state's buffers are donated."""
        return self.lowered_step(shapes, shardings, batch_spec).compile()

    def lowered_step(
        self,
        shapes: TrainState,
        shardings: TrainState,
        batch_spec: Mapping[str, Any],
        rate_is_argument: bool = False,
    ) -> Any:
        """What `compiled_step` compiles; with `rate_is_argument` the learning rate is the step's third argument."""
        batch_sharding = {name: self.partitioner.data_sharding for name in batch_spec}
        rates = [jax.ShapeDtypeStruct((), jnp.float32)] if rate_is_argument else []
        step = jax.jit(
            self.train_step,
            in_shardings=(shardings, batch_sharding, *(self.partitioner.replicated for _ in rates)),
            out_shardings=(shardings, self.partitioner.replicated),
            donate_argnums=0,
        )
        with self.partitioner.constraints():
            return step.lower(shapes, dict(batch_spec), *rates)

    def compiled_monitor(self, shapes: TrainState, shardings: TrainState, batch_spec: Mapping[str, Any]) -> Any | None:
        """Compiles the monitor's program ahead of time; None without a monitor."""
        if self.monitor is None:
            return None
        batch_sharding = {name: self.partitioner.data_sharding for name in batch_spec}
        step = jax.jit(
            self.monitor_step, in_shardings=(shardings, batch_sharding), out_shardings=self.partitioner.replicated
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
