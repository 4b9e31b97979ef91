"""Metrics at the place where a gradient is produced: beside the sums of statistics, which keep the cheaper reductions.

| wanted | of a matrix product Sᵀ R | of an embedding | of anything else |
|---|---|---|---|
| ⟨g, g⟩ | the reductions for norms | theirs | theirs |
| ⟨g, v⟩ | Σ (S V) ∘ R: no gradient | rows of V at the ids | one gradient at a time; of a sum, each of its terms |
| other functions of g | one gradient at a time | one at a time | one at a time |
| ⟨g_i, g_j⟩ | a tile of all gradients at a time | rows of equal ids | as many gradients as fit, each against them |

Of pairs, a device with N of M examples computes N rows: what the others' gradients are made of is gathered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.per_example.engine import jaxprs, shard_map
from perex_t5x.per_example.metrics import Metric, Products
from perex_t5x.per_example.reductions.dense import Product
from perex_t5x.per_example.reductions.reducer import (
    ReductionContext,
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


def of_all(context: ReductionContext, g_Nx: jax.Array, parameter: str, operands: Any) -> dict[str, jax.Array]:
    """From the gradients of all examples."""

    def one(m: Metric) -> jax.Array:
        if not m.pairwise:
            return jax.vmap(m.bound(parameter, operands))(g_Nx)
        flat = g_Nx.reshape(g_Nx.shape[0], -1)
        return _inner(flat, _of_every_device(context, flat))

    return {m.name: one(m) for m in context.metrics}


def of_shared(context: Any, spec: ReductionSpec, g: jax.Array, result: ReductionResult) -> ReductionResult:
    """Of a gradient that is the same for all examples."""
    if not context.metrics:
        return result
    alone, n = of_all(context, g[None], spec.parameter, spec.operands), context.num_examples
    # A pairwise one has an entry for each device: devices may have different gradients.
    rows = {m.name: jnp.repeat(alone[m.name][0], n) if m.pairwise else alone[m.name][0] for m in context.metrics}
    return dataclasses.replace(result, metrics={name: jaxprs.for_all(row, n) for name, row in rows.items()})


def of_value(
    context: Any, spec: ReductionSpec, value: Any, is_batched: bool, result: ReductionResult
) -> ReductionResult:
    """Of a gradient that exists already, for all examples or the same for all of them."""
    if not context.metrics:
        return result
    g = at_least_f32(spec.pre(jnp.asarray(value)))
    if not is_batched:
        return of_shared(context, spec, g, result)
    return dataclasses.replace(result, metrics=of_all(context, g, spec.parameter, spec.operands))


def _of_every_device(context: ReductionContext, x_Nx: Any) -> Any:
    """[M, ...]: of all devices that share the batch, in the order of their examples."""
    axes = context.data_axes
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axes, tiled=True), x_Nx) if axes else x_Nx


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
    """[N, M]: this device's examples with those of all devices."""
    context = site.context
    n, num_all = context.num_examples, context.num_examples * shard_map.num_devices(context.data_axes)
    rows, gradient = _of_one(site)
    g = jax.eval_shape(gradient, [jaxprs.struct(jax.typeof(x), x.shape[1:]) for x in rows])
    size = math.prod(g.shape) * g.dtype.itemsize
    if num_all * size <= GRAM_BYTES:
        g_Nx = jax.vmap(gradient)(rows).reshape(n, -1)
        return _inner(g_Nx, _of_every_device(context, g_Nx))
    eqn = site.single("dot_general")
    product = None if eqn is None else Product.of(eqn, site, site.spec)
    if product is not None and product.has_wide_range:
        return _gram_of_products(product)
    only = terms(site.node)
    if only and all(term.eqn.primitive.name == "scatter-add" for term in only):
        embedding = Rows.of(site, only)
        if embedding is not None:
            return _gram_of_rows(context, embedding)
    return _gram_of_blocks(rows, _of_every_device(context, rows), gradient, n, size)


def _gram_of_products(product: Product) -> jax.Array:
    s_NxTxI, r_NxTxJ = (x.astype(product.dtype) for x in product.matrices())
    factor = jnp.square(product.factor.astype(product.dtype))
    s_MxTxI, r_MxTxJ = _of_every_device(product.context, (s_NxTxI, r_NxTxJ))
    if product.length == 1:  # ⟨s_i r_iᵀ, s_j r_jᵀ⟩ = (s_i · s_j)(r_i · r_j)
        return _inner(s_NxTxI[:, 0], s_MxTxI[:, 0]) * _inner(r_NxTxJ[:, 0], r_MxTxJ[:, 0]) * factor
    num_all, _, width = s_MxTxI.shape
    tile = max(GRAM_BYTES // (num_all * r_MxTxJ.shape[2] * product.dtype.itemsize), 1)
    count = -(-width // tile)
    # Rows that the last tile lacks are zeros, and add nothing.
    s_MxTxI = jnp.pad(s_MxTxI, ((0, 0), (0, 0), (0, count * tile - width)))
    precision = _in_order(product.eqn.params["precision"])
    n, first = len(s_NxTxI), len(s_NxTxI) * shard_map.device_index(product.context.data_axes)

    def add(k: Any, total: jax.Array) -> jax.Array:
        here = jax.lax.dynamic_slice_in_dim(s_MxTxI, k * tile, tile, axis=2)
        g_Mx = jnp.einsum("nti,ntj->nij", here, r_MxTxJ, precision=precision).reshape(num_all, -1)
        return total + _inner(jax.lax.dynamic_slice_in_dim(g_Mx, first, n) if n < num_all else g_Mx, g_Mx)

    total = jax.lax.fori_loop(0, count, add, product.context.zeros((n, num_all), product.dtype))
    return total * factor


def _gram_of_rows(context: ReductionContext, rows: Rows) -> jax.Array:
    """Σ over pairs of positions with the same id of the product of their rows."""
    ids_MxU, sums_MxUxD = _of_every_device(context, (rows.ids_NxT, rows.sums_NxTxD))

    def against_all(one: tuple[jax.Array, jax.Array]) -> jax.Array:
        ids_T, rows_TxD = one
        products_TxMxU = jnp.einsum("td,mud->tmu", rows_TxD, sums_MxUxD, precision="highest")
        same = ids_T[:, None, None] == ids_MxU[None]
        return jnp.sum(jnp.where(same, products_TxMxU, 0.0), axis=(0, 2))

    gram_NxM = jax.lax.map(against_all, (rows.ids_NxT, rows.sums_NxTxD))
    if rows.absent_NxD is None:
        return gram_NxM
    absent_N = jnp.sum(rows.absent_NxD, axis=1)  # 0 or NaN, whatever it is multiplied by
    return gram_NxM + absent_N[:, None] + _of_every_device(context, absent_N)[None]


def _gram_of_blocks(
    rows: list[Any], every: list[Any], gradient: Callable[..., jax.Array], n: int, size: int
) -> jax.Array:
    """As many gradients as fit are held, and every example's is formed again to meet them."""
    most = max(GRAM_BYTES // size, 1)
    block = max(d for d in range(1, n + 1) if n % d == 0 and d <= most)
    flat = lambda row: gradient(row).reshape(-1)  # noqa: E731

    def one_block(mine: list[Any]) -> jax.Array:
        g_Bx = jax.lax.map(flat, mine)
        return jax.lax.map(lambda row: _inner(g_Bx, flat(row)[None])[:, 0], every).T  # [B, M]

    blocks = [x.reshape(n // block, block, *x.shape[1:]) for x in rows]
    return jax.lax.map(one_block, blocks).reshape(n, -1)
