"""`PerExampleTrainer`, for T5X's own `train.py`."""

# T5X is not in the package registry, so it is not there when types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, cast

import clu.metrics
import gin
import jax
import jax.numpy as jnp
import t5x.trainer
from t5x.metrics import AveragePerStep, Sum
from t5x.optimizers import OptaxWrapper

from perex_t5x import arguments, optimizers
from perex_t5x.arguments import Count, Interval, PositiveInt
from perex_t5x.errors import ConfigError
from perex_t5x.gradients import Gradient, GradientOptions, gradient_with_statistics
from perex_t5x.models.protocol import Model
from perex_t5x.optimizers.learning_rate import rate_of_built
from perex_t5x.per_example import GradStatistics, Statistic
from perex_t5x.t5x_plugin.loss import DataMesh, ExampleLoss, check_metrics, check_model
from perex_t5x.t5x_plugin.optimizer import PerExampleOptimizer
from perex_t5x.train_state import TrainState

Batch = Mapping[str, jax.Array]
MEAN_SQUARE = "mean_square"


class PerExampleTrainer(t5x.trainer.Trainer):
    """T5X's trainer with statistics of the examples' gradients.

    It computes what the model's optimizer reads. Where that is the mean alone, and nothing below asks for more, the step is
    T5X's own. What is not given is taken from the Gin bindings of `trainer.Trainer`.

    Args:
      model, train_state, partitioner, eval_names, summary_dir, train_state_axes, rng: T5X's `train` gives them.
      learning_rate_fn, num_microbatches, weight_metrics_computer: as in `t5x.trainer.Trainer`. Microbatches share the global
        batch's normaliser, so their number changes no gradient.
      monitor: logs the noise scale of the gradients, whatever the optimizer reads.
      microbatch_size, group_size, clip_norm, non_finite: as in `perex_t5x.trainer.Trainer`; without `num_microbatches` the
        engine chooses `microbatch_size` for the platform.
      own_loss_is_sum: for a model with a `loss_fn` of its own: that its loss is a sum over examples, for a fixed
        `loss_normalizing_factor`.
    """

    def __init__(
        self,
        model: Any,
        train_state: Any,
        partitioner: Any,
        eval_names: Any,
        summary_dir: str | None,
        train_state_axes: Any,
        rng: Any,
        learning_rate_fn: Callable[..., Any] | None = None,
        num_microbatches: Count | None = None,
        weight_metrics_computer: Any = None,
        *,
        monitor: bool = False,
        microbatch_size: PositiveInt | Literal["auto"] | None = "auto",
        group_size: PositiveInt = 1,
        clip_norm: Annotated[float, Interval("(0, ∞)")] | None = None,
        non_finite: Literal["keep", "skip"] = "keep",
        own_loss_is_sum: bool = False,
    ):
        arguments.check("PerExampleTrainer", arguments.hints(cast(Any, PerExampleTrainer)), dict(locals()))
        given = {
            "learning_rate_fn": learning_rate_fn,
            "num_microbatches": num_microbatches,
            "weight_metrics_computer": weight_metrics_computer,
        }
        bound = _bound_to_t5x_trainer()
        given = {name: bound.get(name) if value is None else value for name, value in given.items()}
        if given["learning_rate_fn"] is None:
            raise ConfigError(
                "PerExampleTrainer has no learning rate: bind trainer.Trainer.learning_rate_fn, as T5X's run files do, or "
                "PerExampleTrainer.learning_rate_fn."
            )
        options = GradientOptions(
            num_microbatches=given["num_microbatches"] or 1,
            microbatch_size=microbatch_size,
            group_size=group_size,
            clip_norm=clip_norm,
            non_finite=non_finite,
        )
        self._needs, self._options = _needs_and_options(model.optimizer_def, train_state.params, options)
        if monitor and MEAN_SQUARE not in self._needs:
            self._needs = (*self._needs, MEAN_SQUARE)
        own = clip_norm is not None or non_finite != "keep"
        self._is_plain = self._needs == ("mean",) and not own
        if not self._is_plain:
            check_model(model, own_loss_is_sum)
            if train_state.flax_mutables:
                raise ConfigError(
                    f"{type(model).__name__} has state besides its parameters (flax_mutables: "
                    f"{', '.join(train_state.flax_mutables)}), such as statistics of a batch. It does not belong to one "
                    "example, so PerExampleTrainer cannot compute examples' gradients with it."
                )
            self._mesh = DataMesh(partitioner)
            self._shardings = self._mesh.params_shardings(train_state_axes.params)
        super().__init__(
            model, train_state, partitioner, eval_names, summary_dir, train_state_axes, rng, **given
        )  # fmt: skip

    @functools.cached_property
    def _partitioned_train_step(self) -> Any:
        rows = self._partitioner.data_partition_spec
        return self._partitioner.partition(
            self._step,
            in_axis_resources=(self._train_state_axes, rows),
            out_axis_resources=(self._train_state_axes, None),
            donate_argnums=(0,),
        )

    def _step(self, train_state: Any, batch: Batch) -> tuple[Any, dict[str, Any]]:
        """(state, batch) -> (state, metrics)."""
        if self._is_plain:
            grads, metrics, mutables = t5x.trainer.accumulate_grads_microbatched(
                self._model,
                train_state,
                batch,
                self._get_step_rng(train_state.step),
                self._num_microbatches,
                self._partitioner.data_partition_spec,
            )
            mean, metrics = grads, dict(metrics)
        else:
            gradient = self._gradient(train_state, batch)
            mean, mutables, metrics = gradient.mean, None, _metrics(gradient)
            takes_statistics = isinstance(self._model.optimizer_def, PerExampleOptimizer)
            grads = gradient.statistics if takes_statistics else mean
        rate = self._learning_rate_fn(train_state.step)
        others = {"flax_mutables": mutables} if mutables else {}
        new_state = train_state.apply_gradient(grads, learning_rate=rate, **others)
        used_rate = self._used_rate(rate, new_state)
        if used_rate is not None:
            metrics["learning_rate"] = clu.metrics.Average.from_model_output(jnp.asarray([used_rate]))
            metrics["learning_rate/current"] = clu.metrics.LastValue.from_model_output(jnp.asarray([used_rate]))
        for name, value in optimizers.logged(new_state.param_states).items():
            metrics[f"per_example/{name}"] = AveragePerStep.from_model_output(value)
        if self._weight_metrics_computer is not None:
            metrics.update(self._weight_metrics_computer.compute_metrics(mean, train_state, new_state))
        return new_state, metrics

    def _gradient(self, train_state: Any, batch: Batch) -> Gradient:
        batch_size = next(iter(batch.values())).shape[0]
        self._check_batch(batch_size)
        state = TrainState(train_state.step, train_state.params, train_state.param_states, self._base_rng)
        return gradient_with_statistics(
            cast(Model, ExampleLoss(self._model, batch_size)),  # as much of one as the gradient needs
            state,
            batch,
            self._needs,
            self._shardings,
            self._options,
            operands=optimizers.operands_of(train_state.param_states),
        )

    def _used_rate(self, rate: jax.Array, new_state: Any) -> jax.Array | None:
        """The schedule's, or what an optimizer with a rate of its own says it is; None where it says nothing."""
        optimizer_def = self._model.optimizer_def
        # T5X's wrapper of optax ignores the schedule's.
        if isinstance(optimizer_def, OptaxWrapper) or not getattr(optimizer_def, "uses_rate", True):
            return rate_of_built(new_state.param_states)
        return rate

    def _check_batch(self, batch_size: int) -> None:
        shards, options = self._mesh.data_parallel_size, self._options
        unit = shards * options.num_microbatches
        size = options.microbatch_size if isinstance(options.microbatch_size, int) else options.group_size
        if batch_size % unit or (batch_size // unit) % size or size % options.group_size:
            raise ConfigError(
                f"BATCH_SIZE = {batch_size} does not split evenly: {shards} data shards x num_microbatches = "
                f"{options.num_microbatches}, PerExampleTrainer.group_size = {options.group_size}, microbatch_size = "
                f"{options.microbatch_size}. Every microbatch on every shard needs a whole number of each, "
                "and microbatch_size a whole number of groups."
            )


def _bound_to_t5x_trainer() -> dict[str, Any]:
    """What Gin would call `t5x.trainer.Trainer` with: T5X's run files bind its arguments."""
    try:
        return gin.get_bindings(t5x.trainer.Trainer)
    except ValueError:  # no Gin file names it
        return {}


def _needs_and_options(
    optimizer_def: Any, params: Any, options: GradientOptions
) -> tuple[tuple[str | Statistic, ...], GradientOptions]:
    """The statistics that the optimizer reads, and how they are to be computed."""
    if isinstance(optimizer_def, PerExampleOptimizer):
        privacy = optimizers.privacy_of(optimizer_def.optimizer, params)
        options = options if privacy is None else options.private(privacy.clip_norm)
        return optimizers.needs_of(optimizer_def.optimizer, params), options
    if isinstance(optimizer_def, OptaxWrapper):
        needs = optimizers.needs_of(optimizer_def.optax_optimizer, params)
        if needs != ("mean",):
            raise ConfigError(
                f"the optimizer reads {', '.join(map(str, needs))}, and T5X's wrapper of optax passes it the mean alone. "
                "Use OPTIMIZER = @t5x_plugin.PerExampleOptimizer() and bind its `optimizer`."
            )
    return ("mean",), options


def _metrics(gradient: Gradient) -> dict[str, Any]:
    """T5X's metrics, and those of the examples' gradients; ratios are of sums over the steps between two logs."""
    metrics = dict(gradient.sums)
    non_finite = metrics.pop("non_finite_examples")
    check_metrics(metrics)
    metrics["per_example/non_finite_examples"] = Sum(non_finite)
    statistics = cast(GradStatistics, gradient.statistics)  # None for the batch gradient alone
    if MEAN_SQUARE in statistics.averages:
        noise, signal = statistics.noise_scale_parts()
        average = cast(Any, clu.metrics.Average)  # its decorator does not say what it takes
        metrics["per_example/noise_scale"] = average(total=noise, count=signal)
        metrics["per_example/squared_snr"] = average(total=signal, count=noise)
    return metrics
