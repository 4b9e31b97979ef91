"""The sign family: one chain gradient → batch mean → moving average, with the sign taken at a chosen place.

    place="example"   EMA(mean_i sign(g_i))     micro_sign
    place="batch"     EMA(sign(ḡ))              sign_sgd
    place="ema"       sign(EMA(ḡ))              sign_ema

The moving averages are not bias-corrected: EMA(x) = b1·EMA + (1−b1)·x, from 0.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from perex_t5x.optimizers.base import Mask, StatisticsTransformation, descend, from_statistics, zero_moments
from perex_t5x.optimizers.checks import Decay, DType, Rate, check_choice, check_number
from perex_t5x.per_example.results import GradStatistics


class SignState(NamedTuple):
    """`mu`: moving average of what the place says."""

    mu: Any


def scale_by_sign(
    place: Literal["example", "batch", "ema"],
    b1: Decay = 0.9,
    *,
    nesterov: bool = False,
    mu_dtype: DType = None,
    name: str = "scale_by_sign",
) -> StatisticsTransformation:
    """The direction of a moving average with the sign at a chosen place.

    Args:
      place: "example", "batch" or "ema"; see the head of this module.
      b1: decay of the moving average.
      nesterov: looks one step ahead: b1·EMA + (1−b1)·x in the place of EMA.
      mu_dtype: of the moving average; None: the parameter's, at least float32.
      name: for messages.

    >>> direction = scale_by_sign("ema")
    >>> print(direction.update(jnp.array([-3.0, 0.5]), direction.init(jnp.zeros(2)))[0])
    [-1.  1.]
    """
    check_choice(name, "place", place, ("example", "batch", "ema"))
    check_number(name, "b1", b1, below=1.0)

    def init(params: Any) -> SignState:
        return SignState(zero_moments(params, mu_dtype))

    def update(statistics: GradStatistics, state: SignState, params: Any) -> tuple[Any, SignState]:
        del params
        entering = {
            "example": lambda: statistics.mean_sign,
            "batch": lambda: jax.tree.map(jnp.sign, statistics.mean),
            "ema": lambda: statistics.mean,
        }[place]()
        mu = optax.tree.update_moment(entering, state.mu, b1, 1)
        steps = optax.tree.update_moment(entering, mu, b1, 1) if nesterov else mu
        if place == "ema":
            steps = jax.tree.map(jnp.sign, steps)
        return steps, SignState(optax.tree.cast_like(mu, state.mu))

    return from_statistics(name, ("mean", "mean_sign") if place == "example" else ("mean",), init, update)


def micro_sign(
    learning_rate: Rate,
    b1: Decay = 0.9,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
    mu_dtype: DType = None,
) -> StatisticsTransformation:
    """MicroSign: the moving average of mean_i sign(g_i), the sign of each example's gradient. Name and formula are ours.

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the moving average, which is not bias-corrected.
      weight_decay: decoupled, as in `optax.adamw`.
      mask: which parameters decay; a tree of booleans, or a function from the parameters to one.
      nesterov: looks one step ahead.
      mu_dtype: of the moving average; None: the parameter's, at least float32.

    >>> from perex_t5x import per_example
    >>> optimizer, params = micro_sign(1.0, b1=0.5), jnp.zeros(2)
    >>> batch = jnp.array([[1.0, 3.0], [3.0, -1.0]])  # the examples' gradients
    >>> stats, _ = per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), optimizer.needs)(params, batch)
    >>> print(optimizer.update(stats.mean, optimizer.init(params), params, statistics=stats)[0] + 0.0)
    [-0.5  0. ]
    """
    direction = scale_by_sign("example", b1, nesterov=nesterov, mu_dtype=mu_dtype, name="micro_sign")
    return descend(direction, learning_rate, weight_decay, mask)


def sign_sgd(
    learning_rate: Rate,
    b1: Decay = 0.9,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
    mu_dtype: DType = None,
) -> StatisticsTransformation:
    """SignSGD: the moving average of sign(ḡ), the sign of the batch gradient. Needs the mean alone; args as in `micro_sign`.

    >>> optimizer = sign_sgd(1.0, b1=0.5)
    >>> print(optimizer.update(jnp.array([2.0, -1.0]), optimizer.init(jnp.zeros(2)))[0])
    [-0.5  0.5]
    """
    direction = scale_by_sign("batch", b1, nesterov=nesterov, mu_dtype=mu_dtype, name="sign_sgd")
    return descend(direction, learning_rate, weight_decay, mask)


def sign_ema(
    learning_rate: Rate,
    b1: Decay = 0.9,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
    mu_dtype: DType = None,
) -> StatisticsTransformation:
    """SignEMA: the sign of the moving average of ḡ (Signum). Needs the mean alone; args as in `micro_sign`.

    The formula is our reading.

    >>> optimizer = sign_ema(1.0)
    >>> print(optimizer.update(jnp.array([2.0, -1.0]), optimizer.init(jnp.zeros(2)))[0])
    [-1.  1.]
    """
    direction = scale_by_sign("ema", b1, nesterov=nesterov, mu_dtype=mu_dtype, name="sign_ema")
    return descend(direction, learning_rate, weight_decay, mask)
