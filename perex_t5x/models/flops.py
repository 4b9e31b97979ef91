"""FLOPs of a step, for the utilisation of the chip's peak: products only, and nothing that is recomputed."""

from __future__ import annotations

from perex_t5x.models.config import T5Config


def projections(config: T5Config, *, keys_from_queries: bool = True) -> int:
    """Weights of an attention block that each query token meets (with its keys and values, or without)."""
    per_head = config.emb_dim * config.head_dim
    return 2 * config.num_heads * per_head + (2 * config.kv_heads * per_head if keys_from_queries else 0)


def mlp(config: T5Config) -> int:
    """Weights of an MLP block."""
    return (len(config.mlp_activations) + 1) * config.emb_dim * config.mlp_dim


def attention(config: T5Config, queries: int, keys: int) -> int:
    """FLOPs of Q Kᵀ and P V of one row forward. A causal mask is not taken off: the products are computed."""
    return 4 * queries * keys * config.num_heads * config.head_dim


def decoder_only(config: T5Config, length: int) -> float:
    """FLOPs of one row, forward and backward (three times the forward pass)."""
    layer = 2 * length * (projections(config) + mlp(config)) + attention(config, length, length)
    logits = 2 * length * config.emb_dim * config.vocab_size
    return 3.0 * (config.num_decoder_layers * layer + logits)


def encoder_decoder(config: T5Config, input_length: int, target_length: int) -> float:
    """FLOPs of one row, forward and backward."""
    encoder = 2 * input_length * (projections(config) + mlp(config)) + attention(config, input_length, input_length)
    cross_keys = 2 * config.kv_heads * config.emb_dim * config.head_dim
    decoder = (
        2 * target_length * (projections(config) + projections(config, keys_from_queries=False) + mlp(config))
        + 2 * input_length * cross_keys
        + attention(config, target_length, target_length)
        + attention(config, target_length, input_length)
    )
    logits = 2 * target_length * config.emb_dim * config.vocab_size
    return 3.0 * (config.num_encoder_layers * encoder + config.num_decoder_layers * decoder + logits)
