"""`microbatch_size="auto"`: how many examples at a time.

A size for the platform that is compiled for, from a model of the cost. On a CPU small microbatches win, since their
activations stay in the cache, down to where a step's matrix products become too thin or its fixed cost shows. On
accelerators the largest that fits wins. So

    cpu      the smallest size with at least 1024 rows in an average matrix product and 50 MFLOP a step
    others   the largest size whose activations take at most 4 GiB

Rows and operations are counted in the gradient program of one unit, activations by the lifetimes of its values.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from perex_t5x.per_example.engine import jaxprs
from perex_t5x.per_example.engine.request import Request, trace

CPU_ROWS = 1024
CPU_FLOPS = 50e6
ACTIVATION_BYTES = 4 * 2**30


def automatic_sizes(request: Request) -> dict[str, int]:
    """Examples at a time, by platform."""
    program, _ = trace(request.unit_gradient(), request.inputs)
    parameters = sum(jnp.size(x) for x in request.inputs.differentiated)
    chosen = choose_sizes(jaxprs.inline(program), request.inputs.num_units, parameters)
    return {platform: size * request.options.group_size for platform, size in chosen.items()}


def choose_sizes(program: core.ClosedJaxpr, units: int, num_parameters: int) -> dict[str, int]:
    """Units at a time, by platform ('default': any other); each divides `units`."""
    divisors = [d for d in range(1, units + 1) if units % d == 0]
    flops = max(matmul_flops(program.jaxpr), 1)
    rows = flops / (6 * max(num_parameters, 1))  # forward 2, backward 4 for each parameter and row
    least = max(CPU_ROWS / rows, CPU_FLOPS / flops)
    cpu = next((d for d in divisors if d >= least), units)
    most = ACTIVATION_BYTES / max(peak_bytes(program.jaxpr), 1)
    default = max((d for d in divisors if d <= most), default=1)
    return {"cpu": cpu, "default": default}


def matmul_flops(jaxpr: core.Jaxpr) -> int:
    """Operations of the matrix products and convolutions, loops multiplied out."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            shape = jaxprs.shape_of(eqn.invars[0])
            total += 2 * jaxprs.size_of(eqn.outvars[0]) * math.prod(shape[i] for i in contract)
        elif eqn.primitive.name == "conv_general_dilated":
            kernel = jaxprs.shape_of(eqn.invars[1])
            out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * jaxprs.size_of(eqn.outvars[0]) * math.prod(kernel) // max(out_features, 1)
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        total += times * max((matmul_flops(inner) for inner in jaxprs.inner(eqn)), default=0)
    return total


def peak_bytes(jaxpr: core.Jaxpr) -> int:
    """The largest sum of values alive at a time, arguments not counted, bodies included."""
    last: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last.update((v, i) for v in eqn.invars if isinstance(v, core.Var))
    last.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if isinstance(v, core.Var))
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    alive = peak = 0
    for i, eqn in enumerate(jaxpr.eqns):
        within = max((peak_bytes(inner) for inner in jaxprs.inner(eqn)), default=0)
        peak = max(peak, alive + sum(map(_bytes, eqn.outvars)) + within)
        alive += sum(_bytes(v) for v in eqn.outvars if v in last)
        read = {v for v in eqn.invars if isinstance(v, core.Var)} - arguments
        alive -= sum(_bytes(v) for v in read if last[v] == i)
    return peak


def _bytes(v: Any) -> int:
    aval = v.aval
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4) if hasattr(aval, "shape") else 0
