"""unit='token': the unit is one application position of a weight, not one example.

A matrix product's gradient is Σ_p s_p r_pᵀ over positions p (tokens of all examples). Each term is an outer product, so a
factorable φ gives Σ_p φ(s_p r_pᵀ) = φ(S)ᵀ φ(R): one more matrix product. A bias's unit is its cotangent at one position, an
embedding's the row of one token. Where a weight is applied in several places (a tied embedding), every place counts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.per_example.engine import jaxprs
from perex_t5x.per_example.reductions.reducer import ReductionResult, ReductionSite, at_least_f32, column, plus
from perex_t5x.per_example.reductions.terms import Term, terms


def per_token(site: ReductionSite) -> ReductionResult | None:
    """The sums over positions, unscaled, or None where the producer has no positions."""
    context = site.context
    contributions = terms(site.node)
    if contributions is None:
        return None
    parts = [part for term in contributions if (part := _one_term(site, term)) is not None]
    if len(parts) < len(contributions):
        return None
    num_statistics = len(parts[0][0])
    sums: list[Any] = [
        sum(term.moved(p[0][k]) for term, p in zip(contributions, parts, strict=True)) for k in range(num_statistics)
    ]
    squares = None
    # Norms are of the examples' gradients even here: non_finite='skip' asks for them to leave whole examples out.
    if context.norms:
        in_axes = tuple(0 if b else None for b in site.batched)
        squares = jax.lax.map(
            lambda i: jnp.sum(
                jnp.square(site.gradient(*(x[i] if a == 0 else x for x, a in zip(site.leaves, in_axes, strict=True))))
            ),
            jnp.arange(context.num_examples),
        )
    positions_N: Any = sum(p[1] for p in parts)
    return ReductionResult(plus(site.spec.initial, sums), squares, "per token", 0, positions_N=positions_N)


def _one_term(site: ReductionSite, term: Term) -> tuple[list[jax.Array], jax.Array] | None:
    """(sums per statistic, real positions per example) of one contribution."""
    make = {"dot_general": _product, "reduce_sum": _sum, "scatter-add": _rows}[term.eqn.primitive.name]
    return make(site, term)


def _scaled(site: ReductionSite, term: Term, x: jax.Array) -> jax.Array:
    """Times the linear factor of casts, signs and scalings between the contraction and φ."""
    factor = at_least_f32(site.spec.pre(term.unary(jnp.ones((), jaxprs.dtype_of(term.eqn.outvars[0])))))
    return x * factor.astype(x.dtype)


def _product(site: ReductionSite, term: Term) -> tuple[list[jax.Array], jax.Array] | None:
    context = site.context
    (contract_l, contract_r), (batch_l, _) = term.eqn.params["dimension_numbers"]
    if batch_l or not all(v in site.node.leaves for v in term.eqn.invars):
        return None
    left, right = (at_least_f32(site.for_all(v)) for v in term.eqn.invars)
    left = _scaled(site, term, left)
    weight = column(context.weights_N, left.ndim)
    sums = []
    for s in context.statistics:
        phi_l, phi_r = context.weighted(s.fn(left), weight), s.fn(right)
        if weight is not None:
            # On both sides: 0 · NaN would bring a left-out example's NaN back.
            phi_r = jnp.where(column(weight, right.ndim) == 0, jnp.zeros_like(phi_r), phi_r)
        sums.append(jaxprs.contract_leading(term.eqn, [phi_l, phi_r], preferred_element_type=None))
    real = _nonzero(left, contract_l) & _nonzero(right, contract_r)
    return sums, _count(real)


def _count(real: jax.Array) -> jax.Array:
    """Real positions per example."""
    return jnp.sum(real, axis=tuple(range(1, real.ndim)))


def _nonzero(x: jax.Array, positions: tuple[int, ...]) -> jax.Array:
    """[N, positions...]: where anything is not zero.

    Padding cannot be told from its token here, but by what it does: a position whose gradient is zero throughout.
    """
    other = tuple(a for a in range(1, x.ndim) if a - 1 not in positions)
    kept = [a for a in range(x.ndim - 1) if a in positions]
    real = jnp.any(x != 0, axis=other)
    # In the order of `positions`, so that both operands of a product can be compared.
    return real.transpose(0, *(1 + kept.index(a) for a in positions))


def _sum(site: ReductionSite, term: Term) -> tuple[list[jax.Array], jax.Array]:
    context = site.context
    x = _scaled(site, term, at_least_f32(site.for_all(term.eqn.invars[0])))
    axes = tuple(a + 1 for a in term.eqn.params["axes"])
    weight = column(context.weights_N, x.ndim)
    sums = [jnp.sum(context.weighted(s.fn(x), weight), axis=(0, *axes)) for s in context.statistics]
    return sums, _count(_nonzero(x, tuple(term.eqn.params["axes"])))


def _rows(site: ReductionSite, term: Term) -> tuple[list[jax.Array], jax.Array] | None:
    context = site.context
    operand, ids, updates = term.eqn.invars
    if not all(v in site.node.leaves for v in (ids, updates)):
        return None
    window = term.eqn.params["dimension_numbers"].update_window_dims
    rows = _scaled(site, term, at_least_f32(site.for_all(updates)))
    all_ids = site.for_all(ids)
    weight = column(context.weights_N, rows.ndim)
    sums = []
    for s in context.statistics:
        phi = context.weighted(s.fn(rows), weight)

        def add(total: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return jaxprs.bind(term.eqn, [total, *x])[0], None

        # The loss's own scatter, into our sums, so that its treatment of ids out of range is the same.
        begin = context.zeros(jaxprs.shape_of(operand), phi.dtype)
        if term.times_zero is not None:
            absent = 0 * at_least_f32(site.for_all(term.times_zero))
            weighted = context.weighted(s.fn(absent), column(context.weights_N, absent.ndim))
            begin = begin + jnp.sum(weighted, axis=0, keepdims=True)
        sums.append(jax.lax.scan(add, begin, (all_ids, phi))[0])
    positions = tuple(a for a in range(rows.ndim - 1) if a not in window)
    return sums, _count(_nonzero(rows, positions))
