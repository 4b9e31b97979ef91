"""One request to the engine: the loss's arguments, checked and laid out by units, and the gradient of one unit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x.per_example.engine import jaxprs, shard_map
from perex_t5x.per_example.engine.arguments import (
    Roles,
    Selected,
    check_clip_norm,
    check_divides,
    check_keys,
    check_weight_function,
    clips_by_parameter,
    num_examples,
)
from perex_t5x.per_example.engine.shard_map import AutoSharding
from perex_t5x.per_example.metrics import BATCH_MEAN, POSITIONS, Metric
from perex_t5x.per_example.reductions.reducer import ReductionContext, ReductionSpec
from perex_t5x.per_example.statistic import Statistic


@dataclasses.dataclass(frozen=True)
class Options:
    statistics: tuple[Statistic, ...]
    method: str
    roles: Roles
    parameters: Callable[[str], bool] | None
    has_aux: bool
    group_size: int
    microbatch_size: int | str | None
    unit: str
    token_fallback: bool
    reduction: str
    norms: bool
    clip_norm: Any  # see `arguments`
    non_finite: str
    strict: bool
    data_axes: tuple[str, ...] = ()
    transport: Any = None
    shardings: Any = None
    kernels: bool = True
    clip_memory: float = 0.0
    clip_strategy: str = "auto"
    metrics: tuple[Metric, ...] = ()

    @property
    def operand_names(self) -> frozenset[str]:
        """Of the trees that are given with the call."""
        names = {name for x in (*self.statistics, *self.metrics) for name in x.operands}
        return frozenset(names - {POSITIONS})

    @property
    def needs_mean(self) -> bool:
        """Whether the batch's mean gradient is an operand, which the call computes itself."""
        return BATCH_MEAN in self.operand_names


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of a request; those of units have a leading axis M, then one of the b examples."""

    differentiated: list[Any]  # selected leaves
    others: Any
    batch: Any
    indices_Mxb: jax.Array
    weights_Mxb: jax.Array | None
    operands: list[dict[str, Any]]  # of each selected leaf

    @property
    def num_units(self) -> int:
        return self.indices_Mxb.shape[0]


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of one call, checked and laid out.

    Attributes:
      count: examples on this device.
      microbatch: units at a time.
      context: what all reductions of this request have in common; a chunk of units completes it.
      shardings, sharded_over: of each selected parameter, see `ReductionSpec`.
      weight_fn: a function of one unit's loss and gradient norm that gives its weight; None: `Inputs.weights_Mxb`.
      clip_norms: of each selected parameter, where it is clipped by itself; else None.
      weights_are_mask: whether no example can have a weight other than 0 and 1: there are none, or booleans.
    """

    loss_fn: Callable[..., Any]
    options: Options
    selected: Selected
    arity: int
    count: int
    microbatch: int
    inputs: Inputs
    context: ReductionContext
    shardings: list[AutoSharding | None]
    sharded_over: list[tuple[str, ...] | None]
    weight_fn: Callable[[Any, Any], Any] | None = None
    clip_norms: list[Any] | None = None
    weights_are_mask: bool = True

    @classmethod
    def make(
        cls,
        loss_fn: Any,
        options: Options,
        arguments: tuple[Any, ...],
        weights: Any,
        first_index: Any,
        operands: Mapping[str, Any],
    ) -> Request:
        roles, b = options.roles, options.group_size
        count = num_examples(arguments, roles)
        check_divides("group_size", b, "the number of examples", count)
        units = micro = count // b
        if isinstance(options.microbatch_size, int | np.integer):
            check_divides("microbatch_size", options.microbatch_size, "the number of examples", count)
            check_divides("group_size", b, "microbatch_size", options.microbatch_size)
            micro = int(options.microbatch_size) // b
        elif options.microbatch_size not in (None, "auto"):
            check_divides("microbatch_size", options.microbatch_size, "the number of examples", count)
        check_keys(arguments, roles, options.method)
        if any(m.pairwise for m in options.metrics):
            _check_pairs(options, micro < units)
        selected = Selected.make(arguments, roles, options.parameters)
        shard_map.check_data_axes(options.data_axes)
        # Examples are numbered over all devices: a key's fold_in, and so dropout, must not depend on the mesh.
        first = jnp.asarray(first_index, jnp.uint32)
        if options.data_axes:
            first += jnp.asarray(count * shard_map.device_index(options.data_axes), jnp.uint32)
        indices = first + jax.lax.iota(jnp.uint32, count)
        rows = jax.tree.map(
            lambda x: jnp.reshape(x, (units, b, *jnp.shape(x)[1:])), tuple(arguments[i] for i in roles.batch_argnums)
        )
        inputs = Inputs(
            differentiated=selected.leaves(arguments),
            others=selected.others(arguments),
            batch=rows,
            indices_Mxb=indices.reshape(units, b),
            weights_Mxb=None if callable(weights) else _weights(weights, count, b),
            operands=selected.operands(operands, options.statistics, options.metrics),
        )
        # Without data_axes the statistics are of this device's examples, and a loss may still not mix devices': whatever
        # the batch varies over, or (check_vma=False, nothing known) any manual axis, may divide the examples.
        device_axes = (
            frozenset(options.data_axes) or shard_map.varying_axes(inputs.batch) or frozenset(shard_map.manual_axes())
        )
        varying = shard_map.varying_axes(inputs)
        sharded_over: list[tuple[str, ...] | None] = [None] * len(inputs.differentiated)
        if varying:
            differs = [shard_map.varying_axes(x) for x in inputs.differentiated]
            sharded_over = [tuple(a for a in options.data_axes if a in axes) for axes in differs]
        context = ReductionContext(
            options.statistics,
            units,
            unit=options.unit,
            kernels=options.kernels,
            varying=varying,
            device_axes=device_axes,
            data_axes=options.data_axes,
            transport=options.transport,
        )
        # Parameters too: JAX would otherwise sum the gradient of one that is the same on all devices over their examples.
        inputs = shard_map.vary(inputs, varying)
        shardings = selected.auto_shardings(options.shardings)
        if callable(weights):
            check_weight_function(weights)
        clip_norms = None
        if clips_by_parameter(options.clip_norm):
            clip_norms = selected.of_each(options.clip_norm, "clip_norm")
            for name, limit in zip(selected.names, clip_norms, strict=True):
                check_clip_norm(limit, f"clip_norm of {name}")
        return cls(
            loss_fn,
            options,
            selected,
            len(arguments),
            count,
            micro,
            inputs,
            context,
            shardings,
            sharded_over,
            weights if callable(weights) else None,
            clip_norms,
            weights_are_mask=weights is None or (not callable(weights) and jnp.asarray(weights).dtype == bool),
        )

    @property
    def norms_first(self) -> bool:
        """Whether every example's norm must be known before the first sum."""
        options = self.options
        return options.clip_norm is not None or options.non_finite == "skip" or self.weight_fn is not None

    def specs(self, inputs: Inputs, initial: Sequence[Any] | None) -> list[ReductionSpec]:
        """How each selected parameter's gradient is to be reduced; `initial`: sums to add to, one entry per parameter."""
        return [
            ReductionSpec(
                initial=None if initial is None else initial[i],
                sharding=s,
                sharded_over=axes,
                operands=inputs.operands[i],
                parameter=self.selected.names[i],
            )
            for i, (s, axes) in enumerate(zip(self.shardings, self.sharded_over, strict=True))
        ]

    @property
    def num_devices(self) -> int:
        """How many devices' examples the statistics are of."""
        return shard_map.num_devices(self.options.data_axes)

    def shapes(self) -> Any:
        leaves, tree = jax.tree.flatten(self.inputs)
        return tree, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)

    def unit_gradient(self) -> Callable[..., Any]:
        """(differentiated, others, batch, indices, weights) of one unit -> ((its loss, (losses, aux)), gradients)."""
        roles, options = self.options.roles, self.options
        # Where the batch loss is the sum of the examples' losses, the mean of B ∇ℓ_i is its gradient.
        scale = self.count * self.num_devices if options.reduction == "sum" else 1

        def example(differentiated: Any, others: Any, row: Any, index: jax.Array) -> Any:
            full = self.selected.fill(differentiated, others, self.arity)
            for i in roles.rng_argnums:
                full[i] = jax.tree.map(lambda key: jax.random.fold_in(key, index), full[i])
            for i, a in zip(roles.batch_argnums, row, strict=True):
                full[i] = jax.tree.map(_batch_of_one, a)
            loss, aux = _with_aux(self.loss_fn(*full), options.has_aux)
            return _scalar(loss), aux

        def unit(differentiated: Any, others: Any, batch: Any, indices_b: jax.Array, weights_b: Any) -> Any:
            # A unit of one example needs no `vmap`, and no axis of size one for the examples of a group.
            if indices_b.shape[0] == 1:
                row, index = jax.tree.map(lambda x: jax.lax.squeeze(x, [0]), (batch, indices_b))
                loss, aux = example(differentiated, others, row, index)
                scaled = loss if scale == 1 else scale * loss
                return scaled, jax.tree.map(lambda x: _batch_of_one(jnp.asarray(x)), (loss, aux))
            if weights_b is not None:
                # An example that is left out is replaced by one that is not: its NaN stay out of the gradient as well.
                stand_in = jnp.where(weights_b != 0, jnp.arange(weights_b.shape[0]), jnp.argmax(weights_b != 0))
                batch = jax.tree.map(lambda x: x[stand_in], batch)
            one = lambda x: example(differentiated, others, *x)  # noqa: E731
            # Methods that take one example after another do so within a group, too: what JAX cannot batch, keys whose
            # numbers depend on how many are drawn together, and effects in order rest on it.
            together = options.method in ("surgery", "vmap")
            losses_b, aux_b = (jax.vmap(one) if together else functools.partial(jax.lax.map, one))((batch, indices_b))
            if weights_b is None:
                return scale * jnp.mean(losses_b), (losses_b, aux_b)
            total = jnp.sum(weights_b)
            share_b = weights_b / one_if_zero(total)
            return scale * jnp.sum(share_b.astype(losses_b.dtype) * losses_b), (losses_b, aux_b)

        return jax.value_and_grad(unit, has_aux=True)


