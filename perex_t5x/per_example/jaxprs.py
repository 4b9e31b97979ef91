"""Small tools on jaxprs: inline calls, evaluate one equation (plain or batched), find what depends on what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

# Calls whose body is simply run: after differentiation their special rules have done their work.
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


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


def bind_batched(eqn: core.JaxprEqn, arguments: Sequence[Any], batched: Sequence[bool]) -> list[Any]:
    """Applies one equation to all examples at once: `jax.vmap` over the arguments that have an example axis."""
    in_axes = tuple(0 if b else None for b in batched)
    return jax.vmap(lambda *x: tuple(bind(eqn, x)), in_axes=in_axes)(*arguments)


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


def inline(jaxpr: core.ClosedJaxpr, remat: bool = False) -> core.ClosedJaxpr:
    """The same program with `jit` and `custom_*` calls inlined; loops and branches stay, and remat unless asked for."""

    def rule(eqn: core.JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
        name = _INLINED.get(eqn.primitive.name)
        if name is None and not (remat and eqn.primitive.name in REMAT):
            return bind(eqn, arguments)
        if name is None:
            name, arguments = "jaxpr", apart(eqn, arguments)
        body = closed(eqn.params[name])
        return evaluate(body.jaxpr, body.consts, arguments, rule)

    flat = lambda *arguments: evaluate(jaxpr.jaxpr, jaxpr.consts, arguments, rule)  # noqa: E731
    return jax.make_jaxpr(flat)(*(struct(v) for v in jaxpr.in_avals))


def inline_manual(jaxpr: core.Jaxpr) -> core.ClosedJaxpr:
    """The body of a `shard_map`, for one whose values do not carry the axes they vary over (check_vma=False)."""

    def rule(eqn: core.JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in ("pvary", "pcast"):
            return list(arguments)
        if name == "psum_invariant":
            return [jax.lax.psum(x, tuple(eqn.params["axes"])) for x in arguments]
        if name in _INLINED:
            body = closed(eqn.params[_INLINED[name]])
            return evaluate(body.jaxpr, body.consts, arguments, rule)
        return bind(eqn, arguments)

    flat = lambda *arguments: evaluate(jaxpr, (), arguments, rule)  # noqa: E731
    return jax.make_jaxpr(flat)(*(struct(v.aval) for v in jaxpr.invars))


def struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


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
    """Variables that depend on the example, if these arguments do: a result does if any input of its equation does."""
    found = {v for v, b in zip(jaxpr.invars, batched, strict=True) if b}
    for eqn in jaxpr.eqns:
        if any(isinstance(v, core.Var) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found


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
