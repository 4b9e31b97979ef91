"""Adafactor with T5X's arguments and T5X's numbers: second moments factored by rules, stacked layers kept apart.

`optax.adafactor` is the same where parameters are vectors and matrices and no rule is given. It cannot say which dimensions
of a larger parameter make up a row, nor that those of scanned layers are stacks, in which each layer has its own size and
clipping.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from perex_t5x import arguments
from perex_t5x.arguments import Count, Interval
from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.optimizers.checks import Decay, DType, Rate, check_number
from perex_t5x.optimizers.run_context import logical_axes, name_of, run_step

__all__ = ["HEURISTIC_RULE", "Adafactor", "AdafactorState", "FactorDim", "HParamMap", "standard_logical_factor_rules"]


class FactorDim(enum.Enum):
    """What a dimension of a parameter is: part of a row, part of a column, a stack of parameters, or none of them."""

    NONE = None
    BATCH = 1
    ROW = 2
    COLUMN = 3


class HeuristicRule(enum.Enum):
    """The rule for vectors and matrices: the two largest dimensions, if both are large enough."""

    token = 1


HEURISTIC_RULE = HeuristicRule.token
FactorRule = HeuristicRule | tuple[FactorDim, ...] | None

_BY_NAME = {
    "row": FactorDim.ROW,
    "col": FactorDim.COLUMN,
    "column": FactorDim.COLUMN,
    "batch": FactorDim.BATCH,
    "none": FactorDim.NONE,
    "unfactorized": FactorDim.NONE,
}


def standard_logical_factor_rules() -> dict[str, FactorDim]:
    """T5X's: `embed` makes rows, what it is projected to makes columns, `layers` and `stack` are stacks.

    >>> standard_logical_factor_rules()["layers"]
    <FactorDim.BATCH: 1>
    """
    columns = ("vocab", "mlp", "heads", "kv", "joined_kv", "q_wi_fused", "o_wo_fused", "multiquery_heads", "kv_fused")
    return {
        "embed": FactorDim.ROW,
        **dict.fromkeys((*columns, "mlp_activations"), FactorDim.COLUMN),
        **dict.fromkeys(("layers", "stack"), FactorDim.BATCH),
        **dict.fromkeys(("relpos_buckets", "layer_norm_scale"), FactorDim.NONE),
    }


class HParamMap:
    """A value for each parameter, by the first regular expression that is found in its name.

    >>> HParamMap([("norm", False), (".*", True)])["decoder/decoder_norm/scale"]
    False
    """

    def __init__(self, rules: Sequence[tuple[str, Any]]):
        try:
            self._rules = [(re.compile(pattern), value) for pattern, value in rules]
        except (re.error, TypeError, ValueError) as e:
            raise ConfigError(
                f"HParamMap.rules = {rules!r}: give pairs of a regular expression and a value ({e})."
            ) from e

    def __getitem__(self, name: str) -> Any:
        for pattern, value in self._rules:
            if pattern.search(name):
                return value
        raise ConfigError(f"HParamMap: no rule for the parameter {name!r}. Let the last pair be ('.*', ...).")


class AdafactorState(NamedTuple):
    """Trees like the parameters; what a parameter does not use has the shape [1].

    Attributes:
      count: updates so far.
      v_row, v_col: moving averages of g² over columns, and over rows, of what is factored.
      v: moving average of g², of what is not.
      m: moving average of the steps, where beta1 is given.
    """

    count: Any
    v_row: Any
    v_col: Any
    v: Any
    m: Any


class _Dims(NamedTuple):
    averaged: tuple[int, ...]  # over which a parameter's size, and that of its step, are taken
    factored: tuple[tuple[int, ...], tuple[int, ...]] | None  # rows, columns


def Adafactor(  # noqa: N802 (T5X's name)
    learning_rate: Rate | None = None,
    factored: bool = True,
    multiply_by_parameter_scale: bool | HParamMap | Sequence[tuple[str, bool]] = True,
    beta1: Decay | None = None,
    decay_rate: Annotated[float, Interval("[0, ∞)")] = 0.8,
    step_offset: Count = 0,
    clipping_threshold: Annotated[float, Interval("(0, ∞)")] | None = 1.0,
    weight_decay_rate: Annotated[float, Interval("[0, ∞)")] | None = None,
    min_dim_size_to_factor: Count = 128,
    epsilon1: Annotated[float, Interval("[0, ∞)")] = 1e-30,
    epsilon2: Annotated[float, Interval("[0, ∞)")] = 1e-3,
    dtype_momentum: DType = jnp.float32,
    factor_map: HParamMap | Sequence[tuple[str, Any]] | None = None,
    logical_factor_rules: Mapping[str, Any] | None = None,
    weight_decay_rate_lr_exponent: float | None = None,
    global_norm_clip_threshold: Annotated[float, Interval("(0, ∞)")] | None = None,
    max_parameter_scale: Annotated[float, Interval("(0, ∞)")] | None = None,
    skip_nan_updates: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Adafactor (https://arxiv.org/abs/1804.04235) as T5X has it. In Gin: `OPTIMIZER = @adafactor.Adafactor()`.

        v ← d·v + (1−d)·(g² + ε₁),  d = 1 − (t + 1 − step_offset)^−decay_rate       t: steps of the run so far
        u = g/√v,  u ← u / max(1, RMS(u)/clipping_threshold)
        s = η·u·max(ε₂, RMS(θ)),  m ← β₁·m + (1−β₁)·s  (without beta1: m = s)
        θ ← (1 − weight_decay_rate)·θ − m

    where a factored v is the product of its means over columns and over rows, divided by the mean of all. Inside the trainer
    t is the run's step, as in T5X; elsewhere it is counted here. Before `step_offset`, where T5X's numbers are NaN, t is 0.

    Args:
      learning_rate: η, a number or a schedule; the trainer's by default.
      factored: whether matrices are factored at all.
      multiply_by_parameter_scale: whether a step is proportional to the size of what it changes; or pairs (regular
        expression over names, bool).
      beta1: of the momentum; None: none, and no memory for it.
      decay_rate, step_offset, clipping_threshold: above; None for the latter: steps are not clipped.
      weight_decay_rate: not multiplied by η; with `weight_decay_rate_lr_exponent` it is multiplied by η to that power.
      min_dim_size_to_factor: of vectors and matrices, what is smaller is not factored.
      epsilon1, epsilon2: ε₁ and ε₂.
      dtype_momentum: of m.
      factor_map: pairs (regular expression over names, a rule: one `FactorDim` or its name for each dimension, or None).
      logical_factor_rules: {logical axis: FactorDim}, such as `standard_logical_factor_rules()`; goes before `factor_map`
        where the axes are known, as they are in the trainer. As in T5X what is said of a matrix that is not in a stack is
        ignored: its larger dimension makes columns.
      global_norm_clip_threshold: the whole gradient is scaled to at most this norm first.
      max_parameter_scale: RMS(θ) counts as at most this.
      skip_nan_updates: numbers that would become NaN stay what they are.

    >>> optimizer = Adafactor(0.1, min_dim_size_to_factor=2)
    >>> params = {"w": jnp.ones((2, 3))}
    >>> state = optimizer.init(params)
    >>> state.v_row["w"].shape, state.v_col["w"].shape, state.v["w"].shape
    ((2,), (3,), (1,))
    >>> updates, state = optimizer.update({"w": jnp.full((2, 3), 4.0)}, state, params)
    >>> print(updates["w"][0])
    [-0.1 -0.1 -0.1]
    """
    arguments.check(
        "Adafactor", {k: v for k, v in arguments.hints(Adafactor).items() if k != "learning_rate"}, locals()
    )
    if learning_rate is None:
        raise ConfigError(
            "Adafactor: no learning_rate. The trainer gives it its own; in a loop of one's own it is to be given."
        )
    check_number("Adafactor", "learning_rate", learning_rate)
    if not factored and factor_map is not None:
        raise ConfigError("Adafactor: factored = False and a factor_map exclude each other.")
    scaled = multiply_by_parameter_scale
    scaled = scaled if isinstance(scaled, bool | HParamMap) else HParamMap(scaled)
    rules = factor_map if factor_map is None or isinstance(factor_map, HParamMap) else HParamMap(factor_map)
    axis_rules = logical_factor_rules if factored else None

    def dims_of(name: str, shape: Sequence[int]) -> _Dims:
        rule: FactorRule = HEURISTIC_RULE if factored else None
        axes = logical_axes(name)
        if factored and axis_rules is not None and axes is not None:
            rule = _rule_of_axes(name, axes, axis_rules)
        elif factored and rules is not None:
            rule = _rule_of_map(name, rules[name])
        return _dims(name, rule, tuple(shape), min_dim_size_to_factor)

    def init(params: Any) -> AdafactorState:
        def init_one(path: Any, p: Any) -> tuple[Any, ...]:
            dims, nothing = dims_of(name_of(path), p.shape), jnp.zeros((1,))
            v_row = v_col = v = m = nothing
            if dims.factored is None:
                v = jnp.zeros(p.shape, jnp.float32)
            else:
                rows, columns = dims.factored
                v_row = jnp.zeros(np.delete(p.shape, columns), jnp.float32)
                v_col = jnp.zeros(np.delete(p.shape, rows), jnp.float32)
            if beta1 is not None:
                m = jnp.zeros(p.shape, dtype_momentum)
            return v_row, v_col, v, m

        return AdafactorState(jnp.zeros((), jnp.int32), *_unzipped(init_one, params))

    def update_one(name: str, p: Any, g: Any, state: tuple[Any, ...], step: Any, rate: Any) -> tuple[Any, ...]:
        dims, (v_row, v_col, v, m) = dims_of(name, p.shape), state
        g = g.astype(jnp.float32)
        decay = 1.0 - (jnp.maximum(jnp.asarray(step, jnp.float32) - step_offset, 0.0) + 1.0) ** (-decay_rate)
        square = g * g + epsilon1
        new_row = new_col = new_v = new_m = jnp.zeros((1,))
        if dims.factored is None:
            new_v = decay * v + (1.0 - decay) * square
            u = g * new_v**-0.5
        else:
            rows, columns = dims.factored
            new_row = decay * v_row + (1.0 - decay) * jnp.mean(square, axis=columns)
            new_col = decay * v_col + (1.0 - decay) * jnp.mean(square, axis=rows)
            rows_left = tuple(d - sum(c < d for c in columns) for d in rows)
            row_factor = (new_row / jnp.mean(new_row, axis=rows_left, keepdims=True)) ** -0.5
            u = g * jnp.expand_dims(row_factor, columns) * jnp.expand_dims(new_col**-0.5, rows)
        if clipping_threshold is not None:
            u = u / jnp.maximum(1.0, _rms(u, dims.averaged) / clipping_threshold)
        scale = rate
        if scaled[name] if isinstance(scaled, HParamMap) else scaled:
            size = jnp.maximum(_rms(p, dims.averaged), epsilon2)
            scale = rate * (size if max_parameter_scale is None else jnp.minimum(size, max_parameter_scale))
        s = scale * u
        if beta1 is not None:
            s = beta1 * m + (1.0 - beta1) * s
            new_m = s.astype(m.dtype)
        lost = 0.0 if weight_decay_rate is None else weight_decay_rate
        if weight_decay_rate_lr_exponent:
            lost = (weight_decay_rate or 1.0) * rate**weight_decay_rate_lr_exponent
        change = -s if isinstance(lost, float | int) and lost == 0 else -(s + lost * p)
        new = (new_row, new_col, new_v, new_m)
        if skip_nan_updates:
            new = tuple(jnp.where(jnp.isnan(x), old, x) for x, old in zip(new, state, strict=True))
            change = jnp.where(jnp.isnan(change), 0.0, change)
        return change, *new

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, AdafactorState]:
        del extra  # for other transformations in the same chain
        if params is None:
            raise ConfigError("Adafactor needs the parameters: optimizer.update(updates, state, params).")
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        if global_norm_clip_threshold is not None:
            clip = optax.clip_by_global_norm(global_norm_clip_threshold)
            updates, _ = clip.update(updates, clip.init(params))
        step = state.count if run_step() is None else run_step()

        def one(path: Any, p: Any, g: Any, *of_param: Any) -> tuple[Any, ...]:
            return update_one(name_of(path), p, g, of_param, step, rate)

        change, *new = _unzipped(one, params, updates, *state[1:], results=5)
        return change, AdafactorState(optax.safe_increment(state.count), *new)

    return optax.GradientTransformationExtraArgs(init, update)


