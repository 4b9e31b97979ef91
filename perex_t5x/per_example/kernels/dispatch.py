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

from perex_t5x.per_example.engine import jaxprs, primitives, shard_map
from perex_t5x.per_example.kernels import tiles
from perex_t5x.per_example.reductions.reducer import at_least_f32

if TYPE_CHECKING:
    from perex_t5x.per_example.reductions.dense import Operands, Product

NOT_FOR_TPUS = "not compiled for TPUs"
_SHORTEST = 16  # with a shorter sequence the products are little work, and XLA's loop is as good
_SMALLEST = 0.5  # of the tiles' area must be the gradient's, for the same reason


def unsupported_reason(product: Product) -> str:
    """Why the kernel cannot take this product; empty where it can."""
    if not product.context.kernels:
        return "kernels are turned off"
    if not for_tpu():
        return NOT_FOR_TPUS
    return _operands(product) or _sharding(product) or _size(product) or _functions(product)


def for_tpu() -> bool:
    """Whether the program is for TPUs, as far as is known when it is traced."""
    return platform() == "tpu"


def platform() -> str:
    """What the program is for: devices of the enclosing mesh, attached or not, else JAX's default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def reduce(product: Product, operands: Operands) -> tuple[list[jax.Array], jax.Array | None]:
    """The sums, and Σ g_n² of each example, by the kernel."""
    context, sharding = product.context, product.spec.sharding
    if product.spec.initial is None:
        # From zeros: these the kernel writes itself, in vector memory, and saves reading them.
        operands = operands._replace(sums=None)
    # Pallas wants all operands to vary over the same axes.
    operands = shard_map.vary(operands, context.varying)
    auto_axes = shard_map.automatic_axes()
    if not auto_axes:
        return _on_device(product, operands, ())
    # A kernel is a program for one device, and the compiler cannot divide it over mesh axes that it handles: make them
    # manual here, with each device's part of the gradient where the sums are wanted, or everything everywhere.
    whole = PartitionSpec()
    l_spec, r_spec, out_spec, over = whole, whole, whole, ()
    if sharding is not None:
        l_sharding, r_sharding = product.operand_shardings()
        l_spec, r_spec, out_spec = (PartitionSpec(*s.axes) for s in (l_sharding, r_sharding, sharding) if s is not None)
        over = tuple(sorted(_names(sharding.axes)))

    def local(*operands: Any) -> Any:
        return _on_device(product, operands, over)

    over_auto_axes = jax.shard_map(
        local,
        in_specs=(out_spec, l_spec, r_spec, whole, whole, out_spec),
        out_specs=(out_spec, whole),
        axis_names=auto_axes,
        check_vma=False,
    )
    return shard_map.vary(over_auto_axes(*operands), context.varying)


def _on_device(product: Product, operands: Any, over: tuple[str, ...]) -> tuple[list[jax.Array], jax.Array | None]:
    initial, left, right, weights, scales, seen = operands
    context, spec = product.context, product.spec
    mine = dataclasses.replace(product, left=left, right=right)
    s_NxTxI, r_NxTxJ = mine.matrices()
    shape = tuple(x.shape[1 + i] for x, free in zip((left, right), mine.free, strict=True) for i in free)
    matrix = (s_NxTxI.shape[2], r_NxTxJ.shape[2])
    # φ sees the gradient as the loss's own product gives it: rounded to its dtype, although the kernel sums in float32.
    dtype = jaxprs.dtype_of(product.eqn.outvars[0])
    tile = _tile(product, *matrix, initial is not None)
    assert tile is not None, "unsupported_reason has asked for one, with sums to add to, which take more memory"
    # Here, since to import Pallas takes as long as to import all of the engine, and no CPU needs it.
    from perex_t5x.per_example.kernels.matmul import sums_of_products

    def add(sums: Sequence[jax.Array], g: jax.Array, weight: Any, scale: Any, *here: jax.Array) -> list[jax.Array]:
        return context.seeing(dict(zip(seen, here, strict=True))).added(sums, g, weight, scale)

    sums, squares = sums_of_products(
        s_NxTxI,
        r_NxTxJ,
        weights,
        scales,
        None if initial is None else [x.reshape(matrix) for x in initial],
        seen=[x.reshape(matrix) for x in seen.values()],
        finish=lambda g: at_least_f32(spec.pre(g.astype(dtype))),
        add=add,
        num_sums=len(context.statistics),
        norms=context.norms,
        tile=tile,
        precision=product.eqn.params["precision"],
    )
    if over and squares is not None:  # of this device's part of the gradient alone
        squares = jax.lax.psum(squares, over)
    return [x.reshape(shape) for x in sums], squares


# --- what the kernel cannot take --------------------------------------------------------------------------------------


def _operands(product: Product) -> str:
    dtypes = {x.dtype for x in (product.left, product.right)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        return f"operands of {' and '.join(sorted(map(str, dtypes)))}"
    if jaxprs.dtype_of(product.eqn.outvars[0]) not in (jnp.bfloat16, jnp.float32) or product.dtype != jnp.float32:
        return f"gradients of {product.dtype}"
    # Mosaic's matrix product takes these precisions, the same for both operands, and no others.
    precision = product.eqn.params["precision"]
    known = (None, jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST)
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    if pair[0] != pair[1] or not any(pair[0] is p for p in known):
        return f"precision {precision}"
    others = [
        f"operand {name!r} of {x.dtype}" for name, x in product.context.operands.items() if x.dtype != jnp.float32
    ]
    return others[0] if others else ""


def _sharding(product: Product) -> str:
    """A kernel is a program for one device: all mesh axes must be manual, or be made so."""
    mesh, sharding = jax.sharding.get_abstract_mesh(), product.spec.sharding
    if mesh.empty:
        is_one = jax.device_count() == 1 and sharding is None
        return "" if is_one else "not inside a shard_map, which would say how the operands are divided over devices"
    auto_axes = shard_map.automatic_axes()
    if any(t == AxisType.Explicit for t in mesh.axis_types):
        return "a mesh with explicit axes"
    if sharding is None:
        large = [a for a in auto_axes if mesh.shape[a] > 1]
        return f"the compiler shards it over the mesh axes {', '.join(sorted(large))}" if large else ""
    if sharding.mesh is not None or not _names(sharding.axes) <= auto_axes:
        return "sharded over another mesh"
    parts = _parts(product)
    if any(size % part for size, part in zip(product.shape, parts, strict=True)):
        return f"shape {product.shape} does not divide into {parts} parts"
    return ""


def _size(product: Product) -> str:
    if product.length < _SHORTEST:
        return f"a sequence of {product.length}"
    rows, columns = _matrix(product)
    tile = _tile(product, rows, columns, True)
    if tile is None:
        return "no tile fits into the vector memory"
    padded = -(-rows // tile.rows) * tile.rows * -(-columns // tile.columns) * tile.columns
    return f"a gradient as small as {rows} x {columns}" if rows * columns < _SMALLEST * padded else ""


def _functions(product: Product) -> str:
    """`pre` and φ are traced inside the kernel, where arrays cannot be closed over and few operations compile."""
    g = jax.ShapeDtypeStruct((8, 128), jaxprs.dtype_of(product.eqn.outvars[0]))
    pre, sums_like = product.spec.pre, jax.ShapeDtypeStruct(g.shape, product.dtype)
    for name, fn, like in [
        ("the gradient's tail", pre, [g]),
        *((f"φ of {s.name!r}", s.fn, [sums_like] * (1 + len(s.operands))) for s in product.context.statistics),
    ]:
        program = jax.make_jaxpr(fn)(*like)
        if program.consts:
            return f"{name} holds arrays"
        if fn is not pre and program.out_avals[0].dtype != jnp.float32:
            return f"{name} is of {program.out_avals[0].dtype}"
        for eqn in jaxprs.inline(program).jaxpr.eqns:
            if not _is_elementwise(eqn):
                return f"{name} has a `{eqn.primitive.name}`"
    return ""


def _is_elementwise(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name == "broadcast_in_dim":
        return all(jaxprs.size_of(v) == 1 for v in eqn.invars)
    return eqn.primitive.name in primitives.KERNEL_ELEMENTWISE and all(
        jnp.dtype(jaxprs.dtype_of(v)).itemsize <= 4 for v in (*eqn.invars, *eqn.outvars)
    )


# --- sizes ------------------------------------------------------------------------------------------------------------


def _names(axes: Sequence[Any]) -> frozenset[str]:
    return frozenset(
        a for entry in axes if entry is not None for a in (entry if isinstance(entry, tuple) else (entry,))
    )


def _parts(product: Product) -> tuple[int, ...]:
    """In how many parts devices have each dimension of the gradient."""
    if product.spec.sharding is None:
        return (1,) * len(product.shape)
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(math.prod(sizes[a] for a in _names((entry,))) for entry in product.spec.sharding.axes)


def _matrix(product: Product) -> tuple[int, int]:
    """Rows and columns of one device's part of the gradient."""
    mine = [size // part for size, part in zip(product.shape, _parts(product), strict=True)]
    num_left = len(product.free[0])
    return math.prod(mine[:num_left]), math.prod(mine[num_left:])


def _tile(product: Product, rows: int, columns: int, has_initial: bool) -> tiles.Tile | None:
    itemsize = tiles.rounded_to(product.left.dtype, product.eqn.params["precision"]).itemsize
    num_sums, num_read = len(product.context.statistics), len(product.context.operands)
    kind = tiles.device_kind()
    return tiles.choose(rows, columns, product.length, itemsize, num_sums, has_initial, kind, num_read)
