"""How hyperparameters follow the batch size: B = κ·B₀, with everything else given for the base batch size B₀.

| rule | learning rate η | 1−β₁, 1−β₂ | ε |
|---|---|---|---|
| sqrt | √κ·η | as they are | as it is |
| linear | κ·η | as they are | as it is |
| constant | η | as they are | as it is |
| full | √κ·η | κ(1−β) | ε/√κ |

`full` is the square-root rule of Malladi et al. 2022 (https://arxiv.org/abs/2205.10287) for Adam.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from perex_t5x.errors import ConfigError

RULES = ("sqrt", "linear", "constant", "full")
WEIGHT_DECAY_RULES = ("keep", "per_example")
# Of an optimizer's arguments: how they follow κ under the full rule.
BETAS = ("b1", "b2", "b3")
EPSILONS = {"eps": 0.5, "eps_root": 1.0}


def rate_factor(rule: str, k: float) -> float:
    """η / η₀ at κ.

    >>> rate_factor("sqrt", 4), rate_factor("linear", 4), rate_factor("constant", 4), rate_factor("full", 4)
    (2.0, 4.0, 1.0, 2.0)
    """
    return {"sqrt": math.sqrt(k), "full": math.sqrt(k), "linear": float(k), "constant": 1.0}[rule]


def scaled_moments(arguments: Mapping[str, float], k: float, where: str, base_batch_size: int) -> dict[str, float]:
    """The full rule on those of an optimizer's arguments that it scales.

    Args:
      arguments: names and values at the base batch size; others than β and ε are left out.
      k: κ.
      where: the optimizer, for the message.
      base_batch_size: B₀, for the message.

    Raises:
      ConfigError: κ(1−β) ≥ 1, so that there is no such β; names the largest κ and batch size.

    >>> {name: round(x, 12) for name, x in scaled_moments({"b1": 0.9, "b2": 0.99, "eps": 1e-8}, 4, "adamw", 16).items()}
    {'b1': 0.6, 'b2': 0.96, 'eps': 5e-09}
    """
    scaled = {}
    for name in BETAS:
        beta = arguments.get(name)
        if beta is None:
            continue
        if k * (1 - beta) >= 1 - 1e-9:
            largest = _largest_batch(beta, base_batch_size)
            raise ConfigError(
                f"rule 'full': {where}.{name} = {beta:g} at batch size {base_batch_size} has no counterpart at κ = {k:g} "
                f"(batch size {round(k * base_batch_size)}), because κ(1−β) = {k * (1 - beta):g} ≥ 1. κ must stay below "
                f"1/(1−β) = {1 / (1 - beta):g}: the largest batch size is {largest} (κ = {largest / base_batch_size:g})."
            )
        scaled[name] = round(1 - k * (1 - beta), 12)  # 1 − (1 − 0.9) is not quite 0.9
    for name, power in EPSILONS.items():
        if arguments.get(name):
            scaled[name] = arguments[name] / k**power
    return scaled


def _largest_batch(beta: float, base_batch_size: int) -> int:
    """The largest whole B with (B / B₀)(1−β) < 1."""
    return math.ceil(base_batch_size / (1 - beta) - 1e-6) - 1


def scaled_weight_decay(weight_decay: float, k: float, rule: str, weight_decay_rule: str) -> float:
    """λ at κ. A step decays by η·λ, and there are 1/κ as many: per example seen η·λ/κ counts.

    >>> scaled_weight_decay(0.01, 4, "sqrt", "keep"), scaled_weight_decay(0.01, 4, "sqrt", "per_example")
    (0.01, 0.02)
    """
    return weight_decay if weight_decay_rule == "keep" else weight_decay * k / rate_factor(rule, k)


def weight_decay_words(rules: list[str], weight_decay_rule: str) -> str:
    """What becomes of the weight decay, in a sentence.

    >>> weight_decay_words(["linear"], "keep")
    'weight decay λ is kept; the decay per example seen, ηλ/B, is the same at every batch size (linear)'
    """
    if weight_decay_rule == "per_example":
        factors = {"sqrt": "√κ·λ", "full": "√κ·λ", "linear": "λ", "constant": "κ·λ"}
        parts = ", ".join(f"{factors[rule]} ({rule})" for rule in rules)
        return (
            f"weight decay becomes {parts}, so that the decay per example seen, ηλ/B, is the same at every batch size"
        )
    falls = {"sqrt": "falls as 1/√κ", "full": "falls as 1/√κ", "constant": "falls as 1/κ"}
    parts = ", ".join(f"{falls.get(rule, 'is the same at every batch size')} ({rule})" for rule in rules)
    return f"weight decay λ is kept; the decay per example seen, ηλ/B, {parts}"


def scaled_steps(steps: int, k: float) -> int:
    """So many steps of the base batch size, in steps of κ times as many examples; at least 1.

    >>> scaled_steps(100, 4), scaled_steps(100, 0.5), scaled_steps(10, 64)
    (25, 200, 1)
    """
    return max(1, round(steps / k))
