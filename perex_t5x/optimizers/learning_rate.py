"""The trainer's schedule drives any optax optimizer, so the logged rate is the one used.

optax optimizers usually count their own steps to read a schedule; after a switch of optimizers that count and the run's
step disagree. Here the optimizer is rebuilt, while tracing, with the rate of the current step. Its state does not depend
on the rate, so nothing else changes, and there is only one counter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from perex_t5x.errors import ConfigError


class RateDriven(NamedTuple):
    """An optimizer whose update is given the learning rate of the step, as `drive_learning_rate` makes it.

    >>> drive_learning_rate(optax.sgd).uses_rate, drive_learning_rate(optax.sgd(0.1)).uses_rate
    (True, False)
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]  # (grads, state, params, learning_rate, **extra_args)
    uses_rate: bool


def drive_learning_rate(optimizer_def: Any) -> RateDriven:
    """Wraps an optimizer so that `update(grads, state, params, learning_rate)` applies that rate.

    Args:
      optimizer_def: a function with a `learning_rate` argument that returns an optax transformation (`optax.adamw`, in
        Gin `OPTIMIZER = @optax.adamw`); or a transformation that is already built, whose own rate then holds
        (`uses_rate` is False).

    >>> import jax.numpy as jnp
    >>> driven = drive_learning_rate(optax.sgd)
    >>> updates, _ = driven.update({"w": jnp.ones(2)}, driven.init({"w": jnp.zeros(2)}), None, 0.5)
    >>> updates["w"].tolist()
    [-0.5, -0.5]
    """
    if isinstance(optimizer_def, optax.GradientTransformation):
        built = optax.with_extra_args_support(optimizer_def)

        def update_built(
            grads: Any, state: Any, params: Any, learning_rate: jax.Array, **extra: Any
        ) -> tuple[Any, Any]:
            del learning_rate
            return built.update(grads, state, params, **extra)

        return RateDriven(built.init, update_built, uses_rate=False)
    if not callable(optimizer_def):
        raise ConfigError(
            f"optimizer_def = {optimizer_def!r}: give a function that makes an optax transformation from a "
            "learning_rate, in Gin OPTIMIZER = @optax.adamw (without parentheses)."
        )

    def make(learning_rate: Any) -> optax.GradientTransformationExtraArgs:
        try:
            made = optimizer_def(learning_rate=learning_rate)
        except TypeError as e:
            raise ConfigError(
                f"optimizer_def {getattr(optimizer_def, '__name__', optimizer_def)!r} cannot be called with "
                f"learning_rate=...: {e}"
            ) from e
        if not isinstance(made, optax.GradientTransformation):
            raise ConfigError(f"optimizer_def returned {type(made).__name__}, not an optax.GradientTransformation.")
        return optax.with_extra_args_support(made)

    def update(grads: Any, state: Any, params: Any, learning_rate: jax.Array, **extra: Any) -> tuple[Any, Any]:
        return make(learning_rate).update(grads, state, params, **extra)

    made = make(1.0)  # one that is combined of several knows whether any of them is driven
    return RateDriven(made.init, update, uses_rate=getattr(made, "uses_rate", True))


def rate_of_built(state: Any) -> Any | None:
    """The rate that `optax.inject_hyperparams` keeps in a state, or None where the state holds no rate."""
    for leaf in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "hyperparams")):
        if hasattr(leaf, "hyperparams"):
            return leaf.hyperparams.get("learning_rate")
    return None
