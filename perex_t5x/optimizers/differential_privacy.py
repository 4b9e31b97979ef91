"""Differentially private training: clipped gradients, Gaussian noise, then any optimizer; and what ε that is.

    ĝ = (Σ_i g_i · min(1, C/‖g_i‖) + σ·C·ξ) / B          ξ standard normal, B fixed beforehand

Whatever is computed from ĝ and the parameters alone is as private as ĝ is. docs/privacy.md: what is promised, and what not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from perex_t5x.arguments import Interval, PositiveInt
from perex_t5x.errors import ConfigError
from perex_t5x.optimizers.base import Privacy, StatisticsTransformation, from_statistics, needs_of
from perex_t5x.optimizers.checks import NotNegative, Positive, Rate, check_number
from perex_t5x.per_example.results import GradStatistics
from perex_t5x.per_example.statistic import names_of

Seed = Annotated[int, Interval("[0, 18446744073709551615]")]

# Named, since the noise must not change with jax_default_prng_impl; and of JAX's generators it is the one whose bits do not
# depend on how an array is sharded.
_GENERATOR = "threefry2x32"


class DPState(NamedTuple):
    """`key`: of the next step's noise, two 32-bit words; `inner`: the inner optimizer's state."""

    key: Any
    inner: Any


def dp(
    optimizer: optax.GradientTransformation | Callable[..., optax.GradientTransformation],
    learning_rate: Rate | None = None,
    *,
    clip_norm: Positive,
    noise_multiplier: NotNegative,
    batch_size: PositiveInt,
    seed: Seed,
) -> StatisticsTransformation:
    """DP-SGD (arXiv 1607.00133) in front of any optimizer, which sees ĝ instead of the mean gradient, and nothing else.

        ĝ = (Σ_i g_i · min(1, C/‖g_i‖) + σ·C·ξ) / B

    The gradients are clipped where they are computed, by `per_example.grad_statistics(..., clip_norm=C)`; the update raises
    unless `statistics.sensitivity` says so. The noise of a parameter is one array, a function of the seed, the number of
    steps and the parameter's place in the tree: the same on every mesh, however parameters are sharded. Its key is part of
    the state, so a run that resumes continues with the noise that it would have had.

    Formal guarantee. If the loss of each example depends on that example alone, every step releases a Gaussian mechanism of
    noise multiplier σ: the sum has the L2 sensitivity C for adding, removing or zeroing out one example, and the noise the
    standard deviation σ·C. `dp_epsilon` composes steps. An example with weight False, or whose gradient is 0, or (with
    non_finite='skip') not finite, adds nothing to the sum, and B does not depend on it.

    Args:
      optimizer: an optax transformation; or, with `learning_rate`, a function that makes one from it (`optax.adamw`). One
        that reads more than the mean gradient is refused: the other statistics are not private.
      learning_rate: a number or a schedule, where `optimizer` is such a function; the trainer gives its own.
      clip_norm: C.
      noise_multiplier: σ. 0: clipping alone, no privacy.
      batch_size: B, the number of examples that a step expects.
      seed: of the noise, up to 64 bits. Who knows it (or the state's key) can subtract the noise: draw it, and keep it to
        yourself, `python -c "import secrets; print(secrets.randbits(64))"`.

    >>> from perex_t5x import per_example
    >>> optimizer = dp(optax.sgd(1.0), clip_norm=1.0, noise_multiplier=0.0, batch_size=2, seed=5)
    >>> compute = per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), optimizer.needs, clip_norm=1.0, non_finite="skip")
    >>> params = jnp.zeros(2)
    >>> stats, _ = compute(params, jnp.array([[30.0, 40.0], [0.0, 0.5]]))  # the examples' gradients
    >>> stats.sensitivity.sum
    1.0
    >>> updates, state = optimizer.update(stats.mean, optimizer.init(params), params, statistics=stats)
    >>> [round(float(u), 4) for u in updates]  # -([0.6, 0.8] + [0, 0.5]) / 2
    [-0.3, -0.65]
    """
    check_number("dp", "clip_norm", clip_norm, above=True)
    check_number("dp", "noise_multiplier", noise_multiplier)
    check_number("dp", "batch_size", batch_size, above=True)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
        raise ConfigError(f"dp: seed = {seed!r} must be a whole number in [0, 2**64).")
    privacy = Privacy(float(clip_norm), float(noise_multiplier), int(batch_size))
    inner = optax.with_extra_args_support(_built(optimizer, learning_rate))

    def init(params: Any) -> DPState:
        _refuse_statistics(needs_of(inner, params))
        words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
        return DPState(jnp.asarray(words), inner.init(params))

    def update(statistics: GradStatistics, state: DPState, params: Any) -> tuple[Any, DPState]:
        key, of_step = jax.random.split(jax.random.wrap_key_data(state.key, impl=_GENERATOR))
        private = _noised_mean(statistics, privacy, of_step)
        updates, inner_state = inner.update(private, state.inner, params)
        return updates, DPState(jax.random.key_data(key), inner_state)

    return from_statistics("dp", ("mean",), init, update, privacy=privacy)


def _built(optimizer: Any, learning_rate: Any) -> optax.GradientTransformation:
    if isinstance(optimizer, optax.GradientTransformation):
        if learning_rate is not None:
            raise ConfigError(
                "dp: the optimizer is already built, with a learning rate of its own, and a learning_rate is given besides. "
                "Give the function instead: dp(optax.adamw, learning_rate), in Gin optimizers.dp.optimizer = @optax.adamw "
                "(without parentheses)."
            )
        return optimizer
    if not callable(optimizer):
        raise ConfigError(
            f"dp: optimizer = {optimizer!r}: give an optax transformation, or a function that makes one from a "
            "learning_rate, in Gin optimizers.dp.optimizer = @optax.adamw."
        )
    if learning_rate is None:
        name = getattr(optimizer, "__name__", "optimizer")
        raise ConfigError(f"dp: {name} is a function of a learning rate: dp({name}, learning_rate=0.001, ...).")
    made = optimizer(learning_rate=learning_rate)
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(f"dp: the optimizer made {type(made).__name__}, not an optax.GradientTransformation.")
    return made


def _refuse_statistics(needs: Any) -> None:
    if needs != ("mean",):
        more = ", ".join(repr(n) for n in names_of(needs) if n != "mean")
        raise ConfigError(
            f"dp: the optimizer inside it reads {more}, which no noise is added to. Use one that reads the mean gradient "
            "alone, such as optax.adamw or optimizers.adam."
        )


def _noised_mean(statistics: GradStatistics, privacy: Privacy, key: jax.Array) -> Any:
    """ĝ. The sum is recovered from the mean, whose own divisor may depend on which examples took part."""
    scale = jnp.asarray(statistics.weight_sum / statistics.group_size / privacy.batch_size, jnp.float32)
    deviation = privacy.noise_multiplier * privacy.clip_norm / privacy.batch_size
    leaves, tree = jax.tree.flatten(statistics.mean)
    noised = []
    for i, mean in enumerate(leaves):
        noise = jax.random.normal(jax.random.fold_in(key, i), mean.shape, mean.dtype)
        noised.append(scale.astype(mean.dtype) * mean + deviation * noise)
    return tree.unflatten(noised)


def dp_epsilon(*, noise_multiplier: float, steps: int, delta: float, sampling_probability: float = 1.0) -> float:
    """ε of (ε, δ) differential privacy after `steps` steps of `dp`, for adding, removing or zeroing out one example.

    By the privacy loss distribution of dp-accounting (the extra [dp]), an upper bound. Two uses:

    - Poisson sampling: every step takes every example with probability q, independently. `sampling_probability=q`, B = q·N.
    - Every example is in at most `steps` steps, at places that do not depend on the data, as in k epochs of a shuffled data
      set: `steps=k` and the default, `sampling_probability=1`. That holds for this package's feeds, for zeroing out (the
      other examples keep their places). ε is larger, since it does not count on nobody knowing which examples a step has.

    Args:
      noise_multiplier: σ.
      steps: how many steps; with fixed places, epochs.
      delta: δ, usually well below 1 over the number of examples.
      sampling_probability: q.

    >>> round(dp_epsilon(noise_multiplier=1.1, sampling_probability=256 / 60000, steps=14063, delta=1e-5), 2)  # 60 epochs
    2.38
    """
    for name, value, fits, needed in (
        ("noise_multiplier", noise_multiplier, noise_multiplier >= 0, "at least 0"),
        ("steps", steps, steps >= 0 and steps == int(steps), "a whole number, at least 0"),
        ("delta", delta, 0 < delta < 1, "in (0, 1)"),
        ("sampling_probability", sampling_probability, 0 < sampling_probability <= 1, "in (0, 1]"),
    ):
        if not fits:
            raise ConfigError(f"dp_epsilon: {name} = {value} must be {needed}.")
    try:
        accounting = importlib.import_module("dp_accounting")
        accountant = importlib.import_module("dp_accounting.pld").PLDAccountant()
    except ImportError as e:
        raise ConfigError(
            "dp_epsilon needs the extra [dp]: pip install 'perex_t5x[dp]' (missing: dp_accounting)"
        ) from e
    if steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return float("inf")
    event = accounting.GaussianDpEvent(noise_multiplier)
    if sampling_probability < 1:
        event = accounting.PoissonSampledDpEvent(sampling_probability, event)
    return float(accountant.compose(event, int(steps)).get_epsilon(delta))
