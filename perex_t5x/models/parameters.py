"""Parameters of the networks: float32, with logical axis names, and whole wherever they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from perex_t5x import partitioning

Initializer = Callable[..., jax.Array]


def parameter(
    module: nn.Module,
    name: str,
    init: Initializer,
    axes: tuple[str, ...],
    shape: Sequence[int],
    dtype: Any,
    sent_as: Any = None,
) -> jax.Array:
    """Parameter `name` of `module`, in `dtype`; call it where `module.param` can be called.

    Where devices hold parts of the parameters, it is gathered here, at its use: inside a scanned layer, one layer's
    parameters are whole at a time.

    Args:
      init, axes, shape: as for `module.param` with `nn.with_logical_partitioning`.
      sent_as: see `perex_t5x.partitioning.gather`.
    """
    if partitioning.holds_parts() and module.has_variable("params", name):
        part = module.get_variable("params", name)  # `module.param` would miss the rest of its shape
        return partitioning.gather(part, axes, shape, dtype, sent_as)
    whole = module.param(name, nn.with_logical_partitioning(init, axes), tuple(shape), jnp.float32)
    return whole.astype(dtype)
