"""Examples as rows: what `vmap` maps over, as the per-example engine does, joins the rows that a batch has anyway."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def examples_as_rows(
    function: Callable[..., Any], weights: Sequence[int] = (), shared: Sequence[int] = ()
) -> Callable[..., Any]:
    """The function, whose arguments and results are arrays with rows first; under `vmap` examples and rows are one axis.

    A kernel, or a loop over chunks, then sees one large array: the program is that of a batch. There is no
    derivative: use it inside a `jax.custom_vjp`.

    Args:
      function: of arrays, or trees of them.
      weights: positions of arguments without rows. Where these are mapped, examples go one after another.
      shared: positions of arguments of which a single row serves all; such a row stays single where it is not mapped.

    >>> how_many = examples_as_rows(lambda x_BxT: jnp.full(len(x_BxT), len(x_BxT)))
    >>> jax.vmap(how_many)(jnp.ones((3, 2, 5))).tolist()
    [[6, 6], [6, 6], [6, 6]]
    """

    @custom_vmap
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    @call.def_vmap
    def mapped(axis_size: int, in_batched: Any, *arguments: Any) -> Any:
        if any(jax.tree.leaves([in_batched[i] for i in weights])):
            out = _one_after_another(call, in_batched, arguments)
            return out, jax.tree.map(lambda _: True, out)
        by_row = [i for i in range(len(arguments)) if i not in weights]
        counts = [jax.tree.map(lambda x, b: x.shape[1 if b else 0], arguments[i], in_batched[i]) for i in by_row]
        num_rows = max(jax.tree.leaves(counts))

        def folded(i: int, x: jax.Array, is_batched: bool) -> jax.Array:
            if not is_batched:
                if i in shared and len(x) == 1:
                    return x
                x = x[None]
            x = jnp.broadcast_to(x, (axis_size, num_rows, *x.shape[2:]))
            return x.reshape(-1, *x.shape[2:])

        joined = list(arguments)
        for i in by_row:
            joined[i] = jax.tree.map(functools.partial(folded, i), arguments[i], in_batched[i])
        out = jax.tree.map(lambda x: x.reshape(axis_size, num_rows, *x.shape[1:]), call(*joined))
        return out, jax.tree.map(lambda _: True, out)

    return call


def _one_after_another(call: Callable[..., Any], in_batched: Any, arguments: Any) -> Any:
    leaves, tree = jax.tree.flatten(arguments)
    is_mapped = jax.tree.leaves(in_batched)

    def one(some: list[jax.Array]) -> Any:
        mapped = iter(some)
        return call(*tree.unflatten([next(mapped) if b else x for x, b in zip(leaves, is_mapped, strict=True)]))

    return jax.lax.map(one, [x for x, b in zip(leaves, is_mapped, strict=True) if b])
