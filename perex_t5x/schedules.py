"""Learning-rate schedules: T5X's product of factors. Any optax schedule serves as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from perex_t5x import arguments
from perex_t5x.arguments import Count, Interval, PositiveInt
from perex_t5x.errors import ConfigError, did_you_mean

Rate = Annotated[float, Interval("[0, ∞)")]
Schedule = Callable[[jax.Array], jax.Array]

FACTORS = (
    "constant",
    "linear_warmup",
    "linear_decay",
    "rsqrt_decay",
    "rsqrt_normalized_decay",
    "decay_every",
    "cosine_decay",
)


def create_learning_rate_scheduler(
    factors: str = "constant * linear_warmup * rsqrt_decay",
    base_learning_rate: Rate = 0.5,
    warmup_steps: Count = 1000,
    decay_factor: float = 0.5,
    steps_per_decay: PositiveInt = 20000,
    steps_per_cycle: PositiveInt = 100000,
    step_offset: int = 0,
    min_learning_rate: Rate = 1e-8,
) -> Schedule:
    """Returns η(t), the product of the named factors at t = max(0, step − step_offset), never below `min_learning_rate`.

    The numbers are T5X's, for every product; `linear_decay` has the base rate and the warm-up in it, so it stands alone as a
    rule.

    | factor | multiplies by |
    |---|---|
    | constant | base_learning_rate |
    | linear_warmup | min(1, t / warmup_steps) |
    | linear_decay | base_learning_rate · min(t / warmup_steps, 1 + decay_factor · (warmup_steps − t)) |
    | rsqrt_decay | 1 / √max(t, warmup_steps) |
    | rsqrt_normalized_decay | √warmup_steps / √max(t, warmup_steps) |
    | decay_every | decay_factor ^ ⌊t / steps_per_decay⌋ |
    | cosine_decay | (1 + cos(π · ((t − warmup_steps) / steps_per_cycle mod 1))) / 2, 1 during warm-up |

    With warmup_steps = 0 there is no warm-up; step 0, where T5X divides by 0, then counts as step 1 in 1/√t.

    >>> rate = create_learning_rate_scheduler("constant * linear_warmup", 0.1, warmup_steps=10)
    >>> round(float(rate(5)), 6), round(float(rate(50)), 6)
    (0.05, 0.1)
    """
    arguments.check("create_learning_rate_scheduler", arguments.hints(create_learning_rate_scheduler), dict(locals()))
    names = [name.strip() for name in factors.split("*")]
    for name in names:
        if name not in FACTORS:
            raise ConfigError(
                f"create_learning_rate_scheduler.factors = {factors!r}: unknown factor {name!r}."
                f"{did_you_mean(name, FACTORS)} Known: {', '.join(FACTORS)}."
            )

    def rate(step: jax.Array) -> jax.Array:
        t = jnp.maximum(0, jnp.asarray(step) - step_offset).astype(jnp.float32)  # subtracted as whole numbers: exact
        late = jnp.maximum(t, max(warmup_steps, 1))
        ramp = t / warmup_steps if warmup_steps else jnp.inf
        progress = jnp.maximum(t - warmup_steps, 0.0) / steps_per_cycle
        factor_values = {
            "constant": lambda: base_learning_rate,
            "linear_warmup": lambda: jnp.minimum(1.0, ramp),
            "linear_decay": lambda: base_learning_rate * jnp.minimum(ramp, 1.0 + decay_factor * (warmup_steps - t)),
            "rsqrt_decay": lambda: jax.lax.rsqrt(late),
            "rsqrt_normalized_decay": lambda: jnp.sqrt(warmup_steps / late),
            "decay_every": lambda: decay_factor ** (t // steps_per_decay),
            "cosine_decay": lambda: 0.5 * (1.0 + jnp.cos(jnp.pi * (progress % 1.0))),
        }
        product = jnp.float32(1.0)
        for name in names:
            product = product * factor_values[name]()
        return jnp.maximum(product, min_learning_rate).astype(jnp.float32)

    return rate


def as_schedule(learning_rate: float | Schedule) -> Schedule:
    """Accepts a number or any schedule (ours, optax's); returns a function of the step with a f32 result."""
    if callable(learning_rate):
        return lambda step: jnp.asarray(learning_rate(step), jnp.float32)
    if not isinstance(learning_rate, int | float):
        raise ConfigError(
            f"Trainer.learning_rate_fn = {learning_rate!r}: give a number, @utils.create_learning_rate_scheduler() or "
            "an optax schedule such as @optax.cosine_decay_schedule()."
        )
    if learning_rate < 0:
        raise ConfigError(f"Trainer.learning_rate_fn = {learning_rate}: must not be negative.")
    return lambda step: jnp.float32(learning_rate)
