"""The same program without axes of size one inside.

A loss is called with one example whose leading axis is kept. With the examples' axis in front the values are then
[N, 1, T, D], and XLA, which decides by shapes what to fuse with a product, fuses less around that than around [N, T, D]. So
equations of common kinds are applied to values without their axes of size one; others get them back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core.primitives import reshape_p, squeeze_p

from perex_t5x.per_example.engine import jaxprs, primitives

# Writes an equation of arguments without axes of size one: (writer, equation, its arguments) -> its results without them.
Rule = Callable[[jaxprs.Writer, core.JaxprEqn, Sequence[Any]], Sequence[Any]]


def without_unit_axes(program: core.ClosedJaxpr, kept: Collection[core.Var] = ()) -> core.ClosedJaxpr:
    """Computes the same; equations that make variables of `kept` are left as they are."""
    jaxpr = program.jaxpr
    if not any(1 in jaxprs.shape_of(v) for eqn in jaxpr.eqns for v in eqn.invars):
        return program
    writer = jaxprs.Writer(program)
    # Each variable in the one shape, the other, or both: reshaped once, where first needed, so that chains of equations pass
    # the small values on without a reshape in between.
    whole: dict[core.Var, Any] = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
    small: dict[core.Var, Any] = {}

    def name(v: Any, reader: core.JaxprEqn) -> Any:
        if isinstance(v, core.Literal):
            return v
        if v not in whole:
            whole[v] = _reshape(writer, reader, small[v], jaxprs.shape_of(v))
        return whole[v]

    def name_small(v: Any, reader: core.JaxprEqn) -> Any:
        if isinstance(v, core.Literal) or 1 not in jaxprs.shape_of(v):
            return name(v, reader)
        if v not in small:
            units = tuple(a for a, size in enumerate(jaxprs.shape_of(v)) if size == 1)
            small[v] = _squeeze(writer, reader, whole[v], units)
        return small[v]

    for eqn in jaxpr.eqns:
        is_kept = any(v in kept for v in eqn.outvars)
        rule = None if is_kept else _rule(eqn)
        if rule is not None:
            outs = rule(writer, eqn, [name_small(v, eqn) for v in eqn.invars])
            small.update(zip(eqn.outvars, outs, strict=True))
            continue
        invars = [name(v, eqn) for v in eqn.invars]
        # Gathers and scatters stay whole, but their windows need not.
        windows = None if is_kept else _rule_of_windows(eqn)
        if windows is not None:
            # Back in the original shape: who reads the result may need the axes, and reshapes are free.
            (out,) = windows(writer, eqn, invars)
            whole[eqn.outvars[0]] = _reshape(writer, eqn, out, jaxprs.shape_of(eqn.outvars[0]))
        else:
            writer.take(eqn if is_kept else _smaller_inside(eqn), invars)
            whole.update((v, v) for v in eqn.outvars)
    last = jaxpr.eqns[-1]
    return writer.program([name(v, last) for v in jaxpr.outvars])


def _smaller_inside(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """The equation; values of the loop, branch or remat region that it may be lose their axes of size one."""
    if eqn.primitive.name == "cond":
        branches = tuple(without_unit_axes(branch) for branch in eqn.params["branches"])
        return eqn.replace(params={**eqn.params, "branches": branches})
    if eqn.primitive.name != "scan" and eqn.primitive.name not in primitives.REMAT:
        return eqn
    body = eqn.params["jaxpr"]
    smaller = without_unit_axes(jaxprs.inline(jaxprs.closed(body)))
    if isinstance(body, core.ClosedJaxpr):
        return eqn.replace(params={**eqn.params, "jaxpr": smaller})
    # remat carries a program without constants: where the smaller one has some, the region stays as it is.
    return eqn if smaller.consts else eqn.replace(params={**eqn.params, "jaxpr": smaller.jaxpr})


def _reshape(writer: jaxprs.Writer, eqn: core.JaxprEqn, v: Any, shape: Sequence[int]) -> Any:
    """`v` in another shape; the equation is written as one of the line of `eqn`."""
    if jaxprs.shape_of(v) == tuple(shape):
        return v
    params = {"new_sizes": tuple(shape), "dimensions": None, "sharding": None}
    return writer.add(eqn, [v], [jaxprs.of_shape(v.aval, shape)], params, reshape_p)[0]


def _squeeze(writer: jaxprs.Writer, eqn: core.JaxprEqn, v: Any, axes: tuple[int, ...]) -> Any:
    shape = tuple(size for a, size in enumerate(jaxprs.shape_of(v)) if a not in axes)
    return writer.add(eqn, [v], [jaxprs.of_shape(v.aval, shape)], {"dimensions": axes}, squeeze_p)[0]


def _rule(eqn: core.JaxprEqn) -> Rule | None:
    """None where the equation has no axes of size one, or is of a kind that is not known here."""
    if not any(1 in jaxprs.shape_of(v) for v in (*eqn.invars, *eqn.outvars)):
        return None
    name = eqn.primitive.name
    if name in primitives.ELEMENTWISE:
        # Where ranks differ, axes do not belong together by their places. Scalars do not matter.
        shapes = {jaxprs.shape_of(v) for v in eqn.invars if jaxprs.shape_of(v)}
        if len(shapes) == 1:
            return _like
        return _elementwise if len({len(s) for s in shapes}) == 1 and len(eqn.outvars) == 1 else None
    if name == "pad":
        # Padding an axis of size one makes it longer: then it has to be there.
        widths = zip(jaxprs.shape_of(eqn.invars[0]), eqn.params["padding_config"], strict=True)
        return _pad if all(size != 1 or width == (0, 0, 0) for size, width in widths) else None
    if name == "slice":
        # A slice of nothing along an axis of size one: the result has that axis, of size zero.
        sizes = zip(jaxprs.shape_of(eqn.invars[0]), jaxprs.shape_of(eqn.outvars[0]), strict=True)
        return _slice if all(cut == 1 for size, cut in sizes if size == 1) else None
    return _RULES.get(name)


def _places(shape: Sequence[int]) -> dict[int, int]:
    """Axes that are not of size one -> their places among themselves.

    >>> _places((4, 1, 3))
    {0: 0, 2: 1}
    """
    return {axis: i for i, axis in enumerate(a for a, size in enumerate(shape) if size != 1)}


def _small(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _like(
    writer: jaxprs.Writer, eqn: core.JaxprEqn, invars: Sequence[Any], params: dict[str, Any] | None = None
) -> list[core.Var]:
    """The equation, perhaps with other parameters, whose results are as they were but for axes of size one."""
    return writer.add(eqn, invars, [jaxprs.of_shape(v.aval, _small(jaxprs.shape_of(v))) for v in eqn.outvars], params)


def _elementwise(writer: jaxprs.Writer, eqn: core.JaxprEqn, invars: Sequence[Any]) -> list[core.Var]:
    """Of different shapes ([T, D] and [T, 1], say): an axis of size one stays where the result's is longer."""
    out = jaxprs.shape_of(eqn.outvars[0])
    aligned = []
    for v, small in zip(eqn.invars, invars, strict=True):
        shape = tuple(size for size, whole in zip(jaxprs.shape_of(v), out, strict=False) if whole != 1)
        aligned.append(_reshape(writer, eqn, small, shape) if jaxprs.shape_of(v) else small)
    return _like(writer, eqn, aligned)


