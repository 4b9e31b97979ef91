"""Statistics after the norms, in one backward pass: what the pass keeps of each gradient until all norms are known.

φ(c g) needs an example's c, and c the norm of its whole gradient. So at each producer either the gradients themselves are
kept, or what they are made of (of a product, its inputs S and cotangents R), and the statistics are formed from that:

| strategy | kept of a gradient | afterwards |
|---|---|---|
| `gradients` | itself, where it is smaller than its factors or costs a long product | φ and the sum |
| `factors` | whichever is smaller | the reduction of one pass: of a product, the product again |
| `two passes` | nothing | forward and backward pass again |

Rows of embeddings and small gradients are kept alike by both, and for TPUs' kernels the factors of products. The first of
them whose memory is within the budget is used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.per_example.engine import jaxprs
from perex_t5x.per_example.engine.plan import Producer
from perex_t5x.per_example.engine.shard_map import constrain
from perex_t5x.per_example.kernels import dispatch
from perex_t5x.per_example.reductions import reducer, select_reduction, windows
from perex_t5x.per_example.reductions.reducer import (
    ReductionContext,
    ReductionResult,
    ReductionSite,
    ReductionSpec,
    at_least_f32,
    over_examples,
)

GRADIENTS = "gradients"
FACTORS = "factors"
LEAVES = "leaves"  # `factors`, and never a gradient: unit='token' is not formed from gradients
TWO_PASSES = "two passes"
STRATEGIES = (GRADIENTS, FACTORS, TWO_PASSES)
CLIP_MEMORY = 4 * 2**30  # the budget unless another is given: bytes on a device

# Contracted lengths from which computing a product again takes longer than writing its result and reading it: 2 T operations
# against 8 bytes (4 in bfloat16), at the chips' ratio of both.
LONG = {"cpu": 64, "tpu": 512}


def hold(site: ReductionSite) -> ReductionResult:
    """The norms of the gradients produced at `site`, and what is needed to reduce them once scales are known."""
    if any(site.batched) and _keeps_gradient(site):
        return _keep_gradient(site)
    reduced = select_reduction(site)
    again = functools.partial(_from_leaves, site.spec, site.node, tuple(site.batched))
    return dataclasses.replace(reduced, held=list(site.leaves), again=again)


def hold_value(context: ReductionContext, spec: ReductionSpec, value: Any, flag: bool) -> Any:
    """A gradient that exists already, for all examples (`flag`) or the same for all of them."""

    def again(context: ReductionContext, held: Sequence[Any], initial: Any) -> ReductionResult:
        mine = dataclasses.replace(spec, initial=initial)
        g = spec.pre(jnp.asarray(held[0]))
        if not flag:
            return reducer.shared(context, mine, g)
        return reducer.all_at_once(context, g, "all at once", initial=initial)

    return dataclasses.replace(again(context, [value], spec.initial), held=[value], again=again)


def held_bytes(held: Any, arguments: Any) -> int:
    """Of the arrays kept, each counted once; arguments of the program exist anyway."""
    mine = {id(x) for x in jax.tree.leaves(arguments)}
    unique = {id(x): x for x in jax.tree.leaves(held) if id(x) not in mine}
    return sum(_bytes(x) for x in unique.values())


def _bytes(x: Any) -> int:
    return jnp.size(x) * jnp.result_type(x).itemsize


def _keeps_gradient(site: ReductionSite) -> bool:
    strategy = site.context.hold
    if strategy == LEAVES:
        return False
    # A TPU's kernel forms norms and sums in vector memory: forming a product twice costs fewer cycles than the gradients of
    # several examples in main memory.
    if dispatch.for_tpu() and site.context.kernels and site.context.num_examples > 1 and _contracted(site.node) > 1:
        return False
    root = site.node.root
    gradient = site.context.num_examples * jaxprs.size_of(root) * jaxprs.dtype_of(root).itemsize
    if gradient <= sum(_bytes(x) for x, b in zip(site.leaves, site.batched, strict=True) if b):
        return True
    return strategy == GRADIENTS and _contracted(site.node) >= LONG["tpu" if dispatch.for_tpu() else "cpu"]


def _contracted(node: Producer) -> int:
    """Length of the longest contraction of a matrix product in a producer."""

    def lengths() -> Iterable[int]:
        for eqn in node.eqns:
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                yield math.prod(jaxprs.shape_of(eqn.invars[0])[i] for i in contracted)

    return max(lengths(), default=0)


def _keep_gradient(site: ReductionSite) -> ReductionResult:
    context, spec = site.context, site.spec

    def produced(*leaves: Any) -> tuple[jax.Array, jax.Array]:
        env: dict[Any, Any] = dict(zip(site.node.leaves, leaves, strict=True))
        jaxprs.run_equations(site.node.eqns, env, windows.bind)
        # Kept before casts to a wider dtype, which would double its memory.
        g = constrain(env[site.node.root], spec.sharding)
        return g, jnp.sum(jnp.square(at_least_f32(spec.pre(g))))

    rows = [leaf for leaf, b in zip(site.leaves, site.batched, strict=True) if b]

    def step(_: None, rows: Sequence[Any]) -> Any:
        row = iter(rows)
        return None, produced(*(next(row) if b else leaf for leaf, b in zip(site.leaves, site.batched, strict=True)))

    _, (g_Nx, squares) = over_examples(step, None, rows, context.num_examples)
    again = functools.partial(_from_gradients, spec)
    return ReductionResult([], squares, "held", _bytes(g_Nx), held=[g_Nx], again=again)


def _from_gradients(
    spec: ReductionSpec, context: ReductionContext, held: Sequence[Any], initial: Any
) -> ReductionResult:
    (g_Nx,) = held

    def step(sums: list[jax.Array], x: Any) -> Any:
        g, weight, scale = x
        return context.added(sums, at_least_f32(spec.pre(g)), weight, scale), None

    dtype = jax.eval_shape(lambda g: at_least_f32(spec.pre(g)), g_Nx).dtype
    begin = context.begin(initial, g_Nx.shape[1:], dtype, spec.sharding)
    sums, _ = over_examples(step, begin, (g_Nx, context.weights_N, context.scales_N), context.num_examples)
    return ReductionResult(sums, None, "held", _bytes(g_Nx))


def _from_leaves(
    spec: ReductionSpec,
    node: Producer,
    batched: Sequence[bool],
    context: ReductionContext,
    held: Sequence[Any],
    initial: Any,
) -> ReductionResult:
    return select_reduction(ReductionSite(context, dataclasses.replace(spec, initial=initial), node, held, batched))
