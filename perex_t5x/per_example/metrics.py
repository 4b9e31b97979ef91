"""Metrics: a few numbers of each example's whole gradient, formed where each parameter's gradient is produced.

    aux.metrics[name][i] = combine({parameter: reduce(g_i of the parameter, operands of the parameter)})

| metric | of example i |
|---|---|
| `squared_norm()`, `norm()` | |g_i|², |g_i|; by parameter with `per_parameter=True` |
| `layer_norms(L)` | |g_i| of each of L layers, whose parameters are stacked on their leading axis |
| `inner_product(v)` | ⟨g_i, v⟩ for a tree v like the parameters, given with the call: influence, TracIn |
| `cosine(v)` | ⟨g_i, v⟩ / (|g_i| |v|) |
| `cosine_to_mean()` | the same with v the batch's own mean gradient, for which a pass comes first |
| `sketch(k)` | k numbers s_i with E⟨s_i, s_j⟩ = ⟨g_i, g_j⟩: a random projection |
| `gram()` | the row ⟨g_i, g_1⟩, ..., ⟨g_i, g_N⟩ |

Gradients are those before clipping; with groups, each group's.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x.per_example.statistic import named

BATCH_MEAN = "batch mean"  # an operand that the call computes itself, in a pass before
POSITIONS = "positions in the parameter"  # an operand that the call makes: each element's row-major index
_NO_LAYER = 2.0**24  # float32 has all whole numbers up to here
OVER = {"sum": (jnp.add, jnp.sum, jax.lax.psum), "max": (jnp.maximum, jnp.max, jax.lax.pmax)}


@dataclasses.dataclass(frozen=True)
class Products:
    """⟨g, g⟩, ⟨g, v⟩ and ⟨v, v⟩, those that are asked for, in this order: no gradient need be formed for them."""

    square: bool = False
    inner: bool = False
    operand_square: bool = False

    def __call__(self, g: jax.Array, *v: jax.Array) -> jax.Array:
        pairs = [
            *([(g, g)] if self.square else []),
            *([(g, v[0])] if self.inner else []),
            *([(v[0], v[0])] if self.operand_square else []),
        ]
        return jnp.stack([jnp.sum(a * b) for a, b in pairs])


@dataclasses.dataclass(frozen=True)
class CountSketch:
    """s[b] = Σ of σ(e) g[e] over the elements e with h(e) = b; h and σ are drawn from a seed, the parameter and e."""

    dim: int
    seed: int

    def codes(self, parameter: str, positions: jax.Array) -> jax.Array:
        """2 h(e) + (σ(e) < 0), of each element."""
        # By name, and not by number: the same whichever parameters are selected.
        key = jax.random.fold_in(
            jax.random.key(self.seed, impl="threefry2x32"), np.uint32(zlib.crc32(parameter.encode()))
        )

        # Each element's bits are a function of its position alone, in whatever order or part of the parameter it comes: the
        # data of its own key, two words.
        def code(e: jax.Array) -> jax.Array:
            words = jax.random.key_data(jax.random.fold_in(key, e))
            return (2 * (words[0] % np.uint32(self.dim)) + (words[1] & 1)).astype(jnp.int32)

        return jax.vmap(code)(positions.reshape(-1)).reshape(positions.shape)

    def __call__(self, g: jax.Array, codes: jax.Array) -> jax.Array:
        signed = jnp.where(codes % 2 == 1, -g, g).reshape(-1)
        return jnp.zeros(self.dim, g.dtype).at[(codes // 2).reshape(-1)].add(signed)


@dataclasses.dataclass(frozen=True)
class Pairwise:
    """⟨g_i, g_j⟩ with all other examples j of the batch: not a function of one gradient."""

    def __call__(self, g: jax.Array) -> jax.Array:
        raise TypeError("the Gram matrix is not a function of one example's gradient.")


@dataclasses.dataclass(frozen=True)
class Metric:
    """A few numbers of each example's whole gradient.

        aux.metrics[name][i] = combine({parameter: reduce(g_i of the parameter, operands...)})

    Args:
      name: its key in `aux.metrics`.
      reduce: from one example's gradient of one parameter (and the operands' arrays of that parameter) to a small array. The
        engine may see a parameter in parts (the layers of a scan, slices) and in another order of elements, so the value of
        a whole must be the sum (or the maximum: `over`) of its parts' values, in any order; checked on numbers here.
      combine: from one example's values, a tree like the parameters (None for parameters that are not selected), to the
        result, an array or a tree of them; None: their sum (or maximum).
      operands: names of trees like the parameters, given with the call as for `Statistic`.
      over: how parts come together: 'sum' or 'max'.

    >>> from perex_t5x import per_example
    >>> largest = Metric("largest", lambda g: jnp.max(jnp.abs(g)), over="max")
    >>> compute = per_example.grad_statistics(lambda w, x: jnp.sum((x @ w) ** 2), (), metrics=(largest, norm()))
    >>> _, aux = compute(jnp.ones(2), jnp.array([[1.0, 0.0], [3.0, 4.0]]))
    >>> aux.metrics["largest"].tolist(), aux.metrics["norm"].tolist()
    ([2.0, 56.0], [2.0, 70.0])
    """

    name: str
    reduce: Callable[..., jax.Array]
    combine: Callable[[Any], Any] | None = None
    operands: tuple[str, ...] = ()
    over: str = "sum"

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"Metric name {self.name!r}: give a non-empty string.")
        if isinstance(self.operands, str):
            raise ValueError(f"Metric {self.name!r}: operands = {self.operands!r}: give a tuple, ({self.operands!r},).")
        object.__setattr__(self, "operands", tuple(self.operands))
        if self.over not in OVER:
            raise ValueError(f"Metric {self.name!r}: over = {self.over!r}: must be one of {', '.join(OVER)}.")
        if not isinstance(self.reduce, Products | CountSketch | Pairwise):
            with jax.ensure_compile_time_eval():
                self._check_parts()

    @property
    def pairwise(self) -> bool:
        return isinstance(self.reduce, Pairwise)

    def _check_parts(self) -> None:
        rng = np.random.default_rng(0)
        arrays = [jnp.asarray(rng.normal(size=(6, 4)).astype(np.float32)) for _ in range(1 + len(self.operands))]
        try:
            out = self.reduce(*arrays)
        except jax.errors.ConcretizationTypeError:  # it closes over something traced
            return
        if not hasattr(out, "dtype") or not jnp.issubdtype(out.dtype, jnp.floating):
            raise ValueError(
                f"Metric {self.name!r}: reduce must return an array of a floating dtype, not "
                f"{getattr(out, 'dtype', type(out).__name__)}."
            )
        join = OVER[self.over][0]
        parts = join(self.reduce(*(x[:2].T for x in arrays)), self.reduce(*(x[2:].reshape(-1) for x in arrays)))
        if parts.shape != out.shape or not np.allclose(out, parts, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise ValueError(
                f"Metric {self.name!r}: reduce of a whole gradient must be the {self.over} of reduce of its parts, in any "
                f"order of elements, but of an array and of its two parts it gives {np.asarray(out).ravel()[:3]} and "
                f"{np.asarray(parts).ravel()[:3]}. Take roots and ratios in `combine`: a norm is reduce=sum of squares, "
                "combine=sqrt of their sum."
            )

    def bound(self, parameter: str, operands: dict[str, jax.Array]) -> Callable[[jax.Array], jax.Array]:
        """`reduce`, of one example's gradient of this parameter."""
        if isinstance(self.reduce, CountSketch):
            codes = self.reduce.codes(parameter, operands[POSITIONS])
            return lambda g: self.reduce(g, codes)
        return lambda g: self.reduce(g, *(operands[name].astype(g.dtype) for name in self.operands))

    def joined(self, values: Iterable[Any]) -> Any:
        """Of the parts of a gradient, or of several parameters."""
        return functools.reduce(OVER[self.over][0], values)

    def over_layers(self, values_Lx: jax.Array) -> jax.Array:
        return OVER[self.over][1](values_Lx, axis=0)

    def over_devices(self, value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return OVER[self.over][2](value, axes) if axes else value

    def combined(self, tree: Any) -> Any:
        """Of all units, from their values of each parameter."""
        if self.combine is None:
            return self.joined(jax.tree.leaves(tree))
        return jax.vmap(self.combine)(tree)


# --- ready made -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Finished:
    """`Metric.combine`: `finish` of the sum over parameters, or of each."""

    finish: Callable[[jax.Array], jax.Array]
    per_parameter: bool

    def __call__(self, values: Any) -> Any:
        if self.per_parameter:
            return jax.tree.map(self.finish, values)
        return self.finish(functools.reduce(jnp.add, jax.tree.leaves(values)))


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(x[0])


def _only(x: jax.Array) -> jax.Array:
    return x[0]


def _cosine(x: jax.Array) -> jax.Array:
    square, inner, operand_square = x
    # Roots first: the product of two squares overflows sooner.
    lengths = jnp.sqrt(square) * jnp.sqrt(operand_square)
    return jnp.where(lengths == 0, 0.0, inner / jnp.where(lengths == 0, 1.0, lengths))


def _make(
    name: str,
    reduce: Any,
    finish: Callable[[jax.Array], jax.Array],
    per_parameter: bool,
    operands: tuple[str, ...] = (),
) -> Metric:
    return Metric(name, reduce, Finished(finish, per_parameter), operands)


def squared_norm(name: str = "squared_norm", *, per_parameter: bool = False) -> Metric:
    """|g_i|²; per_parameter: a tree like the parameters, of each one's |g_i|².

    >>> from perex_t5x import per_example
    >>> compute = per_example.grad_statistics(lambda w, x: jnp.sum(x @ w), (), metrics=(squared_norm(),))
    >>> compute(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 2.0]]))[1].metrics["squared_norm"].tolist()
    [25.0, 4.0]
    """
    return _make(name, Products(square=True), _only, per_parameter)


def norm(name: str = "norm", *, per_parameter: bool = False) -> Metric:
    """|g_i|; per_parameter: a tree like the parameters, of each one's |g_i|.

    >>> from perex_t5x import per_example
    >>> compute = per_example.grad_statistics(lambda w, x: jnp.sum(x @ w), (), metrics=(norm(),))
    >>> compute(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 2.0]]))[1].metrics["norm"].tolist()
    [5.0, 2.0]
    """
    return _make(name, Products(square=True), _norm, per_parameter)


def layer_norms(num_layers: int, name: str = "layer_norms", *, per_parameter: bool = False) -> Metric:
    """[N, L]: the norm of the gradient of each layer, where parameters are stacked over L layers on their leading axis.

    Which layer an element belongs to is an operand, "layer": give `operands={"layer": metrics.layer_of(params, pattern)}`.

    >>> from perex_t5x import per_example
    >>> compute = per_example.grad_statistics(
    ...     lambda w, x: jnp.sum(x @ w[0]) + 2 * jnp.sum(x @ w[1]), (), metrics=(layer_norms(2),)
    ... )
    >>> w = jnp.ones((2, 2))
    >>> _, aux = compute(w, jnp.array([[1.0, 0.0], [3.0, 4.0]]), operands={"layer": layer_of(w)})
    >>> aux.metrics["layer_norms"].tolist()
    [[1.0, 2.0], [5.0, 10.0]]
    """
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"layer_norms: num_layers = {num_layers!r}: must be a positive whole number.")

    def squares(g: jax.Array, layer: jax.Array) -> jax.Array:
        at = layer.reshape(-1).astype(jnp.int32)
        return jnp.zeros(num_layers, g.dtype).at[at].add(jnp.square(g).reshape(-1), mode="drop")

    return _make(name, squares, jnp.sqrt, per_parameter, ("layer",))


