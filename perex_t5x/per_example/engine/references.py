"""How the gradients of all units are made and reduced: by surgery, or by one of two references."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from perex_t5x.per_example.engine import interpreter, jaxprs, shard_map
from perex_t5x.per_example.engine.request import Inputs, trace, unit_rows
from perex_t5x.per_example.reductions.reducer import Reduced, Reducer


def by_surgery(gradient: Any, reducer: Reducer, inputs: Inputs, initial: Any) -> tuple[Any, list[Reduced]]:
    program, out = trace(gradient, inputs)
    leaves, tree = jax.tree.flatten(out)
    num_grads = len(inputs.differentiated)
    first = len(leaves) - num_grads
    shared = jax.tree.leaves((inputs.differentiated, inputs.others))
    batched = jax.tree.leaves(unit_rows(inputs))
    wanted = {
        first + i: interpreter.Wanted(
            initial=None if initial is None else initial[i],
            shift=None if inputs.shift is None or not reducer.statistics else inputs.shift[i],
            place=reducer.places[i],
            parts=reducer.parts[i],
        )
        for i in range(num_grads)
    }
    with jax.named_scope("per_example_statistics"):
        flags = [False] * len(shared) + [True] * len(batched)
        try:
            results, result_flags, reduced = interpreter.run(
                jaxprs.inline(program), [*shared, *batched], flags, wanted, reducer
            )
        except shard_map.MixesDevicesError as e:
            raise e.located(program) from None
    results = [
        None if i >= first else r if f else jaxprs.for_all(r, reducer.num_examples)
        for i, (r, f) in enumerate(zip(results, result_flags, strict=True))
    ]
    (_, per_unit), _ = jax.tree.unflatten(tree, results)
    return per_unit, [reduced[first + i] for i in range(num_grads)]


def by_vmap(gradient: Any, reducer: Reducer, inputs: Inputs, initial: Any) -> tuple[Any, list[Reduced]]:
    """A reference: all gradients, then φ, then the sum."""
    _refuse_devices(gradient, reducer, inputs)
    rows = unit_rows(inputs)
    in_axes = (None, None, *(None if r is None else 0 for r in rows))
    (_, per_unit), grads = jax.vmap(gradient, in_axes=in_axes)(inputs.differentiated, inputs.others, *rows)
    reduced = [
        reducer.all_at_once(
            g,
            "vmap",
            initial=None if initial is None else initial[i],
            shift=None if inputs.shift is None else inputs.shift[i],
        )
        for i, g in enumerate(grads)
    ]
    return per_unit, reduced


def by_loop(gradient: Any, reducer: Reducer, inputs: Inputs, initial: Any) -> tuple[Any, list[Reduced]]:
    """The reference: a Python loop over units, one gradient each."""
    _refuse_devices(gradient, reducer, inputs)
    per_unit, totals, squares = [], initial, []
    for j in range(reducer.num_examples):
        rows = jax.tree.map(lambda x, j=j: x[j], unit_rows(inputs))
        (_, mine), grads = gradient(inputs.differentiated, inputs.others, *rows)
        weight, scale = (None if x is None else x[j : j + 1] for x in (reducer.weights_N, reducer.scales_N))
        alone = dataclasses.replace(reducer, num_examples=1, weights_N=weight, scales_N=scale)
        reduced = [
            alone.all_at_once(
                g[None],
                "loop",
                initial=None if totals is None else totals[i],
                shift=None if inputs.shift is None else inputs.shift[i],
            )
            for i, g in enumerate(grads)
        ]
        totals = [r.raw for r in reduced]
        per_unit.append(mine)
        squares.append([r.squares_N for r in reduced])
    stack = lambda *x: jnp.stack(x)  # noqa: E731
    for i, r in enumerate(reduced):
        r.squares_N = jnp.concatenate([s[i] for s in squares]) if reducer.norms else None
    return jax.tree.map(stack, *per_unit), reduced


def _refuse_devices(gradient: Any, reducer: Reducer, inputs: Inputs) -> None:
    """The references differentiate as JAX does: a gradient that ends in a sum over devices is not an example's."""
    program, _ = trace(gradient, inputs)
    shared = len(jax.tree.leaves((inputs.differentiated, inputs.others)))
    depends = jaxprs.dependent(program.jaxpr, [i >= shared for i in range(len(program.jaxpr.invars))])
    for eqn in program.jaxpr.eqns:
        try:
            shard_map.refuse(eqn, [isinstance(v, core.Var) and v in depends for v in eqn.invars], reducer.devices)
        except shard_map.MixesDevicesError as e:
            raise e.located(program) from None


METHODS = {"surgery": by_surgery, "vmap": by_vmap, "loop": by_loop}
