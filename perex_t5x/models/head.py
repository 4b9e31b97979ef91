"""The output projection and its cross entropy in one function, some tokens of each row at a time.

With x the network's last values and W the output projection, the loss needs logits = x W, and its gradient

    ∂logits = (softmax(logits) (1 + 2 z log Z) - q) · weight,    ∂W = xᵀ ∂logits,    ∂x = ∂logits Wᵀ

The weights of the tokens are known before the loss is, so one pass computes each chunk's logits, its sums, and its
∂logits; the logits are not needed again. What stays is ∂logits, in the dtype to which the products round their factors:
bfloat16 on TPUs. No product is computed twice, and nothing of size tokens × vocabulary is float32 there. ∂W is one product
over all tokens, so the per-example engine reduces it as it does any other weight's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from perex_t5x import partitioning
from perex_t5x.models import losses, softmax_kernel
from perex_t5x.models.config import T5Config
from perex_t5x.models.losses import LogitSums, TokenLosses
from perex_t5x.models.rows import examples_as_rows
from perex_t5x.per_example.engine import shard_map
from perex_t5x.per_example.kernels.dispatch import for_tpu

# What to make of the network's last values x [B, T, D] and the output projection W [D, V] instead of logits.
Head = Callable[[jax.Array, jax.Array], Any]

# A row's logits are worth chunks from this many on (64 MB in float32): with fewer, one array of them is as good.
_LARGE = 2**24
# At a time: with fewer, reading the projection takes a TPU longer than the product; with more, only memory grows.
_TOKENS = 1024
_STEP = 16  # a chunk's length is a multiple of it: the rows of a TPU's bfloat16 tile


def operand_dtype(config: T5Config) -> jnp.dtype:
    """What the factors of the output projection's products are rounded to, and may be sent and kept in.

    TPUs round them to bfloat16 at JAX's default precision, so doing it before changes nothing.
    """
    precision = cast(Any, jax.config).jax_default_matmul_precision  # its class has a member for each option at run time
    rounds = for_tpu() and precision in (None, "default", "fastest", "bfloat16")
    return config.compute_dtype if rounds and config.compute_dtype == jnp.bfloat16 else config.wide_dtype


def is_worthwhile(config: T5Config, length: int) -> bool:
    """Whether the loss of rows of this length goes through `cross_entropy` here: see `T5Config.loss_chunks`."""
    if config.loss_chunks == "auto":
        return length * config.vocab_size >= _LARGE
    return config.loss_chunks > 0


def cross_entropy(
    x_BxTxD: jax.Array,
    kernel_DxV: jax.Array,
    targets_BxT: jax.Array,
    weights_BxT: jax.Array,
    normalizer: jax.Array | float,
    *,
    config: T5Config,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, TokenLosses]:
    """Σ weight · loss / normalizer, and each token's losses; `perex_t5x.models.losses.cross_entropy` of x W has the formula.

    Gradients are those of the first result; the second is a constant to them. They are computed along with the loss, so
    forward-mode derivatives (`jax.jvp`, `jax.hessian`) need `T5Config.loss_chunks = 0`.

    >>> config = T5Config(vocab_size=3, loss_chunks=2)
    >>> x, kernel = jnp.ones((1, 4, 1)), jnp.log(jnp.array([[0.5, 0.25, 0.25]]))
    >>> loss, per_token = cross_entropy(x, kernel, jnp.array([[1, 1, 0, 1]]), jnp.ones((1, 4)), 4.0, config=config)
    >>> [round(float(value), 4) for value in (loss, per_token.loss[0, 2])]
    [1.213, 0.6931]
    """
    how = _How(
        z_loss,
        label_smoothing,
        config.loss_chunks,
        operand_dtype(config),
        config.wide_dtype,
        partitioning.activation_sharding(("batch", "length", "vocab")),
    )
    weights_BxT = weights_BxT.astype(config.wide_dtype)
    normalizer = jnp.asarray(normalizer, config.wide_dtype)
    computed = _objective(how, x_BxTxD, kernel_DxV, targets_BxT, weights_BxT, normalizer)
    objective, per_token = cast(tuple[jax.Array, TokenLosses], computed)  # of a type that `custom_vjp` loses
    return objective, TokenLosses(*map(jax.lax.stop_gradient, per_token))


@dataclasses.dataclass(frozen=True)
class _How:
    """What does not depend on values, hashable."""

    z_loss: float
    label_smoothing: float
    chunks: int | str
    operand_dtype: Any
    dtype: Any  # of logits and losses
    sharding: Any  # of logits

    def chunk_length(self, rows: int, length: int) -> int:
        """How many tokens of each row go through at a time."""
        if self.chunks == "auto":
            at_once, step = -(-_TOKENS // rows), 128
        else:
            at_once = -(-length // int(self.chunks))
            step = _STEP if at_once > _STEP else 1
        at_once = -(-at_once // step) * step
        return min(at_once, length)

    def logits(self, x_BxCxD: jax.Array, kernel_DxV: jax.Array) -> jax.Array:
        product = functools.partial(jax.lax.dot_general, preferred_element_type=self.dtype)
        logits_BxCxV = product(x_BxCxD, kernel_DxV, (((2,), (0,)), ((), ())))
        return logits_BxCxV if self.sharding is None else jax.lax.with_sharding_constraint(logits_BxCxV, self.sharding)


# --- the loss and its gradient ----------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _objective(
    how: _How,
    x_BxTxD: jax.Array,
    kernel_DxV: jax.Array,
    targets_BxT: jax.Array,
    weights_BxT: jax.Array,
    normalizer: jax.Array,
) -> tuple[jax.Array, TokenLosses]:
    sums, _ = _by_chunks(how, *_operands(how, x_BxTxD, kernel_DxV), targets_BxT, None)
    return _weighted(how, sums, kernel_DxV.shape[1], weights_BxT, normalizer)


def _weighted(
    how: _How, sums: LogitSums, size: int, weights_BxT: jax.Array, normalizer: jax.Array
) -> tuple[jax.Array, TokenLosses]:
    per_token = losses.token_losses(sums, size, how.z_loss, how.label_smoothing)
    return jnp.sum(per_token.loss * weights_BxT) / normalizer, per_token


def _operands(how: _How, x_BxTxD: jax.Array, kernel_DxV: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x_BxTxD.astype(how.operand_dtype), kernel_DxV.astype(how.operand_dtype)


def _forward(how: _How, x_BxTxD: Any, kernel_DxV: Any, targets_BxT: Any, weights_BxT: Any, normalizer: Any) -> Any:
    operands = _operands(how, x_BxTxD, kernel_DxV)
    # How many rows there are decides about the chunks.
    by_chunks = examples_as_rows(functools.partial(_by_chunks, how), weights=(1,))
    sums, dlogits_BxTxV = by_chunks(*operands, targets_BxT, weights_BxT / normalizer)
    objective, per_token = _weighted(how, sums, kernel_DxV.shape[1], weights_BxT, normalizer)
    like = jnp.zeros((), x_BxTxD.dtype), jnp.zeros((), kernel_DxV.dtype)
    return (objective, per_token), (operands, dlogits_BxTxV, objective, per_token.loss, normalizer, like)


def _backward(how: _How, kept: Any, cotangents: Any) -> Any:
    (x_BxTxD, kernel_DxV), dlogits_BxTxV, objective, loss_BxT, normalizer, (x_like, kernel_like) = kept
    scale, _ = cotangents
    # Of a loss that is not scaled any further the factor is a constant 1, which the compiler leaves out.
    dlogits_BxTxV = dlogits_BxTxV * scale.astype(dlogits_BxTxV.dtype)
    product = functools.partial(jax.lax.dot_general, preferred_element_type=how.dtype)
    kernel_grad_DxV = product(x_BxTxD, dlogits_BxTxV, (((0, 1), (0, 1)), ((), ())))
    x_grad_BxTxD = product(dlogits_BxTxV, kernel_DxV, (((2,), (1,)), ((), ())))
    return (
        x_grad_BxTxD.astype(x_like.dtype),
        kernel_grad_DxV.astype(kernel_like.dtype),
        None,
        scale * loss_BxT / normalizer,
        -scale * objective / normalizer,
    )


_objective.defvjp(_forward, _backward)


# --- chunks -----------------------------------------------------------------------------------------------------------


def _by_chunks(
    how: _How, x_BxTxD: jax.Array, kernel_DxV: jax.Array, targets_BxT: jax.Array, scales_BxT: jax.Array | None
) -> tuple[LogitSums, jax.Array | None]:
    """Sums of each token's logits, and ∂(Σ scale · loss)/∂logits, [B, T, V]; without scales, the sums alone."""
    rows, length = targets_BxT.shape
    size = kernel_DxV.shape[1]
    chunk = how.chunk_length(rows, length)
    is_local = _is_local()
    if is_local:
        how = dataclasses.replace(how, sharding=None)
    block = softmax_kernel.block_rows(size, chunk) if is_local and for_tpu() and how.dtype == jnp.float32 else 0

    def run(x_BxTxD: Any, kernel_DxV: Any, targets_BxT: Any, scales_BxT: Any) -> Any:
        def one(dlogits_BxTxV: Any, start: Any, count: int) -> tuple[Any, LogitSums]:
            def cut(a: jax.Array) -> jax.Array:
                return jax.lax.dynamic_slice_in_dim(a, start, count, axis=1)

            logits_BxCxV = how.logits(cut(x_BxTxD), kernel_DxV)
            targets_BxC = cut(targets_BxT)
            if scales_BxT is None:
                return None, losses.logit_sums(logits_BxCxV, targets_BxC, bool(how.label_smoothing))
            if block and count % block == 0:
                return softmax_kernel.sums_and_cotangents(
                    logits_BxCxV,
                    targets_BxC,
                    cut(scales_BxT),
                    dlogits_BxTxV,
                    start,
                    z_loss=how.z_loss,
                    label_smoothing=how.label_smoothing,
                    block=block,
                )
            sums, here_BxCxV = _cotangents(how, logits_BxCxV, targets_BxC, cut(scales_BxT))
            if count == length:
                return here_BxCxV, sums
            return jax.lax.dynamic_update_slice_in_dim(dlogits_BxTxV, here_BxCxV, start, axis=1), sums

        dlogits_BxTxV = None
        if scales_BxT is not None and (block or chunk < length):
            # Every chunk writes all of its own part. (The compiler does not divide unfilled memory over devices.)
            make = jax.lax.empty if is_local else jnp.zeros
            dlogits_BxTxV = make((rows, length, size), how.operand_dtype)
            dlogits_BxTxV = shard_map.vary(dlogits_BxTxV, jax.typeof(x_BxTxD).manual_axis_type.varying)
        if chunk == length:
            dlogits_BxTxV, sums = one(dlogits_BxTxV, 0, length)
            return sums, dlogits_BxTxV
        full, rest = divmod(length, chunk)
        dlogits_BxTxV, sums = jax.lax.scan(
            lambda d, start: one(d, start, chunk), dlogits_BxTxV, chunk * jnp.arange(full)
        )
        sums = jax.tree.map(lambda s_NxBxC: jnp.moveaxis(s_NxBxC, 0, 1).reshape(rows, -1), sums)
        if rest:
            dlogits_BxTxV, last = one(dlogits_BxTxV, full * chunk, rest)
            sums = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), sums, last)
        return sums, dlogits_BxTxV

    if block and scales_BxT is not None and (axes := shard_map.automatic_axes()):
        # A kernel is a program for one device. The axes left to the compiler have one each; to it they must be manual.
        here = PartitionSpec()
        run = jax.shard_map(run, in_specs=here, out_specs=here, axis_names=axes, check_vma=False)
    return run(x_BxTxD, kernel_DxV, targets_BxT, scales_BxT)


def _cotangents(
    how: _How, logits_BxCxV: jax.Array, targets_BxC: jax.Array, scales_BxC: jax.Array
) -> tuple[LogitSums, jax.Array]:
    def loss(logits_BxCxV: jax.Array) -> tuple[jax.Array, LogitSums]:
        sums = losses.logit_sums(logits_BxCxV, targets_BxC, bool(how.label_smoothing))
        size = logits_BxCxV.shape[-1]
        return losses.token_losses(sums, size, how.z_loss, how.label_smoothing).loss, sums

    _, pull_back, sums = jax.vjp(loss, logits_BxCxV, has_aux=True)
    return sums, pull_back(scales_BxC)[0].astype(how.operand_dtype)


def _is_local() -> bool:
    """Whether arrays are what one device has: automatic axes of the mesh, if any, have one device each."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return all(mesh.shape[a] == 1 for a in shard_map.automatic_axes())
