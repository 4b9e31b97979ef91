"""The gradient of one step on a mesh: alone (`batch_gradient`), or with statistics of the examples' gradients.

The loss is L = (1/W) Σ_i ℓ_i over the B examples of the global batch, W its normaliser. Example i's gradient is scaled so
that the batch gradient is the mean: g_i = (B/W) ∇ℓ_i. W, B and the examples' keys are those of the global batch, computed
before it is divided, so no number depends on how it is divided.

Both functions run on each device's own rows, in a `jax.shard_map` whose data axes are manual and whose `model` axis is left
to the compiler: each device sums over its own examples, microbatch by microbatch, and one collective at the end adds the
devices' sums. The gradient of a parameter that is gathered inside the loss (FSDP) arrives as this device's shard, already
summed over the devices that it was gathered from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from perex_t5x import per_example
from perex_t5x.errors import ConfigError
from perex_t5x.partitioning import ParamShardings
from perex_t5x.per_example import GradStatistics, Statistic, collectives
from perex_t5x.per_example.reductions.held import CLIP_MEMORY
from perex_t5x.train_state import TrainState, example_keys

if TYPE_CHECKING:
    from perex_t5x.models.protocol import Model

Batch = Mapping[str, jax.Array]
EVERYWHERE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class GradientOptions:
    """How a gradient is computed; see the arguments of `perex_t5x.trainer.Trainer` with the same names."""

    num_microbatches: int = 1
    microbatch_size: int | str | None = None
    group_size: int = 1
    unit: str = "example"
    clip_norm: float | None = None
    non_finite: str = "keep"
    transport_dtype: str | None = None
    kernels: bool = True
    clip_memory: float = CLIP_MEMORY
    own_normalizer: bool = False  # see `private`

    def examples_at_a_time(self, on_device: int) -> int | str | None:
        """The engine's `microbatch_size` for this many examples on a device."""
        if self.num_microbatches > 1 and not isinstance(self.microbatch_size, int):
            return on_device // self.num_microbatches
        return self.microbatch_size

    def unclipped_examples(self) -> GradientOptions:
        """The same for statistics of the examples' own gradients, as the monitor measures them."""
        return dataclasses.replace(self, clip_norm=None, unit="example")

    def private(self, clip_norm: float) -> GradientOptions:
        """The same for an optimizer that is differentially private.

        W of a global batch depends on all of its examples, so one example would change the others' gradients. Here each
        example is a batch of its own: g_i = ∇ℓ_i / W_i, W_i the normaliser of that example alone. One that is not finite is
        left out: its gradient could not be clipped.
        """
        return dataclasses.replace(self, clip_norm=clip_norm, non_finite="skip", own_normalizer=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradient:
    """Of a global batch.

    Attributes:
      loss: L.
      sums: the loss's own sums over examples; with statistics also 'non_finite_examples'.
      mean: ∇L.
      statistics: of the examples' gradients; None for the batch gradient alone.
      norms: of g_i, or of each group's mean, in the order of the batch; None where not computed.
    """

    loss: Any
    sums: Any
    mean: Any
    statistics: GradStatistics | None = None
    norms: Any = None


def batch_gradient(
    model: Model, state: TrainState, batch: Batch, shardings: ParamShardings, options: GradientOptions
) -> Gradient:
    """The gradient of the batch loss, by `jax.value_and_grad`.

    Of the options it reads `num_microbatches` (gradients add up over that many parts of each device's rows) and
    `transport_dtype`.
    """
    data_axes, gathered_axes = shardings.partitioner.batch_axes, shardings.gathered_axes()
    loss_fn = _loss_on_device(model, shardings, options.transport_dtype)
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

    def on_device(params: Any, batch: Batch, keys_B: jax.Array, normalizer: jax.Array) -> Gradient:
        def one(rows: tuple[Batch, jax.Array]) -> tuple[Any, Any]:
            return value_and_grad(params, *rows, normalizer)

        if options.num_microbatches == 1:
            scalars, grads = one((batch, keys_B))
        else:
            scalars, grads = _accumulate(one, split_microbatches((dict(batch), keys_B), options.num_microbatches))
        leaves, tree = jax.tree.flatten(grads)
        # What was gathered over an axis is already summed over it.
        remaining = [tuple(a for a in data_axes if a not in gathered) for gathered in tree.flatten_up_to(gathered_axes)]
        loss, sums = collectives.sum_over(scalars, data_axes)
        mean = tree.unflatten(collectives.sum_each_over(leaves, remaining, options.transport_dtype))
        return Gradient(loss, sums, mean)

    out_specs = Gradient(EVERYWHERE, EVERYWHERE, shardings.manual_specs())
    gradient = _on_devices(on_device, model, state, batch, shardings, out_specs)
    return dataclasses.replace(gradient, mean=shardings.constrain(gradient.mean))


def gradient_with_statistics(
    model: Model,
    state: TrainState,
    batch: Batch,
    statistics: Sequence[str | Statistic],
    shardings: ParamShardings,
    options: GradientOptions,
    *,
    parameters: str | None = None,
    norms: bool = False,
    method: str = "surgery",
    operands: Mapping[str, Any] | None = None,
    observe: Callable[..., None] | None = None,
) -> Gradient:
    """The gradient, and statistics of the examples' gradients, by the per-example engine.

    Loss, sums and statistics are those of the examples that took part: with non_finite="skip", without those that were left
    out. W stays the whole batch's, so the missing examples count as if they were like the others. Without any example the
    loss is NaN.

    Args:
      statistics: what to compute, "mean" among them.
      parameters, norms, method: see `per_example.grad_statistics`.
      operands: trees like the parameters that the statistics see, by name.
      observe: called while the program is traced, with the engine's `Compute` and its arguments on one device.
    """
    data_axes = shardings.partitioner.batch_axes
    batch_size, skip = _batch_size(batch), options.non_finite == "skip"
    compute = per_example.grad_statistics(
        _loss_on_device(model, shardings, own_normalizer=options.own_normalizer),
        statistics,
        method=method,
        has_aux=True,
        batch_argnums=(1, 2),
        microbatch_size=options.examples_at_a_time(batch_size // shardings.partitioner.data_parallel_size),
        group_size=options.group_size,
        unit=options.unit,
        clip_norm=options.clip_norm,
        non_finite=options.non_finite,
        parameters=parameters,
        norms=norms,
        data_axes=data_axes,
        transport_dtype=options.transport_dtype,
        kernels=options.kernels,
        clip_memory=options.clip_memory,
        shardings=shardings.auto_specs(),
    )

    sensitivity: list[Any] = []  # known while the program is traced

    def on_device(params: Any, batch: Batch, keys_B: jax.Array, normalizer: jax.Array, operands: Any) -> Gradient:
        # The engine's gradients are those of the examples' losses, so ℓ_i / (W/B) makes them (B/W) ∇ℓ_i (`private` ones
        # have a normaliser of their own instead).
        arguments = params, batch, keys_B, normalizer / batch_size
        if observe is not None:
            observe(compute, *arguments)
        computed, examples = _explained(compute, options)(*arguments, operands=operands)
        kept_N = jnp.ones(examples.values.shape, bool)
        if skip:
            finite_Mxb = jnp.isfinite(examples.values).reshape(-1, options.group_size)
            finite_Mxb &= jnp.isfinite(examples.norms)[:, None]
            kept_N = jnp.repeat(jnp.all(finite_Mxb, axis=1), options.group_size)
        sums = {"total": examples.values, "loss_sums": examples.aux}
        sums = jax.tree.map(lambda x: jnp.sum(jnp.where(jnp.expand_dims(kept_N, range(1, x.ndim)), x, 0), axis=0), sums)
        sums = collectives.sum_over(sums, data_axes)
        counted = {**sums["loss_sums"], "non_finite_examples": examples.non_finite.astype(jnp.float32)}
        loss = sums["total"] / jnp.asarray(computed.count, jnp.float32)
        sensitivity.append(computed.sensitivity)
        computed = dataclasses.replace(computed, sensitivity=None)
        return Gradient(loss, counted, computed.mean, computed, examples.norms)

    like_params = shardings.manual_specs(parameters)
    averages = {s if isinstance(s, str) else s.name: like_params for s in statistics}
    counts = (EVERYWHERE,) * 4
    has_norms = norms or skip or options.clip_norm is not None
    out_specs = Gradient(
        EVERYWHERE,
        EVERYWHERE,
        like_params,
        GradStatistics(averages, *counts, group_size=options.group_size, group_noise=EVERYWHERE),  # pyright: ignore[reportArgumentType] (specs)
        PartitionSpec(data_axes) if has_norms else None,
    )
    gradient = _on_devices(on_device, model, state, batch, shardings, out_specs, dict(operands or {}))
    assert gradient.statistics is not None
    averages = {name: shardings.constrain(tree) for name, tree in gradient.statistics.averages.items()}
    computed = dataclasses.replace(gradient.statistics, averages=averages, sensitivity=sensitivity[-1])
    # Counts that do not depend on the data are constants again, which `shard_map` had turned into traced values:
    # optimizers check them while they are traced.
    if not skip:
        computed = dataclasses.replace(computed, count=np.int32(batch_size))
        if options.unit == "example":
            computed = dataclasses.replace(computed, num_groups=np.int32(batch_size // options.group_size))
    # One and the same mean: two constraints on equal values would keep both.
    return dataclasses.replace(gradient, mean=computed.mean, statistics=computed)


def split_microbatches(tree: Any, count: int) -> Any:
    """[B, ...] -> [count, B/count, ...].

    >>> split_microbatches(jnp.arange(6), 2).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), tree)


def _on_devices(
    on_device: Callable[..., Gradient],
    model: Model,
    state: TrainState,
    batch: Batch,
    shardings: ParamShardings,
    out_specs: Gradient,
    *like_params: Mapping[str, Any],
) -> Gradient:
    """on_device(params, batch, keys, W, ...) on every device's rows; `like_params` by name, sharded as these are."""
    partitioner = shardings.partitioner
    if partitioner.batch_axes:
        rows = PartitionSpec(partitioner.batch_axes)
        on_device = jax.shard_map(
            on_device,
            mesh=partitioner.mesh,
            in_specs=(
                *(shardings.manual_specs(), rows, rows, EVERYWHERE),
                *({name: shardings.manual_specs() for name in trees} for trees in like_params),
            ),
            out_specs=out_specs,
            axis_names=set(partitioner.batch_axes),
            # With it JAX would sum the gradients of replicated parameters over devices before the engine sees them.
            check_vma=False,
        )
    keys_B = example_keys(state.rng, state.step, _batch_size(batch))
    return on_device(state.params, batch, keys_B, model.loss_normalizer(batch), *like_params)


def _loss_on_device(
    model: Model, shardings: ParamShardings, transport: Any = None, own_normalizer: bool = False
) -> Callable[..., Any]:
    """The model's loss where the data axes are manual; the gradient of what it gathers is sent as `transport`.

    The engine wants None: it finds the sums over devices in the gradient, and sends its statistics over them itself. With
    `own_normalizer` W is that of the rows given.
    """
    gathers = getattr(model, "gathers_parameters", False)

    def loss_fn(params: Any, batch: Batch, keys: jax.Array, normalizer: jax.Array) -> Any:
        with shardings.partitioner.manual(transport):  # see `perex_t5x.partitioning.partitioner`
            if own_normalizer:
                normalizer = model.loss_normalizer(batch)
            return model.loss_fn(params if gathers else shardings.gather(params, transport), batch, keys, normalizer)

    return loss_fn


def _explained(compute: Callable[..., Any], options: GradientOptions) -> Callable[..., Any]:
    """With unit='token', whatever the engine refuses is refused with the name of the binding."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        try:
            return compute(*arguments, **keywords)
        except ValueError as e:
            if options.unit != "token":
                raise
            raise ConfigError(f"Trainer.unit = 'token' does not suit this model; use 'example'. {e}") from e

    return run


def _accumulate(one: Callable[[Any], Any], micros: Any) -> Any:
    """Σ one(microbatch)."""

    def add(total: Any, micro: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(micro)), None

    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], micros))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(add, zeros, micros)[0]


def _batch_size(batch: Batch) -> int:
    return jax.tree.leaves(batch)[0].shape[0]
