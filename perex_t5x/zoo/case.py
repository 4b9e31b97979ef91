"""What a case of the zoo is, and how one is written: a function of a `Draw` that returns (loss, params, batch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, and what to call it with.

    Attributes:
      loss: loss(params, batch, *extra) -> the mean over examples of a loss of one example, or (that, aux).
      extra: further arguments of the loss; a key where `options` has `rng_argnums`.
      options: of `per_example.grad_statistics`, where the loss needs any: method, rng_argnums, has_aux.
    """

    name: str
    loss: Callable[..., Any]
    params: Any
    batch: Any
    extra: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def examples(self) -> int:
        return jax.tree.leaves(self.batch)[0].shape[0]


@dataclasses.dataclass(frozen=True)
class Draw:
    """Sizes and random numbers of one case; by numpy, so that nothing is compiled for them."""

    large: bool
    random: np.random.Generator

    def size(self, tiny: int, large: int) -> int:
        """The size of some axis: `tiny` in tests, `large` in benchmarks."""
        return large if self.large else tiny

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(self.random.normal(size=shape) * scale, jnp.float32)

    def weight(self, *shape: int) -> jax.Array:
        """Of a product over the last axis but one."""
        return self.normal(*shape, scale=shape[-2] ** -0.5)

    def near_one(self, *shape: int) -> jax.Array:
        return 1.0 + self.normal(*shape, scale=0.1)

    def ids(self, limit: int, *shape: int) -> jax.Array:
        return jnp.asarray(self.random.integers(0, limit, shape), jnp.int32)


Parts = tuple[Callable[..., Any], Any, Any]
MAKERS: dict[str, tuple[Callable[[Draw], Parts], dict[str, Any]]] = {}


def case(**options: Any) -> Callable[[Callable[[Draw], Parts]], Callable[[Draw], Parts]]:
    """Enters a function of a `Draw` into the zoo, under its name; `options` are those of `grad_statistics`."""

    def enter(maker: Callable[[Draw], Parts]) -> Callable[[Draw], Parts]:
        add(maker.__name__, maker, **options)
        return maker

    return enter


def add(name: str, maker: Callable[[Draw], Parts], **options: Any) -> None:
    if name in MAKERS:
        raise ValueError(f"the zoo has two cases of the name {name!r}.")
    MAKERS[name] = (maker, options)


def row(vector: jax.Array, like: jax.Array) -> jax.Array:
    """`vector` with unit axes before its own, to be added to or multiplied with `like`."""
    return vector.reshape((1,) * (like.ndim - vector.ndim) + vector.shape)


def affine(x: jax.Array, p: Any) -> jax.Array:
    """x w + b."""
    y = x @ p["w"]
    return y + row(p["b"], y)


def dense(draw: Draw, inputs: int, outputs: int) -> dict[str, jax.Array]:
    """Parameters for `affine`."""
    return {"w": draw.weight(inputs, outputs), "b": draw.normal(outputs, scale=0.1)}


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5) * row(scale, x)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all axes but the last, which is that of classes."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def mean_over_examples(one: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A loss of a batch from one of a single example without its axis, as Equinox users write it."""
    return lambda params, batch: jnp.mean(jax.vmap(one, in_axes=(None, 0))(params, batch))
