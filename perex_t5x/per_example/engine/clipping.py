"""Checks of `clip_norm`, and of `weights` that are a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def clips_by_parameter(clip_norm: Any) -> bool:
    """Whether it is a tree of limits, one for each parameter."""
    return clip_norm is not None and not callable(clip_norm) and not _is_number(clip_norm)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.generic | np.ndarray | jax.Array) and jnp.ndim(x) == 0


def check_clip_norm(limit: Any, what: str = "clip_norm") -> None:
    """Raises unless it is a positive number; of one that is traced, unless it is a number."""
    if isinstance(limit, bool) or not _is_number(limit):
        raise ValueError(f"{what} = {limit!r}: must be a positive number.")
    if not isinstance(limit, Tracer) and not limit > 0:
        raise ValueError(f"{what} = {limit!r}: must be positive.")


def check_weight_function(fn: Callable[[Any, Any], Any]) -> None:
    """Of one unit: a function that looks at the others would give other weights with other microbatches and devices."""
    losses, norms = (jnp.asarray(np.random.default_rng(seed).uniform(0.5, 2.0, 5), jnp.float32) for seed in (0, 1))
    one = jax.eval_shape(fn, losses[0], norms[0])
    if getattr(one, "shape", None) != ():
        raise ValueError(
            "weights is a function: it must turn the loss and the gradient norm of one example, two numbers, into one, but "
            f"it returns {getattr(one, 'shape', type(one).__name__)}."
        )
    try:
        with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            together, alone = np.asarray(fn(losses, norms)), np.asarray(jax.vmap(fn)(losses, norms))
    except Exception:  # it closes over something traced, or takes numbers only: then it cannot look at other examples
        return
    if together.shape == alone.shape and not np.allclose(together, alone, rtol=1e-4, equal_nan=True):
        raise ValueError(
            "weights is a function: it must see one example's loss and norm alone, but of several it gives other weights "
            "than of each. Leave out what normalises: the statistics are divided by the sum of the weights."
        )
