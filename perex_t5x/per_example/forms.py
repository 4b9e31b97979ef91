"""The forms in which Σ_n w_n φ(g_n) is computed without holding all g_n.

| form | when | cost |
|---|---|---|
| `one at a time` | a producer larger than its inputs | a loop over examples; one example's gradient and the sums |
| `all at once` | a producer smaller than its inputs (biases, norms' scales) | N × a small gradient |
| `factored` | one product of two vectors, all φ factorable | φ(S)ᵀ φ(R): one more matrix product per φ |
| `sparse` | a scatter-add into zeros (embedding) | rows of equal id summed, φ, one scatter-add per φ |
| `kept` | what could not be followed | N × the parameter |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from perex_t5x.per_example import jaxprs
from perex_t5x.per_example.plan import Producer
from perex_t5x.per_example.statistic import Statistic

Pre = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass
class Reduced:
    """Σ_n w_n φ_k(g_n) per statistic, Σ g_n² per example (or None), and how it was done."""

    sums: list[jax.Array]
    squares_N: jax.Array | None
    form: str
    transient_bytes: int
    note: str = ""

    def mapped(self, fn: Callable[[jax.Array], jax.Array]) -> Reduced:
        return dataclasses.replace(self, sums=[fn(s) for s in self.sums])


@dataclasses.dataclass
class Reducer:
    """What is wanted of the gradients of N examples.

    Attributes:
      statistics: the φ.
      weights_N: w_n, outside φ; None: all 1. Examples of weight 0 are selected away, so their NaN do no harm.
      scales_N: c_n, inside φ (clipping): φ(c_n g_n); None: all 1. Norms are of the gradient before scaling.
      norms: whether Σ g_n² is wanted.
    """

    statistics: Sequence[Statistic]
    num_examples: int
    weights_N: jax.Array | None
    scales_N: jax.Array | None
    norms: bool

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _phi(self, statistic: Statistic, g: jax.Array, scale: jax.Array | None) -> jax.Array:
        return statistic.fn(g if scale is None else g * scale)

    def _weighted(self, x: jax.Array, weight: jax.Array | None) -> jax.Array:
        if weight is None:
            return x
        return jnp.where(weight == 0, jnp.zeros_like(x), x * weight.astype(x.dtype))

    def _total_weight(self, dtype: Any) -> jax.Array:
        if self.weights_N is None:
            return jnp.asarray(self.num_examples, dtype)
        return jnp.sum(self.weights_N).astype(dtype)

    # --- forms --------------------------------------------------------------------------------------------------------

    def all_at_once(self, g_Nx: jax.Array, form: str, note: str = "") -> Reduced:
        """From the gradients of all examples."""
        g_Nx = _at_least_f32(g_Nx)
        column = (slice(None),) + (None,) * (g_Nx.ndim - 1)
        scale = None if self.scales_N is None else self.scales_N[column].astype(g_Nx.dtype)
        weight = None if self.weights_N is None else self.weights_N[column]
        sums = [jnp.sum(self._weighted(self._phi(s, g_Nx, scale), weight), axis=0) for s in self.statistics]
        squares = jnp.sum(jnp.square(g_Nx), axis=tuple(range(1, g_Nx.ndim))) if self.norms else None
        return Reduced(sums, squares, form, g_Nx.size * g_Nx.dtype.itemsize, note)

    def shared(self, g: jax.Array) -> Reduced:
        """The same gradient for every example: an unused parameter's zeros, a regulariser's."""
        g = _at_least_f32(g)
        if self.scales_N is not None:
            return self.one_at_a_time(lambda: g, [], [])
        sums = [self._total_weight(g.dtype) * s.fn(g) for s in self.statistics]
        squares = jnp.broadcast_to(jnp.sum(jnp.square(g)), (self.num_examples,)) if self.norms else None
        return Reduced(sums, squares, "shared", 0)

    def one_at_a_time(self, fn: Callable[..., jax.Array], leaves: Sequence[Any], batched: Sequence[bool]) -> Reduced:
        """A loop over examples: one gradient and the sums exist at a time."""

        def step(sums: list[jax.Array], x: Any) -> tuple[list[jax.Array], Any]:
            per_example, weight, scale = x
            rows = iter(per_example)
            g = _at_least_f32(fn(*(next(rows) if b else leaf for leaf, b in zip(leaves, batched, strict=True))))
            scale = None if scale is None else scale.astype(g.dtype)
            added = [
                total + self._weighted(self._phi(s, g, scale), weight)
                for total, s in zip(sums, self.statistics, strict=True)
            ]
            return added, jnp.sum(jnp.square(g)) if self.norms else None

        xs = ([leaf for leaf, b in zip(leaves, batched, strict=True) if b], self.weights_N, self.scales_N)
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs[0])
        rows = iter(first)
        g = jax.eval_shape(
            lambda *a: _at_least_f32(fn(*a)),
            *(next(rows) if b else leaf for leaf, b in zip(leaves, batched, strict=True)),
        )
        zeros = [jnp.zeros(g.shape, jax.eval_shape(s.fn, g).dtype) for s in self.statistics]
        sums, squares = jax.lax.scan(step, zeros, xs, length=self.num_examples)
        return Reduced(sums, squares, "one at a time", math.prod(g.shape) * g.dtype.itemsize)

    def producer(self, node: Producer, leaves: Sequence[Any], batched: Sequence[bool], pre: Pre) -> Reduced:
        """Chooses the form for a producer."""

        def fn(*arguments: Any) -> jax.Array:
            env = dict(zip(node.leaves, arguments, strict=True))
            for eqn in node.eqns:
                outs = jaxprs.bind(eqn, [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars])
                env.update(zip(eqn.outvars, outs, strict=True))
            return pre(env[node.root])

        if not any(batched):
            return self.shared(fn(*leaves))
        values = dict(zip(node.leaves, zip(leaves, batched, strict=True), strict=True))
        eqn = node.eqns[-1]
        if len(node.eqns) == 1 and eqn.primitive.name == "dot_general" and (form := self._factored(eqn, values, pre)):
            return form
        if _adds_to_zeros(node) and (form := self._sparse(eqn, values, pre)):
            return form
        example_size = sum(math.prod(v.aval.shape) for v, b in zip(node.leaves, batched, strict=True) if b)
        if math.prod(node.root.aval.shape) <= example_size:
            in_axes = tuple(0 if b else None for b in batched)
            return self.all_at_once(jax.vmap(fn, in_axes=in_axes)(*leaves), "all at once")
        return self.one_at_a_time(fn, leaves, batched)

    def _factored(self, eqn: core.JaxprEqn, values: Any, pre: Pre) -> Reduced | None:
        """g_n = s_n ⊗ r_n: a product whose contracted axes have size one."""
        (contract_l, _), (batch_l, batch_r) = eqn.params["dimension_numbers"]
        left, right = eqn.invars
        if not all(isinstance(v, core.Var) and values[v][1] for v in (left, right)) or batch_l or batch_r:
            return None
        if any(left.aval.shape[i] != 1 for i in contract_l) or not all(s.factorable for s in self.statistics):
            return None
        if left.aval.dtype != right.aval.dtype or self.num_examples < 2:
            return None
        l_NxI, r_NxJ = (
            _at_least_f32(pre_free).reshape(self.num_examples, -1) for pre_free in (values[left][0], values[right][0])
        )
        # A power of two per example moves between the two, so that φ of either overflows no sooner than φ of the product.
        peak_N = jnp.max(jnp.abs(r_NxJ), axis=1)
        usable_N = jnp.isfinite(peak_N) & (peak_N > 0)
        power_N = jnp.exp2(jnp.floor(jnp.log2(jnp.where(usable_N, peak_N, 1.0))))[:, None]
        l_NxI, r_NxJ = l_NxI * power_N, r_NxJ / power_N
        # pre is a chain of casts and signs: linear with factor ±1, recovered on one number.
        sign = pre(jnp.ones((), eqn.outvars[0].aval.dtype)).astype(l_NxI.dtype)
        scale = None if self.scales_N is None else self.scales_N[:, None].astype(l_NxI.dtype)
        l_NxI = l_NxI * sign
        sums = []
        for s in self.statistics:
            phi_l = self._weighted(
                self._phi(s, l_NxI, scale), None if self.weights_N is None else self.weights_N[:, None]
            )
            phi_r = s.fn(r_NxJ)
            if self.weights_N is not None:
                phi_r = jnp.where(self.weights_N[:, None] == 0, jnp.zeros_like(phi_r), phi_r)
            total = jnp.einsum("ni,nj->ij", phi_l, phi_r, precision=eqn.params["precision"])
            sums.append(total.reshape(eqn.outvars[0].aval.shape))
        squares = None
        if self.norms:
            squares = jnp.sum(jnp.square(l_NxI), axis=1) * jnp.sum(jnp.square(r_NxJ), axis=1)
        return Reduced(sums, squares, "factored", 0)

    def _sparse(self, eqn: core.JaxprEqn, values: Any, pre: Pre) -> Reduced | None:
        """Rows of an embedding: equal ids within an example are summed before φ."""
        operand, ids, updates = eqn.invars
        numbers = eqn.params["dimension_numbers"]
        table = operand.aval.shape
        plain = (
            len(table) == 2
            and tuple(numbers.inserted_window_dims) == (0,)
            and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
            and not numbers.operand_batching_dims
            and tuple(numbers.update_window_dims) == (updates.aval.ndim - 1,)
            and updates.aval.shape[-1] == table[1]
            and ids.aval.shape[-1] == 1
            and all(isinstance(v, core.Var) and values[v][1] for v in (ids, updates))
        )
        with jax.ensure_compile_time_eval():
            at_zero = [s.fn(_at_least_f32(pre(jnp.zeros((), updates.aval.dtype)))) for s in self.statistics]
            finite = all(jnp.isfinite(z) for z in at_zero)
        if not plain or not finite:  # φ(0) = -inf, say, cannot be taken away again
            return None
        ids_NxT = values[ids][0].reshape(self.num_examples, -1).astype(jnp.int32)
        rows_NxTxD = values[updates][0].reshape(self.num_examples, -1, table[1])
        num_rows = table[0]
        if "CLIP" in str(eqn.params["mode"]):
            ids_NxT = jnp.clip(ids_NxT, 0, num_rows - 1)

        def combine(ids_T: jax.Array, rows_TxD: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Distinct ids and the sums of their rows; unused places get the id `num_rows`, which is dropped."""
            order = jnp.argsort(ids_T)
            sorted_T = ids_T[order]
            segment_T = jnp.cumsum(
                jnp.concatenate([jnp.zeros(1, jnp.int32), (sorted_T[1:] != sorted_T[:-1]).astype(jnp.int32)])
            )
            sums_TxD = jnp.zeros_like(rows_TxD).at[segment_T].add(rows_TxD[order])
            distinct_T = jnp.full(ids_T.shape, num_rows, ids_T.dtype).at[segment_T].set(sorted_T)
            valid = (distinct_T >= 0) & (distinct_T < num_rows)
            return jnp.where(valid, distinct_T, num_rows), jnp.where(valid[:, None], sums_TxD, 0)

        distinct_NxT, g_NxTxD = jax.vmap(combine)(ids_NxT, rows_NxTxD)
        g_NxTxD = _at_least_f32(pre(g_NxTxD))
        scale = None if self.scales_N is None else self.scales_N[:, None, None].astype(g_NxTxD.dtype)
        weight = None if self.weights_N is None else self.weights_N[:, None, None]
        sums = []
        for s, zero in zip(self.statistics, at_zero, strict=True):
            change = self._weighted(self._phi(s, g_NxTxD, scale) - zero, weight)
            total = jnp.zeros(table, change.dtype) + self._total_weight(change.dtype) * zero
            sums.append(total.at[distinct_NxT].add(change, mode="drop"))
        squares = jnp.sum(jnp.square(g_NxTxD), axis=(1, 2)) if self.norms else None
        return Reduced(sums, squares, "sparse", 0)


def _adds_to_zeros(node: Producer) -> bool:
    """Whether the producer is a scatter-add into zeros and nothing else."""
    *before, last = node.eqns
    if last.primitive.name != "scatter-add" or len(before) != 1:
        return False
    (zeros,) = before
    value = zeros.invars[0]
    return (
        zeros.primitive.name == "broadcast_in_dim"
        and zeros.outvars[0] is last.invars[0]
        and isinstance(value, core.Literal)
        and not value.val
    )


def _at_least_f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
