"""Tools of the rewrites: where gradients come from, and a program with some equations evaluated by other functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from jax.extend import core

from perex_t5x.per_example.engine import jaxprs, plan, primitives


@dataclasses.dataclass(frozen=True)
class Rule:
    """Evaluates an equation in another way.

    Attributes:
      evaluate: (equation, its arguments, a function from variables of `reads` to values) -> results.
      reads: what it needs besides the equation's arguments; may come later in the program, if it does not depend on them.
    """

    evaluate: Callable[[core.JaxprEqn, Sequence[Any], Callable[[Any], Any]], Sequence[Any]]
    reads: Sequence[Any] = ()

    def results(self, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        arguments, others = values[: len(eqn.invars)], values[len(eqn.invars) :]
        env = {v: x for v, x in zip(self.reads, others, strict=True) if isinstance(v, core.Var)}
        return self.evaluate(eqn, arguments, lambda v: jaxprs.read(v, env))


def rewritten(program: core.ClosedJaxpr, rules: Mapping[int, Rule | Sequence[core.JaxprEqn]]) -> core.ClosedJaxpr:
    """The program with the equations of these ids evaluated by the rules, or replaced by other equations."""
    if not rules:
        return program
    jaxpr, sources = program.jaxpr, jaxprs.source_of(program.jaxpr)
    writer, written = jaxprs.Writer(program), set[int]()
    names: dict[core.Var, Any] = {}  # of results of rules

    def name(v: Any) -> Any:
        return v if isinstance(v, core.Literal) else names.get(v, v)

    def write(eqn: core.JaxprEqn) -> None:
        written.add(id(eqn))
        rule = rules.get(id(eqn), (eqn,))
        if isinstance(rule, Rule):
            for v in rule.reads:
                write_before(v)
            outs = writer.trace(functools.partial(rule.results, eqn), [name(v) for v in (*eqn.invars, *rule.reads)])
            names.update(zip(eqn.outvars, outs, strict=True))
            return
        for one in rule:
            writer.take(one, [name(v) for v in one.invars] if names else one.invars)

    def write_before(v: Any) -> None:
        """A rule may read what comes later in the program (a scalar that is applied inside a loop): it is written now."""
        eqn = sources[v][0] if isinstance(v, core.Var) and v in sources else None
        if eqn is not None and id(eqn) not in written:
            for x in eqn.invars:
                write_before(x)
            write(eqn)

    for eqn in jaxpr.eqns:
        if id(eqn) not in written:
            write(eqn)
    return writer.program([name(v) for v in jaxpr.outvars])


@jaxprs.remembered
def tails_of(jaxpr: core.Jaxpr, wanted: tuple[int, ...]) -> Set[core.Var]:
    """Everything between the wanted results and where their walk back ends, ends included."""
    sources, uses = jaxprs.source_of(jaxpr), jaxprs.use_counts(jaxpr)
    through = primitives.PERMUTATIONS | primitives.CHEAP | primitives.CROSS_DEVICE_SUMS | primitives.CONSTRAINTS
    through |= {"split", "shard_map"}
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


def used_further(jaxpr: core.Jaxpr) -> Callable[[core.Var], bool]:
    """Whether a gradient is used for more than to be moved, cast or put beside others: no walk back gets past that."""
    users = {v: eqn for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, core.Var)}
    uses = jaxprs.use_counts(jaxpr)

    def goes_on(v: core.Var) -> bool:
        while uses.get(v, 0) == 1 and v in users and (plan.is_permutation(users[v]) or plan.is_unary(users[v])):
            v = users[v].outvars[0]
        is_part = v in users and users[v].primitive.name in ("pad", "concatenate", "dynamic_update_slice")
        return uses.get(v, 0) > 1 or (v in users and not is_part)

    return goes_on
