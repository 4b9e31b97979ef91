"""Small tools on jaxprs: inline calls, evaluate one equation (plain or batched), find what depends on what."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

# Calls whose body is simply run: after differentiation their special rules have done their work.
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


_PER_EXAMPLE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = (os.path.dirname(os.path.abspath(jax.__file__)) + os.sep, _PER_EXAMPLE + os.sep)

REMAT = {"remat2", "checkpoint", "remat"}


def apart(remat: core.JaxprEqn, arguments: Sequence[Any]) -> Sequence[Any]:
    """The inputs of a rematerialised region, kept apart from the forward pass if it asks for it."""
    if remat.params.get("differentiated") and remat.params.get("prevent_cse"):
        return jax.lax.optimization_barrier(tuple(arguments))
    return arguments


def bind(eqn: core.JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
    """Applies one equation."""
    return bind_with(eqn, arguments, eqn.params)


def bind_with(eqn: core.JaxprEqn, arguments: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Applies the primitive of an equation with other parameters."""
    out = eqn.primitive.bind(*arguments, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_batched(
    eqn: core.JaxprEqn, arguments: Sequence[Any], batched: Sequence[bool]
) -> tuple[list[Any], Sequence[bool]]:
    """Applies one equation to all examples at once: `jax.vmap` over the arguments that have an example axis.

    Returns:
      The results, and which of them have an example axis.
    """
    in_axes = tuple(0 if b else None for b in batched)
    flags = flow(eqn, batched)
    out_axes = tuple(0 if f else None for f in flags)
    # No mesh axis for the examples: a sharding constraint would leave it to the compiler to find one.
    over_examples = jax.vmap(lambda *x: tuple(bind(eqn, x)), in_axes=in_axes, out_axes=out_axes, spmd_axis_name=())
    return over_examples(*arguments), flags


def closed(jaxpr: Any) -> core.ClosedJaxpr:
    """Some primitives carry a Jaxpr, some a ClosedJaxpr."""
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())


def evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], rule: Callable[..., list[Any]] = bind
) -> list[Any]:
    """Evaluates a jaxpr; `rule(eqn, arguments)` applies an equation."""
    env: dict[core.Var, Any] = {}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        outs = rule(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def inline(jaxpr: core.ClosedJaxpr, remat: bool = False, manual: bool = False) -> core.ClosedJaxpr:
    """The same program with `jit` and `custom_*` calls inlined; loops and branches stay, and remat unless asked for.

    With `manual` it is the body of a `shard_map`, for one whose values do not carry the axes they vary over
    (check_vma=False).
    """

    def rule(eqn: core.JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
        if manual and eqn.primitive.name in ("pvary", "pcast"):
            return list(arguments)
        if manual and eqn.primitive.name == "psum_invariant":
            return [jax.lax.psum(x, tuple(eqn.params["axes"])) for x in arguments]
        name = _INLINED.get(eqn.primitive.name)
        if name is None and not (remat and eqn.primitive.name in REMAT):
            return bind(eqn, arguments)
        if name is None:
            name, arguments = "jaxpr", apart(eqn, arguments)
        body = closed(eqn.params[name])
        return evaluate(body.jaxpr, body.consts, arguments, rule)

    flat = lambda *arguments: evaluate(jaxpr.jaxpr, jaxpr.consts, arguments, rule)  # noqa: E731
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) if manual else struct(v) for v in jaxpr.in_avals]
    return jax.make_jaxpr(flat)(*shapes)


