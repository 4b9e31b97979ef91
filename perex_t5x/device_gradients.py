"""The gradient of a trainer's step on its mesh: each device its own examples, then one collective.

The normaliser W and the examples' keys are those of the global batch, computed before it is divided.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from perex_t5x import gradients, per_example
from perex_t5x.gradients import Gradient
from perex_t5x.partitioning.param_shardings import Places
from perex_t5x.per_example import GradStatistics

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer, TrainState

Batch = Mapping[str, jax.Array]
EVERYWHERE = PartitionSpec()


def example_keys(rng: jax.Array, step: jax.Array, batch_size: int) -> jax.Array:
    """One key per example of the global batch: fold_in(fold_in(base, step), index of the example).

    A function of the example's place in the global batch alone, so that meshes, microbatches and single examples all
    draw the same dropout masks.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(batch_size, dtype=jnp.uint32))


def plain(trainer: Trainer, state: TrainState, batch: Batch) -> Gradient:
    """The gradient of the batch loss alone."""
    places = trainer.places(batch)
    on_device = functools.partial(
        gradients.plain,
        _loss_on_device(trainer, places),
        num_microbatches=trainer.num_microbatches,
        data_axes=trainer.partitioner.batch_axes,
        summed=places.summed(),
        transport=trainer.transport_dtype,
    )
    out_specs = Gradient(EVERYWHERE, EVERYWHERE, places.on_data())
    found = _on_devices(trainer, on_device, state, batch, places, out_specs)
    return dataclasses.replace(found, mean=places.constrain(found.mean))


def with_statistics(
    trainer: Trainer,
    state: TrainState,
    batch: Batch,
    names: Sequence[str],
    parameters: str | None = None,
    observe: Callable[..., None] | None = None,
    **options: Any,
) -> Gradient:
    """The gradient, and the statistics `names` of the examples' gradients.

    Args:
      observe: called while the program is traced, with the engine's `Compute` and its arguments on one device.
      parameters, options: of `per_example.grad_statistics`.
    """
    places, axes = trainer.places(batch), trainer.partitioner.batch_axes
    batch_size = next(iter(batch.values())).shape[0]
    compute = per_example.grad_statistics(
        _loss_on_device(trainer, places),
        [trainer.statistics.get(name, name) for name in names],
        has_aux=True,
        batch_argnums=(1, 2),
        microbatch_size=_examples_at_a_time(trainer, batch_size // trainer.partitioner.data_parallel_size),
        group_size=trainer.group_size,
        non_finite=trainer.non_finite,
        parameters=parameters,
        data_axes=axes,
        transport_dtype=trainer.transport_dtype,
        kernels=trainer.kernels,
        shardings=places.automatic(),
        **options,
    )
    skip = trainer.non_finite == "skip"

    def on_device(*arguments: Any) -> Gradient:
        if observe is not None:
            observe(compute, *arguments)
        return gradients.with_statistics(compute, *arguments, group_size=trainer.group_size, skip=skip, data_axes=axes)

    like_params = places.on_data(parameters)
    has_norms = bool(options.get("norms")) or options.get("clip_norm") is not None or skip
    averages = {name: like_params for name in names}
    counts = (EVERYWHERE,) * 4
    found = _on_devices(
        trainer,
        on_device,
        state,
        batch,
        places,
        Gradient(
            EVERYWHERE,
            EVERYWHERE,
            like_params,
            GradStatistics(averages, *counts, group_size=trainer.group_size, group_noise=EVERYWHERE),
            PartitionSpec(axes) if has_norms else None,
        ),
    )
    averages = {name: places.constrain(tree) for name, tree in found.statistics.averages.items()}
    statistics = dataclasses.replace(found.statistics, averages=averages)
    if not skip:  # known before anything runs, but not to `shard_map`
        known = {"count": np.int32(batch_size), "num_groups": np.int32(batch_size // trainer.group_size)}
        statistics = dataclasses.replace(statistics, **known)
    return dataclasses.replace(found, mean=statistics.mean, statistics=statistics)  # one and the same mean


def _on_devices(
    trainer: Trainer,
    function: Callable[..., Gradient],
    state: TrainState,
    batch: Batch,
    places: Places,
    out_specs: Gradient,
) -> Gradient:
    """function(params, batch, keys, W) on every device's rows: the data axes are manual, the model axis automatic."""
    partitioner = trainer.partitioner
    if partitioner.batch_axes:
        rows = PartitionSpec(partitioner.batch_axes)
        function = jax.shard_map(
            function,
            mesh=partitioner.mesh,
            in_specs=(places.on_data(), rows, rows, EVERYWHERE),
            out_specs=out_specs,
            axis_names=set(partitioner.batch_axes),
            check_vma=False,
        )
    keys_B = example_keys(state.rng, state.step, next(iter(batch.values())).shape[0])
    return function(state.params, batch, keys_B, trainer.model.loss_normalizer(batch))


def _loss_on_device(trainer: Trainer, places: Places) -> gradients.LossFn:
    """The model's loss where the data axes are manual."""
    gathers = getattr(trainer.model, "gathers_parameters", False)

    def loss_fn(params: Any, *arguments: Any) -> Any:
        with trainer.partitioner.manual():
            return trainer.model.loss_fn(params if gathers else places.gather(params), *arguments)

    return loss_fn


def _examples_at_a_time(trainer: Trainer, on_device: int) -> int | str | None:
    """The engine's `microbatch_size` for so many examples on a device."""
    if trainer.num_microbatches > 1 and not isinstance(trainer.microbatch_size, int):
        return on_device // trainer.num_microbatches
    return trainer.microbatch_size
