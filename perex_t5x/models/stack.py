"""A stack of equal layers: unrolled or scanned, with or without rematerialisation, always the same function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from perex_t5x import partitioning
from perex_t5x.models.attention import LayerContext
from perex_t5x.models.config import REMAT_POLICIES, T5Config
from perex_t5x.partitioning import gather


def apply_layers(
    layer_cls: type[nn.Module], config: T5Config, num_layers: int, x_BxTxD: jax.Array, context: LayerContext, **kwargs
) -> jax.Array:
    """Applies `num_layers` layers; call it inside a compact method.

    Parameters are `layers_0`, `layers_1`, ... unrolled, or one `layers` whose leaves have a leading axis `layers`
    when `config.scan_layers`. `restack` turns the first into the second.

    Args:
      layer_cls: a module called as `layer(x_BxTxD, layer_index, context) -> (x_BxTxD, None)`.
      kwargs: given to the layer's constructor, beside `config`.
    """
    policy = REMAT_POLICIES[config.remat_policy]
    if partitioning.holds_parts() and config.remat_policy in ("none", "everything_saveable"):
        policy = gather.keep_all_but_gathered  # else all layers' parameters would be kept whole
    if policy is not None and context.mode == "train":
        # A scan's body cannot be merged with its own recomputation; unrolled layers could be, and must not.
        layer_cls = nn.remat(layer_cls, policy=policy, prevent_cse=not config.scan_layers)
    if not config.scan_layers:
        for i in range(num_layers):
            x_BxTxD, _ = layer_cls(config=config, name=f"layers_{i}", **kwargs)(x_BxTxD, i, context)
        return x_BxTxD
    scanned_cls = nn.scan(
        layer_cls,
        variable_axes={"params": 0, "cache": 0, "cross_cache": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast),
        length=num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    scanned = scanned_cls(config=config, name="layers", **kwargs)
    x_BxTxD, _ = scanned(x_BxTxD, jnp.arange(num_layers, dtype=jnp.int32), context)
    return x_BxTxD


def restack(params: dict) -> dict:
    """Turns unrolled parameters (`layers_0`, ...) into scanned ones (`layers`, leading axis of layers).

    >>> import numpy as np
    >>> unrolled = {"decoder": {"layers_0": {"w": np.zeros(3)}, "layers_1": {"w": np.ones(3)}}}
    >>> restack(unrolled)["decoder"]["layers"]["w"].shape
    (2, 3)
    """
    result, layers = {}, {}
    for name, value in params.items():
        prefix, _, number = name.rpartition("_")
        if prefix == "layers" and number.isdigit():
            layers[int(number)] = value
        else:
            result[name] = restack(value) if isinstance(value, dict) else value
    if layers:
        result["layers"] = jax.tree.map(lambda *x: jnp.stack(x), *(layers[i] for i in sorted(layers)))
    return result
