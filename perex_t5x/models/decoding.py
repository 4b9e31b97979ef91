"""Decoding with a key/value cache: greedy, sampling, and beam search with T5's length penalty.

All loops are `lax.while_loop`s that stop when every row has emitted EOS or used up its room. Rows may have prompts of
different lengths: each has its own position in the cache.
"""

# Fields carry their shapes in their names.
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from perex_t5x.errors import ConfigError, did_you_mean

METHODS = ("greedy", "temperature", "beam")

# The score of a beam that does not exist. Finite, so that a difference of two is never NaN; below any log probability of a
# sequence.
WORST = -1e7

Cache = Any
Choose = Callable[[jax.Array, jax.Array], jax.Array]


class Start(NamedTuple):
    """The state after the prompts, from which decoding continues."""

    # next_logits(tokens_B, positions_B, cache, constants) -> (logits_BxV, cache): feeds one token per row.
    next_logits: Callable[[jax.Array, jax.Array, Cache, Any], tuple[jax.Array, Cache]]
    cache: Cache
    constants: Any  # rows read at every step and never written: the encoder's keys and values
    cache_batch_axis: int  # of every leaf of the caches: 0, or 1 behind the axis of scanned layers
    tokens_B: jax.Array  # last token of each prompt, to be fed next
    positions_B: jax.Array  # its position
    limit_B: jax.Array  # room for new tokens in each row
    num_steps: int  # width of the result


def check_arguments(
    method: str,
    rng: jax.Array | None,
    num_decodes: int,
    temperature: float,
    top_k: int,
    alpha: float,
    max_decode_len: int | None,
) -> None:
    """Refuses what cannot be decoded, before anything is traced."""
    if method not in METHODS:
        raise ConfigError(
            f"decode_method: unknown {method!r}.{did_you_mean(method, METHODS)} Known: {', '.join(METHODS)}."
        )
    if num_decodes < 1:
        raise ConfigError(f"num_decodes = {num_decodes}: must be at least 1.")
    if method == "greedy" and num_decodes > 1:
        raise ConfigError("decode_method 'greedy' has one result: use 'beam' or 'temperature' for num_decodes > 1.")
    if method == "temperature":
        if rng is None:
            raise ConfigError("decode_method 'temperature' draws at random: give rng, e.g. jax.random.key(0).")
        if temperature <= 0:
            raise ConfigError(f"temperature = {temperature}: must be positive; 'greedy' is its limit at 0.")
        if top_k < 0:
            raise ConfigError(f"top_k = {top_k}: must be 0 (the whole vocabulary) or positive.")
    if alpha < 0:
        raise ConfigError(f"alpha = {alpha}: must not be negative; 0 means no length penalty.")
    if max_decode_len is not None and max_decode_len < 1:
        raise ConfigError(f"max_decode_len = {max_decode_len}: must be at least 1.")


def decode(
    start: Start,
    *,
    eos_id: int,
    method: str = "greedy",
    num_decodes: int = 1,
    rng: jax.Array | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    alpha: float = 0.6,
) -> tuple[jax.Array, jax.Array]:
    """Returns (tokens_BxNxL, scores_BxN), the N decodes of each row in rising order of score."""
    if method == "beam":
        return beam_search(start, eos_id=eos_id, num_beams=num_decodes, alpha=alpha)
    rows = start.tokens_B.shape[0]
    if method == "greedy":
        tokens_BxL, scores_B = choose_each_step(start, eos_id, lambda logits_BxV, step: jnp.argmax(logits_BxV, -1))
        return tokens_BxL[:, None], scores_B[:, None]
    keys_BN = _decode_keys(rng, rows, num_decodes)
    tokens_BNxL, scores_BN = choose_each_step(
        repeat_rows(start, num_decodes),
        eos_id,
        lambda logits_BxV, step: sample(logits_BxV, keys_BN, step, temperature, top_k),
    )
    tokens_BxNxL = tokens_BNxL.reshape(rows, num_decodes, -1)
    scores_BxN = scores_BN.reshape(rows, num_decodes)
    order_BxN = jnp.argsort(scores_BxN, axis=-1)
    return (
        jnp.take_along_axis(tokens_BxNxL, order_BxN[:, :, None], axis=1),
        jnp.take_along_axis(scores_BxN, order_BxN, axis=1),
    )


