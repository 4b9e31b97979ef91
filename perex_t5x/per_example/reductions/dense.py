"""Reductions for matrix products: g_n = Σ_t s_nt r_ntᵀ."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend import core

from perex_t5x.per_example.engine import jaxprs
from perex_t5x.per_example.engine.shard_map import AutoSharding, constrain
from perex_t5x.per_example.kernels import dispatch
from perex_t5x.per_example.reductions.reducer import (
    ReductionContext,
    ReductionResult,
    ReductionSite,
    ReductionSpec,
    at_least_f32,
    itself,
    over_examples,
)

# A tile of the gradient and of its sums should stay in the cache, or a TPU's vector memory, while the examples pass by.
# (On a v5e, tiles of 1024 x 4096 take twice as long as those of 1024 x 3072 where an operand has the sequence last.)
TILE_BYTES = {"cpu": 512 * 1024, "tpu": 12 * 2**20}
# |Sᵀ R|² as a sum of terms is trusted where it is at least this share of their absolute values: below, cancellation has
# eaten more than four of float32's bits.
_CANCELLATION = 0.05


class Operands(NamedTuple):
    """Arrays of a product's reduction: arguments of functions that may be mapped or differentiated, so never closed over."""

    sums: list[jax.Array]  # to add to
    left: jax.Array  # [N, ...]
    right: jax.Array
    weights_N: jax.Array | None
    scales_N: jax.Array | None
    seen: dict[str, jax.Array]  # by φ, besides the gradient and of its shape


@dataclasses.dataclass(frozen=True)
class Product:
    """A `dot_general` of two batched operands without batch axes of its own."""

    context: ReductionContext
    spec: ReductionSpec
    eqn: core.JaxprEqn
    left: jax.Array  # [N, ...]
    right: jax.Array

    @classmethod
    def of(cls, eqn: core.JaxprEqn, site: ReductionSite, spec: ReductionSpec) -> Product | None:
        (_, _), (batch_l, batch_r) = eqn.params["dimension_numbers"]
        if batch_l or batch_r or not site.is_batched(*eqn.invars):
            return None
        left, right = eqn.invars
        return cls(site.context, spec, eqn, site.value(left)[0], site.value(right)[0])

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
    def length(self) -> int:
        """Of the sequence: how many outer products are summed for one example."""
        return math.prod(self.left.shape[1 + i] for i in self.contracted[0])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(jaxprs.shape_of(self.eqn.outvars[0]))

    @functools.cached_property
    def dtype(self) -> Any:
        """Of the gradient, when φ sees it."""
        if self.spec.pre is itself:  # usually, and nothing need be traced
            return jnp.promote_types(jaxprs.dtype_of(self.eqn.outvars[0]), jnp.float32)
        zero = jax.ShapeDtypeStruct((), jaxprs.dtype_of(self.eqn.outvars[0]))
        return jax.eval_shape(lambda x: at_least_f32(self.spec.pre(x)), zero).dtype

    @property
    def factor(self) -> jax.Array:
        """The number by which casts and signs after the product multiply it: `pre` is linear, so it shows on a one."""
        return self.spec.pre(jnp.ones((), jaxprs.dtype_of(self.eqn.outvars[0])))

    def operand_shardings(self) -> tuple[AutoSharding | None, AutoSharding | None]:
        """Where the product needs its operands."""
        sharding = self.spec.sharding
        if sharding is None:
            return None, None
        axes, shardings = iter(sharding.axes), []
        for x, contracted in zip((self.left, self.right), self.contracted, strict=True):
            mine = (None, *(None if i in contracted else next(axes) for i in range(x.ndim - 1)))
            shardings.append(dataclasses.replace(sharding, axes=mine))
        return shardings[0], shardings[1]

    def operands(self) -> Operands:
        # Constrained here, once for all examples: inside the loop the compiler would move each example's operands by itself.
        left, right = self.operand_shardings()
        return Operands(
            self.context.begin(self.spec.initial, self.shape, self.dtype, self.spec.sharding),
            constrain(self.left, left),
            constrain(self.right, right),
            self.context.weights_N,
            self.context.scales_N,
            {name: constrain(x, self.spec.sharding) for name, x in self.context.operands.items()},
        )

    @property
    def has_wide_range(self) -> bool:
        return has_wide_range(jaxprs.dtype_of(self.eqn.outvars[0]))

    def of_one(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """One example's gradient, from its operands."""
        g = at_least_f32(self.spec.pre(jaxprs.bind(self.eqn, [left, right])[0]))
        return constrain(g, self.spec.sharding)

    def matrices(self) -> tuple[jax.Array, jax.Array]:
        """S_NxTxI and R_NxTxJ with g_n = reshape(S_nᵀ R_n)."""
        result = []
        for x, contracted, free in zip((self.left, self.right), self.contracted, self.free, strict=True):
            x = x.transpose(0, *(i + 1 for i in contracted), *(i + 1 for i in free))
            length = math.prod(x.shape[1 : 1 + len(contracted)])
            result.append(x.reshape(x.shape[0], length, -1))
        return result[0], result[1]


def has_wide_range(dtype: Any) -> bool:
    """Whether a gradient overflows no sooner than float32 does, so that it may be computed in float32 in other ways.

    A float16 product that overflows is inf for the loss's own gradient, and must be inf here.
    """
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp)


