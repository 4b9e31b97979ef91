"""Sums over the units of a request, a microbatch at a time, and the statistics they give."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from perex_t5x.per_example import collectives
from perex_t5x.per_example.engine import shard_map
from perex_t5x.per_example.engine.references import METHODS
from perex_t5x.per_example.engine.request import Inputs, Options, Request, one_if_zero
from perex_t5x.per_example.kernels import dispatch
from perex_t5x.per_example.metrics import Metric, Products
from perex_t5x.per_example.reductions import held
from perex_t5x.per_example.reductions.reducer import MATERIALISED, MIXED_UNITS, SHARED, ReductionResult
from perex_t5x.per_example.results import GradStatistics, PerExample, Sensitivity


@dataclasses.dataclass(frozen=True)
class Holding:
    """How statistics that need the norms first are formed.

    Attributes:
      strategy: of `reductions.held`; '' where norms are not needed first.
      bytes: kept from the norms to the statistics, of one microbatch on one device.
      why: of two passes: why no other strategy.
    """

    strategy: str = ""
    bytes: int = 0
    why: str = ""

    @property
    def passes(self) -> int:
        return 2 if self.strategy == held.TWO_PASSES else 1

    def __str__(self) -> str:
        """
        >>> str(Holding("factors", 2048)), str(Holding())
        ('one backward pass: factors are held until the norms are known, 2,048 bytes', '')
        """
        if self.passes == 2:
            return f"two passes: losses and backward passes are run twice, first for the norms; {self.why}"
        return self.strategy and (
            f"one backward pass: {self.strategy} are held until the norms are known, {self.bytes:,} bytes"
        )


@dataclasses.dataclass(frozen=True)
class ReductionTrace:
    """How a request is computed: each gradient's reduction, per pass; by platform, microbatch sizes and what is held."""

    reductions: list[ReductionResult]
    norm_reductions: list[ReductionResult] | None
    microbatch_sizes: dict[str, int]
    holdings: dict[str, Holding] = dataclasses.field(default_factory=dict)


