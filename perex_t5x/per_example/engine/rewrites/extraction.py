"""Gradients are taken out of the loops and branches that make them, where they are used further; results are kept.

What is left behind is smaller: the two factors of a product, of each step. What is outside becomes a producer, or the
begin of a cone, and is run for one example at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from perex_t5x.per_example.engine import cones, jaxprs, plan, primitives
from perex_t5x.per_example.engine.rewrites.tools import Rule, rewritten, tails_of, used_further

# --- out of loops -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _TakenOut:
    """Results of a loop that are made outside of it.

    Attributes:
      added: number of a carry -> how each step makes it from itself, and from values that are stacked instead.
      stacked: number of a stacked result -> how a step makes its part.
      from_zeros: carries that begin as zeros.
    """

    added: dict[int, plan.Producer]
    stacked: dict[int, plan.Producer]
    from_zeros: set[int]

    @property
    def all(self) -> dict[int, plan.Producer]:
        return {**self.added, **self.stacked}


def gradients_out_of_scans(
    program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...], all_further: bool = False
) -> core.ClosedJaxpr:
    """A scan that makes gradients is split into the scan without them, and what makes them, after it.

    Those in a carry: the gradient of a weight that every step uses (an RNN's, or that of a layer applied repeatedly) is
    Σ_t g_t, and φ may see only the finished sum: the carry, for all examples, would be N × parameter. What the additions
    need of each step is usually much smaller (two vectors for an outer product), so the scan stacks that, and the sum
    becomes a producer.

    Those it stacks, where they are used further: the gradients of f(w), of all layers at once, go through f's derivative to
    w. The loop passes cotangents of activations on besides, so that it has to run for all examples together; the products
    after it need not. `all_further`: the results are used further by an outer loop, whose body the program is.
    """
    jaxpr = program.jaxpr
    sources = jaxprs.source_of(jaxpr)
    scans = [e for e in jaxpr.eqns if e.primitive.name == "scan" and not plan.is_accumulation(e)]
    if not scans:
        return program
    side = cones.parameter_side(jaxpr, wanted, tuple(batched))
    tails, goes_on = tails_of(jaxpr, wanted) | side, used_further(jaxpr)
    depends = jaxprs.dependent(jaxpr, batched)
    rules = {}
    for eqn in scans:
        num_carry = eqn.params["num_carry"]
        summed = [i for i, v in enumerate(eqn.outvars[:num_carry]) if v in tails]
        stacks = [i for i, v in enumerate(eqn.outvars) if i >= num_carry and v in side and (all_further or goes_on(v))]
        if not summed and not stacks:
            continue
        # A step's remat is inlined, barrier included: the additions may be inside it.
        body = jaxprs.inline(eqn.params["jaxpr"], remat=True)
        flags = jaxprs.body_flags(eqn, jaxprs.are_in(eqn.invars, depends))
        body = gradients_out_of_scans(body, flags, tuple(stacks), all_further=True)
        of_body = jaxprs.dependent(body.jaxpr, flags)
        added = {i: node for i in summed if (node := _addition(body.jaxpr, eqn.params, i)) is not None}
        stacked = {i: node for i in stacks if (node := _step(body.jaxpr, eqn.params, i, of_body)) is not None}
        if added or stacked:
            carry = jaxprs.split_scan(eqn.invars, eqn.params)[1]
            out = _TakenOut(added, stacked, {i for i in added if plan.is_zeros(carry[i], sources)})
            rules[id(eqn)] = Rule(functools.partial(_split, body, out))
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


def _step(body: core.Jaxpr, params: dict[str, Any], index: int, depends: Set[core.Var]) -> plan.Producer | None:
    """How the body makes its part of the stacked result `index`, if of values that are smaller together."""
    new = body.outvars[index]
    sources, uses = jaxprs.source_of(body), jaxprs.use_counts(body)
    if not isinstance(new, core.Var) or new not in sources or uses[new] > 1:
        return None
    node = plan.produce(body, new, sources, uses, depends)
    if any(len(eqn.outvars) > 1 for eqn in node.eqns):  # whose other results the loop may need
        return None
    # What is scanned over is stacked already, and what all steps have in common need not be.
    made = sum(jaxprs.size_of(v) for v in node.leaves if v in depends and v not in body.invars[: params["num_consts"]])
    return node if made < jaxprs.size_of(new) else None


def _split(
    body: core.ClosedJaxpr, out: _TakenOut, eqn: core.JaxprEqn, arguments: Sequence[Any], read: Any
) -> list[Any]:
    del read
    p = eqn.params
    num_consts, num_carry = p["num_consts"], p["num_carry"]
    consts, carry, xs = jaxprs.split_scan(arguments, p)
    invars, outvars = body.jaxpr.invars, body.jaxpr.outvars
    known = dict(zip([*body.jaxpr.constvars, *invars[:num_consts]], [*body.consts, *consts], strict=True))
    over_steps = dict(zip(invars[num_consts + num_carry :], xs, strict=True))
    sums = {invars[num_consts + i] for i in out.added}
    leaves = dict.fromkeys(v for node in out.all.values() for v in node.leaves if v not in sums)
    stacked = [v for v in leaves if v not in known and v not in over_steps]
    skipped = {id(e) for node in out.all.values() for e in node.eqns}
    rest = [i for i in range(len(outvars)) if i not in out.all]
    carried = [i for i in rest if i < num_carry]
    result_vars = [*(outvars[i] for i in rest), *stacked]

    def first(carry: Any, x: Any) -> Any:
        env: dict[core.Var, Any] = {**known, **dict(zip(over_steps, x, strict=True))}
        env.update(zip((invars[num_consts + i] for i in carried), carry, strict=True))
        jaxprs.run_equations([e for e in body.jaxpr.eqns if id(e) not in skipped], env)
        outs = [jaxprs.read(v, env) for v in result_vars]
        return outs[: len(carried)], outs[len(carried) :]

    loop = {"length": p["length"], "reverse": p["reverse"]}
    new_carry, ys = jax.lax.scan(first, [carry[i] for i in carried], xs, unroll=p["unroll"], **loop)
    results: dict[int, Any] = dict(zip(rest, [*new_carry, *ys], strict=False))
    over_steps |= zip(stacked, ys[len(rest) - len(carried) :], strict=True)
    for i, node in out.all.items():
        here = {v: known[v] for v in node.leaves if v in known}
        varying = {v: over_steps[v] for v in node.leaves if v in over_steps}
        if i in out.stacked:
            results[i] = _of_each_step(node, here, varying, p["length"])
            continue
        old = invars[num_consts + i]
        # One product over all steps at best, which later reductions know well; else a loop of additions.
        if total := _contracted(node, old, varying):
            # An addition to zeros would hide the product from the reductions, which look for one equation.
            results[i] = total[0] if i in out.from_zeros else carry[i] + total[0]
        else:
            results[i] = _added_up(node, old, carry[i], here, varying, loop)
    return [results[i] for i in range(len(outvars))]


def _of_each_step(node: plan.Producer, known: Any, varying: dict[Any, Any], length: int) -> Any:
    """[steps, ...]"""

    def one(values: Sequence[Any]) -> Any:
        env = {**known, **dict(zip(varying, values, strict=True))}
        jaxprs.run_equations(node.eqns, env)
        return env[node.root]

    return jax.vmap(one, axis_size=length)(list(varying.values()))


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


# --- out of branches --------------------------------------------------------------------------------------------------


def gradients_out_of_branches(
    program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]
) -> core.ClosedJaxpr:
    """A `cond` that makes gradients which are used further, and other values: two, one for the gradients.

    The gradients' then runs for one example at a time, as part of a cone. What both need is computed twice.
    """
    jaxpr = program.jaxpr
    side, goes_on = cones.parameter_side(jaxpr, wanted, tuple(batched)), used_further(jaxpr)
    depends, rules = jaxprs.dependent(jaxpr, batched), {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "cond" or eqn.effects or any(jaxprs.are_in(eqn.invars[:1], depends)):
            continue
        used = [i for i, v in enumerate(eqn.outvars) if not isinstance(v, core.DropVar)]
        gradients = [i for i in used if eqn.outvars[i] in side]
        rest = [i for i in used if i not in gradients]
        if rest and any(goes_on(eqn.outvars[i]) for i in gradients):
            rules[id(eqn)] = Rule(functools.partial(_apart, (gradients, rest)))
    return rewritten(program, rules)


def _apart(parts: Sequence[Sequence[int]], eqn: core.JaxprEqn, arguments: Sequence[Any], read: Any) -> list[Any]:
    del read
    index, *operands = arguments
    results: dict[int, Any] = {}
    for part in parts:
        branches = [functools.partial(_some_results, body, part) for body in eqn.params["branches"]]
        results.update(zip(part, jax.lax.switch(index, branches, operands), strict=True))
    # Results that nobody reads: of any value.
    return [
        results[i] if i in results else jnp.zeros(jaxprs.shape_of(v), jaxprs.dtype_of(v))
        for i, v in enumerate(eqn.outvars)
    ]


def _some_results(body: core.ClosedJaxpr, results: Sequence[int], operands: Sequence[Any]) -> list[Any]:
    """Only what these results need is run."""
    jaxpr = body.jaxpr
    others = tuple(i for i in range(len(jaxpr.outvars)) if i not in results)
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*body.consts, *operands], strict=True))
    jaxprs.run_equations(reversed(cones.needed_besides(jaxpr, others)), env)
    return [jaxprs.read(jaxpr.outvars[i], env) for i in results]
