"""Statistics of per-example gradients: averages (1/B) Σ_i φ(g_i) of an elementwise function φ."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np


def _itself(g: jax.Array) -> jax.Array:
    return g


_FACTORS = (_itself, jnp.square, jnp.sign)  # known to; no device is asked when this is imported


@dataclasses.dataclass(frozen=True)
class Statistic:
    """An average of φ over the examples' gradients, elementwise.

    Args:
      name: under which it is found in the result.
      fn: φ, from an array to an array of the same shape and a floating dtype.
      factorable: claims φ(a·b) = φ(a)·φ(b). Then a dense layer without a sequence axis, g_i = s_i r_iᵀ, needs one matrix
        product: Σ φ(g_i) = φ(S)ᵀ φ(R). The claim is checked on numbers here.

    >>> cube = Statistic("mean_cube", lambda g: g**3, factorable=True)
    >>> float(cube.fn(jnp.float32(2.0)))
    8.0
    """

    name: str
    fn: Callable[[jax.Array], jax.Array]
    factorable: bool = False

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"Statistic name {self.name!r}: give a non-empty string.")
        probe = jax.ShapeDtypeStruct((3, 2), jnp.float32)
        out = jax.eval_shape(self.fn, probe)
        if getattr(out, "shape", None) != probe.shape:
            raise ValueError(
                f"Statistic {self.name!r}: φ must be elementwise, but it turns shape {probe.shape} into "
                f"{getattr(out, 'shape', type(out).__name__)}."
            )
        if not jnp.issubdtype(out.dtype, jnp.floating):
            raise ValueError(
                f"Statistic {self.name!r}: φ returns {out.dtype}; it must return a floating dtype, for instance with "
                ".astype(g.dtype)."
            )
        if self.factorable and self.fn not in _FACTORS:
            a, b = (np.random.default_rng(seed).normal(size=64).astype(np.float32) for seed in (0, 1))
            whole, parts = np.asarray(self.fn(jnp.asarray(a * b))), np.asarray(self.fn(a) * self.fn(b))
            if not np.allclose(whole, parts, rtol=1e-4, atol=1e-6, equal_nan=True):
                worst = int(np.nanargmax(np.abs(whole - parts)))
                raise ValueError(
                    f"Statistic {self.name!r} claims factorable=True, but φ(a·b) ≠ φ(a)·φ(b) at a = {a[worst]:.3g}, "
                    f"b = {b[worst]:.3g}: {whole[worst]:.3g} against {parts[worst]:.3g}. Leave factorable out."
                )


BUILT_IN = {
    s.name: s
    for s in (
        Statistic("mean", _itself, factorable=True),
        Statistic("mean_square", jnp.square, factorable=True),
        Statistic("mean_sign", jnp.sign, factorable=True),
    )
}

SHIFTABLE = ("mean", "mean_square")  # what a shifted accumulator takes of g − shift


def as_statistics(statistics: str | Statistic | Iterable[str | Statistic]) -> tuple[Statistic, ...]:
    """Accepts names and objects; returns objects with distinct names.

    >>> [s.name for s in as_statistics(("mean", "mean_square"))]
    ['mean', 'mean_square']
    """
    if isinstance(statistics, str | Statistic):
        statistics = (statistics,)
    result: list[Statistic] = []
    for item in statistics:
        if isinstance(item, str):
            if item not in BUILT_IN:
                near = difflib.get_close_matches(item, BUILT_IN, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"unknown statistic {item!r}.{hint} Known names: {', '.join(BUILT_IN)}. Others are made with "
                    "per_example.Statistic(name, fn)."
                )
            item = BUILT_IN[item]
        if not isinstance(item, Statistic):
            raise TypeError(f"statistics must be names or per_example.Statistic objects, not {type(item).__name__}.")
        if item.name in BUILT_IN and item is not BUILT_IN[item.name]:
            raise ValueError(f"statistic {item.name!r} is a name of our own: give yours another.")
        if item.name in [s.name for s in result]:
            raise ValueError(f"statistic {item.name!r} is given twice.")
        result.append(item)
    if not result:
        raise ValueError("statistics is empty: give at least one, for instance ('mean', 'mean_square').")
    return tuple(result)
