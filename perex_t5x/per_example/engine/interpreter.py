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
from jax.extend import core
from jax.sharding import PartitionSpec

from perex_t5x.per_example.engine import jaxprs, scan, shard_map
from perex_t5x.per_example.engine.plan import (
    Assembled,
    Crossed,
    Inside,
    Kept,
    Mapped,
    Node,
    Permuted,
    Producer,
    make_plan,
)
from perex_t5x.per_example.engine.rewrites.pipeline import prepare
from perex_t5x.per_example.engine.sharding import Placement
from perex_t5x.per_example.reductions.reducer import MIXED_UNITS, Pre, Reduced, Reducer, Site, plus
from perex_t5x.per_example.reductions.selection import reduce_at


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A result to reduce: what to apply before φ, sums to add to, the shift, its place and parts (see `forms.Site`)."""

    pre: Pre = lambda x: x
    initial: Any = None
    shift: jax.Array | None = None
    place: Placement | None = None
    parts: tuple[str, ...] | None = None

    def before(self, eqn: core.JaxprEqn) -> Wanted:
        """The same, one elementwise equation earlier. (The shift is taken away after it: see `Site.pre`.)"""
        return dataclasses.replace(self, pre=lambda x: self.pre(jaxprs.bind(eqn, [x])[0]))

    def unmoved(self, eqn: core.JaxprEqn) -> Wanted:
        """The same, one permutation earlier."""
        place = None if self.place is None else self.place.before(eqn)
        if self.shift is None:
            return dataclasses.replace(self, place=place)
        aval = jaxprs.struct(jax.typeof(self.shift), eqn.invars[0].aval.shape)
        (shift,) = jax.linear_transpose(lambda x: jaxprs.bind(eqn, [x])[0], aval)(self.shift)
        return dataclasses.replace(self, shift=shift, place=place)

    def uncrossed(self, eqn: core.JaxprEqn) -> Wanted:
        """The same on each device, before a sum over devices that ends in `eqn`: the sums so far are added after it."""
        shift = self.shift
        if shift is not None and eqn.primitive.name == "shard_map":
            raise ValueError("shift is not supported for parameters that are gathered within tensor parallelism.")
        if shift is not None and eqn.primitive.name == "reduce_scatter":
            shift = jax.lax.all_gather(
                shift, eqn.params["axis_name"], axis=eqn.params["scatter_dimension"], tiled=eqn.params["tiled"]
            )
        return dataclasses.replace(self, initial=None, shift=shift)

    def part(self, index: int, start: Sequence[int], shape: Sequence[int]) -> Wanted:
        """The same of one part of it."""
        initial = None if self.initial is None else self.initial[index]
        stop = [a + n for a, n in zip(start, shape, strict=True)]
        shift = None if self.shift is None else jax.lax.slice(self.shift, start, stop)
        return dataclasses.replace(self, initial=initial, shift=shift, place=None)


Entered = tuple[list[Any], list[bool], dict[int, Reduced]]


def run(
    program: core.ClosedJaxpr,
    arguments: Sequence[Any],
    batched: Sequence[bool],
    wanted: Mapping[int, Wanted],
    reducer: Reducer,
) -> Entered:
    """Evaluates `program` for all examples.

    Args:
      program: of one example, calls inlined (`jaxprs.inline`).
      arguments: its arguments; those marked `batched` have a leading axis N.
      wanted: results to reduce.
      reducer: what to compute of them.

    Returns:
      The results (None for those reduced), whether each depends on the example, and the reductions.
    """
    program = prepare(program, batched, wanted)
    jaxpr = program.jaxpr
    plan = make_plan(jaxpr, wanted, batched, frozenset(reducer.data_axes))
    entered: dict[int, dict[int, Wanted]] = {}
    for index, node in plan.nodes.items():
        _find_entered(node, wanted[index], entered)

    env: dict[core.Var, tuple[Any, bool]] = {}
    inside: dict[tuple[int, int], Reduced] = {}
    env.update((v, (c, False)) for v, c in zip(jaxpr.constvars, program.consts, strict=True))
    env.update((v, (a, b)) for v, a, b in zip(jaxpr.invars, arguments, batched, strict=True))

    def read(v: Any) -> tuple[Any, bool]:
        return (v.val, False) if isinstance(v, core.Literal) else env[v]

    def after_sums(eqn: core.JaxprEqn, values: Sequence[Any], flags: Sequence[bool]) -> Sequence[Any]:
        """Has a loop wait until sums that are on their way to other devices have left: they are whole until then."""
        sent = [i for i, r in reductions.items() if r.over and r.form != "shared"]
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
            outs, out_flags, reduced = enter(eqn, values, flags, entered[id(eqn)], reducer)
            inside.update(((id(eqn), i), r) for i, r in reduced.items())
        elif any(flags):
            shard_map.refuse(eqn, flags, reducer.devices)
            outs, out_flags = jaxprs.bind_batched(eqn, values, flags)
        else:
            outs, out_flags = jaxprs.bind(eqn, values), [False] * len(eqn.outvars)
        env.update((v, (o, f)) for v, o, f in zip(eqn.outvars, outs, out_flags, strict=True))

    def reduce(node: Node, want: Wanted) -> Reduced:
        match node:
            case Permuted(eqn=eqn, child=child):
                return reduce(child, want.unmoved(eqn)).then(lambda x: jaxprs.bind(eqn, [x])[0])
            case Mapped(eqn=eqn, child=child):
                return reduce(child, want.before(eqn))
            case Crossed(eqns=eqns, child=child):
                return _crossed(reducer, eqns, reduce(child, want.uncrossed(eqns[-1])), want.initial)
            case Assembled(shape=shape, parts=parts):
                found = [reduce(child, want.part(k, start, part)) for k, (start, part, child) in enumerate(parts)]
                return _assembled(shape, [start for start, _, _ in parts], found)
            case Inside(eqn=eqn, index=i):
                return inside[id(eqn), i]
            case Producer(eqns=eqns, leaves=leaves):
                values, flags = zip(*map(read, leaves), strict=True) if leaves else ((), ())
                for eqn in eqns:
                    shard_map.refuse(eqn, [any(flags)], reducer.devices)
                known = (want.pre, want.initial, want.shift, want.place, want.parts)
                return reduce_at(reducer, Site(node, values, flags, *known))
            case Kept(var=v, reason=reason, small=small):
                value, flag = read(v)
                if not flag:
                    return reducer.shared(want.pre(jnp.asarray(value)), want.initial, want.shift, want.parts)
                form, note = ("all at once", "") if small else ("kept", reason)
                return reducer.all_at_once(want.pre(value), form, note, want.initial, want.shift)
        raise AssertionError(node)

    # Each as soon as it can be: what it is made of need not wait for the rest.
    due = plan.due(jaxpr)
    reductions = {i: reduce(plan.nodes[i], wanted[i]) for i in due.get(0, ())}
    for count, eqn in enumerate(jaxpr.eqns, 1):
        if id(eqn) not in plan.deferred and any(v in plan.needed for v in eqn.outvars):
            execute(eqn)
        reductions.update((i, reduce(plan.nodes[i], wanted[i])) for i in due.get(count, ()))
    results = [(None, False) if i in wanted else read(v) for i, v in enumerate(jaxpr.outvars)]
    return [r for r, _ in results], [f for _, f in results], reductions


def _find_entered(node: Node, want: Wanted, entered: dict[int, dict[int, Wanted]]) -> None:
    """Collects, for every loop, branch or remat to enter, which results to reduce and how."""
    match node:
        case Permuted(eqn=eqn, child=child):
            _find_entered(child, want.unmoved(eqn), entered)
        case Mapped(eqn=eqn, child=child):
            _find_entered(child, want.before(eqn), entered)
        case Crossed(eqns=eqns, child=child):
            _find_entered(child, want.uncrossed(eqns[-1]), entered)
        case Assembled(parts=parts):
            for k, (start, shape, child) in enumerate(parts):
                _find_entered(child, want.part(k, start, shape), entered)
        case Inside(eqn=eqn, index=i):
            entered.setdefault(id(eqn), {})[i] = want


def _assembled(shape: tuple[int, ...], starts: Sequence[Sequence[int]], parts: Sequence[Reduced]) -> Reduced:
    def finish(raws: Sequence[Any]) -> list[jax.Array]:
        finished = [part.finish(raw) for part, raw in zip(parts, raws, strict=True)]
        wholes = []
        for pieces in zip(*finished, strict=True):
            whole = jnp.zeros(shape, pieces[0].dtype)
            for start, piece in zip(starts, pieces, strict=True):
                whole = jax.lax.dynamic_update_slice(whole, piece, start)
            wholes.append(whole)
        return wholes

    some = lambda values, join: None if any(v is None for v in values) else join(values)  # noqa: E731
    together = _together(parts)
    mixed = len({p.positions_N is None for p in parts}) == 2
    return dataclasses.replace(
        together,
        raw=[p.raw for p in parts],
        squares_N=some([p.squares_N for p in parts], sum),
        form=MIXED_UNITS if mixed else together.form,
        finish=finish,
        positions_N=some([p.positions_N for p in parts], lambda ps: jnp.max(jnp.stack(ps), axis=0)),
    )


def _together(parts: Sequence[Reduced]) -> Reduced:
    """How the parts of a gradient, or its forms in several branches, were computed; without sums."""
    forms = list(dict.fromkeys(p.form for p in parts))
    if len({p.over for p in parts}) > 1:
        raise ValueError(
            "parts of one parameter's gradient are summed over different mesh axes "
            f"({' and '.join(str(p.over) for p in parts)}): gather the parameter as a whole, outside of branches."
        )
    return Reduced(
        None,
        None,
        "kept" if "kept" in forms else " / ".join(forms),
        max(p.transient_bytes for p in parts),
        next((p.note for p in parts if p.note), ""),
        over=parts[0].over,
        kernel=next((p.kernel for p in parts if p.kernel), parts[0].kernel),
    )


def _crossed(reducer: Reducer, eqns: Sequence[core.JaxprEqn], mine: Reduced, initial: Any) -> Reduced:
    """The sum over devices of their sums, added to those so far."""
    axes = shard_map.summed_axes(eqns)
    sums = [shard_map.cross(eqns, x, reducer.transport) for x in mine.finish(mine.raw)]
    if set(axes).issubset(mine.over):  # shared, and all devices' examples counted: the same on each of them
        sums = [x / shard_map.num_devices(axes) for x in sums]
    return dataclasses.replace(mine, raw=plus(initial, sums), finish=list, over=tuple({*axes, *mine.over}))


# --- bodies -----------------------------------------------------------------------------------------------------------


def _enter_remat(
    eqn: core.JaxprEqn, values: Sequence[Any], flags: Sequence[bool], wanted: Mapping[int, Wanted], reducer: Reducer
) -> Entered:
    """A rematerialised region, after differentiation: its body, kept apart from the forward pass if it asks for it."""
    body = jaxprs.inline(jaxprs.closed(eqn.params["jaxpr"]))
    return run(body, jaxprs.apart(eqn, values), flags, wanted, reducer)


def _enter_cond(
    eqn: core.JaxprEqn, values: Sequence[Any], flags: Sequence[bool], wanted: Mapping[int, Wanted], reducer: Reducer
) -> Entered:
    """A branch that all examples take together (one that depends on the example has become a selection)."""
    index, *operands = values
    operands = [jnp.asarray(x) for x in operands]
    branches = [jaxprs.inline(b) for b in eqn.params["branches"]]
    out_flags = [any(f) for f in zip(*(jaxprs.batched_outputs(b.jaxpr, flags[1:]) for b in branches), strict=True)]
    out_flags = [f and i not in wanted for i, f in enumerate(out_flags)]
    seen: list[dict[int, Reduced]] = []

    def positions(r: Reduced) -> jax.Array | None:
        """A branch that does not use the parameter has positions too: none."""
        if reducer.unit == "token" and r.positions_N is None and r.form == "shared":
            return reducer.zeros((reducer.num_examples,), jnp.int32)
        return r.positions_N

    def branch(body: core.ClosedJaxpr) -> Callable[..., Any]:
        def take(operands: Sequence[Any]) -> Any:
            plain = {i: dataclasses.replace(want, initial=None) for i, want in wanted.items()}
            results, result_flags, reduced = run(body, operands, flags[1:], plain, reducer)
            seen.append(reduced)
            results = [
                jaxprs.for_all(r, reducer.num_examples) if want and not have else r
                for r, want, have in zip(results, out_flags, result_flags, strict=True)
            ]
            return results, {i: (r.finish(r.raw), r.squares_N, positions(r)) for i, r in reduced.items()}

        return take

    results, arrays = jax.lax.switch(index, [branch(b) for b in branches], operands)
    reductions = {}
    for i, (sums, squares, positions_N) in arrays.items():
        reductions[i] = dataclasses.replace(
            _together([reduced[i] for reduced in seen]),
            raw=plus(wanted[i].initial, sums),
            squares_N=squares,
            positions_N=positions_N,
        )
    return results, out_flags, reductions


def _enter_scan(
    eqn: core.JaxprEqn, values: Sequence[Any], flags: Sequence[bool], wanted: Mapping[int, Wanted], reducer: Reducer
) -> Entered:
    """A scan that stacks gradients: each step reduces its own, so the stack is one of sums.

    Sums to add to are carried, and each step adds to its own part of them in place.
    """
    p = eqn.params
    num_consts, num_carry = p["num_consts"], p["num_carry"]
    body = jaxprs.inline(p["jaxpr"])
    consts, carry, xs = jaxprs.split_scan(values, p)
    ((_, body_flags),) = jaxprs.bodies_of(eqn, flags)
    const_flags, carry_flags, xs_flags = jaxprs.split_scan(body_flags, p)
    n = reducer.num_examples
    carry = [
        jaxprs.for_all(c, n) if f and not g else c
        for c, f, g in zip(carry, carry_flags, flags[num_consts : num_consts + num_carry], strict=True)
    ]
    xs = [jnp.moveaxis(x, 0, 1) if f else x for x, f in zip(xs, xs_flags, strict=True)]
    initial_L = {i: want.initial for i, want in wanted.items() if want.initial is not None}
    shifts_L = {i: want.shift for i, want in wanted.items() if want.shift is not None}
    places = {i: None if want.place is None else want.place.of_one() for i, want in wanted.items()}
    steps = jnp.arange(p["length"]) if initial_L else None
    seen: dict[str, Any] = {}

    def step(state: tuple[list[Any], Any], x: Any) -> tuple[Any, Any]:
        carry, totals_L = state
        x, shifts, at = x
        totals = jax.tree.map(lambda t: t[at], totals_L)
        here = {
            i: dataclasses.replace(want, initial=totals.get(i), shift=shifts.get(i), place=places[i])
            for i, want in wanted.items()
        }
        results, result_flags, reduced = run(
            body, [*consts, *carry, *x], [*const_flags, *carry_flags, *xs_flags], here, reducer
        )
        new_carry = [
            jaxprs.for_all(r, n) if want and not have else r
            for r, want, have in zip(results[:num_carry], carry_flags, result_flags[:num_carry], strict=True)
        ]
        seen.update(flags=result_flags[num_carry:], reduced=reduced)
        totals_L = {i: jax.tree.map(lambda t, r: t.at[at].set(r), totals_L[i], reduced[i].raw) for i in totals_L}
        raws = {i: r.raw for i, r in reduced.items() if i not in totals_L}
        counts = {i: (r.squares_N, r.positions_N) for i, r in reduced.items()}
        return (new_carry, totals_L), (results[num_carry:], raws, counts)

    (carry, totals_L), (ys, raws, counts) = scan.scan(
        step,
        (carry, initial_L),
        (xs, shifts_L, steps),
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
        late=lambda: any(r.over for r in seen["reduced"].values()),  # each device's part of the sums: small stacks
    )
    y_flags = [bool(f) for f in seen["flags"]]
    ys = [None if y is None else jnp.moveaxis(y, 1, 0) if f else y for y, f in zip(ys, y_flags, strict=True)]
    reductions = {}
    for i, r in seen["reduced"].items():
        squares_LxN, positions_LxN = counts[i]
        squares = None if squares_LxN is None else jnp.sum(squares_LxN, axis=0)
        positions = None if positions_LxN is None else jnp.max(positions_LxN, axis=0)
        raw = totals_L[i] if i in totals_L else raws[i]
        finish = functools.partial(_finish_layers, r.finish)
        reductions[i] = dataclasses.replace(r, raw=raw, squares_N=squares, finish=finish, positions_N=positions)
    return [*carry, *ys], [*carry_flags, *y_flags], reductions


def _finish_layers(finish: Callable[[Any], list[jax.Array]], raw_L: Any) -> list[jax.Array]:
    return list(jax.vmap(finish)(raw_L)) if jax.tree.leaves(raw_L) else []


def _enter_shard_map(
    eqn: core.JaxprEqn, values: Sequence[Any], flags: Sequence[bool], wanted: Mapping[int, Wanted], reducer: Reducer
) -> Entered:
    """A region on a mesh: each device reduces its own part of a gradient."""
    p = eqn.params
    in_specs = [PartitionSpec(None, *s) if f else s for s, f in zip(p["in_specs"], flags, strict=True)]
    shifts = {i: want.shift for i, want in wanted.items() if want.shift is not None}
    seen: dict[str, Any] = {}

    def local(values: Sequence[Any], weights_N: Any, scales_N: Any, shifts: Mapping[int, Any]) -> Any:
        here = {i: Wanted(want.pre, None, shifts.get(i)) for i, want in wanted.items()}
        mine = dataclasses.replace(reducer, weights_N=weights_N, scales_N=scales_N, varying=frozenset())
        body = jaxprs.inline(jaxprs.closed(p["jaxpr"]), manual=True)
        results, result_flags, reduced = run(body, values, flags, here, mine)
        seen.update(reduced=reduced)
        sums = {i: r.finish(r.raw) for i, r in reduced.items()}
        squares = {i: r.squares_N for i, r in reduced.items() if r.squares_N is not None}
        for i, square in squares.items():
            axes = tuple(
                a for entry in p["out_specs"][i] if entry for a in (entry if isinstance(entry, tuple) else (entry,))
            )
            squares[i] = jax.lax.psum(square, axes) if axes else square
        batched = [
            None if r is None else r if f else jaxprs.for_all(r, reducer.num_examples)
            for r, f in zip(results, result_flags, strict=True)
        ]
        return batched, sums, squares

    num = len(eqn.outvars)
    result_specs = [None if i in wanted else PartitionSpec(None, *p["out_specs"][i]) for i in range(num)]
    sum_specs = {i: [p["out_specs"][i]] * len(reducer.statistics) for i in wanted}
    square_specs = {i: PartitionSpec() for i in wanted} if reducer.norms else {}
    shared = PartitionSpec()
    results, sums, squares = jax.shard_map(
        local,
        mesh=p["mesh"],
        in_specs=(in_specs, shared, shared, {i: p["out_specs"][i] for i in shifts}),
        out_specs=(result_specs, sum_specs, square_specs),
        axis_names=p["newly_manual_axes"],
        check_vma=False,
    )([jnp.asarray(v) for v in values], reducer.weights_N, reducer.scales_N, shifts)
    reductions = {}
    for i, r in seen["reduced"].items():
        raw = plus(wanted[i].initial, sums[i])
        reductions[i] = dataclasses.replace(r, raw=raw, squares_N=squares.get(i), finish=list, positions_N=None)
    return results, [r is not None for r in results], reductions


_ENTER = {"scan": _enter_scan, "cond": _enter_cond, "shard_map": _enter_shard_map}
