"""Gradients of values that are computed from parameters alone, and the way from there to the parameters' own gradients.

In a loss of x @ f(w), the backward pass first forms the gradient C of f(w), which is of a parameter's size, and then carries
it through the derivative of f: f(w) = softmax(w), w + w.T, w + a @ b, inverse(w). That derivative is linear in C, and all
else in it is shared by the examples. C of all examples would be of size N × parameter, so the whole way runs for one example
at a time: a *cone*, from activations (its leaves) to the gradients of one or more parameters (its roots), which may use
values several times and consist of any primitives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from jax.extend import core

from perex_t5x.per_example.engine import jaxprs, primitives


@dataclasses.dataclass(frozen=True)
class Cone:
    """`roots` computed from `leaves` by `eqns`, in order, for one example at a time."""

    eqns: tuple[core.JaxprEqn, ...]
    roots: tuple[core.Var, ...]
    leaves: tuple[core.Var, ...]
    repeated: frozenset[int] = frozenset()  # ids of equations whose results other parts of the program may use, too

    def to(self, root: core.Var) -> Cone:
        """The part of it that makes one of its roots."""
        return _closed([root], {v: eqn for eqn in self.eqns for v in eqn.outvars}, self.eqns)


@jaxprs.remembered
def parameter_side(jaxpr: core.Jaxpr, wanted: tuple[int, ...], batched: tuple[bool, ...]) -> Set[core.Var]:
    """Values that differ by example, lead to wanted results only, and do so linearly, with all else shared by examples.

    `batched`: which arguments of the program differ by example.

    Cotangents of activations are not among them: they meet activations (x in xᵀr, a mask, the keys of attention) before they
    become a parameter's gradient. A number may be met: it is no activation.
    """
    sources, depends = jaxprs.source_of(jaxpr), jaxprs.dependent(jaxpr, batched)
    # What an equation computes besides something that other results need: a loop's activations, say.
    beside = {v for eqn in needed_besides(jaxpr, wanted) for v in eqn.outvars}
    users: dict[core.Var, list[core.JaxprEqn]] = {}
    todo = [*_others(jaxpr, wanted), *(v for v in depends if v not in sources)]
    for eqn in jaxpr.eqns:
        inputs = _batched_inputs(eqn, depends)
        for v in inputs:
            users.setdefault(v, []).append(eqn)
        if eqn.effects or not _is_linear(eqn, inputs, beside):
            todo += inputs
    out: set[core.Var] = set()
    # The largest such set: begin with all values, and take out what leads to something that is out, or meets it.
    while todo:
        v = todo.pop()
        if v in out:
            continue
        out.add(v)
        if v in sources:
            todo.extend(_batched_inputs(sources[v][0], depends))
        if jaxprs.size_of(v) > 1:
            for eqn in users.get(v, ()):
                todo.extend(_batched_inputs(eqn, depends))
    return {v for v in sources if v in depends} - out


def _others(jaxpr: core.Jaxpr, wanted: tuple[int, ...]) -> list[core.Var]:
    return [v for i, v in enumerate(jaxpr.outvars) if i not in wanted and isinstance(v, core.Var)]


@jaxprs.remembered
def needed_besides(jaxpr: core.Jaxpr, wanted: tuple[int, ...]) -> Sequence[core.JaxprEqn]:
    """The equations that the other results are computed by, the last one first."""
    needed, eqns = set(_others(jaxpr, wanted)), []
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            eqns.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, core.Var))
    return eqns


def _is_linear(eqn: core.JaxprEqn, inputs: Sequence[core.Var], beside: Set[core.Var]) -> bool:
    """Whether an equation can be part of a derivative, linear in all of these inputs together."""
    arrays = [v for v in inputs if jaxprs.size_of(v) > 1]
    if len(arrays) < 2 or eqn.primitive.name in primitives.LINEAR_TOGETHER:
        return True
    # A loop or call is not looked into: one that has an activation for an input will multiply by it.
    return bool(jaxprs.inner(eqn)) and not any(v in beside for v in arrays)


def find(
    jaxpr: core.Jaxpr,
    side: Set[core.Var],
    ends: Iterable[core.Var],
    moves: set[int],
    entered: set[int],
    for_all: set[core.Var],
    depends: Set[core.Var],
) -> list[Cone]:
    """The cones that are needed, so that nothing of a parameter's size exists for all examples.

    Args:
      side: see `parameter_side`.
      ends: the gradients, before equations (ids in `moves`) that are applied after their reduction.
      entered: ids of equations in whose bodies gradients are reduced, unless what they get is of a parameter's size already.
      for_all: what would be computed for all examples otherwise.
    """
    grown = _grown(jaxpr.eqns, entered, side, depends, largest_activation(jaxpr, side, for_all, depends))
    if not grown & for_all:
        return []
    # Connected by equations: what is used by two ways must be on both, or it would have to exist for all examples after all.
    parent = {v: v for v in side}

    def representative(v: core.Var) -> core.Var:
        while parent[v] is not v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    for eqn in jaxpr.eqns:
        if id(eqn) in moves:
            continue
        together = [v for v in (*eqn.outvars, *_batched_inputs(eqn, depends)) if v in side]
        for v in together[1:]:
            parent[representative(v)] = representative(together[0])
    needed = {representative(v) for v in grown & for_all}
    roots: dict[core.Var, list[core.Var]] = {}
    for v in ends:
        if v in grown and (component := representative(v)) in needed:
            roots.setdefault(component, []).append(v)
    inside = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars if v in grown}
    # What is small before it is broadcast is a leaf before, not after.
    broadcasts = {
        eqn.outvars[0]: eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1 and eqn.outvars[0] in depends
    }
    return [_closed(mine, inside, jaxpr.eqns, broadcasts) for mine in roots.values()]


def largest_activation(jaxpr: core.Jaxpr, side: Set[core.Var], for_all: set[core.Var], depends: Set[core.Var]) -> int:
    """The size of the largest array of one example that is computed in any case."""
    arrays = [v for v in (*jaxpr.invars, *for_all) if v in depends and v not in side]
    return max((jaxprs.size_of(v) for v in arrays), default=0)


def _grown(
    eqns: Sequence[core.JaxprEqn], entered: set[int], side: Set[core.Var], depends: Set[core.Var], activation: int
) -> set[core.Var]:
    """What is larger than the largest array it is made of, such as an outer product, and what is made of that."""
    grown: set[core.Var] = set()
    sources = {v: eqn for eqn in eqns for v in eqn.outvars}
    for eqn in eqns:
        inputs = _batched_inputs(eqn, depends)
        # An equation that makes other values besides cannot be run for one example at a time alone.
        if not inputs or eqn.effects or not all(v in side for v in eqn.outvars if not isinstance(v, core.DropVar)):
            continue
        size = max((jaxprs.size_of(v) for v in eqn.outvars), default=0)
        # With shared arrays alone an activation's cotangent may grow, too: r @ w.T, of a wide layer.
        from_activations = len(inputs) > 1 and size > max(_size_before_broadcast(v, sources) for v in inputs)
        begins = id(eqn) not in entered and (from_activations or size > activation)
        if begins or any(v in grown for v in inputs):
            grown.update(eqn.outvars)
    return grown


def _size_before_broadcast(v: core.Var, sources: Mapping[core.Var, core.JaxprEqn]) -> int:
    eqn = sources.get(v)
    if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
        return jaxprs.size_of(eqn.invars[0])
    return jaxprs.size_of(v)


def _closed(
    roots: list[core.Var],
    inside: dict[core.Var, core.JaxprEqn],
    order: Iterable[core.JaxprEqn],
    repeatable: Mapping[core.Var, core.JaxprEqn] | None = None,
) -> Cone:
    """The cone of `roots`: back through the equations `inside`, then through those that may be repeated, and no further."""
    used: set[int] = set()
    repeated: set[int] = set()
    leaves: dict[core.Var, None] = {}
    todo: list[Any] = list(roots)
    seen: set[core.Var] = set()
    while todo:
        v = todo.pop()
        if isinstance(v, core.Literal) or v in seen:
            continue
        seen.add(v)
        if v in inside:
            used.add(id(inside[v]))
            todo.extend(inside[v].invars)
        elif repeatable and v in repeatable:
            repeated.add(id(repeatable[v]))
            todo.extend(repeatable[v].invars)
        else:
            leaves[v] = None
    eqns = tuple(eqn for eqn in order if id(eqn) in used | repeated)
    return Cone(eqns, tuple(roots), tuple(leaves), frozenset(repeated))


def _batched_inputs(eqn: core.JaxprEqn, depends: Set[core.Var]) -> list[core.Var]:
    return [v for v in eqn.invars if isinstance(v, core.Var) and v in depends]