def layer_of(params: Any, pattern: str = "") -> Any:
    """A tree like the parameters: each element's index on its parameter's leading axis; of parameters in whose name the
    regular expression `pattern` is not found, a number that is no layer's.

    >>> layers = layer_of({"layers": {"w": jnp.ones((2, 3))}, "b": jnp.ones(2)}, "layers/")
    >>> layers["layers"]["w"].tolist(), float(layers["b"][0]) > 2
    ([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], True)
    """

    def one(path: Any, x: Any) -> jax.Array:
        shape = jnp.shape(x)
        if not shape or not re.search(pattern, jax.tree_util.keystr(path, simple=True, separator="/")):
            return jnp.full(shape, _NO_LAYER, jnp.float32)
        return jax.lax.broadcasted_iota(jnp.float32, shape, 0)

    return jax.tree_util.tree_map_with_path(one, params)


def inner_product(operand: str, name: str = "", *, per_parameter: bool = False) -> Metric:
    """⟨g_i, v⟩ with v = `operands[operand]` of the call.

    By how much the loss of example i grows along v, to first order: with v the gradient of a test example's loss, one term
    of TracIn; with v an inverse Hessian times it, an influence function.

    >>> from perex_t5x import per_example
    >>> compute = per_example.grad_statistics(lambda w, x: jnp.sum(x @ w), (), metrics=(inner_product("v"),))
    >>> _, aux = compute(jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 2.0]]), operands={"v": jnp.array([3.0, 5.0])})
    >>> aux.metrics["inner_product(v)"].tolist()
    [3.0, 10.0]
    """
    return _make(name or f"inner_product({operand})", Products(inner=True), _only, per_parameter, (operand,))