def _batch_of_one(x: Any) -> jax.Array:
    """A loss expects a batch, if of one example. As x[None], which takes longer to trace."""
    return jax.lax.expand_dims(x, [0])


def _weights(weights: Any, count: int, b: int) -> jax.Array | None:
    if weights is None:
        return None
    weights = jnp.asarray(weights)
    if weights.shape != (count,):
        raise ValueError(f"weights has shape {weights.shape}: one per example is needed, ({count},).")
    # Integer and bfloat16 weights: their sums would be wrong, or rounded.
    return weights.astype(jnp.promote_types(weights.dtype, jnp.float32)).reshape(-1, b)


def _check_pairs(options: Options, has_microbatches: bool) -> None:
    names = ", ".join(repr(m.name) for m in options.metrics if m.pairwise)
    instead = "per_example.metrics.sketch(dim) gives vectors whose inner products estimate the same."
    if has_microbatches or options.microbatch_size == "auto":
        raise ValueError(f"metric {names} needs all examples at a time: microbatch_size=None. {instead}")
    if options.method == "map":
        raise ValueError(f"metric {names}: method='map' has one gradient at a time; use 'surgery' or 'vmap'. {instead}")


def _with_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        if isinstance(out, tuple | list | dict):
            raise ValueError(
                f"the loss returns a {type(out).__name__}; it must return a scalar. If it is (loss, aux), say has_aux=True."
            )
        return out, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        what = (
            f"{len(out)} values"
            if isinstance(out, tuple | list)
            else "one array"
            if hasattr(out, "shape")
            else repr(out)
        )
        raise ValueError(f"has_aux=True: the loss must return (loss, aux), but it returns {what}.")
    return out[0], out[1]