def choose_each_step(start: Start, eos_id: int, choose: Choose) -> tuple[jax.Array, jax.Array]:
    """Extends every row by `choose(logits_BxV, step) -> tokens_B` until EOS or its limit.

    Returns:
      tokens_BxL (EOS included, 0 after it) and scores_B, the sum of the model's log probabilities of the tokens chosen.
    """
    rows = start.tokens_B.shape[0]

    def is_unfinished(state):
        step, _, _, _, _, done_B = state
        return (step < start.num_steps) & ~jnp.all(done_B)

    def body(state):
        step, tokens_B, cache, result_BxL, scores_B, done_B = state
        logits_BxV, cache = start.next_logits(tokens_B, start.positions_B + step, cache, start.constants)
        chosen_B = jnp.where(done_B, 0, choose(logits_BxV, step)).astype(start.tokens_B.dtype)
        log_probs_BxV = jax.nn.log_softmax(logits_BxV)
        gained_B = jnp.take_along_axis(log_probs_BxV, chosen_B[:, None], axis=-1)[:, 0]
        scores_B = scores_B + jnp.where(done_B, 0.0, gained_B)
        result_BxL = jax.lax.dynamic_update_slice_in_dim(result_BxL, chosen_B[:, None], step, axis=1)
        done_B = done_B | (chosen_B == eos_id) | (step + 1 >= start.limit_B)
        return step + 1, chosen_B, cache, result_BxL, scores_B, done_B

    logits_shape = jax.eval_shape(start.next_logits, start.tokens_B, start.positions_B, start.cache, start.constants)[0]
    state = (
        jnp.int32(0),
        start.tokens_B,
        start.cache,
        jnp.zeros((rows, start.num_steps), start.tokens_B.dtype),
        jnp.zeros((rows,), logits_shape.dtype),
        start.limit_B <= 0,
    )
    _, _, _, result_BxL, scores_B, _ = jax.lax.while_loop(is_unfinished, body, state)
    return result_BxL, scores_B


def sample(logits_BxV: jax.Array, keys_B: jax.Array, step: jax.Array, temperature: float, top_k: int) -> jax.Array:
    """Draws a token per row from softmax(logits / temperature) over the `top_k` largest (0: all).

    Row b's draw at a step is a function of its logits, keys_B[b] and the step.
    """
    if 0 < top_k < logits_BxV.shape[-1]:
        least_Bx1 = jax.lax.top_k(logits_BxV, top_k)[0][:, -1:]
        logits_BxV = jnp.where(logits_BxV < least_Bx1, -jnp.inf, logits_BxV)
    draw = jax.vmap(lambda key, logits_V: jax.random.categorical(jax.random.fold_in(key, step), logits_V))
    return draw(keys_B, logits_BxV / temperature)


def repeat_rows(start: Start, times: int) -> Start:
    """Repeats every row, so that rows b·times ... b·times + times - 1 are copies of row b."""
    if times == 1:
        return start

    def in_cache(tree):
        return jax.tree.map(lambda x: jnp.repeat(x, times, axis=start.cache_batch_axis), tree)

    constants = {
        name: in_cache(value) if name == "cross_cache" else jnp.repeat(value, times, axis=0)
        for name, value in start.constants.items()
    }
    return start._replace(
        cache=in_cache(start.cache),
        constants=constants,
        tokens_B=jnp.repeat(start.tokens_B, times),
        positions_B=jnp.repeat(start.positions_B, times),
        limit_B=jnp.repeat(start.limit_B, times),
    )


def _decode_keys(rng: jax.Array, rows: int, num_decodes: int) -> jax.Array:
    """One key per row and decode, [B · N], from one key or from one per row."""
    if rng.shape == ():
        rng = jax.vmap(lambda b: jax.random.fold_in(rng, b))(jnp.arange(rows))
    if rng.shape != (rows,):
        raise ValueError(f"rng has shape {rng.shape}: give one key, or one per row, ({rows},).")
    per_decode = jax.vmap(lambda key: jax.vmap(lambda n: jax.random.fold_in(key, n))(jnp.arange(num_decodes)))
    return per_decode(rng).reshape(-1)


# --- beam search -------------------------------------------------------------------------------------------------------


class _Beams(NamedTuple):
    step: jax.Array
    cache: Cache
    live_BxKxL: jax.Array
    live_scores_BxK: jax.Array  # log probabilities
    finished_BxKxL: jax.Array
    finished_scores_BxK: jax.Array  # with the length penalty; WORST where there is none yet
    done_B: jax.Array


def length_penalty(length: jax.Array | int, alpha: float) -> jax.Array | float:
    """((5 + length) / 6)^alpha, by which log probabilities are divided; grows with the length.

    >>> length_penalty(7, alpha=1.0)
    2.0
    """
    return ((5 + length) / 6) ** alpha


