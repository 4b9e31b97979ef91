"""Greedy, sampling and beam search, each against something slower and simpler, and against T5X."""

import copy
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import models
from perex_t5x.errors import ConfigError
from perex_t5x.models import decoding
from tests.models.model_support import (
    EOS,
    MAKE,
    TWO_LAYERS,
    batch,
    config,
    decoder_only,
    encoder_decoder,
    jit,
    logits,
    params,
)  # fmt: skip


def predict(model, p, features, rng=None, fn=None, **kwargs):
    """By the model's own decoding function, or another one."""
    model = copy.copy(model)
    model.decode_fn = fn or model.decode_fn
    return jit(lambda p, f, rng: model.predict_batch_with_aux(p, f, rng, **kwargs))(p, features, rng)


def sampling(**arguments):
    return functools.partial(decoding.temperature_sample, **arguments)


def beams(**arguments):
    return functools.partial(decoding.beam_search, **arguments)


MODELS_OWN = sampling(rescale_log_probs=False)  # greedy, with the scores of the model


def prompts(lengths=(3, 1, 5), width=12):
    """Rows of a start token and a prompt, marked as SeqIO marks them, with other tokens behind."""
    tokens = np.random.default_rng(0).integers(2, 24, (len(lengths), width)).astype(np.int32)
    tokens[:, 0] = 0
    marks = (np.arange(width)[None] <= np.asarray(lengths)[:, None]).astype(np.int32)
    return {"decoder_input_tokens": jnp.asarray(tokens), "decoder_causal_attention": jnp.asarray(marks)}


def slow_greedy(model, p, features, start_at, steps):
    """Repeated full forward passes over rows that grow by their argmax."""
    rows = np.asarray(features["decoder_input_tokens"]).copy()
    compute = jit(model.compute_logits)
    result = np.zeros((len(rows), steps), np.int32)
    done = np.zeros(len(rows), bool)
    for step in range(steps):
        best = np.asarray(compute(p, features | {"decoder_input_tokens": jnp.asarray(rows)}).argmax(-1))
        for b, at in enumerate(np.asarray(start_at) + step):
            if done[b] or at >= rows.shape[1]:
                continue
            result[b, step] = token = best[b, at]
            done[b] = token == EOS
            if at + 1 < rows.shape[1]:
                rows[b, at + 1] = token
    return result


def likely_eos(p, by=0.4):
    """Raises EOS's logit where the final vector points up, so that rows end at different steps."""
    kernel = jnp.asarray(p["decoder"]["logits_dense"]["kernel"])
    return p | {
        "decoder": p["decoder"] | {"logits_dense": {"kernel": kernel.at[:, EOS].mul(1 + by).at[0, EOS].add(by)}}
    }


@pytest.mark.parametrize(
    "changes", [{}, dict(scan_layers=True, num_kv_heads=2), dict(bidirectional=True, positions="relative")]
)
def test_greedy_with_a_cache_is_repeated_argmax_decoder_only(changes):
    features = prompts()
    model = decoder_only(**TWO_LAYERS, **changes)
    p = likely_eos(params(model, features))
    tokens, aux = predict(model, p, features, fn=MODELS_OWN)
    expected = slow_greedy(model, p, features, start_at=(3, 1, 5), steps=12)
    np.testing.assert_array_equal(tokens, expected)
    if not changes:
        assert len({int((row > 0).sum()) for row in expected}) > 1, "rows of one length test little"
        for b, n in enumerate((3, 1, 5)):
            count = int((expected[b] > 0).sum())
            row = np.concatenate((features["decoder_input_tokens"][b, 1 : n + 1], expected[b, :count]))
            row = jnp.asarray(np.pad(row, (0, 12 - len(row))))[None]
            log_probs = jax.nn.log_softmax(
                logits(model, p, {"decoder_input_tokens": jnp.pad(row, ((0, 0), (1, 0)))[:, :-1]})
            )
            score = sum(float(log_probs[0, i, row[0, i]]) for i in range(n, n + count))
            assert float(aux["scores"][b]) == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("scan", [False, True])
