"""The step of the Adam family: m̂ / (√v̂ + ε) with a second moment a·μ² + b·σ², of which Adam's is one case.

μ is a coordinate's expected gradient and σ² the variance of one example's. Both are estimated without bias from the batch:

    σ̂² = b_g · (q − ḡ²) / (1 − s)       s = Σw²/(Σw)², 1/M for M groups of equal weight; b_g examples in a group
    μ̂² = ḡ² − σ̂²/B                      1/B = s/b_g
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from perex_t5x.errors import ConfigError
from perex_t5x.optimizers.base import StatisticsTransformation, from_statistics, inverse_batch_size, zero_moments
from perex_t5x.optimizers.checks import Decay, DType, NotNegative, check_choice, check_number, check_several_groups
from perex_t5x.per_example.results import GradStatistics


class MomentsState(NamedTuple):
    """Named as in `optax.ScaleByAdamState`, so a checkpoint of `optax.adamw` continues with any of these."""

    count: Any
    mu: Any
    nu: Any


class FlooredState(NamedTuple):
    """`square`: moving average of μ̂² + σ̂², or () with floor="zero"; `floored`: share of floored coordinates."""

    count: Any
    mu: Any
    nu: Any
    square: Any
    floored: jax.Array

    def metrics(self) -> dict[str, jax.Array]:
        return {"floored_share": self.floored}


class PartsState(NamedTuple):
    """The two parts of the second moment separately, as moving averages that are not bias-corrected."""

    count: Any
    mu: Any
    squared_mean: Any
    variance: Any
    floored: jax.Array

    def metrics(self) -> dict[str, jax.Array]:
        """`ema_snr_squared`: Σ μ̂² / Σ σ̂² over all coordinates."""
        signal, noise = (sum(jnp.sum(x) for x in jax.tree.leaves(t)) for t in (self.squared_mean, self.variance))
        ratio = jnp.where(noise > 0, signal / jnp.where(noise > 0, noise, 1.0), 0.0)
        return {"floored_share": self.floored, "ema_snr_squared": ratio}


# --- the second moment ------------------------------------------------------------------------------------------------


def second_moment(statistics: GradStatistics, a: Any, b: Any, optimizer: str = "second_moment") -> Any:
    """a·μ̂² + b·σ̂² of one batch, computed as a·ḡ² + (b − a/B)·σ̂²; `b` may be "1/B".

    (1, "1/B") is ḡ² and never reads `mean_square`; (1, 1) is q for groups of one. Otherwise NaN for a single example.
    q − ḡ² is not negative; where rounding says so, it is taken as 0.

    >>> two = jnp.asarray(2.0)
    >>> averages = {"mean": jnp.array([2.0, 1.0]), "mean_square": jnp.array([5.0, 5.0])}
    >>> stats = GradStatistics(averages, count=two, num_groups=two, weight_sum=two, weight_square_sum=two)
    >>> print(second_moment(stats, 0, 1), second_moment(stats, 1, 0))  # variance, squared mean
    [2. 8.] [ 3. -3.]
    """
    if _is_adams(a, b):
        return jax.tree.map(jnp.square, statistics.mean)
    if _is_number(a) and _is_number(b) and a == b and statistics.group_size == 1:
        return jax.tree.map(lambda q: a * q, statistics.mean_square)
    check_several_groups(optimizer, statistics)
    inverse = inverse_batch_size(statistics)
    b = inverse if isinstance(b, str) else b
    factor = (b - a * inverse) * statistics.variance_factor()
    factor = jnp.where(statistics.weight_sum > 0, factor, 0.0)  # an empty batch is a gradient of 0
    return jax.tree.map(
        lambda m, c: a * jnp.square(m) + factor * jnp.maximum(c, 0.0), statistics.mean, statistics.central_square()
    )


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float)


def _is_adams(a: Any, b: Any) -> bool:
    return _is_number(a) and a == 1 and isinstance(b, str)


def _can_be_negative(a: Any, b: Any) -> bool:
    """Whether a·ḡ² + (b − a/B)·σ̂² can be negative for some B; True where a or b is not known while tracing."""
    if not _is_number(a) or not (_is_number(b) or isinstance(b, str)):
        return True
    return a > 1 if isinstance(b, str) else b < a


# --- the step ---------------------------------------------------------------------------------------------------------


def scale_by_moments(
    a: Any,
    b: Any,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NotNegative = 1e-8,
    *,
    nesterov: bool = False,
    mu_dtype: DType = None,
    nu_dtype: DType = None,
    floor: Literal["auto", "mean_square", "zero"] = "auto",
    floor_scale: NotNegative = 1.0,
    keep_parts: bool = False,
    name: str = "scale_by_moments",
) -> StatisticsTransformation:
    """Divides the momentum by the root of a second moment a·μ² + b·σ².

        m ← b1·m + (1−b1)·ḡ        v ← b2·v + (1−b2)·(a·μ̂² + b·σ̂²)        step = m̂ / (√max(v̂, floor) + eps)

    with m̂ = m/(1−b1ᵗ), v̂ = v/(1−b2ᵗ). (a, b) is (1, "1/B") for Adam, (1, 1) for MicroAdam, (0, 1) for MicroAdamVar, (1, 0)
    for MicroAdamMSQ. (1, 1/b_g) with groups of b_g examples is the mean square of the groups' gradients.

    Args:
      a, b: at least 0, not both 0. `b` may be "1/B", with B the number of examples of each step.
      b1, b2: decays of the moving averages.
      eps: added to the root.
      nesterov: looks one step ahead in m̂, as `optax.nadam`.
      mu_dtype, nu_dtype: of the moving averages; None: the parameter's, at least float32.
      floor: what v̂ is raised to. "mean_square": floor_scale/B times the moving average of μ̂² + σ̂², MicroAdam's second
        moment (a second buffer). "zero": 0, so a coordinate with v̂ < 0 steps by m̂/eps. "auto": "mean_square" where
        a·μ̂² + b·σ̂² can be negative (b < a), else no floor.
      floor_scale: see `floor`.
      keep_parts: keeps separate moving averages of μ̂² and σ̂² instead of their sum (`PartsState`), to inspect them. The same
        step up to rounding, as long as B does not vary where it enters.
      name: for messages.

    >>> from perex_t5x import per_example
    >>> direction, params = scale_by_moments(1, 0.5, floor="zero"), jnp.zeros(2)
    >>> batch = jnp.array([[1.0, 3.0], [3.0, -1.0]])  # the examples' gradients
    >>> stats, _ = per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), direction.needs)(params, batch)
    >>> steps, state = direction.update(stats.mean, direction.init(params), params, statistics=stats)
    >>> print(jnp.round(steps, 3))  # ḡ = [2, 1], μ̂² + σ̂²/2 = [4, 1]
    [1. 1.]
    """
    check_number(name, "b1", b1, below=1.0)
    check_number(name, "b2", b2, below=1.0)
    check_number(name, "eps", eps)
    check_number(name, "a", a)
    if isinstance(b, str):
        check_choice(name, "b", b, ("1/B",))
    else:
        check_number(name, "b", b)
    if _is_number(a) and _is_number(b) and a == b == 0:
        raise ConfigError(f"{name}: a = b = 0 leaves nothing to divide by; one of them must be positive.")
    check_choice(name, "floor", floor, ("auto", "mean_square", "zero"))
    check_number(name, "floor_scale", floor_scale)
    raised_to: str = floor
    if floor == "auto":
        raised_to = "mean_square" if _can_be_negative(a, b) else "nothing"
    needs = ("mean",) if _is_adams(a, b) and raised_to != "mean_square" and not keep_parts else ("mean", "mean_square")

    def init(params: Any) -> Any:
        count, mu, nu = jnp.zeros((), jnp.int32), zero_moments(params, mu_dtype), zero_moments(params, nu_dtype)
        no_share = jnp.zeros((), jnp.float32)
        if keep_parts:
            return PartsState(count, mu, nu, zero_moments(params, nu_dtype), no_share)
        if raised_to == "nothing":
            return MomentsState(count, mu, nu)
        return FlooredState(
            count, mu, nu, zero_moments(params, nu_dtype) if raised_to == "mean_square" else (), no_share
        )

    def update(statistics: GradStatistics, state: Any, params: Any) -> tuple[Any, Any]:
        del params
        count = optax.safe_increment(state.count)
        mu, m_hat = momentum(statistics.mean, state.mu, b1, count, nesterov)

        def ema(a: Any, b: Any, old: Any) -> Any:
            return optax.tree.update_moment(second_moment(statistics, a, b, name), old, b2, 1)

        square = ()
        if keep_parts:
            parts = ema(1, 0, state.squared_mean), ema(0, 1, state.variance)
            b_now = inverse_batch_size(statistics) if isinstance(b, str) else b
            nu = jax.tree.map(lambda signal, noise: a * signal + b_now * noise, *parts)
            if raised_to == "mean_square":
                square = jax.tree.map(jnp.add, *parts)
        else:
            nu = ema(a, b, state.nu)
            if raised_to == "mean_square":
                square = ema(1, 1, state.square)
        v_hat = optax.tree.bias_correction(nu, b2, count)
        if raised_to == "mean_square":
            factor = floor_scale * inverse_batch_size(statistics)
            lowest = jax.tree.map(lambda x: factor * x, optax.tree.bias_correction(square, b2, count))
        else:
            lowest = jax.tree.map(jnp.zeros_like, v_hat)
        steps = jax.tree.map(lambda m, v, low: m / (jnp.sqrt(jnp.maximum(v, low)) + eps), m_hat, v_hat, lowest)

        mu = optax.tree.cast_like(mu, state.mu)
        if keep_parts:
            signal, noise = optax.tree.cast_like(parts, (state.squared_mean, state.variance))
            return steps, PartsState(count, mu, signal, noise, _share_below(v_hat, lowest))
        nu = optax.tree.cast_like(nu, state.nu)
        if raised_to == "nothing":
            return steps, MomentsState(count, mu, nu)
        square = optax.tree.cast_like(square, state.square)
        return steps, FlooredState(count, mu, nu, square, _share_below(v_hat, lowest))

    return from_statistics(name, needs, init, update)


def momentum(mean: Any, mu: Any, b1: Any, count: Any, nesterov: bool) -> tuple[Any, Any]:
    """The new moving average and what the step uses of it, bias-corrected as in optax."""
    mu = optax.tree.update_moment(mean, mu, b1, 1)
    if not nesterov:
        return mu, optax.tree.bias_correction(mu, b1, count)
    ahead = optax.tree.bias_correction(mu, b1, optax.safe_increment(count))
    now = optax.tree.bias_correction(mean, b1, count)
    return mu, jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, ahead, now)


def _share_below(values: Any, lowest: Any) -> jax.Array:
    """The share of coordinates below their floor."""
    below = jax.tree.map(lambda v, low: jnp.sum(v < low, dtype=jnp.float32), values, lowest)
    coordinates = sum(v.size for v in jax.tree.leaves(values))
    return sum(jax.tree.leaves(below), jnp.zeros((), jnp.float32)) / max(coordinates, 1)