def _unzipped(fn: Any, tree: Any, *rest: Any, results: int = 4) -> list[Any]:
    """`tree_map_with_path` of a function with several results: a tree of each."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    columns = [structure.flatten_up_to(other) for other in rest]
    rows = [fn(path, leaf, *others) for (path, leaf), *others in zip(leaves, *columns, strict=True)]
    return [structure.unflatten([row[i] for row in rows]) for i in range(results)]


def _rms(x: Any, dims: tuple[int, ...]) -> Any:
    return jnp.sqrt(jnp.mean(x * x, axis=dims, keepdims=True))


def _rule_of_axes(name: str, axes: Sequence[str | None], rules: Mapping[str, Any]) -> FactorRule:
    """One kind for each logical axis; without both rows and columns only stacks are left."""
    missing = [axis for axis in axes if axis is not None and axis not in rules]
    if missing:
        raise ConfigError(
            f"Adafactor.logical_factor_rules say nothing of the logical axis {missing[0]!r}, which the parameter {name!r} "
            f"has {tuple(axes)}.{did_you_mean(missing[0], rules)} Add it: 'row', 'column', 'batch' (a stack) or 'none'."
        )
    rule = tuple(FactorDim.NONE if axis is None else _kind(name, rules[axis]) for axis in axes)
    if {FactorDim.ROW, FactorDim.COLUMN, FactorDim.NONE} <= set(rule):
        raise ConfigError(
            f"Adafactor.logical_factor_rules make rows and columns of the parameter {name!r} {tuple(axes)}, and neither of "
            f"its axis {axes[rule.index(FactorDim.NONE)]!r}: say which it is part of."
        )
    if not {FactorDim.ROW, FactorDim.COLUMN} <= set(rule):
        rule = tuple(kind if kind is FactorDim.BATCH else FactorDim.NONE for kind in rule)
    return rule


def _rule_of_map(name: str, rule: Any) -> FactorRule:
    if rule is None or isinstance(rule, HeuristicRule):
        return rule
    if not isinstance(rule, list | tuple):
        raise ConfigError(
            f"Adafactor.factor_map: the rule of {name!r} is {rule!r}: give one kind for each dimension, or None."
        )
    return tuple(_kind(name, kind) for kind in rule)


def _kind(name: str, kind: Any) -> FactorDim:
    if isinstance(kind, FactorDim):
        return kind
    if kind is None or (isinstance(kind, str) and kind.lower() in _BY_NAME):
        return FactorDim.NONE if kind is None else _BY_NAME[kind.lower()]
    raise ConfigError(
        f"Adafactor: {kind!r}, in a rule for the parameter {name!r}, is none of {', '.join(map(repr, _BY_NAME))}."
        f"{did_you_mean(str(kind), _BY_NAME)}"
    )


def _dims(name: str, rule: FactorRule, shape: tuple[int, ...], least: int) -> _Dims:
    """The dimensions of a parameter that are averaged over, and those that make rows and columns."""
    every = tuple(range(len(shape)))
    if rule is None:
        return _Dims(every, None)
    if isinstance(rule, tuple):
        if len(rule) != len(shape):
            raise ConfigError(
                f"Adafactor: the rule of the parameter {name!r} has {len(rule)} dimensions, and its shape is {shape}."
            )
        rows, columns, stacked = (
            tuple(i for i, kind in enumerate(rule) if kind is wanted)
            for wanted in (FactorDim.ROW, FactorDim.COLUMN, FactorDim.BATCH)
        )
        if len(shape) > 2 or stacked:
            averaged = tuple(i for i in every if i not in stacked)
            return _Dims(averaged, (rows, columns) if rows or columns else None)
    if len(shape) > 2:
        raise ConfigError(
            f"Adafactor: the parameter {name!r} has {len(shape)} dimensions {shape}, so it has to be said which of them "
            "make rows and columns: bind Adafactor.logical_factor_rules = @adafactor.standard_logical_factor_rules(), or a "
            "factor_map."
        )
    order = [int(i) for i in np.argsort(shape)]
    if len(shape) < 2 or shape[order[-2]] < least:
        return _Dims(every, None)
    return _Dims(every, ((order[-2],), (order[-1],)))
