"""Which form each parameter's gradient gets, before anything is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.per_example.arguments import parameter_names
from perex_t5x.per_example.grad_statistics import grad_statistics


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter: its form (see `perex_t5x.per_example.forms`), and the bytes of gradients held while it is reduced."""

    parameter: str
    shape: tuple[int, ...]
    form: str
    exact: bool
    transient_bytes: int
    note: str


class Coverage(tuple):
    """Rows, one per parameter; prints as a table."""

    def __str__(self) -> str:
        header = ("parameter", "shape", "form", "exact", "transient bytes", "note")
        cells = [header] + [
            (r.parameter, str(r.shape), r.form, "yes" if r.exact else "no", f"{r.transient_bytes:,}", r.note)
            for r in self
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def coverage(
    loss_fn: Callable[..., Any], *arguments: Any, statistics: Any = ("mean", "mean_square"), **options: Any
) -> Coverage:
    """Which form `grad_statistics(loss_fn, statistics, **options)` uses for each parameter of these arguments.

    >>> rows = coverage(lambda w, x: jnp.sum(jnp.tanh(x @ w)), jnp.ones((3, 2)), jnp.ones((4, 3)))
    >>> rows[0].form
    'factored'
    """
    compute = grad_statistics(loss_fn, statistics, **options)
    seen: list[Any] = []
    jax.eval_shape(lambda *traced: seen.extend(compute.reductions(*traced)), *arguments)
    roles = compute.options.roles
    leaves = jax.tree.leaves(tuple(arguments[i] for i in roles.argnums))
    return Coverage(
        Row(name, jnp.shape(leaf), r.form, True, r.transient_bytes, r.note)
        for name, leaf, r in zip(parameter_names(arguments, roles), leaves, seen, strict=True)
    )