def _product(site: ReductionSite) -> Product | None:
    eqn = site.single("dot_general")
    return None if eqn is None else Product.of(eqn, site, site.spec)


# --- one at a time ----------------------------------------------------------------------------------------------------


def one_product_at_a_time(site: ReductionSite) -> ReductionResult | None:
    product = _product(site)
    return None if product is None else reduce_product(product)


def reduce_product(product: Product) -> ReductionResult:
    """A loop over examples, within a loop over tiles of a large gradient; on a TPU, a kernel where it applies."""
    dtype = product.dtype
    operands = product.operands()
    whole = functools.partial(_whole, product)

    # A Pallas kernel can neither be differentiated nor mapped over: who does that to the statistics gets XLA's loop, which
    # computes the same.
    @jax.custom_jvp
    @custom_vmap
    def kernel(operands: Operands) -> Any:
        return dispatch.reduce(product, operands)

    @kernel.fun.def_vmap
    def mapped(axis_size: int, in_batched: Any, operands: Operands) -> Any:
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        out = jax.vmap(whole, in_axes=in_axes, axis_size=axis_size)(operands)
        return out, jax.tree.map(lambda _: True, out)

    kernel.defjvp(lambda primals, tangents: jax.jvp(whole, primals, tangents))
    # The platform is known when the program is lowered, not when it is traced (one traced program may be compiled for
    # several), so all of them are traced and `platform_dependent` chooses.
    by_platform: dict[str, Any] = {}
    for platform, tile_bytes in TILE_BYTES.items():
        tiling = Tiling.of(product, tile_bytes)
        # With a sharding each device has a part of the gradient; tiles across parts would move data between devices.
        if tiling is not None and product.spec.sharding is None:
            by_platform[platform] = functools.partial(_by_tiles, product, tiling)
    unsupported = dispatch.unsupported_reason(product)
    if not unsupported:
        by_platform["tpu"] = kernel
    if by_platform:
        sums, squares = jax.lax.platform_dependent(operands, **by_platform, default=whole)
    else:
        sums, squares = whole(operands)
    size = math.prod(product.shape) * dtype.itemsize
    return ReductionResult(sums, squares, "one at a time", size, kernel=unsupported)


