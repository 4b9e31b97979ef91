"""A configuration at its base batch size, brought to another batch size, rate and seed.

B = κ·B₀, with everything given for the base batch size B₀:

| rule | learning rate η | 1−β₁, 1−β₂ | ε |
|---|---|---|---|
| sqrt | √κ·η | kept | kept |
| linear | κ·η | kept | kept |
| constant | η | kept | kept |
| full | √κ·η | κ(1−β) | ε/√κ |

`full` is the square-root rule of Malladi et al. 2022 (https://arxiv.org/abs/2205.10287) for Adam.

What counts steps (training, warm-up, decay, evaluation, checkpoints, monitoring) is scaled so that it stays where it was in
*examples seen*. Evaluation keeps its own batch size and number of batches: every run is scored on the same examples.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gin

from perex_t5x.errors import ConfigError

# --- the rules --------------------------------------------------------------------------------------------------------


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


def weight_decay_words(names: list[str], weight_decay_rule: str) -> str:
    """How the weight decay follows the batch size, in a sentence.

    >>> weight_decay_words(["linear"], "keep")
    'weight decay λ is kept; the decay per example seen, ηλ/B, is the same at every batch size (linear)'
    """
    if weight_decay_rule == "per_example":
        factors = {"sqrt": "√κ·λ", "full": "√κ·λ", "linear": "λ", "constant": "κ·λ"}
        parts = ", ".join(f"{factors[rule]} ({rule})" for rule in names)
        return (
            f"weight decay becomes {parts}, so that the decay per example seen, ηλ/B, is the same at every batch size"
        )
    falls = {"sqrt": "falls as 1/√κ", "full": "falls as 1/√κ", "constant": "falls as 1/κ"}
    parts = ", ".join(f"{falls.get(rule, 'is the same at every batch size')} ({rule})" for rule in names)
    return f"weight decay λ is kept; the decay per example seen, ηλ/B, {parts}"


def scaled_steps(steps: int, k: float) -> int:
    """Steps at the base batch size, converted to steps of κ times as many examples; at least 1.

    >>> scaled_steps(100, 4), scaled_steps(100, 0.5), scaled_steps(10, 64)
    (25, 200, 1)
    """
    return max(1, round(steps / k))


# --- the configuration that Gin holds ---------------------------------------------------------------------------------


_MACRO = "gin.macro"


@dataclass(frozen=True)
class Setting:
    """A value, and the name by which a binding sets it: a macro where the files use one."""

    value: Any
    name: str

    def bound(self, value: Any) -> str:
        return f"{self.name} = {value!r}"


@dataclass(frozen=True)
class Optimizer:
    """The function that OPTIMIZER refers to, and its arguments, bound or default."""

    name: str
    arguments: dict[str, Any]

    def numbers(self, *names: str) -> dict[str, float]:
        return {n: float(self.arguments[n]) for n in names if isinstance(self.arguments.get(n), int | float)}


@dataclass(frozen=True)
class BaseSettings:
    """Settings of a configuration at the base batch size. None: the configuration does not have it.

    Attributes:
      steps: settings that count steps, by what they are.
      rate: the base learning rate; None where the schedule is not one that a sweep can set.
      factors: of `create_learning_rate_scheduler`; empty for a constant rate.
      eval_follows: whether evaluation has the batch size of training, through the same macro.
    """

    batch_size: Setting
    eval_batch_size: Setting | None
    eval_follows: bool
    total_steps: Setting
    relative_steps: Setting
    steps: dict[str, Setting]
    rate: Setting | None
    factors: str
    decay_factor: Setting | None
    random_seed: Setting
    data_seed: Setting
    optimizer: Optimizer | None

    @property
    def factor_names(self) -> list[str]:
        return [name.strip() for name in self.factors.split("*")]

    @property
    def train_steps(self) -> int:
        return self.total_steps.value if self.relative_steps.value is None else self.relative_steps.value


def read_settings() -> BaseSettings:
    """Reads the configuration that Gin holds."""
    from perex_t5x import monitoring, trainer, utils
    from perex_t5x import train as train_script

    train = train_script.train
    if not _bindings(train):
        raise ConfigError(
            "the gin files bind nothing on perex_t5x.train.train: give those of a training, such as "
            "--gin_file=models/nano.gin --gin_file=runs/pretrain.gin."
        )
    batch_size = _setting(utils.DatasetConfig, "batch_size", "train")
    eval_batch_size = None
    if _bindings(train).get("train_eval_dataset_cfg") is not None:
        eval_batch_size = _setting(utils.DatasetConfig, "batch_size", "train_eval")
    schedule = utils.create_learning_rate_scheduler
    rate, ours = _rate_setting(trainer.Trainer, schedule)
    steps = {"eval_period": _setting(train, "eval_period"), "stats_period": _setting(train, "stats_period")}
    if _bindings(utils.SaveCheckpointConfig):
        steps["save_period"] = _setting(utils.SaveCheckpointConfig, "period")
    if _bindings(trainer.Trainer).get("monitor") is not None:
        steps["monitor_period"] = _setting(monitoring.Monitor, "period")
    factors = _setting(schedule, "factors").value if ours else ""
    if ours:
        used = {"steps_per_decay": "decay_every", "steps_per_cycle": "cosine_decay"}
        names = [name for name, factor in used.items() if factor in factors]
        steps |= {name: _setting(schedule, name) for name in ("warmup_steps", "step_offset", *names)}
    return BaseSettings(
        batch_size=batch_size,
        eval_batch_size=eval_batch_size,
        eval_follows=eval_batch_size is not None and eval_batch_size.name == batch_size.name,
        total_steps=_setting(train, "total_steps"),
        relative_steps=_setting(train, "relative_steps"),
        steps={name: s for name, s in steps.items() if isinstance(s.value, int) and s.value > 0},
        rate=rate,
        factors=factors,
        decay_factor=_setting(schedule, "decay_factor") if ours else None,
        random_seed=_setting(train, "random_seed"),
        data_seed=_setting(utils.DatasetConfig, "seed", "train"),
        optimizer=_optimizer(),
    )


def _bindings(function: Callable[..., Any], scope: str = "") -> dict[str, Any]:
    """What is bound, references as they are; empty where Gin does not know the function."""
    try:
        with gin.config_scope(scope or None):
            return gin.get_bindings(function, resolve_references=False)
    except ValueError:
        return {}


def _setting(function: Callable[..., Any], argument: str, scope: str = "") -> Setting:
    bound = _bindings(function, scope)
    place = f"{scope}/" if scope else ""
    name = f"{place}{function.__name__}.{argument}"
    if argument not in bound:
        default = inspect.signature(function).parameters[argument].default
        return Setting(None if default is inspect.Parameter.empty else default, name)
    value = bound[argument]
    macro = _macro(value)
    return Setting(_resolved(value), macro or name)


def _macro(value: Any) -> str | None:
    selector = getattr(value, "scoped_selector", "")
    return selector.removesuffix(f"/{_MACRO}") if selector.endswith(f"/{_MACRO}") else None


def _resolved(value: Any) -> Any:
    """A value or a reference to a function, macros resolved."""
    while macro := _macro(value):
        value = gin.query_parameter(f"%{macro}")
    return value


def _function(reference: Any) -> Any:
    """What a reference refers to, without Gin's wrapper; None for a plain value."""
    return getattr(getattr(reference, "configurable", None), "wrapped", None)


