"""One training step, (state, batch) -> (state, metrics), and what it takes to compile it for a mesh.

`Trainer.train_step` asks the optimizer which statistics of the examples' gradients it reads, computes these and the gradient
(`perex_t5x.gradients`), and applies the optimizer's update.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import linen as nn
from jax.tree_util import keystr

from perex_t5x import arguments, optimizers, trainer_checks
from perex_t5x.actions import ActionMode, BaseAction, EarlyStoppingAction, TerminateOnNanAction
from perex_t5x.arguments import Count, Interval, PositiveInt
from perex_t5x.errors import ConfigError
from perex_t5x.gradients import Batch, Gradient, GradientOptions, batch_gradient, gradient_with_statistics
from perex_t5x.hardware.chips import chip_of
from perex_t5x.hardware.compiler_options import check_options, options_for
from perex_t5x.hardware.hlo.costs import stated_cycles
from perex_t5x.hardware.hlo.program import Program
from perex_t5x.models import remat
from perex_t5x.models.protocol import Model
from perex_t5x.monitoring import Monitor
from perex_t5x.optimizers.learning_rate import drive_learning_rate, rate_of_built
from perex_t5x.partitioning import ParamShardings, PjitPartitioner
from perex_t5x.per_example import GradStatistics, Sensitivity, Statistic
from perex_t5x.per_example.reductions.held import CLIP_MEMORY
from perex_t5x.schedules import Rate, Schedule, as_schedule
from perex_t5x.train_state import TrainState, example_keys

__all__ = [
    "ActionMode",
    "BaseAction",
    "EarlyStoppingAction",
    "TerminateOnNanAction",
    "TrainState",
    "Trainer",
    "WeightMetricsComputer",
    "example_keys",
]

InputShapes = Mapping[str, tuple[int, ...]]


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
                name = keystr(path, simple=True, separator="/")
                metrics[f"{kind}_rms/{name}"] = jnp.sqrt(jnp.mean(jnp.square(leaf)))
        return metrics


class Trainer:
    """Runs a model's loss on a mesh with its optimizer.

    The optimizer says which statistics of the examples' gradients it reads. If that is their mean alone, and nothing below
    asks for more, the step computes the batch gradient alone.

    Args:
      model: see `perex_t5x.models.protocol`.
      partitioner: the mesh and its rules.
      learning_rate_fn: a schedule (ours or optax's) or a number; drives the model's optimizer.
      num_microbatches: splits the global batch in time; gradients add up, so it changes no number. None or 0: one. Every
        device sums over its own examples first, so there is one collective per step whatever the number.
      weight_metrics_computer: extra metrics from (params, grads, updates); None: none.
      microbatch_size: examples that the per-example engine takes at a time on each device; None: as many as
        `num_microbatches` leaves. 'auto': the engine's choice for the platform. Changes no number beyond rounding.
      group_size: this many consecutive examples, on one device, count as one in the statistics.
      clip_norm: every example's gradient (B/W) ∇ℓ_i is scaled to at most this norm. None: no clipping.
      non_finite: 'keep'; or 'skip': examples whose loss or gradient is not finite are left out and counted.
      monitor: measures the examples' gradients every `monitor.period` steps; None: never.
      transport_dtype: 'bfloat16' halves what the sums over devices send, gradient and statistics, and rounds them
        (`perex_t5x.per_example.collectives`). None: float32.
      kernels: whether TPUs use Pallas kernels for the statistics; False: XLA alone. Changes no number beyond rounding.
      compiler_options: {name: value} of the compiler, added to those of `perex_t5x.hardware.compiler_options` or instead of
        them, for all programs of this trainer.
      unit: what the optimizer's statistics are taken over: 'example'; or 'token', every position at which a weight is
        applied (`perex_t5x.per_example.reductions.tokens`). The mean is the same. The monitor's unit is always the example.
      clip_memory: bytes that `clip_norm` and non_finite='skip' may hold on each device, so that one backward pass is enough;
        0: two passes. Changes no number beyond rounding.
    """

    def __init__(
        self,
        model: Model,
        partitioner: PjitPartitioner,
        learning_rate_fn: Rate | Schedule,
        num_microbatches: Count | None = None,
        weight_metrics_computer: Callable[[Any, Any, Any], dict[str, jax.Array]] | None = None,
        *,
        microbatch_size: PositiveInt | Literal["auto"] | None = None,
        group_size: PositiveInt = 1,
        clip_norm: Annotated[float, Interval("(0, ∞)")] | None = None,
        non_finite: Literal["keep", "skip"] = "keep",
        monitor: Monitor | None = None,
        transport_dtype: Literal["bfloat16", "float16"] | None = None,
        kernels: bool = True,
        unit: Literal["example", "token"] = "example",
        compiler_options: Mapping[str, Any] | None = None,
        clip_memory: Count | Annotated[float, Interval("[0, ∞)")] = CLIP_MEMORY,
    ):
        arguments.check("Trainer", arguments.hints(Trainer), dict(locals()))
        self.model = model
        self.partitioner = partitioner
        self.skip_non_finite_updates = False  # set by `perex_t5x.train`, see `perex_t5x.bad_numbers`
        self.remat_choice: remat.Choice | None = None  # what 'auto' has become, once the step is compiled
        self.learning_rate_fn = as_schedule(learning_rate_fn)
        self.weight_metrics_computer = weight_metrics_computer
        self.monitor = monitor
        self.compiler_options = compiler_options
        check_options(compiler_options)
        self.options = GradientOptions(
            num_microbatches=num_microbatches or 1,
            microbatch_size=microbatch_size,
            group_size=group_size,
            unit=unit,
            clip_norm=clip_norm,
            non_finite=non_finite,
            transport_dtype=transport_dtype,
            kernels=kernels,
            clip_memory=clip_memory,
        )
        trainer_checks.check_options(self.options)
        self._boxed_params: Any = None
        self.optimizer = drive_learning_rate(model.optimizer_def)

    def replace(self, *, optimizer_def: Any = None, **changes: Any) -> Trainer:
        """A trainer like this one with other arguments; `optimizer_def` gives a copy of its model another optimizer."""
        own = {**vars(self), **vars(self.options)}
        arguments = {name: own[name] for name in inspect.signature(Trainer).parameters} | changes
        if optimizer_def is not None:
            arguments["model"] = copy.copy(arguments["model"])
            arguments["model"].optimizer_def = optimizer_def
        return type(self)(**arguments)

    def check_functions(self, params: Any) -> None:
        """Calls the given functions with shapes: one that does not fit is found before the step is traced."""
        rate = jax.eval_shape(self.learning_rate_fn, jax.ShapeDtypeStruct((), jnp.int32))
        if rate.shape:
            raise ConfigError(f"Trainer.learning_rate_fn gives an array of shape {rate.shape}, not a number.")
        if self.weight_metrics_computer is not None:
            jax.eval_shape(self.weight_metrics_computer, params, params, params)

    # --- the step -----------------------------------------------------------------------------------------------------

    def train_step(
        self, state: TrainState, batch: Batch, learning_rate: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """One update. L = (1/W) Σ_i ℓ_i with W from the whole global batch.

        `learning_rate` replaces the schedule's where it is given, so that one program serves many rates.
        """
        rate = self.learning_rate_fn(state.step) if learning_rate is None else learning_rate
        gradient = self.gradient(state, batch)
        with optimizers.run_context(self._boxed_params, state.step):
            updates, opt_state = self.optimizer.update(
                gradient.mean, state.opt_state, state.params, rate, statistics=gradient.statistics
            )
        params = optax.apply_updates(state.params, updates)
        metrics: dict[str, Any] = {"objective": gradient.loss, "sums": gradient.sums, "scalars": {}}
        if self.skip_non_finite_updates:
            is_finite = jnp.isfinite(gradient.loss) & _all_finite(updates)
            params, opt_state = jax.tree.map(
                lambda new, old: jnp.where(is_finite, new, old), (params, opt_state), (state.params, state.opt_state)
            )
            metrics["skipped"] = ~is_finite
        metrics["scalars"] |= {f"per_example/{name}": x for name, x in optimizers.logged(opt_state).items()}
        used_rate = rate if self.optimizer.uses_rate else rate_of_built(opt_state)
        if used_rate is not None:
            metrics["scalars"]["learning_rate/current"] = used_rate
        if self.weight_metrics_computer is not None:
            metrics["scalars"] |= self.weight_metrics_computer(state.params, gradient.mean, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    def gradient(self, state: TrainState, batch: Batch) -> Gradient:
        """Loss, metric sums, gradient, and the statistics that the optimizer reads."""
        shardings = self.param_shardings(batch)
        needs, options = self.needs(state.params), self.gradient_options(state.params)
        if _is_plain(needs, options):
            return batch_gradient(self.model, state, batch, shardings, options)
        operands = optimizers.operands_of(state.opt_state)
        return gradient_with_statistics(self.model, state, batch, needs, shardings, options, operands=operands)

    def needs(self, params: Any) -> tuple[str | Statistic, ...]:
        """The statistics that the optimizer reads; `params` may be shapes."""
        with optimizers.run_context(self._boxed_params):
            return optimizers.needs_of(self.model.optimizer_def, params)

    def privacy(self, params: Any) -> optimizers.Privacy | None:
        """What a private optimizer asks for; `params` may be shapes."""
        with optimizers.run_context(self._boxed_params):
            return optimizers.privacy_of(self.model.optimizer_def, params)

    def has_plain_gradient(self, params: Any) -> bool:
        """Whether the mean is all that is asked for, so that examples need not be told apart; `params` may be shapes."""
        return _is_plain(self.needs(params), self.gradient_options(params))

    def gradient_options(self, params: Any) -> GradientOptions:
        """`options`, with what a private optimizer (`optimizers.dp`) asks for; `params` may be shapes."""
        privacy = self.privacy(params)
        return self.options if privacy is None else self.options.private(privacy.clip_norm)

    def monitor_step(self, state: TrainState, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        """What the monitor sees of the step that `train_step` would make: its new averages, and values to log."""
        assert self.monitor is not None
        gradient = gradient_with_statistics(
            self.model,
            state,
            batch,
            self.monitor.statistics,
            self.param_shardings(batch),
            self.options.unclipped_examples(),
            parameters=self.monitor.parameters,
            norms=self.monitor.norms,
        )
        return self.monitor.measured(state.monitor, gradient)

    def eval_step(self, params: Any, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Teacher-forced loss and metric sums, without dropout."""
        model: Any = self.model
        if hasattr(model, "eval_fn"):
            return model.eval_fn(params, batch)
        return model.loss_fn(params, batch, None, self.model.loss_normalizer(batch))

    # --- the state and its shardings ----------------------------------------------------------------------------------

    def init_state(self, seed_key: jax.Array, input_shapes: InputShapes) -> TrainState:
        """A fresh state; traceable. The parameters' and the dropout's keys are independent."""
        params_key, run_key = jax.random.split(seed_key)
        boxed = self.model.get_initial_variables(params_key, input_shapes)["params"]
        params = nn.meta.unbox(boxed)
        with optimizers.run_context(boxed):
            opt_state = self.optimizer.init(params)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=opt_state,
            rng=jax.random.key_data(run_key),
            monitor=None if self.monitor is None else self.monitor.init(params),
        )

    def boxed_params(self, input_shapes: InputShapes) -> Any:
        """Shapes of the parameters, each boxed with its logical axis names where it has any."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        boxed = jax.eval_shape(lambda k: self.model.get_initial_variables(k, input_shapes)["params"], key)
        self._boxed_params = boxed  # for the optimizer, which may want to know the axes
        return boxed

    def param_shardings(self, batch: Batch) -> ParamShardings:
        """The parameters' shardings inside the step; `batch` may be shapes."""
        boxed = self.boxed_params({name: tuple(x.shape) for name, x in batch.items()})
        return ParamShardings(self.partitioner, self.partitioner.params_shardings(boxed))

    def abstract_state(self, input_shapes: InputShapes) -> tuple[TrainState, TrainState, Any]:
        """Returns (shapes, shardings) of the state, and the parameters with their logical axis names."""
        boxed = self.boxed_params(input_shapes)
        key = jax.eval_shape(lambda: jax.random.key(0))
        shapes = jax.eval_shape(lambda k: self.init_state(k, input_shapes), key)
        self._check_statistics(shapes, next(iter(input_shapes.values()))[0])
        params_shardings = self.partitioner.params_shardings(boxed)
        replicated = self.partitioner.replicated
        shardings = TrainState(
            step=replicated,
            params=params_shardings,
            opt_state=self.partitioner.shardings_like_params(shapes.opt_state, params_shardings, shapes.params),
            rng=replicated,
            monitor=jax.tree.map(lambda _: replicated, shapes.monitor),
        )
        return shapes, shardings, boxed

    # --- compiling ----------------------------------------------------------------------------------------------------

    def compiled_step(
        self,
        shapes: TrainState,
        shardings: TrainState,
        batch_spec: Mapping[str, Any],
        observe: Callable[[Any, Any], None] = lambda lowered, compiled: None,
    ) -> Any:
        """Compiles the step ahead of time; the state's buffers are donated.

        With T5Config.remat_policy = 'auto' on TPUs, that of the model's choices with the fewest cycles that fits into the
        devices' memory (`models.remat.choose`); `remat_choice` says which. All processes choose alike: they compile the
        same programs.

        Args:
          observe: called with the lowered program and None before it is compiled, and at last with the one that is taken
            and what it was compiled to.
        """
        refusals: list[Exception] = []

        def compiled(trainer: Trainer) -> Any:
            lowered = trainer.lowered_step(shapes, shardings, batch_spec)
            observe(lowered, None)
            return lowered, lowered.compile()

        def attempt(policy: str) -> remat.Attempt:
            try:
                program = compiled(choices[policy])
            except jax.errors.JaxRuntimeError as e:
                if "RESOURCE_EXHAUSTED" not in str(e):
                    raise
                refusals.append(e)
                return remat.Attempt(policy, False, "does not fit")
            cycles = _cycles(program[1], self.partitioner.mesh.devices.flat[0])
            note = "fits" if cycles is None else f"fits, {cycles / 1e6:.1f} M cycles"
            return remat.Attempt(policy, True, note, cycles, program)

        if choices := self.remat_choices():
            choice = remat.choose(list(choices), attempt)
            if choice.best is None:
                raise refusals[-1]
            self.remat_choice, program = choice, choice.best.program
        else:
            program = compiled(self)
        observe(*program)
        return program[1]

    def remat_choices(self) -> dict[str, Trainer]:
        """Policy -> a trainer like this one with it, in the model's order; empty where there is nothing to choose."""
        choices = getattr(self.model, "remat_choices", None)
        if choices is None or self.partitioner.mesh.devices.flat[0].platform != "tpu":
            return {}
        return {policy: self.replace(model=model) for policy, model in choices().items()}

    def lowered_step(
        self, shapes: TrainState, shardings: TrainState, batch_spec: Mapping[str, Any], rate_is_argument: bool = False
    ) -> Any:
        """What `compiled_step` compiles; with `rate_is_argument` the learning rate is the step's third argument."""
        rates = [jax.ShapeDtypeStruct((), jnp.float32)] if rate_is_argument else []
        out_shardings = (shardings, self.partitioner.replicated)
        return self._lowered(self.train_step, shapes, shardings, batch_spec, out_shardings, *rates, donate_argnums=0)

    def compiled_monitor(self, shapes: TrainState, shardings: TrainState, batch_spec: Mapping[str, Any]) -> Any | None:
        """Compiles the monitor's program ahead of time; None without a monitor."""
        if self.monitor is None:
            return None
        return self._lowered(self.monitor_step, shapes, shardings, batch_spec, self.partitioner.replicated).compile()

    def compiled_eval(self, params_shapes: Any, params_shardings: Any, batch_spec: Mapping[str, Any]) -> Any:
        """Compiles the evaluation step ahead of time."""
        replicated = self.partitioner.replicated
        return self._lowered(self.eval_step, params_shapes, params_shardings, batch_spec, replicated).compile()

    def used_compiler_options(self) -> dict[str, Any]:
        """Name -> value of what every program of this trainer is compiled with; raises `ConfigError` for a wrong one."""
        devices = list(self.partitioner.mesh.devices.flat)
        own = [d for d in devices if d.process_index == jax.process_index()]
        return options_for((own or devices)[0], self.compiler_options)

    def _lowered(
        self,
        function: Callable[..., Any],
        shapes: Any,
        shardings: Any,
        batch_spec: Mapping[str, Any],
        out_shardings: Any,
        *scalars: jax.ShapeDtypeStruct,
        **options: Any,
    ) -> Any:
        """function(state or parameters, batch, *scalars), traced for the mesh."""
        batch_sharding = {name: self.partitioner.data_sharding for name in batch_spec}
        in_shardings = (shardings, batch_sharding, *(self.partitioner.replicated for _ in scalars))
        options |= {"compiler_options": self.used_compiler_options()}
        step = jax.jit(function, in_shardings=in_shardings, out_shardings=out_shardings, **options)
        with self.partitioner.constraints():
            return step.lower(shapes, dict(batch_spec), *scalars)

    # --- validation ---------------------------------------------------------------------------------------------------

    def check_batch_size(self, batch_size: int, binding: str = "train/utils.DatasetConfig.batch_size") -> None:
        """Raises unless the global batch splits evenly over microbatches, data shards and groups."""
        trainer_checks.check_batch_size(self.options, self.partitioner.data_parallel_size, batch_size, binding)

    def _check_statistics(self, shapes: TrainState, batch_size: int) -> None:
        """Raises for an optimizer that needs an unknown statistic, or a variance where there is one example."""
        trainer_checks.check_needs(self.needs(shapes.params), self.options.unit)
        if (privacy := self.privacy(shapes.params)) is not None:
            trainer_checks.check_privacy(privacy, self.options, batch_size)
        if batch_size // self.options.group_size > 1:
            return
        where = f"BATCH_SIZE = {batch_size}"
        if self.options.group_size > 1:
            where += f" with Trainer.group_size = {self.options.group_size}"
        if self.monitor is not None:
            raise ConfigError(
                f"Trainer.monitor measures the noise between examples, and {where} has none. Raise BATCH_SIZE, or set "
                "Trainer.monitor = None."
            )
        if self.options.unit == "token":
            return  # one example has many positions
        try:
            jax.eval_shape(lambda: self._update_with_one_group(shapes))
        except ConfigError as e:
            raise ConfigError(f"{where}: {e}") from e

    def _update_with_one_group(self, shapes: TrainState) -> Any:
        """An update whose number of groups is known while it is traced, so that optimizers can refuse it."""
        params, opt_state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes.params, shapes.opt_state))
        one = np.float32(1.0)
        averages = {s if isinstance(s, str) else s.name: params for s in self.needs(params)}
        clip_norm = self.gradient_options(params).clip_norm
        bound = None if clip_norm is None else Sensitivity(clip_norm)
        statistics = GradStatistics(averages, one, np.int32(1), one, one, self.options.group_size, sensitivity=bound)
        with optimizers.run_context(self._boxed_params):
            return self.optimizer.update(params, opt_state, params, one, statistics=statistics)


def _is_plain(needs: tuple[str | Statistic, ...], options: GradientOptions) -> bool:
    return needs == ("mean",) and options.clip_norm is None and options.non_finite == "keep"


def _all_finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def _cycles(compiled: Any, device: Any) -> int | None:
    """Of a program, as the compiler estimates them; None where it does not, or in a way that cannot be read."""
    chip = chip_of(device)
    if chip is None:
        return None
    try:
        return stated_cycles(Program(compiled.as_text()), chip)
    except (
        jax.errors.JaxRuntimeError,
        LookupError,
        ValueError,
    ) as e:  # another version of libtpu: no reason to stop a run
        logging.warning("the cycles of the compiled step could not be read: %s", e)
        return None