def _scalar(loss: Any) -> jax.Array:
    # [1] is accepted: a loss that keeps the leading axis of its one example is a scalar for our purposes.
    loss = jnp.asarray(loss)
    if loss.size != 1:
        raise ValueError(
            f"the loss of one example has shape {loss.shape}; it must be a scalar. The loss is called with one example, "
            "its leading axis kept: reduce over it (mean or sum)."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(f"the loss has dtype {loss.dtype}; it must be floating.")
    return loss.reshape(())


def one_if_zero(x: jax.Array) -> jax.Array:
    return jnp.where(x != 0, x, 1.0)


def unit_rows(inputs: Inputs) -> tuple[Any, ...]:
    """What differs between units, and is given to the gradient."""
    # Units of one example do not need their weight: it does not change their gradient, only their share of the sums.
    return inputs.batch, inputs.indices_Mxb, inputs.weights_Mxb if inputs.indices_Mxb.shape[1] > 1 else None


def trace(gradient: Any, inputs: Inputs) -> tuple[Any, Any]:
    """The gradient program of one unit, and the shapes of its results."""
    # One unit, without an example axis: the engine adds the axis itself, to those equations that it runs for all.
    row = jax.tree.map(lambda x: jaxprs.struct(jax.typeof(x), x.shape[1:]), unit_rows(inputs))
    try:
        return jax.make_jaxpr(gradient, return_shape=True)(inputs.differentiated, inputs.others, *row)
    except ValueError as e:
        if "Unsupported pcast" not in str(e):
            raise
        raise ValueError(
            "the loss makes something vary over devices (jax.lax.pcast) that does so already: the arguments of the loss, "
            "parameters included, vary here. Leave it out."
        ) from e
