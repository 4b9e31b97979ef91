"""`grad_statistics`: from a loss to statistics of its per-example gradients."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x.per_example import jaxprs, microbatch, surgery
from perex_t5x.per_example.arguments import Roles, Selected, check_divides, num_examples, parameter_filter
from perex_t5x.per_example.forms import MIXED_UNITS, Reduced, Reducer
from perex_t5x.per_example.results import GradStatistics, PerExample, unshifted
from perex_t5x.per_example.statistic import SHIFTABLE, Statistic, as_statistics

METHODS = ("surgery", "vmap", "loop")
NON_FINITE = ("keep", "skip", "raise")
REDUCTIONS = ("mean", "sum")
UNITS = ("example", "token")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Options:
    statistics: tuple[Statistic, ...]
    method: str
    roles: Roles
    parameters: Callable[[str], bool] | None
    has_aux: bool
    group_size: int
    microbatch_size: int | str | None
    unit: str
    token_fallback: bool
    reduction: str
    norms: bool
    clip_norm: float | None
    non_finite: str
    strict: bool

    @property
    def passes(self) -> int:
        return 2 if self.clip_norm is not None or self.non_finite == "skip" else 1


def grad_statistics(
    loss_fn: Callable[..., Any],
    statistics: str | Statistic | Iterable[str | Statistic] = ("mean", "mean_square"),
    *,
    method: str = "surgery",
    argnums: int | tuple[int, ...] = 0,
    batch_argnums: int | tuple[int, ...] = 1,
    has_aux: bool = False,
    group_size: int = 1,
    microbatch_size: int | str | None = None,
    unit: str = "example",
    token_fallback: bool = False,
    reduction: str = "mean",
    rng_argnums: int | tuple[int, ...] = (),
    parameters: str | Callable[[str], bool] | None = None,
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
      method: 'surgery'; or a reference: 'vmap', which holds every example's gradient, or 'loop', a plain Python loop.
      argnums, batch_argnums: what is differentiated, and what has an axis of examples.
      has_aux: whether the loss returns (loss, aux).
      group_size: b consecutive examples form one unit.
      microbatch_size: examples at a time; None: all; 'auto': see `perex_t5x.per_example.microbatch`. Changes no number
        beyond rounding.
      unit: 'example'; or 'token': one application position of a weight (`perex_t5x.per_example.tokens`).
      token_fallback: with unit='token', take the example as the unit where a parameter has no positions; else an error.
      reduction: what the batch loss is of the examples' losses: their 'mean', or their 'sum' (then g_i = B ∇ℓ_i).
      rng_argnums: PRNG keys; example i gets fold_in(key, i).
      parameters: which parameters, by name ('layers/w'): a regular expression to be found in it, or a function. The others
        are held constant, and the statistics have None in their place.
      norms: also the norm of each unit's gradient (before clipping).
      clip_norm: each h_j is scaled to at most this norm, inside φ. Needs a pass for the norms first.
      non_finite: 'keep'; 'skip': units whose loss or gradient norm is not finite are left out, which needs a pass as well;
        or 'raise'.
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
        ("unit", unit, UNITS),
    ):
        if value not in known:
            raise ValueError(f"{name} = {value!r}: must be one of {', '.join(known)}.")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm = {clip_norm!r}: must be positive.")
    if isinstance(microbatch_size, str) and microbatch_size != "auto":
        raise ValueError(f"microbatch_size = {microbatch_size!r}: must be a whole number, None or 'auto'.")
    options = _Options(
        statistics=as_statistics(statistics),
        method=method,
        roles=Roles.make(argnums, batch_argnums, rng_argnums),
        parameters=parameter_filter(parameters),
        has_aux=has_aux,
        group_size=group_size,
        microbatch_size=microbatch_size,
        unit=unit,
        token_fallback=token_fallback,
        reduction=reduction,
        norms=norms,
        clip_norm=clip_norm,
        non_finite=non_finite,
        strict=strict,
    )
    if unit == "token":
        _check_token_options(options)
    return Compute(loss_fn, options)


def _check_token_options(options: _Options) -> None:
    wrong = {
        "method='surgery'": options.method != "surgery",
        "group_size=1": options.group_size != 1,
        "clip_norm=None": options.clip_norm is not None,
    }
    for needed, broken in wrong.items():
        if broken:
            raise ValueError(f"unit='token' needs {needed}: examples' gradients are not formed.")
    for s in options.statistics:
        if not s.factorable:
            raise ValueError(
                f"unit='token': statistic {s.name!r} is not factorable, φ(ab) = φ(a)φ(b), which the sum over positions "
                "φ(S)ᵀφ(R) rests on. If it is, say Statistic(..., factorable=True)."
            )


@dataclasses.dataclass(frozen=True)
class Account:
    """How a call computes: the form of each gradient, per pass, and the microbatch sizes by platform."""

    forms: list[Reduced]
    norm_forms: list[Reduced] | None
    microbatch_sizes: dict[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Compute:
    """What `grad_statistics` returns: call it with the loss's arguments."""

    loss_fn: Callable[..., Any]
    options: _Options
    _sizes: dict[Any, dict[str, int]] = dataclasses.field(default_factory=dict)

    def __call__(
        self, *arguments: Any, weights: jax.Array | None = None, first_index: Any = 0, shift: Any = None
    ) -> tuple[GradStatistics, PerExample]:
        """The statistics for these arguments of the loss.

        Args:
          weights: one per example, outside φ; 0 leaves an example out. Within a group, h_j is the weighted mean and w_j
            the mean of its weights.
          first_index: of the batch's first example in the global batch; example i's key is fold_in(key, first_index + i).
          shift: a tree like the parameters, near the mean gradient (that of an earlier step): mean and mean square are
            accumulated as those of g − shift, so that the variance keeps its digits where |μ| is much larger than σ.
        """
        return self._run(arguments, weights, first_index, shift)[:2]

    def account(self, *arguments: Any) -> Account:
        """How these arguments (or their shapes) are computed; nothing is run."""
        seen: list[Account] = []
        jax.eval_shape(lambda *traced: seen.append(self._run(traced, None, 0, None)[2]), *arguments)
        return seen[0]

    def _run(self, arguments: tuple[Any, ...], weights: Any, first_index: Any, shift: Any) -> Any:
        call = _Call.make(self.loss_fn, self.options, arguments, weights, first_index, shift)
        if self.options.microbatch_size != "auto":
            return _finish(call, *_accumulate(call, call.inputs, call.microbatch))
        key = call.shapes()
        if key not in self._sizes:
            self._sizes[key] = call.automatic_sizes()
            _log.info("microbatch_size='auto': examples at a time: %s", self._sizes[key])
        sizes = self._sizes[key]
        forms: list[Any] = []

        def at(platform: str) -> Callable[..., Any]:
            def run(inputs: _Inputs) -> Any:
                *results, account = _accumulate(call, inputs, sizes[platform] // self.options.group_size)
                forms.append(account)
                return tuple(results)

            return run

        if len(set(sizes.values())) == 1:
            results = at("cpu")(call.inputs)
        else:
            by_platform = {name: at(name) for name in sizes}
            results = jax.lax.platform_dependent(call.inputs, **by_platform)
        return _finish(call, *results, dataclasses.replace(forms[-1], microbatch_sizes=sizes))


# --- one call ---------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Arrays of a call; those of units have a leading axis M, then one of the b examples."""

    differentiated: list[Any]  # selected leaves
    others: Any
    batch: Any
    indices_Mxb: jax.Array
    weights_Mxb: jax.Array | None
    shift: list[Any] | None


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call's arguments, checked and laid out."""

    loss_fn: Callable[..., Any]
    options: _Options
    selected: Selected
    arity: int
    count: int
    microbatch: int  # units at a time
    inputs: _Inputs

    @classmethod
    def make(
        cls, loss_fn: Any, options: _Options, arguments: tuple[Any, ...], weights: Any, first_index: Any, shift: Any
    ) -> _Call:
        roles, b = options.roles, options.group_size
        count = num_examples(arguments, roles)
        check_divides("group_size", b, "the number of examples", count)
        units = micro = count // b
        if isinstance(options.microbatch_size, int | np.integer):
            check_divides("microbatch_size", options.microbatch_size, "the number of examples", count)
            check_divides("group_size", b, "microbatch_size", options.microbatch_size)
            micro = int(options.microbatch_size) // b
        elif options.microbatch_size not in (None, "auto"):
            check_divides("microbatch_size", options.microbatch_size, "the number of examples", count)
        selected = Selected.make(arguments, roles, options.parameters)
        indices = jnp.asarray(first_index, jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)
        rows = jax.tree.map(
            lambda x: jnp.reshape(x, (units, b, *jnp.shape(x)[1:])), tuple(arguments[i] for i in roles.batch_argnums)
        )
        inputs = _Inputs(
            differentiated=selected.leaves(arguments),
            others=selected.others(arguments),
            batch=rows,
            indices_Mxb=indices.reshape(units, b),
            weights_Mxb=_weights(weights, count, b),
            shift=None if shift is None else selected.like_parameters(shift, "shift"),
        )
        if inputs.shift is not None and options.unit == "token":
            raise ValueError("unit='token' takes no shift.")
        if inputs.shift is not None and not {s.name for s in options.statistics}.issuperset(SHIFTABLE):
            raise ValueError(f"shift needs the statistics {' and '.join(SHIFTABLE)}: ask for both.")
        return cls(loss_fn, options, selected, len(arguments), count, micro, inputs)

    def shapes(self) -> Any:
        leaves, tree = jax.tree.flatten(self.inputs)
        return tree, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)

    def automatic_sizes(self) -> dict[str, int]:
        """Examples at a time, by platform."""
        program, _ = _trace(self.unit_gradient(), self.inputs)
        parameters = sum(jnp.size(x) for x in self.inputs.differentiated)
        units = self.inputs.indices_Mxb.shape[0]
        chosen = microbatch.choose(program, units, parameters)
        return {platform: size * self.options.group_size for platform, size in chosen.items()}

    def unit_gradient(self) -> Callable[..., Any]:
        """(differentiated, others, batch, indices, weights) of one unit -> ((its loss, (losses, aux)), gradients)."""
        roles, options = self.options.roles, self.options
        scale = self.count if options.reduction == "sum" else 1

        def example(differentiated: Any, others: Any, row: Any, index: jax.Array) -> Any:
            full = self.selected.fill(differentiated, others, self.arity)
            for i in roles.rng_argnums:
                full[i] = jax.random.fold_in(full[i], index)
            for i, a in zip(roles.batch_argnums, row, strict=True):
                full[i] = jax.tree.map(lambda x: x[None], a)
            out = self.loss_fn(*full)
            loss, aux = out if options.has_aux else (out, None)
            return _scalar(loss), aux

        def unit(differentiated: Any, others: Any, batch: Any, indices_b: jax.Array, weights_b: Any) -> Any:
            if indices_b.shape[0] == 1:
                loss, aux = example(differentiated, others, jax.tree.map(lambda x: x[0], batch), indices_b[0])
                return scale * loss, (loss[None], jax.tree.map(lambda x: jnp.asarray(x)[None], aux))
            if weights_b is not None:
                # An example that is left out is replaced by one that is not: its NaN stay out of the gradient as well.
                stand_in = jnp.where(weights_b != 0, jnp.arange(weights_b.shape[0]), jnp.argmax(weights_b != 0))
                batch = jax.tree.map(lambda x: x[stand_in], batch)
            losses_b, aux_b = jax.vmap(lambda row, i: example(differentiated, others, row, i))(batch, indices_b)
            if weights_b is None:
                return scale * jnp.mean(losses_b), (losses_b, aux_b)
            total = jnp.sum(weights_b)
            share_b = weights_b / _one_if_zero(total)
            return scale * jnp.sum(share_b.astype(losses_b.dtype) * losses_b), (losses_b, aux_b)

        return jax.value_and_grad(unit, has_aux=True)


