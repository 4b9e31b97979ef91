"""Rewrites of the gradients of embeddings into a scatter-add of rows into one table; every one keeps the program's results.

- A product with one-hot ids, Σ_t onehot(id_t) r_tᵀ, adds r_t to row id_t (`one_hot_products`).
- A scatter-add into a slice of a table, padded to the table, is one into the table (`padded_scatters`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from perex_t5x.per_example.engine import jaxprs, plan, shard_map
from perex_t5x.per_example.engine.rewrites.tools import Rule, rewritten, tails_of
from perex_t5x.per_example.kernels import dispatch

# A table of fewer rows: the product with one-hot ids is little work, and faster than sorting ids.
SMALLEST_TABLE = 128

Sources = dict[core.Var, tuple[core.JaxprEqn, int]]


# --- products with one-hot ids ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OneHot:
    """`chain` applied to ids == 0, 1, 2, ... along `axis`. Only moves of elements, casts and repetitions."""

    ids: Any  # of the comparison's shape, or of size one along `axis`
    axis: int
    shape: tuple[int, ...]  # of the comparison
    chain: tuple[core.JaxprEqn, ...]

    def ids_like_result(self, ids: jax.Array) -> tuple[jax.Array, int]:
        """(the ids in the order of the chain's result, of size one along the axis of classes, that axis)."""
        axis = self.axis
        if ids.shape[axis] > 1:  # repeated along it
            ids = jax.lax.slice_in_dim(ids, 0, 1, axis=axis)
        ids = jnp.broadcast_to(ids, [1 if a == axis else size for a, size in enumerate(self.shape)])
        for eqn in self.chain:
            axis_after = _followed(eqn, axis)
            assert axis_after is not None, eqn
            shape = [1 if a == axis_after else size for a, size in enumerate(jaxprs.shape_of(eqn.outvars[0]))]
            if eqn.primitive.name == "transpose":
                ids = jax.lax.transpose(ids, eqn.params["permutation"])
            elif eqn.primitive.name == "broadcast_in_dim":
                ids = jax.lax.broadcast_in_dim(ids, shape, eqn.params["broadcast_dimensions"])
            else:
                ids = ids.reshape(shape)
            axis = axis_after
        return ids, axis


def one_hot_products(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """Σ_t onehot(id_t) r_tᵀ, the gradient of `one_hot(ids) @ table`: r_t is added to row id_t.

    T × table operations less. Where some r_t is not finite, 0 · r_t is NaN and every row of the product, which the rows of
    the scatter-add begin with. In programs for TPUs, for whose matrix units it is written like this, the product stays.
    """
    if dispatch.for_tpu():
        return program
    tails, sources = tails_of(program.jaxpr, wanted), jaxprs.source_of(program.jaxpr)
    depends = jaxprs.dependent(program.jaxpr, batched)
    rules: dict[int, Rule] = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name != "dot_general" or eqn.outvars[0] not in tails or eqn.params["dimension_numbers"][1][0]:
            continue
        for k in (0, 1):
            one_hot = _one_hot(eqn.invars[k], sources)
            if one_hot is None or not (isinstance(one_hot.ids, core.Var) and one_hot.ids in depends):
                continue
            axis = functools.reduce(lambda a, e: a if a is None else _followed(e, a), one_hot.chain, one_hot.axis)
            free = set(range(len(jaxprs.shape_of(eqn.invars[k])))) - set(eqn.params["dimension_numbers"][0][k])
            # Anything else that the product keeps of the one-hot operand would be an axis of the gradient besides classes.
            if free == {axis} and one_hot.shape[one_hot.axis] >= SMALLEST_TABLE:
                rules[id(eqn)] = functools.partial(_scattered, k, one_hot)
    return rewritten(program, rules)


def _scattered(k: int, one_hot: OneHot, product: core.JaxprEqn, arguments: Sequence[Any], read: Any) -> list[Any]:
    contracted, _ = product.params["dimension_numbers"]
    ids, axis = one_hot.ids_like_result(read(one_hot.ids))
    classes = one_hot.shape[one_hot.axis]
    ids_T = ids.transpose(*contracted[k], axis).reshape(-1)
    other, mine = arguments[1 - k], contracted[1 - k]
    free = [a for a in range(other.ndim) if a not in mine]
    row = [other.shape[a] for a in free]
    # A product adds up in float32 at least, and rounds once.
    result = jaxprs.dtype_of(product.outvars[0])
    rows_TxD = other.transpose(*mine, *free).reshape(ids_T.size, math.prod(row))
    rows_TxD = rows_TxD.astype(jnp.promote_types(result, jnp.float32))
    begin_VxD = jnp.broadcast_to(jnp.sum(0 * rows_TxD, axis=0), (classes, rows_TxD.shape[1]))
    g_VxD = _add_rows(begin_VxD, ids_T, rows_TxD).astype(result)
    return [g_VxD.reshape(classes, *row) if k == 0 else g_VxD.T.reshape(*row, classes)]


def _add_rows(table_VxD: jax.Array, ids_T: jax.Array, rows_TxD: jax.Array) -> jax.Array:
    """A scatter-add that drops ids out of range, negative ones included."""
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    ids_T = ids_T.astype(jnp.promote_types(ids_T.dtype, jnp.int32))
    return jax.lax.scatter_add(table_VxD, ids_T[:, None], rows_TxD, numbers, mode=mode)


def _one_hot(v: Any, sources: Sources) -> OneHot | None:
    """What a value is the one-hot encoding of, if it visibly is one."""
    chain: list[core.JaxprEqn] = []
    while isinstance(v, core.Var) and v in sources:
        eqn = sources[v][0]
        if eqn.primitive.name == "eq":
            shape = jaxprs.shape_of(v)
            for a, b in (eqn.invars, eqn.invars[::-1]):
                axis = _counting_axis(a, sources)
                if axis is not None and jaxprs.shape_of(a)[axis] == shape[axis] and _is_constant(b, axis, sources):
                    return OneHot(b, axis, shape, tuple(chain))
            return None
        if eqn.primitive.name not in _FOLLOWED:
            return None
        chain.insert(0, eqn)
        v = eqn.invars[0]
    return None


_FOLLOWED = {"convert_element_type", "copy", "stop_gradient", "transpose", "reshape", "squeeze", "broadcast_in_dim"}


def _followed(eqn: core.JaxprEqn, axis: int) -> int | None:
    """Where an axis of an equation's argument is in its result; None where it is there no longer as a whole."""
    name, before, after = eqn.primitive.name, *map(jaxprs.shape_of, (eqn.invars[0], eqn.outvars[0]))
    if name == "transpose":
        return list(eqn.params["permutation"]).index(axis)
    if name == "broadcast_in_dim":
        to = eqn.params["broadcast_dimensions"][axis]
        return to if after[to] == before[axis] else None
    if name not in ("reshape", "squeeze"):
        return axis
    # The same elements before it and behind it.
    outer = math.prod(before[:axis])
    places = (a for a, size in enumerate(after) if size == before[axis] and math.prod(after[:a]) == outer)
    return next(places, None) if before[axis] > 1 else None


def _counting_axis(v: Any, sources: Sources) -> int | None:
    """The axis along which a value is 0, 1, 2, ..., visibly, and the same along all others."""
    if not isinstance(v, core.Var) or v not in sources:
        return None
    eqn = sources[v][0]
    dtype = jaxprs.dtype_of(v)
    if not np.issubdtype(dtype, np.integer):
        return None
    if eqn.primitive.name == "iota":
        axis: int | None = eqn.params["dimension"]
    elif eqn.primitive.name in _FOLLOWED:
        before = _counting_axis(eqn.invars[0], sources)
        axis = None if before is None else _followed(eqn, before)
    else:
        axis = None
    # In a type that is too narrow the numbers begin again from its smallest.
    return axis if axis is not None and jaxprs.shape_of(v)[axis] - 1 <= np.iinfo(dtype).max else None


def _is_constant(v: Any, axis: int, sources: Sources) -> bool:
    """Whether a value of integers is visibly the same along an axis."""
    if not isinstance(v, core.Var) or not np.issubdtype(jaxprs.dtype_of(v), np.integer):
        return False
    if jaxprs.shape_of(v)[axis] == 1:
        return True
    eqn = sources[v][0] if v in sources else None
    if eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return False
    dims = list(eqn.params["broadcast_dimensions"])
    return axis not in dims or jaxprs.shape_of(eqn.invars[0])[dims.index(axis)] == 1


# --- a slice of a table -----------------------------------------------------------------------------------------------


def padded_scatters(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """The gradient of `table[a:b][ids]`, a scatter-add into zeros that is padded to the table: a scatter-add into that."""
    del batched
    tails, sources = tails_of(program.jaxpr, wanted), jaxprs.source_of(program.jaxpr)
    rules: dict[int, Rule] = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name != "pad" or eqn.outvars[0] not in tails or eqn.invars[0] not in tails:
            continue
        scatter = sources[eqn.invars[0]][0]
        first, *others = eqn.params["padding_config"]
        if (
            scatter.primitive.name == "scatter-add"
            and plan.is_zeros(scatter.invars[0], sources)
            and plan.is_zeros(eqn.invars[1], sources)
            and min(first[:2]) >= 0
            and all(width == (0, 0, 0) for width in ((0, 0, first[2]), *others))
            and _indexes_rows(scatter)
        ):
            rules[id(eqn)] = functools.partial(_unpadded, scatter)
    return rewritten(program, rules)


def _indexes_rows(scatter: core.JaxprEqn) -> bool:
    """Whether the indices are of the first axis, of which one element is added at a time."""
    numbers = scatter.params["dimension_numbers"]
    return (
        tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and tuple(numbers.inserted_window_dims) == (0,)
        and not numbers.operand_batching_dims
    )


def _unpadded(scatter: core.JaxprEqn, pad: core.JaxprEqn, arguments: Sequence[Any], read: Any) -> list[Any]:
    del arguments
    zeros, ids, updates = (read(v) for v in scatter.invars)
    low, high, _ = pad.params["padding_config"][0]
    length, total = zeros.shape[0], zeros.shape[0] + low + high
    # Ids out of the slice's range are treated as the scatter-add into the slice does, before they are ids of the table.
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
    if "CLIP" in str(scatter.params["mode"]):
        ids = jnp.clip(ids, 0, length - 1) + low
    else:
        ids = jnp.where((ids >= 0) & (ids < length), ids + low, total)
    table = shard_map.vary(jnp.zeros((total, *zeros.shape[1:]), zeros.dtype), shard_map.varying_axes(zeros))
    params = {**scatter.params, "mode": jax.lax.GatherScatterMode.FILL_OR_DROP}
    return jaxprs.bind_with(scatter, [table, ids, updates], params)
