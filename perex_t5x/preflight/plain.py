"""The same step with the plain batch gradient: what the statistics' cost is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import optax

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer

COMPARED = (
    "the same model, mesh, batch and microbatches with optax.adamw on the plain gradient, no clipping, no skipping"
)


def plain_trainer(trainer: Trainer) -> Trainer:
    """A trainer that differs from this one as `COMPARED` says."""
    return trainer.replace(
        optimizer_def=optax.adamw, clip_norm=None, non_finite="keep", monitor=None, group_size=1, unit="example"
    )
