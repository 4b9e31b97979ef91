"""A producer as a sum of contributions: each a contraction, then moves of elements, casts and signs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from perex_t5x.per_example.engine import jaxprs, plan, primitives


@dataclasses.dataclass(frozen=True)
class Term:
    """One contribution: the result of `eqn`, after `chain` (in order of application).

    A scatter-add begins with zeros, or with 0 · the row `times_zero`, repeated: NaN where that is not finite.
    """

    eqn: core.JaxprEqn
    chain: tuple[core.JaxprEqn, ...]
    times_zero: Any = None  # a variable

    def unary(self, x: jax.Array) -> jax.Array:
        """The casts and signs of the chain; they commute with its moves."""
        for eqn in self.chain:
            if not plan.is_permutation(eqn):
                (x,) = jaxprs.bind(eqn, [x])
        return x

    # `unary` and `moved` may be applied separately, in any order: moves of elements and elementwise functions commute.
    def moved(self, x: jax.Array) -> jax.Array:
        """The moves of elements of the chain."""
        for eqn in self.chain:
            if plan.is_permutation(eqn):
                (x,) = jaxprs.bind(eqn, [x])
        return x

    @property
    def transposed(self) -> bool | None:
        """Of a matrix: whether the moves transpose it; None if they do something else."""
        moves = [eqn for eqn in self.chain if plan.is_permutation(eqn)]
        if len(jaxprs.shape_of(self.eqn.outvars[0])) != 2 or any(eqn.primitive.name != "transpose" for eqn in moves):
            return None
        return sum(tuple(eqn.params["permutation"]) == (1, 0) for eqn in moves) % 2 == 1


def terms(node: plan.Producer) -> list[Term] | None:
    """The contributions to a producer's root, or None if it is not such a sum."""
    sources: dict[Any, core.JaxprEqn] = {v: eqn for eqn in node.eqns for v in eqn.outvars}
    contributions: list[Term] = []
    used: set[int] = set()
    todo: list[tuple[Any, tuple[core.JaxprEqn, ...]]] = [(node.root, ())]
    while todo:
        v, chain = todo.pop()
        eqn = sources.get(v) if isinstance(v, core.Var) else None
        if eqn is None:
            return None
        used.add(id(eqn))
        name = eqn.primitive.name
        # Only sums at the very end: below a move of elements, contributions would have to be moved before they are added.
        if name in primitives.ADDITIONS and not chain:
            todo.extend((x, ()) for x in eqn.invars)
            continue
        if plan.is_permutation(eqn) or plan.is_unary(eqn):
            todo.append((eqn.invars[0], (eqn, *chain)))
            continue
        times_zero = None
        if name == "scatter-add":
            into = eqn.invars[0]
            start = sources.get(into) if isinstance(into, core.Var) else None
            if plan.is_zeros(into, {v: (e, 0) for v, e in sources.items()}):
                while start is not None:
                    used.add(id(start))
                    start = sources.get(start.invars[0]) if isinstance(start.invars[0], core.Var) else None
            elif start is not None and (repeated := _repeated_times_zero(start, sources, node.leaves)) is not None:
                used |= {id(start), id(repeated)}
                times_zero = repeated.invars[0]
            else:  # a contribution of its own: another scatter-add, say
                todo.append((into, chain))
        elif name not in ("dot_general", "reduce_sum"):
            return None
        contributions.append(Term(eqn, chain, times_zero))
    # An equation that is not accounted for would be left out of the gradient.
    return contributions if used == {id(eqn) for eqn in node.eqns} else None


def _repeated_times_zero(
    eqn: core.JaxprEqn, sources: dict[Any, core.JaxprEqn], leaves: Sequence[core.Var]
) -> core.JaxprEqn | None:
    """If an equation is 0 · a row, repeated along the first axis: the equation that repeats it."""
    zeros = [v for v in eqn.invars if isinstance(v, core.Literal) and not v.val]
    others = [sources.get(v) for v in eqn.invars if isinstance(v, core.Var)]
    if eqn.primitive.name != "mul" or not zeros or not others or others[0] is None:
        return None
    repeated, axes = others[0], tuple(range(1, len(jaxprs.shape_of(eqn.outvars[0]))))
    is_row = (
        repeated.primitive.name == "broadcast_in_dim"
        and repeated.invars[0] in leaves
        and tuple(repeated.params["broadcast_dimensions"]) == axes
        and jaxprs.shape_of(repeated.invars[0]) == jaxprs.shape_of(repeated.outvars[0])[1:]
    )
    return repeated if is_row else None
