"""Reductions: the ways to compute Σ_n w_n φ(g_n) without holding all g_n. What they share, and the generic ones.

| reduction | when | cost |
|---|---|---|
| `one at a time` | a producer larger than its inputs; a filter, on CPUs | one gradient, or a tile of it, and the sums |
| `all at once` | a producer smaller than its inputs (biases, norms' scales) | N × a small gradient |
| `factored` | one product of two vectors, all φ factorable | φ(S)ᵀ φ(R): one more matrix product per φ |
| `sparse` | scatter-adds of rows into one table (embedding) | rows of equal id summed, φ, one scatter-add per φ |
| `sparse + dense` | a tied embedding | the dense reduction, and a correction at the rows in use |
| `gram` | only norms are wanted of a matrix product with a short sequence | N × sequence² |
| `per token` | unit='token' | φ(S)ᵀ φ(R) over examples and positions |
| `shared` | a gradient that is the same for all examples | φ once |
| `held` | norms come first, and gradients are kept until then (`reductions.held`) | N × the gradient |
| `materialised` | what could not be followed | N × the parameter |

Every reduction adds to `ReductionSpec.initial` where given, so that microbatches accumulate in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from perex_t5x.per_example.engine import jaxprs, shard_map
from perex_t5x.per_example.engine.cones import Cone
from perex_t5x.per_example.engine.plan import Joint, Materialized, Producer
from perex_t5x.per_example.engine.shard_map import AutoSharding, constrain
from perex_t5x.per_example.metrics import POSITIONS, Metric
from perex_t5x.per_example.reductions import windows
from perex_t5x.per_example.statistic import Statistic

MATERIALISED = "materialised"
SHARED = "shared"
MIXED_UNITS = "partly per token"
Unary = Callable[[jax.Array], jax.Array]
Again = Callable[["ReductionContext", Any, Any], "ReductionResult"]


def itself(x: jax.Array) -> jax.Array:
    return x


def at_least_f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@dataclasses.dataclass
class ReductionResult:
    """Σ_n w_n φ_k(g_n) per statistic, Σ g_n² per example (or None), and how it was done.

    Attributes:
      raw: the sums as they are accumulated: arrays in the order of elements in which the gradient is produced.
      reduction: see the table in the module's docstring.
      transient_bytes: of gradients that exist at a time, besides the sums.
      note: why it is not a better reduction.
      finish: from `raw` to one array per statistic, like the parameter.
      positions_N: with unit='token', the real positions of each example; None where the unit is the example.
      summed_over: mesh axes over which the sums are of all devices' examples already.
      kernel: why TPUs use XLA's loop and not the kernel; '' where they use the kernel, None where there is no kernel.
      held, again: in a pass for norms that keeps what the statistics can be formed from: the arrays, and the function
        (context, held, sums to add to) -> ReductionResult. `again` closes over no arrays; None where nothing is kept.
      metrics: name -> [N, ...], this parameter's values before `Metric.combine` (`reductions.measures`).
    """

    raw: Any
    squares_N: jax.Array | None
    reduction: str
    transient_bytes: int
    note: str = ""
    finish: Callable[[Any], list[jax.Array]] = list
    positions_N: jax.Array | None = None
    summed_over: tuple[str, ...] = ()
    kernel: str | None = None
    held: Any = None
    again: Again | None = None
    metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    def then(self, fn: Unary) -> ReductionResult:
        """With `fn` applied to the finished sums."""
        finish, again = self.finish, self.again
        return dataclasses.replace(
            self,
            finish=lambda raw: [fn(x) for x in finish(raw)],
            again=None if again is None else lambda *arguments: again(*arguments).then(fn),
        )


@dataclasses.dataclass(frozen=True)
class ReductionContext:
    """What is wanted of the gradients of N examples, the same for every parameter. Passed as a whole to all that reduce.

    Attributes:
      statistics: the φ.
      weights_N: w_n, outside φ; None: all 1. Examples of weight 0 are selected away, so that their NaN do no harm.
      scales_N: c_n, inside φ (clipping): φ(c_n g_n); None: all 1. Norms are of the gradient before scaling.
      parameter_scales: parameter -> c_n of its own gradient (clipping by parameter), in place of `scales_N`.
      operands: name -> what φ sees besides the gradient, of the parameter (or part of it) at hand, in the order of elements
        in which its gradient is produced.
      norms: whether Σ g_n² is wanted.
      metrics: numbers of each g_n that are wanted besides, before scaling.
      hold: what to keep for statistics that are formed later: a strategy of `reductions.held`; '': nothing.
      unit: 'example' or 'token'.
      factor: of all sums, known beforehand: 1 / the number of all devices' examples makes them averages at no cost.
      kernels: whether TPUs may use Pallas kernels.
      varying: mesh axes over which values are known to differ (inside `shard_map` with check_vma=True).
      device_axes: mesh axes over which devices have examples of their own: the loss may not communicate over them.
      data_axes: those of them over which statistics are wanted of all devices' examples.
      transport: dtype in which sums travel between devices; None: their own.
      dtypes: what is known of φ's dtype; copies of this context, which have the same φ or none, share it.
    """

    statistics: Sequence[Statistic]
    num_examples: int
    weights_N: jax.Array | None = None
    scales_N: jax.Array | None = None
    parameter_scales: Mapping[str, jax.Array] | None = None
    operands: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    norms: bool = False
    metrics: Sequence[Metric] = ()
    hold: str = ""
    unit: str = "example"
    factor: float = 1.0
    kernels: bool = True
    varying: frozenset[str] = frozenset()
    device_axes: frozenset[str] = frozenset()
    data_axes: tuple[str, ...] = ()
    transport: Any = None
    dtypes: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def bound(self, parameter: str, operands: Mapping[str, jax.Array]) -> ReductionContext:
        """The same, of a parameter's gradient, whose statistics see these operands."""
        if self.parameter_scales is not None:
            alone = dataclasses.replace(self, scales_N=self.parameter_scales[parameter], parameter_scales=None)
            return alone.bound(parameter, operands)
        seen = {name: operands[name] for s in self.statistics for name in s.operands}
        return dataclasses.replace(self, operands=seen) if seen else self

    def seeing(self, operands: Mapping[str, jax.Array]) -> ReductionContext:
        """The same with other operands: those of a tile, or of rows."""
        return dataclasses.replace(self, operands=operands) if self.operands else self

    def phi(self, statistic: Statistic, g: jax.Array, scale: jax.Array | None) -> jax.Array:
        """φ(c g; operands), of one gradient or of several, [N, ...]."""
        g = g if scale is None else g * scale
        # As `jnp.square` does, but without a trace for every new shape.
        if statistic.fn is jnp.square:
            return jax.lax.square(g)
        return statistic.fn(g, *(jnp.broadcast_to(self.operands[name], g.shape) for name in statistic.operands))

    def weighted(self, x: jax.Array, weight: jax.Array | None) -> jax.Array:
        # The factor goes in here, where XLA fuses it with φ: dividing the finished sums would read and write them once more.
        if self.factor != 1.0:
            x = jax.lax.mul(x, np.asarray(self.factor, x.dtype))
        if weight is None:
            return x
        # Selected, not multiplied: 0 · NaN is NaN, and an example that is left out may well be NaN.
        return jnp.where(weight == 0, jnp.zeros_like(x), x * weight.astype(x.dtype))

    def total_weight(self, dtype: Any) -> jax.Array:
        if self.weights_N is None:
            return jnp.asarray(self.num_examples * self.factor, dtype)
        return (jnp.sum(self.weights_N) * self.factor).astype(dtype)

    def added(self, sums: Sequence[jax.Array], g: jax.Array, weight: Any, scale: Any) -> list[jax.Array]:
        """The sums with one example's gradient added."""
        scale = None if scale is None else scale.astype(g.dtype)
        # Both have φ's dtype. `lax`, here and above, since `jnp` takes ten times as long to trace for every new shape.
        return [
            jax.lax.add(total, self.weighted(self.phi(s, g, scale), weight))
            for total, s in zip(sums, self.statistics, strict=True)
        ]

    def begin(
        self, initial: Any, shape: Sequence[int], dtype: Any, sharding: AutoSharding | None = None
    ) -> list[jax.Array]:
        """The sums to start from: `initial`, or zeros of φ's dtype."""
        if initial is not None:
            return list(initial)
        dtypes = [self._dtype(s, shape, dtype) for s in self.statistics]
        return [constrain(self.zeros(shape, d), sharding) for d in dtypes]

    def _dtype(self, statistic: Statistic, shape: Sequence[int], dtype: Any) -> Any:
        """φ may return another dtype than the gradient's, and a loop's carry must have its final type from the start."""
        if statistic.operands:
            like = [jax.ShapeDtypeStruct(tuple(shape), x) for x in (dtype, *self.operand_dtypes(statistic))]
            return jax.eval_shape(statistic.fn, *like).dtype
        # Asked once of one element, whose shape is free, for all parameters.
        key = statistic.name, len(shape), dtype
        if key not in self.dtypes:
            self.dtypes[key] = jax.eval_shape(statistic.fn, jax.ShapeDtypeStruct((1,) * len(shape), dtype)).dtype
        return self.dtypes[key]

    def operand_dtypes(self, statistic: Statistic) -> list[Any]:
        return [self.operands[name].dtype for name in statistic.operands]

    def zeros(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        # A loop's carry must have the same type before and after a step, and the sums vary over devices.
        return shard_map.vary(jnp.zeros(shape, dtype), self.varying)

    def columns(self, ndim: int, dtype: Any) -> tuple[jax.Array | None, jax.Array | None]:
        """Scales (in this dtype) and weights as [N, 1, ...] with `ndim` axes."""
        scale, weight = column(self.scales_N, ndim), column(self.weights_N, ndim)
        return None if scale is None else scale.astype(dtype), weight

    def of_all_devices(self, axes: tuple[str, ...]) -> ReductionContext:
        """The same with the numbers of all devices' examples along these axes."""
        if not axes:
            return self
        gather = lambda x: None if x is None else jax.lax.all_gather(x, axes, tiled=True)  # noqa: E731
        return dataclasses.replace(
            self,
            num_examples=self.num_examples * shard_map.num_devices(axes),
            weights_N=gather(self.weights_N),
            scales_N=gather(self.scales_N),
        )


@dataclasses.dataclass(frozen=True)
class ReductionSpec:
    """How one result is to be reduced. The methods give the same one or more equations earlier, as the walk goes back.

    Attributes:
      pre: casts, signs and factors to apply before φ; linear.
      initial: sums to add to, as `ReductionResult.raw`; None: zeros.
      sharding: of the gradient and its sums over automatic mesh axes; None: as the compiler likes.
      sharded_over: the data axes over which devices have different parts of the parameter; None: not known.
      operands: of statistics and metrics that see more than the gradient, like the result, in its order of elements.
      parameter: the name of the parameter that the result is the gradient of, or a part of it.
    """

    pre: Unary = itself
    initial: Any = None
    sharding: AutoSharding | None = None
    sharded_over: tuple[str, ...] | None = None
    operands: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    parameter: str = ""

    def before_unary(self, eqn: core.JaxprEqn) -> ReductionSpec:
        """Before an elementwise equation, which then belongs to φ."""
        return dataclasses.replace(self, pre=lambda x: self.pre(jaxprs.bind(eqn, [x])[0]))

    def before_permutation(self, eqn: core.JaxprEqn) -> ReductionSpec:
        """Before elements are moved. `initial` needs no moving: raw sums are in the producer's order. Operands do: back,
        which for a permutation is its transpose."""

        def back(x: jax.Array) -> jax.Array:
            before = jaxprs.struct(jax.typeof(x), jaxprs.shape_of(eqn.invars[0]))
            return jax.linear_transpose(lambda y: jaxprs.bind(eqn, [y])[0], before)(x)[0]

        return dataclasses.replace(
            self,
            sharding=None if self.sharding is None else self.sharding.before_permutation(eqn),
            operands={name: back(x) for name, x in self.operands.items()},
        )

    def before_collective(self, eqns: Sequence[core.JaxprEqn]) -> ReductionSpec:
        """On each device, before a sum over devices: the sums so far are added after it, or each device would add them; and
        of an operand that is scattered with the sums, each device needs all."""
        operands = {
            # A device knows the positions in its own part only; those of different parts must differ.
            name: shard_map.gathered(eqns, shard_map.numbered_apart(eqns, x) if name == POSITIONS else x)
            for name, x in self.operands.items()
        }
        return dataclasses.replace(self, initial=None, operands=operands)

    def slice(self, index: int, start: Sequence[int], shape: Sequence[int]) -> ReductionSpec:
        """Of part `index` of a `Concatenated`, which begins at `start`; a part need not divide as the whole does."""
        limits = [a + b for a, b in zip(start, shape, strict=True)]
        return dataclasses.replace(
            self,
            initial=None if self.initial is None else self.initial[index],
            sharding=None,
            operands={name: jax.lax.slice(x, start, limits) for name, x in self.operands.items()},
        )


@dataclasses.dataclass(frozen=True)
class ReductionSite:
    """A place where a gradient is produced, and all that is known there.

    Attributes:
      leaves, batched: values of the producer's leaves; those marked have a leading axis N.
    """

    context: ReductionContext
    spec: ReductionSpec
    node: Producer
    leaves: Sequence[Any]
    batched: Sequence[bool]

    def gradient(self, *leaves: Any, bind: Callable[..., list[Any]] = windows.bind) -> jax.Array:
        """One example's gradient, from its leaves; `bind` applies an equation."""
        env: dict[Any, Any] = dict(zip(self.node.leaves, leaves, strict=True))
        jaxprs.run_equations(self.node.eqns, env, bind)
        # float32 before φ: in bfloat16, squares and the sums over examples would be rounded to eight bits.
        return constrain(at_least_f32(self.spec.pre(env[self.node.root])), self.spec.sharding)

    def value(self, v: Any) -> tuple[Any, bool]:
        i = self.node.leaves.index(v)
        return self.leaves[i], self.batched[i]

    def for_all(self, v: Any) -> jax.Array:
        """The value of a leaf with an example axis, whether it depends on the example or not."""
        value, is_batched = self.value(v)
        return value if is_batched else jaxprs.for_all(value, self.context.num_examples)

    def is_batched(self, *vs: Any) -> bool:
        return all(isinstance(v, core.Var) and v in self.node.leaves and self.value(v)[1] for v in vs)

    def single(self, primitive: str) -> core.JaxprEqn | None:
        """The producer's equation, if it is only one, of this primitive."""
        (*before, eqn) = self.node.eqns
        return eqn if not before and eqn.primitive.name == primitive else None


# --- generic reductions -----------------------------------------------------------------------------------------------


def all_at_once(
    context: ReductionContext, g_Nx: jax.Array, reduction: str, note: str = "", initial: Any = None
) -> ReductionResult:
    """From the gradients of all examples."""
    g_Nx = at_least_f32(g_Nx)
    scale, weight = context.columns(g_Nx.ndim, g_Nx.dtype)
    values = [context.weighted(context.phi(s, g_Nx, scale), weight) for s in context.statistics]
    sums = [jax.lax.reduce_sum(x, (0,)) for x in values]
    squares = jnp.sum(jnp.square(g_Nx), axis=tuple(range(1, g_Nx.ndim))) if context.norms else None
    return ReductionResult(plus(initial, sums), squares, reduction, g_Nx.size * g_Nx.dtype.itemsize, note)


def shared(context: ReductionContext, spec: ReductionSpec, g: jax.Array) -> ReductionResult:
    """The same gradient for every example: an unused parameter's zeros, a regulariser's.

    Where devices have different parts of the parameter, each counts all devices' examples for its own part: it has no
    other device to be summed with.
    """
    g = at_least_f32(g)
    squares = jaxprs.for_all(jnp.sum(jnp.square(g)), context.num_examples) if context.norms else None
    # Not known to be sharded (check_vma=False): count all devices' examples here, and let no `psum` follow. A parameter that
    # is sharded after all gets its collective in `_sum_over_devices`, which divides again.
    axes = context.data_axes if spec.sharded_over is None else spec.sharded_over
    every = context.of_all_devices(axes)
    if context.scales_N is None:
        sums = [every.total_weight(g.dtype) * context.phi(s, g, None) for s in context.statistics]
        return ReductionResult(plus(spec.initial, sums), squares, SHARED, 0, summed_over=axes)

    # Clipped, examples no longer share it: each scales it by its own norm.
    def step(sums: list[jax.Array], x: Any) -> tuple[list[jax.Array], None]:
        return context.added(sums, g, *x), None

    begin = context.begin(spec.initial, g.shape, g.dtype)
    sums, _ = jax.lax.scan(step, begin, (every.weights_N, every.scales_N), length=every.num_examples)
    return ReductionResult(sums, squares, SHARED, 0, summed_over=axes)


def one_at_a_time(site: ReductionSite) -> ReductionResult:
    """A loop over examples: one gradient and the sums exist at a time."""
    node = site.node
    cone = Cone(node.eqns, (node.root,), node.leaves)
    result = jointly(cone, site.leaves, site.batched, {0: (site.context, site.spec)})[0]
    dtype = jax.eval_shape(lambda x: at_least_f32(site.spec.pre(x)), jaxprs.struct(node.root.aval)).dtype
    return dataclasses.replace(result, transient_bytes=jaxprs.size_of(node.root) * dtype.itemsize)


def jointly(
    cone: Cone,
    leaves: Sequence[Any],
    batched: Sequence[bool],
    wanted: Mapping[int, tuple[ReductionContext, ReductionSpec]],
) -> dict[int, ReductionResult]:
    """Several gradients in one loop over examples, since they are made of one another: by number of the cone's root."""
    context = next(iter(wanted.values()))[0]
    rows = [leaf for leaf, b in zip(leaves, batched, strict=True) if b]

    def gradients(rows: Sequence[Any]) -> dict[int, jax.Array]:
        row = iter(rows)
        values = (next(row) if b else leaf for leaf, b in zip(leaves, batched, strict=True))
        env: dict[Any, Any] = dict(zip(cone.leaves, values, strict=True))
        jaxprs.run_equations(cone.eqns, env, windows.bind)
        return {
            k: constrain(at_least_f32(spec.pre(env[cone.roots[k]])), spec.sharding) for k, (_, spec) in wanted.items()
        }

    def step(sums: dict[int, list[jax.Array]], x: Any) -> tuple[dict[int, list[jax.Array]], Any]:
        row, weight, scales = x
        g = gradients(row)
        new = {k: mine.added(sums[k], g[k], weight, scales[k]) for k, (mine, _) in wanted.items()}
        return new, {k: jnp.sum(jnp.square(g[k])) if context.norms else None for k in wanted}

    shapes = jax.eval_shape(gradients, [jaxprs.struct(jax.typeof(x), x.shape[1:]) for x in rows])
    begin = {
        k: mine.begin(spec.initial, shapes[k].shape, shapes[k].dtype, spec.sharding)
        for k, (mine, spec) in wanted.items()
    }
    scales = {k: mine.scales_N for k, (mine, _) in wanted.items()}
    sums, squares = over_examples(step, begin, (rows, context.weights_N, scales), context.num_examples)
    # Of one example: all that is computed on the way.
    size = sum(jaxprs.size_of(v) * jaxprs.dtype_of(v).itemsize for eqn in cone.eqns for v in eqn.outvars)
    return {k: ReductionResult(sums[k], squares[k], "one at a time", size) for k in wanted}


def with_held(result: ReductionResult, node: Producer | Materialized | Joint, num_examples: int) -> ReductionResult:
    """However well a gradient is reduced: said, if values of its size exist for all examples on the way to it.

    Of a single example, as with microbatches of one, they are what any way to its gradient makes.
    """
    if not node.held:
        return result
    held = num_examples * sum(jaxprs.size_of(v) * jaxprs.dtype_of(v).itemsize for v in node.held)
    if num_examples == 1:
        return dataclasses.replace(result, reduction="one at a time", transient_bytes=held)
    return dataclasses.replace(result, reduction=MATERIALISED, note=node.note, transient_bytes=held)


# --- pieces -----------------------------------------------------------------------------------------------------------


def column(values_N: jax.Array | None, ndim: int) -> jax.Array | None:
    """Per-example numbers as [N, 1, ...]."""
    return None if values_N is None else values_N.reshape(-1, *(1,) * (ndim - 1))


def plus(initial: Any, sums: list[jax.Array]) -> list[jax.Array]:
    return sums if initial is None else jax.tree.map(jnp.add, list(initial), sums)


def over_examples(step: Callable[..., Any], begin: Any, xs: Any, num_examples: int) -> tuple[Any, Any]:
    """`lax.scan` over the examples; for a single one, the step itself."""
    # Straight-line code for a single example: XLA fuses φ with the product, and need not remove a loop of one step first.
    if num_examples > 1:
        return jax.lax.scan(step, begin, xs, length=num_examples)
    carry, y = step(begin, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], y)
