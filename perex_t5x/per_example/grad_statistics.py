"""`grad_statistics`: from a loss to statistics of its per-example gradients."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.per_example import metrics as metric_module
from perex_t5x.per_example.engine import explicit_axes
from perex_t5x.per_example.engine.accumulate import (
    Holding,
    ReductionTrace,
    accumulate,
    choose_holding,
    finish,
)
from perex_t5x.per_example.engine.arguments import (
    Roles,
    Selected,
    check_clip_norm,
    clips_by_parameter,
    closed_over,
    num_examples,
    parameter_filter,
)
from perex_t5x.per_example.engine.microbatch import automatic_sizes
from perex_t5x.per_example.engine.references import METHODS
from perex_t5x.per_example.engine.request import (
    Inputs,
    Options,
    Request,
)
from perex_t5x.per_example.metrics import Metric
from perex_t5x.per_example.reductions import held
from perex_t5x.per_example.results import GradStatistics, PerExample
from perex_t5x.per_example.statistic import Statistic, canonical

NON_FINITE = ("keep", "skip", "raise")
REDUCTIONS = ("mean", "sum")
UNITS = ("example", "token")
CLIP_STRATEGIES = ("auto", *held.STRATEGIES)

_log = logging.getLogger(__name__)


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
    clip_norm: Any = None,
    metrics: str | Metric | Iterable[str | Metric] = (),
    non_finite: str = "keep",
    strict: bool = False,
    data_axes: str | Sequence[str] = (),
    transport_dtype: Any = None,
    shardings: Any = None,
    kernels: bool = True,
    clip_memory: float = held.CLIP_MEMORY,
    clip_strategy: str = "auto",
) -> Compute:
    """Returns `compute(params, batch, ..., weights=None) -> (GradStatistics, PerExample)`.

    Statistical definition. With g_i the gradient of example i's loss, scaled so that mean(g_i) is the gradient of the batch
    loss, and h_j the mean of g over the j-th group of `group_size` consecutive examples:

        stats[name] = Σ_j w_j φ(h_j) / Σ_j w_j        elementwise, in at least float32

    Args:
      loss_fn: loss_fn(params, batch, ...) -> loss, or (loss, aux). Called with one example, its leading axis kept.
      statistics: names ('mean', 'mean_square', 'mean_sign') or `Statistic` objects.
      method: 'surgery'; or a reference: 'vmap', which materialises every example's gradient; 'map', one example after
        another on the device, for losses that cannot be batched (`jax.lax.ragged_dot`) or whose effects are ordered; or
        'loop', a Python loop.
      argnums, batch_argnums: what is differentiated, and what has an axis of examples.
      has_aux: whether the loss returns (loss, aux).
      group_size: b consecutive examples form one unit.
      microbatch_size: examples at a time; None: all; 'auto': see `perex_t5x.per_example.engine.microbatch`.
        Changes no number beyond rounding.
      unit: 'example'; or 'token': one application position of a weight (`perex_t5x.per_example.reductions.tokens`).
      token_fallback: with unit='token', take the example as the unit where a parameter has no positions; else an error.
      reduction: what the batch loss is of the examples' losses: their 'mean', or their 'sum' (then g_i = B ∇ℓ_i).
      rng_argnums: PRNG keys, or trees of them; example i gets fold_in(key, i).
      parameters: which parameters, by name ('layers/w'): a regular expression to search for, or a function. The others
        are held constant, and the statistics have None in their place.
      norms: also the norm of each unit's gradient (before clipping).
      clip_norm: each h_j is scaled to at most this norm, inside φ: a number, which may be traced. Or by parameter: a tree
        like the parameters, of numbers, each for the norm of that parameter's own gradient; or a function from one unit's
        norms, a tree like the parameters, to the factor of its gradient, or to a tree of factors. Needs the norms first.
        `stats.sensitivity` then says how far one example can move the mean and the sum (`per_example.Sensitivity`).
      metrics: numbers of each unit's whole gradient before clipping, in `aux.metrics[name]`: names ('norm', 'squared_norm',
        'parameter_norms', 'cosine_to_mean', 'gram') or `Metric` objects (`perex_t5x.per_example.metrics`). With them
        `statistics` may be empty.
      non_finite: 'keep'; 'skip': units whose loss or gradient norm is not finite are left out, which needs the norms first
        as well; or 'raise'.
      strict: an error, naming the parameter, where a gradient would have to be materialised for all examples.
      data_axes: inside `jax.shard_map`, the mesh axes over which devices share the batch. The statistics are then those of
        all devices' examples, the same on each; parameters may be gathered inside the loss (FSDP), and each device then gets
        the statistics of its own part. Without `data_axes` they are of this device's examples.
      transport_dtype: dtype in which sums travel between devices, such as jnp.bfloat16: see `per_example.collectives`. None:
        their own.
      shardings: a tree like the parameters, of `PartitionSpec` (inside `shard_map`, over its automatic axes) or
        `NamedSharding`: of the sums. With tensor parallelism give the parameters' shardings; without them the compiler may
        let every device compute all of the sums. Changes no number beyond rounding.
      kernels: on TPUs, Pallas kernels for the matrix products that they can take (`coverage` says which); False: XLA's loop
        for the same sums everywhere. Changes no number beyond rounding.
      clip_memory: where norms come first: bytes that may be held on a device from the norms to the statistics, 4 GiB unless
        given, so that one backward pass is enough. Where more would be needed, losses and gradients are computed twice.
        A smaller `microbatch_size` needs less. Changes no number beyond rounding.
      clip_strategy: 'auto'; or, whatever its memory, 'gradients', 'factors' or 'two passes'
        (`perex_t5x.per_example.reductions.held`).

    >>> import jax.numpy as jnp
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
        ("clip_strategy", clip_strategy, CLIP_STRATEGIES),
    ):
        if value not in known:
            raise ValueError(f"{name} = {value!r}: must be one of {', '.join(known)}.")
    if clip_norm is not None and not callable(clip_norm) and not clips_by_parameter(clip_norm):
        check_clip_norm(clip_norm)
    if isinstance(clip_memory, bool) or not isinstance(clip_memory, int | float) or not clip_memory >= 0:
        raise ValueError(f"clip_memory = {clip_memory!r}: must be a number of bytes, 0 or more.")
    if isinstance(microbatch_size, str) and microbatch_size != "auto":
        raise ValueError(f"microbatch_size = {microbatch_size!r}: must be a whole number, None or 'auto'.")
    wanted, measured = canonical(statistics), metric_module.canonical(metrics)
    if not wanted and not measured:
        raise ValueError("statistics is empty: give at least one, for instance ('mean', 'mean_square'), or metrics.")
    options = Options(
        statistics=wanted,
        metrics=measured,
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
        data_axes=(data_axes,) if isinstance(data_axes, str) else tuple(data_axes),
        transport=None if transport_dtype is None else _float_dtype(transport_dtype),
        shardings=shardings,
        kernels=kernels,
        clip_memory=clip_memory,
        clip_strategy=clip_strategy,
    )
    if unit == "token":
        _check_token_options(options)
    return Compute(loss_fn, options)


