"""Reductions for embeddings: scatter-adds of rows into one table, alone or with a matrix product (a tied embedding).

`engine.rewrites.embeddings` brings other forms (products with one-hot ids, a slice of a table) into this one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x.per_example.engine import jaxprs, plan
from perex_t5x.per_example.reductions.dense import Product, gram_squares, has_wide_range, reduce_product
from perex_t5x.per_example.reductions.reducer import ReductionContext, ReductionResult, ReductionSite, at_least_f32
from perex_t5x.per_example.reductions.terms import Term, terms
from perex_t5x.per_example.statistic import Statistic


@dataclasses.dataclass(frozen=True)
class Rows:
    """Per example: distinct ids, and the gradients of their rows: sums over all tokens of equal id.

    Unused places have the id `num_rows`, which no table has. A row has all of a table's axes but the first.
    """

    ids_NxT: jax.Array
    sums_NxTxD: jax.Array  # at least float32, after casts and signs
    absent_NxD: jax.Array | None  # gradients of all other rows: 0 or NaN; None: 0
    num_rows: int

    @classmethod
    def of(cls, site: ReductionSite, contributions: Sequence[Term]) -> Rows | None:
        """The rows of one or several scatter-adds into one table; None where one of them adds something else than rows."""
        updates = [_row_updates(site, term) for term in contributions]
        n, num_rows = site.context.num_examples, jaxprs.shape_of(site.node.root)[0]
        unary = contributions[0].unary
        if len(contributions) > 1:
            # Added up in float32 and rounded once, which a range as small as float16's does not allow.
            dtypes = {jaxprs.dtype_of(v) for t in contributions for v in (t.eqn.outvars[0], site.node.root)}
            if not all(has_wide_range(dtype) for dtype in dtypes):
                return None
            updates = [u and (u[0], at_least_f32(t.unary(u[1]))) for u, t in zip(updates, contributions, strict=True)]
            unary = lambda x: x.astype(jaxprs.dtype_of(site.node.root))  # noqa: E731
        if not all(updates):
            return None
        ids_NxT, rows_NxTxD = (jnp.concatenate(parts, axis=1) for parts in zip(*updates, strict=True))
        distinct_NxT, sums_NxTxD = _combine(ids_NxT, rows_NxTxD, num_rows)
        sums_NxTxD = at_least_f32(site.spec.pre(unary(sums_NxTxD)))
        absent_NxD = None
        for term in contributions:
            if term.times_zero is not None:
                absent = (0 * at_least_f32(site.for_all(term.times_zero))).reshape(n, -1)
                absent_NxD = absent if absent_NxD is None else absent_NxD + absent
        if absent_NxD is not None:
            sums_NxTxD = sums_NxTxD + absent_NxD[:, None]
        return cls(distinct_NxT, sums_NxTxD, absent_NxD, num_rows)

    @property
    def in_use(self) -> jax.Array:
        """[N, T]: places that have a row."""
        return self.ids_NxT < self.num_rows


def _row_updates(site: ReductionSite, term: Term) -> tuple[jax.Array, jax.Array] | None:
    """Of a scatter-add of whole rows: (ids [N, T], rows [N, T, D]); an id without a row in the table is `num_rows`."""
    operand, ids, updates = term.eqn.invars
    numbers, mode = term.eqn.params["dimension_numbers"], str(term.eqn.params["mode"])
    table, window = jaxprs.shape_of(operand), tuple(numbers.update_window_dims)
    inserted, indexed = tuple(numbers.inserted_window_dims), tuple(numbers.scatter_dims_to_operand_dims)
    # What is added at an index, by axis of the table: one row, and all of it.
    sizes = dict.fromkeys(inserted, 1)
    sizes.update(zip((a for a in range(len(table)) if a not in inserted), _at(updates, window), strict=False))
    is_whole_row = (
        not numbers.operand_batching_dims
        and table == jaxprs.shape_of(site.node.root)
        and 0 in indexed
        and [sizes.get(a) for a in range(len(table))] == [1, *table[1:]]
        # Lookups under `jax.vmap` have an index for the other axes, too: nothing but 0 is in range of it.
        and (indexed == (0,) or "CLIP" in mode or "PROMISE" in mode)
        and site.is_batched(ids)
        and not any(plan.is_permutation(eqn) for eqn in term.chain)
    )
    if not is_whole_row:
        return None
    n, num_rows = site.context.num_examples, table[0]
    ids_NxT = site.value(ids)[0]
    ids_NxT = ids_NxT if indexed == (0,) else ids_NxT[..., indexed.index(0)]
    ids_NxT = ids_NxT.reshape(n, math.prod(ids_NxT.shape[1:]))
    places = [a for a in range(len(jaxprs.shape_of(updates))) if a not in window]
    rows_NxTxD = site.for_all(updates).transpose(0, *(a + 1 for a in (*places, *window)))
    rows_NxTxD = rows_NxTxD.reshape(*ids_NxT.shape, math.prod(table[1:]))
    # Ids out of range: JAX's scatter either clips them or drops the row, and so must we.
    if "CLIP" in mode:
        ids_NxT = jnp.clip(ids_NxT, 0, num_rows - 1)
    elif ids_NxT.dtype.itemsize > 4 or ids_NxT.dtype == jnp.uint32:
        # Before the cast to int32, in which an id that it cannot hold could become a valid one.
        ids_NxT = jnp.where((ids_NxT >= 0) & (ids_NxT < num_rows), ids_NxT, num_rows)
    return ids_NxT.astype(jnp.int32), rows_NxTxD


def _at(v: Any, axes: Sequence[int]) -> list[int]:
    return [jaxprs.shape_of(v)[a] for a in axes]


def _combine(ids_NxT: jax.Array, rows_NxTxD: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Sums an example's rows of equal id: a token that occurs twice has one gradient row, and φ must see the sum."""
    # In `lax` throughout, and without `vmap`: the same in `jnp` takes many times as long to trace, most of it to allow for
    # negative indices.
    n, length = ids_NxT.shape
    if not length:
        return ids_NxT, rows_NxTxD
    order_NxT = jax.lax.broadcasted_iota(jnp.int32, ids_NxT.shape, 1)
    sorted_NxT, order_NxT = jax.lax.sort_key_val(ids_NxT, order_NxT, dimension=1)
    left, right = (jax.lax.slice_in_dim(sorted_NxT, i, length - 1 + i, axis=1) for i in (0, 1))
    changes = jax.lax.convert_element_type(jax.lax.ne(left, right), jnp.int32)
    segment_NxT = jax.lax.cumsum(jax.lax.pad(changes, np.int32(0), [(0, 0, 0), (1, 0, 0)]), axis=1)
    # Shapes are static: T places, of which the last are unused if ids repeat.
    rows_NxTxD = jax.lax.gather(
        rows_NxTxD,
        order_NxT.reshape(n, length, 1),
        jax.lax.GatherDimensionNumbers((2,), (1,), (1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,)),
        slice_sizes=(1, 1, rows_NxTxD.shape[2]),
        mode="promise_in_bounds",
    )
    at_NxTx1 = segment_NxT.reshape(n, length, 1)
    into = functools.partial(
        jax.lax.ScatterDimensionNumbers,
        inserted_window_dims=(1,),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    no_rows_NxTxD, no_ids_NxT = jax.lax.full_like(rows_NxTxD, 0), jax.lax.full_like(ids_NxT, num_rows)
    sums_NxTxD = jax.lax.scatter_add(no_rows_NxTxD, at_NxTx1, rows_NxTxD, into((2,)), mode="promise_in_bounds")
    distinct_NxT = jax.lax.scatter(no_ids_NxT, at_NxTx1, sorted_NxT, into(()), mode="promise_in_bounds")
    is_id, is_row = jax.lax.ge(distinct_NxT, jax.lax.full_like(distinct_NxT, 0)), jax.lax.lt(distinct_NxT, no_ids_NxT)
    valid_NxT = jax.lax.bitwise_and(is_id, is_row)
    valid_NxTxD = jax.lax.broadcast_in_dim(valid_NxT, sums_NxTxD.shape, (0, 1))
    return (
        jax.lax.select(valid_NxT, distinct_NxT, no_ids_NxT),
        jax.lax.select(valid_NxTxD, sums_NxTxD, no_rows_NxTxD),
    )


def _zero_at_zero(context: ReductionContext, dtype: jnp.dtype) -> list[bool] | None:
    """Of each φ, whether φ(0) = 0; None if some φ(0) is not finite (it could not be subtracted again) or not known."""
    try:  # of one with operands every element has its own
        at_zero = [1.0 if s.operands else _at_zero(s.fn, dtype) for s in context.statistics]
    except jax.errors.ConcretizationTypeError:  # φ closes over something traced
        return None
    return [z == 0 for z in at_zero] if np.all(np.isfinite(at_zero)) else None


@functools.lru_cache  # it is compiled, and asked for in every trace
def _at_zero(fn: Callable[[jax.Array], jax.Array], dtype: jnp.dtype) -> float:
    # Outside of any mesh: JAX cannot compute at once where axes are manual.
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return float(fn(jnp.asarray(np.zeros((), dtype))))


def _by_primitive(site: ReductionSite) -> dict[str, list[Term]]:
    """The producer's terms, if it is a sum of such."""
    by_name: dict[str, list[Term]] = {}
    for term in terms(site.node) or ():
        by_name.setdefault(term.eqn.primitive.name, []).append(term)
    return by_name


def sparse(site: ReductionSite) -> ReductionResult | None:
    """Rows of an embedding, used once or several times: Σ_n w_n φ(0) everywhere, and φ(row) − φ(0) at the ids in use."""
    context, spec = site.context, site.spec
    by_name = _by_primitive(site)
    if set(by_name) != {"scatter-add"}:
        return None
    rows = Rows.of(site, by_name["scatter-add"])
    if rows is None or (context.operands and rows.absent_NxD is not None):
        return None
    is_zero_at_zero = _zero_at_zero(context, rows.sums_NxTxD.dtype)
    if is_zero_at_zero is None:
        return None
    g_NxTxD = rows.sums_NxTxD
    shape = jaxprs.shape_of(site.node.root)
    scale, weight = context.columns(3, g_NxTxD.dtype)
    begin = context.begin(spec.initial, shape, g_NxTxD.dtype, spec.sharding)
    sums = []
    for s, total, zero_everywhere in zip(context.statistics, begin, is_zero_at_zero, strict=True):
        if s.operands:
            sums.append(_with_operands(context, s, rows, total))
            continue
        change = context.phi(s, g_NxTxD, scale)
        if rows.absent_NxD is not None:
            absent_Nx1xD = context.phi(s, rows.absent_NxD[:, None], scale)
            change = change - absent_Nx1xD
            total = total + jnp.sum(context.weighted(absent_Nx1xD, weight), axis=0).reshape(1, *shape[1:])
        elif not zero_everywhere:
            # A row that an example does not use has gradient 0, and cos(0) = 1, say, belongs to the sum.
            change = change - context.phi(s, jnp.zeros_like(g_NxTxD), None)
            absent_VxD = context.phi(s, context.zeros(total.shape, g_NxTxD.dtype), None)
            total = total + context.total_weight(total.dtype) * absent_VxD
        change = context.weighted(change, weight).reshape(*rows.ids_NxT.shape, *shape[1:])
        sums.append(total.at[rows.ids_NxT].add(change, mode="drop"))
    squares = None
    if context.norms:
        squares = jnp.sum(jnp.square(g_NxTxD), axis=(1, 2))
        if rows.absent_NxD is not None:
            squares = squares + jnp.sum(rows.absent_NxD, axis=1)
    return ReductionResult(sums, squares, "sparse", 0)


def _with_operands(context: ReductionContext, s: Statistic, rows: Rows, total: jax.Array) -> jax.Array:
    """Σ_n w_n φ(row) at the ids in use, and φ(0) at each row with the weight of the examples that do not use it.

    Nothing is subtracted again: what φ(0) is, infinite or NaN, is known to no one, and where all examples use a row it is in
    no sum.
    """
    n, _, width = rows.sums_NxTxD.shape
    shape, dtype = (*rows.ids_NxT.shape, *total.shape[1:]), rows.sums_NxTxD.dtype
    at = jnp.minimum(rows.ids_NxT, rows.num_rows - 1)
    here = context.seeing({name: x.reshape(rows.num_rows, width)[at] for name, x in context.operands.items()})
    scale, weight = context.columns(3, dtype)
    values = context.weighted(here.phi(s, rows.sums_NxTxD, scale), weight)
    absent = context.phi(s, context.zeros(total.shape, dtype), None)
    # As numbers of examples, which are exact: a difference of weights need not be 0 where no example is left.
    real_N = jnp.ones(n, dtype) if context.weights_N is None else (context.weights_N != 0).astype(dtype)
    without_V = jnp.sum(real_N) - _at_rows(rows, real_N)
    if context.weights_N is None:
        rest_V = without_V * np.asarray(context.factor, dtype)
    else:
        rest_V = context.total_weight(dtype) - _at_rows(rows, context.weighted(real_N, context.weights_N))
    rest_V, without_V = (x.reshape(-1, *[1] * (total.ndim - 1)) for x in (rest_V, without_V))
    total = total + jnp.where(without_V == 0, 0.0, rest_V.astype(absent.dtype) * absent)
    return total.at[rows.ids_NxT].add(values.reshape(shape), mode="drop")


def _at_rows(rows: Rows, x_N: jax.Array) -> jax.Array:
    """[V]: of each row of the table, the sum of x_n over the examples that use it."""
    x_NxT = jnp.broadcast_to(x_N[:, None], rows.ids_NxT.shape)
    return jnp.zeros(rows.num_rows, x_N.dtype).at[rows.ids_NxT].add(x_NxT, mode="drop")


def sparse_plus_dense(site: ReductionSite) -> ReductionResult | None:
    """A tied embedding: with E the sparse part and O the product, Σ φ(O), and φ(E+O) − φ(O) at the ids in use.

    The rows of O there are computed again, from the gathered side of the product: T × T × D instead of V × D.
    """
    context = site.context
    by_name = _by_primitive(site)
    if set(by_name) != {"scatter-add", "dot_general"} or len(by_name["dot_general"]) > 1:
        return None
    # φ(O) is subtracted again, and with operands it may be infinite wherever they are 0.
    if context.operands:
        return None
    (dense,) = by_name["dot_general"]
    sharding = site.spec.sharding
    if sharding is not None and dense.transposed:
        sharding = sharding.transposed()
    spec = dataclasses.replace(site.spec, pre=lambda x: site.spec.pre(dense.unary(x)), sharding=sharding)
    product = Product.of(dense.eqn, site, spec)
    rows = Rows.of(site, by_name["scatter-add"])
    if product is None or rows is None or dense.transposed is None or [*map(len, product.free)] != [1, 1]:
        return None
    if rows.absent_NxD is not None:
        product = _with_non_finite(product, "left" if dense.transposed else "right", rows.absent_NxD)
    if not product.has_wide_range or _zero_at_zero(context, product.dtype) is None:
        return None
    s_NxTxI, r_NxTxJ = product.matrices()
    by_row, across = (r_NxTxJ, s_NxTxI) if dense.transposed else (s_NxTxI, r_NxTxJ)  # [N, T, V] and [N, T, D]
    if (
        max(by_row.shape[1], rows.ids_NxT.shape[1]) >= rows.num_rows // 2
    ):  # nearly every row is in use: computing rows again would save nothing
        return None
    at = jnp.minimum(rows.ids_NxT, rows.num_rows - 1)
    gathered_NxTxU = jnp.take_along_axis(by_row, at[:, None, :], axis=2)
    precision, dtype = product.eqn.params["precision"], jaxprs.dtype_of(product.eqn.outvars[0])

    def own_rows(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        # The product's result may be of a wider type than its factors are.
        return jnp.einsum("tu,td->ud", *map(at_least_f32, pair), precision=precision).astype(dtype)

    o_NxUxD = at_least_f32(spec.pre(jax.lax.map(own_rows, (gathered_NxTxU, across))))
    both_NxUxD = o_NxUxD + rows.sums_NxTxD
    if context.statistics:
        # The product's sums are accumulated as they are produced; the corrections go to the same places.
        reduced = reduce_product(product)
    else:
        squares = gram_squares(product, s_NxTxI, r_NxTxJ) if context.norms else None
        reduced = ReductionResult([], squares, "gram", 0)
    scale, weight = context.columns(3, o_NxUxD.dtype)
    sums = []
    for s, total in zip(context.statistics, reduced.raw, strict=True):
        change = context.phi(s, both_NxUxD, scale) - context.phi(s, o_NxUxD, scale)
        change = context.weighted(change, weight)
        # The sums are in the product's order of elements: a transpose would be of vocabulary × width, the corrections are
        # small.
        if dense.transposed:
            change = change.reshape(-1, change.shape[-1]).T
            sums.append(total.at[:, rows.ids_NxT.reshape(-1)].add(change, mode="drop"))
        else:
            sums.append(total.at[rows.ids_NxT].add(change, mode="drop"))
    squares = reduced.squares_N
    if squares is not None:
        change = jnp.where(rows.in_use[..., None], jnp.square(both_NxUxD) - jnp.square(o_NxUxD), 0.0)
        # A square root follows, and rounding could have made the difference negative.
        squares = jnp.maximum(squares + jnp.sum(change, axis=(1, 2)), 0.0)
    result = ReductionResult(sums, squares, "sparse + dense", reduced.transient_bytes, kernel=reduced.kernel)
    return result.then(dense.moved)


def _with_non_finite(product: Product, side: str, absent_NxD: jax.Array) -> Product:
    """The product plus a row that is 0 or NaN, everywhere: NaN in one of its factors is NaN in all rows of the result."""
    factor = getattr(product, side)
    (axis,) = product.free[0 if side == "left" else 1]
    shape = [size if a in (0, axis + 1) else 1 for a, size in enumerate(factor.shape)]
    return dataclasses.replace(product, **{side: factor + absent_NxD.reshape(shape).astype(factor.dtype)})
