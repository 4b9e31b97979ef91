"""Small tools on jaxprs: inline calls, evaluate one equation (plain or batched), find what is needed."""

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


def bind(eqn: core.JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
    """Applies one equation."""
    out = eqn.primitive.bind(*arguments, **eqn.primitive.get_bind_params(eqn.params))
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


def inline(jaxpr: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same program with `jit` and `custom_*` calls inlined; loops, branches and remat stay."""

    def rule(eqn: core.JaxprEqn, arguments: Sequence[Any]) -> list[Any]:
        name = _INLINED.get(eqn.primitive.name)
        if name is None:
            return bind(eqn, arguments)
        body = closed(eqn.params[name])
        return evaluate(body.jaxpr, body.consts, arguments, rule)

    flat = lambda *arguments: evaluate(jaxpr.jaxpr, jaxpr.consts, arguments, rule)  # noqa: E731
    return jax.make_jaxpr(flat)(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in jaxpr.in_avals))


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


def batched_outputs(jaxpr: core.Jaxpr, batched: Sequence[bool]) -> list[bool]:
    """Which results depend on the example, if these arguments do: a result does if any input of its equation does."""
    env: dict[core.Var, bool] = {v: False for v in jaxpr.constvars}
    env.update(zip(jaxpr.invars, batched, strict=True))

    def read(v: Any) -> bool:
        return False if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        depends = any(read(v) for v in eqn.invars)
        env.update((v, depends) for v in eqn.outvars)
    return [read(v) for v in jaxpr.outvars]
