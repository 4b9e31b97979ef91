"""Programs rewritten so that gradients can be followed; every rewrite keeps the program's results.

- A scan that adds gradients up in its carry (the weights of an RNN, or of a layer applied repeatedly) is split in two: the
  scan without that carry, which stacks what the additions need, and the additions alone. The second is the gradient's
  producer.
- A sum over axes of size one becomes a reshape; values lose such axes where nothing else depends on it (`unit_axes`).
- A `cond` whose predicate depends on the example becomes both branches and a selection, as `jax.vmap` makes it.
- Elementwise operations after a scan or remat, with a scalar or with something shared (a regulariser's gradient, a mask),
  are applied inside.
- Matrix products: `product_rewrites`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from perex_t5x.per_example.engine import jaxprs, plan
from perex_t5x.per_example.engine.rewrites.products import paddings, splits, transposes, unit_contractions
from perex_t5x.per_example.engine.rewrites.tools import Rule, rewritten, tails_of
from perex_t5x.per_example.engine.rewrites.unit_axes import without_unit_axes


def prepare(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: Iterable[int]) -> core.ClosedJaxpr:
    """Applies the rewrites, each where the walk back from a wanted result meets its place."""
    wanted = tuple(wanted)
    for rewrite in (
        _sums_of_one,
        _selections,
        _pushed,
        _accumulations,
        paddings,
        transposes,
        splits,
        unit_contractions,
    ):
        program = rewrite(program, batched, wanted)
    return without_unit_axes(program, tails_of(program.jaxpr, wanted))  # gradients have forms of their own


# --- sums that add nothing --------------------------------------------------------------------------------------------


def _sums_of_one(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """A sum over axes of size one moves no number: what it hides may be a sum over positions."""
    del batched, wanted
    rules: dict[int, Rule] = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "reduce_sum" and plan.size(eqn.invars[0]) == plan.size(eqn.outvars[0]):
            rules[id(eqn)] = lambda eqn, arguments, read: [arguments[0].reshape(eqn.outvars[0].aval.shape)]
    return rewritten(program, rules)


# --- cond on data -----------------------------------------------------------------------------------------------------


def _selections(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    tails = tails_of(program.jaxpr, wanted)
    depends = jaxprs.dependent(program.jaxpr, batched)
    rules = {}
    for eqn in program.jaxpr.eqns:
        predicate = eqn.invars[0] if eqn.primitive.name == "cond" else None
        if isinstance(predicate, core.Var) and predicate in depends and any(v in tails for v in eqn.outvars):
            rules[id(eqn)] = _select
    return rewritten(program, rules)


def _select(eqn: core.JaxprEqn, arguments: Sequence[Any], read: Any) -> list[Any]:
    del read
    index, *operands = arguments
    branches = eqn.params["branches"]
    index = jnp.clip(index.astype(jnp.int32), 0, len(branches) - 1)
    results = [jaxprs.evaluate(b.jaxpr, b.consts, operands) for b in branches]
    which = index.astype(bool) if len(branches) == 2 else index
    return [jax.lax.select_n(which, *values) for values in zip(*results, strict=True)]


# --- elementwise operations after a body ------------------------------------------------------------------------------

_PUSHED = {
    "mul": operator.mul,
    "div": operator.truediv,
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
}


@dataclasses.dataclass(frozen=True)
class _Operation:
    """`eqn` combines a gradient (its operand `large`) with `other`: a scalar, or shared and of the gradient's shape."""

    eqn: core.JaxprEqn
    large: int
    other: Any

    @property
    def is_scaling(self) -> bool:
        name = self.eqn.primitive.name
        return not self.other.aval.shape and (name == "mul" or (name == "div" and self.large == 0))

    def apply(self, y: Any, other: Any) -> Any:
        pair = (y, other) if self.large == 0 else (other, y)
        return _PUSHED[self.eqn.primitive.name](*pair)


