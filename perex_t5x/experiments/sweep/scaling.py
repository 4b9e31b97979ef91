"""The bindings of one run: a configuration at its base batch size, brought to another batch size, rate and seed.

What counts steps (training, warm-up, decay, evaluation, checkpoints, monitoring) is scaled so that it stays where it was in
*examples seen*. Evaluation keeps its own batch size and number of batches: every run is scored on the same examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perex_t5x.errors import ConfigError
from perex_t5x.experiments.sweep import rules
from perex_t5x.experiments.sweep.settings import Base


@dataclass(frozen=True)
class Scaled:
    """Bindings of a run: those of its `configuration`, and those that differ between runs that share one step."""

    configuration: tuple[str, ...]
    own: tuple[str, ...]  # learning rate and seeds
    learning_rate: float | None
    train_steps: int
    note: str


def scale(
    base: Base,
    *,
    batch_size: int,
    base_batch_size: int,
    rule: str,
    learning_rate: float | None,
    seed: int,
    weight_decay_rule: str = "keep",
) -> Scaled:
    """The run's bindings.

    Args:
      base: the configuration, given for `base_batch_size`.
      rule: of `rules.RULES`.
      learning_rate: at the base batch size; None: the configuration's.
      seed: of initialisation, dropout and the order of the data.

    Raises:
      ConfigError: where the rule cannot be applied.
    """
    k = batch_size / base_batch_size
    bindings = [base.batch_size.bound(batch_size)]
    if base.eval_follows and batch_size != base_batch_size:
        bindings.append(f"train_eval/DatasetConfig.batch_size = {base_batch_size}")
    train_steps, note = base.train_steps, ""
    if k != 1:
        train_steps, note = _train_steps(base, k, batch_size, base_batch_size)
        counted = base.total_steps if base.relative_steps.value is None else base.relative_steps
        bindings.append(counted.bound(train_steps))
        bindings += [s.bound(rules.scaled_steps(s.value, k)) for s in base.steps.values()]
        bindings += _scaled_decay(base, k)
        bindings += _scaled_optimizer(base, k, rule, weight_decay_rule, base_batch_size)
    own, rate = _rate(base, k, rule, learning_rate)
    own += [base.random_seed.bound(seed), base.data_seed.bound(seed)]
    return Scaled(tuple(bindings), tuple(own), rate, train_steps, note)


def _train_steps(base: Base, k: float, batch_size: int, base_batch_size: int) -> tuple[int, str]:
    steps = rules.scaled_steps(base.train_steps, k)
    examples, wanted = steps * batch_size, base.train_steps * base_batch_size
    note = "" if examples == wanted else f"{steps} steps x {batch_size} = {examples} examples instead of {wanted}"
    return steps, note


def _scaled_decay(base: Base, k: float) -> list[str]:
    """The slope of `linear_decay` is per step; that of `decay_every` is per `steps_per_decay`, and stays."""
    factors = base.factor_names
    if "linear_decay" not in factors:
        return []
    if "decay_every" in factors:
        raise ConfigError(
            f"create_learning_rate_scheduler.factors = {base.factors!r}: linear_decay and decay_every share decay_factor, "
            "which scales with the batch size for the one and not for the other. Use one of them."
        )
    return [base.decay_factor.bound(base.decay_factor.value * k)]


def _rate(base: Base, k: float, rule: str, learning_rate: float | None) -> tuple[list[str], float | None]:
    """Bindings for the rate, and the rate itself, as the schedule's peak or constant."""
    if base.rate is None:
        if learning_rate is None and k == 1:
            return [], None
        raise ConfigError(
            "the sweep sets learning rates through create_learning_rate_scheduler.base_learning_rate (or a number), but "
            "Trainer.learning_rate_fn is another schedule here. Use ours, or leave rates and batch sizes out of the sweep."
        )
    if not isinstance(base.rate.value, int | float):
        raise ConfigError(f"{base.rate.name} = {base.rate.value!r}: must be a number.")
    rate = (base.rate.value if learning_rate is None else learning_rate) * rules.rate_factor(rule, k)
    bound = rate
    if "rsqrt_decay" in base.factor_names:
        # 1/√step is not normalised: with fewer steps it is higher, whatever the rule says.
        warmup = base.steps["warmup_steps"].value if "warmup_steps" in base.steps else 1
        bound = rate * math.sqrt(rules.scaled_steps(warmup, k) / warmup)
    return [base.rate.bound(bound)], rate


def _scaled_optimizer(base: Base, k: float, rule: str, weight_decay_rule: str, base_batch_size: int) -> list[str]:
    changed: dict[str, float] = {}
    optimizer = base.optimizer
    if optimizer is None:
        if rule == "full" or weight_decay_rule == "per_example":
            what = "rule 'full'" if rule == "full" else "weight_decay_rule 'per_example'"
            raise ConfigError(
                f"{what} scales the optimizer's arguments, but OPTIMIZER is not a reference to a function without "
                "parentheses, such as OPTIMIZER = @optax.adamw."
            )
        return []
    if rule == "full":
        found = optimizer.numbers(*rules.BETAS, *rules.EPSILONS)
        if not found:
            raise ConfigError(f"rule 'full': {optimizer.name} has none of b1, b2, eps. Use rule 'sqrt'.")
        changed |= rules.scaled_moments(found, k, optimizer.name, base_batch_size)
    if weight_decay_rule == "per_example":
        for name, value in optimizer.numbers("weight_decay").items():
            changed[name] = rules.scaled_weight_decay(value, k, rule, weight_decay_rule)
    changed = {name: value for name, value in changed.items() if value != optimizer.arguments[name]}
    return [f"{optimizer.name}.{name} = {value!r}" for name, value in changed.items()]