def struct(aval: Any, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """Shape (or another one) and dtype of a value, and over which axes of a `shard_map` it varies."""
    shape = aval.shape if shape is None else tuple(shape)
    if not aval.manual_axis_type.varying:
        return jax.ShapeDtypeStruct(shape, aval.dtype)
    anywhere = NamedSharding(aval.sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=anywhere, manual_axis_type=aval.manual_axis_type)


def for_all(value: Any, num_examples: int) -> jax.Array:
    """A value that all examples share, for each of them: [N, ...]."""
    return jnp.broadcast_to(value, (num_examples, *jnp.shape(value)))


def contract_leading(eqn: core.JaxprEqn, operands: Sequence[Any], **changed: Any) -> Any:
    """A `dot_general` without batch axes, of operands that both have one more leading axis: contracted as well."""
    contracted, _ = eqn.params["dimension_numbers"]
    shifted = tuple((0, *(a + 1 for a in axes)) for axes in contracted)
    params = {**eqn.params, "dimension_numbers": (shifted, ((), ())), **changed}
    return bind_with(eqn, operands, params)[0]


def source_line(eqns: Iterable[core.JaxprEqn]) -> str | None:
    """'file.py:12 (function)', the innermost line of the user's of the first equation that has one."""
    for eqn in eqns:
        for frame in getattr(eqn.source_info.traceback, "frames", None) or ():
            if not frame.file_name.startswith(_LIBRARIES):
                short = os.sep.join(frame.file_name.split(os.sep)[-3:])
                return f"{short}:{frame.line_num} ({frame.function_name})"
    return None


def split_scan(items: Sequence[Any], params: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """A scan's inputs: (constants, first carry, what it scans over)."""
    items, n, k = list(items), params["num_consts"], params["num_consts"] + params["num_carry"]
    return items[:n], items[n:k], items[k:]


def source_of(jaxpr: core.Jaxpr) -> dict[core.Var, tuple[core.JaxprEqn, int]]:
    """Which equation makes a variable, and as which of its results."""
    return {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}


def use_counts(jaxpr: core.Jaxpr) -> dict[core.Var, int]:
    """How often each variable is read, the program's results included."""
    counts: dict[core.Var, int] = {}
    for v in [*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]:
        if isinstance(v, core.Var):
            counts[v] = counts.get(v, 0) + 1
    return counts


def dependent(jaxpr: core.Jaxpr, batched: Sequence[bool]) -> set[core.Var]:
    """Variables that depend on the example, if these arguments do."""
    found = {v for v, b in zip(jaxpr.invars, batched, strict=True) if b}
    for eqn in jaxpr.eqns:
        flags = [isinstance(v, core.Var) and v in found for v in eqn.invars]
        if any(flags):
            found.update(v for v, f in zip(eqn.outvars, flow(eqn, flags), strict=True) if f)
    return found


def flow(eqn: core.JaxprEqn, batched: Sequence[bool]) -> list[bool]:
    """Which results of an equation depend on the example, if these arguments do.

    Those of scans, branches and remat are looked into; of other equations all results do if any argument does.
    """
    bodies = bodies_of(eqn, batched)
    if bodies is None or not any(batched):
        return [any(batched)] * len(eqn.outvars)
    per_body = [batched_outputs(body, flags) for body, flags in bodies]
    return [any(flags) for flags in zip(*per_body, strict=True)]


def bodies_of(eqn: core.JaxprEqn, batched: Sequence[bool]) -> list[tuple[core.Jaxpr, list[bool]]] | None:
    """The programs of a scan, branch or remat, and which of their arguments depend on the example; None for others."""
    name, batched = eqn.primitive.name, list(batched)
    if name in REMAT or name == "shard_map" or name in _INLINED:
        return [(closed(eqn.params[_INLINED.get(name, "jaxpr")]).jaxpr, batched)]
    if name == "cond" and not batched[0]:
        return [(branch.jaxpr, batched[1:]) for branch in eqn.params["branches"]]
    if name != "scan":
        return None
    body = eqn.params["jaxpr"].jaxpr
    consts, carry, xs = split_scan(batched, eqn.params)
    while True:  # until no more of the carry depends on the example
        outs = batched_outputs(body, [*consts, *carry, *xs])[: len(carry)]
        grown = [c or o for c, o in zip(carry, outs, strict=True)]
        if grown == carry:
            return [(body, [*consts, *carry, *xs])]
        carry = grown


def batched_outputs(jaxpr: core.Jaxpr, batched: Sequence[bool]) -> list[bool]:
    """Which results depend on the example."""
    found = dependent(jaxpr, batched)
    return [isinstance(v, core.Var) and v in found for v in jaxpr.outvars]


def inner(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    """The programs within an equation."""
    found = []
    for param in eqn.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            if isinstance(item, core.ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, core.Jaxpr):
                found.append(item)
    return found