def _weights(weights: Any, count: int, b: int) -> jax.Array | None:
    if weights is None:
        return None
    weights = jnp.asarray(weights)
    if weights.shape != (count,):
        raise ValueError(f"weights has shape {weights.shape}: one per example is needed, ({count},).")
    return weights.astype(jnp.promote_types(weights.dtype, jnp.float32)).reshape(-1, b)


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


def _accumulate(call: _Call, inputs: _Inputs, micro: int) -> tuple[Any, Any, Account]:
    """(sums over all units, per-unit losses and norms, how)."""
    units = inputs.indices_Mxb.shape[0]
    rows = (inputs.batch, inputs.indices_Mxb, inputs.weights_Mxb)

    def part(rows: Any, initial: Any) -> tuple[dict[str, Any], Any, Account]:
        batch, indices, weights = rows
        return _chunk(call, dataclasses.replace(inputs, batch=batch, indices_Mxb=indices, weights_Mxb=weights), initial)

    if micro == units:
        sums, per_unit, account = part(rows, None)
    else:
        xs = jax.tree.map(lambda x: x.reshape(units // micro, micro, *x.shape[1:]), rows)
        seen: list[Account] = []

        def add(total: Any, x: Any) -> tuple[Any, Any]:
            sums, per_unit, account = part(x, total["raw"])
            seen[:] = [account]
            counts = {k: total[k] + v for k, v in sums.items() if k != "raw"}
            return {"raw": sums["raw"], **counts}, per_unit

        shapes = jax.eval_shape(lambda x: part(x, None)[0], jax.tree.map(lambda x: x[0], xs))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        sums, per_unit = jax.lax.scan(add, zeros, xs)
        per_unit = jax.tree.map(lambda x: x.reshape(units, *x.shape[2:]), per_unit)
        account = seen[0]
    sums["statistics"] = [r.finish(raw) for r, raw in zip(account.forms, sums.pop("raw"), strict=True)]
    account = dataclasses.replace(account, microbatch_sizes={"default": micro * call.options.group_size})
    return sums, per_unit, account


def _chunk(call: _Call, inputs: _Inputs, initial: Any) -> tuple[dict[str, Any], Any, Account]:
    """Sums over the units given, added to `initial` (raw sums per gradient); and per-unit losses, norms, aux."""
    options, gradient = call.options, call.unit_gradient()
    units = inputs.indices_Mxb.shape[0]
    methods = {"surgery": _by_surgery, "vmap": _by_vmap, "loop": _by_loop}
    unit_weights = None if inputs.weights_Mxb is None else jnp.mean(inputs.weights_Mxb, axis=1)
    norms, scales, first = None, None, None
    if options.passes == 2:
        reducer = Reducer((), units, None, None, True)
        (losses, _), first = methods[options.method](gradient, reducer, inputs, None)
        norms = jnp.sqrt(sum(r.squares_N for r in first))
        if options.non_finite == "skip":
            finite = jnp.isfinite(norms) & jnp.all(jnp.isfinite(losses), axis=1)
            unit_weights = jnp.where(finite, 1.0 if unit_weights is None else unit_weights, 0.0)
        if options.clip_norm is not None:
            scales = jnp.minimum(1.0, options.clip_norm / jnp.maximum(norms, jnp.finfo(norms.dtype).tiny))
    wants_norms = options.passes == 1 and (options.norms or options.non_finite == "raise")
    reducer = Reducer(options.statistics, units, unit_weights, scales, wants_norms, options.unit)
    (losses, aux), reduced = methods[options.method](gradient, reducer, inputs, initial)
    if wants_norms:
        norms = jnp.sqrt(sum(r.squares_N for r in reduced))
    finite = jnp.all(jnp.isfinite(losses), axis=1)
    if norms is not None:
        finite &= jnp.isfinite(norms)
    w = jnp.ones(units) if unit_weights is None else unit_weights
    w_Mxb = jnp.ones(inputs.indices_Mxb.shape) if inputs.weights_Mxb is None else inputs.weights_Mxb
    w_Mxb = jnp.where((w != 0)[:, None], w_Mxb, 0.0)
    squares, totals = jnp.sum(jnp.square(w_Mxb), axis=1), jnp.sum(w_Mxb, axis=1)
    sums = {
        "raw": [r.raw for r in reduced],
        "unit_weight": jnp.sum(w),
        "weight": jnp.sum(totals),
        "weight_square": jnp.sum(squares),
        "noise": jnp.sum(squares / _one_if_zero(totals)),
        "units": jnp.sum(w != 0),
        "examples": jnp.sum(w_Mxb != 0),
        "non_finite": jnp.sum(~finite),
    }
    if options.unit == "token":
        positions = [r.positions_N for r in reduced if r.positions_N is not None]
        most = jnp.max(jnp.stack(positions), axis=0) if positions else jnp.ones(units, jnp.int32)
        sums["position_weight"] = jnp.sum(w * most)
        sums["position_weight_square"] = jnp.sum(jnp.square(w) * most)
        sums["positions"] = jnp.sum(jnp.where(w != 0, most, 0))
    if inputs.weights_Mxb is not None and inputs.weights_Mxb.shape[1] > 1:  # a stand-in's loss is not the example's
        losses, aux = jax.tree.map(lambda x: _blanked(x, inputs.weights_Mxb != 0), (losses, aux))
    norms = norms if options.norms or options.passes == 2 else None
    per_unit = {"losses": losses, "aux": aux, "norms": norms, "bad": ~finite & (w != 0)}
    return sums, per_unit, Account(reduced, first, {})


# --- the methods ------------------------------------------------------------------------------------------------------


def _unit_rows(inputs: _Inputs) -> tuple[Any, ...]:
    """What differs between units, and is given to the gradient."""
    return inputs.batch, inputs.indices_Mxb, inputs.weights_Mxb if inputs.indices_Mxb.shape[1] > 1 else None


def _trace(gradient: Any, inputs: _Inputs) -> tuple[Any, Any]:
    """The gradient program of one unit, calls inlined, and the shapes of its results."""
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), _unit_rows(inputs))
    program, out = jax.make_jaxpr(gradient, return_shape=True)(inputs.differentiated, inputs.others, *row)
    return jaxprs.inline(program), out


