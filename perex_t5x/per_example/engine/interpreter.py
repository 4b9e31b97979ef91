"""Runs the gradient program of one example for all examples, reducing each gradient where it is produced.

Values that depend on the example carry a leading axis N (`jax.vmap`, equation by equation); shared ones do not. Equations
of a gradient's tail are not run for all examples: see `perex_t5x.per_example.engine.plan`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core
from jax.sharding import PartitionSpec

from perex_t5x.per_example.engine import batching, jaxprs, scan, shard_map
from perex_t5x.per_example.engine.cones import Cone
from perex_t5x.per_example.engine.plan import (
    Concatenated,
    CrossDeviceSum,
    InControlFlow,
    Joint,
    Mapped,
    Materialized,
    Node,
    Permuted,
    Producer,
    is_needed,
    make_plan,
)
from perex_t5x.per_example.engine.rewrites import rewrite
from perex_t5x.per_example.reductions import held, measures, reducer, select_reduction
from perex_t5x.per_example.reductions.reducer import (
    MATERIALISED,
    MIXED_UNITS,
    SHARED,
    ReductionContext,
    ReductionResult,
    ReductionSite,
    ReductionSpec,
    plus,
)

Specs = Mapping[int, ReductionSpec]  # by result of a program
# Results of a program (None for those reduced), whether each depends on the example, and the reductions.
Entered = tuple[list[Any], list[bool], dict[int, ReductionResult]]


def run(
    program: core.ClosedJaxpr,
    arguments: Sequence[Any],
    batched: Sequence[bool],
    specs: Specs,
    context: ReductionContext,
) -> Entered:
    """Evaluates `program` for all examples.

    Args:
      program: of one example, calls inlined (`jaxprs.inline`).
      arguments: its arguments; those marked `batched` have a leading axis N.
      specs: the results to reduce, and how.
      context: what to compute of them.

    Returns:
      The results (None for those reduced), whether each depends on the example, and the reductions.
    """
    program = rewrite(program, batched, specs)
    jaxpr = program.jaxpr
    # A branch's sums leave it in buffers of their own, one for each statistic: a single example's gradient is no more.
    # (Inside, its own equations may be needed: tokens, a norm without the gradient, sums over devices.)
    alone = context.num_examples == 1 and context.unit == "example" and context.statistics and not context.device_axes
    plan = make_plan(jaxpr, specs, batched, frozenset(context.data_axes), enter_branches=not alone)
    entered: dict[int, dict[int, ReductionSpec]] = {}
    # A loop is entered once for all gradients that come out of it, and that is when its equation's turn comes: what is to be
    # done inside must be known before.
    joint: dict[int, dict[int, ReductionSpec]] = {}
    for index, node in plan.nodes.items():
        _collect_specs(node, specs[index], entered, joint)

    # Values with whether they have an example axis. Shared ones (parameters, and what is computed from them alone) stay
    # without, so that they are computed once, and products with them are one large product instead of N small ones.
    env: dict[core.Var, tuple[Any, bool]] = {}
    inside: dict[tuple[int, int], ReductionResult] = {}
    jointly: dict[int, dict[int, ReductionResult]] = {}
    env.update((v, (c, False)) for v, c in zip(jaxpr.constvars, program.consts, strict=True))
    env.update((v, (a, b)) for v, a, b in zip(jaxpr.invars, arguments, batched, strict=True))

    def read(v: Any) -> tuple[Any, bool]:
        return (v.val, False) if isinstance(v, core.Literal) else env[v]

    def after_sums(eqn: core.JaxprEqn, values: Sequence[Any], flags: Sequence[bool]) -> Sequence[Any]:
        """Has a loop wait for the sums that are being sent to other devices.

        A reduce-scatter turns whole sums into a device's part of them. Nothing else in the program needs its result before
        the end, so the compiler would be free to run the layers' loop first, with the whole sums in memory meanwhile. The
        barrier ties the loop's inputs to the scattered sums.
        """
        sent = [i for i, r in reductions.items() if r.summed_over and r.reduction != SHARED]
        batched = [i for i, flag in enumerate(flags) if flag]
        if eqn.primitive.name != "scan" or not sent or not batched:
            return values
        raws, tied = jax.lax.optimization_barrier(([reductions[i].raw for i in sent], [values[i] for i in batched]))
        for i, raw in zip(sent, raws, strict=True):
            reductions[i] = dataclasses.replace(reductions[i], raw=raw)
        later = dict(zip(batched, tied, strict=True))
        return [later.get(i, v) for i, v in enumerate(values)]

    def execute(eqn: core.JaxprEqn) -> None:
        values, flags = zip(*map(read, eqn.invars), strict=True) if eqn.invars else ((), ())
        if id(eqn) in entered:
            values = after_sums(eqn, values, flags)
            enter = _ENTER.get(eqn.primitive.name, _enter_remat)
            outs, out_flags, reduced = enter(eqn, values, flags, entered[id(eqn)], context)
            inside.update(((id(eqn), i), r) for i, r in reduced.items())
        elif any(flags):
            # Only values of examples: a collective of something shared, such as a parameter's all_gather, is harmless.
            shard_map.refuse(eqn, flags, context.device_axes)
            outs, out_flags = batching.bind_batched(eqn, values, flags)
        else:
            outs, out_flags = jaxprs.bind(eqn, values), [False] * len(eqn.outvars)
        env.update((v, (o, f)) for v, o, f in zip(eqn.outvars, outs, out_flags, strict=True))

    def leaves_of(node: Producer | Cone) -> tuple[Sequence[Any], Sequence[bool]]:
        values, flags = zip(*map(read, node.leaves), strict=True) if node.leaves else ((), ())
        # A psum may be part of a producer as any other sum is; over the data axes it may not.
        for eqn in node.eqns:
            shard_map.refuse(eqn, [any(flags)], context.device_axes)
        return values, flags

    def site_of(node: Producer, spec: ReductionSpec) -> ReductionSite:
        return ReductionSite(context.bound(spec.parameter, spec.operands), spec, node, *leaves_of(node))

    def reduce(node: Node, spec: ReductionSpec) -> ReductionResult:
        match node:
            case Permuted(eqn=eqn, child=child):
                return reduce(child, spec.before_permutation(eqn)).then(lambda x: jaxprs.bind(eqn, [x])[0])
            case Mapped(eqn=eqn, child=child):
                return reduce(child, spec.before_unary(eqn))
            case CrossDeviceSum(eqns=eqns, child=child):
                return _sum_over_devices(context, eqns, reduce(child, spec.before_collective(eqns)), spec.initial)
            case Concatenated(shape=shape, parts=parts):
                reduced = [reduce(child, spec.slice(k, at, size)) for k, (at, size, child) in enumerate(parts)]
                return _concatenated(context, shape, [start for start, _, _ in parts], reduced)
            case InControlFlow(eqn=eqn, index=i):
                return inside[id(eqn), i]
            case Producer():
                site = site_of(node, spec)
                return measures.with_metrics(site, held.hold(site) if context.hold else select_reduction(site))
            case Joint(cone=cone, index=k):
                if context.hold:
                    site = site_of(node.alone, spec)
                    return measures.with_metrics(site, held.hold(site))
                if id(cone) not in jointly:
                    bound = {i: (context.bound(one.parameter, one.operands), one) for i, one in joint[id(cone)].items()}
                    jointly[id(cone)] = reducer.jointly(cone, *leaves_of(cone), bound)
                reduced = reducer.with_held(jointly[id(cone)][k], node, context.num_examples)
                return measures.with_metrics(site_of(node.alone, spec), reduced) if context.metrics else reduced
            case Materialized(var=v):
                value, flag = read(v)
                bound = context.bound(spec.parameter, spec.operands)
                if context.hold:
                    reduced = held.hold_value(context, spec, value, flag)
                # An unused parameter's zeros, a regulariser's gradient: nothing of it differs by example.
                elif not flag:
                    reduced = reducer.shared(bound, spec, spec.pre(jnp.asarray(value)))
                else:
                    reduced = reducer.all_at_once(bound, spec.pre(value), "all at once", initial=spec.initial)
                reduced = reducer.with_held(reduced, node, context.num_examples)
                return measures.of_value(context, spec, value, flag, reduced)
        raise AssertionError(node)

    # Each gradient is reduced as soon as its producer's inputs exist, so that these can be freed (`Plan.due`).
    due = plan.due(jaxpr)
    reductions = {i: reduce(plan.nodes[i], specs[i]) for i in due.get(0, ())}
    for count, eqn in enumerate(jaxpr.eqns, 1):
        if id(eqn) not in plan.deferred and is_needed(eqn, plan.needed):
            execute(eqn)
        reductions.update((i, reduce(plan.nodes[i], specs[i])) for i in due.get(count, ()))
    results = [(None, False) if i in specs else read(v) for i, v in enumerate(jaxpr.outvars)]
    return [r for r, _ in results], [f for _, f in results], reductions


def _collect_specs(
    node: Node,
    spec: ReductionSpec,
    entered: dict[int, dict[int, ReductionSpec]],
    joint: dict[int, dict[int, ReductionSpec]],
) -> None:
    """Collects, for every loop, branch or remat to enter and for every cone, which results to reduce and how."""
    match node:
        case Permuted(eqn=eqn, child=child):
            _collect_specs(child, spec.before_permutation(eqn), entered, joint)
        case Mapped(eqn=eqn, child=child):
            _collect_specs(child, spec.before_unary(eqn), entered, joint)
        case CrossDeviceSum(eqns=eqns, child=child):
            _collect_specs(child, spec.before_collective(eqns), entered, joint)
        case Concatenated(parts=parts):
            for k, (at, size, child) in enumerate(parts):
                _collect_specs(child, spec.slice(k, at, size), entered, joint)
        case InControlFlow(eqn=eqn, index=i):
            entered.setdefault(id(eqn), {})[i] = spec
        case Joint(cone=cone, index=k):
            joint.setdefault(id(cone), {})[k] = spec


def _concatenated(
    context: ReductionContext,
    shape: tuple[int, ...],
    starts: Sequence[Sequence[int]],
    parts: Sequence[ReductionResult],
) -> ReductionResult:
    def finish(raws: Sequence[Any]) -> list[jax.Array]:
        finished = [part.finish(raw) for part, raw in zip(parts, raws, strict=True)]
        # Zeros, then each part in its place: parts are slices along several axes, so `concatenate` would not do.
        wholes = []
        for pieces in zip(*finished, strict=True):
            whole = jnp.zeros(shape, pieces[0].dtype)
            for start, piece in zip(starts, pieces, strict=True):
                whole = jax.lax.dynamic_update_slice(whole, piece, start)
            wholes.append(whole)
        return wholes

    def some(values: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
        return None if any(v is None for v in values) else join(values)

    # Raw sums stay apart, one entry per part, so that each part's reduction can add to its own in place.
    together = _described_together(parts)
    mixed = len({p.positions_N is None for p in parts}) == 2
    return dataclasses.replace(
        together,
        raw=[p.raw for p in parts],
        squares_N=some([p.squares_N for p in parts], sum),
        reduction=MIXED_UNITS if mixed else together.reduction,
        finish=finish,
        positions_N=some([p.positions_N for p in parts], lambda ps: jnp.max(jnp.stack(ps), axis=0)),
        held=[p.held for p in parts],
        again=some(
            [p.again for p in parts], lambda agains: functools.partial(_concatenated_again, shape, starts, agains)
        ),
        metrics={m.name: m.joined(p.metrics[m.name] for p in parts) for m in context.metrics},
    )


def _concatenated_again(
    shape: tuple[int, ...], starts: Sequence[Any], agains: Sequence[Any], context: Any, held: Any, initial: Any
) -> ReductionResult:
    initials = [None] * len(agains) if initial is None else initial
    parts = [again(context, h, i) for again, h, i in zip(agains, held, initials, strict=True)]
    return _concatenated(context, shape, starts, parts)


def _described_together(parts: Sequence[ReductionResult]) -> ReductionResult:
    """How the parts of a gradient, or the gradient in several branches, were reduced; without sums."""
    names = list(dict.fromkeys(p.reduction for p in parts))
    if len({p.summed_over for p in parts}) > 1:
        raise ValueError(
            "parts of one parameter's gradient are summed over different mesh axes "
            f"({' and '.join(str(p.summed_over) for p in parts)}): gather the parameter as a whole, outside of branches."
        )
    return ReductionResult(
        None,
        None,
        MATERIALISED if MATERIALISED in names else " / ".join(names),
        max(p.transient_bytes for p in parts),
        next((p.note for p in parts if p.note), ""),
        summed_over=parts[0].summed_over,
        kernel=next((p.kernel for p in parts if p.kernel), parts[0].kernel),
    )


def _sum_over_devices(
    context: ReductionContext, eqns: Sequence[core.JaxprEqn], mine: ReductionResult, initial: Any
) -> ReductionResult:
    """The sum over devices of their sums, added to those so far."""
    axes = shard_map.summed_axes(eqns)
    sums = [shard_map.cross(eqns, x, context.transport) for x in mine.finish(mine.raw)]
    if set(axes).issubset(mine.summed_over):
        # A shared gradient's sums count all devices' examples already, on each device: the collective has added them up
        # as often as there are devices.
        sums = [x / shard_map.num_devices(axes) for x in sums]
    # `initial` after the collective: before it, every device's would be added. Finished first: the collective expects the
    # gradient's own order of elements.
    before = mine.again

    def again(context: ReductionContext, held: Any, initial: Any) -> ReductionResult:
        assert before is not None
        return _sum_over_devices(context, eqns, before(context, held, None), initial)

    return dataclasses.replace(
        mine,
        raw=plus(initial, sums),
        finish=list,
        summed_over=tuple({*axes, *mine.summed_over}),
        again=None if before is None else again,
    )


# --- bodies -----------------------------------------------------------------------------------------------------------


def _enter_remat(
    eqn: core.JaxprEqn, values: Sequence[Any], flags: Sequence[bool], specs: Specs, context: ReductionContext
) -> Entered:
    """A rematerialised region, after differentiation: its body, behind a barrier if it asks for one."""
    body = jaxprs.inline(jaxprs.closed(eqn.params["jaxpr"]))
    return run(body, jaxprs.behind_barrier(eqn, values), flags, specs, context)


def _enter_cond(
    eqn: core.JaxprEqn, values: Sequence[Any], flags: Sequence[bool], specs: Specs, context: ReductionContext
) -> Entered:
    """A branch that all examples take together (one that depends on the example has become a selection)."""
    # Reduced inside each branch: a gradient that leaves `cond` would exist for all examples.
    index, *operands = values
    operands = [jnp.asarray(x) for x in operands]
    # Branches may reduce differently, so what they would keep differs, too: nothing is kept.
    context = dataclasses.replace(context, hold="")
    branches = [jaxprs.inline(b) for b in eqn.params["branches"]]
    out_flags = [any(f) for f in zip(*(jaxprs.batched_outputs(b.jaxpr, flags[1:]) for b in branches), strict=True)]
    out_flags = [f and i not in specs for i, f in enumerate(out_flags)]
    seen: list[dict[int, ReductionResult]] = []

    def positions(r: ReductionResult) -> jax.Array | None:
        """A branch that does not use the parameter has positions too: none."""
        if context.unit == "token" and r.positions_N is None and r.reduction == SHARED:
            return context.zeros((context.num_examples,), jnp.int32)
        return r.positions_N

    def branch(body: core.ClosedJaxpr) -> Callable[..., Any]:
        def take(operands: Sequence[Any]) -> Any:
            # From zeros, and finished: branches may reduce differently, and their raw sums then differ in structure, which
            # `lax.switch` does not allow.
            from_zeros = {i: dataclasses.replace(spec, initial=None) for i, spec in specs.items()}
            results, result_flags, reduced = run(body, operands, flags[1:], from_zeros, context)
            seen.append(reduced)
            # For the same reason, a result has an example axis in all branches or in none.
            results = [
                jaxprs.for_all(r, context.num_examples) if needs_axis and not has_axis else r
                for r, needs_axis, has_axis in zip(results, out_flags, result_flags, strict=True)
            ]
            return results, {i: (r.finish(r.raw), r.squares_N, positions(r), r.metrics) for i, r in reduced.items()}

        return take

    results, arrays = jax.lax.switch(index, [branch(b) for b in branches], operands)
    reductions = {}
    for i, (sums, squares, positions_N, metrics) in arrays.items():
        reductions[i] = dataclasses.replace(
            _described_together([reduced[i] for reduced in seen]),
            raw=plus(specs[i].initial, sums),
            squares_N=squares,
            positions_N=positions_N,
            metrics=metrics,
        )
    return results, out_flags, reductions


def _enter_scan(
    eqn: core.JaxprEqn, values: Sequence[Any], flags: Sequence[bool], specs: Specs, context: ReductionContext
) -> Entered:
    """A scan that stacks gradients: each step reduces its own, so the stack is one of sums.

    Sums to add to are carried, and each step adds to its own part of them in place.
    """
    p = eqn.params
    num_consts, num_carry = p["num_consts"], p["num_carry"]
    body = jaxprs.inline(p["jaxpr"])
    consts, carry, xs = jaxprs.split_scan(values, p)
    const_flags, carry_flags, xs_flags = jaxprs.split_scan(jaxprs.body_flags(eqn, flags), p)
    n = context.num_examples
    # A carry that comes to depend on the example in some step has an example axis from the start: its type may not change.
    carry = [
        jaxprs.for_all(c, n) if f and not g else c
        for c, f, g in zip(carry, carry_flags, flags[num_consts : num_consts + num_carry], strict=True)
    ]
    # [N, L, ...] as [L, N, ...]: a scan goes over the leading axis, and the examples come along.
    # In `lax`, as elsewhere on the way of every loss: the same in `jnp` takes several times as long to trace.
    xs = [jax.lax.transpose(x, (1, 0, *range(2, x.ndim))) if f else x for x, f in zip(xs, xs_flags, strict=True)]
    initial_L = {i: spec.initial for i, spec in specs.items() if spec.initial is not None}
    shardings = {i: None if spec.sharding is None else spec.sharding.without_leading() for i, spec in specs.items()}
    operands_L = {i: dict(spec.operands) for i, spec in specs.items()}
    steps = jnp.arange(p["length"]) if initial_L else None
    seen: dict[str, Any] = {}

    def step(state: tuple[list[Any], Any], x: Any) -> tuple[Any, Any]:
        carry, totals_L = state
        x, at, operands = x
        totals = jax.tree.map(lambda t: t[at], totals_L)
        here = {
            i: dataclasses.replace(spec, initial=totals.get(i), sharding=shardings[i], operands=operands[i])
            for i, spec in specs.items()
        }
        results, result_flags, reduced = run(
            body, [*consts, *carry, *x], [*const_flags, *carry_flags, *xs_flags], here, context
        )
        new_carry = [
            jaxprs.for_all(r, n) if needs_axis and not has_axis else r
            for r, needs_axis, has_axis in zip(results[:num_carry], carry_flags, result_flags[:num_carry], strict=True)
        ]
        kept = _Kept.of({i: r.held for i, r in reduced.items()}, consts, x)
        seen.update(flags=result_flags[num_carry:], reduced=reduced, kept=kept)
        # In the carry, XLA updates one layer of the sums in place; scanned over, they would be a second buffer of that size.
        totals_L = {i: jax.tree.map(lambda t, r: t.at[at].set(r), totals_L[i], reduced[i].raw) for i in totals_L}
        raws = {i: r.raw for i, r in reduced.items() if i not in totals_L}
        counts = {i: (r.squares_N, r.positions_N, r.metrics) for i, r in reduced.items()}
        return (new_carry, totals_L), (results[num_carry:], raws, counts, kept.new)

    (carry, totals_L), (ys, raws, counts, new) = scan.scan(
        step,
        (carry, initial_L),
        (xs, steps, operands_L),
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    y_flags = [bool(f) for f in seen["flags"]]
    ys = [None if y is None else jnp.moveaxis(y, 1, 0) if f else y for y, f in zip(ys, y_flags, strict=True)]
    reductions = {}
    for i, r in seen["reduced"].items():
        # Squares of a stacked parameter add up over its layers. Positions do not: each layer is applied at the same ones.
        squares_LxN, positions_LxN, metrics_LxN = counts[i]
        squares = None if squares_LxN is None else jnp.sum(squares_LxN, axis=0)
        positions = None if positions_LxN is None else jnp.max(positions_LxN, axis=0)
        raw = totals_L[i] if i in totals_L else raws[i]
        finish = functools.partial(_finish_layers, r.finish)
        metrics = {m.name: m.over_layers(metrics_LxN[m.name]) for m in context.metrics}
        reductions[i] = dataclasses.replace(
            r, raw=raw, squares_N=squares, finish=finish, positions_N=positions, metrics=metrics
        )
        if r.again is not None:
            reductions[i].held, reductions[i].again = seen["kept"].for_layers(i, r.again, xs, new, eqn)
    return [*carry, *ys], [*carry_flags, *y_flags], reductions


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What the body of a scan keeps for later: values of the outside, rows of what it scans over, and new ones to stack."""

    held: dict[int, Any]  # by result
    places: dict[int, tuple[str, int]]  # id of a value -> where it is found outside
    new: list[Any]

    @classmethod
    def of(cls, held: dict[int, Any], consts: Sequence[Any], x: Sequence[Any]) -> _Kept:
        places = {id(v): ("outside", k) for k, v in enumerate(consts)}
        places |= {id(v): ("scanned", k) for k, v in enumerate(x)}
        new: list[Any] = []
        for v in jax.tree.leaves(held):
            # Stacked once, however many products have it as an input.
            if id(v) not in places and isinstance(v, Tracer):
                places[id(v)] = ("new", len(new))
                new.append(v)
        return cls(held, places, new)

    def for_layers(self, index: int, again: Any, xs: Sequence[Any], new: Sequence[Any], eqn: core.JaxprEqn) -> Any:
        """(what is kept of result `index` of all layers, how to reduce it)."""
        leaves, tree = jax.tree.flatten(self.held[index])
        values, stacked = [], []
        for v in leaves:
            where, k = self.places.get(id(v), ("outside", 0))
            values.append(v if where == "outside" else {"scanned": xs, "new": new}[where][k])
            stacked.append(where != "outside")
        return values, functools.partial(_layers_again, again, tree, stacked, eqn)


