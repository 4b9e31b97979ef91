"""Beam search with T5's length penalty."""

# Fields carry their shapes in their names.
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from perex_t5x.models.decoding import Cache, Start, repeat_rows

# Finite, so that a difference of two is never NaN; below any log probability of a sequence.
WORST = -1e7


class _State(NamedTuple):
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
    finished; the best K that do not end go on. A row stops at its limit, or when no live beam can still beat its
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

    def goes_on(state: _State):
        return (state.step < steps) & ~jnp.all(state.done_B)

    def body(state: _State) -> _State:
        step = state.step
        previous = jax.lax.dynamic_index_in_dim(state.live_BxKxL, jnp.maximum(step - 1, 0), axis=2, keepdims=False)
        tokens_BK = jnp.where(step == 0, start.tokens_B, previous.reshape(-1))
        logits_BKxV, cache = start.next_logits(tokens_BK, start.positions_B + step, state.cache, start.constants)
        size = logits_BKxV.shape[-1]
        log_probs_BxKxV = jax.nn.log_softmax(logits_BKxV).reshape(rows, beams, size)
        totals_BxKV = (state.live_scores_BxK[:, :, None] + log_probs_BxKxV).reshape(rows, -1)

        # 2K candidates: at most K of them end in EOS (one per beam), so K remain to go on.
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
        new = _State(
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

        # Rows that are done keep their beams while others go on; their cache no longer matters.
        return new._replace(
            live_BxKxL=frozen(state.live_BxKxL, new.live_BxKxL),
            live_scores_BxK=frozen(state.live_scores_BxK, new.live_scores_BxK),
            finished_BxKxL=frozen(state.finished_BxKxL, new.finished_BxKxL),
            finished_scores_BxK=frozen(state.finished_scores_BxK, new.finished_scores_BxK),
        )

    logits_shape = jax.eval_shape(start.next_logits, start.tokens_B, start.positions_B, start.cache, start.constants)[0]
    empty_BxKxL = jnp.zeros((rows, beams, steps), start.tokens_B.dtype)
    worst_BxK = jnp.full((rows, beams), WORST, logits_shape.dtype)
    state = _State(
        step=jnp.int32(0),
        cache=start.cache,
        live_BxKxL=empty_BxKxL,
        live_scores_BxK=worst_BxK.at[:, 0].set(0.0),  # All beams start equal: only one may be extended.
        finished_BxKxL=empty_BxKxL,
        finished_scores_BxK=worst_BxK,
        done_B=limit_B <= 0,
    )
    state = jax.lax.while_loop(goes_on, body, state)
    any_B = jnp.any(state.finished_scores_BxK > WORST / 2, axis=1)
    live_final_BxK = state.live_scores_BxK / length_penalty(limit_B, alpha)[:, None]
    tokens_BxKxL = jnp.where(any_B[:, None, None], state.finished_BxKxL, state.live_BxKxL)
    scores_BxK = jnp.where(any_B[:, None], state.finished_scores_BxK, live_final_BxK)
    return tokens_BxKxL[:, ::-1], scores_BxK[:, ::-1]
