"""Optimizers on statistics of per-example gradients, as optax transformations; how a trainer drives their learning rate."""

from perex_t5x.optimizers.adam_family import adam, eve, micro_adam, micro_adam_msq, micro_adam_var, scale_by_eve
from perex_t5x.optimizers.base import (
    Privacy,
    StatisticsTransformation,
    descend,
    from_statistics,
    inverse_batch_size,
    logged,
    needs_of,
    operands_of,
    privacy_of,
)
from perex_t5x.optimizers.clipping import clip_by_global_norm
from perex_t5x.optimizers.differential_privacy import dp, dp_epsilon
from perex_t5x.optimizers.learning_rate import RateDriven, drive_learning_rate
from perex_t5x.optimizers.moments import scale_by_moments, second_moment
from perex_t5x.optimizers.operand_family import micro_clip, micro_lion
from perex_t5x.optimizers.sign_family import micro_sign, scale_by_sign, sign_ema, sign_sgd

__all__ = [
    "Privacy",
    "RateDriven",
    "StatisticsTransformation",
    "adam",
    "clip_by_global_norm",
    "descend",
    "dp",
    "dp_epsilon",
    "drive_learning_rate",
    "eve",
    "from_statistics",
    "inverse_batch_size",
    "logged",
    "micro_adam",
    "micro_adam_msq",
    "micro_adam_var",
    "micro_clip",
    "micro_lion",
    "micro_sign",
    "needs_of",
    "operands_of",
    "privacy_of",
    "scale_by_eve",
    "scale_by_moments",
    "scale_by_sign",
    "second_moment",
    "sign_ema",
    "sign_sgd",
]
