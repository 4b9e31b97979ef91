"""Rewrites of scans and remat regions that gradients come out of; every one keeps the program's results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from perex_t5x.per_example.engine import cones, jaxprs, plan, primitives
from perex_t5x.per_example.engine.rewrites.tools import Rule, rewritten, used_further

# --- elementwise operations after a body ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Operation:
    """`eqn` combines a gradient (its operand `large`) with `other`: a scalar, or shared and of the gradient's shape."""

    eqn: core.JaxprEqn
    large: int
    other: Any

    @property
    def is_scaling(self) -> bool:
        name = self.eqn.primitive.name
        return not jaxprs.shape_of(self.other) and (name == "mul" or (name == "div" and self.large == 0))

    def apply(self, y: Any, other: Any) -> Any:
        pair = (y, other) if self.large == 0 else (other, y)
        return primitives.MOVED_INTO_BODY[self.eqn.primitive.name](*pair)


def operations_into_bodies(
    program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]
) -> core.ClosedJaxpr:
    """(a gradient out of a scan or remat) · factor + shared addend, say: the body does it.

    A loss that is scaled, or a regulariser on stacked layers, puts such operations between the loop that makes the gradients
    and the program's result. The walk back would end there, with all layers' gradients of all examples in memory; inside
    the body they are part of one layer's producer.
    """
    jaxpr = program.jaxpr
    sources, uses = jaxprs.source_of(jaxpr), jaxprs.use_counts(jaxpr)
    depends = jaxprs.dependent(jaxpr, batched)
    rules: dict[int, Rule] = {}
    inside: dict[int, dict[int, list[_Operation]]] = {}  # body -> result -> operations, last first
    for i in wanted:
        v, operations = jaxpr.outvars[i], []
        while isinstance(v, core.Var) and v in sources and uses[v] == 1:
            eqn, index = sources[v]
            operation = _operation(eqn, sources, depends)
            if operation is not None:
                operations.append(operation)
                v = eqn.invars[operation.large]
            elif plan.is_permutation(eqn) or plan.is_unary(eqn):
                # A shared addend would have to be moved back and cast as well; a scalar factor commutes with both.
                if not all(operation.is_scaling for operation in operations):
                    break
                v = eqn.invars[0]
            else:
                stacks = eqn.primitive.name == "scan" and index >= eqn.params["num_carry"]
                free = all(_is_free_of(operation.other, eqn, sources) for operation in operations)
                if operations and free and (stacks or eqn.primitive.name in primitives.REMAT):
                    inside.setdefault(id(eqn), {})[index] = operations
                    rules.update((id(o.eqn), Rule(functools.partial(_large_operand, o.large))) for o in operations)
                break
    for body, by_result in inside.items():
        others = [o.other for operations in by_result.values() for o in operations]
        rules[body] = Rule(functools.partial(_bind_with_operations, by_result), others)
    return rewritten(program, rules)


def _operation(eqn: core.JaxprEqn, sources: Any, depends: Set[core.Var]) -> _Operation | None:
    if eqn.primitive.name not in primitives.MOVED_INTO_BODY:
        return None
    for large in (0, 1):
        x, y = eqn.invars[large], eqn.invars[1 - large]
        # x + x has no other operand; and scalars are no gradients worth the trouble.
        if not isinstance(x, core.Var) or jaxprs.size_of(x) < 2 or (isinstance(y, core.Var) and x is y):
            continue
        if not jaxprs.shape_of(y):
            return _Operation(eqn, large, y)
        # jnp broadcasts a scalar before it multiplies: inside the body the scalar itself is wanted.
        source = sources[y][0] if isinstance(y, core.Var) and y in sources else None
        if source is not None and source.primitive.name == "broadcast_in_dim" and not jaxprs.shape_of(source.invars[0]):
            return _Operation(eqn, large, source.invars[0])
        if x in depends and y not in depends and jaxprs.shape_of(y) == jaxprs.shape_of(x):
            return _Operation(eqn, large, y)
    return None


def _is_free_of(v: Any, body: core.JaxprEqn, sources: Any) -> bool:
    """Whether a value can be computed before the body is."""
    todo, seen = [v], set()
    while todo:
        v = todo.pop()
        if isinstance(v, core.Literal) or v not in sources or v in seen:
            continue
        seen.add(v)
        if sources[v][0] is body:
            return False
        todo.extend(sources[v][0].invars)
    return True


def _large_operand(large: int, eqn: core.JaxprEqn, arguments: Sequence[Any], read: Any) -> list[Any]:
    del eqn, read
    return [arguments[large]]


def _bind_with_operations(
    operations: dict[int, list[_Operation]], eqn: core.JaxprEqn, values: Sequence[Any], read: Any
) -> list[Any]:
    others = {i: [read(o.other) for o in ops] for i, ops in operations.items()}

    def applied(outs: Sequence[Any], others: dict[int, list[Any]]) -> list[Any]:
        outs = list(outs)
        for i, ops in operations.items():
            # Collected on the way back, so the last one found comes first.
            for operation, other in zip(reversed(ops), reversed(others[i]), strict=True):
                outs[i] = operation.apply(outs[i], other)
        return outs

    if eqn.primitive.name in primitives.REMAT:
        return applied(_evaluate_remat(eqn, values, read), others)
    p = eqn.params
    body, num_carry = p["jaxpr"], p["num_carry"]
    consts, carry, xs = jaxprs.split_scan(values, p)
    is_stacked = lambda x: jnp.ndim(x) > 0  # noqa: E731
    # A shared array has the stack's shape: each step needs its own part of it, and scalars as they are.
    stacked = {i: [x if is_stacked(x) else None for x in o] for i, o in others.items()}

    def step(carry: Any, x: Any) -> Any:
        x, slices = x
        here = {i: [b if a is None else a for a, b in zip(slices[i], o, strict=True)] for i, o in others.items()}
        outs = jaxprs.evaluate(body.jaxpr, body.consts, [*consts, *carry, *x])
        outs = applied(outs, here)
        return outs[:num_carry], outs[num_carry:]

    loop = {"length": p["length"], "reverse": p["reverse"], "unroll": p["unroll"]}
    carry, ys = jax.lax.scan(step, carry, (xs, stacked), **loop)
    return [*carry, *ys]


# --- remat regions that gradients are used further after --------------------------------------------------------------


def opened_remats(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """A remat region that makes a gradient of something computed from parameters before it: its body, behind its barrier.

    Such a gradient goes on to a parameter, through a function's derivative or to be added to another. Only in the open can
    it be followed to the equation that makes it.
    """
    jaxpr = program.jaxpr
    remats = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in primitives.REMAT]
    side = cones.parameter_side(jaxpr, wanted, tuple(batched)) if remats else set()
    goes_on = used_further(jaxpr)
    opened = [eqn for eqn in remats if any(v in side and goes_on(v) for v in eqn.outvars)]
    return rewritten(program, {id(eqn): Rule(_evaluate_remat) for eqn in opened})


def _evaluate_remat(eqn: core.JaxprEqn, values: Sequence[Any], read: Any) -> list[Any]:
    # The program is differentiated already, so of remat only its barrier is still needed.
    del read
    body = jaxprs.closed(eqn.params["jaxpr"])
    return jaxprs.evaluate(body.jaxpr, body.consts, jaxprs.behind_barrier(eqn, values))
