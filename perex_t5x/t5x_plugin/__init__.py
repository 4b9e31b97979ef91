"""Per-example statistics inside the real T5X: a trainer and optimizers for its own `train.py`. docs/inside_t5x.md.

In a Gin file of T5X's, after its run and model files:

    from perex_t5x import t5x_plugin

    train.trainer_cls = @t5x_plugin.PerExampleTrainer
    OPTIMIZER = @t5x_plugin.micro_adam()

T5X is not in the package registry, so it is no dependency: this package, which nothing else here imports, is all that needs
it.
"""

# T5X is not in the package registry, so it is not there when types are checked.
# pyright: reportMissingImports=false

try:
    import t5x.trainer  # noqa: F401
except ImportError as e:
    raise ImportError(
        "perex_t5x.t5x_plugin is for use inside T5X (https://github.com/google-research/t5x), which cannot be imported "
        f"here: {e}. Install T5X, or put its checkout on PYTHONPATH. Without T5X use perex_t5x.train, which has T5X's names."
    ) from e

from perex_t5x.t5x_plugin.optimizer import (
    PerExampleOptimizer,
    adam,
    eve,
    micro_adam,
    micro_adam_msq,
    micro_adam_var,
    micro_clip,
    micro_lion,
    micro_sign,
    sign_ema,
    sign_sgd,
)
from perex_t5x.t5x_plugin.trainer import PerExampleTrainer

__all__ = [
    "PerExampleOptimizer",
    "PerExampleTrainer",
    "adam",
    "eve",
    "micro_adam",
    "micro_adam_msq",
    "micro_adam_var",
    "micro_clip",
    "micro_lion",
    "micro_sign",
    "sign_ema",
    "sign_sgd",
]