def _by_surgery(gradient: Any, reducer: Reducer, inputs: _Inputs, initial: Any) -> tuple[Any, list[Reduced]]:
    program, out = _trace(gradient, inputs)
    leaves, tree = jax.tree.flatten(out)
    num_grads = len(inputs.differentiated)
    first = len(leaves) - num_grads
    shared = jax.tree.leaves((inputs.differentiated, inputs.others))
    batched = jax.tree.leaves(_unit_rows(inputs))
    wanted = {
        first + i: surgery.Wanted(
            initial=None if initial is None else initial[i],
            shift=None if inputs.shift is None or not reducer.statistics else inputs.shift[i],
        )
        for i in range(num_grads)
    }
    with jax.named_scope("per_example_statistics"):
        flags = [False] * len(shared) + [True] * len(batched)
        results, result_flags, reduced = surgery.run(program, [*shared, *batched], flags, wanted, reducer)
    results = [
        None if i >= first else r if f else jnp.broadcast_to(r, (reducer.num_examples, *jnp.shape(r)))
        for i, (r, f) in enumerate(zip(results, result_flags, strict=True))
    ]
    (_, per_unit), _ = jax.tree.unflatten(tree, results)
    return per_unit, [reduced[first + i] for i in range(num_grads)]


def _by_vmap(gradient: Any, reducer: Reducer, inputs: _Inputs, initial: Any) -> tuple[Any, list[Reduced]]:
    """A reference: all gradients, then φ, then the sum."""
    rows = _unit_rows(inputs)
    in_axes = (None, None, *(None if r is None else 0 for r in rows))
    (_, per_unit), grads = jax.vmap(gradient, in_axes=in_axes)(inputs.differentiated, inputs.others, *rows)
    reduced = [
        reducer.all_at_once(
            g,
            "vmap",
            initial=None if initial is None else initial[i],
            shift=None if inputs.shift is None else inputs.shift[i],
        )
        for i, g in enumerate(grads)
    ]
    return per_unit, reduced


