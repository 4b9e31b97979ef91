"""Metrics at the place where a gradient is produced: beside the sums of statistics, which keep the cheaper reductions.

| wanted | of a matrix product Sᵀ R | of an embedding | of anything else |
|---|---|---|---|
| ⟨g, g⟩ | the reductions for norms | theirs | theirs |
| ⟨g, v⟩ | Σ (S V) ∘ R: no gradient | rows of V at the ids | one gradient at a time; of a sum, each of its terms |
| other functions of g | one gradient at a time | one at a time | one at a time |
| ⟨g_i, g_j⟩ | a tile of all gradients at a time | rows of equal ids | as many gradients as fit, each against them |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.per_example.engine import jaxprs
from perex_t5x.per_example.metrics import Metric, Products
from perex_t5x.per_example.reductions.dense import Product
from perex_t5x.per_example.reductions.reducer import (
    ReductionResult,
    ReductionSite,
    ReductionSpec,
    at_least_f32,
    over_examples,
)
from perex_t5x.per_example.reductions.sparse import Rows
from perex_t5x.per_example.reductions.terms import Term, terms

# Of gradients that are held at a time for a Gram matrix, besides what a single one takes.
GRAM_BYTES = 32 * 2**20


def with_metrics(site: ReductionSite, result: ReductionResult) -> ReductionResult:
    """`result` with the metrics of the gradients produced at `site`."""
    context = site.context
    if not context.metrics:
        return result
    if not any(site.batched):
        return of_shared(context, site.spec, site.gradient(*site.leaves), result)
    found: dict[str, jax.Array] = {}
    rest: list[Metric] = []
    for m in context.metrics:
        if m.pairwise:
            found[m.name] = _gram(site)
        elif isinstance(m.reduce, Products):
            value = _products(site, m, result.squares_N)
            if value is None:
                rest.append(m)
            else:
                found[m.name] = value
        else:
            rest.append(m)
    found |= _one_at_a_time(site, rest)
    # One gradient, or the Gram matrix's tile, exists meanwhile.
    size = jaxprs.size_of(site.node.root) * 4
    held = max(size if rest else 0, GRAM_BYTES if any(m.pairwise for m in context.metrics) else 0)
    held = min(held, context.num_examples * size)
    return dataclasses.replace(result, metrics=found, transient_bytes=max(result.transient_bytes, held))


def of_all(metrics: Sequence[Metric], g_Nx: jax.Array, parameter: str, operands: Any) -> dict[str, jax.Array]:
    """From the gradients of all examples."""
    flat = g_Nx.reshape(g_Nx.shape[0], -1)
    return {m.name: _inner(flat, flat) if m.pairwise else jax.vmap(m.bound(parameter, operands))(g_Nx) for m in metrics}


def of_shared(context: Any, spec: ReductionSpec, g: jax.Array, result: ReductionResult) -> ReductionResult:
    """Of a gradient that is the same for all examples."""
    if not context.metrics:
        return result
    alone = of_all(context.metrics, g[None], spec.parameter, spec.operands)
    n = context.num_examples
    found = {
        m.name: jaxprs.for_all(jaxprs.for_all(alone[m.name][0, 0], n) if m.pairwise else alone[m.name][0], n)
        for m in context.metrics
    }
    return dataclasses.replace(result, metrics=found)


def of_value(
    context: Any, spec: ReductionSpec, value: Any, is_batched: bool, result: ReductionResult
) -> ReductionResult:
    """Of a gradient that exists already, for all examples or the same for all of them."""
    if not context.metrics:
        return result
    g = at_least_f32(spec.pre(jnp.asarray(value)))
    if not is_batched:
        return of_shared(context, spec, g, result)
    return dataclasses.replace(result, metrics=of_all(context.metrics, g, spec.parameter, spec.operands))


def _inner(a_Nx: jax.Array, b_Mx: jax.Array) -> jax.Array:
    return jnp.einsum("nx,mx->nm", a_Nx, b_Mx, precision="highest")


# --- inner products ---------------------------------------------------------------------------------------------------


def _products(site: ReductionSite, metric: Metric, squares: jax.Array | None) -> jax.Array | None:
    """[N, ...] as `Products` of whole gradients would be; None where a gradient has to be formed."""
    wanted = metric.reduce
    assert isinstance(wanted, Products)
    parts = []
    if wanted.square:
        assert squares is not None, "`ReductionContext.norms` is set where a metric needs them"
        parts.append(squares)
    if wanted.inner or wanted.operand_square:
        v = site.spec.operands[metric.operands[0]]
        v = v.astype(jnp.promote_types(v.dtype, jnp.float32))
        if wanted.inner:
            inner = _inner_products(site, v)
            if inner is None:
                return None
            parts.append(inner)
        if wanted.operand_square:
            parts.append(jaxprs.for_all(jnp.sum(jnp.square(v)), site.context.num_examples))
    dtype = jnp.result_type(*parts)
    return jnp.stack([x.astype(dtype) for x in parts], axis=1)


def _inner_products(site: ReductionSite, v: jax.Array) -> jax.Array | None:
    """⟨g_n, v⟩, a sum over the contributions to g_n."""
    contributions = terms(site.node)
    if contributions is None:
        return None
    found = []
    for term in contributions:
        make = {"dot_general": _of_product, "scatter-add": _of_rows}.get(term.eqn.primitive.name)
        value = None if make is None else make(site, term, v)
        if value is None:
            return None
        found.append(value)
    return sum(found[1:], found[0])


def _of_product(site: ReductionSite, term: Term, v: jax.Array) -> jax.Array | None:
    """Σ_t (s_t V) · r_t: two products with activations instead of one for each example's gradient."""
    spec = dataclasses.replace(site.spec, pre=lambda x: site.spec.pre(term.unary(x)))
    if not all(x in site.node.leaves for x in term.eqn.invars):
        return None
    product = Product.of(term.eqn, site, spec)
    if product is None or not product.has_wide_range:
        return None
    before = jaxprs.struct(jax.typeof(v), product.shape)
    (v,) = jax.linear_transpose(term.moved, before)(v)  # moved back, which for a permutation is its transpose
    s_NxTxI, r_NxTxJ = (x.astype(product.dtype) for x in product.matrices())
    v_IxJ = v.reshape(s_NxTxI.shape[2], r_NxTxJ.shape[2]).astype(product.dtype)
    precision = product.eqn.params["precision"]
    # The product that gives the smaller array.
    if v_IxJ.shape[0] < v_IxJ.shape[1]:
        s_NxTxI, r_NxTxJ, v_IxJ = r_NxTxJ, s_NxTxI, v_IxJ.T
    moved_NxTxJ = jnp.einsum("nti,ij->ntj", s_NxTxI, v_IxJ, precision=_in_order(precision))
    return jnp.sum(moved_NxTxJ * r_NxTxJ, axis=(1, 2)) * product.factor.astype(product.dtype)