def test_greedy_with_a_cache_is_repeated_argmax_encoder_decoder(scan):
    features = batch("encoder_decoder", length=9)
    model = encoder_decoder(scan_layers=scan, **TWO_LAYERS)
    p = likely_eos(params(model, features))
    tokens, _ = predict(model, p, features, fn=sampling())
    expected = slow_greedy(model, p, features, start_at=(0, 0, 0), steps=9)
    np.testing.assert_array_equal(tokens, expected)
    if scan:
        return
    only_inputs = {"encoder_input_tokens": features["encoder_input_tokens"]}
    np.testing.assert_array_equal(predict(model, p, only_inputs, fn=sampling(), max_decode_len=4)[0], expected[:, :4])


def test_three_ways_to_give_a_prompt():
    features = prompts()
    model = decoder_only()
    p = params(model, features)
    marked = predict(model, p, features)[0]
    tokens = features["decoder_input_tokens"] * features["decoder_causal_attention"]
    np.testing.assert_array_equal(predict(model, p, {"decoder_input_tokens": tokens})[0], marked)
    plain = {"inputs": tokens[:, 1:6]}
    np.testing.assert_array_equal(predict(model, p, plain, max_decode_len=7)[0], marked[:, :7])
    with pytest.raises(ConfigError, match="max_decode_len"):
        model.predict_batch(p, plain)
    with pytest.raises(ConfigError, match="pack = False"):
        model.predict_batch(p, features | {"decoder_segment_ids": tokens})


def test_decoding_stops_when_every_row_has_ended():
    """A cache that counts its steps: 3 of 50 when the later of two rows ends at the third."""

    def next_logits(tokens_B, positions_B, cache, _):
        ends_B = positions_B >= jnp.array([1, 2])
        return jnp.where(ends_B[:, None], jnp.eye(4)[EOS][None], jnp.eye(4)[2][None]) * 50.0, cache + 1

    start = decoding.Start(
        next_logits, jnp.zeros((2,)), {}, 0, *(jnp.zeros((2,), jnp.int32),) * 2, jnp.full((2,), 50), 50
    )
    counted = []

    def counting(*args):
        jax.debug.callback(lambda: counted.append(1))
        return next_logits(*args)

    for decode in (sampling(), beams(num_decodes=1)):
        counted.clear()
        tokens, _ = decode(start._replace(next_logits=counting), eos_id=EOS)
        jax.effects_barrier()
        np.testing.assert_array_equal(tokens[:, 0, :4], [[2, EOS, 0, 0], [2, 2, EOS, 0]])
        assert len(counted) == 3


@pytest.mark.parametrize("kind, alpha", [("decoder_only", 0.6), ("encoder_decoder", 0.0)])
def test_a_wide_beam_finds_the_best_of_all_sequences(kind, alpha, size=5, steps=3):
    features = batch(kind, lengths=(2, 2, 2), length=steps)
    features = {name: x % size if "tokens" in name else x for name, x in features.items()}
    features["decoder_input_tokens"] = jnp.zeros((3, steps), jnp.int32)
    model = MAKE[kind](vocab_size=size)
    p = params(model, features)
    others = [t for t in range(size) if t != EOS]
    candidates = [
        (*head, EOS) for n in range(steps) for head in itertools.product(others, repeat=n)
    ]  # every sequence that ends within the limit
    rows = np.zeros((len(candidates), steps), np.int32)
    for i, sequence in enumerate(candidates):
        rows[i, : len(sequence)] = sequence
    weights = np.arange(steps)[None] < np.array([len(c) for c in candidates])[:, None]
    penalties = np.array([decoding.length_penalty(len(c), alpha) for c in candidates])
    tokens, aux = predict(model, p, features, fn=beams(alpha=alpha), num_decodes=25, return_all_decodes=True)
    assert tokens.shape == (3, 25, steps)
    score = jit(model.score_batch)
    for b in range(3):
        every = {name: jnp.repeat(x[b : b + 1], len(rows), axis=0) for name, x in features.items()}
        every |= {
            "decoder_target_tokens": jnp.asarray(rows),
            "decoder_input_tokens": jnp.asarray(np.pad(rows, ((0, 0), (1, 0)))[:, :-1]),
            "decoder_loss_weights": jnp.asarray(weights),
        }
        scores = np.asarray(score(p, every)) / penalties
        np.testing.assert_array_equal(tokens[b, -1], rows[scores.argmax()])
        assert float(aux["scores"][b, -1]) == pytest.approx(scores.max(), abs=1e-4)
        np.testing.assert_allclose(np.sort(aux["scores"][b]), aux["scores"][b])