def _by_loop(gradient: Any, reducer: Reducer, inputs: _Inputs, initial: Any) -> tuple[Any, list[Reduced]]:
    """The reference: a Python loop over units, one gradient each."""
    per_unit, totals, squares = [], initial, []
    for j in range(reducer.num_examples):
        rows = jax.tree.map(lambda x, j=j: x[j], _unit_rows(inputs))
        (_, mine), grads = gradient(inputs.differentiated, inputs.others, *rows)
        weight, scale = (None if x is None else x[j : j + 1] for x in (reducer.weights_N, reducer.scales_N))
        alone = dataclasses.replace(reducer, num_examples=1, weights_N=weight, scales_N=scale)
        reduced = [
            alone.all_at_once(
                g[None],
                "loop",
                initial=None if totals is None else totals[i],
                shift=None if inputs.shift is None else inputs.shift[i],
            )
            for i, g in enumerate(grads)
        ]
        totals = [r.raw for r in reduced]
        per_unit.append(mine)
        squares.append([r.squares_N for r in reduced])
    stack = lambda *x: jnp.stack(x)  # noqa: E731
    for i, r in enumerate(reduced):
        r.squares_N = jnp.concatenate([s[i] for s in squares]) if reducer.norms else None
    return jax.tree.map(stack, *per_unit), reduced


