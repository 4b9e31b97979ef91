"""How the gradients of all units are made and reduced: by surgery on the gradient's program, or by one of the references."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.per_example.engine import interpreter, jaxprs, shard_map
from perex_t5x.per_example.engine.request import Inputs, Request, trace, unit_rows
from perex_t5x.per_example.reductions import measures, reducer
from perex_t5x.per_example.reductions.reducer import ReductionContext, ReductionResult

# (losses and aux per unit, the reduction of each selected parameter's gradient)
Result = tuple[Any, list[ReductionResult]]


def by_surgery(request: Request, context: ReductionContext, inputs: Inputs, initial: Sequence[Any] | None) -> Result:
    program, out = trace(request.unit_gradient(), inputs)
    _refuse_order(program)
    leaves, tree = jax.tree.flatten(out)
    num_grads = len(inputs.differentiated)
    first = len(leaves) - num_grads
    shared = jax.tree.leaves((inputs.differentiated, inputs.others))
    batched = jax.tree.leaves(unit_rows(inputs))
    specs = {first + i: spec for i, spec in enumerate(request.specs(inputs, initial))}
    with jax.named_scope("per_example_statistics"):
        flags = [False] * len(shared) + [True] * len(batched)
        try:
            results, result_flags, reduced = interpreter.run(
                jaxprs.inline(program), [*shared, *batched], flags, specs, context
            )
        except shard_map.MixesDevicesError as e:
            # Rewriting traces the program again, and its equations then have the engine's lines: the user's are in the
            # program as it was first traced.
            raise e.located(program) from None
    results = [
        None if i >= first else r if f else jaxprs.for_all(r, context.num_examples)
        for i, (r, f) in enumerate(zip(results, result_flags, strict=True))
    ]
    (_, per_unit), _ = jax.tree.unflatten(tree, results)
    return per_unit, [reduced[first + i] for i in range(num_grads)]


def by_vmap(request: Request, context: ReductionContext, inputs: Inputs, initial: Sequence[Any] | None) -> Result:
    """A reference: all gradients, then φ, then the sum."""
    _refuse_order(_refuse_devices(request, context, inputs))
    rows = unit_rows(inputs)
    # Parameters are not mapped over: `vmap` then gives each unit's gradient of the same ones.
    in_axes = (None, None, *(None if r is None else 0 for r in rows))
    gradient = jax.vmap(request.unit_gradient(), in_axes=in_axes)
    (_, per_unit), grads = gradient(inputs.differentiated, inputs.others, *rows)
    names = request.selected.names
    reduced = [
        reducer.all_at_once(
            context.bound(name, inputs.operands[i]), g, "vmap", initial=None if initial is None else initial[i]
        )
        for i, (name, g) in enumerate(zip(names, grads, strict=True))
    ]
    for i, r in enumerate(reduced):
        r.metrics = measures.of_all(context, reducer.at_least_f32(grads[i]), names[i], inputs.operands[i])
    return per_unit, reduced


def by_map(request: Request, context: ReductionContext, inputs: Inputs, initial: Sequence[Any] | None) -> Result:
    """One unit after another in a loop on the device (`lax.map`): one unit's gradients and the sums exist at a time, and
    nothing in the loss has to have a batching rule."""
    _refuse_devices(request, context, inputs)
    gradient = request.unit_gradient()

    def step(totals: list[Any], x: Any) -> tuple[list[Any], Any]:
        row, weight, scales = x
        (_, mine), grads = gradient(inputs.differentiated, inputs.others, *row)
        grads = [reducer.at_least_f32(g) for g in grads]
        totals = [
            c.added(sums, g, weight, scale) for c, sums, g, scale in zip(contexts, totals, grads, scales, strict=True)
        ]
        squares = [jnp.sum(jnp.square(g)) for g in grads] if context.norms else None
        metrics = [{m: reduce(g) for m, reduce in f.items()} for f, g in zip(functions, grads, strict=True)]
        return totals, (mine, squares, metrics)

    named = list(zip(request.selected.names, inputs.operands, strict=True))
    contexts = [context.bound(name, operands) for name, operands in named]
    functions = [{m.name: m.bound(name, operands) for m in context.metrics} for name, operands in named]
    shapes = [jax.eval_shape(reducer.at_least_f32, x) for x in inputs.differentiated]
    begin = [contexts[i].begin(initial and initial[i], s.shape, s.dtype) for i, s in enumerate(shapes)]
    # Examples' scales may differ by parameter.
    scales = [c.scales_N for c in contexts]
    rows = (unit_rows(inputs), context.weights_N, scales)
    totals, (per_unit, squares, metrics) = reducer.over_examples(step, begin, rows, context.num_examples)
    reduced = [
        ReductionResult(sums, squares and squares[i], "map", s.size * s.dtype.itemsize, metrics=metrics[i])
        for i, (sums, s) in enumerate(zip(totals, shapes, strict=True))
    ]
    return per_unit, reduced


def by_loop(request: Request, context: ReductionContext, inputs: Inputs, initial: Sequence[Any] | None) -> Result:
    """The reference: a Python loop over units, one gradient each."""
    _refuse_devices(request, context, inputs)
    names = request.selected.names
    gradient = request.unit_gradient()
    per_unit, totals, squares, every = [], initial, [], []
    reduced: list[ReductionResult] = []
    for j in range(context.num_examples):
        rows = jax.tree.map(lambda x, j=j: x[j], unit_rows(inputs))
        (_, mine), grads = gradient(inputs.differentiated, inputs.others, *rows)
        weight, scale = (None if x is None else x[j : j + 1] for x in (context.weights_N, context.scales_N))
        by_name = context.parameter_scales
        by_name = None if by_name is None else {name: x[j : j + 1] for name, x in by_name.items()}
        alone = dataclasses.replace(context, num_examples=1, weights_N=weight, scales_N=scale, parameter_scales=by_name)
        reduced = [
            reducer.all_at_once(
                alone.bound(names[i], inputs.operands[i]),
                g[None],
                "loop",
                initial=None if totals is None else totals[i],
            )
            for i, g in enumerate(grads)
        ]
        totals = [r.raw for r in reduced]
        per_unit.append(mine)
        squares.append([r.squares_N for r in reduced])
        if context.metrics:
            every.append(grads)
    for i, r in enumerate(reduced):
        if every:
            g_Nx = reducer.at_least_f32(jnp.stack([grads[i] for grads in every]))
            r.metrics = measures.of_all(context, g_Nx, names[i], inputs.operands[i])
        r.squares_N = jnp.concatenate([s[i] for s in squares]) if context.norms else None
    return jax.tree.map(lambda *x: jnp.stack(x), *per_unit), reduced


def _refuse_order(program: Any) -> None:
    """Examples that are computed together are in no order, in which callbacks could be made."""
    eqns = list(program.jaxpr.eqns)
    while eqns:
        eqn = eqns.pop()
        if eqn.params.get("ordered"):
            where = ", ".join(filter(None, [eqn.primitive.name, jaxprs.source_line([eqn])]))
            raise ValueError(
                f"the loss has an ordered effect ({where}), and examples are computed together, in no order. Use "
                "ordered=False; or method='map', one example after another."
            )
        eqns += [inner for body in jaxprs.inner(eqn) for inner in body.eqns]


def _refuse_devices(request: Request, context: ReductionContext, inputs: Inputs) -> Any:
    """The references differentiate as JAX does: a gradient that ends in a sum over devices is not an example's.

    Returns:
      The gradient program of one unit.
    """
    program, _ = trace(request.unit_gradient(), inputs)
    shared = len(jax.tree.leaves((inputs.differentiated, inputs.others)))
    depends = jaxprs.dependent(program.jaxpr, [i >= shared for i in range(len(program.jaxpr.invars))])
    for eqn in program.jaxpr.eqns:
        try:
            shard_map.refuse(eqn, jaxprs.are_in(eqn.invars, depends), context.device_axes)
        except shard_map.MixesDevicesError as e:
            raise e.located(program) from None
    return program


METHODS = {"surgery": by_surgery, "vmap": by_vmap, "map": by_map, "loop": by_loop}
