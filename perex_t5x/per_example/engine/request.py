"""The arguments of one call of the engine, checked and laid out by units, and the gradient of one unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x.per_example.engine import jaxprs, microbatch, shard_map
from perex_t5x.per_example.engine.arguments import Roles, Selected, check_divides, num_examples
from perex_t5x.per_example.engine.sharding import Placement
from perex_t5x.per_example.statistic import SHIFTABLE, Statistic


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
    clip_norm: float | None
    non_finite: str
    strict: bool
    data_axes: tuple[str, ...] = ()
    transport: Any = None
    shardings: Any = None
    kernels: bool = True

    @property
    def passes(self) -> int:
        return 2 if self.clip_norm is not None or self.non_finite == "skip" else 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of a call; those of units have a leading axis M, then one of the b examples."""

    differentiated: list[Any]  # selected leaves
    others: Any
    batch: Any
    indices_Mxb: jax.Array
    weights_Mxb: jax.Array | None
    shift: list[Any] | None


@dataclasses.dataclass(frozen=True)
class Call:
    """A call's arguments, checked and laid out."""

    loss_fn: Callable[..., Any]
    options: Options
    selected: Selected
    arity: int
    count: int
    microbatch: int  # units at a time
    inputs: Inputs
    varying: frozenset[str]  # mesh axes, see `forms.Reducer`
    devices: frozenset[str]
    shift: list[Any] | None  # as it was given
    places: list[Placement | None]  # of the selected parameters
    parts: list[tuple[str, ...] | None]

    @classmethod
    def make(
        cls, loss_fn: Any, options: Options, arguments: tuple[Any, ...], weights: Any, first_index: Any, shift: Any
    ) -> Call:
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
        selected = Selected.make(arguments, roles, options.parameters)
        shard_map.check_data_axes(options.data_axes)
        mine = jnp.asarray(count * shard_map.device_index(options.data_axes), jnp.uint32)
        indices = jnp.asarray(first_index, jnp.uint32) + mine + jnp.arange(count, dtype=jnp.uint32)
        rows = jax.tree.map(
            lambda x: jnp.reshape(x, (units, b, *jnp.shape(x)[1:])), tuple(arguments[i] for i in roles.batch_argnums)
        )
        inputs = Inputs(
            differentiated=selected.leaves(arguments),
            others=selected.others(arguments),
            batch=rows,
            indices_Mxb=indices.reshape(units, b),
            weights_Mxb=_weights(weights, count, b),
            shift=None if shift is None else selected.like_parameters(shift, "shift"),
        )
        if inputs.shift is not None and options.unit == "token":
            raise ValueError("unit='token' takes no shift.")
        if inputs.shift is not None and not {s.name for s in options.statistics}.issuperset(SHIFTABLE):
            raise ValueError(f"shift needs the statistics {' and '.join(SHIFTABLE)}: ask for both.")
        devices = (
            frozenset(options.data_axes) or shard_map.varying_axes(inputs.batch) or frozenset(shard_map.manual_axes())
        )
        varying = shard_map.varying_axes(inputs)
        parts: list[tuple[str, ...] | None] = [None] * len(inputs.differentiated)
        if varying:
            differs = [shard_map.varying_axes(x) for x in inputs.differentiated]
            parts = [tuple(a for a in options.data_axes if a in axes) for axes in differs]
        given, inputs = inputs.shift, shard_map.vary(inputs, varying)
        places = selected.places(options.shardings)
        return cls(
            loss_fn, options, selected, len(arguments), count, micro, inputs, varying, devices, given, places, parts
        )

    @property
    def num_devices(self) -> int:
        """How many devices' examples the statistics are of."""
        return shard_map.num_devices(self.options.data_axes)

    def shapes(self) -> Any:
        leaves, tree = jax.tree.flatten(self.inputs)
        return tree, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)

    def automatic_sizes(self) -> dict[str, int]:
        """Examples at a time, by platform."""
        program, _ = trace(self.unit_gradient(), self.inputs)
        parameters = sum(jnp.size(x) for x in self.inputs.differentiated)
        units = self.inputs.indices_Mxb.shape[0]
        chosen = microbatch.choose(jaxprs.inline(program), units, parameters)
        return {platform: size * self.options.group_size for platform, size in chosen.items()}

    def unit_gradient(self) -> Callable[..., Any]:
        """(differentiated, others, batch, indices, weights) of one unit -> ((its loss, (losses, aux)), gradients)."""
        roles, options = self.options.roles, self.options
        scale = self.count * self.num_devices if options.reduction == "sum" else 1

        def example(differentiated: Any, others: Any, row: Any, index: jax.Array) -> Any:
            full = self.selected.fill(differentiated, others, self.arity)
            for i in roles.rng_argnums:
                full[i] = jax.random.fold_in(full[i], index)
            for i, a in zip(roles.batch_argnums, row, strict=True):
                full[i] = jax.tree.map(lambda x: x[None], a)
            out = self.loss_fn(*full)
            loss, aux = out if options.has_aux else (out, None)
            return _scalar(loss), aux

        def unit(differentiated: Any, others: Any, batch: Any, indices_b: jax.Array, weights_b: Any) -> Any:
            if indices_b.shape[0] == 1:
                loss, aux = example(differentiated, others, jax.tree.map(lambda x: x[0], batch), indices_b[0])
                return scale * loss, (loss[None], jax.tree.map(lambda x: jnp.asarray(x)[None], aux))
            if weights_b is not None:
                # An example that is left out is replaced by one that is not: its NaN stay out of the gradient as well.
                stand_in = jnp.where(weights_b != 0, jnp.arange(weights_b.shape[0]), jnp.argmax(weights_b != 0))
                batch = jax.tree.map(lambda x: x[stand_in], batch)
            losses_b, aux_b = jax.vmap(lambda row, i: example(differentiated, others, row, i))(batch, indices_b)
            if weights_b is None:
                return scale * jnp.mean(losses_b), (losses_b, aux_b)
            total = jnp.sum(weights_b)
            share_b = weights_b / one_if_zero(total)
            return scale * jnp.sum(share_b.astype(losses_b.dtype) * losses_b), (losses_b, aux_b)

        return jax.value_and_grad(unit, has_aux=True)


def _weights(weights: Any, count: int, b: int) -> jax.Array | None:
    if weights is None:
        return None
    weights = jnp.asarray(weights)
    if weights.shape != (count,):
        raise ValueError(f"weights has shape {weights.shape}: one per example is needed, ({count},).")
    return weights.astype(jnp.promote_types(weights.dtype, jnp.float32)).reshape(-1, b)


def _scalar(loss: Any) -> jax.Array:
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
    return inputs.batch, inputs.indices_Mxb, inputs.weights_Mxb if inputs.indices_Mxb.shape[1] > 1 else None


def trace(gradient: Any, inputs: Inputs) -> tuple[Any, Any]:
    """The gradient program of one unit, and the shapes of its results."""
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
