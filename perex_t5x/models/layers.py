"""Layers: norm, projection, embedding, MLP. Parameters are float32 and carry logical axis names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from perex_t5x import partitioning
from perex_t5x.models import dropout
from perex_t5x.models.config import ACTIVATIONS, T5Config
from perex_t5x.models.remat import named
from perex_t5x.partitioning import constrain
from perex_t5x.per_example.kernels.dispatch import for_tpu

Initializer = Callable[..., jax.Array]

fan_in_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def parameter(
    module: nn.Module,
    name: str,
    init: Initializer,
    axes: tuple[str, ...],
    shape: Sequence[int],
    dtype: Any,
    sent_as: Any = None,
) -> jax.Array:
    """Parameter `name` of `module`, whole and in `dtype`; call it where `module.param` can be called.

    Under FSDP the step's `shard_map` hands each device a shard of every parameter. The module learns that from
    `partitioning.has_sharded_parameters()`, which the trainer's loss sets while it is traced (`PjitPartitioner.manual()`),
    and gathers the parameter here, where it is used: inside a scanned layer, one layer's parameters are whole at a time.

    Args:
      init, axes, shape: as for `module.param` with `nn.with_logical_partitioning`.
      sent_as: dtype to send the shards in; see `perex_t5x.partitioning.gather`.
    """
    if partitioning.has_sharded_parameters() and module.has_variable("params", name):
        shard = module.get_variable("params", name)  # `module.param` would refuse it: it has not the whole shape
        return partitioning.gather_parameter(shard, axes, shape, dtype, sent_as)
    whole = module.param(name, nn.with_logical_partitioning(init, axes), tuple(shape), jnp.float32)
    return whole.astype(dtype)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + 1e-6) · scale, without mean subtraction or bias; computed in at least float32."""

    config: T5Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        wide = self.config.wide_dtype
        scale_D = parameter(self, "scale", nn.initializers.ones_init(), ("embed",), (x_BxTxD.shape[-1],), wide)
        x_BxTxD = x_BxTxD.astype(wide)
        mean_square_BxTx1 = jnp.mean(jnp.square(x_BxTxD), axis=-1, keepdims=True)
        y_BxTxD = x_BxTxD * jax.lax.rsqrt(mean_square_BxTx1 + 1e-6)
        scale_1x1xD = scale_D.reshape((1,) * (x_BxTxD.ndim - 1) + (-1,))
        return (y_BxTxD * scale_1x1xD).astype(self.config.compute_dtype)


class Dense(nn.Module):
    """y = x W, no bias, over the last axes of x.

    The parameter W is a matrix whatever the axes of x and y are: [heads, head_dim] is one dimension of it.

    Attributes:
      features: y's axes in place of x's, such as (mlp_dim,) or (heads, head_dim).
      axes: the logical names of W's two dimensions.
      num_inputs: how many axes of x, the last ones, are contracted.
    """

    features: tuple[int, ...]
    axes: tuple[str, str]
    dtype: jnp.dtype
    kernel_init: Initializer = fan_in_init
    num_inputs: int = 1

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        inputs = x_BxTxD.shape[-self.num_inputs :]
        shape = (math.prod(inputs), math.prod(self.features))
        kernel_DxF = parameter(self, "kernel", self.kernel_init, self.axes, shape, self.dtype)
        return project(x_BxTxD.astype(self.dtype), kernel_DxF, inputs, self.features)


def project(x_BxTxD: jax.Array, kernel_DxF: jax.Array, inputs: Sequence[int], features: Sequence[int]) -> jax.Array:
    """Contracts the last axes of x, `inputs`, with the kernel's first; `features` take their place.

    The same product in the form that suits the platform.
    """
    rows = x_BxTxD.shape[: x_BxTxD.ndim - len(inputs)]
    if for_tpu():
        # Every axis as it is. Rows x length as one axis, or heads split off after the product, are copies there: the
        # arrays' tiled layouts have no such view.
        kernel = kernel_DxF.reshape(*inputs, *features)
        contracted = tuple(range(len(rows), x_BxTxD.ndim)), tuple(range(len(inputs)))
        return jax.lax.dot_general(x_BxTxD, kernel, (contracted, ((), ())))
    # As a product of two matrices: on CPUs XLA is up to twice as fast with these as with a batch of rows.
    x_MxD = x_BxTxD.reshape(-1, math.prod(inputs))
    y_MxF = jax.lax.dot_general(x_MxD, kernel_DxF, (((1,), (0,)), ((), ())))
    return y_MxF.reshape(*rows, *features)


class Embed(nn.Module):
    """Token embedding, and the tied output projection of it.

    An id outside the table gives NaN rather than another token's vector: a vocabulary larger than `vocab_size` shows
    in the first loss.
    """

    config: T5Config

    def setup(self) -> None:
        cfg = self.config
        # Rows are looked up, and their gradients added, in at least float32; sent in what the rows become.
        self.embedding = parameter(
            self,
            "embedding",
            nn.initializers.normal(1.0),
            ("vocab", "embed"),
            (cfg.vocab_size, cfg.emb_dim),
            cfg.wide_dtype,
            sent_as=cfg.wide_dtype if cfg.logits_via_embedding else cfg.compute_dtype,
        )

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        x_BxTxD = jnp.take(self.embedding, tokens_BxT, axis=0, mode="fill", fill_value=jnp.nan)
        return constrain(x_BxTxD.astype(self.config.compute_dtype), ("batch", "length", "embed"))

    def attend(self, x_BxTxD: jax.Array) -> jax.Array:
        """Logits x Eᵀ / sqrt(D): the rows of E have unit variance, the scaling gives the logits the same."""
        wide = self.config.wide_dtype
        x_BxTxD = x_BxTxD.astype(wide) / math.sqrt(self.config.emb_dim)
        return project(x_BxTxD, self.embedding.T, (self.config.emb_dim,), (self.config.vocab_size,))


class MlpBlock(nn.Module):
    """wo(act_0(wi_0 x) · act_1(wi_1 x) · ...): gated with two activations, plain with one (named `wi`)."""

    config: T5Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        cfg = self.config
        single = len(cfg.mlp_activations) == 1
        hidden_BxTxF = None
        for i, activation in enumerate(cfg.mlp_activations):
            wi = Dense((cfg.mlp_dim,), ("embed", "mlp"), cfg.compute_dtype, name="wi" if single else f"wi_{i}")
            branch_BxTxF = ACTIVATIONS[activation](named(wi(x_BxTxD), "mlp_in"))
            hidden_BxTxF = branch_BxTxF if hidden_BxTxF is None else hidden_BxTxF * branch_BxTxF
        hidden_BxTxF = constrain(hidden_BxTxF, ("batch", "length", "mlp"))
        hidden_BxTxF = dropout.dropout(hidden_BxTxF, keys_B, dropout.INSIDE_MLP, cfg.dropout_rate)
        return Dense((cfg.emb_dim,), ("mlp", "embed"), cfg.compute_dtype, name="wo")(hidden_BxTxF)
