"""`grad_statistics`: from a loss to statistics of its per-example gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.per_example import jaxprs, surgery
from perex_t5x.per_example.arguments import Roles, check_divides, num_examples, parameter_names
from perex_t5x.per_example.forms import Reduced, Reducer
from perex_t5x.per_example.results import GradStatistics, PerExample
from perex_t5x.per_example.statistic import Statistic, as_statistics

METHODS = ("surgery", "vmap")
NON_FINITE = ("keep", "skip")
REDUCTIONS = ("mean", "sum")


@dataclasses.dataclass(frozen=True)
class _Options:
    statistics: tuple[Statistic, ...]
    method: str
    roles: Roles
    has_aux: bool
    group_size: int
    microbatch_size: int | None
    reduction: str
    norms: bool
    clip_norm: float | None
    non_finite: str
    strict: bool


def grad_statistics(
    loss_fn: Callable[..., Any],
    statistics: str | Statistic | Iterable[str | Statistic] = ("mean", "mean_square"),
    *,
    method: str = "surgery",
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    has_aux: bool = False,
    group_size: int = 1,
    microbatch_size: int | None = None,
    reduction: str = "mean",
    rng_argnums: int | tuple[int, ...] = (),
    norms: bool = False,
    clip_norm: float | None = None,
    non_finite: str = "keep",
    strict: bool = False,
) -> Compute:
    """Returns `compute(params, batch, ..., weights=None) -> (GradStatistics, PerExample)`.

    Statistical definition. With g_i the gradient of example i's loss, scaled so that mean(g_i) is the gradient of the batch
    loss, and h_j the mean of g over the j-th group of `group_size` consecutive examples:

        stats[name] = Σ_j w_j φ(h_j) / Σ_j w_j        elementwise, in at least float32

    Args:
      loss_fn: loss_fn(params, batch, ...) -> loss, or (loss, aux). Called with one example, its leading axis kept.
      statistics: names ('mean', 'mean_square', 'mean_sign') or `Statistic` objects.
      method: 'surgery'; or 'vmap', the reference, which holds every example's gradient.
      argnums, batch_argnums: what is differentiated, and what has an axis of examples.
      has_aux: whether the loss returns (loss, aux).
      group_size: b consecutive examples form one unit.
      microbatch_size: examples at a time; None: all. Changes no number beyond rounding.
      reduction: what the batch loss is of the examples' losses: their 'mean', or their 'sum' (then g_i = B ∇ℓ_i).
      rng_argnums: PRNG keys; example i gets fold_in(key, i).
      norms: also the norm of each unit's gradient (before clipping).
      clip_norm: each h_j is scaled to at most this norm, inside φ. Needs a pass for the norms first.
      non_finite: 'keep', or 'skip': units whose loss or gradient norm is not finite are left out. Needs a pass as well.
      strict: an error, naming the parameter, where a gradient would have to be held for all examples.

    >>> loss = lambda w, x: jnp.sum((x @ w) ** 2)
    >>> compute = grad_statistics(loss, ("mean", "mean_square"))
    >>> stats, aux = compute(jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 2.0]]))
    >>> stats.mean.tolist(), stats.mean_square.tolist(), aux.values.tolist()
    ([1.0, 4.0], [2.0, 32.0], [1.0, 4.0])
    """
    for name, value, known in (
        ("method", method, METHODS),
        ("reduction", reduction, REDUCTIONS),
        ("non_finite", non_finite, NON_FINITE),
    ):
        if value not in known:
            raise ValueError(f"{name} = {value!r}: must be one of {', '.join(known)}.")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm = {clip_norm!r}: must be positive.")
    options = _Options(
        statistics=as_statistics(statistics),
        method=method,
        roles=Roles.make(argnums, batch_argnums, rng_argnums),
        has_aux=has_aux,
        group_size=group_size,
        microbatch_size=microbatch_size,
        reduction=reduction,
        norms=norms,
        clip_norm=clip_norm,
        non_finite=non_finite,
        strict=strict,
    )
    return Compute(loss_fn, options)


@dataclasses.dataclass(frozen=True, eq=False)
class Compute:
    """What `grad_statistics` returns: call it with the loss's arguments."""

    loss_fn: Callable[..., Any]
    options: _Options

    def __call__(self, *arguments: Any, weights: jax.Array | None = None) -> tuple[GradStatistics, PerExample]:
        return _compute(self.loss_fn, self.options, arguments, weights)[:2]

    def reductions(self, *arguments: Any) -> list[Reduced]:
        """How the gradient of each differentiated leaf is reduced."""
        return _compute(self.loss_fn, self.options, arguments, None)[2]


# --- one call ---------------------------------------------------------------------------------------------------------


