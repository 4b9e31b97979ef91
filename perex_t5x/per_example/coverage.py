"""Which reduction each parameter's gradient gets, before anything is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from perex_t5x.per_example.engine.accumulate import Holding
from perex_t5x.per_example.engine.arguments import Selected
from perex_t5x.per_example.grad_statistics import grad_statistics
from perex_t5x.per_example.kernels.dispatch import NOT_FOR_TPUS


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter.

    Attributes:
      reduction: see the table in `perex_t5x.per_example.reductions.reducer`.
      transient_bytes: of gradients that are materialised while it is reduced.
      note: why it is not a better reduction.
      kernel: why TPUs use XLA's loop and not the kernel; '' where they use the kernel, None where there is no kernel.
    """

    parameter: str
    shape: tuple[int, ...]
    reduction: str
    exact: bool
    transient_bytes: int
    note: str
    kernel: str | None = None

    @property
    def form(self) -> str:
        """`reduction`, under its earlier name."""
        return self.reduction


def kernel_cell(kernel: str | None) -> str:
    """
    >>> kernel_cell(""), kernel_cell("a sequence of 4"), kernel_cell(None)
    ('yes', 'no: a sequence of 4', '-')
    """
    return "-" if kernel is None else f"no: {kernel}" if kernel else "yes"


class Coverage(tuple):
    """Rows, one per parameter; prints as a table.

    Attributes:
      microbatch_sizes: examples at a time, by platform.
      passes: 2 where clipping or skipping needs every gradient's norm before the first sum, and one backward pass would have
        to hold more than `clip_memory`.
      holdings: by platform, how norms come first, and the bytes held.
      norm_reductions: parameter -> reduction of the norms, where they come first.

    >>> loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"] + p["b"]))
    >>> table = coverage(loss, {"w": jnp.ones((3, 2)), "b": jnp.ones((1, 2))}, jnp.ones((4, 3)))
    >>> {row.parameter: row.reduction for row in table}, table.passes
    ({'b': 'all at once', 'w': 'factored'}, 1)
    """

    microbatch_sizes: dict[str, int]
    passes: int
    holdings: dict[str, Holding]
    norm_reductions: dict[str, str]

    def __str__(self) -> str:
        header = ("parameter", "shape", "reduction", "exact", "transient bytes", "kernel", "note")
        cells = [header] + [
            (
                r.parameter,
                str(r.shape),
                r.reduction,
                "yes" if r.exact else "no",
                f"{r.transient_bytes:,}",
                kernel_cell(r.kernel),
                r.note,
            )
            for r in self
        ]
        if all(r.kernel in (None, NOT_FOR_TPUS) for r in self):  # nothing to say of kernels
            cells = [(*row[:5], row[6]) for row in cells]
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        sizes = ", ".join(f"{size} on {name}" for name, size in self.microbatch_sizes.items() if name != "default")
        sizes = f"{sizes}, else {self.microbatch_sizes['default']}" if sizes else str(self.microbatch_sizes["default"])
        footer = [f"examples at a time: {sizes}"]
        for platform, holding in self.holdings.items():
            on = f" on {platform}" if len(set(self.holdings.values())) > 1 else ""
            if holding.strategy and (on or platform == "default"):
                footer.append(f"{holding}{on}")
        if self.norm_reductions:
            footer.append(f"norms: {', '.join(sorted(set(self.norm_reductions.values())))}")
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "", *footer])


def coverage(
    loss_fn: Callable[..., Any], *arguments: Any, statistics: Any = ("mean", "mean_square"), **options: Any
) -> Coverage:
    """Which reduction `grad_statistics(loss_fn, statistics, **options)` uses for each parameter of these arguments.

    >>> rows = coverage(lambda w, x: jnp.sum(jnp.tanh(x @ w)), jnp.ones((3, 2)), jnp.ones((4, 3)))
    >>> rows[0].reduction
    'factored'
    """
    compute = grad_statistics(loss_fn, statistics, **options)
    how = compute.trace(*arguments)
    selected = Selected.make(arguments, compute.options.roles, compute.options.parameters)
    table = Coverage(
        Row(name, jnp.shape(leaf), r.reduction, True, r.transient_bytes, r.note, r.kernel)
        for name, leaf, r in zip(selected.names, selected.leaves(arguments), how.reductions, strict=True)
    )
    table.microbatch_sizes = how.microbatch_sizes
    table.holdings = how.holdings
    table.passes = max(h.passes for h in how.holdings.values())
    norm_reductions = zip(selected.names, how.norm_reductions or (), strict=False)
    table.norm_reductions = {name: r.reduction for name, r in norm_reductions}
    return table