def test_sampling_is_a_function_of_the_rows_key():
    features = prompts()
    model = decoder_only()
    p = params(model, features)
    keys = jax.random.split(jax.random.key(7), 3)
    sample = jit(lambda f, k: model.predict_batch(p, f, k, decoder_params=dict(temperature=2.0, topk=0)))
    first = sample(features, keys)
    np.testing.assert_array_equal(sample(features, keys), first)
    assert (np.asarray(sample(features, jax.random.split(jax.random.key(8), 3))) != first).any()
    order = jnp.array([2, 0, 1])
    moved = sample({name: x[order] for name, x in features.items()}, keys[order])
    np.testing.assert_array_equal(moved, first[order])


def test_samples_are_sorted_and_differ():
    features = prompts()
    model = decoder_only(scan_layers=True)
    p = params(model, features)
    tokens, aux = predict(
        model, p, features, jax.random.key(0), fn=sampling(topk=0), num_decodes=4, return_all_decodes=True
    )
    assert tokens.shape == (3, 4, 12)
    assert (np.diff(aux["scores"], axis=1) >= 0).all()
    assert len({row.tobytes() for row in np.asarray(tokens[1])}) > 1


def frequencies(row, draws, temperature=1.0, **kwargs):
    keys, logits_BxV = jax.random.split(jax.random.key(0), draws), jnp.broadcast_to(row, (draws, len(row)))
    tokens, _ = decoding.sample(logits_BxV, keys, jnp.int32(3), jnp.full((draws,), temperature), **kwargs)
    return np.bincount(np.asarray(tokens), minlength=len(row)) / draws


def test_temperature_topk_and_topp_shape_the_distribution(draws=4000):
    row = jnp.array([0.0, 2.0, 1.0, -1.0])
    np.testing.assert_allclose(frequencies(row, draws, 0.5), jax.nn.softmax(row / 0.5), atol=0.03)
    for few in (dict(topk=2), dict(topp=0.8)):  # 0.64 and 0.88 of the probability
        two = frequencies(row, draws, **few)
        assert two[0] == two[3] == 0
        np.testing.assert_allclose(two[1:3], jax.nn.softmax(row[1:3]), atol=0.03)
    assert frequencies(row, draws, 0.0)[1] == 1  # greedy, whatever else


def plain_topk(row, k):
    return row >= sorted(row)[::-1][k - 1]


def plain_topp(row, p):
    """Token by token, the likeliest first, until their probability is at least p; and what ties with the last one."""
    probs = np.exp(np.float64(row)) / np.exp(np.float64(row)).sum()
    reached, least = 0.0, np.inf
    for token in np.argsort(-probs, kind="stable"):
        if reached >= p:
            break
        reached, least = reached + probs[token], probs[token]
    return probs >= least


def test_topk_and_topp_keep_what_a_plain_loop_keeps():
    logits_BxV = np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32) * 2
    logits_BxV[3, :7] = logits_BxV[3, 7]  # ties
    for k in (1, 2, 7, 50):
        kept = decoding.topk_mask(jnp.asarray(logits_BxV), k) > -jnp.inf
        np.testing.assert_array_equal(kept, [plain_topk(row, k) for row in logits_BxV])
    assert (decoding.topk_mask(jnp.asarray(logits_BxV), 99) == logits_BxV).all()  # more than there are
    for p in (0.05, 0.37, 0.9, 0.999, 1.0):
        kept = decoding.topp_mask(jnp.asarray(logits_BxV), p) > -jnp.inf
        np.testing.assert_array_equal(kept, [plain_topp(row, p) for row in logits_BxV])


def one_row(logits, rooms=4):
    """A start whose logits depend on the position alone: logits[position]."""
    table = jnp.asarray(logits, jnp.float32)
    zeros = jnp.zeros((1,), jnp.int32)

    def next_logits(tokens_B, positions_B, cache, _):
        return table[jnp.minimum(positions_B, len(table) - 1)], cache

    return decoding.Start(next_logits, jnp.zeros((1,)), {}, 0, zeros, zeros, jnp.full((1,), rooms), rooms)


