"""`check_independent`: is the loss of a batch really the mean (or sum) of its examples' losses?

A loss that mixes examples (BatchNorm, a contrastive loss, a normaliser computed from the batch) looks innocent when it is
called with one example, and per-example gradients of it are gradients of something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from perex_t5x.per_example.engine import explicit_axes, jaxprs, primitives
from perex_t5x.per_example.engine.arguments import Roles, num_examples


def check_independent(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *extra: Any,
    reduction: str = "mean",
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    has_aux: bool = False,
    rtol: float = 1e-4,
) -> None:
    """Raises a ValueError unless L(batch) is the mean (or sum) over i of L(example i), in value and gradient.

    Checked on the numbers given: at least two examples that differ, and no dropout (the loss of the whole batch and of a
    single example would draw different masks). Where the check fails, the loss is run once more operation by operation, with
    one example exchanged, to name the first operation that mixes examples before the final sum.

    Args:
      loss_fn, params, batch, *extra: the loss and its arguments, in its order.
      reduction: 'mean' or 'sum', as given to `grad_statistics`.
      argnums, batch_argnums, has_aux: as given to `grad_statistics`.
      rtol: allowed error relative to the average size of the examples' losses and gradients; 2e-2 suits bfloat16 compute.

    >>> check_independent(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 3.0]]))
    >>> check_independent(lambda w, x: jnp.var(x @ w), jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 3.0]]))
    Traceback (most recent call last):
        ...
    ValueError: the loss mixes examples: ...
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction = {reduction!r}: must be one of mean, sum.")
    arguments = (params, batch, *extra)
    if explicit_axes.mesh_of(arguments) is not None:
        # A loss that is written for one example need not say where a sum over sharded examples is to lie.
        alone = NamedSharding(Mesh(jax.local_devices()[:1], ("device",)), PartitionSpec())
        arguments = jax.tree.map(lambda x: jax.device_put(x, alone) if isinstance(x, jax.Array) else x, arguments)
    roles = Roles.make(argnums, batch_argnums, ())
    count = num_examples(arguments, roles)
    if count < 2:
        raise ValueError("the batch has one example: whether examples are mixed shows with two or more.")
    other = _different_example(arguments, roles, count)

    def loss(*arguments: Any) -> jax.Array:
        out = loss_fn(*arguments)
        value = jnp.asarray(out[0] if has_aux else out)
        if value.size != 1:
            raise ValueError(f"the loss of the batch has shape {value.shape}; it must be a scalar.")
        return value.reshape(())

    compared = _compare(loss, arguments, roles, count)
    difference = _difference(compared, count, reduction, rtol)
    if not difference:
        return
    opposite = "sum" if reduction == "mean" else "mean"
    if not _difference(compared, count, opposite, rtol):
        raise ValueError(
            f"the loss of the batch is the {opposite} of its examples' losses, but reduction={reduction!r} was assumed: "
            f"give reduction={opposite!r}."
        )
    culprit = _culprit(loss, arguments, roles, other)
    where = f" Examples first meet in {culprit}." if culprit else ""
    raise ValueError(
        f"the loss mixes examples: {difference}, assuming reduction={reduction!r}.{where} Its per-example gradients are not "
        "those of the batch loss. Statistics taken over the batch (BatchNorm, contrastive terms, a normaliser) must become "
        "arguments that are computed before and held constant, or belong to one example."
    )


# --- the comparison ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Compared:
    """A quantity of the whole batch, and over single examples its sum and the sum of its absolute value."""

    name: str
    whole: np.ndarray
    total: np.ndarray
    absolute: np.ndarray


def _compare(loss: Callable[..., Any], arguments: tuple[Any, ...], roles: Roles, count: int) -> list[_Compared]:
    """The loss, then every gradient."""
    gradient = jax.value_and_grad(loss, argnums=roles.argnums[0] if roles.single else roles.argnums)

    def both(arguments: tuple[Any, ...]) -> Any:
        whole = jax.tree.leaves(gradient(*arguments))

        def add(total: Any, i: jax.Array) -> tuple[Any, None]:
            row = list(arguments)
            for k in roles.batch_argnums:
                row[k] = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), arguments[k])
            one = jax.tree.leaves(gradient(*row))
            return [(t + x, a + jnp.abs(x)) for (t, a), x in zip(total, one, strict=True)], None

        zeros = [(jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)),) * 2 for x in whole]
        return whole, jax.lax.scan(add, zeros, jnp.arange(count))[0]

    whole, sums = jax.jit(both)(jax.tree.map(jnp.asarray, arguments))
    target = tuple(arguments[i] for i in roles.argnums)
    paths = jax.tree_util.tree_leaves_with_path(target[0] if roles.single else target)
    names = ["", *(jax.tree_util.keystr(path) or "the parameter" for path, _ in paths)]
    return [
        _Compared(name, *(np.asarray(x, np.float64) for x in (w, t, a)))
        for name, w, (t, a) in zip(names, whole, sums, strict=True)
    ]


