"""Optimizers whose statistics see the optimizer's own state: the mean over examples of φ(g_i; m, v).

    micro_lion    mean_i sign(b1·m + (1−b1)·g_i)         Lion's sign, of each example's step
    micro_clip    EMA(mean_i clip(g_i, ±k√v̂)) / √v̂       Adam's second moment clips each coordinate of each example

Both ask where the nonlinearity stands, before the mean over examples or after it. Names and formulas are ours. In a loop of
one's own the state is handed over with the call: `compute(params, batch, operands=operands_of(state))`; the trainer does so.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from perex_t5x.optimizers.base import Mask, StatisticsTransformation, descend, from_statistics, zero_moments
from perex_t5x.optimizers.checks import Decay, DType, NotNegative, Positive, Rate, check_number
from perex_t5x.per_example.results import GradStatistics
from perex_t5x.per_example.statistic import Statistic

_MOMENTUM, _SECOND = "lion_momentum", "clip_second_moment"


# Made once for each value, so that two optimizers with the same one need the same statistic.
@functools.cache
def _step_sign(b1: float) -> Statistic:
    return Statistic(f"mean_step_sign_{b1:g}", lambda g, m: jnp.sign(b1 * m + (1 - b1) * g), operands=(_MOMENTUM,))


@functools.cache
def _clipped(k: float) -> Statistic:
    def clip(g: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.clip(g, -k * jnp.sqrt(v), k * jnp.sqrt(v))

    return Statistic(f"mean_clipped_{k:g}", clip, operands=(_SECOND,))


class LionState(NamedTuple):
    """`mu`: moving average of ḡ."""

    mu: Any

    def operands(self) -> dict[str, Any]:
        return {_MOMENTUM: self.mu}


def micro_lion(
    learning_rate: Rate,
    b1: Decay = 0.9,
    b2: Decay = 0.99,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
    *,
    mu_dtype: DType = None,
) -> StatisticsTransformation:
    """MicroLion: −η·(mean_i sign(b1·m + (1−b1)·g_i) + λ·params), m ← b2·m + (1−b2)·ḡ.

    Lion (arXiv 2302.06675) takes the sign of b1·m + (1−b1)·ḡ, after the mean over examples. Where all examples agree, the
    two are the same.

    Args:
      learning_rate: a number or a schedule.
      b1: the momentum's share of the step whose sign is taken.
      b2: decay of the momentum, which is not bias-corrected.
      weight_decay: decoupled, as in `optax.lion`.
      mask: which parameters decay; a tree of booleans, or a function from the parameters to one.
      mu_dtype: of the momentum; None: the parameter's, at least float32.

    >>> from perex_t5x import optimizers, per_example
    >>> optimizer, params = micro_lion(1.0), jnp.zeros(2)
    >>> batch = jnp.array([[1.0, 3.0], [3.0, -1.0]])  # the examples' gradients
    >>> compute = per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), optimizer.needs)
    >>> state = optimizer.init(params)
    >>> stats, _ = compute(params, batch, operands=optimizers.operands_of(state))
    >>> print(optimizer.update(stats.mean, state, params, statistics=stats)[0] + 0.0)
    [-1.  0.]
    """
    check_number("micro_lion", "b1", b1, below=1.0)
    check_number("micro_lion", "b2", b2, below=1.0)
    sign = _step_sign(float(b1))

    def init(params: Any) -> LionState:
        return LionState(zero_moments(params, mu_dtype))

    def update(statistics: GradStatistics, state: LionState, params: Any) -> tuple[Any, LionState]:
        del params
        mu = optax.tree.update_moment(statistics.mean, state.mu, b2, 1)
        return statistics[sign], LionState(optax.tree.cast_like(mu, state.mu))

    return descend(from_statistics("micro_lion", ("mean", sign), init, update), learning_rate, weight_decay, mask)


class ClipState(NamedTuple):
    """`mu`, `nu`: moving averages of the clipped mean and of g_i²; `left`: b2**count, what their start still weighs."""

    count: Any
    mu: Any
    nu: Any
    left: jax.Array

    def operands(self) -> dict[str, Any]:
        """v̂, bias-corrected; infinite before the first step, when nothing is known."""
        known = self.left < 1
        weight = jnp.where(known, 1 - self.left, 1.0)
        return {_SECOND: jax.tree.map(lambda v: jnp.where(known, v / weight, jnp.inf), self.nu)}


def micro_clip(
    learning_rate: Rate,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NotNegative = 1e-8,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
    *,
    k: Positive = 3.0,
) -> StatisticsTransformation:
    """MicroClip: m̂/(√v̂ + ε), m the moving average of mean_i clip(g_i, ±k√v̂), v that of mean_i g_i².

    Every coordinate of every example's gradient is clipped at k times the root of what its square was on average, up to the
    step before. With k → ∞ it is MicroAdam. The first step clips nothing.

    Args:
      learning_rate: a number or a schedule.
      b1, b2: decays of the moving averages, which are bias-corrected.
      eps: ε, outside the root.
      weight_decay: decoupled, as in `optax.adamw`.
      mask: which parameters decay; a tree of booleans, or a function from the parameters to one.
      k: where examples are clipped, in roots of the second moment.

    >>> from perex_t5x import optimizers, per_example
    >>> optimizer, params = micro_clip(1.0, k=1.0), jnp.zeros(1)
    >>> compute = per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), optimizer.needs)
    >>> state = optimizer.init(params)
    >>> for batch in (jnp.array([[1.0], [1.0]]), jnp.array([[1.0], [100.0]])):
    ...     stats, _ = compute(params, batch, operands=optimizers.operands_of(state))
    ...     updates, state = optimizer.update(stats.mean, state, params, statistics=stats)
    >>> round(float(state[0].mu[0]), 3)  # the 100 counted as 1
    0.19
    """
    check_number("micro_clip", "b1", b1, below=1.0)
    check_number("micro_clip", "b2", b2, below=1.0)
    check_number("micro_clip", "eps", eps)
    check_number("micro_clip", "k", k)
    clipped = _clipped(float(k))

    def init(params: Any) -> ClipState:
        return ClipState(jnp.zeros([], jnp.int32), zero_moments(params), zero_moments(params), jnp.ones([]))

    def update(statistics: GradStatistics, state: ClipState, params: Any) -> tuple[Any, ClipState]:
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(statistics[clipped], state.mu, b1, 1)
        nu = optax.tree.update_moment(statistics.mean_square, state.nu, b2, 1)
        left = state.left * b2
        mu_hat = optax.tree.bias_correction(mu, b1, count)
        nu_hat = jax.tree.map(lambda v: v / (1 - left), nu)
        steps = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu_hat, nu_hat)
        return steps, ClipState(count, mu, nu, left)

    direction = from_statistics("micro_clip", ("mean", "mean_square", clipped), init, update)
    return descend(direction, learning_rate, weight_decay, mask)