def _reshaped(writer: jaxprs.Writer, eqn: core.JaxprEqn, invars: Sequence[Any]) -> list[Any]:
    return [_reshape(writer, eqn, invars[0], _small(jaxprs.shape_of(eqn.outvars[0])))]


def _broadcast(writer: jaxprs.Writer, eqn: core.JaxprEqn, invars: Sequence[Any]) -> Sequence[Any]:
    to = _places(jaxprs.shape_of(eqn.outvars[0]))
    sizes = jaxprs.shape_of(eqn.invars[0])
    dims = tuple(to[d] for d, size in zip(eqn.params["broadcast_dimensions"], sizes, strict=True) if size != 1)
    shape = _small(jaxprs.shape_of(eqn.outvars[0]))
    if shape == jaxprs.shape_of(invars[0]):  # it only added axes of size one; dimensions are in order
        return invars
    return _like(writer, eqn, invars, {**eqn.params, "shape": shape, "broadcast_dimensions": dims, "sharding": None})


def _transpose(writer: jaxprs.Writer, eqn: core.JaxprEqn, invars: Sequence[Any]) -> Sequence[Any]:
    at = _places(jaxprs.shape_of(eqn.invars[0]))
    permutation = tuple(at[a] for a in eqn.params["permutation"] if a in at)
    if permutation == tuple(range(len(permutation))):
        return invars
    return _like(writer, eqn, invars, {**eqn.params, "permutation": permutation})


def _reduce(writer: jaxprs.Writer, eqn: core.JaxprEqn, invars: Sequence[Any]) -> Sequence[Any]:
    at = _places(jaxprs.shape_of(eqn.invars[0]))
    axes = tuple(at[a] for a in eqn.params["axes"] if a in at)
    return _like(writer, eqn, invars, {**eqn.params, "axes": axes}) if axes else invars


def _dot_general(writer: jaxprs.Writer, eqn: core.JaxprEqn, invars: Sequence[Any]) -> list[core.Var]:
    at = [_places(jaxprs.shape_of(v)) for v in eqn.invars]
    numbers = tuple(
        tuple(tuple(at[k][a] for a in axes if a in at[k]) for k, axes in enumerate(pair))
        for pair in eqn.params["dimension_numbers"]
    )
    return _like(writer, eqn, invars, {**eqn.params, "dimension_numbers": numbers})


def _slice(writer: jaxprs.Writer, eqn: core.JaxprEqn, invars: Sequence[Any]) -> list[Any]:
    """A slice may leave an axis of size one, which the result then loses."""
    p, at = eqn.params, _places(jaxprs.shape_of(eqn.invars[0]))
    params = {name: None if p[name] is None else tuple(p[name][a] for a in at) for name in p}
    shape = tuple(jaxprs.shape_of(eqn.outvars[0])[a] for a in at)
    cut = writer.add(eqn, invars, [jaxprs.of_shape(eqn.outvars[0].aval, shape)], params)[0]
    return [_reshape(writer, eqn, cut, _small(shape))]


