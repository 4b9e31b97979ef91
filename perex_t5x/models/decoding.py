"""Decoding with a key/value cache, under T5X's names: `temperature_sample` and `beam_search`.

A decoding function is what a model's `decode_fn` is bound to: it takes a `Start` and its own arguments, and returns the
decodes of each row with their scores, in rising order. All loops are `lax.while_loop`s that stop when every row has emitted
EOS or used up its room. Rows may have prompts of different lengths: each has its own position in the cache, and none
depends on another.
"""

# Fields carry their shapes in their names.
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from perex_t5x import arguments
from perex_t5x.arguments import Count, Interval, PositiveInt
from perex_t5x.errors import ConfigError, did_you_mean

# The score of a beam that does not exist. Finite, so that a difference of two is never NaN; below any log probability of a
# sequence.
WORST = -1e7
# Below it a temperature is 0, the limit at which sampling is greedy.
MIN_TEMPERATURE = 1e-4

Cache = Any


class Start(NamedTuple):
    """The state after the prompts, from which decoding continues: T5X's `inputs`, `cache`, `tokens_to_logits`,
    `initial_index` and `cache_offset`."""

    # next_logits(tokens_B, positions_B, cache, constants) -> (logits_BxV, cache): feeds one token per row.
    next_logits: Callable[[jax.Array, jax.Array, Cache, Any], tuple[jax.Array, Cache]]
    cache: Cache
    constants: Any  # rows read at every step and never written: the encoder's keys and values
    cache_batch_axis: int  # of every leaf of the caches: 0, or 1 behind the axis of scanned layers
    tokens_B: jax.Array  # last token of each prompt, to be fed next
    positions_B: jax.Array  # its position
    limit_B: jax.Array  # room for new tokens in each row
    num_steps: int  # width of the result


class SamplingLoopState(NamedTuple):
    """What `temperature_sample`'s callbacks see and may change; the names are T5X's. Rows are [batch · num_decodes]."""

    step: jax.Array
    cur_index: jax.Array  # [B], the position of the token that is fed next
    sequences: jax.Array  # [B, L], the new tokens so far, 0 behind them
    cache: Cache
    cur_token: jax.Array  # [B]
    ended: jax.Array  # [B]
    rng: jax.Array  # [B], a key of each row
    log_prob: jax.Array  # [B]


StateCallback = Callable[[SamplingLoopState], SamplingLoopState]
LogitCallback = Callable[[jax.Array, SamplingLoopState], jax.Array]