def cosine(operand: str, name: str = "", *, per_parameter: bool = False) -> Metric:
    """⟨g_i, v⟩ / (|g_i| |v|) with v = `operands[operand]` of the call; 0 where either is 0.

    >>> from perex_t5x import per_example
    >>> compute = per_example.grad_statistics(lambda w, x: jnp.sum(x @ w), (), metrics=(cosine("v"),))
    >>> _, aux = compute(jnp.ones(2), jnp.array([[1.0, 0.0], [3.0, 4.0]]), operands={"v": jnp.array([0.0, 2.0])})
    >>> [round(float(x), 4) for x in aux.metrics["cosine(v)"]]
    [0.0, 0.8]
    """
    every = Products(square=True, inner=True, operand_square=True)
    return _make(name or f"cosine({operand})", every, _cosine, per_parameter, (operand,))


def cosine_to_mean(name: str = "cosine_to_mean", *, per_parameter: bool = False) -> Metric:
    """⟨g_i, ḡ⟩ / (|g_i| |ḡ|) with ḡ the batch's `stats.mean`: of all devices' examples, weighted and clipped.

    ḡ has to be known first, so losses and gradients are computed a second time.

    >>> from perex_t5x import per_example
    >>> compute = per_example.grad_statistics(lambda w, x: jnp.sum(x @ w), (), metrics="cosine_to_mean")
    >>> _, aux = compute(jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> [round(float(x), 3) for x in aux.metrics["cosine_to_mean"]]
    [0.707, 0.707]
    """
    return cosine(BATCH_MEAN, name, per_parameter=per_parameter)