def _difference(compared: list[_Compared], count: int, reduction: str, rtol: float) -> str:
    """What differs, in words; empty where nothing does."""
    factor = 1.0 / count if reduction == "mean" else 1.0
    value, *gradients = compared
    expected = factor * value.total
    # Written so that NaN differs.
    if not abs(value.whole - expected) <= rtol * max(factor * value.absolute, abs(value.whole)):
        return f"the loss of the batch is {value.whole:.6g}, the {reduction} of the examples' losses {expected:.6g}"
    gradients = [g for g in gradients if g.whole.size]
    largest = max((factor * g.absolute.max() for g in gradients), default=0.0)
    for g in gradients:
        # A gradient that is zero but for rounding is measured against the others.
        error = np.max(np.abs(g.whole - factor * g.total))
        allowed = rtol * max(factor * g.absolute.max(), 1e-2 * largest)
        if not error <= allowed:
            return (
                f"the gradient of {g.name} differs from the {reduction} of the examples' gradients by up to {error:.3g}, "
                f"where {allowed:.3g} is rounding"
            )
    return ""


def _different_example(arguments: tuple[Any, ...], roles: Roles, count: int) -> int:
    """An example that differs from example 0."""
    leaves = [np.asarray(_data(x)) for k in roles.batch_argnums for x in jax.tree.leaves(arguments[k])]
    for i in range(1, count):
        if any(not np.array_equal(x[0], x[i]) for x in leaves):
            return i
    raise ValueError("all examples of the batch are alike: whether they are mixed shows with examples that differ.")


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


# --- the culprit ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Value:
    """A value with the batch as given and with example 0 exchanged, and the operation that mixed examples into it."""

    given: Any
    exchanged: Any
    depends: bool = False
    mixed_in: tuple[core.JaxprEqn, ...] | None = None  # and the calls around it, innermost first


class _Found(Exception):  # noqa: N818 (ends the run, is no error)
    pass


def _culprit(loss: Callable[..., Any], arguments: tuple[Any, ...], roles: Roles, other: int) -> str:
    """The first operation that mixes examples and whose result is then used other than in a sum; '' if not found."""
    exchanged = list(arguments)
    count = num_examples(arguments, roles)
    for k in roles.batch_argnums:
        exchanged[k] = jax.tree.map(lambda x: jnp.asarray(x).at[0].set(x[other]), arguments[k])
    program = jax.make_jaxpr(loss)(*arguments)
    values = [
        _Value(a, b, depends)
        for i, (old, new) in enumerate(zip(arguments, exchanged, strict=True))
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        for depends in [i in roles.batch_argnums]
    ]
    culprits: list[tuple[core.JaxprEqn, ...]] = []
    calls: list[core.JaxprEqn] = []

    def rule(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
        inputs = [x if isinstance(x, _Value) else _Value(x, x) for x in inputs]
        if body := primitives.INLINED_CALLS.get(eqn.primitive.name):
            inner = jaxprs.closed(eqn.params[body])
            calls.insert(0, eqn)
            results = jaxprs.evaluate(inner.jaxpr, inner.consts, inputs, rule)
            calls.pop(0)
            return results
        mixed = next((x.mixed_in for x in inputs if x.mixed_in is not None), None)
        if mixed is not None and not _only_summed(eqn, inputs):
            culprits.append(mixed)
            raise _Found
        given = jaxprs.bind(eqn, [x.given for x in inputs])
        new = jaxprs.bind(eqn, [x.exchanged for x in inputs])
        depends = any(x.depends for x in inputs)
        results = []
        for a, b in zip(given, new, strict=True):
            here = mixed
            if depends and mixed is None and not _in_one_row(a, b, count):
                here = (eqn, *calls)
                if "jaxpr" in eqn.params:  # a loop: what happens inside is not looked at
                    culprits.append(here)
                    raise _Found
            results.append(_Value(a, b, depends, here))
        return results

    try:
        jaxprs.evaluate(program.jaxpr, program.consts, values, rule)
    except _Found:
        return _describe(culprits[0])
    return ""


def _only_summed(eqn: core.JaxprEqn, inputs: Sequence[_Value]) -> bool:
    name = eqn.primitive.name
    if name in primitives.LINEAR:
        return all(x.mixed_in is not None or not x.depends for x in inputs)
    if name == "div":
        return not inputs[1].depends
    return name in primitives.LINEAR_BY_SHARED and sum(x.depends for x in inputs) == 1


def _in_one_row(a: Any, b: Any, count: int) -> bool:
    """Whether a and b differ in example 0's part of one axis only."""
    a, b = np.asarray(_data(jnp.asarray(a))), np.asarray(_data(jnp.asarray(b)))
    changed = ~((a == b) | ((a != a) & (b != b)))
    if not changed.any():
        return a.size != 1  # a scalar of all examples that happens not to change is still one of all
    for axis, size in enumerate(changed.shape):
        if size % count == 0:
            places = np.flatnonzero(changed.any(axis=tuple(k for k in range(changed.ndim) if k != axis)))
            # [N], [N · m] and [m · N] flattened
            if (places < size // count).all() or (places % count == 0).all():
                return True
    return False


def _describe(mixed_in: tuple[core.JaxprEqn, ...]) -> str:
    """The operation, and the innermost line of the user's among those of it and of the calls around it."""
    text = f"`{mixed_in[0].primitive.name}`"
    scopes = "/".join(filter(None, (str(eqn.source_info.name_stack) for eqn in reversed(mixed_in))))
    if scopes:
        text += f" of {scopes}"
    line = jaxprs.source_line(mixed_in)
    return text if line is None else f"{text} at {line}"
