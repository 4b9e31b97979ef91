"""The same step with the plain batch gradient: what the statistics' cost is measured against."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import optax

from perex_t5x.optimizers.learning_rate import drive_learning_rate

if TYPE_CHECKING:
    from perex_t5x.trainer import Trainer

COMPARED = (
    "the same model, mesh, batch and microbatches with optax.adamw on the plain gradient, no clipping, no skipping"
)


def plain_trainer(trainer: Trainer) -> Trainer:
    """A trainer that differs from this one as `COMPARED` says."""
    plain = copy.copy(trainer)
    plain.model = copy.copy(trainer.model)
    plain.model.optimizer_def = optax.adamw
    plain.optimizer = drive_learning_rate(optax.adamw)
    plain.clip_norm, plain.non_finite, plain.monitor, plain.group_size = None, "keep", None, 1
    plain._needs = None  # found anew for this optimizer
    return plain