def _in_order(precision: Any) -> Any:
    """Of a product of other operands: one precision for both, the higher."""
    return max(precision) if isinstance(precision, tuple) else precision


def _of_rows(site: ReductionSite, term: Term, v: jax.Array) -> jax.Array | None:
    rows = Rows.of(site, [term]) if all(x in site.node.leaves for x in term.eqn.invars[1:]) else None
    if rows is None:
        return None
    v_NxTxD = v.reshape(len(v), -1).at[rows.ids_NxT].get(mode="fill", fill_value=0)
    inner_N = jnp.sum(v_NxTxD * rows.sums_NxTxD, axis=(1, 2))
    return inner_N if rows.absent_NxD is None else inner_N + jnp.sum(rows.absent_NxD, axis=1)


# --- any function of a whole gradient ---------------------------------------------------------------------------------


def _of_one(site: ReductionSite) -> tuple[list[Any], Callable[[Sequence[Any]], jax.Array]]:
    """The leaves that differ by example, and the gradient from one example's of them."""
    rows = [leaf for leaf, b in zip(site.leaves, site.batched, strict=True) if b]

    def gradient(rows: Sequence[Any]) -> jax.Array:
        row = iter(rows)
        return site.gradient(*(next(row) if b else leaf for leaf, b in zip(site.leaves, site.batched, strict=True)))

    return rows, gradient


def _one_at_a_time(site: ReductionSite, metrics: Sequence[Metric]) -> dict[str, jax.Array]:
    if not metrics:
        return {}
    rows, gradient = _of_one(site)
    functions = {m.name: m.bound(site.spec.parameter, dict(site.spec.operands)) for m in metrics}

    def step(_: None, row: Sequence[Any]) -> tuple[None, dict[str, jax.Array]]:
        g = gradient(row)
        return None, {name: reduce(g) for name, reduce in functions.items()}

    return over_examples(step, None, rows, site.context.num_examples)[1]