def _float_dtype(dtype: Any) -> Any:
    try:
        if jnp.issubdtype(dtype, jnp.floating):
            return jnp.dtype(dtype)
    except TypeError:
        pass
    raise ValueError(f"transport_dtype = {dtype!r}: must be a floating dtype, such as jnp.bfloat16, or None.")


def _check_token_options(options: Options) -> None:
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


@dataclasses.dataclass(frozen=True, eq=False)
class Compute:
    """What `grad_statistics` returns: call it with the loss's arguments."""

    loss_fn: Callable[..., Any]
    options: Options
    _sizes: dict[Any, dict[str, int]] = dataclasses.field(default_factory=dict)
    _holdings: dict[Any, Holding] = dataclasses.field(default_factory=dict)

    def __call__(
        self,
        *arguments: Any,
        weights: jax.Array | Callable[[Any, Any], Any] | None = None,
        first_index: Any = 0,
        operands: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> tuple[GradStatistics, PerExample]:
        """The statistics for these arguments of the loss, positional and by keyword.

        As under `jax.grad`, keyword arguments are the same for all examples, and what is no array reaches the loss as it is.

        Args:
          weights: one per example, outside φ; 0 leaves an example out (booleans: False is padding). Within a group, h_j is
            the weighted mean and w_j the mean of its weights. Or a function of one example's (group's) loss and gradient
            norm, two numbers, that gives its weight: it needs the norms first.
          first_index: of the batch's first example in the global batch; example i's key is fold_in(key, first_index + i).
            With `data_axes` the devices' parts are counted automatically.
          operands: name -> a tree like the parameters, for statistics and metrics that see more than the gradient
            (`Statistic.operands`, `Metric.operands`).
        """
        loss_fn, arguments = closed_over(self.loss_fn, arguments, keywords, self.options.roles)
        if (mesh := explicit_axes.mesh_of((arguments, weights))) is not None:
            return self._with_explicit_axes(mesh, loss_fn, arguments, weights, first_index, operands or {})
        return self._run(loss_fn, arguments, weights, first_index, operands or {})[:2]

    def _with_explicit_axes(
        self,
        mesh: Any,
        loss_fn: Callable[..., Any],
        arguments: tuple[Any, ...],
        weights: Any,
        first_index: Any,
        operands: Mapping[str, Any],
    ) -> tuple[GradStatistics, PerExample]:
        """See `engine.explicit_axes`: each device computes the statistics of the examples that it has."""
        options, roles = self.options, self.options.roles
        count = num_examples(arguments, roles)
        selected = Selected.make(arguments, roles, options.parameters)
        first_leaf = jax.tree.leaves(arguments[roles.batch_argnums[0]])[0]
        lies = explicit_axes.Layout.of(mesh, first_leaf, count // options.group_size if options.group_size else 0)
        mine = dataclasses.replace(options, data_axes=(*options.data_axes, *lies.data_axes))
        compute = dataclasses.replace(self, options=mine, _sizes={}, _holdings={})
        known: dict[str, Any] = {}
        weight_fn = weights if callable(weights) else None
        weights = None if callable(weights) else weights

        def run(arguments: tuple[Any, ...], weights: Any, first_index: Any, operands: Any) -> Any:
            weights = weight_fn or weights
            statistics, per_unit = compute._run(loss_fn, arguments, weights, first_index, operands)[:2]
            # Counts that are known without computing stay so: what asks for two examples can then say that there is one.
            known.update(
                {k: v for k in ("count", "num_groups") if not isinstance(v := getattr(statistics, k), jax.Array)}
            )
            known["sensitivity"] = statistics.sensitivity
            return dataclasses.replace(statistics, sensitivity=None), per_unit

        def results(averages: Any, examples: Any, groups: Any, whole: Any) -> tuple[GradStatistics, PerExample]:
            statistics = GradStatistics(averages, whole, whole, whole, whole, options.group_size, whole)
            return statistics, PerExample(examples, groups, examples, whole, groups)

        batched = tuple(i in roles.batch_argnums for i in range(len(arguments)))
        like = [lies.sharding_of(x) for x in selected.leaves(arguments)]
        averages = selected.trees({s.name: like for s in options.statistics})
        given = (arguments, weights, jnp.asarray(first_index, jnp.uint32), dict(operands))
        statistics, per_unit = lies.run(run, given, (batched, True, False, False), results, averages)
        return dataclasses.replace(statistics, **known), per_unit

    def trace(self, *arguments: Any, **keywords: Any) -> ReductionTrace:
        """How these arguments (or their shapes) are computed; nothing is run. Operands are like the parameters."""
        seen: list[ReductionTrace] = []
        loss_fn, arguments = closed_over(self.loss_fn, arguments, keywords, self.options.roles)
        roles, names = self.options.roles, self.options.operand_names

        def run(*traced: Any) -> None:
            like = traced[roles.argnums[0]] if roles.single else tuple(traced[i] for i in roles.argnums)
            seen.append(self._run(loss_fn, traced, None, 0, dict.fromkeys(names, like))[2])

        if explicit_axes.mesh_of(arguments) is not None:  # where arrays lie changes no reduction
            arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), arguments)
        jax.eval_shape(run, *arguments)
        return seen[0]

    def _run(
        self,
        loss_fn: Callable[..., Any],
        arguments: tuple[Any, ...],
        weights: Any,
        first_index: Any,
        operands: Mapping[str, Any],
    ) -> Any:
        if self.options.needs_mean and metric_module.BATCH_MEAN not in operands:
            alone = dataclasses.replace(self.options, statistics=canonical("mean"), metrics=(), norms=False)
            before = Compute(self.loss_fn, alone)._run(loss_fn, arguments, weights, first_index, {})[0]
            operands = {**operands, metric_module.BATCH_MEAN: before.mean}
        request = Request.make(loss_fn, self.options, arguments, weights, first_index, operands)
        key = request.shapes()
        if self.options.microbatch_size != "auto":
            holding = self._holding(request, key, request.microbatch)
            return finish(request, *accumulate(request, request.inputs, request.microbatch, holding))
        if key not in self._sizes:
            self._sizes[key] = automatic_sizes(request)
            _log.info("microbatch_size='auto': examples at a time: %s", self._sizes[key])
        sizes = self._sizes[key]
        holdings = {p: self._holding(request, key, size // self.options.group_size) for p, size in sizes.items()}
        traces: list[ReductionTrace] = []

        def at(platform: str) -> Callable[..., Any]:
            def run(inputs: Inputs) -> Any:
                *results, how = accumulate(
                    request, inputs, sizes[platform] // self.options.group_size, holdings[platform]
                )
                traces.append(how)
                return tuple(results)

            return run

        # The platform is known when the program is lowered, not here: each has a program of its own, unless all agree.
        if len(set(sizes.values())) == 1:
            results = at("cpu")(request.inputs)
        else:
            by_platform = {name: at(name) for name in sizes}
            results = jax.lax.platform_dependent(request.inputs, **by_platform)
        sums, per_unit = results
        return finish(
            request, sums, per_unit, dataclasses.replace(traces[-1], microbatch_sizes=sizes, holdings=holdings)
        )

    def _holding(self, request: Request, shapes: Any, micro: int) -> Holding:
        if (shapes, micro) not in self._holdings:
            self._holdings[shapes, micro] = choose_holding(request, micro)
            if request.norms_first:
                _log.info("norms first, %d units at a time: %s", micro, self._holdings[shapes, micro])
        return self._holdings[shapes, micro]
