"""Equations of one example's program, applied to all examples at once: values have a leading axis N.

`jax.vmap` does that for any equation. For the common ones it takes most of the time of tracing a program, and all it has to
do is to leave the leading axis alone: these are applied directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from perex_t5x.per_example.engine import jaxprs, primitives


def bind_batched(
    eqn: core.JaxprEqn, arguments: Sequence[Any], batched: Sequence[bool]
) -> tuple[Sequence[Any], Sequence[bool]]:
    """Applies one equation to all examples at once; the arguments marked `batched` have a leading axis N.

    Returns:
      The results, and which of them have an example axis.
    """
    if (direct := _directly(eqn, arguments, batched)) is not None:
        return direct, [True] * len(direct)
    in_axes = tuple(0 if b else None for b in batched)
    flags = jaxprs.flow(eqn, batched)
    out_axes = tuple(0 if f else None for f in flags)
    # spmd_axis_name=(): the example axis lies on no mesh axis. Left out, a sharding constraint inside the loss would say
    # nothing about it, and the compiler would be free to divide the examples over the model axes.
    over_examples = jax.vmap(
        lambda *x: tuple(jaxprs.bind(eqn, x)), in_axes=in_axes, out_axes=out_axes, spmd_axis_name=()
    )
    try:
        return over_examples(*arguments), flags
    except NotImplementedError as e:
        raise NotImplementedError(
            f"JAX cannot compute {eqn.primitive.name} for several examples at once ({e}). method='map' computes one example "
            "after another."
        ) from e


def _directly(eqn: core.JaxprEqn, arguments: Sequence[Any], batched: Sequence[bool]) -> list[Any] | None:
    """The results, all with an example axis; None where `vmap` has to find them."""
    name, p, n = eqn.primitive.name, eqn.params, arguments[batched.index(True)].shape[0]
    if name in primitives.ELEMENTWISE and len(eqn.outvars) == 1:
        rank = len(jaxprs.shape_of(eqn.outvars[0]))
        operands = []
        for v, x, b in zip(eqn.invars, arguments, batched, strict=True):
            # A scalar that examples share applies to all elements of an array. Beside scalars of the examples, which are now
            # an array, some primitives would not take it: then there is one for each.
            is_shared_scalar = not b and not jaxprs.shape_of(v) and rank > 0
            if len(jaxprs.shape_of(v)) != rank and not is_shared_scalar:
                return None
            operands.append(x if b or is_shared_scalar else jaxprs.for_all(x, n))
        return jaxprs.bind(eqn, operands)
    if name == "dot_general":
        return _dot_general(eqn, arguments, batched)
    # A padding value that differs by example is no padding value for all.
    if name not in _LEADING or tuple(batched) != (True, *[False] * (len(batched) - 1)):
        return None
    return jaxprs.bind_with(eqn, arguments, {**p, **_LEADING[name](p, n)})


def _shifted(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + 1 for a in axes)


def _dot_general(eqn: core.JaxprEqn, arguments: Sequence[Any], batched: Sequence[bool]) -> list[Any] | None:
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    if all(batched):
        contract = (_shifted(contract_l), _shifted(contract_r))
        pairs = ((0, *_shifted(batch_l)), (0, *_shifted(batch_r)))
    elif batched[0] and not batch_l:
        # The left operand's own axes come first in the result, the examples' axis before all others.
        contract, pairs = (_shifted(contract_l), contract_r), ((), ())
    else:
        return None
    return jaxprs.bind_with(eqn, arguments, {**eqn.params, "dimension_numbers": (contract, pairs)})


# Of one array: the parameters that change when it gets a leading axis of n examples.
_LEADING: dict[str, Callable[[dict[str, Any], int], dict[str, Any]]] = {
    "broadcast_in_dim": lambda p, n: {
        "shape": (n, *p["shape"]),
        "broadcast_dimensions": (0, *_shifted(p["broadcast_dimensions"])),
    },
    "pad": lambda p, n: {"padding_config": ((0, 0, 0), *p["padding_config"])},
    "reshape": lambda p, n: {"new_sizes": (n, *p["new_sizes"])},
    "slice": lambda p, n: {
        "start_indices": (0, *p["start_indices"]),
        "limit_indices": (n, *p["limit_indices"]),
        "strides": None if p["strides"] is None else (1, *p["strides"]),
    },
    "squeeze": lambda p, n: {"dimensions": _shifted(p["dimensions"])},
    "transpose": lambda p, n: {"permutation": (0, *_shifted(p["permutation"]))},
    **{name: lambda p, n: {"axes": _shifted(p["axes"])} for name in primitives.AXIS_REDUCTIONS},
}
