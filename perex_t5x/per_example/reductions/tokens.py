"""unit='token': the unit is one application position of a weight, not one example.

A matrix product's gradient is Σ_p s_p r_pᵀ over positions p (tokens of all examples). Each term is an outer product, so a
factorable φ gives Σ_p φ(s_p r_pᵀ) = φ(S)ᵀ φ(R): one more matrix product. A bias's unit is its cotangent at one position, an
embedding's the row of one token. Where a weight is applied in several places (a tied embedding), every place counts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from perex_t5x.per_example.engine import jaxprs
from perex_t5x.per_example.reductions.reducer import Reduced, Reducer, Site, at_least_f32, plus
from perex_t5x.per_example.reductions.terms import Term, terms


def per_token(reducer: Reducer, site: Site) -> Reduced | None:
    """The sums over positions, unscaled, or None where the producer has no positions."""
    found = terms(site.node)
    if found is None:
        return None
    parts = [_one_term(reducer, site, term) for term in found]
    if any(p is None for p in parts):
        return None
    sums = [sum(term.moved(p[0][k]) for term, p in zip(found, parts, strict=True)) for k in range(len(parts[0][0]))]
    squares = None
    if reducer.norms:  # of the examples' gradients: asked for to leave examples out
        in_axes = tuple(0 if b else None for b in site.batched)
        squares = jax.lax.map(
            lambda i: jnp.sum(
                jnp.square(site.gradient(*(x[i] if a == 0 else x for x, a in zip(site.leaves, in_axes, strict=True))))
            ),
            jnp.arange(reducer.num_examples),
        )
    positions_N = sum(p[1] for p in parts)
    return Reduced(plus(site.initial, sums), squares, "per token", 0, positions_N=positions_N)


def _one_term(reducer: Reducer, site: Site, term: Term) -> tuple[list[jax.Array], jax.Array] | None:
    """(sums per statistic, real positions per example) of one contribution."""
    name = term.eqn.primitive.name
    make = {"dot_general": _product, "reduce_sum": _sum, "scatter-add": _rows}[name]
    return make(reducer, site, term)


def _batched(reducer: Reducer, site: Site, v: object) -> jax.Array:
    value, batched = site.value(v)
    return value if batched else jaxprs.for_all(value, reducer.num_examples)


def _factor(site: Site, term: Term) -> jax.Array:
    """The linear factor of casts, signs and scalings between the contraction and φ."""
    return at_least_f32(site.pre(term.unary(jnp.ones((), term.eqn.outvars[0].aval.dtype))))


def _product(reducer: Reducer, site: Site, term: Term) -> tuple[list[jax.Array], jax.Array] | None:
    (contract_l, contract_r), (batch_l, _) = term.eqn.params["dimension_numbers"]
    if batch_l or not all(v in site.node.leaves for v in term.eqn.invars):
        return None
    left, right = (at_least_f32(_batched(reducer, site, v)) for v in term.eqn.invars)
    left = left * _factor(site, term).astype(left.dtype)
    weight = reducer.column(reducer.weights_N, left.ndim)
    sums = []
    for s in reducer.statistics:
        phi_l, phi_r = reducer.weighted(s.fn(left), weight), s.fn(right)
        if weight is not None:
            phi_r = jnp.where(reducer.column(weight, right.ndim) == 0, jnp.zeros_like(phi_r), phi_r)
        sums.append(jaxprs.contract_leading(term.eqn, [phi_l, phi_r], preferred_element_type=None))
    real = _nonzero(left, contract_l) & _nonzero(right, contract_r)
    return sums, jnp.sum(real, axis=tuple(range(1, real.ndim)))


def _nonzero(x: jax.Array, positions: tuple[int, ...]) -> jax.Array:
    """[N, positions...]: where anything is not zero."""
    other = tuple(a for a in range(1, x.ndim) if a - 1 not in positions)
    kept = [a for a in range(x.ndim - 1) if a in positions]
    found = jnp.any(x != 0, axis=other)
    return found.transpose(0, *(1 + kept.index(a) for a in positions))


def _sum(reducer: Reducer, site: Site, term: Term) -> tuple[list[jax.Array], jax.Array]:
    x = at_least_f32(_batched(reducer, site, term.eqn.invars[0]))
    x = x * _factor(site, term).astype(x.dtype)
    axes = tuple(a + 1 for a in term.eqn.params["axes"])
    weight = reducer.column(reducer.weights_N, x.ndim)
    sums = [jnp.sum(reducer.weighted(s.fn(x), weight), axis=(0, *axes)) for s in reducer.statistics]
    real = _nonzero(x, tuple(term.eqn.params["axes"]))
    return sums, jnp.sum(real, axis=tuple(range(1, real.ndim)))


def _rows(reducer: Reducer, site: Site, term: Term) -> tuple[list[jax.Array], jax.Array] | None:
    operand, ids, updates = term.eqn.invars
    if not all(v in site.node.leaves for v in (ids, updates)):
        return None
    window = term.eqn.params["dimension_numbers"].update_window_dims
    rows = at_least_f32(_batched(reducer, site, updates))
    rows = rows * _factor(site, term).astype(rows.dtype)
    all_ids = _batched(reducer, site, ids)
    weight = reducer.column(reducer.weights_N, rows.ndim)
    sums = []
    for s in reducer.statistics:
        phi = reducer.weighted(s.fn(rows), weight)

        def add(total: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return jaxprs.bind(term.eqn, [total, *x])[0], None

        sums.append(jax.lax.scan(add, reducer.zeros(operand.aval.shape, phi.dtype), (all_ids, phi))[0])
    positions = tuple(a for a in range(rows.ndim - 1) if a not in window)
    real = _nonzero(rows, positions)
    return sums, jnp.sum(real, axis=tuple(range(1, real.ndim)))
