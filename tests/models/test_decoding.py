"""Greedy, sampling and beam search, each against something slower and simpler."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.models import decoding
from tests.models.model_support import EOS, MAKE, TWO_LAYERS, batch, decoder_only, encoder_decoder, jit, logits, params


def predict(model, p, features, rng=None, **kwargs):
    return jit(lambda p, f, rng: model.predict_batch_with_aux(p, f, rng, **kwargs))(p, features, rng)


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


@pytest.mark.parametrize("changes", [{}, dict(scan_layers=True, num_kv_heads=2), dict(bidirectional=True)])
def test_greedy_with_a_cache_is_repeated_argmax_decoder_only(changes):
    features = prompts()
    model = decoder_only(**TWO_LAYERS, **changes)
    p = likely_eos(params(model, features))
    tokens, aux = predict(model, p, features)
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
    tokens, _ = predict(model, p, features)
    expected = slow_greedy(model, p, features, start_at=(0, 0, 0), steps=9)
    np.testing.assert_array_equal(tokens, expected)
    if scan:
        return
    only_inputs = {"encoder_input_tokens": features["encoder_input_tokens"]}
    np.testing.assert_array_equal(predict(model, p, only_inputs, max_decode_len=4)[0], expected[:, :4])


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

    for method in ("greedy", "beam"):
        counted.clear()
        tokens, _ = decoding.decode(start._replace(next_logits=counting), eos_id=EOS, method=method)
        jax.effects_barrier()
        np.testing.assert_array_equal(tokens[:, 0, :4], [[2, EOS, 0, 0], [2, 2, EOS, 0]])
        assert len(counted) == 3


@pytest.mark.parametrize("kind", MAKE)
def test_one_beam_without_length_penalty_is_greedy(kind):
    features = prompts() if kind == "decoder_only" else batch(kind)
    model = MAKE[kind](scan_layers=True)
    p = likely_eos(params(model, features))
    greedy, greedy_aux = predict(model, p, features)
    tokens, aux = predict(model, p, features, decode_method="beam", alpha=0.0)
    np.testing.assert_array_equal(tokens, greedy)
    np.testing.assert_allclose(aux["scores"], greedy_aux["scores"], atol=1e-4)


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
    tokens, aux = predict(
        model, p, features, decode_method="beam", num_decodes=25, alpha=alpha, return_all_decodes=True
    )
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
    sample = jit(lambda f, k: model.predict_batch(p, f, k, decode_method="temperature", temperature=2.0))
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
        model, p, features, jax.random.key(0), decode_method="temperature", num_decodes=4, return_all_decodes=True
    )
    assert tokens.shape == (3, 4, 12)
    assert (np.diff(aux["scores"], axis=1) >= 0).all()
    assert len({row.tobytes() for row in np.asarray(tokens[1])}) > 1


def test_top_k_and_temperature_shape_the_distribution(draws=4000):
    row = jnp.array([0.0, 2.0, 1.0, -1.0])
    keys = jax.random.split(jax.random.key(0), draws)

    def frequencies(**kwargs):
        tokens = decoding.sample(jnp.broadcast_to(row, (draws, 4)), keys, jnp.int32(3), **kwargs)
        return np.bincount(np.asarray(tokens), minlength=4) / draws

    np.testing.assert_allclose(frequencies(temperature=0.5, top_k=0), jax.nn.softmax(row / 0.5), atol=0.03)
    two = frequencies(temperature=1.0, top_k=2)
    assert two[0] == two[3] == 0
    np.testing.assert_allclose(two[1:3], jax.nn.softmax(row[1:3]), atol=0.03)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        (dict(decode_method="bem"), "Did you mean 'beam'"),
        (dict(decode_method="greedy", num_decodes=2), "one result"),
        (dict(decode_method="temperature"), "give rng"),
        (dict(decode_method="temperature", rng=jax.random.key(0), temperature=0.0), "'greedy' is its limit"),
        (dict(decode_method="temperature", rng=jax.random.key(0), top_k=-1), "top_k = -1"),
        (dict(num_decodes=0), "num_decodes = 0"),
        (dict(max_decode_len=0), "max_decode_len = 0"),
        (dict(decode_method="beam", alpha=-1.0), "alpha"),
    ],
)
def test_slips_are_named(kwargs, words):
    with pytest.raises(ConfigError, match=words):
        decoder_only().predict_batch({}, prompts(), **kwargs)
