"""Rewrites of the gradients of embeddings into a scatter-add of rows into one table; every one keeps the program's results.

- A product with one-hot ids, Σ_t onehot(id_t) r_tᵀ, adds r_t to row id_t (`one_hot_products`).
- A scatter-add that is padded, cut or multiplied by a number is another scatter-add (`after_scatters`).
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
                rules[id(eqn)] = Rule(functools.partial(_scattered, k, one_hot), [one_hot.ids])
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
    # Times zero twice: once so that no sum overflows, and once more where `reductions.terms` sees it.
    begin_VxD = 0 * jnp.broadcast_to(jnp.sum(0 * rows_TxD, axis=0), (classes, rows_TxD.shape[1]))
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


# --- what follows a scatter-add ---------------------------------------------------------------------------------------


def after_scatters(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """A scatter-add of rows into zeros that is padded, cut or multiplied by a number: one with other ids or rows.

    Padded is the gradient of `table[a:b][ids]`, cut that of tables which are looked up as one, multiplied that of
    `(table * 8)[ids]`.
    """
    # What follows may be several of these, the first of which only is next to the scatter-add.
    while rules := _after_scatters(program, wanted):
        program = rewritten(program, rules)
    return program


def _after_scatters(program: core.ClosedJaxpr, wanted: tuple[int, ...]) -> dict[int, Rule]:
    tails, sources = tails_of(program.jaxpr, wanted), jaxprs.source_of(program.jaxpr)
    rules: dict[int, Rule] = {}
    for eqn in program.jaxpr.eqns:
        if not any(v in tails for v in eqn.outvars):
            continue
        for k, v in enumerate(eqn.invars):
            scatter = sources[v][0] if isinstance(v, core.Var) and v in sources else None
            if scatter is not None and _adds_rows_to_zeros(scatter, sources):
                rule = _rule_after(eqn, k, sources)
                if rule is not None:
                    rules[id(eqn)] = Rule(functools.partial(rule, scatter), scatter.invars)
    return rules


def _rule_after(eqn: core.JaxprEqn, k: int, sources: Sources) -> Any:
    """How to apply an equation to ids and rows instead, if its operand `k` is a table of them; None: not known."""
    name, shape = eqn.primitive.name, jaxprs.shape_of(eqn.invars[k])
    if name == "pad" and k == 0:
        (low, high, inside), *others = eqn.params["padding_config"]
        if plan.is_zeros(eqn.invars[1], sources) and min(low, high) >= 0 and not inside and not np.any(others):
            return _padded
    if name == "split" and eqn.params["axis"] == 0:
        return _split
    if name == "slice" and not eqn.params["strides"] and jaxprs.shape_of(eqn.outvars[0])[1:] == shape[1:]:
        return _sliced
    if name == "neg":
        return functools.partial(_multiplied, 0)
    if name in ("mul", "div"):
        other = eqn.invars[1 - k]
        number = other.val if isinstance(other, core.Literal) else None
        is_number = number is not None and np.ndim(number) == 0 and np.isfinite(number)
        # In float16 a sum that overflows before it is multiplied may not afterwards.
        is_wide = jnp.finfo(jaxprs.dtype_of(eqn.outvars[0])).maxexp >= jnp.finfo(jnp.float32).maxexp
        if is_number and is_wide and (name == "mul" or (k == 0 and number)):
            return functools.partial(_multiplied, k)
    return None


def _adds_rows_to_zeros(scatter: core.JaxprEqn, sources: Sources) -> bool:
    """A scatter-add into zeros whose indices are of the first axis, of which one element is added at a time."""
    if scatter.primitive.name != "scatter-add" or not plan.is_zeros(scatter.invars[0], sources):
        return False
    numbers = scatter.params["dimension_numbers"]
    return (
        tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and tuple(numbers.inserted_window_dims) == (0,)
        and not numbers.operand_batching_dims
    )


def _padded(scatter: core.JaxprEqn, eqn: core.JaxprEqn, arguments: Sequence[Any], read: Any) -> list[Any]:
    del arguments
    return [_moved(scatter, read, eqn.params["padding_config"][0][0], jaxprs.shape_of(eqn.outvars[0])[0])]


def _sliced(scatter: core.JaxprEqn, eqn: core.JaxprEqn, arguments: Sequence[Any], read: Any) -> list[Any]:
    del arguments
    return [_moved(scatter, read, -eqn.params["start_indices"][0], jaxprs.shape_of(eqn.outvars[0])[0])]


def _split(scatter: core.JaxprEqn, eqn: core.JaxprEqn, arguments: Sequence[Any], read: Any) -> list[Any]:
    del arguments
    sizes = eqn.params["sizes"]
    return [_moved(scatter, read, -sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _multiplied(k: int, scatter: core.JaxprEqn, eqn: core.JaxprEqn, arguments: Sequence[Any], read: Any) -> list[Any]:
    zeros, ids, updates = (read(v) for v in scatter.invars)
    operands = list(arguments)
    operands[k] = updates
    return jaxprs.bind(scatter, [_zeros(zeros, zeros.shape[0]), ids, *jaxprs.bind(eqn, operands)])


def _moved(scatter: core.JaxprEqn, read: Any, by: int, total: int) -> jax.Array:
    """The scatter-add into a table of `total` rows, in which row i is row i + `by`; rows that are not there are dropped."""
    zeros, ids, updates = (read(v) for v in scatter.invars)
    length = zeros.shape[0]
    # Ids out of range are treated as the scatter-add does, before they are ids of the other table.
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
    if "CLIP" in str(scatter.params["mode"]):
        ids = jnp.clip(ids, 0, length - 1)
    is_kept = (ids >= max(0, -by)) & (ids < min(length, total - by))
    ids = jnp.where(is_kept, ids + by, total)
    params = {**scatter.params, "mode": jax.lax.GatherScatterMode.FILL_OR_DROP}
    return jaxprs.bind_with(scatter, [_zeros(zeros, total), ids, updates], params)[0]


def _zeros(like: jax.Array, rows: int) -> jax.Array:
    """A table of zeros of its own: those that another equation reads, too, would be computed for all examples."""
    return shard_map.vary(jnp.zeros((rows, *like.shape[1:]), like.dtype), shard_map.varying_axes(like))