def _layers_again(
    again: Any,
    tree: Any,
    stacked: Sequence[bool],
    eqn: core.JaxprEqn,
    context: ReductionContext,
    held: Sequence[Any],
    initial_L: Any,
) -> ReductionResult:
    """The reduction of a gradient that a scan stacks, from what its steps have kept."""
    rows = [h for h, s in zip(held, stacked, strict=True) if s]
    length = eqn.params["length"]
    seen: list[ReductionResult] = []

    def step(totals_L: Any, x: Any) -> Any:
        row, at = x
        mine = iter(row)
        here = tree.unflatten([next(mine) if s else h for h, s in zip(held, stacked, strict=True)])
        r = again(context, here, None if totals_L is None else jax.tree.map(lambda t: t[at], totals_L))
        seen[:] = [r]
        if totals_L is None:
            return None, (r.raw, r.positions_N)
        return jax.tree.map(lambda t, layer: t.at[at].set(layer), totals_L, r.raw), (None, r.positions_N)

    totals_L, (raws, positions_LxN) = scan.scan(
        step,
        initial_L,
        (rows, jnp.arange(length)),
        length=length,
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    (r,) = seen
    positions = None if positions_LxN is None else jnp.max(positions_LxN, axis=0)
    finish = functools.partial(_finish_layers, r.finish)
    raw = raws if initial_L is None else totals_L
    return dataclasses.replace(r, raw=raw, finish=finish, positions_N=positions)


def _finish_layers(finish: Callable[[Any], list[jax.Array]], raw_L: Any) -> list[jax.Array]:
    if finish is list:  # usually, and nothing need be traced
        return list(raw_L)
    return list(jax.vmap(finish)(raw_L)) if jax.tree.leaves(raw_L) else []


def _enter_shard_map(
    eqn: core.JaxprEqn, values: Sequence[Any], flags: Sequence[bool], specs: Specs, context: ReductionContext
) -> Entered:
    """A region on a mesh: each device reduces its own part of a gradient."""
    p = eqn.params
    in_specs = [PartitionSpec(None, *s) if f else s for s, f in zip(p["in_specs"], flags, strict=True)]
    seen: dict[str, Any] = {}

    def local(values: Sequence[Any], weights_N: Any, scales: Any, operands: Any) -> Any:
        here = {i: ReductionSpec(spec.pre, operands=operands[i], parameter=spec.parameter) for i, spec in specs.items()}
        # Values in here do not carry the axes they vary over (check_vma=False below), so zeros need not be cast to them.
        # What is kept would have to leave the region, and how it is divided is not known: nothing is.
        mine = dataclasses.replace(
            context,
            weights_N=weights_N,
            scales_N=scales[0],
            parameter_scales=scales[1],
            varying=frozenset(),
            hold="",
        )
        body = jaxprs.for_manual_axes(jaxprs.inline(jaxprs.closed(p["jaxpr"])))
        results, result_flags, reduced = run(body, values, flags, here, mine)
        seen.update(reduced=reduced)
        sums = {i: r.finish(r.raw) for i, r in reduced.items()}
        squares = {i: r.squares_N for i, r in reduced.items() if r.squares_N is not None}
        # A norm is of the whole gradient, of which a device has a part if its result is divided over mesh axes.
        axes = {
            i: tuple(a for e in p["out_specs"][i] if e for a in (e if isinstance(e, tuple) else (e,))) for i in specs
        }
        for i, square in squares.items():
            squares[i] = jax.lax.psum(square, axes[i]) if axes[i] else square
        metrics = {
            i: {m.name: m.over_devices(r.metrics[m.name], axes[i]) for m in context.metrics} for i, r in reduced.items()
        }
        batched = [
            None if r is None else r if f else jaxprs.for_all(r, context.num_examples)
            for r, f in zip(results, result_flags, strict=True)
        ]
        return batched, sums, squares, metrics

    num = len(eqn.outvars)
    result_specs = [None if i in specs else PartitionSpec(None, *p["out_specs"][i]) for i in range(num)]
    sum_specs = {i: [p["out_specs"][i]] * len(context.statistics) for i in specs}
    square_specs = {i: PartitionSpec() for i in specs} if context.norms else {}
    shared = PartitionSpec()
    results, sums, squares, metrics = jax.shard_map(
        local,
        mesh=p["mesh"],
        in_specs=(in_specs, shared, shared, {i: p["out_specs"][i] for i in specs}),
        out_specs=(result_specs, sum_specs, square_specs, shared),
        axis_names=p["newly_manual_axes"],
        check_vma=False,
    )(
        [jnp.asarray(v) for v in values],
        context.weights_N,
        (context.scales_N, context.parameter_scales),
        {i: dict(spec.operands) for i, spec in specs.items()},
    )
    reductions = {}
    for i, r in seen["reduced"].items():
        raw = plus(specs[i].initial, sums[i])
        reductions[i] = dataclasses.replace(
            r, raw=raw, squares_N=squares.get(i), finish=list, positions_N=None, metrics=metrics[i]
        )
    return results, [r is not None for r in results], reductions


_ENTER = {"scan": _enter_scan, "cond": _enter_cond, "shard_map": _enter_shard_map}
