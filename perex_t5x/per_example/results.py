"""What the engine returns, and quantities derived from it: variance, squared mean, noise scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from perex_t5x.per_example.statistic import Statistic, name_of


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """How far one example can move the sum or the mean of clipped gradients: L2, over all parameters together.

    Formal definition. Two batches are neighbours if they are the same but for one example, which only one of them has (add
    or remove one), or whose place is empty in the other (zero out: weight 0, or a gradient of 0). The sensitivity bounds
    ‖f(batch) − f(neighbour)‖₂, up to rounding. If one example is replaced by another instead, it is twice as large. It holds
    where the loss of an example depends on no other example (`per_example.check_independent`), and where gradients are
    finite: one that is not makes the sum NaN, unless non_finite='skip' leaves it out, which counts as zeroed out.

    Attributes:
      sum: of Σ_j h_j over examples (or groups) that took part, which is stats.mean · stats.weight_sum / stats.group_size:
        clip_norm C, or √Σ C_p² for parameters that are clipped each by itself. With groups of several examples twice that,
        and for zeroing out alone: the whole group's h_j changes, from one vector of norm C to another.
      mean: of stats.mean, for zeroing out: `sum` over the number of examples (groups). None where the divisor itself depends
        on which examples there are (weights, non_finite='skip'): divide the sum by a number fixed beforehand.

    >>> Sensitivity(sum=0.5, units=8).mean
    0.0625
    """

    sum: float
    units: int | None = None

    @property
    def mean(self) -> float | None:
        return None if self.units is None else self.sum / self.units


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradStatistics:
    """Averages over examples (or groups of them), each a tree like the parameters.

    With weights w_i of the examples, M groups of b examples, w_j the mean weight of group j and h_j its weighted mean
    gradient: stats[name] = Σ_j w_j φ(h_j) / Σ_j w_j.

    Attributes:
      averages: name -> tree.
      count: examples that took part (those with weight 0 did not).
      num_groups: groups that took part; equals `count` when b is 1.
      weight_sum, weight_square_sum: Σ w and Σ w² over the examples.
      group_size: b.
      group_noise: Σ_j (Σ w² / Σ w over the examples of group j); None: weights are equal within groups, so Σ w / b.
      sensitivity: of the mean gradient and of its sum, see `Sensitivity`. None without `clip_norm`; and where clipping does
        not bound them by a known number: a `clip_norm` that is traced or a function, weights that are not booleans (a weight
        of 3 counts an example three times), sums that are rounded on their way between devices (`transport_dtype`), a
        `shard_map` over more axes than `data_axes` (norms may be of a part of the gradient). The other statistics have none.

    >>> from perex_t5x import per_example
    >>> compute = per_example.grad_statistics(lambda w, x: jnp.sum(x @ w), ("mean", "mean_square"))
    >>> stats, _ = compute(jnp.ones(1), jnp.array([[1.0], [3.0]]))  # the examples' gradients
    >>> stats.mean.tolist(), stats.variance().tolist(), stats.squared_mean().tolist(), int(stats.count)
    ([2.0], [2.0], [3.0], 2)
    >>> round(float(stats.noise_scale()), 3)
    0.667
    >>> more, _ = compute(jnp.ones(1), jnp.array([[5.0], [7.0]]))
    >>> GradStatistics.merge(stats, more).mean.tolist()
    [4.0]
    """

    averages: dict[str, Any]
    count: Any
    num_groups: Any
    weight_sum: Any
    weight_square_sum: Any
    group_size: int = dataclasses.field(default=1, metadata={"static": True})
    group_noise: jax.Array | None = None
    sensitivity: Sensitivity | None = dataclasses.field(default=None, metadata={"static": True})

    def __getitem__(self, statistic: str | Statistic) -> Any:
        name = name_of(statistic)
        if name not in self.averages:
            raise KeyError(
                f"no statistic {name!r} here; these were computed: {', '.join(self.averages)}. Name it in "
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

    def mean_noise(self) -> jax.Array:
        """Var(ḡ) / σ² = Σw² / (Σw)²: 1/B for equal weights."""
        return self.weight_square_sum / jnp.square(self.weight_sum)

    def variance_factor(self) -> jax.Array:
        """σ̂² / (q − ḡ²) = 1 / (n − Σw²/(Σw)²): B/(B−1) without groups and weights; NaN with a single group.

        n = Var(h_j) / σ², averaged over groups: 1/b for equal weights, 1 without groups.
        """
        spread = self._group_noise() / self.weight_sum - self.mean_noise()
        return jnp.where(spread > 0, 1.0 / jnp.where(spread > 0, spread, 1.0), jnp.nan)

    def _group_noise(self) -> jax.Array:
        return self.weight_sum / self.group_size if self.group_noise is None else self.group_noise

    def raw_variance(self) -> Any:
        """Unbiased variance of one example's gradient, not clamped: (q − ḡ²) · `variance_factor`.

        With a single group: an error where that is known, NaN where traced. In float32, q − ḡ² loses all its digits at
        |μ|/σ ≈ 10⁴.
        """
        if not isinstance(self.num_groups, Tracer) and self.num_groups < 2:
            raise ValueError(
                "one example (or group) has no variance: give two or more, or merge statistics first "
                "(GradStatistics.merge)."
            )
        factor = self.variance_factor()
        return jax.tree.map(lambda x: factor * x, self.central_square())

    def central_square(self) -> Any:
        """q − ḡ², the mean square of h_j − ḡ; not clamped."""
        return jax.tree.map(lambda q, m: q - jnp.square(m), self.mean_square, self.mean)

    def variance(self) -> Any:
        """`raw_variance`, clamped at 0 where rounding made it negative; see `variance_clamps`."""
        return jax.tree.map(lambda v: jnp.where(jnp.isnan(v), v, jnp.maximum(v, 0.0)), self.raw_variance())

    def variance_clamps(self) -> jax.Array:
        """How many coordinates `variance` clamps."""
        return _total(jax.tree.map(lambda v: v < 0, self.raw_variance()))

    def squared_mean(self) -> Any:
        """Unbiased estimate of μ²: ḡ² − σ̂² Σw²/(Σw)². Often negative where the signal is weak."""
        factor = self.mean_noise()
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
        return _total(self.raw_variance()), _total(self.squared_mean())

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
            a._group_noise() + b._group_noise(),
            _merged_sensitivity(a.sensitivity, b.sensitivity),
        )


def _merged_sensitivity(a: Sensitivity | None, b: Sensitivity | None) -> Sensitivity | None:
    """An example is in one of the two."""
    if a is None or b is None:
        return None
    units = None if a.units is None or b.units is None else a.units + b.units
    return Sensitivity(max(a.sum, b.sum), units)


def _total(tree: Any) -> Any:
    return sum(jnp.sum(x) for x in jax.tree.leaves(tree))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerExample:
    """What belongs to single examples: `values` (losses, [N]), `norms` of their gradients ([N], or None), the loss's own
    `aux` with a leading axis N, how many examples were not finite, and `metrics` of their gradients: name -> [N, ...].

    >>> from perex_t5x import per_example
    >>> compute = per_example.grad_statistics(lambda w, x: jnp.sum(x @ w), norms=True)
    >>> _, aux = compute(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 2.0]]))
    >>> aux.values.tolist(), aux.norms.tolist(), int(aux.non_finite)
    ([7.0, 2.0], [5.0, 2.0], 0)
    """

    values: jax.Array
    norms: jax.Array | None
    aux: Any
    non_finite: jax.Array
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
