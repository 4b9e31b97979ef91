import numpy as np
import pytest
import seqio
import tensorflow as tf

from perex_t5x.data import rows


def examples(features, lengths, count=300, seed=0):
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        sizes = {f: rng.integers(1, lengths[f] + 1) for f in features}
        if rng.random() < 0.6:
            sizes = {f: min(n, 4) for f, n in sizes.items()}
        result.append({f: rng.integers(1, 300, n).astype(np.int32) for f, n in sizes.items()})
    result[5]["targets"][0] = 0  # SeqIO takes a zero for padding; so must we
    return result


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(
    "converter_cls, lengths",
    [
        (seqio.LMFeatureConverter, {"targets": 13}),
        (seqio.EncDecFeatureConverter, {"inputs": 17, "targets": 11}),
    ],
)
def test_equals_seqios_converter(converter_cls, lengths, pack):
    examples_list = examples(list(lengths), lengths)
    spec = {f: tf.TensorSpec([None], tf.int32) for f in lengths}
    ds = tf.data.Dataset.from_generator(lambda: iter(examples_list), output_signature=spec)
    expected = list(converter_cls(pack=pack)(ds, lengths).as_numpy_iterator())

    padded = {f: np.stack([np.pad(e[f], (0, lengths[f] - len(e[f]))) for e in examples_list]) for f in lengths}
    packed = (rows.pack if pack else rows.pad)(padded, lengths)
    ours = rows.model_features(packed)
    assert set(ours) == set(expected[0])
    for name, value in ours.items():
        np.testing.assert_array_equal(value, np.stack([e[name] for e in expected]), name)
        assert value.dtype == expected[0][name].dtype


def test_segments_begin_with_bos_and_count_from_one():
    padded = {"targets": np.array([[3, 9, 1, 0], [4, 1, 0, 0], [7, 8, 9, 1]], np.int32)}
    features = rows.model_features(rows.pack(padded, {"targets": 6}), bos_id=5)
    assert features["decoder_segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]]
    assert features["decoder_positions"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]]
    assert features["decoder_input_tokens"][0].tolist()[:5] == [5, 3, 9, 5, 4]
    assert features["decoder_loss_weights"].sum() == 9
