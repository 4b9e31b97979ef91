"""Forms for matrix products: g_n = Σ_t s_nt r_ntᵀ."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend import core

from perex_t5x.per_example.engine import jaxprs
from perex_t5x.per_example.engine.sharding import Placement, place
from perex_t5x.per_example.kernels import dispatch
from perex_t5x.per_example.reductions.reducer import Pre, Reduced, Reducer, Site, at_least_f32, over_examples

# A tile of the gradient and of its sums should stay in the cache, or a TPU's vector memory, while the examples pass by.
# (On a v5e, tiles of 1024 x 4096 take twice as long as those of 1024 x 3072 where an operand has the sequence last.)
TILE_BYTES = {"cpu": 512 * 1024, "tpu": 12 * 2**20}


@dataclasses.dataclass(frozen=True)
class Product:
    """A `dot_general` of two batched operands without batch axes of its own."""

    eqn: core.JaxprEqn
    left: jax.Array  # [N, ...]
    right: jax.Array
    pre: Pre
    place: Placement | None = None

    @classmethod
    def of(cls, eqn: core.JaxprEqn, site: Site, pre: Pre, place: Placement | None) -> Product | None:
        (_, _), (batch_l, batch_r) = eqn.params["dimension_numbers"]
        if batch_l or batch_r or not site.is_batched(*eqn.invars):
            return None
        left, right = eqn.invars
        return cls(eqn, site.value(left)[0], site.value(right)[0], pre, place)

    @property
    def contracted(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        (left, right), _ = self.eqn.params["dimension_numbers"]
        return tuple(left), tuple(right)

    @property
    def free(self) -> tuple[list[int], list[int]]:
        """Axes of one example's operands that the result keeps."""
        left, right = self.contracted
        return (
            [i for i in range(self.left.ndim - 1) if i not in left],
            [i for i in range(self.right.ndim - 1) if i not in right],
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.eqn.outvars[0].aval.shape)

    @property
    def dtype(self) -> Any:
        """Of the gradient, when φ sees it."""
        zero = jax.ShapeDtypeStruct((), self.eqn.outvars[0].aval.dtype)
        return jax.eval_shape(lambda x: at_least_f32(self.pre(x)), zero).dtype

    def operand_places(self) -> tuple[Placement | None, Placement | None]:
        """Where the product needs its operands."""
        if self.place is None:
            return None, None
        axes, places = iter(self.place.axes), []
        for x, contracted in zip((self.left, self.right), self.contracted, strict=True):
            mine = (None, *(None if i in contracted else next(axes) for i in range(x.ndim - 1)))
            places.append(dataclasses.replace(self.place, axes=mine))
        return places[0], places[1]

    def placed(self) -> tuple[jax.Array, jax.Array]:
        """The operands there, once for all examples."""
        left, right = self.operand_places()
        return place(self.left, left), place(self.right, right)

    @property
    def has_wide_range(self) -> bool:
        """Whether the product overflows no sooner than float32 does, so that other forms of it may be computed in that."""
        dtype = self.eqn.outvars[0].aval.dtype
        return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp

    def of_one(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """One example's gradient, from its operands."""
        return place(at_least_f32(self.pre(jaxprs.bind(self.eqn, [left, right])[0])), self.place)

    def matrices(self) -> tuple[jax.Array, jax.Array]:
        """S_NxTxI and R_NxTxJ with g_n = reshape(S_nᵀ R_n)."""
        result = []
        for x, contracted, free in zip((self.left, self.right), self.contracted, self.free, strict=True):
            x = x.transpose(0, *(i + 1 for i in contracted), *(i + 1 for i in free))
            length = math.prod(x.shape[1 : 1 + len(contracted)])
            result.append(x.reshape(x.shape[0], length, -1))
        return result[0], result[1]


def _product(site: Site) -> Product | None:
    eqn = site.single("dot_general")
    return None if eqn is None else Product.of(eqn, site, site.pre, site.place)


def one_product_at_a_time(reducer: Reducer, site: Site) -> Reduced | None:
    product = _product(site)
    return None if product is None else reduce_product(reducer, product, site.initial, site.shift)


def reduce_product(reducer: Reducer, product: Product, initial: Any, shift: jax.Array | None) -> Reduced:
    """A loop over examples, within a loop over tiles of a large gradient; on a TPU, a kernel where it applies."""
    dtype = product.dtype
    begin = reducer.begin(initial, product.shape, dtype, product.place)
    arguments = (begin, *product.placed(), reducer.weights_N, reducer.scales_N, shift)

    def whole(*arguments: Any) -> Any:
        return _whole(reducer, product, *arguments)

    # Who differentiates statistics, or maps over them, has XLA's form.
    @jax.custom_jvp
    @custom_vmap
    def kernel(begin: Any, left: Any, right: Any, weights: Any, scales: Any, shift: None) -> Any:
        return dispatch.reduce(reducer, product, None if initial is None else begin, left, right, weights, scales)

    @kernel.fun.def_vmap
    def mapped(axis_size: int, in_batched: Any, *arguments: Any) -> Any:
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        out = jax.vmap(whole, in_axes=in_axes, axis_size=axis_size)(*arguments)
        return out, jax.tree.map(lambda _: True, out)

    kernel.defjvp(lambda primals, tangents: jax.jvp(whole, primals, tangents))
    forms = {}
    for platform, tile_bytes in TILE_BYTES.items():
        tiling = _tiling(product, dtype, tile_bytes)
        if tiling is not None and product.place is None:  # devices have tiles of their own
            forms[platform] = functools.partial(_by_tiles, reducer, product, *tiling, initial is None)
    why_not = dispatch.why_not(reducer, product, shift)
    if not why_not:
        forms["tpu"] = kernel
    sums, squares = jax.lax.platform_dependent(*arguments, **forms, default=whole) if forms else whole(*arguments)
    return Reduced(sums, squares, "one at a time", math.prod(product.shape) * dtype.itemsize, kernel=why_not)


def _whole(
    reducer: Reducer, product: Product, begin: Any, left: Any, right: Any, weights: Any, scales: Any, shift: Any
):
    def step(sums: Any, x: Any) -> Any:
        left, right, weight, scale = x
        g = product.of_one(left, right)
        return reducer.added(sums, g, weight, scale, shift), jnp.sum(jnp.square(g)) if reducer.norms else None

    return over_examples(step, begin, (left, right, weights, scales), reducer.num_examples)


def _tiling(product: Product, dtype: Any, tile_bytes: int) -> tuple[int, int, int, int] | None:
    """(operand, its axis, the result's axis, rows a tile): tiles of the longest axis it keeps; None: one tile is enough."""
    free_l, free_r = product.free
    axes = [(0, a) for a in free_l] + [(1, a) for a in free_r]
    if not axes:
        return None
    out_axis = max(range(len(axes)), key=lambda i: product.shape[i])
    row_bytes = math.prod(product.shape) // max(product.shape[out_axis], 1) * dtype.itemsize
    tile = max(tile_bytes // max(row_bytes, 1), 1)
    if 2 * tile >= product.shape[out_axis]:
        return None
    return *axes[out_axis], out_axis, tile


def _by_tiles(
    reducer: Reducer,
    product: Product,
    which: int,
    axis: int,
    out_axis: int,
    tile: int,
    from_zeros: bool,
    begin: Any,
    left: Any,
    right: Any,
    weights: Any,
    scales: Any,
    shift: Any,
) -> Any:
    n, length = reducer.num_examples, product.shape[out_axis]
    operands = [left, right]
    per_example = operands[which].shape[1:]

    def one_tile(start: Any, size: int, sums: Any, squares: Any) -> Any:
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, out_axis)  # noqa: E731
        shift_tile = None if shift is None else cut(shift)
        sizes = tuple(size if i == axis else d for i, d in enumerate(per_example))

        def add(i: Any, state: Any) -> Any:
            tiles, squares = state
            place = (i, *(start if k == axis else 0 for k in range(len(per_example))))
            rows = [x[i] for x in operands]
            rows[which] = jax.lax.dynamic_slice(operands[which], place, (1, *sizes)).reshape(sizes)
            g = product.of_one(*rows)
            weight, scale = (None if x is None else x[i] for x in (weights, scales))
            tiles = reducer.added(tiles, g, weight, scale, shift_tile)
            return tiles, None if squares is None else squares.at[i].add(jnp.sum(jnp.square(g)))

        first = [reducer.zeros(x.shape, x.dtype) if from_zeros else x for x in map(cut, sums)]
        state = (first, squares)
        tiles, squares = jax.lax.fori_loop(0, n, add, state) if n > 1 else add(0, state)
        put = lambda s, t: jax.lax.dynamic_update_slice_in_dim(s, t, start, out_axis)  # noqa: E731
        return [put(s, t) for s, t in zip(sums, tiles, strict=True)], squares

    dtype = product.dtype
    state = (begin, reducer.zeros((n,), dtype) if reducer.norms else None)
    state = jax.lax.fori_loop(0, length // tile, lambda j, state: one_tile(j * tile, tile, *state), state)
    return one_tile(length - length % tile, length % tile, *state) if length % tile else state


def factored(reducer: Reducer, site: Site) -> Reduced | None:
    """g_n = s_n ⊗ r_n, a product whose contracted axes have size one, and every φ factorable: φ(S)ᵀ φ(R)."""
    product = _product(site)
    if product is None or not reducer.statistics or not all(s.factorable for s in reducer.statistics):
        return None
    length = math.prod(product.left.shape[1 + i] for i in product.contracted[0])
    if length != 1 or site.shift is not None or product.left.dtype != product.right.dtype or reducer.num_examples < 2:
        return None
    if not product.has_wide_range:
        return None
    l_NxI, r_NxJ = (x[:, 0].astype(product.dtype) for x in product.matrices())
    # A power of two per example moves between the two, so that φ of either overflows no sooner than φ of the product.
    peak_N = jnp.max(jnp.abs(r_NxJ), axis=1)
    usable_N = jnp.isfinite(peak_N) & (peak_N > 0)
    power_N = jnp.exp2(jnp.floor(jnp.log2(jnp.where(usable_N, peak_N, 1.0))))[:, None]
    # `pre` is linear: its factor shows on a one.
    factor = site.pre(jnp.ones((), product.eqn.outvars[0].aval.dtype)).astype(l_NxI.dtype)
    l_NxI, r_NxJ = l_NxI * power_N * factor, r_NxJ / power_N
    scale, weight = reducer.column(reducer.scales_N, 2), reducer.column(reducer.weights_N, 2)
    scale = None if scale is None else scale.astype(l_NxI.dtype)
    begin = reducer.begin(site.initial, product.shape, l_NxI.dtype)
    sums = []
    for s, total in zip(reducer.statistics, begin, strict=True):
        phi_l = reducer.weighted(reducer.phi(s, l_NxI, scale, None), weight)
        phi_r = s.fn(r_NxJ)
        if weight is not None:
            phi_r = jnp.where(weight == 0, jnp.zeros_like(phi_r), phi_r)
        added = jnp.einsum("ni,nj->ij", phi_l, phi_r, precision=product.eqn.params["precision"])
        sums.append(total + added.reshape(total.shape))
    squares = jnp.sum(jnp.square(l_NxI), axis=1) * jnp.sum(jnp.square(r_NxJ), axis=1) if reducer.norms else None
    return Reduced(sums, squares, "factored", 0)


def gram(reducer: Reducer, site: Site) -> Reduced | None:
    """Only norms: |Sᵀ R|² = Σ (S Sᵀ) ∘ (R Rᵀ), cheaper than the product itself where the sequence is short."""
    product = _product(site)
    if product is None or reducer.statistics or not reducer.norms or not product.has_wide_range:
        return None
    s_NxTxI, r_NxTxJ = product.matrices()
    length, i, j = s_NxTxI.shape[1], s_NxTxI.shape[2], r_NxTxJ.shape[2]
    if length * (i + j) >= i * j:
        return None
    squares = gram_squares(product, s_NxTxI, r_NxTxJ)
    return Reduced([], squares, "gram", 2 * length**2 * 4)


def gram_squares(product: Product, s_NxTxI: jax.Array, r_NxTxJ: jax.Array) -> jax.Array:
    """|Sᵀ R|² of each example; where its terms cancel, from the product itself."""
    precision = product.eqn.params["precision"]

    def balanced(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x over a power of two near its largest entry, so that products neither vanish nor overflow; and the power."""
        x = x.astype(product.dtype)
        peak = jnp.max(jnp.abs(x), initial=0.0)
        power = jnp.exp2(jnp.floor(jnp.log2(jnp.where(jnp.isfinite(peak) & (peak > 0), peak, 1.0))))
        return x / power, power

    def one(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        (s, s_power), (r, r_power) = map(balanced, rows)
        terms = jnp.einsum("ti,ui->tu", s, s, precision=precision) * jnp.einsum("tj,uj->tu", r, r, precision=precision)
        total = jnp.sum(terms)
        exact = lambda: jnp.sum(jnp.square(jnp.einsum("ti,tj->ij", s, r, precision=precision)))  # noqa: E731
        total = jax.lax.cond(total < 0.05 * jnp.sum(jnp.abs(terms)), exact, lambda: total)
        return jnp.square(jnp.sqrt(total) * s_power * r_power)

    factor = product.pre(jnp.ones((), product.eqn.outvars[0].aval.dtype)).astype(product.dtype)
    return jax.lax.map(one, (s_NxTxI, r_NxTxJ)) * jnp.square(factor)
