"""The parts every optimizer on per-example statistics is made of; enough to write a new one in twenty lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from perex_t5x.errors import ConfigError
from perex_t5x.optimizers.chain_compat import agreeing, at_least_float32, same_mean
from perex_t5x.optimizers.checks import check_number, check_sensitivity, check_statistics, refuse_multi_steps
from perex_t5x.optimizers.learning_rate import drive_learning_rate
from perex_t5x.per_example.results import GradStatistics
from perex_t5x.per_example.statistic import Statistic, union

Mask = Any  # a tree of booleans like the parameters (or a prefix), or a function from parameters to one


class StatisticsTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that knows which statistics its `update(..., statistics=)` reads.

    Attributes:
      name: for messages.
      needs: statistics, "mean" first: names of built-in ones, and `per_example.Statistic` objects; what
        `per_example.grad_statistics` takes. optax's wrappers drop it; `needs_of` finds it through them.

    >>> from perex_t5x import optimizers
    >>> optimizers.micro_adam(0.1).needs
    ('mean', 'mean_square')
    """

    name: str = ""
    needs: tuple[str | Statistic, ...] = ("mean",)


@dataclasses.dataclass(frozen=True)
class Privacy:
    """What a differentially private optimizer (`dp`) asks for, and what it adds; `privacy_of` finds it.

    Attributes:
      clip_norm: C, at which the gradient of each example's own loss has to be clipped.
      noise_multiplier: σ; the noise that is added to their sum has the standard deviation σ·C in every coordinate.
      batch_size: what the sum is divided by, fixed beforehand.

    >>> privacy = Privacy(clip_norm=0.5, noise_multiplier=1.0, batch_size=64)
    >>> privacy.noise_multiplier * privacy.clip_norm / privacy.batch_size  # deviation of the mean's noise
    0.0078125
    """

    clip_norm: float
    noise_multiplier: float
    batch_size: int


def _made(name: str, needs: tuple[str | Statistic, ...], init: Callable[..., Any], update: Callable[..., Any]) -> Any:
    made = StatisticsTransformation(init, update)
    made.name, made.needs = name, needs
    return made


