"""T5X's `examples/scalable_t5`, which umT5 uses: scanned layers, each with a relative position bias of its own.

A T5X Gin file that says `from t5x.examples.scalable_t5 import network` becomes
`from perex_t5x.models import scalable_network as network`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from perex_t5x.arguments import Interval
from perex_t5x.models import config
from perex_t5x.models.network import Transformer

__all__ = ["T5Config", "Transformer"]


@dataclass(frozen=True)
class T5Config(config.T5Config):
    """`perex_t5x.models.T5Config` with the architecture and the defaults of T5X's scalable T5.

    Attributes:
      param_scan_axis: T5X's, without effect: the axis of layers is the first of stacked parameters.

    >>> config = T5Config(vocab_size=384)
    >>> config.scan_layers, config.relative_bias, config.dropout_rate
    (True, 'per_layer', 0.1)
    """

    mlp_activations: tuple[str, ...] = ("relu",)
    dropout_rate: Annotated[float, Interval("[0, 1)")] = 0.1
    relative_bias: Literal["shared", "per_layer"] = "per_layer"
    scan_layers: bool = True
    param_scan_axis: Literal[0, 1] = 1
