"""One training step: (state, batch) -> (state, metrics), and what is needed to run it on a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from flax.serialization import from_state_dict, to_state_dict
from jax.sharding import PartitionSpec

from perex_t5x import gradients, optimizers, per_example, trainer_checks
from perex_t5x.gradients import Gradient
from perex_t5x.monitoring import Monitor
from perex_t5x.optimizers.learning_rate import drive_learning_rate, rate_of_built
from perex_t5x.partitioning import PjitPartitioner, path_name
from perex_t5x.per_example import GradStatistics
from perex_t5x.places import Places
from perex_t5x.schedules import Schedule, as_schedule

Batch = Mapping[str, jax.Array]


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


def example_keys(rng: jax.Array, step: jax.Array, batch_size: int) -> jax.Array:
    """One key per example of the global batch: fold_in(fold_in(base, step), index of the example).

    A function of the example's place in the global batch alone, so that meshes, microbatches and single examples all
    draw the same dropout masks.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(batch_size, dtype=jnp.uint32))


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
        self.transport_dtype = transport_dtype
        trainer_checks.check_arguments(self)
        self.optimizer = drive_learning_rate(model.optimizer_def)

    # --- the step -----------------------------------------------------------------------------------------------------

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """One update. L = (1/W) Σ_i ℓ_i with W from the whole global batch."""
        rate = self.learning_rate_fn(state.step)
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

    def gradient(self, state: TrainState, batch: Batch) -> gradients.Gradient:
        """Loss, metric sums, gradient, and the statistics that the optimizer needs; a microbatch at a time."""
        needs = self.needs(state.params)
        if needs == ("mean",) and self.clip_norm is None and self.non_finite == "keep":
            return self._plain(state, batch)
        return self._statistics(state, batch, needs, clip_norm=self.clip_norm)

    def monitor_step(self, state: TrainState, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        """What the monitor sees of the step that `train_step` would make: its new averages, and values to log."""
        wanted = {"norms": self.monitor.norms, "parameters": self.monitor.parameters}
        found = self._statistics(state, batch, self.monitor.statistics, **wanted)
        return self.monitor.measured(state.monitor, found)

    def needs(self, params: Any) -> tuple[str, ...]:
        """Names of the statistics that the optimizer reads; `params` may be shapes."""
        if self._needs is None:
            self._needs = optimizers.needs_of(self.model.optimizer_def, params)
        return self._needs

    _needs: tuple[str, ...] | None = None

    def _loss_arguments(self, state: TrainState, batch: Batch) -> tuple[Any, Batch, jax.Array, jax.Array]:
        """(parameters, batch, a key per example, W) of the global batch."""
        batch_size = next(iter(batch.values())).shape[0]
        keys_B = example_keys(state.rng, state.step, batch_size)
        return state.params, batch, keys_B, self.model.loss_normalizer(batch)

    def _plain(self, state: TrainState, batch: Batch) -> gradients.Gradient:
        places = self._places(batch)
        on_device = functools.partial(
            gradients.plain,
            self._loss_on_device(places),
            num_microbatches=self.num_microbatches,
            data_axes=self.partitioner.batch_axes,
            summed=places.summed(),
            transport=self.transport_dtype,
        )
        everywhere = PartitionSpec()
        return self._on_devices(on_device, state, batch, places, Gradient(everywhere, everywhere, places.on_data()))

    def _statistics(
        self, state: TrainState, batch: Batch, names: Sequence[str], parameters: str | None = None, **options: Any
    ) -> gradients.Gradient:
        places = self._places(batch)
        batch_size = next(iter(batch.values())).shape[0]
        compute = per_example.grad_statistics(
            self._loss_on_device(places),
            [self.statistics.get(name, name) for name in names],
            has_aux=True,
            batch_argnums=(1, 2),
            microbatch_size=self._examples_at_a_time(batch_size // self.partitioner.data_parallel_size),
            group_size=self.group_size,
            non_finite=self.non_finite,
            parameters=parameters,
            data_axes=self.partitioner.batch_axes,
            transport_dtype=self.transport_dtype,
            shardings=places.automatic(),
            **options,
        )
        on_device = functools.partial(
            gradients.with_statistics,
            compute,
            group_size=self.group_size,
            skip=self.non_finite == "skip",
            data_axes=self.partitioner.batch_axes,
        )
        everywhere, selected = PartitionSpec(), places.on_data(parameters)
        has_norms = bool(options.get("norms")) or options.get("clip_norm") is not None or self.non_finite == "skip"
        found = self._on_devices(
            on_device,
            state,
            batch,
            places,
            Gradient(
                everywhere,
                everywhere,
                selected,
                GradStatistics(
                    {name: selected for name in names},
                    *(everywhere,) * 4,
                    group_size=self.group_size,
                    group_noise=everywhere,
                ),
                PartitionSpec(self.partitioner.batch_axes) if has_norms else None,
            ),
        )
        if self.non_finite == "skip":
            return found
        counts = {"count": np.int32(batch_size), "num_groups": np.int32(batch_size // self.group_size)}
        return dataclasses.replace(found, statistics=dataclasses.replace(found.statistics, **counts))

    def _on_devices(
        self, function: Callable[..., Gradient], state: TrainState, batch: Batch, places: Places, out_specs: Any
    ) -> Gradient:
        """function(params, batch, keys, W) on every device's rows: the data axes are manual, the model axis automatic."""
        if self.partitioner.batch_axes:
            rows = PartitionSpec(self.partitioner.batch_axes)
            function = jax.shard_map(
                function,
                mesh=self.partitioner.mesh,
                in_specs=(places.on_data(), rows, rows, PartitionSpec()),
                out_specs=out_specs,
                axis_names=set(self.partitioner.batch_axes),
                check_vma=False,
            )
        found = function(*self._loss_arguments(state, batch))
        if found.statistics is None:
            return dataclasses.replace(found, mean=places.constrain(found.mean))
        averages = {name: places.constrain(tree) for name, tree in found.statistics.averages.items()}
        statistics = dataclasses.replace(found.statistics, averages=averages)
        return dataclasses.replace(found, mean=statistics.mean, statistics=statistics)  # one and the same mean

    def _loss_on_device(self, places: Places) -> gradients.LossFn:
        """The model's loss where the data axes are manual."""
        gathers = getattr(self.model, "gathers_parameters", False)

        def loss_fn(params: Any, *arguments: Any) -> Any:
            with self.partitioner.manual():
                return self.model.loss_fn(params if gathers else places.gather(params), *arguments)

        return loss_fn

    def _places(self, batch: Batch) -> Places:
        """Where the parameters lie."""
        shapes = {name: tuple(x.shape) for name, x in batch.items()}
        if self._params_places is None:
            key = jax.eval_shape(lambda: jax.random.key(0))
            boxed = jax.eval_shape(lambda k: self.model.get_initial_variables(k, shapes)["params"], key)
            self._params_places = Places(self.partitioner, self.partitioner.params_shardings(boxed))
        return self._params_places

    _params_places: Places | None = None

    def _examples_at_a_time(self, on_device: int) -> int | str | None:
        """The engine's `microbatch_size` for so many examples on a device."""
        if self.num_microbatches > 1 and not isinstance(self.microbatch_size, int):
            return on_device // self.num_microbatches
        return self.microbatch_size

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
        self._params_places = Places(self.partitioner, params_shardings)
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
        batch_sharding = {name: self.partitioner.data_sharding for name in batch_spec}
        step = jax.jit(
            self.train_step,
            in_shardings=(shardings, batch_sharding),
            out_shardings=(shardings, self.partitioner.replicated),
            donate_argnums=0,
        )
        with self.partitioner.constraints():
            return step.lower(shapes, dict(batch_spec)).compile()

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