def _compute(
    loss_fn: Callable[..., Any], options: _Options, arguments: tuple[Any, ...], weights: jax.Array | None
) -> tuple[GradStatistics, PerExample, list[Reduced]]:
    roles, b = options.roles, options.group_size
    count = num_examples(arguments, roles)
    check_divides("group_size", b, "the number of examples", count)
    units = count // b
    micro = units
    if options.microbatch_size is not None:
        check_divides("microbatch_size", options.microbatch_size, "the number of examples", count)
        check_divides("group_size", b, "microbatch_size", options.microbatch_size)
        micro = options.microbatch_size // b
    weights_M = None
    if weights is not None:
        weights = jnp.asarray(weights)
        if weights.shape != (units,):
            what = "example" if b == 1 else f"group of {b}"
            raise ValueError(f"weights has shape {weights.shape}: one per {what} is needed, ({units},).")
        weights_M = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))

    # Each unit sees its own part: [M, b, ...] for batches, one key per example.
    batch = tuple(
        jax.tree.map(lambda x: jnp.reshape(x, (units, b, *x.shape[1:])), arguments[i]) for i in roles.batch_argnums
    )
    indices_Mxb = jnp.arange(count, dtype=jnp.uint32).reshape(units, b)
    shared = {i: a for i, a in enumerate(arguments) if i not in roles.batch_argnums}
    scale = count if options.reduction == "sum" else 1
    one = _unit_function(loss_fn, options, len(arguments), scale)

    def chunk(batch_m: Any, indices_mxb: jax.Array, weights_m: jax.Array | None) -> tuple[Any, Any, list[Reduced]]:
        return _chunk(one, options, shared, batch_m, indices_mxb, weights_m)

    if micro == units:
        sums, per_unit, reduced = chunk(batch, indices_Mxb, weights_M)
    else:
        steps = units // micro
        xs = jax.tree.map(lambda x: x.reshape(steps, micro, *x.shape[1:]), (batch, indices_Mxb, weights_M))
        seen: list[Any] = []

        def add(total: Any, x: Any) -> tuple[Any, Any]:
            sums, per_unit, reduced = chunk(*x)
            seen[:] = reduced
            return jax.tree.map(jnp.add, total, sums), per_unit

        first = jax.tree.map(lambda x: x[0], xs)
        shapes = jax.eval_shape(lambda x: chunk(*x)[0], first)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        sums, per_unit = jax.lax.scan(add, zeros, xs)
        per_unit = jax.tree.map(lambda x: x.reshape(units, *x.shape[2:]), per_unit)
        reduced = seen
    if options.strict:
        _refuse_kept(reduced, parameter_names(arguments, roles))
    return (*_results(options, arguments, sums, per_unit, count), reduced)


def _unit_function(loss_fn: Callable[..., Any], options: _Options, arity: int, scale: float) -> Callable[..., Any]:
    """The loss of one unit: (differentiated, other shared, batch, indices) -> (mean loss of its examples, aux)."""
    roles = options.roles

    def one(differentiated: tuple[Any, ...], others: dict[int, Any], batch: Any, indices_b: jax.Array) -> Any:
        def example(row: Any, index: jax.Array) -> Any:
            full: list[Any] = [None] * arity
            for i, a in zip(roles.argnums, differentiated, strict=True):
                full[i] = a
            for i, a in others.items():
                full[i] = jax.random.fold_in(a, index) if i in roles.rng_argnums else a
            for i, a in zip(roles.batch_argnums, row, strict=True):
                full[i] = jax.tree.map(lambda x: x[None], a)
            out = loss_fn(*full)
            loss, aux = out if options.has_aux else (out, None)
            loss = _scalar(loss)
            return loss, aux

        if indices_b.shape[0] == 1:
            loss, aux = example(jax.tree.map(lambda x: x[0], batch), indices_b[0])
            losses_b, aux_b = loss[None], jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
        else:
            losses_b, aux_b = jax.vmap(example)(batch, indices_b)
        return scale * jnp.mean(losses_b), (losses_b, aux_b)

    return one


