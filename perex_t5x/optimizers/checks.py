"""Argument validation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from perex_t5x.arguments import Interval
from perex_t5x.errors import ConfigError
from perex_t5x.per_example.results import GradStatistics
from perex_t5x.per_example.statistic import Statistic, names_of


class _FloatingPoint:
    """Names and types of floating-point numbers."""

    def allows(self, value: Any) -> bool:
        try:
            return value is None or jnp.issubdtype(jnp.dtype(value), jnp.floating)
        except TypeError:
            return False

    def describe(self, noun: str) -> str:
        return "a floating-point type such as 'float32' or 'bfloat16'"


class _Number(Interval):
    """Numbers of an interval alone; as whole numbers they have to fit into an int32."""

    def allows(self, value: Any) -> bool:
        is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**31)
        return is_number and not isinstance(value, bool) and super().allows(value)

    def describe(self, noun: str) -> str:
        return super().describe("a number")


class _NumberOrSchedule(_Number):
    """Also functions of the step."""

    def allows(self, value: Any) -> bool:
        return callable(value) or super().allows(value)

    def describe(self, noun: str) -> str:
        return f"{super().describe(noun)}, or a schedule (@...)"


# Annotations of optimizers' arguments, for who configures them; called from Python they also take arrays and traced values.
Decay = Annotated[Any, _Number("[0, 1)")]
NotNegative = Annotated[Any, _Number("[0, ∞)")]
Positive = Annotated[Any, _Number("(0, ∞)")]
Rate = Annotated[Any, _NumberOrSchedule("[0, ∞)")]
DType = Annotated[Any, _FloatingPoint()]

# optax's own annotations allow anything like an array.
OPTAX_ARGUMENTS = {
    **dict.fromkeys(("b1", "b2", "b3", "decay", "momentum"), Decay),
    **dict.fromkeys(("eps", "eps_root"), NotNegative),
    **dict.fromkeys(("weight_decay", "learning_rate"), Rate),
    **dict.fromkeys(("max_norm", "threshold"), Positive),
    **dict.fromkeys(("mu_dtype", "accumulator_dtype"), DType),
}


def check_number(
    optimizer: str, name: str, value: Any, *, at_least: float = 0.0, below: float | None = None, above: bool = False
) -> None:
    """Raises unless `value` lies in [at_least, below), or in (at_least, below) with `above`.

    Only numbers are checked: a schedule, a traced value (the trainer's learning rate) and None pass.

    >>> check_number("adam", "b2", 1.0, below=1.0)
    Traceback (most recent call last):
    perex_t5x.errors.ConfigError: adam: b2 = 1.0 must be in [0, 1).
    """
    number = None if callable(value) else _known(value)
    if number is None:
        return
    fits = (number > at_least if above else number >= at_least) and (below is None or number < below)
    if not fits:
        upper = "∞" if below is None else f"{below:g}"
        raise ConfigError(
            f"{optimizer}: {name} = {value} must be in {'(' if above else '['}{at_least:g}, {upper})."
            + (" optax subtracts the step itself." if name == "learning_rate" else "")
        )


def _known(x: Any) -> Any:
    """x as a NumPy number (any operation of JAX's would be traced inside `jit`), or None where it is itself traced."""
    return None if x is None or isinstance(x, Tracer) else np.asarray(x)


def check_choice(optimizer: str, name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{optimizer}: {name} = {value!r} must be one of {', '.join(map(repr, choices))}.")


def check_statistics(optimizer: str, needs: Sequence[str | Statistic], statistics: Any) -> GradStatistics:
    """Raises unless `statistics` is a `GradStatistics` that has what the optimizer needs; returns it."""
    names = ", ".join(map(repr, names_of(needs)))
    asked = "optimizer.needs" if any(isinstance(n, Statistic) for n in needs) else f"({names})"
    loop = (
        f"    stats, _ = per_example.grad_statistics(loss_fn, {asked})(params, batch)\n"
        "    updates, state = optimizer.update(stats.mean, state, params, statistics=stats)\n"
        "    params = optax.apply_updates(params, updates)"
    )
    if statistics is None:
        raise ConfigError(
            f"{optimizer} needs the statistics {names}, but update got no statistics=. A step is:\n{loop}"
        )
    if not isinstance(statistics, GradStatistics):
        raise ConfigError(
            f"{optimizer}: statistics= is a {type(statistics).__name__}, not a per_example.GradStatistics. "
            f"A step is:\n{loop}"
        )
    missing = [name for name in names_of(needs) if name not in statistics.averages]
    if missing:
        raise ConfigError(
            f"{optimizer} needs the statistics {names}; given were {', '.join(map(repr, statistics.averages))}. "
            f"Compute them with per_example.grad_statistics(loss_fn, {asked})."
        )
    return statistics


def check_sensitivity(optimizer: str, clip_norm: float, statistics: GradStatistics) -> None:
    """Raises unless one example moves the sum of the gradients by no more than `clip_norm`."""
    bound = statistics.sensitivity
    compute = f"per_example.grad_statistics(loss_fn, ('mean',), clip_norm={clip_norm:g}, non_finite='skip')"
    if bound is None:
        raise ConfigError(
            f"{optimizer}: nothing bounds how far one example moves these statistics (statistics.sensitivity is None). "
            f"Compute them with {compute}, without transport_dtype, and with weights, if there are any, that are booleans."
        )
    if bound.sum > clip_norm * (1 + 1e-6):
        raise ConfigError(
            f"{optimizer}: one example moves the sum of these gradients by up to {bound.sum:g}, and the noise is meant for "
            f"clip_norm = {clip_norm:g}. Compute them with {compute}, in groups of one."
        )


def check_several_groups(optimizer: str, statistics: GradStatistics) -> None:
    """Raises where it is known that there is a single example (or group): it has no variance.

    Under `jit` the count is traced and not known; the variance is then NaN.
    """
    if _known(statistics.num_groups) == 1:
        what = "example" if statistics.group_size == 1 else f"group of {statistics.group_size} examples"
        raise ConfigError(
            f"{optimizer} estimates the variance over examples, and one {what} has none. Use a larger batch"
            f"{'' if statistics.group_size == 1 else ' or a smaller group_size'}."
        )


def refuse_multi_steps(optimizer: str) -> None:
    """Raises inside `optax.MultiSteps`, which averages the updates but passes on the last microstep's statistics.

    optax passes nothing on that would reveal it, but `init` and `update` run (or are traced) below a method of `MultiSteps`:
    its frame is on the Python stack, also under `jit` and `lax.cond`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(frame.f_locals.get("self"), optax.MultiSteps):
            raise ConfigError(
                f"{optimizer} inside optax.MultiSteps would see the statistics of the last microstep only. Accumulate "
                "them instead, stats = GradStatistics.merge(stats, more), and update once with the result; or give "
                "per_example.grad_statistics a microbatch_size."
            )
        frame = frame.f_back
