"""The rewrites, in their order: programs in which gradients can be followed to where they are produced.

Every rewrite keeps the program's results. It only exposes what the walk back of `engine.plan` can follow, or spares the
compiler a shape it handles badly:

- A constraint on where a gradient lies is left out.
- A sum over axes of size one drops them; values lose such axes where nothing else depends on it (`unit_axes`).
- A `cond` whose predicate depends on the example becomes both branches and a selection.
- A selection between a value and itself is that value.
- Elementwise operations after a scan or remat, with a scalar or a shared array, move inside (`scans`).
- A remat region whose gradients are used further is replaced by its body (`scans`).
- A scan that adds gradients up in its carry, or makes such as are used further, is split in two, and so is a `cond`
  (`extraction`).
- Matrix products lose padding, transposes, splits and selections (`products`).
- Products with one-hot ids become scatter-adds, and what follows those moves into their ids and rows (`embeddings`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core.primitives import squeeze_p

from perex_t5x.per_example.engine import jaxprs, primitives
from perex_t5x.per_example.engine.rewrites.embeddings import after_scatters, one_hot_products
from perex_t5x.per_example.engine.rewrites.extraction import gradients_out_of_branches, gradients_out_of_scans
from perex_t5x.per_example.engine.rewrites.products import (
    paddings,
    selections_of_products,
    splits,
    transposes,
    unit_contractions,
)
from perex_t5x.per_example.engine.rewrites.scans import opened_remats, operations_into_bodies
from perex_t5x.per_example.engine.rewrites.tools import Rule, rewritten, tails_of
from perex_t5x.per_example.engine.rewrites.unit_axes import without_unit_axes


def rewrite(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: Iterable[int]) -> core.ClosedJaxpr:
    """Applies the rewrites, each where the walk back from a wanted result (by index) meets its place.

    Args:
      program: of one example, calls inlined.
      batched: which of its arguments depend on the example.
      wanted: the results that will be reduced.
    """
    wanted = tuple(wanted)
    # First what may hide a producer from the others, then loops, whose bodies become producers, then the producers.
    for one, about in (
        (_constraints, primitives.CONSTRAINTS),
        (_sums_of_one, {"reduce_sum"}),
        (_selections, {"cond"}),
        (_equal_cases, {"select_n"}),
        (operations_into_bodies, {"scan", *primitives.REMAT}),
        (opened_remats, primitives.REMAT),
        (gradients_out_of_branches, {"cond"}),
        (gradients_out_of_scans, {"scan"}),
        (paddings, {"pad"}),
        (transposes, {"transpose"}),
        (splits, {"split"}),
        (selections_of_products, {"select_n"}),
        (unit_contractions, {"dot_general"}),
        (one_hot_products, {"dot_general"}),
        (after_scatters, {"scatter-add"}),
    ):
        # Looked for first: to find where gradients come from takes longer.
        if any(eqn.primitive.name in about for eqn in program.jaxpr.eqns):
            program = one(program, batched, wanted)
    # Not the gradients' own tails: reductions recognise them by their shapes.
    return without_unit_axes(program, tails_of(program.jaxpr, wanted))


# --- constraints ------------------------------------------------------------------------------------------------------


def _constraints(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """Where a gradient lies is not what it is, and sums over examples have shardings of their own.

    Flax models under logical axis rules, T5X's among them, constrain every parameter where they use it, and thereby its
    cotangent: the last equation of each gradient.
    """
    del batched
    tails = tails_of(program.jaxpr, wanted)
    rules = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name in primitives.CONSTRAINTS and eqn.outvars[0] in tails:
            rules[id(eqn)] = Rule(functools.partial(_itself, eqn.invars[0]), eqn.invars[:1])
    return rewritten(program, rules)


# --- sums that add nothing --------------------------------------------------------------------------------------------


def _sums_of_one(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """A sum over axes of size one drops them.

    It adds nothing up, but it looks like a contraction: the walk back would end at it, one equation before the product or
    the sum over positions that really makes the gradient.
    """
    del batched, wanted
    rules = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "reduce_sum" and jaxprs.size_of(eqn.invars[0]) == jaxprs.size_of(eqn.outvars[0]):
            rules[id(eqn)] = [eqn.replace(primitive=squeeze_p, params={"dimensions": tuple(eqn.params["axes"])})]
    return rewritten(program, rules)


# --- cond on data -----------------------------------------------------------------------------------------------------


def _selections(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """A `cond` whose predicate depends on the example becomes both branches and a selection.

    That is what `jax.vmap` would make of it: examples that run together cannot take different branches. Done here, the
    branches' equations are in the open, and the walk back can pass the selection.
    """
    tails = tails_of(program.jaxpr, wanted)
    depends = jaxprs.dependent(program.jaxpr, batched)
    rules = {}
    for eqn in program.jaxpr.eqns:
        predicate = eqn.invars[0] if eqn.primitive.name == "cond" else None
        if isinstance(predicate, core.Var) and predicate in depends and any(v in tails for v in eqn.outvars):
            rules[id(eqn)] = Rule(_select)
    return rewritten(program, rules)


def _equal_cases(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """select(p, w, w): w. So `jax.vmap` hands a parameter on to a branch: shared by examples before, but not after."""
    del batched, wanted
    sources = jaxprs.source_of(program.jaxpr)

    def value(v: Any) -> Any:
        # Differentiation is over: what stops gradients is the identity.
        while isinstance(v, core.Var) and v in sources and sources[v][0].primitive.name in ("stop_gradient", "copy"):
            v = sources[v][0].invars[0]
        return v

    rules = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "select_n":
            cases = [value(v) for v in eqn.invars[1:]]
            if isinstance(cases[0], core.Var) and all(v is cases[0] for v in cases):
                rules[id(eqn)] = Rule(functools.partial(_itself, cases[0]), cases[:1])
    return rewritten(program, rules)


def _itself(v: core.Var, eqn: core.JaxprEqn, arguments: Sequence[Any], read: Any) -> list[Any]:
    del eqn, arguments
    return [read(v)]


def _select(eqn: core.JaxprEqn, arguments: Sequence[Any], read: Any) -> list[Any]:
    del read
    index, *operands = arguments
    branches = eqn.params["branches"]
    # As `cond` does with an index out of range.
    index = jnp.clip(index.astype(jnp.int32), 0, len(branches) - 1)
    results = [jaxprs.evaluate(b.jaxpr, b.consts, operands) for b in branches]
    which = index.astype(bool) if len(branches) == 2 else index
    return [jax.lax.select_n(which, *values) for values in zip(*results, strict=True)]