# --- results ----------------------------------------------------------------------------------------------------------


def _finish(call: _Call, sums: dict[str, Any], per_unit: Any, account: Account) -> Any:
    options = call.options
    _check_forms(options, account.forms, call.selected.names)
    units, b = call.inputs.indices_Mxb.shape[0], options.group_size
    weight_sum, weight_square_sum, noise = sums["weight"], sums["weight_square"], sums["noise"]
    if options.unit == "token":
        weight_sum, weight_square_sum = sums["position_weight"], sums["position_weight_square"]
        noise = weight_sum
    unit_scale = weight_sum / _one_if_zero(sums["unit_weight"])  # tokens: real positions per example
    averages: dict[str, Any] = {}
    for k, s in enumerate(options.statistics):
        leaves = []
        for r, values in zip(account.forms, sums["statistics"], strict=True):
            per_token = r.positions_N is not None
            value, weight = values[k], weight_sum if per_token else sums["unit_weight"]
            if per_token:
                value = value * s.fn(unit_scale.astype(value.dtype))
            inverse = jnp.where(weight != 0, 1.0 / _one_if_zero(weight), 0.0)
            leaves.append(value * inverse.astype(value.dtype))
        averages[s.name] = leaves
    centered = None
    if call.inputs.shift is not None:
        centered = {name: averages[name] for name in SHIFTABLE if name in averages}
        averages.update(unshifted(centered, call.inputs.shift))
        centered = call.selected.trees({**centered, "shift": call.inputs.shift})
    every = options.non_finite != "skip" and call.inputs.weights_Mxb is None
    num_groups, count = (np.int32(units), np.int32(call.count)) if every else (sums["units"], sums["examples"])
    if options.unit == "token":
        num_groups = sums["positions"]
    statistics = GradStatistics(
        call.selected.trees(averages), count, num_groups, weight_sum, weight_square_sum, b, noise, centered
    )
    flat = jax.tree.map(lambda x: x.reshape(call.count, *x.shape[2:]), (per_unit["losses"], per_unit["aux"]))
    if options.non_finite == "raise":
        _raise_if_non_finite(per_unit["bad"])
    return statistics, PerExample(flat[0], per_unit["norms"], flat[1], sums["non_finite"]), account


