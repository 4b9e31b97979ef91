"""Sums over the units of a call, a microbatch at a time, and the statistics they give."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x.per_example import collectives
from perex_t5x.per_example.engine import shard_map
from perex_t5x.per_example.engine.references import METHODS
from perex_t5x.per_example.engine.request import Call, Inputs, Options, one_if_zero
from perex_t5x.per_example.reductions.reducer import MIXED_UNITS, Reduced, Reducer
from perex_t5x.per_example.results import GradStatistics, PerExample, unshifted
from perex_t5x.per_example.statistic import SHIFTABLE


@dataclasses.dataclass(frozen=True)
class Account:
    """How a call computes: the form of each gradient, per pass, and the microbatch sizes by platform."""

    forms: list[Reduced]
    norm_forms: list[Reduced] | None
    microbatch_sizes: dict[str, int]


def accumulate(call: Call, inputs: Inputs, micro: int) -> tuple[Any, Any, Account]:
    """(sums over all units, per-unit losses and norms, how)."""
    units = inputs.indices_Mxb.shape[0]
    rows = (inputs.batch, inputs.indices_Mxb, inputs.weights_Mxb)

    def part(rows: Any, initial: Any) -> tuple[dict[str, Any], Any, Account]:
        batch, indices, weights = rows
        return _chunk(call, dataclasses.replace(inputs, batch=batch, indices_Mxb=indices, weights_Mxb=weights), initial)

    if micro == units:
        sums, per_unit, account = part(rows, None)
    else:
        xs = jax.tree.map(lambda x: x.reshape(units // micro, micro, *x.shape[1:]), rows)
        seen: list[Account] = []

        def add(total: Any, x: Any) -> tuple[Any, Any]:
            sums, per_unit, account = part(x, total["raw"])
            seen[:] = [account]
            counts = {k: total[k] + v for k, v in sums.items() if k != "raw"}
            return {"raw": sums["raw"], **counts}, per_unit

        shapes = jax.eval_shape(lambda x: part(x, None)[0], jax.tree.map(lambda x: x[0], xs))
        zeros = jax.tree.map(lambda s: shard_map.vary(jnp.zeros(s.shape, s.dtype), _varying(s)), shapes)
        sums, per_unit = jax.lax.scan(add, zeros, xs)
        per_unit = jax.tree.map(lambda x: x.reshape(units, *x.shape[2:]), per_unit)
        account = seen[0]
    sums["statistics"] = [r.finish(raw) for r, raw in zip(account.forms, sums.pop("raw"), strict=True)]
    account = dataclasses.replace(account, microbatch_sizes={"default": micro * call.options.group_size})
    return sums, per_unit, account


def _factor(call: Call) -> float:
    """What turns sums into averages, where the number of units is known beforehand; else 1."""
    options = call.options
    if options.unit != "example" or options.non_finite == "skip" or call.inputs.weights_Mxb is not None:
        return 1.0
    return 1.0 / (call.inputs.indices_Mxb.shape[0] * call.num_devices)


def _varying(shape: jax.ShapeDtypeStruct) -> frozenset[str]:
    return frozenset() if shape.manual_axis_type is None else shape.manual_axis_type.varying


def _over_devices(call: Call, sums: dict[str, Any], account: Account) -> dict[str, Any]:
    """The sums over all devices' examples: everything that is left to add goes out together."""
    data_axes = call.options.data_axes
    if not data_axes:
        return sums
    left = [tuple(a for a in data_axes if a not in r.over) for r in account.forms]
    counts = {k: v for k, v in sums.items() if k != "statistics"}
    *statistics, counts = collectives.sum_each_over(
        [*sums["statistics"], counts], [*left, data_axes], call.options.transport
    )
    return {**counts, "statistics": statistics}


