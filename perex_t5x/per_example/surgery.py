"""Runs the gradient program of one example for all examples, reducing each gradient where it is produced.

Values that depend on the example carry a leading axis N (`jax.vmap`, equation by equation); shared ones do not. Equations
of a gradient's tail are not run for all examples: see `perex_t5x.per_example.plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from perex_t5x.per_example import jaxprs
from perex_t5x.per_example.forms import Pre, Reduced, Reducer
from perex_t5x.per_example.plan import Inside, Kept, Mapped, Node, Permuted, Producer, make_plan


def run(
    program: core.ClosedJaxpr,
    arguments: Sequence[Any],
    batched: Sequence[bool],
    wanted: Mapping[int, Pre],
    reducer: Reducer,
) -> tuple[list[Any], list[bool], dict[int, Reduced]]:
    """Evaluates `program` for all examples.

    Args:
      program: of one example, calls inlined (`jaxprs.inline`).
      arguments: its arguments; those marked `batched` have a leading axis N.
      wanted: results to reduce, each with an elementwise function to apply before φ.
      reducer: what to compute of them.

    Returns:
      The results (None for those reduced), whether each depends on the example, and the reductions.
    """
    jaxpr = program.jaxpr
    plan = make_plan(jaxpr, wanted)
    entered: dict[int, dict[int, Pre]] = {}
    for index, node in plan.nodes.items():
        _find_entered(node, wanted[index], entered)

    env: dict[core.Var, tuple[Any, bool]] = {}
    inside: dict[tuple[int, int], Reduced] = {}
    env.update((v, (c, False)) for v, c in zip(jaxpr.constvars, program.consts, strict=True))
    env.update((v, (a, b)) for v, a, b in zip(jaxpr.invars, arguments, batched, strict=True))

    def read(v: Any) -> tuple[Any, bool]:
        return (v.val, False) if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        if id(eqn) in plan.deferred or not any(v in plan.needed for v in eqn.outvars):
            continue
        values, flags = zip(*map(read, eqn.invars), strict=True) if eqn.invars else ((), ())
        if id(eqn) in entered:
            enter = _enter_scan if eqn.primitive.name == "scan" else _enter_remat
            outs, out_flags, reduced = enter(eqn, values, flags, entered[id(eqn)], reducer)
            inside.update(((id(eqn), i), r) for i, r in reduced.items())
        elif any(flags):
            outs, out_flags = jaxprs.bind_batched(eqn, values, flags), [True] * len(eqn.outvars)
        else:
            outs, out_flags = jaxprs.bind(eqn, values), [False] * len(eqn.outvars)
        env.update((v, (o, f)) for v, o, f in zip(eqn.outvars, outs, out_flags, strict=True))

    def reduce(node: Node, pre: Pre) -> Reduced:
        match node:
            case Permuted(eqn=eqn, child=child):
                return reduce(child, pre).mapped(lambda x: jaxprs.bind(eqn, [x])[0])
            case Mapped(eqn=eqn, child=child):
                return reduce(child, _compose(pre, eqn))
            case Inside(eqn=eqn, index=i):
                return inside[id(eqn), i]
            case Producer(leaves=leaves):
                values, flags = zip(*map(read, leaves), strict=True) if leaves else ((), ())
                return reducer.producer(node, values, flags, pre)
            case Kept(var=v, reason=reason):
                value, flag = read(v)
                if not flag:
                    return reducer.shared(pre(jnp.asarray(value)))
                return reducer.all_at_once(pre(value), "kept", reason)
        raise AssertionError(node)

    reductions = {i: reduce(node, wanted[i]) for i, node in plan.nodes.items()}
    results = [(None, False) if i in wanted else read(v) for i, v in enumerate(jaxpr.outvars)]
    return [r for r, _ in results], [f for _, f in results], reductions


def _compose(pre: Pre, eqn: core.JaxprEqn) -> Pre:
    return lambda x: pre(jaxprs.bind(eqn, [x])[0])


def _find_entered(node: Node, pre: Pre, entered: dict[int, dict[int, Pre]]) -> None:
    """Collects, for every loop or remat to enter, which results to reduce and what to apply before φ."""
    while not isinstance(node, Inside):
        match node:
            case Permuted(child=child):
                node = child
            case Mapped(eqn=eqn, child=child):
                node, pre = child, _compose(pre, eqn)
            case _:
                return
    entered.setdefault(id(node.eqn), {})[node.index] = pre


def _enter_remat(
    eqn: core.JaxprEqn, values: Sequence[Any], flags: Sequence[bool], wanted: Mapping[int, Pre], reducer: Reducer
) -> tuple[list[Any], list[bool], dict[int, Reduced]]:
    """A rematerialised region, after differentiation: its body, kept apart from the forward pass if it asks for it."""
    if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
        values = jax.lax.optimization_barrier(tuple(values))
    body = jaxprs.inline(jaxprs.closed(eqn.params["jaxpr"]))
    return run(body, values, flags, wanted, reducer)


def _enter_scan(
    eqn: core.JaxprEqn, values: Sequence[Any], flags: Sequence[bool], wanted: Mapping[int, Pre], reducer: Reducer
) -> tuple[list[Any], list[bool], dict[int, Reduced]]:
    """A scan that stacks gradients: each step reduces its own, so the stack is one of sums."""
    p = eqn.params
    num_consts, num_carry = p["num_consts"], p["num_carry"]
    body = jaxprs.inline(p["jaxpr"])
    consts, carry, xs = _split(values, num_consts, num_carry)
    const_flags, carry_flags, xs_flags = map(list, _split(flags, num_consts, num_carry))
    while True:  # until no more of the carry depends on the example
        outs = jaxprs.batched_outputs(body.jaxpr, [*const_flags, *carry_flags, *xs_flags])[:num_carry]
        grown = [c or o for o, c in zip(outs, carry_flags, strict=True)]
        if grown == carry_flags:
            break
        carry_flags = grown
    n = reducer.num_examples
    carry = [
        jnp.broadcast_to(c, (n, *jnp.shape(c))) if f and not g else c
        for c, f, g in zip(carry, carry_flags, flags[num_consts : num_consts + num_carry], strict=True)
    ]
    xs = [jnp.moveaxis(x, 0, 1) if f else x for x, f in zip(xs, xs_flags, strict=True)]
    seen: dict[str, Any] = {}

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], Any]:
        results, result_flags, reduced = run(
            body, [*consts, *carry, *x], [*const_flags, *carry_flags, *xs_flags], wanted, reducer
        )
        new_carry = [
            jnp.broadcast_to(r, (n, *jnp.shape(r))) if want and not have else r
            for r, want, have in zip(results[:num_carry], carry_flags, result_flags[:num_carry], strict=True)
        ]
        seen.update(flags=result_flags[num_carry:], reduced=reduced)
        arrays = {i: (r.sums, r.squares_N) for i, r in reduced.items()}
        return new_carry, (results[num_carry:], arrays)

    carry, (ys, arrays) = jax.lax.scan(
        step, carry, xs, length=p["length"], reverse=p["reverse"], unroll=p.get("unroll", 1)
    )
    y_flags = [bool(f) for f in seen["flags"]]
    ys = [None if y is None else jnp.moveaxis(y, 1, 0) if f else y for y, f in zip(ys, y_flags, strict=True)]
    reductions = {}
    for i, (sums, squares_LxN) in arrays.items():
        r = seen["reduced"][i]
        squares = None if squares_LxN is None else jnp.sum(squares_LxN, axis=0)
        reductions[i] = Reduced(sums, squares, r.form, r.transient_bytes, r.note)
    return [*carry, *ys], [*carry_flags, *y_flags], reductions


def _split(items: Sequence[Any], num_consts: int, num_carry: int) -> tuple[list[Any], list[Any], list[Any]]:
    items = list(items)
    return items[:num_consts], items[num_consts : num_consts + num_carry], items[num_consts + num_carry :]
