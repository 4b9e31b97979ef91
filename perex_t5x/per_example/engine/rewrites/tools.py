"""Tools of the rewrites: where gradients come from, and a program with some equations evaluated by other functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core

from perex_t5x.per_example.engine import cones, jaxprs, primitives

# Evaluates an equation in another way: (equation, its arguments, a function from earlier variables to values) -> results.
Rule = Callable[[core.JaxprEqn, Sequence[Any], Callable[[Any], Any]], list[Any]]


def rewritten(program: core.ClosedJaxpr, rules: dict[int, Rule]) -> core.ClosedJaxpr:
    """The program with the equations of these ids evaluated by the rules."""
    if not rules:
        return program
    jaxpr, sources = program.jaxpr, jaxprs.source_of(program.jaxpr)

    def run(*arguments: Any) -> list[Any]:
        env: dict[core.Var, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))
        applied: set[int] = set()

        def apply(eqn: core.JaxprEqn) -> None:
            applied.add(id(eqn))
            values = [read(v) for v in eqn.invars]
            rule = rules.get(id(eqn))
            outs = jaxprs.bind(eqn, values) if rule is None else rule(eqn, values, read)
            env.update(zip(eqn.outvars, outs, strict=True))

        def read(v: Any) -> Any:
            if isinstance(v, core.Literal):
                return v.val
            # A rule may read what comes later in the program (a scalar that is applied inside a loop): evaluate it now.
            if v not in env:
                apply(sources[v][0])
            return env[v]

        for eqn in jaxpr.eqns:
            if id(eqn) not in applied:
                apply(eqn)
        return [read(v) for v in jaxpr.outvars]

    # Rules use jnp, which brings calls of its own: inlined, so that the next rewrite sees plain equations.
    return jaxprs.inline(jax.make_jaxpr(run)(*(jaxprs.struct(v) for v in program.in_avals)))


def tails_of(jaxpr: core.Jaxpr, wanted: Iterable[int]) -> set[core.Var]:
    """Everything between the wanted results and where their walk back ends, ends included."""
    sources, uses = jaxprs.source_of(jaxpr), jaxprs.use_counts(jaxpr)
    through = primitives.PERMUTATIONS | primitives.CHEAP | primitives.CROSS_DEVICE_SUMS | {"split", "shard_map"}
    tails: set[core.Var] = set()
    todo = [jaxpr.outvars[i] for i in wanted]
    while todo:
        v = todo.pop()
        if isinstance(v, core.Literal) or v in tails or v not in sources or uses[v] > 1:
            continue
        tails.add(v)
        eqn = sources[v][0]
        if eqn.primitive.name in through:
            todo.extend(eqn.invars)
    return tails


def parameter_side(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: Iterable[int]) -> set[core.Var]:
    """`cones.parameter_side` of a program, of whose arguments those marked depend on the example."""
    return cones.parameter_side(program.jaxpr, wanted, jaxprs.dependent(program.jaxpr, batched))