# --- pairs of examples ------------------------------------------------------------------------------------------------


def _gram(site: ReductionSite) -> jax.Array:
    n = site.context.num_examples
    rows, gradient = _of_one(site)
    g = jax.eval_shape(gradient, [jaxprs.struct(jax.typeof(x), x.shape[1:]) for x in rows])
    size = math.prod(g.shape) * g.dtype.itemsize
    if n * size <= GRAM_BYTES:
        g_Nx = jax.vmap(gradient)(rows).reshape(n, -1)
        return _inner(g_Nx, g_Nx)
    eqn = site.single("dot_general")
    product = None if eqn is None else Product.of(eqn, site, site.spec)
    if product is not None and product.has_wide_range:
        return _gram_of_products(product)
    only = terms(site.node)
    if only and all(term.eqn.primitive.name == "scatter-add" for term in only):
        embedding = Rows.of(site, only)
        if embedding is not None:
            return _gram_of_rows(embedding)
    return _gram_of_blocks(rows, gradient, n, size)


def _gram_of_products(product: Product) -> jax.Array:
    s_NxTxI, r_NxTxJ = (x.astype(product.dtype) for x in product.matrices())
    n, length, width = s_NxTxI.shape
    factor = jnp.square(product.factor.astype(product.dtype))
    if length == 1:  # ⟨s_i r_iᵀ, s_j r_jᵀ⟩ = (s_i · s_j)(r_i · r_j)
        return _inner(s_NxTxI[:, 0], s_NxTxI[:, 0]) * _inner(r_NxTxJ[:, 0], r_NxTxJ[:, 0]) * factor
    tile = max(GRAM_BYTES // (n * r_NxTxJ.shape[2] * product.dtype.itemsize), 1)
    count = -(-width // tile)
    # Rows that the last tile lacks are zeros, and add nothing.
    s_NxTxI = jnp.pad(s_NxTxI, ((0, 0), (0, 0), (0, count * tile - width)))
    precision = _in_order(product.eqn.params["precision"])

    def add(k: Any, total: jax.Array) -> jax.Array:
        mine = jax.lax.dynamic_slice_in_dim(s_NxTxI, k * tile, tile, axis=2)
        g_Nx = jnp.einsum("nti,ntj->nij", mine, r_NxTxJ, precision=precision).reshape(n, -1)
        return total + _inner(g_Nx, g_Nx)

    total = jax.lax.fori_loop(0, count, add, product.context.zeros((n, n), product.dtype))
    return total * factor


def _gram_of_rows(rows: Rows) -> jax.Array:
    """Σ over pairs of positions with the same id of the product of their rows."""

    def against_all(one: tuple[jax.Array, jax.Array]) -> jax.Array:
        ids_T, rows_TxD = one
        products_TxNxU = jnp.einsum("td,nud->tnu", rows_TxD, rows.sums_NxTxD, precision="highest")
        same = ids_T[:, None, None] == rows.ids_NxT[None]
        return jnp.sum(jnp.where(same, products_TxNxU, 0.0), axis=(0, 2))

    gram_NxN = jax.lax.map(against_all, (rows.ids_NxT, rows.sums_NxTxD))
    if rows.absent_NxD is None:
        return gram_NxN
    absent_N = jnp.sum(rows.absent_NxD, axis=1)  # 0 or NaN, whatever it is multiplied by
    return gram_NxN + absent_N[:, None] + absent_N[None]


def _gram_of_blocks(rows: list[Any], gradient: Callable[..., jax.Array], n: int, size: int) -> jax.Array:
    """As many gradients as fit are held, and each example's is formed again to meet them."""
    most = max(GRAM_BYTES // size, 1)
    block = max(d for d in range(1, n + 1) if n % d == 0 and d <= most)
    flat = lambda row: gradient(row).reshape(-1)  # noqa: E731

    def one_block(mine: list[Any]) -> jax.Array:
        g_Bx = jax.lax.map(flat, mine)
        return jax.lax.map(lambda row: _inner(g_Bx, flat(row)[None])[:, 0], rows).T  # [B, N]

    blocks = [x.reshape(n // block, block, *x.shape[1:]) for x in rows]
    return jax.lax.map(one_block, blocks).reshape(n, n)