def check_parameters(decode_fn: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for `decoder_params` that the decoding function does not take.

    >>> check_parameters(beam_search, {"alfa": 0.6})
    Traceback (most recent call last):
    perex_t5x.errors.ConfigError: decoder_params: beam_search takes no 'alfa'. Did you mean 'alpha'?
    """
    known = inspect.signature(decode_fn).parameters
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return
    for name in parameters:
        if name not in known or name == "start":
            options = [k for k in known if k != "start"]
            what = getattr(decode_fn, "__name__", repr(decode_fn))
            raise ConfigError(f"decoder_params: {what} takes no {name!r}.{did_you_mean(name, options)}")


# --- sampling ----------------------------------------------------------------------------------------------------------


def temperature_sample(
    start: Start,
    *,
    eos_id: int = 1,
    decode_rng: jax.Array | None = None,
    num_decodes: PositiveInt = 1,
    temperature: Annotated[float, Interval("[0, ∞)")] | jax.Array = 1.0,
    topk: Count = 1,
    topp: Annotated[float, Interval("[0, 1]")] = 0.0,
    max_decode_steps: PositiveInt | jax.Array | None = None,
    max_decode_steps_hard_limit: int | None = None,
    rescale_log_probs: bool = True,
    state_callback_fn: StateCallback | None = None,
    logit_callback_fn: LogitCallback | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draws tokens from softmax(logits / temperature), restricted to the likeliest. The default, `topk = 1`, is greedy.

    Row b's draw at a step is a function of its logits, its key and the step: samples depend neither on the other rows nor
    on how a batch is divided.

    Args:
      start: the prompts.
      eos_id: ends a sequence.
      decode_rng: one key (row b then has fold_in(key, b)) or one per row, [B]; None: jax.random.key(0).
      num_decodes: sequences drawn for each row, independently.
      temperature: a number, or one for each row, [B]; 0 (below 1e-4) is greedy.
      topk: draw among the k likeliest tokens (and whatever ties with the last of them); 0: among all; 1: greedy.
      topp: draw among the likeliest tokens whose probabilities, tempered, reach topp together; 0: among all. Not together
        with topk, whose default is 1: give `topk = 0`.
      max_decode_steps: most new tokens, None: as many as the row has room for.
      max_decode_steps_hard_limit: the same, if positive.
      rescale_log_probs: scores are log probabilities of the distribution that is drawn from (all 0 where it is greedy);
        False: of the model's own.
      state_callback_fn: changes the `SamplingLoopState` before each step, and the last one.
      logit_callback_fn: (logits_BxV, state) -> logits_BxV, before they are tempered.

    Returns:
      New tokens, [B, num_decodes, L], EOS included and 0 after it; and the sums of their log probabilities,
      [B, num_decodes], in rising order.
    """
    arguments.check("decoding.temperature_sample", arguments.hints(temperature_sample), dict(locals()))
    if topk and topp:
        raise ConfigError(
            f"decoding.temperature_sample.topp = {topp} and topk = {topk}: only one may be given. Set topk = 0 (its default "
            "is 1, greedy), or topp = 0.0."
        )
    is_greedy = topk == 1 or (isinstance(temperature, int | float) and temperature <= MIN_TEMPERATURE)
    if is_greedy and num_decodes > 1:
        logging.warning("temperature_sample is greedy: all %d decodes of a row are the same. topk = 0?", num_decodes)
    rows = start.tokens_B.shape[0]
    if jnp.ndim(temperature) and jnp.shape(temperature) != (rows,):
        raise ConfigError(f"temperature has shape {jnp.shape(temperature)}: give a number, or one per row, ({rows},).")
    keys = _decode_keys(decode_rng, rows, num_decodes)
    start = repeat_rows(_limited(start, max_decode_steps, max_decode_steps_hard_limit), num_decodes)
    temperature_B = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (rows,)).repeat(num_decodes)

    def choose(logits_BxV: jax.Array, state: SamplingLoopState) -> tuple[jax.Array, jax.Array]:
        if is_greedy:
            tokens_B = jnp.argmax(logits_BxV, axis=-1)
            own_B = jnp.zeros(tokens_B.shape, logits_BxV.dtype)
        else:
            tokens_B, own_B = sample(logits_BxV, state.rng, state.step, temperature_B, topk, topp)
        return tokens_B, own_B if rescale_log_probs else _gathered(jax.nn.log_softmax(logits_BxV), tokens_B)

    callbacks = state_callback_fn or (lambda state: state), logit_callback_fn or (lambda logits, state: logits)
    tokens_BNxL, scores_BN = _choose_each_step(start, eos_id, keys, choose, *callbacks)
    tokens_BxNxL = tokens_BNxL.reshape(rows, num_decodes, -1)
    scores_BxN = scores_BN.reshape(rows, num_decodes)
    order_BxN = jnp.argsort(scores_BxN, axis=-1)
    return (
        jnp.take_along_axis(tokens_BxNxL, order_BxN[:, :, None], axis=1),
        jnp.take_along_axis(scores_BxN, order_BxN, axis=1),
    )


def _choose_each_step(
    start: Start,
    eos_id: int,
    keys_B: jax.Array,
    choose: Callable[[jax.Array, SamplingLoopState], tuple[jax.Array, jax.Array]],
    change_state: StateCallback,
    change_logits: LogitCallback,
) -> tuple[jax.Array, jax.Array]:
    """Extends every row by `choose(logits_BxV, state) -> (tokens_B, log probabilities_B)` until EOS or its limit."""
    rows = start.tokens_B.shape[0]

    def is_unfinished(state: SamplingLoopState) -> jax.Array:
        return (state.step < start.num_steps) & ~jnp.all(state.ended)

    def body(state: SamplingLoopState) -> SamplingLoopState:
        state = change_state(state)
        logits_BxV, cache = start.next_logits(state.cur_token, state.cur_index, state.cache, start.constants)
        chosen_B, gained_B = choose(change_logits(logits_BxV, state), state)
        chosen_B = jnp.where(state.ended, 0, chosen_B).astype(state.sequences.dtype)
        return SamplingLoopState(
            step=state.step + 1,
            cur_index=state.cur_index + 1,
            sequences=jax.lax.dynamic_update_slice_in_dim(state.sequences, chosen_B[:, None], state.step, axis=1),
            cache=cache,
            cur_token=chosen_B,
            ended=state.ended | (chosen_B == eos_id) | (state.step + 1 >= start.limit_B),
            rng=state.rng,
            log_prob=state.log_prob + jnp.where(state.ended, 0.0, gained_B).astype(state.log_prob.dtype),
        )

    state = SamplingLoopState(
        step=jnp.int32(0),
        cur_index=start.positions_B,
        sequences=jnp.zeros((rows, start.num_steps), start.tokens_B.dtype),
        cache=start.cache,
        cur_token=start.tokens_B,
        ended=start.limit_B <= 0,
        rng=keys_B,
        log_prob=jnp.zeros((rows,), _logits_dtype(start)),
    )
    state = change_state(jax.lax.while_loop(is_unfinished, body, state))
    return state.sequences, state.log_prob


