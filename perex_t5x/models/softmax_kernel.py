"""A Pallas TPU kernel: from logits to the sums that their cross entropy needs, and to its gradient, in one reading.

XLA makes two further passes of it, one for Σ exp and one for the gradient, each over logits that do not fit the vector
memory. Here some tokens' logits are in vector memory while all of it is computed: what is read and written takes the time.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from perex_t5x.models.losses import LogitSums
from perex_t5x.per_example.kernels import tiles

NAME = "cross_entropy"
_ROWS = 16  # computed at a time: the rows of a bfloat16 tile
_MAX_COLUMNS = 1024  # at a time; more would not fit the registers
_MAX_BLOCK_ROWS = 64


def block_rows(vocab_size: int, length: int) -> int:
    """How many tokens' logits are in vector memory at a time, a divisor of `length`; 0 where the kernel cannot be used.

    >>> block_rows(32768, 128), block_rows(131072, 512), block_rows(32768, 100), block_rows(1000, 128)
    (16, 0, 0, 0)
    """
    if vocab_size % tiles.LANES:
        return 0
    # Logits and gradients, float32 at most, two buffers of each.
    fitting = tiles.vector_memory(tiles.device_kind()) // (2 * 8 * vocab_size)
    sizes = [n for n in range(_ROWS, _MAX_BLOCK_ROWS + 1, _ROWS) if length % n == 0 and n <= fitting]
    return max(sizes, default=0)


def sums_and_cotangents(
    logits_BxCxV: jax.Array,
    targets_BxC: jax.Array,
    scales_BxC: jax.Array,
    cotangents_BxTxV: jax.Array,
    start: Any,
    *,
    z_loss: float,
    label_smoothing: float,
    block: int,
    interpret: bool = False,
) -> tuple[jax.Array, LogitSums]:
    """Writes ∂(Σ scale · loss)/∂logits of these tokens into `cotangents_BxTxV`, in place, from token `start` of each row.

    Args:
      start: a multiple of `block`, which divides the length C.
      block: `block_rows`.
      interpret: runs it without a TPU, for tests.
    """
    rows, length, size = logits_BxCxV.shape
    num, per_row = rows * length, length // block
    here = lambda b, i, at: (b * per_row + i, 0)  # noqa: E731
    varying = jax.typeof(logits_BxCxV).manual_axis_type
    sums_MxL, cotangents_BxTxV = pl.pallas_call(
        functools.partial(_kernel, z_loss=z_loss, label_smoothing=label_smoothing, columns=_columns(size)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, per_row),
            in_specs=[
                pl.BlockSpec((block, size), here),
                pl.BlockSpec((block, 1), here),
                pl.BlockSpec((block, 1), here),
                pl.BlockSpec(memory_space=pl.ANY),  # the array written to, of which nothing is read
            ],
            out_specs=[
                pl.BlockSpec((block, tiles.LANES), here),
                pl.BlockSpec((1, block, size), lambda b, i, at: (b, at[0] + i, 0)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num, tiles.LANES), jnp.float32, manual_axis_type=varying),
            jax.ShapeDtypeStruct(cotangents_BxTxV.shape, cotangents_BxTxV.dtype, manual_axis_type=varying),
        ],
        input_output_aliases={4: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=tiles.vector_memory(tiles.device_kind()),
        ),
        cost_estimate=pl.CostEstimate(
            flops=12 * num * size,
            transcendentals=2 * num * size,
            bytes_accessed=num * size * (4 + cotangents_BxTxV.dtype.itemsize),
        ),
        interpret=interpret,
        name=NAME,
    )(
        (jnp.asarray(start, jnp.int32) // block).reshape(1),
        logits_BxCxV.reshape(num, size),
        targets_BxC.astype(jnp.int32).reshape(num, 1),
        scales_BxC.reshape(num, 1),
        cotangents_BxTxV,
    )
    largest, log_z, at_target, total = (sums_MxL[:, k].reshape(rows, length) for k in range(4))
    return cotangents_BxTxV, LogitSums(largest, log_z, at_target, total if label_smoothing else None)


def _columns(vocab_size: int) -> int:
    """The largest part of the vocabulary, in whole registers, that divides it."""
    return tiles.divisor(vocab_size, _MAX_COLUMNS)


def _kernel(
    at: Any,
    logits: Any,
    targets: Any,
    scales: Any,
    written: Any,
    sums: Any,
    cotangents: Any,
    *,
    z_loss: float,
    label_smoothing: float,
    columns: int,
) -> None:
    del at, written
    num_tokens, size = logits.shape
    steps = size // columns
    shape = (_ROWS, columns)
    unroll = min(max(_MAX_COLUMNS // columns, 1) * 2, steps)
    column = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    lane = jax.lax.broadcasted_iota(jnp.int32, (_ROWS, tiles.LANES), 1)

    def some_tokens(k: Any, _: None) -> None:
        rows = pl.ds(pl.multiple_of(k * _ROWS, _ROWS), _ROWS)
        target, scale = targets[rows, :], scales[rows, :]

        def part(j: Any) -> tuple[Any, jax.Array, jax.Array]:
            where = pl.ds(pl.multiple_of(j * columns, columns), columns)
            return where, logits[rows, where], column == target - j * columns

        def over_parts(step: Any, begin: Any) -> Any:
            return jax.lax.fori_loop(0, steps, lambda j, state: step(state, *part(j)), begin, unroll=unroll)

        largest = over_parts(lambda m, _, x, __: jnp.maximum(m, x), jnp.full(shape, -jnp.inf, jnp.float32))
        largest = jnp.max(largest, axis=1, keepdims=True)

        def add(state: Any, _: Any, x: jax.Array, is_target: jax.Array) -> Any:
            total = [state[2] + x] if label_smoothing else []
            return state[0] + jnp.exp(x - largest), state[1] + jnp.where(is_target, x, 0.0), *total

        zeros = jnp.zeros(shape, jnp.float32)
        totals = over_parts(add, (zeros,) * (3 if label_smoothing else 2))
        z, at_target, *total = (jnp.sum(x, axis=1, keepdims=True) for x in totals)
        log_z = largest + jnp.log(z)
        found = (largest, log_z, at_target, *total)
        sums[rows, :] = functools.reduce(lambda out, k: jnp.where(lane == k, found[k], out), range(len(found)), 0.0)

        # ∂ = scale ((1 + 2 z log Z) exp(x) / Z - q), with q as in `losses.cross_entropy`.
        low = label_smoothing / (size - 1)
        factor = (1.0 + 2.0 * z_loss * log_z) * scale / z

        def write(state: None, where: Any, x: jax.Array, is_target: jax.Array) -> None:
            softmax = jnp.exp(x - largest) * factor
            q = jnp.where(is_target, 1.0 - label_smoothing, low) * scale
            cotangents[0, rows, where] = (softmax - q).astype(cotangents.dtype)

        over_parts(write, None)

    jax.lax.fori_loop(0, num_tokens // _ROWS, some_tokens, None)
