"""Whether the kernel can take a matrix product of the engine's, and the product's statistics by it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AxisType, PartitionSpec

from perex_t5x.per_example.engine import jaxprs, shard_map
from perex_t5x.per_example.kernels import tiles
from perex_t5x.per_example.kernels.matmul import rounded_to, sums_of_products
from perex_t5x.per_example.reductions.reducer import Reducer, at_least_f32

if TYPE_CHECKING:
    from perex_t5x.per_example.reductions.dense import Product

NOT_FOR_TPUS = "not compiled for TPUs"
_SHORTEST = 16  # of a shorter sequence the products are no work, and XLA's form is as good
_SMALLEST = 0.5  # of the tiles' area must be the gradient's, for the same reason

# Elementwise, and known to compile within a kernel.
_ELEMENTWISE = {
    "abs", "add", "add_any", "and", "clamp", "convert_element_type", "copy", "div", "eq", "exp", "ge", "gt", "integer_pow",
    "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "rsqrt",
    "select_n", "sign", "sqrt", "square", "stop_gradient", "sub", "tanh",
}  # fmt: skip


def why_not(reducer: Reducer, product: Product, shift: Any) -> str:
    """Why the kernel cannot take this product; empty where it can."""
    if not reducer.kernels:
        return "kernels are turned off"
    if not for_tpu():
        return NOT_FOR_TPUS
    if shift is not None:
        return "statistics of shifted gradients"
    return _operands(product) or _place(product) or _size(reducer, product) or _functions(reducer, product)


def for_tpu() -> bool:
    """Whether TPUs are compiled for: those of the mesh around, be they there or not, else JAX's default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.default_backend() if device is None else device.platform) == "tpu"


def reduce(
    reducer: Reducer, product: Product, initial: Any, left: Any, right: Any, weights: Any, scales: Any
) -> tuple[list[jax.Array], jax.Array | None]:
    """The sums, and Σ g_n² of each example, by the kernel; `initial` None: from zeros."""
    arguments = shard_map.vary((initial, left, right, weights, scales), reducer.varying)
    rest = shard_map.automatic_axes()
    if not rest:
        return _on_device(reducer, product, *arguments, ())
    whole = PartitionSpec()
    l_spec, r_spec, out_spec, over = whole, whole, whole, ()
    if product.place is not None:  # each device has its own part of the gradient
        (l_place, r_place), out = product.operand_places(), product.place
        l_spec, r_spec, out_spec = (PartitionSpec(*p.axes) for p in (l_place, r_place, out))
        over = tuple(sorted(_names(out.axes)))

    def local(*arguments: Any) -> Any:
        return _on_device(reducer, product, *arguments, over)

    over_rest = jax.shard_map(
        local,
        in_specs=(out_spec, l_spec, r_spec, whole, whole),
        out_specs=(out_spec, whole),
        axis_names=rest,
        check_vma=False,
    )
    return shard_map.vary(over_rest(*arguments), reducer.varying)


def _on_device(
    reducer: Reducer,
    product: Product,
    initial: Any,
    left: Any,
    right: Any,
    weights: Any,
    scales: Any,
    over: tuple[str, ...],
) -> tuple[list[jax.Array], jax.Array | None]:
    mine = dataclasses.replace(product, left=left, right=right, place=None)
    s_NxTxI, r_NxTxJ = mine.matrices()
    shape = tuple(x.shape[1 + i] for x, free in zip((left, right), mine.free, strict=True) for i in free)
    matrix = (s_NxTxI.shape[2], r_NxTxJ.shape[2])
    dtype = product.eqn.outvars[0].aval.dtype
    sums, squares = sums_of_products(
        s_NxTxI,
        r_NxTxJ,
        weights,
        scales,
        None if initial is None else [x.reshape(matrix) for x in initial],
        finish=lambda g: at_least_f32(product.pre(g.astype(dtype))),
        add=lambda sums, g, weight, scale: reducer.added(sums, g, weight, scale, None),
        num_sums=len(reducer.statistics),
        norms=reducer.norms,
        tile=_tile(reducer, product, *matrix, initial is not None),
        precision=product.eqn.params["precision"],
    )
    if over and squares is not None:
        squares = jax.lax.psum(squares, over)
    return [x.reshape(shape) for x in sums], squares