def _chunk(call: Call, inputs: Inputs, initial: Any) -> tuple[dict[str, Any], Any, Account]:
    """Sums over the units given, added to `initial` (raw sums per gradient); and per-unit losses, norms, aux."""
    options, gradient = call.options, call.unit_gradient()
    units = inputs.indices_Mxb.shape[0]
    unit_weights = None if inputs.weights_Mxb is None else jnp.mean(inputs.weights_Mxb, axis=1)
    mesh = {"varying": call.varying, "devices": call.devices, "data_axes": options.data_axes}
    mesh |= {"kernels": options.kernels, "transport": options.transport, "places": call.places, "parts": call.parts}
    norms, scales, first = None, None, None
    if options.passes == 2:
        reducer = Reducer((), units, None, None, True, **mesh)
        (losses, _), first = METHODS[options.method](gradient, reducer, inputs, None)
        norms = jnp.sqrt(sum(r.squares_N for r in first))
        if options.non_finite == "skip":
            finite = jnp.isfinite(norms) & jnp.all(jnp.isfinite(losses), axis=1)
            unit_weights = jnp.where(finite, 1.0 if unit_weights is None else unit_weights, 0.0)
        if options.clip_norm is not None:
            scales = jnp.minimum(1.0, options.clip_norm / jnp.maximum(norms, jnp.finfo(norms.dtype).tiny))
    wants_norms = options.passes == 1 and (options.norms or options.non_finite == "raise")
    reducer = Reducer(options.statistics, units, unit_weights, scales, wants_norms, options.unit, _factor(call), **mesh)
    (losses, aux), reduced = METHODS[options.method](gradient, reducer, inputs, initial)
    if wants_norms:
        norms = jnp.sqrt(sum(r.squares_N for r in reduced))
    finite = jnp.all(jnp.isfinite(losses), axis=1)
    if norms is not None:
        finite &= jnp.isfinite(norms)
    w = jnp.ones(units) if unit_weights is None else unit_weights
    w_Mxb = jnp.ones(inputs.indices_Mxb.shape) if inputs.weights_Mxb is None else inputs.weights_Mxb
    w_Mxb = jnp.where((w != 0)[:, None], w_Mxb, 0.0)
    squares, totals = jnp.sum(jnp.square(w_Mxb), axis=1), jnp.sum(w_Mxb, axis=1)
    sums = {
        "raw": [r.raw for r in reduced],
        "unit_weight": jnp.sum(w),
        "weight": jnp.sum(totals),
        "weight_square": jnp.sum(squares),
        "noise": jnp.sum(squares / one_if_zero(totals)),
        "units": jnp.sum(w != 0),
        "examples": jnp.sum(w_Mxb != 0),
        "non_finite": jnp.sum(~finite),
    }
    if options.unit == "token":
        positions = [r.positions_N for r in reduced if r.positions_N is not None]
        most = jnp.max(jnp.stack(positions), axis=0) if positions else jnp.ones(units, jnp.int32)
        sums["position_weight"] = jnp.sum(w * most)
        sums["position_weight_square"] = jnp.sum(jnp.square(w) * most)
        sums["positions"] = jnp.sum(jnp.where(w != 0, most, 0))
    if inputs.weights_Mxb is not None and inputs.weights_Mxb.shape[1] > 1:  # a stand-in's loss is not the example's
        losses, aux = jax.tree.map(lambda x: _blanked(x, inputs.weights_Mxb != 0), (losses, aux))
    norms = norms if options.norms or options.passes == 2 else None
    per_unit = {"losses": losses, "aux": aux, "norms": norms, "bad": ~finite & (w != 0)}
    return sums, per_unit, Account(reduced, first, {})


# --- results ----------------------------------------------------------------------------------------------------------


