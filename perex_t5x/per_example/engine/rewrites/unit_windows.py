"""Gathers and scatters without window axes of size one.

`jnp.take_along_axis` makes axes of size one, such as the leading axis of one example, a part of the window. With the
examples' axis in front XLA then no longer sees that each row has an index of its own: the gradient of chosen logits, for a
whole batch a comparison with the ids, becomes a scatter into as many numbers as there are logits. On a TPU that took a
tenth of a decoder's step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from perex_t5x.per_example.engine import jaxprs, primitives


def rule_for(eqn: core.JaxprEqn) -> Callable[[core.JaxprEqn, Sequence[Any]], list[Any]] | None:
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


def _gathered(eqn: core.JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
    operand, indices = arguments
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
    # Back in the original shape: who reads the result may need the axes, and reshapes are free.
    out = jaxprs.bind_with(eqn, [jnp.squeeze(operand, axes), indices], params)[0]
    return [jnp.expand_dims(out, places)]


def _scattered(eqn: core.JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
    operand, indices, updates = arguments
    n = eqn.params["dimension_numbers"]
    axes, places = _of_scatter(eqn)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=_without(n.update_window_dims, places),
        inserted_window_dims=_without(n.inserted_window_dims, axes),
        scatter_dims_to_operand_dims=_without(n.scatter_dims_to_operand_dims, axes),
        operand_batching_dims=_without(n.operand_batching_dims, axes),
        scatter_indices_batching_dims=n.scatter_indices_batching_dims,
    )
    arguments = [jnp.squeeze(operand, axes), indices, jnp.squeeze(updates, places)]
    out = jaxprs.bind_with(eqn, arguments, {**eqn.params, "dimension_numbers": numbers})[0]
    return [jnp.expand_dims(out, axes)]