def _scalar(loss: Any) -> jax.Array:
    loss = jnp.asarray(loss)
    if loss.size != 1:
        raise ValueError(
            f"the loss of one example has shape {loss.shape}; it must be a scalar. The loss is called with one example, "
            "its leading axis kept: reduce over it (mean or sum)."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(f"the loss has dtype {loss.dtype}; it must be floating.")
    return loss.reshape(())


def _chunk(
    one: Callable[..., Any], options: _Options, shared: dict[int, Any], batch: Any, indices: jax.Array, weights: Any
) -> tuple[Any, Any, list[Reduced]]:
    """Sums over the units given: (per statistic, per gradient leaf), weights; and per-unit losses, norms, aux."""
    roles = options.roles
    differentiated = tuple(shared[i] for i in roles.argnums)
    others = {i: a for i, a in shared.items() if i not in roles.argnums}
    units = indices.shape[0]
    gradient = jax.value_and_grad(one, has_aux=True)

    def reduce(statistics: Any, weights: Any, scales: Any, norms: bool) -> Any:
        reducer = Reducer(statistics, units, weights, scales, norms)
        run = _by_vmap if options.method == "vmap" else _by_surgery
        return run(gradient, reducer, differentiated, others, batch, indices)

    two_passes = options.clip_norm is not None or options.non_finite == "skip"
    scales = None
    if two_passes:
        (losses, _), first = reduce((), None, None, True)
        norms = jnp.sqrt(sum(r.squares_N for r in first))
        if options.non_finite == "skip":
            finite = jnp.isfinite(norms) & jnp.all(jnp.isfinite(losses), axis=1)
            weights = jnp.where(finite, 1.0 if weights is None else weights, 0.0)
        if options.clip_norm is not None:
            scales = jnp.minimum(1.0, options.clip_norm / jnp.maximum(norms, jnp.finfo(norms.dtype).tiny))
    (losses, aux), reduced = reduce(options.statistics, weights, scales, options.norms and not two_passes)
    if not two_passes:
        norms = jnp.sqrt(sum(r.squares_N for r in reduced)) if options.norms else None
    w = jnp.ones(units, jnp.float32) if weights is None else weights
    finite_losses = jnp.isfinite(losses)
    finite_units = (
        jnp.all(finite_losses, axis=1) if norms is None else jnp.all(finite_losses, axis=1) & jnp.isfinite(norms)
    )
    sums = {
        "statistics": [r.sums for r in reduced],
        "weight": jnp.sum(w),
        "weight_square": jnp.sum(jnp.square(w)),
        "units": jnp.sum(w != 0),
        "non_finite": jnp.sum(~finite_units),
    }
    return sums, {"losses": losses, "aux": aux, "norms": norms}, reduced


def _by_surgery(
    gradient: Any, reducer: Reducer, differentiated: Any, others: Any, batch: Any, indices: Any
) -> tuple[Any, list[Reduced]]:
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (batch, indices))
    program, out = jax.make_jaxpr(gradient, return_shape=True)(differentiated, others, *row)
    program = jaxprs.inline(program)
    leaves, tree = jax.tree.flatten(out)
    num_grads = len(jax.tree.leaves(out[1]))
    first = len(leaves) - num_grads
    flat_shared, flat_batched = jax.tree.leaves((differentiated, others)), jax.tree.leaves((batch, indices))
    with jax.named_scope("per_example_statistics"):
        results, flags, reduced = surgery.run(
            program,
            [*flat_shared, *flat_batched],
            [False] * len(flat_shared) + [True] * len(flat_batched),
            {first + i: (lambda x: x) for i in range(num_grads)},
            reducer,
        )
    ordered = [reduced[first + i] for i in range(num_grads)]
    results = [
        None if i >= first else r if f else jnp.broadcast_to(r, (reducer.num_examples, *jnp.shape(r)))
        for i, (r, f) in enumerate(zip(results, flags, strict=True))
    ]
    (_, per_unit), _ = jax.tree.unflatten(tree, results)
    return per_unit, ordered


def _by_vmap(
    gradient: Any, reducer: Reducer, differentiated: Any, others: Any, batch: Any, indices: Any
) -> tuple[Any, list[Reduced]]:
    """The reference: all gradients, then φ, then the sum."""
    (_, per_unit), grads = jax.vmap(gradient, in_axes=(None, None, 0, 0))(differentiated, others, batch, indices)
    return per_unit, [reducer.all_at_once(g, "vmap") for g in jax.tree.leaves(grads)]


def _refuse_kept(reduced: list[Reduced], names: list[str]) -> None:
    for name, r in zip(names, reduced, strict=True):
        if r.form == "kept":
            raise ValueError(
                f"strict=True: the gradient of parameter {name} {r.note}, so it would be held for all examples "
                f"({r.transient_bytes:,} bytes). Without strict=True it is, exactly."
            )


def _results(
    options: _Options, arguments: tuple[Any, ...], sums: Any, per_unit: Any, count: int
) -> tuple[GradStatistics, PerExample]:
    differentiated = tuple(arguments[i] for i in options.roles.argnums)
    tree = jax.tree.structure(differentiated[0] if options.roles.single else differentiated)
    total = sums["weight"]
    inverse = jnp.where(total != 0, 1.0 / jnp.where(total != 0, total, 1.0), 0.0)
    averages = {
        s.name: jax.tree.unflatten(tree, [leaf[k] * inverse.astype(leaf[k].dtype) for leaf in sums["statistics"]])
        for k, s in enumerate(options.statistics)
    }
    b = options.group_size
    statistics = GradStatistics(averages, sums["units"] * b, sums["units"], total, sums["weight_square"], b)
    flat = jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), (per_unit["losses"], per_unit["aux"]))
    return statistics, PerExample(flat[0], per_unit["norms"], flat[1], sums["non_finite"])