def from_statistics(
    name: str,
    needs: Sequence[str | Statistic],
    init: Callable[[Any], Any],
    update: Callable[[GradStatistics, Any, Any], tuple[Any, Any]],
    privacy: Privacy | None = None,
) -> StatisticsTransformation:
    """Makes an optax transformation from a function of statistics.

    Args:
      name: for messages and profiles.
      needs: the statistics that `update` reads, built-in ones by name, others as `per_example.Statistic` objects;
        "mean" is always there.
      init: params -> state.
      update: (statistics, state, params) -> (updates, state). The statistics have what `needs` names, in at least
        float32, and agree with the transformations in front in the chain: masked as the updates are (their trees then have
        `optax.MaskedNode`, which `jax.tree.map` skips), scaled as the updates were.
      privacy: where given, `update` is called with statistics whose `sensitivity` is that of `privacy.clip_norm`, or there
        is an error; nothing in front in the chain changes them.

    Returns:
      A transformation for `optax.chain` and all the rest, with `needs`. One that needs the mean alone also works without
      `statistics=`, unless it is private.

    An optimizer from scratch, which divides the momentum by the mean *absolute value* of the examples' gradients:

    >>> from typing import NamedTuple
    >>> from perex_t5x import per_example
    >>> MEAN_ABS = per_example.Statistic("mean_abs", jnp.abs, scaling=jnp.abs)  # |c·g| = |c|·|g|
    >>> class MeanAbsState(NamedTuple):
    ...     mu: Any
    ...     nu: Any
    >>> def scale_by_mean_abs(b1=0.9, b2=0.99, eps=1e-8):
    ...     def init(params):
    ...         return MeanAbsState(optax.tree.zeros_like(params), optax.tree.zeros_like(params))
    ...
    ...     def update(statistics, state, params):
    ...         mu = optax.tree.update_moment(statistics.mean, state.mu, b1, 1)
    ...         nu = optax.tree.update_moment(statistics[MEAN_ABS], state.nu, b2, 1)
    ...         return jax.tree.map(lambda m, v: m / (v + eps), mu, nu), MeanAbsState(mu, nu)
    ...
    ...     return from_statistics("scale_by_mean_abs", ("mean", MEAN_ABS), init, update)
    >>> def mean_abs(learning_rate, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0, mask=None):
    ...     return descend(scale_by_mean_abs(b1, b2, eps), learning_rate, weight_decay, mask)

    and a step with it:

    >>> optimizer, params, batch = mean_abs(0.1), jnp.zeros(2), jnp.array([[1.0, 3.0], [3.0, -1.0]])
    >>> compute = per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), optimizer.needs)
    >>> stats, _ = compute(params, batch)
    >>> updates, state = optimizer.update(stats.mean, optimizer.init(params), params, statistics=stats)
    >>> print(jnp.round(updates, 3))  # -0.1 · (0.1 · [2, 1]) / (0.01 · [2, 2])
    [-1.  -0.5]
    """
    needs = union(("mean",), needs)
    mean_alone = needs == ("mean",) and privacy is None

    def checked_init(params: Any) -> Any:
        if not mean_alone:
            refuse_multi_steps(name)
        return init(params)

    def checked_update(
        updates: Any, state: Any, params: Any = None, *, statistics: GradStatistics | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        del extra  # for other transformations in the same chain
        if mean_alone:
            seen = _of_mean(updates, statistics)
        else:
            refuse_multi_steps(name)
            checked = check_statistics(name, needs, statistics)
            if isinstance(checked.averages, _Recorder):
                checked.averages.declared += needs
                checked.averages.privacy = checked.averages.privacy or privacy
            elif privacy is not None:
                check_sensitivity(name, privacy.clip_norm, checked)
            seen = (agreeing if privacy is None else same_mean)(name, checked, updates, needs)
        with jax.named_scope(name):
            steps, state = update(seen, state, params)
        return jax.tree.map(lambda s, u: s.astype(jnp.result_type(u)), steps, updates), state

    return _made(name, needs, checked_init, checked_update)


def _of_mean(updates: Any, statistics: GradStatistics | None) -> GradStatistics:
    averages = {"mean": at_least_float32(updates)}
    if isinstance(statistics, GradStatistics):
        return dataclasses.replace(statistics, averages=averages)
    return GradStatistics(averages, None, None, None, None)  # the number of examples is not known


def descend(
    direction: optax.GradientTransformation, learning_rate: Any, weight_decay: Any = 0.0, mask: Mask | None = None
) -> StatisticsTransformation:
    """An optimizer from a direction: updates = −η · (direction + λ · params), the decay λ decoupled as in `optax.adamw`.

    Args:
      direction: a transformation without learning rate, such as `scale_by_moments(1, 1)`.
      learning_rate: η, a number or a schedule.
      weight_decay: λ, a number or a schedule.
      mask: which parameters decay; a tree of booleans, or a function from the parameters to one.

    >>> optimizer = descend(optax.identity(), 0.5, weight_decay=0.1)
    >>> params = jnp.array([10.0])
    >>> print(optimizer.update(jnp.array([2.0]), optimizer.init(params), params)[0])  # -0.5 · (2 + 0.1 · 10)
    [-1.5]
    """
    name, needs = getattr(direction, "name", "descend"), getattr(direction, "needs", ("mean",))
    check_number(name, "learning_rate", learning_rate)
    check_number(name, "weight_decay", weight_decay)
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        decay = optax.identity()  # unlike add_decayed_weights, works without params
        decay = decay if mask is None else optax.masked(decay, mask)
    else:
        decay = optax.add_decayed_weights(weight_decay, mask)
    return _made(name, needs, *optax.chain(direction, decay, optax.scale_by_learning_rate(learning_rate)))


def inverse_batch_size(statistics: GradStatistics) -> jax.Array:
    """1/B, the factor by which averaging reduces the variance: Σw²/(Σw)² with weights w of the examples; 1 for no examples.

    >>> eight = jnp.asarray(8.0)
    >>> print(inverse_batch_size(GradStatistics({}, eight, eight, weight_sum=eight, weight_square_sum=eight)))
    0.125
    """
    total = statistics.weight_sum
    return jnp.where(total > 0, statistics.mean_noise(), 1.0)


class _Recorder(dict):
    """Averages that have every name, and remember which were read, and which were declared with what φ."""

    def __init__(self, mean: Any, other: Any):
        super().__init__(mean=mean)
        self._other = other
        self.declared: tuple[str | Statistic, ...] = ()
        self.privacy: Privacy | None = None

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Any:
        self[name] = self._other
        return self._other


def needs_of(optimizer: Any, params: Any) -> tuple[str | Statistic, ...]:
    """The statistics an optimizer reads, "mean" first; found by tracing, so through any of optax's wrappers.

    As in `StatisticsTransformation.needs`: names of built-in statistics, and `Statistic` objects where `from_statistics` was
    given them.

    Args:
      optimizer: an optax transformation, or a function that makes one from a `learning_rate`.
      params: the parameters, or their shapes (`jax.ShapeDtypeStruct`). Nothing is computed.

    >>> import perex_t5x.optimizers as optimizers
    >>> params = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    >>> needs_of(optax.chain(optax.clip_by_global_norm(1.0), optimizers.micro_adam(1e-3)), params)
    ('mean', 'mean_square')
    >>> needs_of(optax.adamw, params)
    ('mean',)
    """
    averages = _recorded(optimizer, params)
    return union(averages, averages.declared)


def privacy_of(optimizer: Any, params: Any) -> Privacy | None:
    """What a private optimizer asks of its gradients; None for all others. Found by tracing, as `needs_of` does.

    >>> import perex_t5x.optimizers as optimizers
    >>> params = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    >>> private = optimizers.dp(optax.sgd(0.1), clip_norm=1.0, noise_multiplier=0.8, batch_size=64, seed=1)
    >>> privacy_of(optax.chain(private, optax.keep_params_nonnegative()), params)
    Privacy(clip_norm=1.0, noise_multiplier=0.8, batch_size=64)
    >>> privacy_of(optax.adamw, params) is None
    True
    """
    return _recorded(optimizer, params).privacy


def _recorded(optimizer: Any, params: Any) -> _Recorder:
    """What an optimizer read and declared in one step, which is traced."""
    driven = drive_learning_rate(optimizer)
    recorders: list[_Recorder] = []

    def trace(params: Any) -> Any:
        mean, other = (jax.tree.map(lambda p: jnp.zeros(p.shape, _moment_dtype(p)), params) for _ in range(2))
        averages, two = _Recorder(mean, other), jnp.asarray(2.0)
        recorders.append(averages)
        statistics = GradStatistics(averages, two, two, two, two)
        return driven.update(mean, driven.init(params), params, jnp.asarray(1.0), statistics=statistics)

    jax.eval_shape(trace, params)
    return recorders[-1]


def logged(state: Any) -> dict[str, jax.Array]:
    """Scalars worth logging in an optimizer's state: what the `metrics()` of its parts return.

    Where two parts use the same name (`optax.multi_transform`), each gets its path in the state appended.

    >>> import perex_t5x.optimizers as optimizers
    >>> logged(optimizers.micro_adam_msq(1e-3).init({"w": jnp.zeros(3)}))
    {'floored_share': Array(0., dtype=float32)}
    """

    def has_metrics(x: Any) -> bool:
        return hasattr(x, "metrics")

    metrics = [
        (name, jax.tree_util.keystr(path, simple=True, separator="/"), value)
        for path, part in jax.tree_util.tree_leaves_with_path(state, is_leaf=has_metrics)
        if has_metrics(part)
        for name, value in part.metrics().items()
    ]
    names = [name for name, _, _ in metrics]
    return {name if names.count(name) == 1 else f"{name}/{path}": value for name, path, value in metrics}


def operands_of(state: Any) -> dict[str, Any]:
    """Trees like the parameters that an optimizer's statistics see (`Statistic.operands`), from its state: what the
    `operands()` of the state's parts return. {} for an optimizer without such statistics.

    >>> import perex_t5x.optimizers as optimizers
    >>> operands_of(optimizers.micro_lion(1e-3).init({"w": jnp.zeros(3)}))
    {'lion_momentum': {'w': Array([0., 0., 0.], dtype=float32)}}
    """

    def has_operands(x: Any) -> bool:
        return hasattr(x, "operands")

    together: dict[str, Any] = {}
    for part in jax.tree.leaves(state, is_leaf=has_operands):
        for name, tree in part.operands().items() if has_operands(part) else ():
            if name in together:
                raise ConfigError(
                    f"two parts of the optimizer hand over the operand {name!r}, each for its own parameters. Optimizers "
                    "whose statistics see their state cannot be combined (optax.multi_transform)."
                )
            together[name] = tree
    return together


def zero_moments(params: Any, dtype: Any = None) -> Any:
    """Zeros like the parameters for a moving average; `dtype` None: the parameter's own, at least float32."""
    return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=dtype or _moment_dtype(p)), params)


def _moment_dtype(p: Any) -> Any:
    return jnp.promote_types(p.dtype, jnp.float32)
