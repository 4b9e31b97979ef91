"""Forms for embeddings: a scatter-add of rows into zeros, alone or with a matrix product on top (a tied embedding)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from perex_t5x.per_example.reductions.dense import Product, gram_squares, reduce_product
from perex_t5x.per_example.reductions.reducer import Reduced, Reducer, Site, at_least_f32
from perex_t5x.per_example.reductions.terms import Term, terms


@dataclasses.dataclass(frozen=True)
class Rows:
    """Per example: distinct ids, and the sums of the rows of each.

    Unused places have the id `num_rows`, which no table has, and zero rows.
    """

    ids_NxT: jax.Array
    sums_NxTxD: jax.Array  # at least float32, after casts and signs
    num_rows: int

    @classmethod
    def of(cls, reducer: Reducer, site: Site, term: Term) -> Rows | None:
        eqn = term.eqn
        operand, ids, updates = eqn.invars
        numbers = eqn.params["dimension_numbers"]
        table = operand.aval.shape
        plain = (
            len(table) == 2
            and tuple(numbers.inserted_window_dims) == (0,)
            and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
            and not numbers.operand_batching_dims
            and tuple(numbers.update_window_dims) == (updates.aval.ndim - 1,)
            and updates.aval.shape[-1] == table[1]
            and ids.aval.shape[-1] == 1
            and site.is_batched(ids, updates)
            and term.transposed is False
        )
        if not plain:
            return None
        n, num_rows = reducer.num_examples, table[0]
        ids_NxT = site.value(ids)[0].reshape(n, -1)
        rows_NxTxD = site.value(updates)[0].reshape(n, -1, table[1])
        if "CLIP" in str(eqn.params["mode"]):
            ids_NxT = jnp.clip(ids_NxT, 0, num_rows - 1)
        elif ids_NxT.dtype.itemsize > 4 or ids_NxT.dtype == jnp.uint32:  # what int32 cannot hold is out of range
            ids_NxT = jnp.where((ids_NxT >= 0) & (ids_NxT < num_rows), ids_NxT, num_rows)
        ids_NxT = ids_NxT.astype(jnp.int32)
        distinct_NxT, sums_NxTxD = jax.vmap(_combine, in_axes=(0, 0, None))(ids_NxT, rows_NxTxD, num_rows)
        return cls(distinct_NxT, at_least_f32(site.pre(term.unary(sums_NxTxD))), num_rows)

    def of_table(self, table_VxD: jax.Array | None) -> jax.Array | None:
        """The rows of a table at the ids, [N, T, D]; anything at unused places."""
        return None if table_VxD is None else table_VxD[jnp.minimum(self.ids_NxT, self.num_rows - 1)]


def _combine(ids_T: jax.Array, rows_TxD: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    order = jnp.argsort(ids_T)
    sorted_T = ids_T[order]
    changes = (sorted_T[1:] != sorted_T[:-1]).astype(jnp.int32)
    segment_T = jnp.cumsum(jnp.concatenate([jnp.zeros(1, jnp.int32), changes]))
    sums_TxD = jnp.zeros_like(rows_TxD).at[segment_T].add(rows_TxD[order])
    distinct_T = jnp.full(ids_T.shape, num_rows, ids_T.dtype).at[segment_T].set(sorted_T)
    valid = (distinct_T >= 0) & (distinct_T < num_rows)
    return jnp.where(valid, distinct_T, num_rows), jnp.where(valid[:, None], sums_TxD, 0)


def _columns(reducer: Reducer, dtype: jnp.dtype) -> tuple[jax.Array | None, jax.Array | None]:
    scale, weight = reducer.column(reducer.scales_N, 3), reducer.column(reducer.weights_N, 3)
    return None if scale is None else scale.astype(dtype), weight


def _zero_at_zero(reducer: Reducer, dtype: jnp.dtype) -> list[bool] | None:
    """Of each φ, whether φ(0) = 0; None if some φ(0) is not finite (it could not be taken away again) or not known."""
    try:
        with jax.ensure_compile_time_eval():
            at_zero = [s.fn(jnp.zeros((), dtype)) for s in reducer.statistics]
            if not all(jnp.isfinite(z) for z in at_zero):
                return None
            return [bool(z == 0) for z in at_zero]
    except jax.errors.ConcretizationTypeError:  # φ closes over something traced
        return None


def _only_term(site: Site, count: int) -> list[Term] | None:
    found = terms(site.node)
    return found if found is not None and len(found) == count else None


def sparse(reducer: Reducer, site: Site) -> Reduced | None:
    """Rows of an embedding: Σ_n w_n φ(0) everywhere, and φ(row) − φ(0) at the ids in use."""
    found = _only_term(site, 1)
    if not found or found[0].eqn.primitive.name != "scatter-add":
        return None
    rows = Rows.of(reducer, site, found[0])
    if rows is None:
        return None
    no_change = _zero_at_zero(reducer, rows.sums_NxTxD.dtype)
    if no_change is None:
        return None
    g_NxTxD = rows.sums_NxTxD
    scale, weight = _columns(reducer, g_NxTxD.dtype)
    shift_NxTxD = rows.of_table(site.shift)
    begin = reducer.begin(site.initial, site.node.root.aval.shape, g_NxTxD.dtype, site.place)
    sums = []
    for s, total, zero_everywhere in zip(reducer.statistics, begin, no_change, strict=True):
        change = reducer.phi(s, g_NxTxD, scale, shift_NxTxD)
        if site.shift is not None or not zero_everywhere:
            change = change - reducer.phi(s, jnp.zeros_like(g_NxTxD), None, shift_NxTxD)
            absent_VxD = reducer.phi(s, reducer.zeros(total.shape, g_NxTxD.dtype), None, site.shift)
            total = total + reducer.total_weight(total.dtype) * absent_VxD
        sums.append(total.at[rows.ids_NxT].add(reducer.weighted(change, weight), mode="drop"))
    squares = jnp.sum(jnp.square(g_NxTxD), axis=(1, 2)) if reducer.norms else None
    return Reduced(sums, squares, "sparse", 0)


def sparse_plus_dense(reducer: Reducer, site: Site) -> Reduced | None:
    """A tied embedding: with E the sparse part and O the product, Σ φ(O), and φ(E+O) − φ(O) at the ids in use.

    The rows of O there are computed again, from the gathered side of the product: T × T × D instead of V × D.
    """
    found = _only_term(site, 2)
    kinds = {t.eqn.primitive.name: t for t in found or ()}
    if set(kinds) != {"scatter-add", "dot_general"}:
        return None
    dense = kinds["dot_general"]
    where = site.place.transposed() if site.place is not None and dense.transposed else site.place
    product = Product.of(dense.eqn, site, lambda x: site.pre(dense.unary(x)), where)
    rows = Rows.of(reducer, site, kinds["scatter-add"])
    if product is None or rows is None or dense.transposed is None or len(product.shape) != 2:
        return None
    if not product.has_wide_range or _zero_at_zero(reducer, product.dtype) is None:
        return None
    s_NxTxI, r_NxTxJ = product.matrices()
    by_row, across = (r_NxTxJ, s_NxTxI) if dense.transposed else (s_NxTxI, r_NxTxJ)  # [N, T, V] and [N, T, D]
    if by_row.shape[1] >= rows.num_rows // 2:  # computing rows again would be no saving
        return None
    at = jnp.minimum(rows.ids_NxT, rows.num_rows - 1)
    gathered_NxTxU = jnp.take_along_axis(by_row, at[:, None, :], axis=2)
    precision = product.eqn.params["precision"]

    def own_rows(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.einsum("tu,td->ud", *pair, precision=precision)

    o_NxUxD = at_least_f32(product.pre(jax.lax.map(own_rows, (gathered_NxTxU, across))))
    both_NxUxD = o_NxUxD + rows.sums_NxTxD
    shift = None if site.shift is None else dense.moved_back(site.shift)
    if reducer.statistics:
        # The product's sums are accumulated as they are produced; the corrections go to the same places.
        reduced = reduce_product(reducer, product, site.initial, shift)
    else:
        reduced = Reduced([], gram_squares(product, s_NxTxI, r_NxTxJ) if reducer.norms else None, "gram", 0)
    scale, weight = _columns(reducer, o_NxUxD.dtype)
    shift_NxUxD = rows.of_table(site.shift)
    sums = []
    for s, total in zip(reducer.statistics, reduced.raw, strict=True):
        change = reducer.phi(s, both_NxUxD, scale, shift_NxUxD) - reducer.phi(s, o_NxUxD, scale, shift_NxUxD)
        change = reducer.weighted(change, weight)
        if dense.transposed:
            change = change.reshape(-1, change.shape[-1]).T
            sums.append(total.at[:, rows.ids_NxT.reshape(-1)].add(change, mode="drop"))
        else:
            sums.append(total.at[rows.ids_NxT].add(change, mode="drop"))
    squares = reduced.squares_N
    if squares is not None:
        used = (rows.ids_NxT < rows.num_rows)[..., None]
        change = jnp.where(used, jnp.square(both_NxUxD) - jnp.square(o_NxUxD), 0.0)
        squares = jnp.maximum(squares + jnp.sum(change, axis=(1, 2)), 0.0)
    result = Reduced(sums, squares, "sparse + dense", reduced.transient_bytes, kernel=reduced.kernel)
    return result.then(dense.moved)
