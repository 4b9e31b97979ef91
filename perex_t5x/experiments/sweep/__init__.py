"""A sweep: many runs of `perex_t5x.train` from one description, `python -m perex_t5x.experiments.sweep --sweep=FILE`

    python -m perex_t5x.experiments.sweep --gin_file=models/nano.gin --gin_file=runs/pretrain.gin \\
      --sweep=sweeps/sqrt_lr.gin --together

Gin files and --gin.NAME=VALUE describe the runs, as for `perex_t5x.train`; --sweep describes what varies, with
--sweep.NAME=VALUE in place of what the file says. The same command, started again, resumes where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perex_t5x.errors import ConfigError

if TYPE_CHECKING:
    from perex_t5x.experiments.sweep.plan import Plan


@dataclass
class Sweep:
    """What varies, and what follows from it. The product of all axes is run.

    Attributes:
      name: of the sweep; its folder is ./sweeps/<name> unless --dir says otherwise.
      title, question: for the report.
      gin_files: the runs' Gin files, where the command line gives none.
      gin_bindings: {name: value} for all runs; the command line's --gin.NAME=VALUE win.
      files: axes of Gin files, {'optimizer': ['optimizers/adamw.gin', 'optimizers/micro_adam.gin']}; each is added to the
        others, and may set its own base learning rate. A list of files stands for all of them.
      grid: axes of bindings, {'optax.adamw.b2': [0.98, 0.999]}. References are written as strings: '@optimizers.micro_adam'.
      zipped: bindings that vary together: [{'optax.adamw.b1': 0.9, 'optax.adamw.b2': 0.98}, {...}].
      batch_sizes: an axis; None: the base's alone.
      rule: how the learning rate follows the batch size: 'sqrt', 'linear', 'constant', or 'full' (also 1−β₁, 1−β₂, ε);
        several are an axis.
      base_batch_size, base_learning_rate: for which steps, rate and optimizer are given; None: the configuration's.
      learning_rates: an axis, absolute, at the base batch size.
      rate_factors: an axis, relative to the base learning rate (of each Gin file its own).
      weight_decay_rule: 'keep', or 'per_example': scaled with the batch size so that the decay per example seen stays.
      seeds: an axis: of initialisation, dropout and the order of the data.

    >>> Sweep("rates", learning_rates=[0.001, 0.01], seeds=[0, 1]).rules
    ['sqrt']
    """

    name: str
    title: str = ""
    question: str = ""
    gin_files: Sequence[str] = ()
    gin_bindings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Sequence[str | Sequence[str]]] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    zipped: Sequence[Mapping[str, Any]] = ()
    batch_sizes: Sequence[int] | None = None
    rule: str | Sequence[str] = "sqrt"
    base_batch_size: int | None = None
    base_learning_rate: float | None = None
    learning_rates: Sequence[float] | None = None
    rate_factors: Sequence[float] | None = None
    weight_decay_rule: str = "keep"
    seeds: Sequence[int] = (0,)

    @property
    def rules(self) -> list[str]:
        """One or several."""
        return [self.rule] if isinstance(self.rule, str) else list(self.rule)

    @classmethod
    def load(cls, path: str, bindings: Sequence[str] = (), search_paths: Sequence[str] = ()) -> Sweep:
        """Reads a sweep's Gin file; `bindings` such as 'seeds = [0]' win over it. What Gin held before is forgotten."""
        import gin

        from perex_t5x import gin_utils

        gin.clear_config()
        named = [f"sweep.Sweep.{b}" for b in bindings]
        gin_utils.parse_gin_flags(search_paths, [path], named)
        try:
            bound = gin.get_bindings(cls, resolve_references=False)
        except ValueError:
            bound = {}
        if not bound:
            raise ConfigError(
                f"--sweep={path} does not bind perex_t5x.experiments.sweep.Sweep: it is not a sweep's file. Shipped are "
                "sweeps/learning_rate.gin and sweeps/sqrt_lr.gin."
            )
        try:
            made = gin.get_configurable(cls)()
        except TypeError:
            raise ConfigError(f"--sweep={path} gives no name: add sweep.Sweep.name = 'my_sweep'.") from None
        finally:
            gin.clear_config()
        return cls(**{name: getattr(made, name) for name in cls.__dataclass_fields__})

    def plan(
        self,
        gin_files: Sequence[str] = (),
        gin_bindings: Sequence[str] = (),
        search_paths: Sequence[str] = (),
        check: bool = True,
        flags: Sequence[str] = (),
    ) -> Plan:
        """All runs, checked: `Sweep(...).plan(["models/nano.gin", "runs/pretrain.gin"], [...]).run(folder)`.

        Args:
          gin_files, gin_bindings, search_paths: of the runs, as on the command line of `perex_t5x.train`.
          check: also build every configuration, without compiling; False: only what the description itself shows.
          flags: further flags for the runs' processes, such as '--tfds_data_dir=...'.

        Raises:
          ConfigError: lists everything that is wrong.
        """
        from perex_t5x.experiments.sweep import plan

        return plan.make(self, gin_files, gin_bindings, search_paths, check, flags)
