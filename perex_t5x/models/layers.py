"""Layers: norm, projection, embedding, MLP. Parameters are float32 and carry logical axis names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.experimental.layout import Layout, with_layout_constraint

from perex_t5x import partitioning
from perex_t5x.models import dropout
from perex_t5x.models.config import ACTIVATIONS, T5Config
from perex_t5x.models.head import Head, operand_dtype
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
    return cast(jax.Array, whole).astype(dtype)  # `param` takes the array out of its box


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + 1e-6) · scale, without mean subtraction or bias; computed in at least float32."""

    config: T5Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, inverse_BxTx1: jax.Array | None = None) -> jax.Array:
        """`inverse_BxTx1` is `carried_rms(x)`, where it has been computed with x."""
        wide = self.config.wide_dtype
        scale_D = parameter(self, "scale", nn.initializers.ones_init(), ("embed",), (x_BxTxD.shape[-1],), wide)
        scale_1x1xD = scale_D.reshape((1,) * (x_BxTxD.ndim - 1) + (-1,))
        if inverse_BxTx1 is None:
            inverse_BxTx1 = inverse_rms(x_BxTxD, wide)
            y_BxTxD = x_BxTxD.astype(wide) * inverse_BxTx1 * scale_1x1xD
        else:
            y_BxTxD = _scaled(x_BxTxD, inverse_BxTx1, scale_1x1xD)
        return y_BxTxD.astype(self.config.compute_dtype)


def inverse_rms(x_BxTxD: jax.Array, wide: jnp.dtype) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(jnp.square(x_BxTxD.astype(wide)), axis=-1, keepdims=True) + 1e-6)


def carried_rms(x_BxTxD: jax.Array, config: T5Config) -> jax.Array | None:
    """1 / sqrt(mean(x²) + 1e-6) where x is computed, for the `RMSNorm` of it; None where that is no gain.

    On TPUs the product that gives x sums its squares as they leave the matrix unit. Where the norm is in the next step of
    a scan, the sum would be a pass over the memory of its own, and another one in the recomputation.
    """
    return jax.lax.stop_gradient(inverse_rms(x_BxTxD, config.wide_dtype)) if for_tpu() else None


@jax.custom_vjp
def _scaled(x_BxTxD: jax.Array, inverse_BxTx1: jax.Array, scale_1x1xD: jax.Array) -> jax.Array:
    """x · inverse · scale, differentiated with inverse = inverse_rms(x)."""
    return x_BxTxD.astype(scale_1x1xD.dtype) * inverse_BxTx1 * scale_1x1xD


def _scaled_backward(residuals: tuple[jax.Array, ...], y_bar_BxTxD: jax.Array) -> tuple[jax.Array, ...]:
    x_BxTxD, inverse_BxTx1, scale_1x1xD = residuals
    normed_BxTxD = x_BxTxD.astype(scale_1x1xD.dtype) * inverse_BxTx1
    scale_bar_1x1xD = jnp.sum(y_bar_BxTxD * normed_BxTxD, axis=tuple(range(x_BxTxD.ndim - 1)), keepdims=True)
    bar_BxTxD = y_bar_BxTxD * scale_1x1xD
    along_BxTx1 = jnp.mean(bar_BxTxD * normed_BxTxD, axis=-1, keepdims=True)
    x_bar_BxTxD = inverse_BxTx1 * (bar_BxTxD - normed_BxTxD * along_BxTx1)
    return x_bar_BxTxD.astype(x_BxTxD.dtype), jnp.zeros_like(inverse_BxTx1), scale_bar_1x1xD


_scaled.defvjp(lambda *x: (_scaled(*x), x), _scaled_backward)


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
    def __call__(
        self, x_BxTxD: jax.Array, joined: bool = False, product: Callable[..., jax.Array] | None = None
    ) -> jax.Array:
        """x W.

        Args:
          joined: what is given as several axes, `num_inputs` of x or `features` of y, is one.
          product: of x and W, in place of `project`: of something that is made of x.
        """
        inputs = x_BxTxD.shape[-1:] if joined else x_BxTxD.shape[-self.num_inputs :]
        features = (math.prod(self.features),) if joined else self.features
        shape = (math.prod(inputs), math.prod(features))
        kernel_DxF = parameter(self, "kernel", self.kernel_init, self.axes, shape, self.dtype)
        return (product or project)(x_BxTxD.astype(self.dtype), kernel_DxF, inputs, features)


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