def _pad(writer: jaxprs.Writer, eqn: core.JaxprEqn, invars: Sequence[Any]) -> list[Any]:
    at = _places(jaxprs.shape_of(eqn.invars[0]))
    params = {"padding_config": tuple(eqn.params["padding_config"][a] for a in at)}
    shape = tuple(jaxprs.shape_of(eqn.outvars[0])[a] for a in at)
    padded = writer.add(eqn, invars, [jaxprs.of_shape(eqn.outvars[0].aval, shape)], params)[0]
    return [_reshape(writer, eqn, padded, _small(shape))]


_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot_general,
    "expand_dims": _reshaped,
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "transpose": _transpose,
    **dict.fromkeys(primitives.AXIS_REDUCTIONS, _reduce),
}


def _rule_of_windows(eqn: core.JaxprEqn) -> Rule | None:
    """The rule that takes axes of size one out of this equation's windows; None where there are none."""
    if eqn.primitive.name == "gather" and _of_gather(eqn)[0]:
        return _gathered
    if eqn.primitive.name in primitives.SCATTERS and _of_scatter(eqn)[0]:
        return _scattered
    return None


def _units(operand: Any, not_window: Sequence[int], window: Sequence[int], indexed: Sequence[int]) -> Any:
    """(axes of size one of the operand's windows, their places in `window`)."""
    axes = [d for d in range(len(jaxprs.shape_of(operand))) if d not in not_window]
    # An axis that the indices address stays: an index into it may be out of range, and then drops the update.
    units = [(d, w) for d, w in zip(axes, window, strict=True) if jaxprs.shape_of(operand)[d] == 1 and d not in indexed]
    return [d for d, _ in units], [w for _, w in units]


def _of_gather(eqn: core.JaxprEqn) -> tuple[list[int], list[int]]:
    n = eqn.params["dimension_numbers"]
    not_window = (*n.collapsed_slice_dims, *n.operand_batching_dims)
    return _units(eqn.invars[0], not_window, n.offset_dims, n.start_index_map)


def _of_scatter(eqn: core.JaxprEqn) -> tuple[list[int], list[int]]:
    n = eqn.params["dimension_numbers"]
    not_window = (*n.inserted_window_dims, *n.operand_batching_dims)
    return _units(eqn.invars[0], not_window, n.update_window_dims, n.scatter_dims_to_operand_dims)


def _without(dims: Sequence[int], removed: Sequence[int]) -> tuple[int, ...]:
    """Numbers of the same axes after others are removed.

    >>> _without((0, 2, 3), (1,))
    (0, 1, 2)
    """
    return tuple(d - sum(r < d for r in removed) for d in dims if d not in removed)


def _gathered(writer: jaxprs.Writer, eqn: core.JaxprEqn, invars: Sequence[Any]) -> list[Any]:
    operand, indices = invars
    n = eqn.params["dimension_numbers"]
    axes, places = _of_gather(eqn)
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=_without(n.offset_dims, places),
        collapsed_slice_dims=_without(n.collapsed_slice_dims, axes),
        start_index_map=_without(n.start_index_map, axes),
        operand_batching_dims=_without(n.operand_batching_dims, axes),
        start_indices_batching_dims=n.start_indices_batching_dims,
    )
    sizes = tuple(s for d, s in enumerate(eqn.params["slice_sizes"]) if d not in axes)
    params = {**eqn.params, "dimension_numbers": numbers, "slice_sizes": sizes}
    out = eqn.outvars[0].aval
    small = jaxprs.of_shape(out, [size for d, size in enumerate(jaxprs.shape_of(eqn.outvars[0])) if d not in places])
    return writer.add(eqn, [_squeeze(writer, eqn, operand, tuple(axes)), indices], [small], params)


def _scattered(writer: jaxprs.Writer, eqn: core.JaxprEqn, invars: Sequence[Any]) -> list[Any]:
    operand, indices, updates = invars
    n = eqn.params["dimension_numbers"]
    axes, places = _of_scatter(eqn)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=_without(n.update_window_dims, places),
        inserted_window_dims=_without(n.inserted_window_dims, axes),
        scatter_dims_to_operand_dims=_without(n.scatter_dims_to_operand_dims, axes),
        operand_batching_dims=_without(n.operand_batching_dims, axes),
        scatter_indices_batching_dims=n.scatter_indices_batching_dims,
    )
    operand = _squeeze(writer, eqn, operand, tuple(axes))
    updates = _squeeze(writer, eqn, updates, tuple(places))
    small = jaxprs.of_shape(eqn.outvars[0].aval, jaxprs.shape_of(operand))
    return writer.add(eqn, [operand, indices, updates], [small], {**eqn.params, "dimension_numbers": numbers})
