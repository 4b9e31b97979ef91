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
from perex_t5x.optimizers.combined import (
    MultiOptimizer,
    OptaxWrapper,
    adabelief,
    adagrad,
    adamw,
    chain,
    fromage,
    lamb,
    lars,
    lion,
    noisy_sgd,
    radam,
    rmsprop,
    sgd,
    wrap_optax_optimizer,
    yogi,
)
from perex_t5x.optimizers.differential_privacy import dp, dp_epsilon
from perex_t5x.optimizers.learning_rate import RateDriven, drive_learning_rate
from perex_t5x.optimizers.moments import scale_by_moments, second_moment
from perex_t5x.optimizers.operand_family import micro_clip, micro_lion
from perex_t5x.optimizers.run_context import run_context
from perex_t5x.optimizers.sign_family import micro_sign, scale_by_sign, sign_ema, sign_sgd

__all__ = [
    "MultiOptimizer",
    "OptaxWrapper",
    "Privacy",
    "RateDriven",
    "StatisticsTransformation",
    "adabelief",
    "adagrad",
    "adam",
    "adamw",
    "chain",
    "clip_by_global_norm",
    "descend",
    "dp",
    "dp_epsilon",
    "drive_learning_rate",
    "eve",
    "from_statistics",
    "fromage",
    "inverse_batch_size",
    "lamb",
    "lars",
    "lion",
    "logged",
    "micro_adam",
    "micro_adam_msq",
    "micro_adam_var",
    "micro_clip",
    "micro_lion",
    "micro_sign",
    "needs_of",
    "noisy_sgd",
    "operands_of",
    "privacy_of",
    "radam",
    "rmsprop",
    "run_context",
    "scale_by_eve",
    "scale_by_moments",
    "scale_by_sign",
    "second_moment",
    "sgd",
    "sign_ema",
    "sign_sgd",
    "wrap_optax_optimizer",
    "yogi",
]