def _operands(product: Product) -> str:
    dtypes = {x.dtype for x in (product.left, product.right)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        return f"operands of {' and '.join(sorted(map(str, dtypes)))}"
    if product.eqn.outvars[0].aval.dtype not in (jnp.bfloat16, jnp.float32) or product.dtype != jnp.float32:
        return f"gradients of {product.dtype}"
    precision = product.eqn.params["precision"]
    known = (None, jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST)
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    if pair[0] != pair[1] or not any(pair[0] is p for p in known):
        return f"precision {precision}"
    return ""


def _place(product: Product) -> str:
    """A kernel is a program for one device: all mesh axes must be manual, or be made so."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        is_one = jax.device_count() == 1 and product.place is None
        return "" if is_one else "no shard_map around that would say where the operands lie"
    rest = shard_map.automatic_axes()
    if any(t == AxisType.Explicit for t in mesh.axis_types):
        return "a mesh with explicit axes"
    if product.place is None:
        large = [a for a in rest if mesh.shape[a] > 1]
        return f"the compiler places it on the mesh axes {', '.join(sorted(large))}" if large else ""
    if product.place.mesh is not None or not _names(product.place.axes) <= rest:
        return "placed on another mesh"
    parts = _parts(product)
    if any(size % part for size, part in zip(product.shape, parts, strict=True)):
        return f"shape {product.shape} does not divide into {parts} parts"
    return ""


def _size(reducer: Reducer, product: Product) -> str:
    if reducer.num_examples == 1:  # XLA applies φ to the product as it leaves the matrix units
        return "one example at a time"
    length = math.prod(product.left.shape[1 + i] for i in product.contracted[0])
    if length < _SHORTEST:
        return f"a sequence of {length}"
    rows, columns = _matrix(product)
    tile = _tile(reducer, product, rows, columns, True)
    if tile is None:
        return "no tile fits into the vector memory"
    padded = -(-rows // tile.rows) * tile.rows * -(-columns // tile.columns) * tile.columns
    return f"a gradient as small as {rows} x {columns}" if rows * columns < _SMALLEST * padded else ""


def _functions(reducer: Reducer, product: Product) -> str:
    """`pre` and φ are traced inside the kernel."""
    g = jax.ShapeDtypeStruct((8, 128), product.eqn.outvars[0].aval.dtype)
    for name, fn in [("the gradient's tail", product.pre), *((f"φ of {s.name!r}", s.fn) for s in reducer.statistics)]:
        program = jax.make_jaxpr(fn)(g if fn is product.pre else jax.ShapeDtypeStruct(g.shape, product.dtype))
        if program.consts:
            return f"{name} holds arrays"
        if fn is not product.pre and program.out_avals[0].dtype != jnp.float32:
            return f"{name} is of {program.out_avals[0].dtype}"
        for eqn in jaxprs.inline(program).jaxpr.eqns:
            if not _is_elementwise(eqn):
                return f"{name} has a `{eqn.primitive.name}`"
    return ""


def _is_elementwise(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name == "broadcast_in_dim":
        return all(math.prod(v.aval.shape) == 1 for v in eqn.invars)
    return eqn.primitive.name in _ELEMENTWISE and all(
        jnp.dtype(v.aval.dtype).itemsize <= 4 for v in (*eqn.invars, *eqn.outvars)
    )


def _names(axes: Sequence[Any]) -> frozenset[str]:
    return frozenset(
        a for entry in axes if entry is not None for a in (entry if isinstance(entry, tuple) else (entry,))
    )


def _parts(product: Product) -> tuple[int, ...]:
    """In how many parts devices have each dimension of the gradient."""
    if product.place is None:
        return (1,) * len(product.shape)
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(math.prod(sizes[a] for a in _names((entry,))) for entry in product.place.axes)


def _matrix(product: Product) -> tuple[int, int]:
    """Rows and columns of one device's part of the gradient."""
    mine = [size // part for size, part in zip(product.shape, _parts(product), strict=True)]
    num_left = len(product.free[0])
    return math.prod(mine[:num_left]), math.prod(mine[num_left:])


def _tile(reducer: Reducer, product: Product, rows: int, columns: int, has_initial: bool) -> tiles.Tile | None:
    length = math.prod(product.left.shape[1 + i] for i in product.contracted[0])
    itemsize = rounded_to(product.left.dtype, product.eqn.params["precision"]).itemsize
    return tiles.choose(rows, columns, length, itemsize, len(reducer.statistics), has_initial, tiles.device_kind())