def beam_search(start: Start, *, eos_id: int, num_beams: int, alpha: float = 0.6) -> tuple[jax.Array, jax.Array]:
    """Finds sequences y with large log p(y) / length_penalty(|y|, alpha).

    Each step takes the 2K best extensions of a row's K live beams. Those among the first K that end in EOS are
    finished; the best K that do not end stay live. A row stops at its limit, or when no live beam can still beat its
    finished ones (log probabilities only fall, the penalty is at most that of the limit). Where nothing finished, the
    live beams are the result.

    With one beam and alpha = 0 this is greedy decoding.

    Returns:
      tokens_BxKxL and scores_BxK, in rising order of score: the best is last.
    """
    rows, beams, steps = start.tokens_B.shape[0], num_beams, start.num_steps
    start = repeat_rows(start, beams)
    limit_B = start.limit_B.reshape(rows, beams)[:, 0]

    def select(tree_BxM, index_BxN):
        def pick(x):
            index = index_BxN.reshape(index_BxN.shape + (1,) * (x.ndim - 2))
            return jnp.take_along_axis(x, index, axis=1)

        return jax.tree.map(pick, tree_BxM)

    def select_cache(cache, beams_BxK):
        flat_BK = (jnp.arange(rows)[:, None] * beams + beams_BxK).reshape(-1)
        return jax.tree.map(lambda x: jnp.take(x, flat_BK, axis=start.cache_batch_axis), cache)

    def is_unfinished(state: _Beams):
        return (state.step < steps) & ~jnp.all(state.done_B)

    def body(state: _Beams) -> _Beams:
        step = state.step
        previous = jax.lax.dynamic_index_in_dim(state.live_BxKxL, jnp.maximum(step - 1, 0), axis=2, keepdims=False)
        tokens_BK = jnp.where(step == 0, start.tokens_B, previous.reshape(-1))
        logits_BKxV, cache = start.next_logits(tokens_BK, start.positions_B + step, state.cache, start.constants)
        size = logits_BKxV.shape[-1]
        log_probs_BxKxV = jax.nn.log_softmax(logits_BKxV).reshape(rows, beams, size)
        totals_BxKV = (state.live_scores_BxK[:, :, None] + log_probs_BxKxV).reshape(rows, -1)

        # 2K candidates: at most K of them end in EOS (one per beam), so K live ones remain.
        num_candidates = min(2 * beams, beams * size)
        scores_BxC, index_BxC = jax.lax.top_k(totals_BxKV, num_candidates)
        from_beam_BxC = index_BxC // size
        token_BxC = (index_BxC % size).astype(state.live_BxKxL.dtype)
        rows_BxCxL = select(state.live_BxKxL, from_beam_BxC)
        rows_BxCxL = jax.lax.dynamic_update_slice_in_dim(rows_BxCxL, token_BxC[:, :, None], step, axis=2)
        ends_BxC = token_BxC == eos_id

        live_scores_BxK, kept_BxK = jax.lax.top_k(jnp.where(ends_BxC, WORST, scores_BxC), beams)
        live_BxKxL = select(rows_BxCxL, kept_BxK)
        beams_BxK = select(from_beam_BxC, kept_BxK)

        may_finish_1xC = (jnp.arange(num_candidates) < beams)[None, :]
        possible_BxC = ends_BxC & may_finish_1xC & (scores_BxC > WORST / 2)
        new_scores_BxC = jnp.where(possible_BxC, scores_BxC / length_penalty(step + 1, alpha), WORST)
        finished_scores_BxK, kept_BxK = jax.lax.top_k(
            jnp.concatenate((state.finished_scores_BxK, new_scores_BxC), axis=1), beams
        )
        finished_BxKxL = select(jnp.concatenate((state.finished_BxKxL, rows_BxCxL), axis=1), kept_BxK)

        hope_B = live_scores_BxK[:, 0] / length_penalty(limit_B, alpha)
        decided_B = finished_scores_BxK[:, -1] >= hope_B
        new = _Beams(
            step + 1,
            select_cache(cache, beams_BxK),
            live_BxKxL,
            live_scores_BxK.astype(state.live_scores_BxK.dtype),
            finished_BxKxL,
            finished_scores_BxK.astype(state.finished_scores_BxK.dtype),
            state.done_B | decided_B | (step + 1 >= limit_B),
        )

        def frozen(old, new_value):
            done = state.done_B.reshape((rows,) + (1,) * (new_value.ndim - 1))
            return jnp.where(done, old, new_value)

        # Rows that are done keep their beams while others continue; their cache no longer matters.
        return new._replace(
            live_BxKxL=frozen(state.live_BxKxL, new.live_BxKxL),
            live_scores_BxK=frozen(state.live_scores_BxK, new.live_scores_BxK),
            finished_BxKxL=frozen(state.finished_BxKxL, new.finished_BxKxL),
            finished_scores_BxK=frozen(state.finished_scores_BxK, new.finished_scores_BxK),
        )

    logits_shape = jax.eval_shape(start.next_logits, start.tokens_B, start.positions_B, start.cache, start.constants)[0]
    empty_BxKxL = jnp.zeros((rows, beams, steps), start.tokens_B.dtype)
    worst_BxK = jnp.full((rows, beams), WORST, logits_shape.dtype)
    state = _Beams(
        step=jnp.int32(0),
        cache=start.cache,
        live_BxKxL=empty_BxKxL,
        live_scores_BxK=worst_BxK.at[:, 0].set(0.0),  # All beams start equal: only one may be extended.
        finished_BxKxL=empty_BxKxL,
        finished_scores_BxK=worst_BxK,
        done_B=limit_B <= 0,
    )
    state = jax.lax.while_loop(is_unfinished, body, state)
    any_B = jnp.any(state.finished_scores_BxK > WORST / 2, axis=1)
    live_final_BxK = state.live_scores_BxK / length_penalty(limit_B, alpha)[:, None]
    tokens_BxKxL = jnp.where(any_B[:, None, None], state.finished_BxKxL, state.live_BxKxL)
    scores_BxK = jnp.where(any_B[:, None], state.finished_scores_BxK, live_final_BxK)
    return tokens_BxKxL[:, ::-1], scores_BxK[:, ::-1]
