"""What the parsed Gin configuration says about batch size, steps, schedule and optimizer, and how to say it otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gin

from perex_t5x import utils
from perex_t5x.errors import ConfigError
from perex_t5x.experiments.sweep import rules

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
class Base:
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


def read() -> Base:
    """Reads the configuration that Gin holds."""
    from perex_t5x import monitoring, trainer
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
    rate, ours = _rate(trainer.Trainer, schedule)
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
    return Base(
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
    """Through macros, to a value or a reference to a function."""
    while macro := _macro(value):
        value = gin.query_parameter(f"%{macro}")
    return value


def _function(reference: Any) -> Any:
    """What a reference refers to, without Gin's wrapper; None for a plain value."""
    return getattr(getattr(reference, "configurable", None), "wrapped", None)


def _rate(trainer_cls: type, schedule: Callable[..., Any]) -> tuple[Setting | None, bool]:
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
    for name in (*rules.BETAS, *rules.EPSILONS, "weight_decay"):
        if name in signature:
            try:
                arguments[name] = _resolved(gin.query_parameter(f"{reference.selector}.{name}"))
            except ValueError:
                continue  # not bound
    return Optimizer(reference.selector, arguments)
