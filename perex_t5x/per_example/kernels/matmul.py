"""A TPU kernel for the statistics of matrix products: Σ_n w_n φ(c_n g_n) with g_n = S_nᵀ R_n, all φ at once.

    for each tile of the gradient: for each example n: for each chunk of the sequence:
        the tile of S_nᵀ R_n, in float32; after the last chunk it is added to the sums' tiles, one for each φ

The sums' tiles stay in vector memory while the examples pass by, so a gradient is never written to main memory. The
additions take place while the matrix units work: the statistics cost next to nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from perex_t5x.per_example.kernels.tiles import LANES, Tile, padded_length, rounded_to

_SUBLANES = 8
NAME = "per_example_products"  # in compiled programs and profiles

# From a product in float32 to the gradient that φ sees.
Finish = Callable[[jax.Array], jax.Array]
# (sums, gradient, weight, scale, *seen) -> sums, of one example.
Add = Callable[..., Sequence[jax.Array]]


def sums_of_products(
    s_NxTxI: jax.Array,
    r_NxTxJ: jax.Array,
    weights_N: jax.Array | None,
    scales_N: jax.Array | None,
    initial: Sequence[jax.Array] | None,
    *,
    seen: Sequence[jax.Array] = (),
    finish: Finish,
    add: Add,
    num_sums: int,
    norms: bool,
    tile: Tile,
    precision: Any = None,
    interpret: Any = False,
) -> tuple[list[jax.Array], jax.Array | None]:
    """`num_sums` arrays [I, J] in float32; and Σ g_n² of each example if `norms`, else None.

    Args:
      s_NxTxI, r_NxTxJ: the factors.
      weights_N, scales_N: one number an example, for `add`; or None.
      initial: sums to add to, in place where the program allows it; None: zeros.
      seen: arrays [I, J] of which `add` gets the same elements as of the gradient.
      finish, add: elementwise; they are traced inside the kernel and may hold no arrays.
      tile: from `tiles.choose`.
      precision: of the product.
      interpret: as in `pallas_call`: True runs the kernel on a CPU, slowly.
    """
    # The matrix units would round to bfloat16 anyway. Outside of the kernel the cast fuses with whatever makes the operands,
    # and half the bytes are written and read. (The interpreter multiplies in float32: casting would change its result.)
    if not interpret:
        s_NxTxI, r_NxTxJ = (x.astype(rounded_to(x.dtype, precision)) for x in (s_NxTxI, r_NxTxJ))
    padding = padded_length(s_NxTxI.shape[1]) - s_NxTxI.shape[1]
    if padding:  # zeros add nothing
        s_NxTxI, r_NxTxJ = (jnp.pad(x, ((0, 0), (0, padding), (0, 0))) for x in (s_NxTxI, r_NxTxJ))
    n, length, rows = s_NxTxI.shape
    columns = r_NxTxJ.shape[2]
    grid = (pl.cdiv(rows, tile.rows), pl.cdiv(columns, tile.columns), n, length // tile.chunk)
    scalars = [x.astype(jnp.float32) for x in (weights_N, scales_N) if x is not None]
    initial = [] if initial is None else list(initial)
    kernel = functools.partial(
        _kernel,
        has=(weights_N is not None, scales_N is not None, len(initial), len(seen), num_sums, norms, grid[3] > 1),
        tile=tile,
        within=(rows, columns) if rows % tile.rows or columns % tile.columns else None,
        num_chunks=grid[3],
        finish=finish,
        add=add,
        precision=precision,
    )
    # The index of a sums' tile does not depend on n and t, the two inner axes of the grid: Pallas keeps the block in vector
    # memory until i or j changes, and writes it once.
    sums_tile = pl.BlockSpec((tile.rows, tile.columns), lambda i, j, n, t: (i, j))
    out_specs = [sums_tile] * num_sums
    varying = jax.typeof(s_NxTxI).manual_axis_type
    out_shape = [jax.ShapeDtypeStruct((rows, columns), jnp.float32, manual_axis_type=varying)] * num_sums
    if norms:
        out_specs.append(pl.BlockSpec((1, 1, 1, _SUBLANES, LANES), lambda i, j, n, t: (i, j, n, 0, 0)))
        out_shape.append(jax.ShapeDtypeStruct((*grid[:3], _SUBLANES, LANES), jnp.float32, manual_axis_type=varying))
    out = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[
            *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in scalars),
            pl.BlockSpec((1, tile.chunk, tile.rows), lambda i, j, n, t: (n, t, i)),
            pl.BlockSpec((1, tile.chunk, tile.columns), lambda i, j, n, t: (n, t, j)),
            *(sums_tile for _ in (*initial, *seen)),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM((tile.rows, tile.columns), jnp.float32)] if grid[3] > 1 else [],
        # In place: microbatches add to the same sums, and a copy of all parameters' sums would be the step's largest buffer.
        input_output_aliases={len(scalars) + 2 + k: k for k in range(len(initial))},
        # i and j may run on different cores; n and t accumulate, so their order matters.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=tile.vmem
        ),
        interpret=interpret,
        name=NAME,
        # The scheduler cannot see into a kernel: without an estimate it would not know how much work hides a collective.
        cost_estimate=_cost(s_NxTxI, r_NxTxJ, grid, num_sums + len(initial) + len(seen)),
    )(*scalars, s_NxTxI, r_NxTxJ, *initial, *seen)
    return list(out[:num_sums]), jnp.sum(out[-1], axis=(0, 1, 3, 4)) if norms else None


def _cost(s_NxTxI: jax.Array, r_NxTxJ: jax.Array, grid: tuple[int, ...], num_whole: int) -> pl.CostEstimate:
    """Products; and bytes: each factor as often as there are tiles along the other, and whatever is read or written once."""
    n, length, rows = s_NxTxI.shape
    columns = r_NxTxJ.shape[2]
    read = (grid[1] * s_NxTxI.size + grid[0] * r_NxTxJ.size) * s_NxTxI.dtype.itemsize
    whole = num_whole * rows * columns * 4
    return pl.CostEstimate(flops=2 * n * length * rows * columns, bytes_accessed=read + whole, transcendentals=0)


def shares(num_examples: int, num_chunks: int, has_initial: bool) -> tuple[float, ...]:
    """Of the grid's steps, those in which the kernel's larger conditional parts run, in their order; for `preflight`.

    >>> shares(8, 1, True), shares(8, 2, True), shares(8, 2, False)
    ((0.125,), (0.0625, 0.5, 0.5), (0.5, 0.5))
    """
    begins = (1 / (num_examples * num_chunks),) if has_initial else ()
    return begins if num_chunks == 1 else (*begins, 1 - 1 / num_chunks, 1 / num_chunks)


def _kernel(
    *refs: Any,
    has: tuple[Any, ...],
    tile: Tile,
    within: tuple[int, int] | None,
    num_chunks: int,
    finish: Finish,
    add: Add,
    precision: Any,
) -> None:
    """One tile of the gradient, one example, one chunk of its sequence."""
    has_weights, has_scales, num_initial, num_seen, num_sums, norms, is_chunked = has
    ref = iter(refs)
    weights, scales = (next(ref) if given else None for given in (has_weights, has_scales))
    s, r = next(ref), next(ref)
    initial = [next(ref) for _ in range(num_initial)]
    seen = [next(ref) for _ in range(num_seen)]
    sums = [next(ref) for _ in range(num_sums)]
    squares: Any = next(ref) if norms else None
    so_far: Any = next(ref) if is_chunked else None
    row, column, n, t = (pl.program_id(k) for k in range(4))

    if initial:

        @pl.when((n == 0) & (t == 0))
        def _begin() -> None:
            for k, total in enumerate(sums):
                total[...] = initial[k][...]

    if norms:

        @pl.when(t == 0)
        def _begin_squares() -> None:
            squares[...] = jnp.zeros(squares.shape, squares.dtype)

    def product(at_i: Any, at_j: Any) -> jax.Array:
        """A part of the tile, summed over the chunks up to this one."""
        g = jax.lax.dot_general(
            s[0, :, at_i],
            r[0, :, at_j],
            (((0,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return g if so_far is None else jnp.where(t == 0, g, so_far[at_i, at_j] + g)

    def keep(at_i: Any, at_j: Any) -> None:
        so_far[at_i, at_j] = product(at_i, at_j)

    def reduce(at_i: Any, at_j: Any) -> None:
        g = finish(product(at_i, at_j))
        weight, scale = (None if x is None else x[n] for x in (weights, scales))
        before = [total[at_i, at_j] for total in sums]
        if not initial:
            # The first example finds whatever the memory held. A selection is free while the matrix units work; a pass that
            # fills the tile with zeros before is 3 % of the kernel on v6e.
            before = [jnp.where(n == 0, jnp.zeros_like(x), x) for x in before]
        here = [x[at_i, at_j] for x in seen]
        for total, new in zip(sums, add(before, g, weight, scale, *here), strict=True):
            total[at_i, at_j] = new
        if norms:
            # Beyond the gradient's edge is whatever the memory held. The sums there are never written back, but the squares
            # would count it.
            if within is not None:
                i = jax.lax.broadcasted_iota(jnp.int32, g.shape, 0) + (at_i.start + row * tile.rows)
                j = jax.lax.broadcasted_iota(jnp.int32, g.shape, 1) + (at_j.start + column * tile.columns)
                g = jnp.where((i < within[0]) & (j < within[1]), g, jnp.zeros_like(g))
            squares[0, 0, 0] += _folded(jnp.square(g))

    # φ is not additive: it may see the gradient only after the last chunk of the sequence.
    if is_chunked:
        pl.when(t < num_chunks - 1)(lambda: _for_parts(tile, keep))
        pl.when(t == num_chunks - 1)(lambda: _for_parts(tile, reduce))
    else:
        _for_parts(tile, reduce)


def _for_parts(tile: Tile, do: Callable[[Any, Any], None]) -> None:
    """Loops over the parts of a tile."""

    # A loop over parts, not one product for the tile: a whole tile's float32 values would not fit the registers, and the
    # compiler would spill them to vector memory and back between the product and φ.
    def loop(size: int, part: int, body: Callable[[Any], None]) -> None:
        if size == part:
            body(pl.ds(0, part))
        else:
            jax.lax.fori_loop(0, size // part, lambda k, _: body(pl.ds(pl.multiple_of(k * part, part), part)), None)

    loop(tile.rows, tile.part_rows, lambda at_i: loop(tile.columns, tile.part_columns, lambda at_j: do(at_i, at_j)))


def _folded(x: jax.Array) -> jax.Array:
    """Summed up into the shape of one register; sums across a register's lanes would be slow, and are left to XLA."""
    x = jnp.sum(x.reshape(-1, _SUBLANES, x.shape[1]), axis=0)
    return functools.reduce(jnp.add, [x[:, k : k + LANES] for k in range(0, x.shape[1], LANES)])
