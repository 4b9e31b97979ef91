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
from perex_t5x.per_example.engine.rewrites.tools import Rule, rewritten, tails_of

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
    users = {v: eqn for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, core.Var)}
    uses = jaxprs.use_counts(jaxpr)

    def goes_on(v: core.Var) -> bool:
        while uses.get(v, 0) == 1 and v in users and (plan.is_permutation(users[v]) or plan.is_unary(users[v])):
            v = users[v].outvars[0]
        is_part = v in users and users[v].primitive.name in ("pad", "concatenate", "dynamic_update_slice")
        return uses.get(v, 0) > 1 or (v in users and not is_part)

    opened = [eqn for eqn in remats if any(v in side and goes_on(v) for v in eqn.outvars)]
    return rewritten(program, {id(eqn): Rule(_evaluate_remat) for eqn in opened})


def _evaluate_remat(eqn: core.JaxprEqn, values: Sequence[Any], read: Any) -> list[Any]:
    # The program is differentiated already, so of remat only its barrier is still needed.
    del read
    body = jaxprs.closed(eqn.params["jaxpr"])
    return jaxprs.evaluate(body.jaxpr, body.consts, jaxprs.behind_barrier(eqn, values))


# --- gradients in a carry ---------------------------------------------------------------------------------------------


def accumulations(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """A scan that adds a gradient up in its carry: split into the scan without it, and the additions alone.

    The gradient of a weight that every step uses (an RNN's, or that of a layer applied repeatedly) is Σ_t g_t, and φ may see
    only the finished sum: the carry, for all examples, would be N × parameter. What the additions need of each step is
    usually much smaller (two vectors for an outer product), so the scan stacks that, and the sum becomes a producer.
    """
    sources = jaxprs.source_of(program.jaxpr)
    scans = [e for e in program.jaxpr.eqns if e.primitive.name == "scan" and not plan.is_accumulation(e)]
    if not scans:
        return program
    tails = tails_of(program.jaxpr, wanted) | cones.parameter_side(program.jaxpr, wanted, tuple(batched))
    rules = {}
    for eqn in scans:
        indices = [i for i, v in enumerate(eqn.outvars[: eqn.params["num_carry"]]) if v in tails]
        if not indices:
            continue
        # A step's remat is inlined, barrier included: the additions may be inside it.
        body = jaxprs.inline(eqn.params["jaxpr"], remat=True)
        added = {i: node for i in indices if (node := _addition(body.jaxpr, eqn.params, i)) is not None}
        if added:
            carry = jaxprs.split_scan(eqn.invars, eqn.params)[1]
            from_zeros = {i for i in added if plan.is_zeros(carry[i], sources)}
            rules[id(eqn)] = Rule(functools.partial(_split, body, added, from_zeros))
    return rewritten(program, rules)


def _addition(body: core.Jaxpr, params: dict[str, Any], index: int) -> plan.Producer | None:
    """How the body makes carry `index` from itself, if from nothing larger, and if nothing else looks at it."""
    num_consts = params["num_consts"]
    old, new = body.invars[num_consts + index], body.outvars[index]
    sources, uses = jaxprs.source_of(body), jaxprs.use_counts(body)
    # If the body looked at the running sum in any other way than to add to it, it could not be left out of the loop.
    if not isinstance(new, core.Var) or new not in sources or uses[new] > 1 or uses.get(old, 0) != 1:
        return None
    node = plan.produce(body, new, sources, uses)
    if old not in node.leaves:
        return None
    # Worth it only if the stacks of what is added are smaller than the gradient's own size, roughly.
    stacked = sum(jaxprs.size_of(v) for v in node.leaves if v is not old and v not in body.invars[:num_consts])
    return node if params["length"] * stacked < jaxprs.size_of(new) * 2 else None


def _split(
    body: core.ClosedJaxpr,
    added: dict[int, plan.Producer],
    from_zeros: set[int],
    eqn: core.JaxprEqn,
    arguments: Sequence[Any],
    read: Any,
) -> list[Any]:
    del read
    p = eqn.params
    num_consts, num_carry = p["num_consts"], p["num_carry"]
    consts, carry, xs = jaxprs.split_scan(arguments, p)
    invars = body.jaxpr.invars
    const_values = dict(zip(invars[:num_consts], consts, strict=True))
    leaves = {i: [v for v in node.leaves if v is not invars[num_consts + i]] for i, node in added.items()}
    stacked = list(dict.fromkeys(v for vs in leaves.values() for v in vs if v not in const_values))
    skipped = {id(e) for node in added.values() for e in node.eqns}
    rest = [i for i in range(num_carry) if i not in added]
    result_vars = [*(body.jaxpr.outvars[i] for i in rest), *body.jaxpr.outvars[num_carry:], *stacked]

    def first(carry: Any, x: Any) -> Any:
        env: dict[core.Var, Any] = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        env.update(const_values)
        env.update(zip((invars[num_consts + i] for i in rest), carry, strict=True))
        env.update(zip(invars[num_consts + num_carry :], x, strict=True))
        jaxprs.run_equations([e for e in body.jaxpr.eqns if id(e) not in skipped], env)
        outs = [jaxprs.read(v, env) for v in result_vars]
        return outs[: len(rest)], outs[len(rest) :]

    loop = {"length": p["length"], "reverse": p["reverse"]}
    new_carry, ys = jax.lax.scan(first, [carry[i] for i in rest], xs, unroll=p["unroll"], **loop)
    num_ys = len(body.jaxpr.outvars) - num_carry
    stacks = dict(zip(stacked, ys[num_ys:], strict=True))
    results: dict[int, Any] = dict(zip(rest, new_carry, strict=True))
    for i, node in added.items():
        old = invars[num_consts + i]
        known = {v: const_values[v] for v in leaves[i] if v in const_values}
        varying = {v: stacks[v] for v in leaves[i] if v in stacks}
        # One product over all steps at best, which later reductions know well; else a loop of additions.
        if total := _contracted(node, old, varying):
            # An addition to zeros would hide the product from the reductions, which look for one equation.
            results[i] = total[0] if i in from_zeros else carry[i] + total[0]
        else:
            results[i] = _added_up(node, old, carry[i], known, varying, loop)
    return [*(results[i] for i in range(num_carry)), *ys[:num_ys]]


def _contracted(node: plan.Producer, old: core.Var, varying: dict[Any, Any]) -> tuple[Any] | None:
    """Σ over steps of a matrix product or sum: one with the steps contracted too."""
    if len(node.eqns) != 2:
        return None
    product, add = node.eqns
    if add.primitive.name not in primitives.ADDITIONS or old not in add.invars or product.outvars[0] not in add.invars:
        return None
    if not all(v in varying for v in product.invars):
        return None
    operands = [varying[v] for v in product.invars]
    if product.primitive.name == "reduce_sum":
        return (jnp.sum(operands[0], axis=(0, *(a + 1 for a in product.params["axes"]))),)
    if product.primitive.name != "dot_general":
        return None
    if product.params["dimension_numbers"][1][0]:
        return None
    return (jaxprs.contract_leading(product, operands),)


def _added_up(node: plan.Producer, old: core.Var, begin: Any, known: Any, varying: Any, loop: dict[str, Any]) -> Any:
    """The additions alone, as a scan of their own."""
    names = list(varying)

    def step(total: Any, x: Any) -> Any:
        env = {old: total, **known, **dict(zip(names, x, strict=True))}
        jaxprs.run_equations(node.eqns, env)
        return env[node.root], None

    return jax.lax.scan(step, begin, [varying[v] for v in names], **loop)[0]