def _rate_setting(trainer_cls: type, schedule: Callable[..., Any]) -> tuple[Setting | None, bool]:
    """The setting of the base learning rate, and whether it is that of our schedule."""
    setting = _setting(trainer_cls, "learning_rate_fn")
    if isinstance(setting.value, int | float):
        return setting, False
    if _function(setting.value) is schedule:
        return _setting(schedule, "base_learning_rate"), True
    return None, False


def _optimizer() -> Optimizer | None:
    try:
        reference = _resolved(gin.query_parameter("%OPTIMIZER"))
    except ValueError:
        return None
    function = _function(reference)
    if function is None or reference.evaluate:
        return None
    signature = inspect.signature(function).parameters
    arguments = {n: p.default for n, p in signature.items() if p.default is not inspect.Parameter.empty}
    for name in (*BETAS, *EPSILONS, "weight_decay"):
        if name in signature:
            try:
                arguments[name] = _resolved(gin.query_parameter(f"{reference.selector}.{name}"))
            except ValueError:
                continue  # not bound
    return Optimizer(reference.selector, arguments)


# --- the bindings of a run --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled:
    """Bindings of a run: those of its `configuration`, and those that differ between runs that share one step."""

    configuration: tuple[str, ...]
    own: tuple[str, ...]  # learning rate and seeds
    learning_rate: float | None
    train_steps: int
    note: str