def _pushed(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """(a gradient out of a scan or remat) · factor + shared addend, say: the body does it."""
    jaxpr = program.jaxpr
    sources, uses = jaxprs.source_of(jaxpr), jaxprs.use_counts(jaxpr)
    depends = jaxprs.dependent(jaxpr, batched)
    rules: dict[int, Rule] = {}
    inside: dict[int, dict[int, list[_Operation]]] = {}  # body -> result -> operations, last first
    for i in wanted:
        v, found = jaxpr.outvars[i], []
        while isinstance(v, core.Var) and v in sources and uses[v] == 1:
            eqn, index = sources[v]
            operation = _operation(eqn, sources, depends)
            if operation is not None:
                found.append(operation)
                v = eqn.invars[operation.large]
            elif plan.is_permutation(eqn) or plan.is_unary(eqn):
                if not all(operation.is_scaling for operation in found):
                    break  # only factors may pass
                v = eqn.invars[0]
            else:
                stacks = eqn.primitive.name == "scan" and index >= eqn.params["num_carry"]
                free = all(_is_free_of(operation.other, eqn, sources) for operation in found)
                if found and free and (stacks or eqn.primitive.name in jaxprs.REMAT):
                    inside.setdefault(id(eqn), {})[index] = found
                    rules.update((id(o.eqn), functools.partial(_large_operand, o.large)) for o in found)
                break
    for body, operations in inside.items():
        rules[body] = functools.partial(_bind_pushed, operations)
    return rewritten(program, rules)


def _operation(eqn: core.JaxprEqn, sources: Any, depends: set[core.Var]) -> _Operation | None:
    if eqn.primitive.name not in _PUSHED:
        return None
    for large in (0, 1):
        x, y = eqn.invars[large], eqn.invars[1 - large]
        if not isinstance(x, core.Var) or plan.size(x) < 2 or (isinstance(y, core.Var) and x is y):
            continue
        if not y.aval.shape:
            return _Operation(eqn, large, y)
        source = sources[y][0] if isinstance(y, core.Var) and y in sources else None
        if source is not None and source.primitive.name == "broadcast_in_dim" and not source.invars[0].aval.shape:
            return _Operation(eqn, large, source.invars[0])
        if x in depends and y not in depends and y.aval.shape == x.aval.shape:
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


def _bind_pushed(
    operations: dict[int, list[_Operation]], eqn: core.JaxprEqn, values: Sequence[Any], read: Any
) -> list[Any]:
    others = {i: [read(o.other) for o in ops] for i, ops in operations.items()}

    def applied(outs: Sequence[Any], others: dict[int, list[Any]]) -> list[Any]:
        outs = list(outs)
        for i, ops in operations.items():
            for operation, other in zip(reversed(ops), reversed(others[i]), strict=True):
                outs[i] = operation.apply(outs[i], other)
        return outs

    if eqn.primitive.name in jaxprs.REMAT:
        # After differentiation: `prevent_cse` is what is left of it, and `jaxprs.apart` sees to that.
        body = jaxprs.closed(eqn.params["jaxpr"])
        return applied(jaxprs.evaluate(body.jaxpr, body.consts, jaxprs.apart(eqn, values)), others)
    p = eqn.params
    body, num_carry = p["jaxpr"], p["num_carry"]
    consts, carry, xs = jaxprs.split_scan(values, p)
    is_stacked = lambda x: jnp.ndim(x) > 0  # noqa: E731
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


# --- gradients in a carry ---------------------------------------------------------------------------------------------


def _accumulations(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    del batched
    tails, sources = tails_of(program.jaxpr, wanted), jaxprs.source_of(program.jaxpr)
    rules = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name != "scan" or plan.is_accumulation(eqn):
            continue
        indices = [i for i, v in enumerate(eqn.outvars[: eqn.params["num_carry"]]) if v in tails]
        if not indices:
            continue
        body = jaxprs.inline(eqn.params["jaxpr"], remat=True)
        added = {i: node for i in indices if (node := _addition(body.jaxpr, eqn.params, i)) is not None}
        if added:
            carry = jaxprs.split_scan(eqn.invars, eqn.params)[1]
            from_zeros = {i for i in added if plan.is_zeros(carry[i], sources)}
            rules[id(eqn)] = functools.partial(_split, body, added, from_zeros)
    return rewritten(program, rules)


def _addition(body: core.Jaxpr, params: dict[str, Any], index: int) -> plan.Producer | None:
    """How the body makes carry `index` from itself, if from nothing larger, and if nothing else looks at it."""
    num_consts = params["num_consts"]
    old, new = body.invars[num_consts + index], body.outvars[index]
    sources, uses = jaxprs.source_of(body), jaxprs.use_counts(body)
    if not isinstance(new, core.Var) or new not in sources or uses[new] > 1 or uses.get(old, 0) != 1:
        return None
    node = plan.produce(body, new, sources, uses)
    if old not in node.leaves:
        return None
    stacked = sum(plan.size(v) for v in node.leaves if v is not old and v not in body.invars[:num_consts])
    return node if params["length"] * stacked < plan.size(new) * 2 else None


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
        read = lambda v: v.val if isinstance(v, core.Literal) else env[v]  # noqa: E731
        for e in body.jaxpr.eqns:
            if id(e) not in skipped:
                env.update(zip(e.outvars, jaxprs.bind(e, [read(v) for v in e.invars]), strict=True))
        outs = [read(v) for v in result_vars]
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
        if total := _contracted(node, old, varying):
            results[i] = total[0] if i in from_zeros else carry[i] + total[0]
        else:
            results[i] = _added_up(node, old, carry[i], known, varying, loop)
    return [*(results[i] for i in range(num_carry)), *ys[:num_ys]]


def _contracted(node: plan.Producer, old: core.Var, varying: dict[core.Var, Any]) -> tuple[Any] | None:
    """Σ over steps of a matrix product or sum: one with the steps contracted too."""
    if len(node.eqns) != 2:
        return None
    product, add = node.eqns
    if add.primitive.name not in plan.SUMS or old not in add.invars or product.outvars[0] not in add.invars:
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
        for e in node.eqns:
            values = [v.val if isinstance(v, core.Literal) else env[v] for v in e.invars]
            env.update(zip(e.outvars, jaxprs.bind(e, values), strict=True))
        return env[node.root], None

    return jax.lax.scan(step, begin, [varying[v] for v in names], **loop)[0]
