"""Statistics of per-example gradients, each as every JAX library computes it: the same numbers, so that times compare.

| statistic | result |
|---|---|
| `mean and mean square` | (mean g, mean g²), trees like the parameters |
| `norms` | ‖g_i‖ of every example, [B] |
| `clipped mean` | mean of g_i · min(1, C / ‖g_i‖) |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import microbatching

from perex_t5x.extras import is_installed
from perex_t5x.per_example import grad_statistics

PLAIN = "plain gradient"
MOMENTS, NORMS, CLIPPED = "mean and mean square", "norms", "clipped mean"
STATISTICS = (MOMENTS, NORMS, CLIPPED)
CLIP_NORM = 1.0
OURS = "perex_t5x"
VMAP, MICRO_GRAD, JAX_PRIVACY = "vmap(grad)", "micro_grad", "jax_privacy"

Loss = Callable[[Any, jax.Array], jax.Array]
Program = Callable[[Any, jax.Array], Any]


def plain(loss: Loss, size: int | None) -> Program:
    """The batch's gradient, `size` examples at a time; None: all at once."""
    if size is None:
        return jax.grad(loss)
    mean = microbatching.AccumulationType.MEAN
    return microbatching.microbatch(jax.grad(loss), argnums=1, microbatch_size=size, accumulator=mean)


def of_library(peer: str, statistic: str, loss: Loss, size: int | None) -> Program | None:
    """The program of one library, `size` examples at a time; None where it cannot compute the statistic."""
    return {OURS: _ours, VMAP: _vmap, MICRO_GRAD: _micro_grad, JAX_PRIVACY: _jax_privacy}[peer](statistic, loss, size)


def clip_factor(gradient: Any) -> jax.Array:
    """What scales a gradient to a norm of at most `CLIP_NORM`."""
    return jnp.minimum(1.0, CLIP_NORM / optax.global_norm(gradient))


def clipped(gradient: Any) -> Any:
    """A gradient, scaled to a norm of at most `CLIP_NORM`."""
    factor = clip_factor(gradient)
    return jax.tree.map(lambda g: g * factor, gradient)


def _ours(statistic: str, loss: Loss, size: int | None) -> Program:
    if statistic == NORMS:
        compute = grad_statistics(loss, (), metrics=("norm",), microbatch_size=size)
        return lambda params, batch: compute(params, batch)[1].metrics["norm"]
    if statistic == CLIPPED:
        compute = grad_statistics(loss, "mean", clip_norm=CLIP_NORM, microbatch_size=size)
        return lambda params, batch: compute(params, batch)[0].mean
    compute = grad_statistics(loss, ("mean", "mean_square"), microbatch_size=size)

    def moments(params: Any, batch: jax.Array) -> Any:
        stats, _ = compute(params, batch)
        return stats.mean, stats.mean_square

    return moments


def _vmap(statistic: str, loss: Loss, size: int | None) -> Program | None:
    if size is not None:
        return None

    def run(params: Any, batch: jax.Array) -> Any:
        g_Nx = jax.vmap(lambda row: jax.grad(loss)(params, row[None]))(batch)
        if statistic == NORMS:
            return jax.vmap(optax.global_norm)(g_Nx)
        if statistic == CLIPPED:  # one product for each parameter: scaled gradients would be written, and read again
            share_N = jax.vmap(clip_factor)(g_Nx) / batch.shape[0]
            return jax.tree.map(lambda g: jnp.tensordot(share_N, g, axes=1), g_Nx)
        return tuple(jax.tree.map(lambda g, p=p: jnp.mean(g**p, axis=0), g_Nx) for p in (1, 2))

    return run


def _micro_grad(statistic: str, loss: Loss, size: int | None) -> Program | None:
    if size is None:
        return None  # it is vmap(grad)
    transforms = {
        MOMENTS: lambda g: (g, jax.tree.map(jnp.square, g)),
        NORMS: optax.global_norm,
        CLIPPED: clipped,
    }
    kinds = microbatching.AccumulationType
    accumulator = kinds.CONCAT if statistic == NORMS else kinds.MEAN
    compute = microbatching.micro_grad(
        loss, microbatch_size=size, accumulator=accumulator, transform_fn=transforms[statistic]
    )
    return lambda params, batch: compute(params, batch)[0]


def _jax_privacy(statistic: str, loss: Loss, size: int | None) -> Program | None:
    if statistic == MOMENTS or not is_installed("jax_privacy"):
        return None
    from jax_privacy import clipping  # pyright: ignore[reportMissingImports] (optional: see `is_installed`)

    def run(params: Any, batch: jax.Array) -> Any:
        compute = clipping.clipped_grad(
            loss,
            l2_clip_norm=CLIP_NORM,
            normalize_by=batch.shape[0],
            return_grad_norms=statistic == NORMS,
            microbatch_size=size,
        )
        result = compute(params, batch)
        return result[1].grad_norms if statistic == NORMS else result

    return run


def digest(statistic: str, result: Any) -> float:
    """One number of a result, which all programs have to agree on."""
    if statistic == NORMS:
        return float(jnp.sum(result))
    if statistic == MOMENTS:
        return float(jnp.sqrt(sum(jnp.sum(x) for x in jax.tree.leaves(result[1]))))
    return float(optax.global_norm(result))
