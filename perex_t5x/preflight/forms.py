"""Which form each parameter's statistics have in the real step, on its mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.tree_util import keystr

from perex_t5x.gradients import gradient_with_statistics

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer


@dataclass(frozen=True)
class ParameterForm:
    """One parameter: the part of it on one device, its form, and the bytes of gradients held while it is reduced.

    Attributes:
      parameter: its name.
      shape: of the part that one device has over the data axes.
      form: see `perex_t5x.per_example.reductions.reducer`.
      norm_form: its form in the pass for the norms, where clipping or skipping needs one; else ''.
      transient_bytes: held at a time, on one device.
      note: why it is not a better form.
      kernel: why it is not by the kernel; '' where it is, None where there is none.
    """

    parameter: str
    shape: tuple[int, ...]
    form: str
    norm_form: str
    transient_bytes: int
    note: str
    kernel: str | None = None


def forms_of_step(trainer: Trainer, batch_spec: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[ParameterForm, ...]:
    """What `per_example.coverage` says of this trainer's step; empty for the plain gradient. Nothing is compiled."""
    shapes, _, _ = trainer.abstract_state({name: spec.shape for name, spec in batch_spec.items()})
    if trainer.has_plain_gradient(shapes.params):
        return ()
    seen: list[tuple[ParameterForm, ...]] = []

    def observe(compute: Any, params: Any, *rest: Any) -> None:
        seen.append(_rows(params, compute.account(params, *rest)))

    def traced(state: Any, batch: Any) -> Any:
        needs, shardings = trainer.needs(state.params), trainer.param_shardings(batch)
        return gradient_with_statistics(trainer.model, state, batch, needs, shardings, trainer.options, observe=observe)

    with trainer.partitioner.constraints():
        jax.eval_shape(traced, shapes, dict(batch_spec))
    return seen[0]


def _rows(params: Any, account: Any) -> tuple[ParameterForm, ...]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    norm_forms = [r.form for r in account.norm_forms] if account.norm_forms else [""] * len(leaves)
    return tuple(
        ParameterForm(
            keystr(path, simple=True, separator="/"),
            tuple(leaf.shape),
            r.form,
            norm_form,
            int(r.transient_bytes),
            r.note,
            r.kernel,
        )
        for (path, leaf), r, norm_form in zip(leaves, account.forms, norm_forms, strict=True)
    )