def accumulate(request: Request, inputs: Inputs, micro: int, holding: Holding) -> tuple[Any, Any, ReductionTrace]:
    """(sums over all units, per-unit losses and norms, how)."""
    units = inputs.num_units
    rows = _rows(inputs)

    def part(rows: Any, initial: Any) -> tuple[dict[str, Any], Any, ReductionTrace]:
        return _reduce_chunk(request, _with_rows(inputs, rows), holding, initial)

    if micro == units:
        sums, per_unit, how = part(rows, None)
    else:
        xs = jax.tree.map(lambda x: x.reshape(units // micro, micro, *x.shape[1:]), rows)
        seen: list[ReductionTrace] = []

        # Raw sums are the carry, and each reduction adds to them in place; adding up the microbatches' sums here would need
        # a second copy of all statistics.
        def add(total: Any, x: Any) -> tuple[Any, Any]:
            sums, per_unit, how = part(x, total["raw"])
            seen[:] = [how]
            counts = {k: total[k] + v for k, v in sums.items() if k != "raw"}
            return {"raw": sums["raw"], **counts}, per_unit

        shapes = jax.eval_shape(lambda x: part(x, None)[0], jax.tree.map(lambda x: x[0], xs))
        zeros = jax.tree.map(lambda s: shard_map.vary(jnp.zeros(s.shape, s.dtype), _varying(s)), shapes)
        sums, per_unit = jax.lax.scan(add, zeros, xs)
        per_unit = jax.tree.map(lambda x: x.reshape(units, *x.shape[2:]), per_unit)
        how = seen[0]
    # Transposes and the like once, after the last microbatch.
    sums["statistics"] = [r.finish(raw) for r, raw in zip(how.reductions, sums.pop("raw"), strict=True)]
    sizes = {"default": micro * request.options.group_size}
    how = dataclasses.replace(how, microbatch_sizes=sizes, holdings={"default": holding})
    return sums, per_unit, how


def choose_holding(request: Request, micro: int) -> Holding:
    """The first strategy whose memory, counted in the program that will run, is within the budget."""
    options = request.options
    if not request.norms_first:
        return Holding()
    if options.method != "surgery":
        return Holding(held.TWO_PASSES, why=f"method={options.method!r} keeps nothing")
    if any(s.operands for s in options.statistics):
        return Holding(held.TWO_PASSES, why="statistics with operands are formed from whole gradients")
    forced = options.clip_strategy
    if forced == held.TWO_PASSES:
        return Holding(forced, why="clip_strategy asks for it")
    if forced == "auto" and micro > 1 and dispatch.for_tpu():
        # 150m, 8 rows of 1024 on v5e: 231 M cycles and 3.7 GB, against 239 M and 6.0 GB with what is held.
        return Holding(
            held.TWO_PASSES, why="on TPUs a second pass by kernels takes less time than reading what is held"
        )
    strategies = [held.GRADIENTS, held.FACTORS] if forced == "auto" else [forced]
    if options.strict and micro > 1 and forced == "auto":  # examples × parameter, if only within the budget
        strategies.remove(held.GRADIENTS)
    if options.unit == "token":
        strategies = [held.LEAVES]
    chunk = jax.tree.map(lambda x: x[:micro], _rows(request.inputs))
    smallest, why = 0, ""
    for strategy in strategies:
        size, why = _held_bytes(request, chunk, strategy)
        if why:
            break
        if forced != "auto" or size <= options.clip_memory:
            return Holding(strategy, size)
        smallest = min(size, smallest or size)
    why = why or f"one pass would hold {smallest:,} bytes, clip_memory is {options.clip_memory:,.0f}"
    return Holding(held.TWO_PASSES, why=why)


def _held_bytes(request: Request, rows: Any, strategy: str) -> tuple[int, str]:
    """(bytes that a pass for norms keeps, why it cannot), by tracing it."""
    seen: list[tuple[int, str]] = []

    def first_pass(rows: Any) -> None:
        inputs = _with_rows(request.inputs, rows)
        _, reduced = _first_pass(request, inputs, strategy)
        nothing = [name for name, r in zip(request.selected.names, reduced, strict=True) if r.again is None]
        why = f"the gradient of {nothing[0]} comes out of a branch or a shard_map" if nothing else ""
        seen.append((held.held_bytes([r.held for r in reduced], inputs), why))

    jax.eval_shape(first_pass, rows)
    return seen[0]


def _rows(inputs: Inputs) -> tuple[Any, Any, Any]:
    """What has an axis of units."""
    return inputs.batch, inputs.indices_Mxb, inputs.weights_Mxb


def _with_rows(inputs: Inputs, rows: tuple[Any, Any, Any]) -> Inputs:
    batch, indices, weights = rows
    return dataclasses.replace(inputs, batch=batch, indices_Mxb=indices, weights_Mxb=weights)


def _first_pass(request: Request, inputs: Inputs, strategy: str, metrics: Sequence[Metric] = ()) -> Any:
    """A pass for norms (and metrics), for which there are cheaper reductions (`gram`); it keeps what `strategy` says."""
    hold = "" if strategy == held.TWO_PASSES else strategy
    context = dataclasses.replace(
        request.context,
        statistics=(),
        num_examples=inputs.num_units,
        norms=True,
        metrics=metrics,
        unit="example",
        hold=hold,
    )
    return METHODS[request.options.method](request, context, inputs, None)


def _factor(request: Request) -> float:
    """What turns sums into averages, where the number of units is known beforehand; else 1."""
    options = request.options
    if options.unit != "example" or not _all_count_once(request):
        return 1.0
    return 1.0 / (request.inputs.num_units * request.num_devices)


def _all_count_once(request: Request) -> bool:
    weighted = request.inputs.weights_Mxb is not None or request.weight_fn is not None
    return not weighted and request.options.non_finite != "skip"


def _scales(request: Request, first: Sequence[ReductionResult], norms_N: jax.Array) -> Any:
    """Clipping: (c_n of all parameters, or None; parameter -> its own c_n, or None)."""
    limit, names = request.options.clip_norm, request.selected.names
    if limit is None:
        return None, None

    def at_most(limit: Any, norms_N: jax.Array) -> jax.Array:
        return jnp.minimum(1.0, limit / jnp.maximum(norms_N, jnp.finfo(norms_N.dtype).tiny))

    if not callable(limit) and request.clip_norms is None:
        return at_most(limit, norms_N), None
    squares: list[Any] = [r.squares_N for r in first]
    by_parameter = [jnp.sqrt(s) for s in squares]
    if request.clip_norms is not None:
        scales = [at_most(c, n) for c, n in zip(request.clip_norms, by_parameter, strict=True)]
        return None, dict(zip(names, scales, strict=True))
    factors: Any = jax.vmap(limit)(request.selected.trees({"norms": by_parameter})["norms"])
    if hasattr(factors, "shape") and factors.shape == norms_N.shape:
        return factors, None
    scales = request.selected.of_each(factors, "clip_norm is a function, and what it returns")
    for name, x in zip(names, scales, strict=True):
        if jnp.shape(x) != norms_N.shape:
            raise ValueError(
                "clip_norm is a function of one example's norms: it must return a number, or a tree like the parameters of "
                f"numbers, but of {name} it returns shape {jnp.shape(x)[1:]}."
            )
    return None, dict(zip(names, scales, strict=True))


def _weights_by(request: Request, losses_Mxb: jax.Array, norms_M: jax.Array) -> jax.Array | None:
    """The weights that the call's function gives to units."""
    if request.weight_fn is None:
        return None
    weights_M = jax.vmap(request.weight_fn)(jnp.mean(losses_Mxb, axis=1), norms_M)
    return weights_M.astype(jnp.promote_types(weights_M.dtype, jnp.float32))


def _norms(reduced: Sequence[ReductionResult]) -> jax.Array:
    """Of each unit's gradient, over all parameters."""
    squares: list[Any] = [r.squares_N for r in reduced]
    return jnp.sqrt(sum(squares))


def _varying(shape: jax.ShapeDtypeStruct) -> frozenset[str]:
    return frozenset() if shape.manual_axis_type is None else shape.manual_axis_type.varying


def _over_devices(request: Request, sums: dict[str, Any], how: ReductionTrace) -> dict[str, Any]:
    """The sums over all devices' examples: everything that is still to be added is sent together."""
    data_axes = request.options.data_axes
    if not data_axes:
        return sums
    # What ended in a reduce-scatter, or counted all devices' examples by itself, must not be summed a second time.
    left = [tuple(a for a in data_axes if a not in r.summed_over) for r in how.reductions]
    counts = {k: v for k, v in sums.items() if k != "statistics"}
    *statistics, counts = collectives.sum_each_over(
        [*sums["statistics"], counts], [*left, data_axes], request.options.transport
    )
    return {**counts, "statistics": statistics}


def _reduce_chunk(
    request: Request, inputs: Inputs, holding: Holding, initial: Any
) -> tuple[dict[str, Any], Any, ReductionTrace]:
    """Sums over the units given, added to `initial` (raw sums per gradient); and per-unit losses, norms, aux."""
    options, method = request.options, METHODS[request.options.method]
    units = inputs.num_units
    unit_weights = None if inputs.weights_Mxb is None else jnp.mean(inputs.weights_Mxb, axis=1)
    norms, first = None, None
    losses: Any = None
    aux: Any = None
    scales: tuple[Any, Any] = (None, None)
    if holding.strategy:
        # φ(c g) needs every example's c, and c its whole gradient's norm, before the first sum.
        (losses, aux), first = _first_pass(request, inputs, holding.strategy, options.metrics)
        norms = _norms(first)
        if request.weight_fn is not None:
            unit_weights = _weights_by(request, losses, norms)
        if options.non_finite == "skip":
            finite = jnp.isfinite(norms) & jnp.all(jnp.isfinite(losses), axis=1)
            unit_weights = jnp.where(finite, 1.0 if unit_weights is None else unit_weights, 0.0)
        scales = _scales(request, first, norms)
    has_squares = any(isinstance(m.reduce, Products) and m.reduce.square for m in options.metrics)
    wants_norms = first is None and (options.norms or options.non_finite == "raise" or has_squares)
    context = dataclasses.replace(
        request.context,
        num_examples=units,
        weights_N=unit_weights,
        scales_N=scales[0],
        parameter_scales=scales[1],
        norms=wants_norms,
        metrics=options.metrics if first is None else (),
        factor=_factor(request),
    )
    if first is not None and holding.passes == 1:
        initials = [None] * len(first) if initial is None else initial
        reduced = [
            r.again(context.bound(name, {}), r.held, i)
            for name, r, i in zip(request.selected.names, first, initials, strict=True)
        ]
    else:
        (losses, aux), reduced = method(request, context, inputs, initial)
    if wants_norms:
        norms = _norms(reduced)
    finite = jax.lax.reduce_and(jax.lax.is_finite(losses), (1,))
    if norms is not None:
        finite &= jnp.isfinite(norms)
    sums = {
        "raw": [r.raw for r in reduced],
        **_counts(unit_weights, inputs.weights_Mxb, inputs.indices_Mxb.shape, request.weight_fn is not None),
        "non_finite": jax.lax.reduce_sum(jax.lax.convert_element_type(~finite, jnp.result_type(int)), (0,)),
    }
    if options.unit == "token":
        positions = [r.positions_N for r in reduced if r.positions_N is not None]
        most = jnp.max(jnp.stack(positions), axis=0) if positions else jnp.ones(units, jnp.int32)
        w = jnp.ones(units) if unit_weights is None else unit_weights
        sums["position_weight"] = jnp.sum(w * most)
        sums["position_weight_square"] = jnp.sum(jnp.square(w) * most)
        sums["positions"] = jnp.sum(jnp.where(w != 0, most, 0))
    if inputs.weights_Mxb is not None and inputs.weights_Mxb.shape[1] > 1:  # a stand-in's loss is not the example's
        losses, aux = jax.tree.map(lambda x: _blanked(x, inputs.weights_Mxb != 0), (losses, aux))
    norms = norms if options.norms or request.norms_first else None
    measured = reduced if first is None else first
    metrics = {m.name: [r.metrics[m.name] for r in measured] for m in options.metrics}
    bad = ~finite if unit_weights is None else ~finite & (unit_weights != 0)
    per_unit = {"losses": losses, "aux": aux, "norms": norms, "bad": bad, "metrics": metrics}
    return sums, per_unit, ReductionTrace(reduced, first, {})


def _counts(unit_weights: Any, weights_Mxb: Any, shape: tuple[int, ...], is_function: bool) -> dict[str, Any]:
    """Sums of weights, over units and over their examples; `is_function`: a unit's weight is a factor of its examples'."""
    if unit_weights is None:
        # All of them are 1, so the sums are known.
        units, examples = shape[0], shape[0] * shape[1]
        real = {"unit_weight": units, "weight": examples, "weight_square": examples, "noise": units}
        whole = {"units": units, "examples": examples}
        typed = ((real, jnp.result_type(float)), (whole, jnp.result_type(int)))
        return {name: jnp.asarray(np.asarray(n, dtype)) for counts, dtype in typed for name, n in counts.items()}
    w_Mxb = jnp.ones(shape) if weights_Mxb is None else weights_Mxb
    if is_function:
        w_Mxb = w_Mxb * unit_weights[:, None]
    w_Mxb = jnp.where((unit_weights != 0)[:, None], w_Mxb, 0.0)
    squares, totals = jnp.sum(jnp.square(w_Mxb), axis=1), jnp.sum(w_Mxb, axis=1)
    return {
        "unit_weight": jnp.sum(unit_weights),
        "weight": jnp.sum(totals),
        "weight_square": jnp.sum(squares),
        "noise": jnp.sum(squares / one_if_zero(totals)),
        "units": jnp.sum(unit_weights != 0),
        "examples": jnp.sum(w_Mxb != 0),
    }


# --- results ----------------------------------------------------------------------------------------------------------


def finish(request: Request, sums: dict[str, Any], per_unit: Any, how: ReductionTrace) -> Any:
    """(statistics, what belongs to single examples, how), from the sums of all units."""
    options = request.options
    _check_reductions(options, how.reductions, request.selected.names)
    sums = _over_devices(request, sums, how)
    units, b = request.inputs.num_units * request.num_devices, options.group_size
    weight_sum, weight_square_sum, noise = sums["weight"], sums["weight_square"], sums["noise"]
    if options.unit == "token":
        weight_sum, weight_square_sum = sums["position_weight"], sums["position_weight_square"]
        noise = weight_sum
    is_average = _factor(request) != 1.0
    averages: dict[str, Any] = {}
    for k, s in enumerate(options.statistics):
        leaves = []
        for r, values in zip(how.reductions, sums["statistics"], strict=True):
            per_token = r.positions_N is not None
            value, weight = values[k], weight_sum if per_token else sums["unit_weight"]
            if per_token:
                # g is the mean over positions of (positions × a position's gradient), so φ sees that multiple; factorable
                # φ let it be applied to the sums.
                positions = weight_sum / one_if_zero(sums["unit_weight"])  # real ones, per example
                value = value * s.fn(positions.astype(value.dtype))
            if not is_average:  # else the factor was applied before summing
                inverse = jnp.where(weight != 0, 1.0 / one_if_zero(weight), 0.0)
                value = value * inverse.astype(value.dtype)
            leaves.append(value)
        averages[s.name] = leaves
    num_groups, count = sums["units"], sums["examples"]
    if _all_count_once(request):
        num_groups, count = np.int32(units), np.int32(request.count * request.num_devices)
    if options.unit == "token":
        num_groups = sums["positions"]
    trees = request.selected.trees(averages)
    sensitivity = _sensitivity(request, units if _all_count_once(request) else None)
    statistics = GradStatistics(trees, count, num_groups, weight_sum, weight_square_sum, b, noise, sensitivity)
    flat = jax.tree.map(lambda x: x.reshape(request.count, *x.shape[2:]), (per_unit["losses"], per_unit["aux"]))
    if options.non_finite == "raise":
        _raise_if_non_finite(per_unit["bad"])
    trees = request.selected.trees(per_unit["metrics"])
    metrics = {m.name: m.combined(trees[m.name]) for m in options.metrics}
    return statistics, PerExample(flat[0], per_unit["norms"], flat[1], sums["non_finite"], metrics), how


def _sensitivity(request: Request, units: int | None) -> Sensitivity | None:
    """See `Sensitivity`; `units`: the divisor of the mean, where it does not depend on the examples."""
    options = request.options
    if options.clip_norm is None or options.transport is not None or not request.weights_are_mask:
        return None
    # Where parameters may be divided over devices by hand, norms are those of a part of the gradient.
    if set(shard_map.manual_axes()) - set(options.data_axes):
        return None
    # Parameters that are clipped each by itself: the norms of the parts bound that of the whole.
    limits = [options.clip_norm] if request.clip_norms is None else request.clip_norms
    if any(callable(c) or isinstance(c, Tracer) for c in limits):
        return None
    whole = math.hypot(*(float(c) for c in limits))
    if math.isinf(whole):
        return None
    return Sensitivity(whole * (1 if options.group_size == 1 else 2), units)


def _blanked(x: jax.Array, keep_Mxb: jax.Array) -> jax.Array:
    """NaN (or 0) for the examples that are not kept."""
    nothing = jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
    return jnp.where(keep_Mxb.reshape(*keep_Mxb.shape, *(1,) * (x.ndim - 2)), x, jnp.asarray(nothing, x.dtype))


def _check_reductions(options: Options, reductions: Sequence[ReductionResult], names: Sequence[str]) -> None:
    for name, r in zip(names, reductions, strict=True):
        if r.reduction == MIXED_UNITS:
            raise ValueError(
                f"unit='token': some parts of parameter {name} have positions and others do not; exclude it with "
                "parameters=..."
            )
        if options.strict and r.reduction == MATERIALISED:
            raise ValueError(
                f"strict=True: per-example gradients of {name!r} would have to be materialised ({r.transient_bytes:,} "
                f"bytes) because {r.note}. strict=False allows it; results stay exact."
            )
        if options.unit == "token" and r.positions_N is None and r.reduction != SHARED and not options.token_fallback:
            raise ValueError(
                f"unit='token': the gradient of parameter {name} is not a sum over positions that can be told apart "
                f"(reduction: {r.reduction}{', because ' + r.note if r.note else ''}). token_fallback=True takes the "
                "example as its unit; parameters=... excludes it."
            )


def _raise_if_non_finite(bad_M: jax.Array) -> None:
    def check(bad_M: Any) -> None:
        indices = np.flatnonzero(bad_M)
        if indices.size:
            raise FloatingPointError(
                f"non_finite='raise': loss or gradient of {indices.size} of {np.size(bad_M)} examples (groups) is not "
                f"finite: {', '.join(map(str, indices[:10]))}{', ...' if indices.size > 10 else ''}."
            )

    if isinstance(bad_M, Tracer):
        jax.debug.callback(check, bad_M)
    else:
        check(bad_M)
