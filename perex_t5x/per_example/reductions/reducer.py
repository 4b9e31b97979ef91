"""The forms in which Σ_n w_n φ(g_n) is computed without holding all g_n.

| form | when | cost |
|---|---|---|
| `one at a time` | a producer larger than its inputs | a loop over examples; one gradient, or a tile of it, and the sums |
| `all at once` | a producer smaller than its inputs (biases, norms' scales) | N × a small gradient |
| `factored` | one product of two vectors, all φ factorable | φ(S)ᵀ φ(R): one more matrix product per φ |
| `sparse` | a scatter-add into zeros (embedding) | rows of equal id summed, φ, one scatter-add per φ |
| `sparse + dense` | a tied embedding | the dense form, and a correction at the rows in use |
| `gram` | only norms are wanted of a matrix product with a short sequence | N × sequence² |
| `per token` | unit='token' | φ(S)ᵀ φ(R) over examples and positions |
| `kept` | what could not be followed | N × the parameter |

Every form adds to `Site.initial` where given, so that microbatches accumulate in place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from perex_t5x.per_example.engine import jaxprs, shard_map
from perex_t5x.per_example.engine.plan import Producer
from perex_t5x.per_example.engine.sharding import Placement, place
from perex_t5x.per_example.statistic import SHIFTABLE, Statistic

MIXED_UNITS = "partly per token"
Pre = Callable[[jax.Array], jax.Array]


def at_least_f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@dataclasses.dataclass
class Reduced:
    """Σ_n w_n φ_k(g_n) per statistic, Σ g_n² per example (or None), and how it was done.

    Attributes:
      raw: the sums as they are accumulated: arrays in the order of elements in which the gradient is produced.
      finish: from `raw` to one array per statistic, like the parameter.
      positions_N: with unit='token', the real positions of each example; None where the unit is the example.
      over: mesh axes over which the sums are of all devices' examples already.
      kernel: why TPUs have XLA's form and not the kernel; '' where they have the kernel, None where there is none.
    """

    raw: Any
    squares_N: jax.Array | None
    form: str
    transient_bytes: int
    note: str = ""
    finish: Callable[[Any], list[jax.Array]] = list
    positions_N: jax.Array | None = None
    over: tuple[str, ...] = ()
    kernel: str | None = None

    def then(self, fn: Callable[[jax.Array], jax.Array]) -> Reduced:
        """With `fn` applied to the finished sums."""
        finish = self.finish
        return dataclasses.replace(self, finish=lambda raw: [fn(x) for x in finish(raw)])


@dataclasses.dataclass
class Site:
    """Where a gradient is produced, and what is known there.

    Attributes:
      leaves, batched: values of the producer's leaves; those marked have a leading axis N.
      pre: casts, signs and factors to apply before φ; linear.
      initial: sums to add to, as `Reduced.raw`; None: zeros.
      shift: for the shifted statistics, φ(g − shift); like the gradient as it is produced. None: no shift.
      place: where the gradient and its sums lie; None: wherever the compiler puts them.
      parts: see `Reducer`.
    """

    node: Producer
    leaves: Sequence[Any]
    batched: Sequence[bool]
    pre: Pre
    initial: Any = None
    shift: jax.Array | None = None
    place: Placement | None = None
    parts: tuple[str, ...] | None = None

    def gradient(self, *leaves: Any) -> jax.Array:
        """One example's gradient, from its leaves."""
        env = dict(zip(self.node.leaves, leaves, strict=True))
        for eqn in self.node.eqns:
            outs = jaxprs.bind(eqn, [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return place(at_least_f32(self.pre(env[self.node.root])), self.place)

    def value(self, v: core.Var) -> tuple[Any, bool]:
        i = self.node.leaves.index(v)
        return self.leaves[i], self.batched[i]

    def is_batched(self, *vs: Any) -> bool:
        return all(isinstance(v, core.Var) and v in self.node.leaves and self.value(v)[1] for v in vs)

    @property
    def dtype(self) -> Any:
        """Of the gradient, when φ sees it."""
        zero = jax.ShapeDtypeStruct((), self.node.root.aval.dtype)
        return jax.eval_shape(lambda x: at_least_f32(self.pre(x)), zero).dtype

    def single(self, primitive: str) -> core.JaxprEqn | None:
        """The producer's equation, if it is only one, of this primitive."""
        (*before, eqn) = self.node.eqns
        return eqn if not before and eqn.primitive.name == primitive else None


@dataclasses.dataclass
class Reducer:
    """What is wanted of the gradients of N examples.

    Attributes:
      statistics: the φ.
      weights_N: w_n, outside φ; None: all 1. Examples of weight 0 are selected away, so their NaN do no harm.
      scales_N: c_n, inside φ (clipping): φ(c_n g_n); None: all 1. Norms are of the gradient before scaling.
      norms: whether Σ g_n² is wanted.
      unit: 'example' or 'token'.
      factor: of all sums, known beforehand: 1 / the number of all devices' examples makes them averages at no cost.
      kernels: whether TPUs may use Pallas kernels.
      varying: mesh axes over which values are known to differ (inside `shard_map` with check_vma=True).
      devices: mesh axes over which devices have examples of their own: the loss may not communicate over them.
      data_axes: those of them over which statistics are wanted of all devices' examples.
      transport: dtype in which sums travel between devices; None: their own.
      places: of each parameter, where its sums lie; None: wherever the compiler puts them.
      parts: of each parameter, the data axes over which devices have different parts of it; None: not known.
    """

    statistics: Sequence[Statistic]
    num_examples: int
    weights_N: jax.Array | None
    scales_N: jax.Array | None
    norms: bool
    unit: str = "example"
    factor: float = 1.0
    kernels: bool = True
    varying: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()
    data_axes: tuple[str, ...] = ()
    transport: Any = None
    places: Sequence[Placement | None] = ()
    parts: Sequence[tuple[str, ...] | None] = ()

    # --- pieces -------------------------------------------------------------------------------------------------------

    def phi(self, statistic: Statistic, g: jax.Array, scale: jax.Array | None, shift: jax.Array | None) -> jax.Array:
        """φ(c g), or φ(c g − shift) for the statistics that are shifted."""
        g = g if scale is None else g * scale
        return statistic.fn(g if shift is None or statistic.name not in SHIFTABLE else g - shift)

    def weighted(self, x: jax.Array, weight: jax.Array | None) -> jax.Array:
        if self.factor != 1.0:
            x = x * jnp.asarray(self.factor, x.dtype)
        if weight is None:
            return x
        return jnp.where(weight == 0, jnp.zeros_like(x), x * weight.astype(x.dtype))

    def total_weight(self, dtype: Any) -> jax.Array:
        if self.weights_N is None:
            return jnp.asarray(self.num_examples * self.factor, dtype)
        return (jnp.sum(self.weights_N) * self.factor).astype(dtype)

    def added(
        self, sums: Sequence[jax.Array], g: jax.Array, weight: Any, scale: Any, shift: jax.Array | None
    ) -> list[jax.Array]:
        """The sums with one example's gradient added."""
        scale = None if scale is None else scale.astype(g.dtype)
        return [
            total + self.weighted(self.phi(s, g, scale, shift), weight)
            for total, s in zip(sums, self.statistics, strict=True)
        ]

    def begin(self, initial: Any, shape: Sequence[int], dtype: Any, where: Placement | None = None) -> list[jax.Array]:
        """The sums to start from: `initial`, or zeros of φ's dtype."""
        if initial is not None:
            return list(initial)
        g = jax.ShapeDtypeStruct(tuple(shape), dtype)
        return [place(self.zeros(g.shape, jax.eval_shape(s.fn, g).dtype), where) for s in self.statistics]

    def zeros(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        return shard_map.vary(jnp.zeros(shape, dtype), self.varying)

    def column(self, values_N: jax.Array | None, ndim: int) -> jax.Array | None:
        """Per-example numbers as [N, 1, ...]."""
        return None if values_N is None else values_N.reshape(-1, *(1,) * (ndim - 1))

    # --- generic forms ------------------------------------------------------------------------------------------------

    def all_at_once(
        self, g_Nx: jax.Array, form: str, note: str = "", initial: Any = None, shift: jax.Array | None = None
    ) -> Reduced:
        """From the gradients of all examples."""
        g_Nx = at_least_f32(g_Nx)
        scale, weight = self.column(self.scales_N, g_Nx.ndim), self.column(self.weights_N, g_Nx.ndim)
        scale = None if scale is None else scale.astype(g_Nx.dtype)
        shift = None if shift is None else shift[None]
        sums = [jnp.sum(self.weighted(self.phi(s, g_Nx, scale, shift), weight), axis=0) for s in self.statistics]
        squares = jnp.sum(jnp.square(g_Nx), axis=tuple(range(1, g_Nx.ndim))) if self.norms else None
        return Reduced(plus(initial, sums), squares, form, g_Nx.size * g_Nx.dtype.itemsize, note)

    def shared(
        self,
        g: jax.Array,
        initial: Any = None,
        shift: jax.Array | None = None,
        parts: tuple[str, ...] | None = None,
    ) -> Reduced:
        """The same gradient for every example: an unused parameter's zeros, a regulariser's.

        Where devices have different `parts` of the parameter, each counts all devices' examples for its own.
        """
        g = at_least_f32(g)
        squares = jaxprs.for_all(jnp.sum(jnp.square(g)), self.num_examples) if self.norms else None
        axes = self.data_axes if parts is None else parts
        every = self._of_all_devices(axes)
        if self.scales_N is None:
            sums = [every.total_weight(g.dtype) * self.phi(s, g, None, shift) for s in self.statistics]
            return Reduced(plus(initial, sums), squares, "shared", 0, over=axes)

        def step(sums: list[jax.Array], x: Any) -> tuple[list[jax.Array], None]:
            return self.added(sums, g, *x, shift), None

        begin = self.begin(initial, g.shape, g.dtype)
        sums, _ = jax.lax.scan(step, begin, (every.weights_N, every.scales_N), length=every.num_examples)
        return Reduced(sums, squares, "shared", 0, over=axes)

    def _of_all_devices(self, axes: tuple[str, ...]) -> Reducer:
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

    def one_at_a_time(self, site: Site) -> Reduced:
        """A loop over examples: one gradient and the sums exist at a time."""
        rows = [leaf for leaf, b in zip(site.leaves, site.batched, strict=True) if b]

        def gradient(rows: Sequence[Any]) -> jax.Array:
            row = iter(rows)
            return site.gradient(*(next(row) if b else leaf for leaf, b in zip(site.leaves, site.batched, strict=True)))

        def step(sums: list[jax.Array], x: Any) -> tuple[list[jax.Array], Any]:
            row, weight, scale = x
            g = gradient(row)
            return self.added(sums, g, weight, scale, site.shift), jnp.sum(jnp.square(g)) if self.norms else None

        g = jax.eval_shape(gradient, [jaxprs.struct(jax.typeof(x), x.shape[1:]) for x in rows])
        begin = self.begin(site.initial, g.shape, g.dtype, site.place)
        sums, squares = over_examples(step, begin, (rows, self.weights_N, self.scales_N), self.num_examples)
        return Reduced(sums, squares, "one at a time", math.prod(g.shape) * g.dtype.itemsize)


def plus(initial: Any, sums: list[jax.Array]) -> list[jax.Array]:
    return sums if initial is None else jax.tree.map(jnp.add, list(initial), sums)


def over_examples(step: Callable[..., Any], begin: Any, xs: Any, num_examples: int) -> tuple[Any, Any]:
    """`lax.scan` over the examples; for a single one, the step itself."""
    if num_examples > 1:
        return jax.lax.scan(step, begin, xs, length=num_examples)
    carry, y = step(begin, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], y)
