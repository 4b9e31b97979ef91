"""What the engine returns, and what follows from it: variance, squared mean, noise scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradStatistics:
    """Averages over examples (or groups of them), each a tree like the parameters.

    With weights w over M groups of b examples: stats[name] = Σ_j w_j φ(h_j) / Σ_j w_j, h_j the mean gradient of group j.

    Attributes:
      averages: name -> tree.
      count: examples that took part (those with weight 0 did not).
      num_groups: groups that took part; equals `count` when b is 1.
      weight_sum, weight_square_sum: Σ w and Σ w² over the groups.
      group_size: b.
    """

    averages: dict[str, Any]
    count: jax.Array
    num_groups: jax.Array
    weight_sum: jax.Array
    weight_square_sum: jax.Array
    group_size: int = dataclasses.field(default=1, metadata={"static": True})

    def __getitem__(self, name: str) -> Any:
        if name not in self.averages:
            raise KeyError(
                f"no statistic {name!r} here; computed were {', '.join(self.averages)}. Name it in "
                "grad_statistics(..., statistics=(...))."
            )
        return self.averages[name]

    @property
    def mean(self) -> Any:
        return self["mean"]

    @property
    def mean_square(self) -> Any:
        return self["mean_square"]

    @property
    def mean_sign(self) -> Any:
        return self["mean_sign"]

    # --- derived ------------------------------------------------------------------------------------------------------

    def _share(self) -> jax.Array:
        """Σw² / (Σw)²: 1/M for equal weights."""
        return self.weight_square_sum / jnp.square(self.weight_sum)

    def raw_variance(self) -> Any:
        """Unbiased variance of one example's gradient, not clamped: b · (q − ḡ²) / (1 − Σw²/(Σw)²).

        NaN with a single group. In float32, q − ḡ² loses all its digits at |μ|/σ ≈ 10⁴.
        """
        spread = 1.0 - self._share()
        factor = jnp.where(spread > 0, self.group_size / jnp.where(spread > 0, spread, 1.0), jnp.nan)
        return jax.tree.map(lambda q, m: factor * (q - jnp.square(m)), self.mean_square, self.mean)

    def variance(self) -> Any:
        """`raw_variance`, clamped at 0 where rounding made it negative; see `variance_clamps`."""
        return jax.tree.map(lambda v: jnp.where(jnp.isnan(v), v, jnp.maximum(v, 0.0)), self.raw_variance())

    def variance_clamps(self) -> jax.Array:
        """How many coordinates `variance` clamps."""
        return sum(jnp.sum(v < 0) for v in jax.tree.leaves(self.raw_variance()))

    def squared_mean(self) -> Any:
        """Unbiased estimate of μ²: ḡ² − σ̂²/b · Σw²/(Σw)². Often negative where the signal is weak."""
        factor = self._share() / self.group_size
        return jax.tree.map(lambda m, v: jnp.square(m) - factor * v, self.mean, self.raw_variance())

    def snr(self) -> Any:
        """|μ̂| / σ̂ per coordinate; 0 where μ̂² is not positive."""
        return jax.tree.map(
            lambda m, v: jnp.sqrt(jnp.maximum(m, 0.0) / jnp.maximum(v, jnp.finfo(v.dtype).tiny)),
            self.squared_mean(),
            self.variance(),
        )

    def noise_scale(self) -> jax.Array:
        """tr Σ / |μ|², both estimated without bias over all coordinates; inf where |μ̂|² ≤ 0.

        To smooth it over steps, average numerator and denominator (`noise_scale_parts`), never the ratio.
        """
        trace, square = self.noise_scale_parts()
        ratio = jnp.where(square > 0, trace / jnp.where(square > 0, square, 1.0), jnp.inf)
        return jnp.where(jnp.isnan(square), jnp.nan, ratio)  # a single example says nothing about noise

    def noise_scale_parts(self) -> tuple[jax.Array, jax.Array]:
        """(tr Σ̂, |μ̂|²)."""
        return (
            sum(jnp.sum(v) for v in jax.tree.leaves(self.raw_variance())),
            sum(jnp.sum(m) for m in jax.tree.leaves(self.squared_mean())),
        )

    @staticmethod
    def merge(a: GradStatistics, b: GradStatistics) -> GradStatistics:
        """Statistics of all examples of both: accumulation over steps or hosts."""
        if a.averages.keys() != b.averages.keys():
            raise ValueError(f"cannot merge {sorted(a.averages)} with {sorted(b.averages)}: name the same statistics.")
        if a.group_size != b.group_size:
            raise ValueError(f"cannot merge groups of {a.group_size} with groups of {b.group_size}.")
        total = a.weight_sum + b.weight_sum
        share = jnp.where(total > 0, a.weight_sum / jnp.where(total > 0, total, 1.0), 0.0)
        averages = jax.tree.map(lambda x, y: share * x + (1.0 - share) * y, a.averages, b.averages)
        return GradStatistics(
            averages,
            a.count + b.count,
            a.num_groups + b.num_groups,
            total,
            a.weight_square_sum + b.weight_square_sum,
            a.group_size,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerExample:
    """What belongs to single examples: `values` (losses, [N]), `norms` of their gradients ([N], or None), the loss's own
    `aux` with a leading axis N, and how many examples were not finite."""

    values: jax.Array
    norms: jax.Array | None
    aux: Any
    non_finite: jax.Array
