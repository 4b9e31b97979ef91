"""Signal and noise of the examples' gradients and their ratios, measured every `Monitor.period` steps.

With μ the expected gradient and Σ the covariance of one example's, both estimated without bias from the batch (B examples),
and sums over the coordinates of a group of parameters, S = Σ μ̂² and T = Σ σ̂² = tr Σ̂:

| name | formula | |
|---|---|---|
| snr | √(max(S, 0) / T) | of one example's gradient |
| signal_to_mean_noise | S / (T/B) | of the batch gradient, squared; negative where the signal is not seen |
| noise_scale | T / S | the batch size at which signal and noise are equal; inf where S ≤ 0 |
| noise_scale_smoothed, snr_smoothed | the same from moving averages of T and S | never an average of ratios |

The noise scale is that of McCandlish et al. 2018 (https://arxiv.org/abs/1812.06162); that the normalisation layers alone
follow it is from Gray et al. 2024 (https://arxiv.org/abs/2411.00999).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from perex_t5x import arguments
from perex_t5x.arguments import Interval, PositiveInt
from perex_t5x.errors import ConfigError
from perex_t5x.gradients import Gradient
from perex_t5x.per_example import GradStatistics

State = dict[str, dict[str, jax.Array]]  # {"trace" | "square": {group: moving average}}

QUANTILES = {"min": 0.0, "quarter": 0.25, "median": 0.5, "three_quarters": 0.75, "max": 1.0}
ALL, NORM_LAYERS = "all", "norm_layers"
_KINDS = {"norm": "norm", "logits": "logits", "attention": "attention|relpos", "mlp": "mlp", "embedding": "embed"}


def parameter_kind(name: str) -> str:
    """The group of a parameter: norm, logits, embedding, attention or mlp; else the first part of its name.

    >>> parameter_kind("decoder/layers_0/pre_mlp_layer_norm/scale"), parameter_kind("decoder/layers_0/mlp/wo/kernel")
    ('norm', 'mlp')
    >>> parameter_kind("token_embedder/embedding"), parameter_kind("head/kernel")
    ('embedding', 'head')
    """
    for kind, pattern in _KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return name.split("/")[0]


class Monitor:
    """Measures the examples' gradients every `period` steps; between them it costs nothing.

    It is a separate program, and measures the step's batch before the update and before any clipping, so training does not
    depend on it.

    Args:
      period: steps between measurements, each of which takes about as long as a step.
      groups: a function from a parameter's name ('decoder/layers_0/mlp/wo/kernel') to the name of its group; None: all
        parameters together, only.
      ema: decay of the moving averages, per measurement.
      norm_layers: regular expression that matches part of the names of normalisation layers' parameters.
      only_norm_layers: measures these alone, which is cheaper: no other parameter's gradient is computed.

    >>> Monitor(period=20).is_due(40), Monitor(period=20).is_due(41)
    (True, False)
    """

    statistics = ("mean", "mean_square")

    def __init__(
        self,
        period: PositiveInt = 100,
        groups: Callable[[str], str] | None = parameter_kind,
        ema: Annotated[float, Interval("[0, 1)")] = 0.95,
        norm_layers: str = "(?i)norm",
        only_norm_layers: bool = False,
    ):
        arguments.check("Monitor", arguments.hints(Monitor), dict(locals()))
        try:
            self._is_norm_layer = re.compile(norm_layers).search
        except re.error as e:
            raise ConfigError(f"Monitor.norm_layers = {norm_layers!r} is not a regular expression: {e}.") from None
        self.period, self.ema, self.only_norm_layers = period, float(ema), only_norm_layers
        self._groups, self._norm_layers = groups, norm_layers

    def is_due(self, step: int) -> bool:
        """Whether step `step`, counted from 1 as in the logs, is measured."""
        return step % self.period == 0

    @property
    def parameters(self) -> str | None:
        """Which parameters' statistics are needed: `parameters` of `per_example.grad_statistics`."""
        return self._norm_layers if self.only_norm_layers else None

    @property
    def norms(self) -> bool:
        """Whether the norms of the examples' gradients are needed."""
        return not self.only_norm_layers

    def groups_of(self, params: Any) -> dict[str, list[str]]:
        """Group -> names of its parameters; `params` may be shapes."""
        names = [keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        norm_layers = [name for name in names if self._is_norm_layer(name)]
        if self.only_norm_layers:
            if not norm_layers:
                raise ConfigError(
                    f"Monitor.only_norm_layers = True, but Monitor.norm_layers = {self._norm_layers!r} matches none of "
                    f"the parameters' names: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
                )
            return {NORM_LAYERS: norm_layers}
        groups: dict[str, list[str]] = {ALL: names}
        group_of = self._groups or (lambda name: ALL)
        for name in names if self._groups is not None else ():
            group = group_of(name)
            if not isinstance(group, str) or not group or group in (ALL, NORM_LAYERS):
                raise ConfigError(
                    f"Monitor.groups gives {group!r} for {name!r}: give a name other than {ALL!r} and {NORM_LAYERS!r}."
                )
            groups.setdefault(group.replace("/", "."), []).append(name)
        return {**groups, NORM_LAYERS: norm_layers} if norm_layers else groups

    def init(self, params: Any) -> State:
        """Moving averages before the first measurement."""
        return {part: {group: jnp.zeros(()) for group in self.groups_of(params)} for part in ("trace", "square")}

    def measured(self, state: State, gradient: Gradient) -> tuple[State, dict[str, jax.Array]]:
        """The averages that follow `state`, and the values to log by name.

        Args:
          state: of `init`, or of the last measurement.
          gradient: has statistics of the parameters that `parameters` selects, and where `norms` asks for them the norms.
        """
        statistics = gradient.statistics
        assert statistics is not None
        groups = self.groups_of(statistics.mean)
        sums = _sums(statistics, groups)
        state = self._averaged(state, sums)
        values: dict[str, jax.Array] = {}
        for group in groups:
            trace, square = sums["trace"][group], sums["square"][group]
            smoothed = _noise_scale(state["trace"][group], state["square"][group])
            if group == NORM_LAYERS:
                values["noise_scale_norm_layers"] = smoothed
                if not self.only_norm_layers:
                    continue
            values[f"snr/{group}"] = jnp.sqrt(_ratio(jnp.maximum(square, 0.0), trace))
            values[f"signal_to_mean_noise/{group}"] = _ratio(square, trace * statistics.mean_noise())
            values[f"noise_scale/{group}"] = _noise_scale(trace, square)
            values[f"noise_scale_smoothed/{group}"] = smoothed
            values[f"snr_smoothed/{group}"] = jax.lax.rsqrt(smoothed)
        if self.norms:
            finite = jnp.where(jnp.isfinite(gradient.norms), gradient.norms, jnp.nan)
            quantiles = jnp.nanquantile(finite, jnp.array(list(QUANTILES.values())))
            values |= {f"gradient_norm/{name}": quantiles[i] for i, name in enumerate(QUANTILES)}
        values["non_finite_examples"] = gradient.sums["non_finite_examples"]
        values["variance_clamps"] = jnp.asarray(statistics.variance_clamps(), jnp.float32)
        return state, {f"per_example/{name}": value.astype(jnp.float32) for name, value in values.items()}

    def _averaged(self, state: State, sums: State) -> State:
        """A measurement that is not finite leaves its group's averages as they are."""

        def average(old: jax.Array, new: jax.Array, trace: jax.Array, square: jax.Array) -> jax.Array:
            usable = jnp.isfinite(trace) & jnp.isfinite(square)
            return jnp.where(usable, self.ema * old + (1.0 - self.ema) * new, old)

        return {
            part: {
                g: average(state[part][g], new, sums["trace"][g], sums["square"][g]) for g, new in sums[part].items()
            }
            for part in sums
        }


def shown(values: Mapping[str, Any]) -> dict[str, float]:
    """The part of a measurement that the progress line shows beside the loss.

    >>> shown({"per_example/snr_smoothed/all": 0.05, "per_example/noise_scale_smoothed/all": 400.0})
    {'snr': 0.05, 'noise scale': 400.0}
    """
    for group in (ALL, NORM_LAYERS):
        if f"per_example/noise_scale_smoothed/{group}" in values:
            names = {"snr": "snr_smoothed", "noise scale": "noise_scale_smoothed"}
            return {short: float(values[f"per_example/{name}/{group}"]) for short, name in names.items()}
    return {}


def _sums(statistics: GradStatistics, groups: dict[str, list[str]]) -> State:
    """T and S of each group."""

    def by_group(tree: Any) -> dict[str, jax.Array]:
        sums = {
            keystr(path, simple=True, separator="/"): jnp.sum(x)
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }
        return {group: jnp.asarray(sum(sums[name] for name in names), jnp.float32) for group, names in groups.items()}

    return {"trace": by_group(statistics.raw_variance()), "square": by_group(statistics.squared_mean())}


def _ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """NaN where the denominator is not positive."""
    return jnp.where(denominator > 0, numerator / jnp.where(denominator > 0, denominator, 1.0), jnp.nan)


def _noise_scale(trace: jax.Array, square: jax.Array) -> jax.Array:
    """T / S; inf where S ≤ 0."""
    return jnp.where(square <= 0, jnp.inf, _ratio(trace, square))