def finish(call: Call, sums: dict[str, Any], per_unit: Any, account: Account) -> Any:
    options = call.options
    _check_forms(options, account.forms, call.selected.names)
    sums = _over_devices(call, sums, account)
    units, b = call.inputs.indices_Mxb.shape[0] * call.num_devices, options.group_size
    weight_sum, weight_square_sum, noise = sums["weight"], sums["weight_square"], sums["noise"]
    if options.unit == "token":
        weight_sum, weight_square_sum = sums["position_weight"], sums["position_weight_square"]
        noise = weight_sum
    unit_scale = weight_sum / one_if_zero(sums["unit_weight"])  # tokens: real positions per example
    is_average = _factor(call) != 1.0
    averages: dict[str, Any] = {}
    for k, s in enumerate(options.statistics):
        leaves = []
        for r, values in zip(account.forms, sums["statistics"], strict=True):
            per_token = r.positions_N is not None
            value, weight = values[k], weight_sum if per_token else sums["unit_weight"]
            if per_token:
                value = value * s.fn(unit_scale.astype(value.dtype))
            if not is_average:
                inverse = jnp.where(weight != 0, 1.0 / one_if_zero(weight), 0.0)
                value = value * inverse.astype(value.dtype)
            leaves.append(value)
        averages[s.name] = leaves
    centered = None
    if call.inputs.shift is not None:
        centered = {name: averages[name] for name in SHIFTABLE if name in averages}
        averages.update(unshifted(centered, call.shift))
        centered = call.selected.trees({**centered, "shift": call.shift})
    every = options.non_finite != "skip" and call.inputs.weights_Mxb is None
    num_groups, count = sums["units"], sums["examples"]
    if every:
        num_groups, count = np.int32(units), np.int32(call.count * call.num_devices)
    if options.unit == "token":
        num_groups = sums["positions"]
    statistics = GradStatistics(
        call.selected.trees(averages), count, num_groups, weight_sum, weight_square_sum, b, noise, centered
    )
    flat = jax.tree.map(lambda x: x.reshape(call.count, *x.shape[2:]), (per_unit["losses"], per_unit["aux"]))
    if options.non_finite == "raise":
        _raise_if_non_finite(per_unit["bad"])
    return statistics, PerExample(flat[0], per_unit["norms"], flat[1], sums["non_finite"]), account


def _blanked(x: jax.Array, keep_Mxb: jax.Array) -> jax.Array:
    """NaN (or 0) for the examples that are not kept."""
    nothing = jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
    return jnp.where(keep_Mxb.reshape(*keep_Mxb.shape, *(1,) * (x.ndim - 2)), x, jnp.asarray(nothing, x.dtype))


def _check_forms(options: Options, forms: Sequence[Reduced], names: Sequence[str]) -> None:
    for name, r in zip(names, forms, strict=True):
        if r.form == MIXED_UNITS:
            raise ValueError(
                f"unit='token': parts of parameter {name} have positions and others do not; leave it out with parameters=..."
            )
        if options.strict and r.form == "kept":
            raise ValueError(
                f"strict=True: the gradient of parameter {name} {r.note}, so it would be held for all examples "
                f"({r.transient_bytes:,} bytes). Without strict=True it is, exactly."
            )
        if options.unit == "token" and r.positions_N is None and r.form != "shared" and not options.token_fallback:
            raise ValueError(
                f"unit='token': the gradient of parameter {name} is not a sum over positions that could be told apart "
                f"({r.form}{': it ' + r.note if r.note else ''}). token_fallback=True takes the example as its unit; "
                "parameters=... leaves it out."
            )


def _raise_if_non_finite(bad_M: jax.Array) -> None:
    def check(bad_M: Any) -> None:
        found = np.flatnonzero(bad_M)
        if found.size:
            raise FloatingPointError(
                f"non_finite='raise': loss or gradient of {found.size} of {np.size(bad_M)} examples (groups) is not finite: "
                f"{', '.join(map(str, found[:10]))}{', ...' if found.size > 10 else ''}."
            )

    if isinstance(bad_M, jax.core.Tracer):
        jax.debug.callback(check, bad_M)
    else:
        check(bad_M)