def scale(
    base: BaseSettings,
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
      rule: of `RULES`.
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
        bindings += [s.bound(scaled_steps(s.value, k)) for s in base.steps.values()]
        bindings += _scaled_decay(base, k)
        bindings += _scaled_optimizer(base, k, rule, weight_decay_rule, base_batch_size)
    own, rate = _rate(base, k, rule, learning_rate)
    own += [base.random_seed.bound(seed), base.data_seed.bound(seed)]
    return Scaled(tuple(bindings), tuple(own), rate, train_steps, note)


def _train_steps(base: BaseSettings, k: float, batch_size: int, base_batch_size: int) -> tuple[int, str]:
    steps = scaled_steps(base.train_steps, k)
    examples, wanted = steps * batch_size, base.train_steps * base_batch_size
    note = "" if examples == wanted else f"{steps} steps x {batch_size} = {examples} examples instead of {wanted}"
    return steps, note


def _scaled_decay(base: BaseSettings, k: float) -> list[str]:
    """The slope of `linear_decay` is per step; that of `decay_every` is per `steps_per_decay`, and stays."""
    factors = base.factor_names
    if base.decay_factor is None or "linear_decay" not in factors:
        return []
    if "decay_every" in factors:
        raise ConfigError(
            f"create_learning_rate_scheduler.factors = {base.factors!r}: linear_decay and decay_every share decay_factor, "
            "which scales with the batch size for the one and not for the other. Use one of them."
        )
    return [base.decay_factor.bound(base.decay_factor.value * k)]


def _rate(base: BaseSettings, k: float, rule: str, learning_rate: float | None) -> tuple[list[str], float | None]:
    """Bindings for the rate, and the rate itself, as the schedule's peak or constant."""
    if base.rate is None:
        if learning_rate is None and k == 1:
            return [], None
        raise ConfigError(
            "the sweep sets learning rates through create_learning_rate_scheduler.base_learning_rate (or a number), but "
            "Trainer.learning_rate_fn is another schedule here. Use ours, or leave rates and batch sizes out of the sweep."
        )
    if sum(name in ("constant", "linear_decay") for name in base.factor_names) > 1:
        raise ConfigError(
            f"create_learning_rate_scheduler.factors = {base.factors!r} multiplies by the base rate more than once "
            "(linear_decay has it, too), so it does not scale as the rule says. Leave 'constant' out."
        )
    if not isinstance(base.rate.value, int | float):
        raise ConfigError(f"{base.rate.name} = {base.rate.value!r}: must be a number.")
    rate = (base.rate.value if learning_rate is None else learning_rate) * rate_factor(rule, k)
    bound = rate
    if "rsqrt_decay" in base.factor_names:
        # 1/√step is not normalised: with fewer steps it is higher, whatever the rule says.
        warmup = base.steps["warmup_steps"].value if "warmup_steps" in base.steps else 1
        bound = rate * math.sqrt(scaled_steps(warmup, k) / warmup)
    return [base.rate.bound(bound)], rate


def _scaled_optimizer(
    base: BaseSettings, k: float, rule: str, weight_decay_rule: str, base_batch_size: int
) -> list[str]:
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
        moments = optimizer.numbers(*BETAS, *EPSILONS)
        if not moments:
            raise ConfigError(f"rule 'full': {optimizer.name} has none of b1, b2, eps. Use rule 'sqrt'.")
        changed |= scaled_moments(moments, k, optimizer.name, base_batch_size)
    if weight_decay_rule == "per_example":
        for name, value in optimizer.numbers("weight_decay").items():
            changed[name] = scaled_weight_decay(value, k, rule, weight_decay_rule)
    changed = {name: value for name, value in changed.items() if value != optimizer.arguments[name]}
    return [f"{optimizer.name}.{name} = {value!r}" for name, value in changed.items()]
