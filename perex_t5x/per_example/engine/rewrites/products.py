"""Rewrites of the matrix products that gradients come from; every one keeps the program's results.

- Positions that are padding are left out, and axes of size one are not summed over.
- The transpose of a product becomes the product of the operands exchanged.
- A product that is cut up becomes several products.
- A product or zeros, as a number says: the product of operands or zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core.primitives import reshape_p, squeeze_p

from perex_t5x.per_example.engine import jaxprs, plan, primitives
from perex_t5x.per_example.engine.rewrites.tools import Rule, rewritten, tails_of

# --- what comes before a product --------------------------------------------------------------------------------------


def paddings(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """Σ_t s_t r_t over positions of which some are padding, as in the gradient of `logits[:, :-1]`: without them.

    Zeros add nothing but work; and what is padded here, the gradient of the logits, is the largest array of a decoder, of
    which the padding may be a copy.
    """
    del batched
    tails, sources = tails_of(program.jaxpr, wanted), jaxprs.source_of(program.jaxpr)
    rules: dict[int, Rule] = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and eqn.outvars[0] in tails:
            for k in (0, 1):
                chain = _chain_to_padding(eqn, k, sources)
                if chain:
                    rules[id(eqn)] = Rule(functools.partial(_unpadded, k, chain), [chain[0].invars[0]])
    return rewritten(program, rules)


def _chain_to_padding(product: core.JaxprEqn, k: int, sources: Any) -> list[core.JaxprEqn]:
    """Equations from the padding of operand `k`, by zeros along contracted axes, to the product; empty if there is none."""
    v, chain = product.invars[k], []
    while isinstance(v, core.Var) and v in sources:
        eqn = sources[v][0]
        chain.insert(0, eqn)
        if eqn.primitive.name == "pad":
            contracted = product.params["dimension_numbers"][0][k]
            widths = enumerate(eqn.params["padding_config"])
            # Only axes that the product sums over; padding of another axis is part of the result. Negative padding cuts.
            fine = all(w == (0, 0, 0) or (a in contracted and w[2] == 0 and min(w[:2]) >= 0) for a, w in widths)
            return chain if fine and plan.is_zeros(eqn.invars[1], sources) else []
        # Between padding and product only what keeps zeros zero: anything else could make padded positions count.
        if eqn.primitive.name not in primitives.ZERO_PRESERVING:
            return []
        v = eqn.invars[0]
    return []


def _unpadded(
    k: int, chain: Sequence[core.JaxprEqn], product: core.JaxprEqn, arguments: Sequence[Any], read: Any
) -> list[Any]:
    contracted, _ = product.params["dimension_numbers"]
    pad, *rest = chain
    short = read(pad.invars[0])
    for eqn in rest:
        short = jaxprs.bind(eqn, [short])[0]
    # The other operand loses the same positions: where one factor is zero, the term is, whatever the other is.
    other = arguments[1 - k]
    for mine, its in zip(contracted[k], contracted[1 - k], strict=True):
        low, _, _ = pad.params["padding_config"][mine]
        other = jax.lax.slice_in_dim(other, low, low + short.shape[mine], axis=its)
    return jaxprs.bind(product, [short, other] if k == 0 else [other, short])


def unit_contractions(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """Σ_bt s_bt r_bt over an axis b of size one: without it. Nor is an axis of size one in both operands a batch axis.

    To XLA such an operand is another value than the same without the axis, which other equations use; and what it considers
    cheap, such as the gradient of a softmax, it would compute once for each. With a batch axis it is no product that the
    reductions know.
    """
    del batched
    tails = tails_of(program.jaxpr, wanted)
    rules: dict[int, list[core.JaxprEqn]] = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and eqn.outvars[0] in tails:
            sizes, paired = (_sizes(eqn, which) for which in eqn.params["dimension_numbers"])
            if (1 in sizes and max(sizes) > 1) or 1 in paired:
                rules[id(eqn)] = _without_unit_contractions(eqn)
    return rewritten(program, rules)


def _sizes(product: core.JaxprEqn, axes: tuple[Sequence[int], Sequence[int]]) -> list[int]:
    return [jaxprs.shape_of(product.invars[0])[a] for a in axes[0]]


def _without_unit_contractions(product: core.JaxprEqn) -> list[core.JaxprEqn]:
    contracted, batch = product.params["dimension_numbers"]
    eqns, operands, numbers = [], [], []
    for v, mine, paired in zip(product.invars, contracted, batch, strict=True):
        # Axes are renumbered per operand: they need not be at the same place in both.
        shape = jaxprs.shape_of(v)
        lost = tuple(sorted(a for a in (*mine, *paired) if shape[a] == 1))
        at = {a: i for i, a in enumerate(a for a in range(len(shape)) if a not in lost)}
        operands.append(core.Var(jaxprs.of_shape(v.aval, [shape[a] for a in at])))
        eqns.append(product.replace([v], operands[-1:], squeeze_p, {"dimensions": lost}))
        numbers.append([tuple(at[a] for a in axes if a in at) for axes in (mine, paired)])
    (contract_l, batch_l), (contract_r, batch_r) = numbers
    params = {**product.params, "dimension_numbers": ((contract_l, contract_r), (batch_l, batch_r))}
    if len(batch_l) == len(batch[0]):
        return [*eqns, product.replace(invars=operands, params=params)]
    # A product's batch axes come first in its result.
    whole = jaxprs.shape_of(product.outvars[0])
    small = core.Var(
        jaxprs.of_shape(
            product.outvars[0].aval, [*(n for n in _sizes(product, batch) if n > 1), *whole[len(batch[0]) :]]
        )
    )
    back = {"new_sizes": whole, "dimensions": None, "sharding": None}
    return [
        *eqns,
        product.replace(invars=operands, outvars=[small], params=params),
        product.replace([small], product.outvars, reshape_p, back),
    ]


# --- what follows a product -------------------------------------------------------------------------------------------


def transposes(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """(Sᵀ R)ᵀ becomes Rᵀ S: the transpose of a product is the product of the operands exchanged.

    Left for afterwards, like other permutations, it would transpose every statistic's sums once per step.
    """
    del batched
    tails, sources = tails_of(program.jaxpr, wanted), jaxprs.source_of(program.jaxpr)
    rules: dict[int, list[core.JaxprEqn]] = {}
    # Result of a transpose -> (the product it comes from, what makes it now). The gradient of `table` in x @ table.T ends in
    # two transposes: the operands are exchanged, and exchanged back.
    made: dict[Any, tuple[core.JaxprEqn, core.JaxprEqn]] = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name != "transpose" or eqn.outvars[0] not in tails or eqn.invars[0] not in tails:
            continue
        before = sources[eqn.invars[0]][0]
        product, now = made.get(eqn.invars[0], (before, before))
        if now.primitive.name == "dot_general" and _exchanges(now, eqn.params["permutation"]):
            # Both equations are replaced: the product then makes the transpose's result.
            exchanged = _exchanged(now, eqn.outvars)
            rules[id(product)], rules[id(eqn)] = [exchanged], []
            made[eqn.outvars[0]] = product, exchanged
    return rewritten(program, rules)


def _exchanges(product: core.JaxprEqn, permutation: Sequence[int]) -> bool:
    """Whether the permutation puts all axes of the right operand before those of the left, both in order."""
    (contract_l, contract_r), (batch_l, _) = product.params["dimension_numbers"]
    left, right = (
        len(jaxprs.shape_of(v)) - len(c) for v, c in zip(product.invars, (contract_l, contract_r), strict=True)
    )
    # With batch axes the result begins with those, and exchanging the operands would not transpose it.
    return not batch_l and tuple(permutation) == (*range(left, left + right), *range(left))


def _exchanged(product: core.JaxprEqn, outvars: list[core.Var]) -> core.JaxprEqn:
    (contract_l, contract_r), batch = product.params["dimension_numbers"]
    precision = product.params["precision"]
    # The operands' precisions change places with them.
    params = {
        **product.params,
        "dimension_numbers": ((contract_r, contract_l), batch),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    return product.replace(invars=product.invars[::-1], outvars=outvars, params=params)


def splits(program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]) -> core.ClosedJaxpr:
    """A product that is cut up, as the gradient of concatenated parameters is: one product for each part.

    `split` has several results, which the walk back does not follow; and each part's sums are then those of a parameter.
    """
    del batched
    tails, sources = tails_of(program.jaxpr, wanted), jaxprs.source_of(program.jaxpr)
    rules: dict[int, Rule] = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name == "split" and any(v in tails for v in eqn.outvars) and eqn.invars[0] in sources:
            product = sources[eqn.invars[0]][0]
            if product.primitive.name == "dot_general" and not product.params["dimension_numbers"][1][0]:
                rules[id(eqn)] = Rule(functools.partial(_split_product, product), product.invars)
    return rewritten(program, rules)


def _split_product(product: core.JaxprEqn, eqn: core.JaxprEqn, arguments: Sequence[Any], read: Any) -> list[Any]:
    del arguments
    contracted, _ = product.params["dimension_numbers"]
    operands = [read(v) for v in product.invars]
    # An axis of the result is a free axis of one operand: cutting that operand cuts the result.
    free = [(k, a) for k in (0, 1) for a in range(jnp.ndim(operands[k])) if a not in contracted[k]]
    which, axis = free[eqn.params["axis"]]
    parts, start = [], 0
    for length in eqn.params["sizes"]:
        cut = list(operands)
        cut[which] = jax.lax.slice_in_dim(operands[which], start, start + length, axis=axis)
        parts += jaxprs.bind(product, cut)
        start += length
    return parts


def selections_of_products(
    program: core.ClosedJaxpr, batched: Sequence[bool], wanted: tuple[int, ...]
) -> core.ClosedJaxpr:
    """select(i, 0, SᵀR, 0), i a number: a product whose operands are zeros where it is not selected.

    So do the gradients of a branch's parameters come out of a `cond` that each example decides. Of the size of a gradient,
    the selection would hide the product from the reductions.
    """
    del batched
    tails, sources = tails_of(program.jaxpr, wanted), jaxprs.source_of(program.jaxpr)
    rules: dict[int, Rule] = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name != "select_n" or eqn.outvars[0] not in tails:
            continue
        which, *cases = eqn.invars
        number = _number(which, sources)
        products: list[tuple[int, Any]] = [(k, v) for k, v in enumerate(cases) if not plan.is_zeros(v, sources)]
        if number is None or len(products) != 1:
            continue
        produced: Any
        k, produced = products[0]
        moves: list[core.JaxprEqn] = []
        while produced in tails and plan.is_permutation(sources[produced][0]):
            moves.insert(0, sources[produced][0])
            produced = moves[0].invars[0]
        if produced in tails and sources[produced][0].primitive.name == "dot_general":
            product = sources[produced][0]
            rule = functools.partial(_selected, number, k, product, moves)
            rules[id(eqn)] = Rule(rule, [number, *product.invars])
    return rewritten(program, rules)


def _number(v: Any, sources: Any) -> Any:
    """What a value visibly repeats, of one element; else None."""
    while isinstance(v, core.Var) and jaxprs.size_of(v) > 1 and v in sources:
        eqn = sources[v][0]
        if eqn.primitive.name not in ("broadcast_in_dim", "reshape", "squeeze"):
            return None
        v = eqn.invars[0]
    return v if jaxprs.size_of(v) == 1 else None


def _selected(
    number: Any,
    k: int,
    product: core.JaxprEqn,
    moves: Sequence[core.JaxprEqn],
    eqn: core.JaxprEqn,
    arguments: Sequence[Any],
    read: Any,
) -> list[Any]:
    """The product of operands that are zeros unless `number` is `k`; then what moves its elements."""
    del eqn, arguments
    is_selected = jnp.reshape(read(number), ()) == k
    # Both operands: what the examples of other branches have here may be infinite, and 0 · inf is NaN.
    operands = [jax.lax.select(is_selected, x, jnp.zeros_like(x)) for x in map(read, product.invars)]
    (value,) = jaxprs.bind(product, operands)
    for move in moves:
        (value,) = jaxprs.bind(move, [value])
    return [value]