def test_scores_are_those_of_the_distribution_that_is_drawn_from_or_of_the_model():
    start = one_row([[0.0, -9.0, 1.0, 1.0], [0.0, 9.0, 1.0, 1.0]])
    log_probs = np.asarray(jax.nn.log_softmax(jnp.array([[0.0, -9.0, 1.0, 1.0], [0.0, 9.0, 1.0, 1.0]])))
    tokens, scores = decoding.temperature_sample(start, topk=2, eos_id=EOS)
    token = int(tokens[0, 0, 0])
    assert token in (2, 3) and tokens[0, 0].tolist() == [token, EOS, 0, 0]
    restricted = -np.log(2) + log_probs[1, 1] - np.logaddexp(log_probs[1, 1], np.logaddexp(*log_probs[1, 2:]))
    assert float(scores[0, 0]) == pytest.approx(restricted, abs=1e-5)
    _, scores = decoding.temperature_sample(start, topk=2, eos_id=EOS, rescale_log_probs=False)
    assert float(scores[0, 0]) == pytest.approx(log_probs[0, token] + log_probs[1, 1], abs=1e-5)
    assert float(decoding.temperature_sample(start, eos_id=EOS)[1][0, 0]) == 0.0  # greedy: certain


def test_fewer_steps_callbacks_and_temperatures_of_rows():
    start = one_row([[0.0, -9.0, 1.0, 0.5]])
    assert decoding.temperature_sample(start, eos_id=EOS)[0].tolist() == [[[2, 2, 2, 2]]]
    assert decoding.temperature_sample(start, eos_id=EOS, max_decode_steps=3)[0].tolist() == [[[2, 2, 2, 0]]]
    limits = dict(max_decode_steps=3, max_decode_steps_hard_limit=1)
    assert decoding.temperature_sample(start, eos_id=EOS, **limits)[0].tolist() == [[[2, 0, 0, 0]]]
    assert decoding.beam_search(start, eos_id=EOS, num_decodes=1, max_decode_step=2)[0].tolist() == [[[2, 2, 0, 0]]]
    assert decoding.beam_search(start, eos_id=EOS, num_decodes=1, max_decode_len=1)[0].tolist() == [[[2, 0, 0, 0]]]

    def forbid_two(logits_BxV, state):
        return logits_BxV.at[:, 2].set(jnp.where(state.step == 1, -jnp.inf, logits_BxV[:, 2]))

    changed, _ = decoding.temperature_sample(start, eos_id=EOS, logit_callback_fn=forbid_two)
    assert changed.tolist() == [[[2, 3, 2, 2]]]
    stop = lambda state: state._replace(ended=state.ended | (state.step >= 2))  # noqa: E731
    assert decoding.temperature_sample(start, eos_id=EOS, state_callback_fn=stop)[0].tolist() == [[[2, 2, 0, 0]]]
    two = decoding.repeat_rows(start, 2)
    tokens, _ = decoding.temperature_sample(two, eos_id=EOS, topk=0, temperature=jnp.array([0.0, 50.0]))
    assert tokens[0].tolist() == [[2, 2, 2, 2]] != tokens[1].tolist()


def test_decoder_params_and_the_models_own_defaults():
    features = prompts()
    model = decoder_only()
    p = params(model, features)
    raw = jax.random.PRNGKey(3)
    options = dict(decoder_params=dict(topk=0, temperature=3.0, decode_rng=raw), num_decodes=2, return_all_decodes=True)
    tokens, _ = predict(model, p, features, **options)
    typed = predict(
        model, p, features, jax.random.key(3), fn=sampling(topk=0, temperature=3.0), **options | dict(decoder_params={})
    )
    np.testing.assert_array_equal(tokens, typed[0])
    vocabulary = model.output_vocabulary
    other = models.EncoderDecoderModel(
        models.Transformer(config()), vocabulary, vocabulary, None,
        default_decoder_params=models.DecoderParams(num_decodes=3, return_all_decodes=True),
    )  # fmt: skip
    features = batch("encoder_decoder")
    assert predict(other, params(other, features), features)[0].shape == (3, 3, 9)


