"""The Adam family: the members of a·μ² + b·σ² that have names (see `moments`), and Eve."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from perex_t5x.optimizers.base import (
    Mask,
    StatisticsTransformation,
    descend,
    from_statistics,
    inverse_batch_size,
    zero_moments,
)
from perex_t5x.optimizers.checks import Decay, DType, NotNegative, Rate, check_number
from perex_t5x.optimizers.moments import MomentsState, momentum, scale_by_moments
from perex_t5x.per_example.results import GradStatistics


def adam(
    learning_rate: Rate,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NotNegative = 1e-8,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
    mu_dtype: DType = None,
    nu_dtype: DType = None,
) -> StatisticsTransformation:
    """Adam: v averages ḡ², which estimates μ² + σ²/B. Equals `optax.adamw`, and needs the mean alone.

    Args as in `micro_adam`.

    >>> optimizer = adam(0.1)
    >>> print(jnp.round(optimizer.update(jnp.array([2.0, 1.0]), optimizer.init(jnp.zeros(2)))[0], 3))
    [-0.1 -0.1]
    """
    direction = scale_by_moments(
        1, "1/B", b1, b2, eps, nesterov=nesterov, mu_dtype=mu_dtype, nu_dtype=nu_dtype, name="adam"
    )
    return descend(direction, learning_rate, weight_decay, mask)


def micro_adam(
    learning_rate: Rate,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NotNegative = 1e-8,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
    mu_dtype: DType = None,
    nu_dtype: DType = None,
) -> StatisticsTransformation:
    """MicroAdam: v averages q, the mean square of the examples' gradients, which estimates μ² + σ².

    Where the signal is weak √v is about √B times Adam's: retune the learning rate.

    Args:
      learning_rate: a number or a schedule.
      b1, b2: decays of the moving averages of ḡ and of the second moment.
      eps: added to √v̂.
      weight_decay: decoupled, as in `optax.adamw`.
      mask: which parameters decay; a tree of booleans, or a function from the parameters to one.
      nesterov: looks one step ahead, as `optax.nadam`.
      mu_dtype, nu_dtype: of the moving averages; None: the parameter's, at least float32.

    Reference: Roulet & Agarwala, *Per-example gradients*, https://arxiv.org/abs/2510.00236.

    >>> from perex_t5x import per_example
    >>> optimizer, params = micro_adam(0.1), jnp.zeros(2)
    >>> batch = jnp.array([[1.0, 3.0], [3.0, -1.0]])  # the examples' gradients: ḡ = [2, 1], q = [5, 5]
    >>> stats, _ = per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), optimizer.needs)(params, batch)
    >>> print(jnp.round(optimizer.update(stats.mean, optimizer.init(params), params, statistics=stats)[0], 3))
    [-0.089 -0.045]
    """
    direction = scale_by_moments(
        1, 1, b1, b2, eps, nesterov=nesterov, mu_dtype=mu_dtype, nu_dtype=nu_dtype, name="micro_adam"
    )
    return descend(direction, learning_rate, weight_decay, mask)


def micro_adam_var(
    learning_rate: Rate,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NotNegative = 1e-8,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
    mu_dtype: DType = None,
    nu_dtype: DType = None,
) -> StatisticsTransformation:
    """MicroAdamVar: v averages σ̂² = B/(B−1)·(q − ḡ²), the unbiased variance of the examples' gradients.

    Needs at least two examples. Args as in `micro_adam`. The formula is our reading.

    >>> from perex_t5x import per_example
    >>> optimizer, params = micro_adam_var(0.1), jnp.zeros(2)
    >>> batch = jnp.array([[1.0, 3.0], [3.0, -1.0]])  # ḡ = [2, 1], σ̂² = [2, 8]
    >>> stats, _ = per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), optimizer.needs)(params, batch)
    >>> print(jnp.round(optimizer.update(stats.mean, optimizer.init(params), params, statistics=stats)[0], 3))
    [-0.141 -0.035]
    """
    direction = scale_by_moments(
        0, 1, b1, b2, eps, nesterov=nesterov, mu_dtype=mu_dtype, nu_dtype=nu_dtype, name="micro_adam_var"
    )
    return descend(direction, learning_rate, weight_decay, mask)


def micro_adam_msq(
    learning_rate: Rate,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NotNegative = 1e-8,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
    *,
    floor: Literal["auto", "mean_square", "zero"] = "auto",
    floor_scale: NotNegative = 1.0,
    nesterov: bool = False,
    mu_dtype: DType = None,
    nu_dtype: DType = None,
) -> StatisticsTransformation:
    """MicroAdamMSQ: v averages μ̂² = ḡ² − σ̂²/B, the unbiased square of the expected gradient.

    Where the signal is weak, μ̂² and often its average are negative; so v̂ is raised to floor_scale/B times the average of
    μ̂² + σ̂² (a second buffer). floor="zero" raises it to 0 only, and such coordinates step by m̂/eps. The state counts the
    share of coordinates that were raised (`logged(state)["floored_share"]`).

    Needs at least two examples. Other args as in `micro_adam`. Formula and floor are our reading.

    >>> from perex_t5x import per_example
    >>> optimizer, params = micro_adam_msq(0.1), jnp.zeros(2)
    >>> batch = jnp.array([[1.0, 3.0], [3.0, -1.0]])  # ḡ = [2, 1], μ̂² = [3, -3], floor q/B = [2.5, 2.5]
    >>> stats, _ = per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), optimizer.needs)(params, batch)
    >>> print(jnp.round(optimizer.update(stats.mean, optimizer.init(params), params, statistics=stats)[0], 3))
    [-0.115 -0.063]
    """
    floors = {"floor": floor, "floor_scale": floor_scale}
    direction = scale_by_moments(
        1, 0, b1, b2, eps, nesterov=nesterov, mu_dtype=mu_dtype, nu_dtype=nu_dtype, **floors, name="micro_adam_msq"
    )
    return descend(direction, learning_rate, weight_decay, mask)


def scale_by_eve(
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NotNegative = 1e-8,
    *,
    nesterov: bool = False,
    mu_dtype: DType = None,
    nu_dtype: DType = None,
    name: str = "scale_by_eve",
) -> StatisticsTransformation:
    """Divides the momentum by the root of v' = v̂/B + (1 − 1/B)·m̂², with v the moving average of q.

    As Adam's second moment this estimates μ² + σ²/B, but takes μ² from the momentum. With groups of b examples, 1/B is
    b·Σw²/(Σw)² (1/M for M groups). Args as in `scale_by_moments`.

    >>> scale_by_eve().needs
    ('mean', 'mean_square')
    """
    check_number(name, "b1", b1, below=1.0)
    check_number(name, "b2", b2, below=1.0)
    check_number(name, "eps", eps)

    def init(params: Any) -> MomentsState:
        return MomentsState(jnp.zeros((), jnp.int32), zero_moments(params, mu_dtype), zero_moments(params, nu_dtype))

    def update(statistics: GradStatistics, state: MomentsState, params: Any) -> tuple[Any, MomentsState]:
        del params
        count = optax.safe_increment(state.count)
        mu, ahead = momentum(statistics.mean, state.mu, b1, count, nesterov)
        nu = optax.tree.update_moment(statistics.mean_square, state.nu, b2, 1)
        share = inverse_batch_size(statistics) * statistics.group_size
        steps = jax.tree.map(
            lambda n, m, v: n / (jnp.sqrt(share * v + (1.0 - share) * jnp.square(m)) + eps),
            ahead,
            optax.tree.bias_correction(mu, b1, count),
            optax.tree.bias_correction(nu, b2, count),
        )
        return steps, MomentsState(count, optax.tree.cast_like(mu, state.mu), optax.tree.cast_like(nu, state.nu))

    return from_statistics(name, ("mean", "mean_square"), init, update)


def eve(
    learning_rate: Rate,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NotNegative = 1e-8,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
    mu_dtype: DType = None,
    nu_dtype: DType = None,
) -> StatisticsTransformation:
    """Eve: step m̂ / (√v' + eps) with v' = v̂/B + (1 − 1/B)·m̂² and v the average of q.

    Args as in `micro_adam`. Reference: https://arxiv.org/abs/2112.00174; with one example it is Adam.

    >>> from perex_t5x import per_example
    >>> optimizer, params = eve(0.1), jnp.zeros(2)
    >>> batch = jnp.array([[1.0, 3.0], [3.0, -1.0]])  # ḡ = [2, 1], q = [5, 5], v' = [4.5, 3]
    >>> stats, _ = per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), optimizer.needs)(params, batch)
    >>> print(jnp.round(optimizer.update(stats.mean, optimizer.init(params), params, statistics=stats)[0], 3))
    [-0.094 -0.058]
    """
    direction = scale_by_eve(b1, b2, eps, nesterov=nesterov, mu_dtype=mu_dtype, nu_dtype=nu_dtype, name="eve")
    return descend(direction, learning_rate, weight_decay, mask)