def sample(
    logits_BxV: jax.Array,
    keys_B: jax.Array,
    step: jax.Array,
    temperature_B: jax.Array,
    topk: int = 0,
    topp: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Draws a token per row; returns tokens and their log probabilities under the distribution that they are drawn from.

    Row b's draw at a step is a function of its logits, keys_B[b] and the step.
    """
    is_cold_B = temperature_B <= MIN_TEMPERATURE
    scaled_BxV = logits_BxV / jnp.maximum(temperature_B, MIN_TEMPERATURE)[:, None]
    if topk:
        scaled_BxV = topk_mask(scaled_BxV, topk)
    if topp:
        scaled_BxV = topp_mask(scaled_BxV, topp)
    draw = jax.vmap(lambda key, logits_V: jax.random.categorical(jax.random.fold_in(key, step), logits_V))
    tokens_B = jnp.where(is_cold_B, jnp.argmax(logits_BxV, axis=-1), draw(keys_B, scaled_BxV))
    return tokens_B, jnp.where(is_cold_B, 0.0, _gathered(jax.nn.log_softmax(scaled_BxV), tokens_B))


def topk_mask(logits_BxV: jax.Array, topk: int) -> jax.Array:
    """The k largest of each row, and what ties with the last of them; -inf elsewhere.

    >>> topk_mask(jnp.array([[3.0, 1.0, 2.0, 2.0]]), 2).tolist()
    [[3.0, -inf, 2.0, 2.0]]
    """
    least_Bx1 = jax.lax.top_k(logits_BxV, min(topk, logits_BxV.shape[-1]))[0][:, -1:]
    return jnp.where(logits_BxV >= least_Bx1, logits_BxV, -jnp.inf)


def topp_mask(logits_BxV: jax.Array, topp: float) -> jax.Array:
    """The likeliest of each row, as few as have a probability of at least topp together (with what ties); -inf elsewhere.

    >>> topp_mask(jnp.log(jnp.array([[0.5, 0.125, 0.25, 0.125]])), 0.6) > -jnp.inf
    Array([[ True, False,  True, False]], dtype=bool)
    """
    probs_BxV = jax.nn.softmax(logits_BxV, axis=-1)
    falling_BxV = -jnp.sort(-probs_BxV, axis=-1)
    before_BxV = jnp.cumsum(falling_BxV, axis=-1) - falling_BxV  # what is reached without the token
    least_Bx1 = jnp.min(jnp.where(before_BxV < topp, falling_BxV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(probs_BxV >= least_Bx1, logits_BxV, -jnp.inf)


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


def _limited(start: Start, *limits: int | jax.Array | None) -> Start:
    """With no more room than the limits that are given and positive."""
    limit_B = start.limit_B
    for limit in limits:
        if limit is not None and not (isinstance(limit, int) and limit <= 0):
            limit_B = jnp.minimum(limit_B, limit)
    return start._replace(limit_B=limit_B)


def _decode_keys(rng: jax.Array | None, rows: int, num_decodes: int) -> jax.Array:
    """One key per row and decode, [B · N], from one key or from one per row."""
    keys: jax.Array = jax.random.key(0) if rng is None else rng
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):  # of jax.random.PRNGKey, as T5X has it
        keys = jax.random.wrap_key_data(keys)
    if keys.shape == ():
        keys = jax.vmap(functools.partial(jax.random.fold_in, keys))(jnp.arange(rows))
    if keys.shape != (rows,):
        raise ValueError(f"rng has shape {keys.shape}: give one key, or one per row, ({rows},).")
    per_decode = jax.vmap(lambda key: jax.vmap(lambda n: jax.random.fold_in(key, n))(jnp.arange(num_decodes)))
    return per_decode(keys).reshape(-1)


def _gathered(x_BxV: jax.Array, tokens_B: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BxV, tokens_B[:, None], axis=-1)[:, 0]


def _logits_dtype(start: Start) -> jnp.dtype:
    given = start.tokens_B, start.positions_B, start.cache, start.constants
    return jax.eval_shape(start.next_logits, *given)[0].dtype


# --- beam search -------------------------------------------------------------------------------------------------------


class _Beams(NamedTuple):
    step: jax.Array
    cache: Cache
    live_BxKxL: jax.Array
    live_scores_BxK: jax.Array  # log probabilities
    finished_BxKxL: jax.Array
    finished_scores_BxK: jax.Array  # with the length penalty; WORST where there is none yet
    done_B: jax.Array


def length_penalty(length: Any, alpha: float) -> Any:
    """((5 + length) / 6)^alpha, by which log probabilities are divided; grows with the length, a number or an array.

    >>> length_penalty(7, alpha=1.0)
    2.0
    """
    return ((5 + length) / 6) ** alpha


def beam_search(
    start: Start,
    *,
    eos_id: int = 1,
    num_decodes: PositiveInt = 4,
    alpha: Annotated[float, Interval("[0, ∞)")] = 0.6,
    max_decode_len: PositiveInt | None = None,
    max_decode_step: int = -1,
    min_log_prob: float = WORST,
    decode_rng: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Finds sequences y with large log p(y) / length_penalty(|y|, alpha).

    Each step takes the 2K best extensions of a row's K live beams. Those that end in EOS are finished, and the best K of
    all finished ones are kept; the best K that do not end stay live. A row stops at its limit, or when no live beam can
    still beat its finished ones (log probabilities only fall, the penalty is at most that of the limit). Where nothing
    finished, the live beams are the result, with their log probabilities. These are T5X's rules, and its results.

    Args:
      start: the prompts; |y| includes them.
      eos_id: ends a sequence.
      num_decodes: K. Models pass theirs.
      alpha: of the length penalty; 0: none.
      max_decode_len: most new tokens, None: as many as the row has room for.
      max_decode_step: the same, if positive.
      min_log_prob: a row also stops when no live beam has a log probability of at least this.
      decode_rng: not used: nothing is drawn.

    Returns:
      tokens_BxKxL and scores_BxK, in rising order of score: the best is last.
    """
    arguments.check("decoding.beam_search", arguments.hints(beam_search), dict(locals()))
    del decode_rng
    rows, beams, steps = start.tokens_B.shape[0], num_decodes, start.num_steps
    start = _limited(start, max_decode_len, max_decode_step)
    limit_B, prompt_B = start.limit_B, start.positions_B
    start = repeat_rows(start, beams)

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

        possible_BxC = ends_BxC & (scores_BxC > WORST / 2)
        penalty_Bx1 = length_penalty(prompt_B + step + 1, alpha)[:, None]
        new_scores_BxC = jnp.where(possible_BxC, scores_BxC / penalty_Bx1, WORST)
        finished_scores_BxK, kept_BxK = jax.lax.top_k(
            jnp.concatenate((state.finished_scores_BxK, new_scores_BxC), axis=1), beams
        )
        finished_BxKxL = select(jnp.concatenate((state.finished_BxKxL, rows_BxCxL), axis=1), kept_BxK)

        hope_B = live_scores_BxK[:, 0] / length_penalty(prompt_B + limit_B, alpha)
        decided_B = (finished_scores_BxK[:, -1] >= hope_B) | (live_scores_BxK[:, 0] < min_log_prob)
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

    empty_BxKxL = jnp.zeros((rows, beams, steps), start.tokens_B.dtype)
    worst_BxK = jnp.full((rows, beams), WORST, _logits_dtype(start))
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
    tokens_BxKxL = jnp.where(any_B[:, None, None], state.finished_BxKxL, state.live_BxKxL)
    scores_BxK = jnp.where(any_B[:, None], state.finished_scores_BxK, state.live_scores_BxK)
    return tokens_BxKxL[:, ::-1], scores_BxK[:, ::-1]