def test_targets_as_prompts_are_what_the_result_begins_with():
    model = encoder_decoder()
    features = batch("encoder_decoder", length=9)
    p = params(model, features)
    prompt = np.zeros((3, 9), np.int32)
    prompt[0, 1:4], prompt[1, 1:4] = (5, 6, 7), (9, EOS, 4)
    features["decoder_input_tokens"] = jnp.asarray(prompt)
    tokens, _ = predict(model, p, features, fn=sampling(), prompt_with_targets=True)
    continued = slow_greedy(model, p, features, start_at=(3, 1, 0), steps=9)
    for row, head, new in zip(np.asarray(tokens), ([5, 6, 7], [9], []), continued, strict=True):
        np.testing.assert_array_equal(row, [*head, *new][:9])


# --- T5X ---------------------------------------------------------------------------------------------------------------


def test_beams_as_t5x_has_them():
    """What T5X's beam_search gave for these logits, alpha = 0.6; a row's beams, then their scores."""
    logits = [[0.0, 1.2, 2.0, 1.9], [0.0, 0.5, 1.0, 2.0], [0.0, 3.0, 1.0, -1.0], [0.0, 3.0, 1.0, -1.0]]
    tokens, scores = decoding.beam_search(one_row(logits), eos_id=EOS, num_decodes=3)
    assert tokens.tolist() == [[[1, 0, 0, 0], [3, 3, 1, 0], [2, 3, 1, 0]]]
    np.testing.assert_allclose(scores, [[-1.7120825, -1.4669042, -1.3827577]], atol=1e-5)


@pytest.mark.parametrize(
    "name, num_decodes, options",
    [("beam_search", 4, {}), ("beam_search", 1, dict(alpha=0.0)), ("temperature_sample", 1, {})],
)
def test_predictions_are_t5xs(t5x, name, num_decodes, options):
    from t5x import decoding as t5x_decoding
    from t5x import models as t5x_models
    from t5x.examples.t5 import network

    model = encoder_decoder(dropout_rate=0.1)
    features = batch("encoder_decoder", length=9)
    p = likely_eos(params(model, features), by=0.8)
    sizes = {field: getattr(model.config, field) for field in network.T5Config.__dataclass_fields__}
    module = network.Transformer(network.T5Config(**sizes))
    theirs = t5x_models.EncoderDecoderModel(
        module, *[model.output_vocabulary] * 2, None, functools.partial(getattr(t5x_decoding, name), **options)
    )
    ours = predict(
        model,
        p,
        features,
        fn=functools.partial(getattr(decoding, name), **options),
        num_decodes=num_decodes,
        return_all_decodes=True,
    )
    expected = theirs.predict_batch_with_aux(p, features, num_decodes=num_decodes, return_all_decodes=True)
    np.testing.assert_array_equal(ours[0], expected[0])
    np.testing.assert_allclose(ours[1]["scores"], expected[1]["scores"], atol=1e-4)


KEY = jax.random.key(0)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        (dict(decoder_params=dict(topq=1)), "temperature_sample takes no 'topq'. Did you mean 'top"),
        (dict(decoder_params=dict(topk=2, topp=0.5)), "Set topk = 0"),
        (dict(decoder_params=dict(topp=1.5, topk=0)), r"topp = 1.5: must be a number in \[0, 1\]"),
        (dict(decoder_params=dict(temperature=-1.0)), "temperature = -1.0"),
        (dict(decoder_params=dict(topk=-1)), "topk = -1"),
        (dict(decoder_params=dict(decode_rng=KEY), rng=KEY), "leave it out"),
        (dict(num_decodes=0), "num_decodes = 0"),
        (dict(max_decode_len=0), "max_decode_len = 0"),
        (dict(fn=decoding.beam_search, decoder_params=dict(alpha=-1.0)), "alpha"),
    ],
)
def test_slips_are_named(kwargs, words):
    model = decoder_only()
    model.decode_fn = kwargs.pop("fn", model.decode_fn)
    features = prompts()
    with pytest.raises(ConfigError, match=words):
        jax.eval_shape(lambda: model.predict_batch(params(model, features), features, **kwargs))