def sketch(dim: int, seed: int = 0, name: str = "sketch") -> Metric:
    """A random projection of each example's gradient to `dim` numbers (a count sketch):

        s_i[b] = Σ_e [h(e) = b] σ(e) g_i[e]        over all elements e of all parameters

    with buckets h(e) uniform in 0..dim-1 and signs σ(e) = ±1, drawn from the seed, the parameter's name and the element's
    place in it. Over seeds, E⟨s_i, s_j⟩ = ⟨g_i, g_j⟩ and Var ≤ (|g_i|² |g_j|² + ⟨g_i, g_j⟩²) / dim. The same numbers for
    every microbatch, method and mesh, except that of parameters which are sharded over data axes inside `shard_map` they
    depend on the number of shards.

    >>> from perex_t5x import per_example
    >>> compute = per_example.grad_statistics(lambda w, x: jnp.sum(x @ w), (), metrics=(sketch(64),))
    >>> _, aux = compute(jnp.ones(3), jnp.array([[2.0, 0.0, 0.0], [3.0, 0.0, 0.0]]))
    >>> s = aux.metrics["sketch"]
    >>> s.shape, float(s[0] @ s[1])
    ((2, 64), 6.0)
    """
    if isinstance(dim, bool) or not isinstance(dim, int) or not 0 < dim < 2**30:
        raise ValueError(f"sketch: dim = {dim!r}: must be a positive whole number.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"sketch: seed = {seed!r}: must be a whole number.")
    return Metric(name, CountSketch(dim, seed), None, (POSITIONS,))


def gram(name: str = "gram") -> Metric:
    """⟨g_i, g_j⟩ of all pairs of the batch, [N, N].

    All gradients of a layer meet, a part at a time, so there are no microbatches. Of several devices, each has its own
    examples' rows, and is sent what the others' gradients are made of. `sketch` estimates the same for any number.

    >>> from perex_t5x import per_example
    >>> compute = per_example.grad_statistics(lambda w, x: jnp.sum(x @ w), (), metrics=(gram(),))
    >>> compute(jnp.ones(2), jnp.array([[1.0, 0.0], [3.0, 4.0]]))[1].metrics["gram"].tolist()
    [[1.0, 3.0], [3.0, 25.0]]
    """
    return Metric(name, Pairwise())


BUILT_IN = {
    m.name: m
    for m in (
        norm(),
        squared_norm(),
        norm("parameter_norms", per_parameter=True),
        cosine_to_mean(),
        gram(),
    )
}


def canonical(metrics: str | Metric | Iterable[str | Metric]) -> tuple[Metric, ...]:
    """Accepts names and objects; returns objects with distinct names.

    >>> [m.name for m in canonical(("norm", sketch(8)))]
    ['norm', 'sketch']
    """
    others = "per_example.metrics.inner_product(...) and the like, or per_example.Metric(name, reduce)"
    return named(metrics, Metric, BUILT_IN, "metric", others)


def positions_of(shape: tuple[int, ...]) -> jax.Array:
    """The operand `POSITIONS` of a parameter."""
    size = int(np.prod(shape, dtype=np.int64))
    if size > 2**32:
        raise ValueError(f"sketch: a parameter of {size:,} elements has more than 2**32.")
    return jax.lax.iota(jnp.uint32, size).reshape(shape)
