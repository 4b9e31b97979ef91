"""Reductions: how the gradients that one equation produces are reduced over examples. Selects one for each producer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from perex_t5x.per_example.engine import jaxprs
from perex_t5x.per_example.kernels import dispatch
from perex_t5x.per_example.reductions import dense, reducer, sparse, tokens, windows
from perex_t5x.per_example.reductions.reducer import ReductionResult, ReductionSite

# Tried in this order, the cheapest first; each returns None where it does not apply. All of them are exact, so the order
# changes time and memory, never the result.
REDUCTIONS = (dense.factored, sparse.sparse, sparse.sparse_plus_dense, dense.gram, dense.one_product_at_a_time)


def select_reduction(site: ReductionSite) -> ReductionResult:
    """Reduces the gradient produced at `site`, by the first reduction that applies."""
    return reducer.with_held(_first_applicable(site), site.node, site.context.num_examples)


def _first_applicable(site: ReductionSite) -> ReductionResult:
    if not any(site.batched):
        return reducer.shared(site.context, site.spec, site.gradient(*site.leaves))
    if site.context.unit == "token" and (result := tokens.per_token(site)):
        return result
    for reduction in REDUCTIONS:
        if result := reduction(site):
            return result
    example_size = sum(jaxprs.size_of(v) for v, b in zip(site.node.leaves, site.batched, strict=True) if b)
    # The leaves exist for all examples already: a gradient that is no larger than they are may, too, and one fused pass over
    # all examples beats a loop.
    if jaxprs.size_of(site.node.root) > example_size or site.node.one_at_a_time:
        return reducer.one_at_a_time(site)
    if any(windows.is_filter_gradient(eqn) for eqn in site.node.eqns):
        return _filter_gradient(site)
    return _all_at_once(site)


def _all_at_once(site: ReductionSite) -> ReductionResult:
    in_axes = tuple(0 if b else None for b in site.batched)
    # `windows.bind` is for one example at a time.
    g_Nx = jax.vmap(functools.partial(site.gradient, bind=jaxprs.bind), in_axes=in_axes)(*site.leaves)
    return reducer.all_at_once(site.context, g_Nx, "all at once", initial=site.spec.initial)


def _filter_gradient(site: ReductionSite) -> ReductionResult:
    """Of a small filter: on CPUs a loop, whose products are fast (`windows`) where convolutions of all examples are not."""
    results = {}

    def by(reduce: Callable[[ReductionSite], ReductionResult]) -> Callable[..., Any]:
        def sums(leaves: Sequence[Any]) -> Any:
            results[reduce] = result = reduce(dataclasses.replace(site, leaves=leaves))
            return result.raw, result.squares_N

        return sums

    raw, squares = jax.lax.platform_dependent(
        list(site.leaves), cpu=by(reducer.one_at_a_time), default=by(_all_at_once)
    )
    named = results[reducer.one_at_a_time if dispatch.platform() == "cpu" else _all_at_once]
    return dataclasses.replace(named, raw=raw, squares_N=squares)