def _whole(product: Product, operands: Operands) -> Any:
    context = product.context.seeing(operands.seen)

    def step(sums: Any, x: Any) -> Any:
        left, right, weight, scale = x
        g = product.of_one(left, right)
        return context.added(sums, g, weight, scale), jnp.sum(jnp.square(g)) if context.norms else None

    xs = operands.left, operands.right, operands.weights_N, operands.scales_N
    return over_examples(step, operands.sums, xs, context.num_examples)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tiles along one axis of a product's result: axis `axis` of operand `which`, `rows` of it at a time."""

    which: int
    axis: int
    out_axis: int
    rows: int

    @classmethod
    def of(cls, product: Product, tile_bytes: int) -> Tiling | None:
        """Tiles of the longest axis that the result keeps; None: one tile is enough."""
        free_l, free_r = product.free
        axes = [(0, a) for a in free_l] + [(1, a) for a in free_r]
        if not axes:
            return None
        out_axis = max(range(len(axes)), key=lambda i: product.shape[i])
        row_bytes = math.prod(product.shape) // max(product.shape[out_axis], 1) * product.dtype.itemsize
        rows = max(tile_bytes // max(row_bytes, 1), 1)
        # Two tiles are not worth it: each reads the other operand again.
        return None if 2 * rows >= product.shape[out_axis] else cls(*axes[out_axis], out_axis, rows)


def _by_tiles(product: Product, tiling: Tiling, operands: Operands) -> Any:
    context, tile = product.context, tiling.rows
    n, length = context.num_examples, product.shape[tiling.out_axis]
    sides = [operands.left, operands.right]
    per_example = sides[tiling.which].shape[1:]

    def one_tile(start: Any, size: int, sums: Any, squares: Any) -> Any:
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, tiling.out_axis)  # noqa: E731
        sizes = tuple(size if i == tiling.axis else d for i, d in enumerate(per_example))
        mine = context.seeing({name: cut(x) for name, x in operands.seen.items()})

        def add(i: Any, state: Any) -> Any:
            tiles, squares = state
            # Example and tile in one slice: two would copy the example's whole operand for every tile.
            at = (i, *(start if k == tiling.axis else 0 for k in range(len(per_example))))
            rows = [
                jax.lax.dynamic_slice(x, at, (1, *sizes)).reshape(sizes)
                if k == tiling.which
                else jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
                for k, x in enumerate(sides)
            ]
            g = product.of_one(*rows)
            weight, scale = (None if x is None else x[i] for x in (operands.weights_N, operands.scales_N))
            tiles = mine.added(tiles, g, weight, scale)
            return tiles, None if squares is None else squares.at[i].add(jnp.sum(jnp.square(g)))

        # Zeros that are made here stay in the cache; those of `sums` would be read from memory.
        from_zeros = product.spec.initial is None
        first = [context.zeros(x.shape, x.dtype) if from_zeros else x for x in map(cut, sums)]
        state = (first, squares)
        tiles, squares = jax.lax.fori_loop(0, n, add, state) if n > 1 else add(0, state)
        put = lambda s, t: jax.lax.dynamic_update_slice_in_dim(s, t, start, tiling.out_axis)  # noqa: E731
        return [put(s, t) for s, t in zip(sums, tiles, strict=True)], squares

    state = (operands.sums, context.zeros((n,), product.dtype) if context.norms else None)
    state = jax.lax.fori_loop(0, length // tile, lambda j, state: one_tile(j * tile, tile, *state), state)
    # Slices have static sizes, so the rows that no full tile covers are a tile of their own.
    return one_tile(length - length % tile, length % tile, *state) if length % tile else state


# --- cheaper where it applies -----------------------------------------------------------------------------------------


def factored(site: ReductionSite) -> ReductionResult | None:
    """g_n = s_n ⊗ r_n, a product whose contracted axes have size one, and every φ factorable: φ(S)ᵀ φ(R)."""
    product, context = _product(site), site.context
    if product is None or not context.statistics or not all(s.factorable for s in context.statistics):
        return None
    if product.length != 1 or product.left.dtype != product.right.dtype or context.num_examples < 2:
        return None
    if not product.has_wide_range:
        return None
    l_NxI, r_NxJ = (x[:, 0].astype(product.dtype) for x in product.matrices())
    # A power of two per example moves between the two, so that φ of either overflows no sooner than φ of the product.
    peak_N = jnp.max(jnp.abs(r_NxJ), axis=1)
    usable_N = jnp.isfinite(peak_N) & (peak_N > 0)
    power_N = jnp.exp2(jnp.floor(jnp.log2(jnp.where(usable_N, peak_N, 1.0))))[:, None]
    factor = product.factor.astype(l_NxI.dtype)
    l_NxI, r_NxJ = l_NxI * power_N * factor, r_NxJ / power_N
    scale, weight = context.columns(2, l_NxI.dtype)
    begin = context.begin(site.spec.initial, product.shape, l_NxI.dtype)
    sums = []
    for s, total in zip(context.statistics, begin, strict=True):
        phi_l = context.weighted(context.phi(s, l_NxI, scale), weight)
        phi_r = s.fn(r_NxJ)
        if weight is not None:
            # Examples of weight 0 must be absent from both sides: 0 · NaN would bring a left-out example's NaN back.
            phi_r = jnp.where(weight == 0, jnp.zeros_like(phi_r), phi_r)
        added = jnp.einsum("ni,nj->ij", phi_l, phi_r, precision=product.eqn.params["precision"])
        sums.append(total + added.reshape(total.shape))
    squares = jnp.sum(jnp.square(l_NxI), axis=1) * jnp.sum(jnp.square(r_NxJ), axis=1) if context.norms else None
    return ReductionResult(sums, squares, "factored", 0)


def gram(site: ReductionSite) -> ReductionResult | None:
    """Only norms: |Sᵀ R|² = Σ (S Sᵀ) ∘ (R Rᵀ), cheaper than the product itself where the sequence is short."""
    product, context = _product(site), site.context
    if product is None or context.statistics or not context.norms or not product.has_wide_range:
        return None
    s_NxTxI, r_NxTxJ = product.matrices()
    length, i, j = s_NxTxI.shape[1], s_NxTxI.shape[2], r_NxTxJ.shape[2]
    # Multiplications: T²(I + J) against T·I·J.
    if length * (i + j) >= i * j:
        return None
    squares = gram_squares(product, s_NxTxI, r_NxTxJ)
    return ReductionResult([], squares, "gram", 2 * length**2 * 4)


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
        # Terms of both signs that nearly cancel (positions whose gradients do) leave rounding, possibly negative; the square
        # of the product itself cannot be.
        exact = lambda: jnp.sum(jnp.square(jnp.einsum("ti,tj->ij", s, r, precision=precision)))  # noqa: E731
        total = jax.lax.cond(total < _CANCELLATION * jnp.sum(jnp.abs(terms)), exact, lambda: total)
        return jnp.square(jnp.sqrt(total) * s_power * r_power)

    factor = product.factor.astype(product.dtype)
    # One example at a time: the Gram matrices of all of them would be N × T².
    return jax.lax.map(one, (s_NxTxI, r_NxTxJ)) * jnp.square(factor)
