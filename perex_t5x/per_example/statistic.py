"""Statistics of per-example gradients: averages (1/B) Σ_i φ(g_i) of an elementwise function φ."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np


def _itself(g: jax.Array) -> jax.Array:
    return g


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)

# Known to keep their promises: importing this module must not initialise a backend, as the check on numbers would.
_KNOWN = (_itself, jnp.square, jnp.sign)
_FACTORS = (0.5, 3.0, -1.5)  # where a claimed `scaling` is checked


@dataclasses.dataclass(frozen=True)
class Statistic:
    """An average of φ over the examples' gradients, elementwise.

    Args:
      name: its key in the result.
      fn: φ, from an array to an array of the same shape and a floating dtype.
      factorable: claims φ(a·b) = φ(a)·φ(b). Then a dense layer without a sequence axis, g_i = s_i r_iᵀ, needs one matrix
        product: Σ φ(g_i) = φ(S)ᵀ φ(R). The claim is checked on numbers here.
      scaling: how the average follows a common factor c of all gradients (clipping by the global norm, `optax.scale`):
        φ(c·g) = scaling(c)·φ(g). Optimizers behind such a factor need it; NaN where there is no such factor, and None
        where there is none at all. Checked on numbers, too.
      operands: names of trees like the parameters that φ sees besides, elementwise: φ(g_i; a, b, ...). They are given with
        the call, `compute(params, batch, operands={"momentum": m})`, and are the same for all examples.

    >>> cube = Statistic("mean_cube", lambda g: g**3, factorable=True, scaling=lambda c: c**3)
    >>> float(cube.fn(jnp.float32(2.0)))
    8.0
    >>> step_sign = Statistic("mean_step_sign", lambda g, m: jnp.sign(0.9 * m + 0.1 * g), operands=("momentum",))
    >>> float(step_sign.fn(jnp.float32(-2.0), jnp.float32(0.1)))
    -1.0
    """

    name: str
    fn: Callable[..., jax.Array]
    factorable: bool = False
    scaling: Callable[[jax.Array], jax.Array] | None = None
    operands: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"Statistic name {self.name!r}: give a non-empty string.")
        if isinstance(self.operands, str):
            raise ValueError(
                f"Statistic {self.name!r}: operands = {self.operands!r}: give a tuple, ({self.operands!r},)."
            )
        object.__setattr__(self, "operands", tuple(self.operands))
        if self.operands and (self.factorable or self.scaling is not None):
            raise ValueError(
                f"Statistic {self.name!r}: φ(g; ...) with operands is neither factorable nor has it a scaling, since the "
                "operands do not follow the gradient's factors. Leave both out."
            )
        probe = jax.ShapeDtypeStruct((3, 2), jnp.float32)
        out = jax.eval_shape(self.fn, probe, *[probe] * len(self.operands))
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
        if self.fn not in _KNOWN and not self.operands:
            with (
                jax.ensure_compile_time_eval()
            ):  # optimizers, and the statistics they declare, are also made under `jit`
                self._check_claims()

    def _check_claims(self) -> None:
        a, b = (np.random.default_rng(seed).normal(size=64).astype(np.float32) for seed in (0, 1))
        phi: Callable[[Any], Any] = self.fn
        if self.factorable:
            whole, parts = (np.asarray(x) for x in (phi(jnp.asarray(a * b)), phi(a) * phi(b)))
            if (worst := _worst_difference(whole, parts)) is not None:
                raise ValueError(
                    f"Statistic {self.name!r} claims factorable=True, but φ(a·b) ≠ φ(a)·φ(b) at a = {a[worst]:.3g}, "
                    f"b = {b[worst]:.3g}: {whole[worst]:.3g} against {parts[worst]:.3g}. Leave factorable out."
                )
        scaling: Callable[[Any], Any] | None = self.scaling
        for c in map(np.float32, _FACTORS if scaling else ()):
            factor = np.asarray(scaling(c)) if scaling else np.nan
            whole, parts = np.asarray(phi(jnp.asarray(c * a))), factor * np.asarray(phi(jnp.asarray(a)))
            if not np.isnan(factor) and (worst := _worst_difference(whole, parts)) is not None:
                raise ValueError(
                    f"Statistic {self.name!r}: scaling must give φ(c·g) = scaling(c)·φ(g), but at c = {c:.3g} and "
                    f"g = {a[worst]:.3g} that is {whole[worst]:.3g} against {parts[worst]:.3g}. For |g|**p it is "
                    "lambda c: abs(c)**p; leave it out where there is no such function."
                )


def _worst_difference(x: np.ndarray, y: np.ndarray) -> int | None:
    """Where two arrays differ most, or None where they are equal up to rounding."""
    if np.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True):
        return None
    return int(np.nanargmax(np.abs(x - y)))


BUILT_IN = {
    s.name: s
    for s in (
        Statistic("mean", _itself, factorable=True, scaling=_itself),
        Statistic("mean_square", jnp.square, factorable=True, scaling=jnp.square),
        Statistic("mean_sign", jnp.sign, factorable=True, scaling=jnp.sign),
    )
}


def name_of(statistic: str | Statistic) -> str:
    """The name of a statistic that is given by name or as an object."""
    return statistic.name if isinstance(statistic, Statistic) else statistic


def names_of(statistics: Iterable[str | Statistic]) -> tuple[str, ...]:
    """The names of statistics, for `in` and `==`.

    >>> names_of(("mean", Statistic("mean_abs", jnp.abs)))
    ('mean', 'mean_abs')
    """
    return tuple(map(name_of, statistics))


def union(*needs: Iterable[str | Statistic]) -> tuple[str | Statistic, ...]:
    """What several readers need together: each name once, in the order of first mention; built-ins by name.

    >>> mean_abs = Statistic("mean_abs", jnp.abs)
    >>> names_of(union(("mean", mean_abs), ("mean", "mean_square", mean_abs)))
    ('mean', 'mean_abs', 'mean_square')
    """
    together: dict[str, str | Statistic] = {}
    for item in (item for several in needs for item in several):
        name = name_of(item)
        known = together.setdefault(name, name)
        if isinstance(item, str) or item == BUILT_IN.get(name):
            continue
        if isinstance(known, Statistic) and known != item:
            raise ValueError(
                f"two different statistics are named {name!r}. Give them different names; or, where they are meant to be "
                "the same, make the Statistic once, outside of the function that makes the optimizer."
            )
        together[name] = item
    return tuple(together.values())


def canonical(statistics: str | Statistic | Iterable[str | Statistic]) -> tuple[Statistic, ...]:
    """Accepts names and objects; returns objects with distinct names.

    >>> names_of(canonical(("mean", "mean_square")))
    ('mean', 'mean_square')
    """
    others = "per_example.Statistic(name, fn)"
    result = named(statistics, Statistic, BUILT_IN, "statistic", others)
    for item in result:
        if item != BUILT_IN.get(item.name, item):
            raise ValueError(f"statistic {item.name!r} is built in: choose another name for yours.")
    return result


def named(given: Any, kind: type[T], built_in: Mapping[str, T], what: str, others: str) -> tuple[T, ...]:
    """One or several names of `built_in`, or objects of this kind, as objects with distinct names.

    Args:
      what: they are, and how `others` are made, for errors.
    """
    result: dict[str, T] = {}
    for item in (given,) if isinstance(given, str | kind) else given:
        if isinstance(item, str):
            if item not in built_in:
                near = difflib.get_close_matches(item, built_in, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"unknown {what} {item!r}.{hint} Known names: {', '.join(built_in)}. Others are made with {others}."
                )
            item = built_in[item]
        if not isinstance(item, kind):
            raise TypeError(f"{what}s must be names or per_example.{kind.__name__} objects, not {type(item).__name__}.")
        if item.name in result:
            raise ValueError(f"{what} {item.name!r} is given twice.")
        result[item.name] = item
    return tuple(result.values())
