"""Sizes and choices of a transformer, bound in Gin and checked when made; and the FLOPs that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from perex_t5x import arguments
from perex_t5x.arguments import Interval, PositiveInt
from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.models import remat

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {"gelu": jax.nn.gelu, "linear": lambda x: x, "relu": jax.nn.relu, "silu": jax.nn.silu, "swish": jax.nn.silu}
)

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class T5Config:
    """Configuration of both networks; the names are T5X's.

    Parameters are always float32; `dtype` is what activations and matrix products are computed in. Softmax, norms,
    logits and the loss are at least float32 whatever `dtype` is.

    Attributes:
      vocab_size: rows of the embedding; a multiple of 128 suits accelerators and leaves room above the vocabulary.
      dtype: compute dtype, a name ('bfloat16') or a numpy dtype.
      emb_dim: width of the residual stream.
      num_heads, head_dim: query heads and the width of each.
      num_kv_heads: heads of keys and values (grouped-query attention); None means `num_heads`.
      num_encoder_layers, num_decoder_layers: depth; the decoder-only network reads the second alone.
      mlp_dim: width inside the MLP.
      mlp_activations: one per input projection; their product enters the output projection. ('silu', 'linear') is
        a gated MLP, ('relu',) a plain one.
      dropout_rate: see `perex_t5x.models.dropout`.
      positions: of the decoder-only network: 'rotary', or 'relative' for T5X's, a learned bias by distance with unscaled
        attention (`TransformerConfig`). An encoder-decoder always has T5's relative bias.
      relative_bias: one bias for all layers of a stack ('shared'), or one 'per_layer', as umT5 has it.
      rotary_max_wavelength: of the slowest rotary position, in tokens / 2π; long rows want more than 10,000.
      logits_via_embedding: True ties the output projection to the embedding.
      float32_attention_logits: T5X's; here attention's logits are at least float32 whatever it is.
      scan_layers: one scanned layer with stacked parameters (leading axis `layers`) instead of an unrolled stack.
      remat_policy: what the backward pass keeps of each layer: 'none' (everything, no rematerialisation), 'full'
        (nothing), 'minimal' (results of products with weights), values by name such as 'save:context,mlp_in', or any
        other policy of `perex_t5x.models.remat`.
      attention: 'splash' (TPU kernels that hold no length x length array), 'jax_splash' (the kernels that ship with JAX),
        'xla', or 'auto': splash on TPUs where it can be used. `perex_t5x.models.splash`.
      loss_chunks: in how many parts each row goes through the output projection and its loss, so that the logits of all
        tokens never exist (`perex_t5x.models.head`). 'auto' does so where a row has 2**24 logits or more; 0 never does.

    >>> T5Config(vocab_size=384, emb_dim=128, num_heads=4, head_dim=32, mlp_dim=256).kv_heads
    4
    """

    vocab_size: PositiveInt
    dtype: Any = "float32"
    emb_dim: PositiveInt = 512
    num_heads: PositiveInt = 8
    num_encoder_layers: Annotated[int, Interval("[0, 10000]")] = 6
    num_decoder_layers: Annotated[int, Interval("[1, 10000]")] = 6
    head_dim: PositiveInt = 64
    mlp_dim: PositiveInt = 2048
    mlp_activations: tuple[str, ...] = ("gelu", "linear")
    dropout_rate: Annotated[float, Interval("[0, 1)")] = 0.0
    logits_via_embedding: bool = False
    float32_attention_logits: bool = False
    num_kv_heads: PositiveInt | None = None
    positions: Literal["rotary", "relative"] = "rotary"
    relative_bias: Literal["shared", "per_layer"] = "shared"
    rotary_max_wavelength: Annotated[float, Interval("(1, ∞)")] = 10_000.0
    scan_layers: bool = False
    remat_policy: str = "none"
    attention: Literal["auto", "splash", "jax_splash", "xla"] = "auto"
    loss_chunks: Annotated[int, Interval("[0, 2147483647]")] | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        # Gin gives lists where a tuple was written with brackets, and dtypes as numpy objects.
        object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            fitting = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ConfigError(
                f"T5Config.num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}. "
                f"These do: {', '.join(map(str, fitting))}."
            )
        if not self.mlp_activations:
            raise ConfigError("T5Config.mlp_activations is empty: give at least one, e.g. ('gelu', 'linear').")
        for activation in self.mlp_activations:
            _check_known("mlp_activations", activation, ACTIVATIONS)
        remat.parse(self.remat_policy)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @property
    def wide_dtype(self) -> jnp.dtype:
        """What norms, logits and the loss are computed in: `dtype`, but at least float32."""
        return jnp.promote_types(self.compute_dtype, jnp.float32)


@dataclass(frozen=True)
class TransformerConfig(T5Config):
    """T5X's decoder-only transformer, with its names and defaults; `T5Config` has the others.

    Attributes:
      num_layers: depth, T5X's name of `num_decoder_layers`.

    >>> config = TransformerConfig(vocab_size=384, num_layers=2)
    >>> config.num_decoder_layers, config.positions, config.mlp_activations
    (2, 'relative', ('relu',))
    """

    num_encoder_layers: int = field(default=0, init=False)
    num_decoder_layers: int = field(default=0, init=False)
    mlp_activations: tuple[str, ...] = ("relu",)
    dropout_rate: Annotated[float, Interval("[0, 1)")] = 0.1
    positions: Literal["rotary", "relative"] = "relative"
    num_layers: Annotated[int, Interval("[1, 10000]")] = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "num_decoder_layers", self.num_layers)


def _dtype_name(dtype: Any) -> str:
    try:
        name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    except (TypeError, ValueError):
        name = repr(dtype)
    _check_known("dtype", name, DTYPES)
    return name


def _check_known(name: str, value: object, known: Mapping[str, object] | tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"T5Config.{name}: unknown {value!r}.{did_you_mean(str(value), known)} Known: {', '.join(known)}."
        )


# --- FLOPs of a step, for the utilisation of the chip's peak: products only, and nothing that is recomputed ---------------


def _projections(config: T5Config, *, keys_from_queries: bool = True) -> int:
    """Weights of an attention block that each query token meets (with its keys and values, or without)."""
    per_head = config.emb_dim * config.head_dim
    return 2 * config.num_heads * per_head + (2 * config.kv_heads * per_head if keys_from_queries else 0)


def _mlp(config: T5Config) -> int:
    """Weights of an MLP block."""
    return (len(config.mlp_activations) + 1) * config.emb_dim * config.mlp_dim


def _attention(config: T5Config, queries: int, keys: int) -> int:
    """FLOPs of Q Kᵀ and P V of one row forward. A causal mask is not taken off: the products are computed."""
    return 4 * queries * keys * config.num_heads * config.head_dim


def decoder_only_flops(config: T5Config, length: int) -> float:
    """FLOPs of one row, forward and backward (three times the forward pass)."""
    layer = 2 * length * (_projections(config) + _mlp(config)) + _attention(config, length, length)
    logits = 2 * length * config.emb_dim * config.vocab_size
    return 3.0 * (config.num_decoder_layers * layer + logits)


def encoder_decoder_flops(config: T5Config, input_length: int, target_length: int) -> float:
    """FLOPs of one row, forward and backward."""
    encoder = 2 * input_length * (_projections(config) + _mlp(config)) + _attention(config, input_length, input_length)
    cross_keys = 2 * config.kv_heads * config.emb_dim * config.head_dim
    decoder = (
        2 * target_length * (_projections(config) + _projections(config, keys_from_queries=False) + _mlp(config))
        + 2 * input_length * cross_keys
        + _attention(config, target_length, target_length)
        + _attention(config, target_length, input_length)
    )
    logits = 2 * target_length * config.emb_dim * config.vocab_size
    return 3.0 * (config.num_encoder_layers * encoder + config.num_decoder_layers * decoder + logits)