def logits(x_BxTxD: jax.Array, kernel_DxV: jax.Array) -> jax.Array:
    """x W, in W's dtype."""
    logits_BxTxV = project(x_BxTxD.astype(kernel_DxV.dtype), kernel_DxV, kernel_DxV.shape[:1], kernel_DxV.shape[1:])
    return constrain(logits_BxTxV, ("batch", "length", "vocab"))


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
            sent_as=operand_dtype(cfg) if cfg.logits_via_embedding else cfg.compute_dtype,
        )

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        x_BxTxD = jnp.take(self.embedding, tokens_BxT, axis=0, mode="fill", fill_value=jnp.nan)
        return constrain(x_BxTxD.astype(self.config.compute_dtype), ("batch", "length", "embed"))

    def attend(self, x_BxTxD: jax.Array, head: Head | None = None) -> Any:
        """Logits x Eᵀ / sqrt(D), or what `head` makes of them: the rows of E have unit variance, so logits have, too."""
        x_BxTxD = x_BxTxD.astype(self.config.wide_dtype) / math.sqrt(self.config.emb_dim)
        return (head or logits)(x_BxTxD, self.embedding.T)


class OutputProjection(nn.Module):
    """Logits x W, or what `head` makes of them."""

    config: T5Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, head: Head | None = None) -> Any:
        cfg = self.config
        shape = (x_BxTxD.shape[-1], cfg.vocab_size)
        wide, sent_as = cfg.wide_dtype, operand_dtype(cfg)
        kernel_DxV = parameter(self, "kernel", fan_in_init, ("embed", "vocab"), shape, wide, sent_as)
        return (head or logits)(x_BxTxD, kernel_DxV)


class MlpBlock(nn.Module):
    """wo(act_0(wi_0 x) · act_1(wi_1 x) · ...): gated with two activations, plain with one (named `wi`)."""

    config: T5Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        cfg = self.config
        single = len(cfg.mlp_activations) == 1
        branches = []
        for i in range(len(cfg.mlp_activations)):
            wi = Dense((cfg.mlp_dim,), ("embed", "mlp"), cfg.compute_dtype, name="wi" if single else f"wi_{i}")
            branches.append(named(wi(x_BxTxD), "mlp_in"))
        if for_tpu():
            branches = _cotangents_held(*branches)
        branches = [ACTIVATIONS[name](branch) for name, branch in zip(cfg.mlp_activations, branches, strict=True)]
        hidden_BxTxF = math.prod(branches[1:], start=branches[0])
        hidden_BxTxF = constrain(hidden_BxTxF, ("batch", "length", "mlp"))
        hidden_BxTxF = dropout.dropout(hidden_BxTxF, keys_B, dropout.INSIDE_MLP, cfg.dropout_rate)
        return Dense((cfg.emb_dim,), ("mlp", "embed"), cfg.compute_dtype, name="wo")(hidden_BxTxF)


@jax.custom_vjp
def _cotangents_held(*branches_BxTxF: jax.Array) -> tuple[jax.Array, ...]:
    """The same values; their cotangents are computed once and held.

    Two products take each cotangent, and XLA would compute the activations' derivatives again in the operands of both, at
    up to half the cost of the product. Held, they are computed as the product before them leaves the matrix unit; and they
    are laid out as the values are, which XLA would otherwise copy to another order on v6e.
    """
    return branches_BxTxF


def _cotangents_held_backward(_: None, cotangents_BxTxF: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    in_order = [Layout(tuple(range(x.ndim))) for x in cotangents_BxTxF]
    return tuple(with_layout_constraint(jax.lax.optimization_barrier(list(cotangents_BxTxF)), in_order))


_cotangents_held.defvjp(lambda *x: (x, None), _cotangents_held_backward)
