"""From tokenised documents to examples: chunks for language models, T5's span corruption."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import seqio
import tensorflow as tf

from perex_t5x.errors import ConfigError

NOISE_DENSITY = 0.15
MEAN_SPAN_LENGTH = 3.0

_tf = cast(Any, tf)  # for what its stubs do not know: ragged tensors, trees of tensors, operators on booleans


def _sections(ds: tf.data.Dataset, feature: str, length: int) -> tf.data.Dataset:
    """Pieces of `length` tokens and, last of each document, the 1 to `length` that remain."""

    def pieces(ex):
        tokens = ex[feature]
        rest = (tf.size(tokens) - 1) % length + 1
        whole = tf.reshape(tokens[: tf.size(tokens) - rest], [-1, length])
        last = tf.data.Dataset.from_tensors({feature: tokens[-rest:]})
        return _tf.data.Dataset.from_tensor_slices({feature: whole}).concatenate(last)

    return ds.filter(lambda ex: tf.size(ex[feature]) > 0).flat_map(pieces)


def _chunks(ds: tf.data.Dataset, feature: str, length: int) -> tf.data.Dataset:
    """Chunks of at most `length` tokens; the short ones come together.

    Packing puts neighbours into one row, and a document's short end beside another's full chunk
    would stay alone. So documents are taken in groups: first all full chunks, then all ends.
    Sections bound a group's memory whatever the size of a document. The work is done per section,
    hardly any per chunk: a `map` over chunks would cost ten times the rest.
    """

    def chunks(group):
        # Flat arithmetic: ragged comparisons take half a second to trace.
        tokens, lengths = group[feature].flat_values, group[feature].row_lengths()
        ends = lengths % length
        place = tf.range(tf.size(tokens, tf.int64)) - tf.repeat(group[feature].row_starts(), lengths)
        is_end = place >= tf.repeat(lengths - ends, lengths)
        whole = tf.reshape(tf.boolean_mask(tokens, ~is_end), [-1, length])
        padded = _tf.RaggedTensor.from_row_lengths(tf.boolean_mask(tokens, is_end), ends, validate=False).to_tensor()
        short = _tf.data.Dataset.from_tensor_slices((padded, ends))
        short = short.filter(lambda row, n: n > 0).map(lambda row, n: {feature: row[:n]})
        return _tf.data.Dataset.from_tensor_slices({feature: whole}).concatenate(short)

    return _sections(ds, feature, 64 * length).ragged_batch(64).flat_map(chunks)


def split_into_chunks(ds: tf.data.Dataset, sequence_length: Mapping[str, int]) -> tf.data.Dataset:
    """Cuts `targets` into chunks of at most `sequence_length['targets']`; no token is lost.

    A document of 300 tokens at length 128 gives chunks of 128, 128 and 44. With `pack=True` the
    short ends of neighbouring documents share a row.
    """
    return _chunks(ds, "targets", sequence_length["targets"])


# No example leaves such a task longer than its feature length, so trimming it again (a `map` over
# every example) can be left out when the task is read into the cached feed.
split_into_chunks.bounds_lengths = True


def split_off_prompt(ds: tf.data.Dataset, sequence_length: Mapping[str, int]) -> tf.data.Dataset:
    """Each document's beginning as `inputs` and what follows as `targets`; shorter documents are left out."""
    prompt, answer = sequence_length["inputs"], sequence_length["targets"]
    ds = ds.filter(lambda ex: tf.size(ex["targets"]) >= prompt + answer)
    return ds.map(
        lambda ex: {"inputs": ex["targets"][:prompt], "targets": ex["targets"][prompt : prompt + answer]},
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def noise_counts(length: int) -> tuple[int, int]:
    """(noise tokens, spans) of a chunk of `length` tokens: 15 %, in spans of 3 on average.

    >>> noise_counts(100), noise_counts(1)
    ((15, 5), (1, 1))
    """
    noise = min(max(round(length * NOISE_DENSITY), 1), max(length - 1, 1))
    return noise, max(round(noise / MEAN_SPAN_LENGTH), 1)


def span_corruption_chunk_length(inputs_length: int, targets_length: int) -> int:
    """The longest chunk whose corrupted form, EOS included, fits both lengths.

    A chunk of n tokens with k noise tokens in s spans gives inputs of n − k + s + 1 and targets of k + s + 1 tokens.

    >>> span_corruption_chunk_length(512, 114)
    568
    """
    length = 0
    while True:
        noise, spans = noise_counts(length + 1)
        if length + 1 - noise + spans + 1 > inputs_length or noise + spans + 1 > targets_length:
            break
        length += 1
    if not length:
        raise ConfigError(
            f"TASK_FEATURE_LENGTHS inputs={inputs_length}, targets={targets_length} leave no room "
            "for a corrupted span: inputs need at least 2, targets at least 3."
        )
    return length


def check_sentinels(vocabulary: seqio.Vocabulary, chunk_length: int) -> None:
    _, spans = noise_counts(chunk_length)
    if spans > vocabulary.extra_ids:
        raise ConfigError(
            f"Span corruption of {chunk_length} tokens needs {spans} sentinels, and the vocabulary "
            f"has extra_ids = {vocabulary.extra_ids}: make the vocabulary with at least {spans}, or "
            "TASK_FEATURE_LENGTHS['inputs'] shorter."
        )


def chunks_for_span_corruption(
    ds: tf.data.Dataset, sequence_length: Mapping[str, int], output_features: Mapping[str, seqio.utils.Feature]
) -> tf.data.Dataset:
    """Chunks that fill `sequence_length` once `span_corruption` and EOS are through with them."""
    length = span_corruption_chunk_length(sequence_length["inputs"], sequence_length["targets"])
    check_sentinels(output_features["targets"].vocabulary, length)
    return _chunks(ds, "targets", length)


chunks_for_span_corruption.bounds_lengths = True


def _random_composition(total: tf.Tensor, parts: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """`parts` positive integers that sum to `total`, all compositions equally likely."""
    # The places of the parts − 1 largest of total − 1 random numbers (64 bits: no two are equal).
    numbers = _tf.random.stateless_uniform([total - 1], seed, minval=None, maxval=None, dtype=tf.int64)
    least = tf.concat([[tf.int64.max], tf.math.top_k(numbers, parts - 1).values], 0)[-1]
    cuts = tf.cast(tf.reshape(tf.where(numbers >= least), [-1]), tf.int32) + 1
    edges = tf.concat([[0], cuts, [total]], 0)
    return edges[1:] - edges[:-1]


@seqio.map_over_dataset(num_seeds=2)
def span_corruption(
    ex: Mapping[str, tf.Tensor], seeds: tf.Tensor, output_features: Mapping[str, seqio.utils.Feature]
) -> dict[str, tf.Tensor]:
    """Replaces random spans of `targets` by sentinels; the targets spell the spans out.

    With sentinels X, Y: `a b c d e f` becomes inputs `a X d Y`, targets `X b c Y e f`. Sentinels
    are the vocabulary's last ids, counted downwards (358, 357, ... for 359 ids). The noise is a
    function of SeqIO's seed and the chunk's index alone.
    """
    tokens = ex["targets"]
    vocabulary = output_features["targets"].vocabulary
    length = tf.size(tokens)
    noise = tf.cast(tf.round(tf.cast(length, tf.float32) * NOISE_DENSITY), tf.int32)
    noise = tf.minimum(tf.maximum(noise, 1), tf.maximum(length - 1, 1))
    spans = tf.cast(tf.round(tf.cast(noise, tf.float32) / MEAN_SPAN_LENGTH), tf.int32)
    spans = tf.maximum(spans, 1)
    kept_lengths = tf.cond(
        length > noise,
        lambda: _random_composition(length - noise, spans, seeds[0]),
        lambda: tf.zeros([1], tf.int32),  # a chunk of one token is all noise
    )
    noise_lengths = _random_composition(noise, spans, seeds[1])
    lengths = tf.reshape(tf.stack([kept_lengths, noise_lengths], 1), [-1])
    is_noise = _tf.repeat(_tf.tile([False, True], [spans]), lengths)
    starts = is_noise & ~_tf.concat([[False], is_noise[:-1]], 0)
    sentinels = vocabulary.vocab_size - tf.cumsum(tf.cast(starts, tf.int32))
    inputs = tf.boolean_mask(tf.where(starts, sentinels, tokens), starts | ~is_noise)
    pairs = tf.reshape(tf.stack([sentinels, tokens], 1), [-1])
    targets = tf.boolean_mask(pairs, tf.reshape(tf.stack([starts, is_noise], 1), [-1]))
    return {"inputs": inputs, "targets": targets}