def _one_if_zero(x: jax.Array) -> jax.Array:
    return jnp.where(x != 0, x, 1.0)


def _blanked(x: jax.Array, keep_Mxb: jax.Array) -> jax.Array:
    """NaN (or 0) for the examples that are not kept."""
    nothing = jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
    return jnp.where(keep_Mxb.reshape(*keep_Mxb.shape, *(1,) * (x.ndim - 2)), x, jnp.asarray(nothing, x.dtype))


def _check_forms(options: _Options, forms: Sequence[Reduced], names: Sequence[str]) -> None:
    for name, r in zip(names, forms, strict=True):
        if r.form == MIXED_UNITS:
            raise ValueError(
                f"unit='token': parts of parameter {name} have positions and others do not; leave it out with parameters=..."
            )
        if options.strict and r.form == "kept":
            raise ValueError(
                f"strict=True: the gradient of parameter {name} {r.note}, so it would be held for all examples "
                f"({r.transient_bytes:,} bytes). Without strict=True it is, exactly."
            )
        if options.unit == "token" and r.positions_N is None and r.form != "shared" and not options.token_fallback:
            raise ValueError(
                f"unit='token': the gradient of parameter {name} is not a sum over positions that could be told apart "
                f"({r.form}{': it ' + r.note if r.note else ''}). token_fallback=True takes the example as its unit; "
                "parameters=... leaves it out."
            )


def _raise_if_non_finite(bad_M: jax.Array) -> None:
    def check(bad_M: Any) -> None:
        found = np.flatnonzero(bad_M)
        if found.size:
            raise FloatingPointError(
                f"non_finite='raise': loss or gradient of {found.size} of {np.size(bad_M)} examples (groups) is not finite: "
                f"{', '.join(map(str, found[:10]))}{', ...' if found.size > 10 else ''}."
            )

    if isinstance(bad_M, jax.core.Tracer):
        jax.debug.callback(check, bad_M)
    else:
        check(bad_M)
