import functools
import json
import re

import gin
import numpy as np
import pytest
import sentencepiece
import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from perex_t5x.data import make_feed, metrics, preprocessors, tasks, text_source
from perex_t5x.data.lookup import get_mixture_or_task
from perex_t5x.errors import ConfigError

EOS = 1


def documents_of(task, split, length):
    """Texts put together again from chunks, in any order."""
    ds = task.get_dataset({"targets": length}, split=split, shuffle=False)
    return [ex["targets"] for ex in ds.as_numpy_iterator()]


def test_the_table_of_tasks():
    get_mixture_or_task("python_stdlib_lm")
    features = {
        "python_stdlib_lm": {"targets"},
        "python_stdlib_span_corruption": {"inputs", "targets"},
        "text_files_lm": {"targets"},
        "c4_en_lm": {"targets"},
    }
    for name, expected in features.items():
        task = seqio.TaskRegistry.get(name)
        assert set(task.output_features) == expected
        assert task.output_features["targets"].vocabulary.vocab_size == 359
        assert task.supports_caching and not task.requires_caching
        assert task.metric_fns


def test_stdlib_files_are_the_librarys_own():
    names = [name for name, _ in text_source.list_stdlib_files()]
    assert names == sorted(names) and len(names) > 300
    assert {"argparse.py", "asyncio/tasks.py"} <= set(names)
    assert not any(re.search(r"site-packages|(^|/)tests?/|__pycache__", n) for n in names)


def test_an_interpreter_without_sources_is_explained(tmp_path):
    with pytest.raises(ConfigError, match="text_files_lm"):
        text_source.list_stdlib_files(str(tmp_path))


def test_a_file_stays_in_its_split_when_others_come():
    files = [(f"{i}.txt", f"/x/{i}.txt") for i in range(500)]
    before = text_source.split_by_name(files[:400])
    after = text_source.split_by_name(files)
    for split in ("train", "validation"):
        assert set(before[split]) <= set(after[split])
    assert 0.02 < len(after["validation"]) / 500 < 0.09


def test_chunks_lose_nothing_and_short_ends_come_together(tmp_path):
    texts = ["a" * 70, "b" * 32, "c" * 5, "d" * 31]  # with EOS: 71, 33, 6, 32 tokens
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    (tmp_path / "v.txt").write_text("validation")
    tasks.register_text_files(glob=f"{tmp_path}/[0-9].txt", validation_glob=f"{tmp_path}/v.txt", name="chunks_lm")
    chunks = documents_of(seqio.TaskRegistry.get("chunks_lm"), "train", 32)
    assert [len(c) for c in chunks] == [32, 32, 32, 32, 7, 1, 6]
    letter = [chr(c[0] - 3) if c[0] > 2 else "" for c in chunks]
    assert letter == ["a", "a", "b", "d", "a", "", "c"]
    assert sum(int((c == EOS).sum()) for c in chunks) == len(texts)
    assert sorted(np.concatenate(chunks)) == sorted(t for text in texts for t in [*(b + 3 for b in text.encode()), EOS])


def test_a_document_longer_than_a_section_stays_in_order():
    tokens = np.arange(1, 4 * 64 * 3 + 3, dtype=np.int32)
    ds = tf.data.Dataset.from_tensors({"targets": tokens})
    chunks = [c["targets"] for c in preprocessors.split_into_chunks(ds, {"targets": 4})]
    assert np.concatenate(chunks).tolist() == tokens.tolist()


def test_invalid_utf8_is_replaced(tmp_path, config, converter):
    (tmp_path / "bad.txt").write_bytes(b"ok \xff\xfe end")
    (tmp_path / "v.txt").write_text("v")
    tasks.register_text_files(glob=f"{tmp_path}/bad.txt", validation_glob=f"{tmp_path}/v.txt", name="invalid_lm")
    (chunk,) = documents_of(seqio.TaskRegistry.get("invalid_lm"), "train", 64)
    assert seqio.ByteVocabulary().decode(chunk.tolist()) == "ok \ufffd\ufffd end"


# --- span corruption ---------------------------------------------------------------------------


def corrupt(tokens, seed=0):
    vocabulary = seqio.ByteVocabulary(extra_ids=100)
    features = {"targets": seqio.Feature(vocabulary)}
    ds = tf.data.Dataset.from_tensor_slices({"targets": tokens})
    with seqio.utils.map_seed_manager(seed):
        ds = preprocessors.span_corruption(ds, output_features=features)
    return list(ds.as_numpy_iterator())


def undo(inputs, targets, first_sentinel=358):
    """Puts the spans of the targets back to where their sentinels stand in the inputs."""
    spans, result = {}, []
    for t in targets:
        if 258 < t <= first_sentinel:
            spans[t] = []
            current = t
        else:
            spans[current].append(t)
    for t in inputs:
        result += spans.pop(t) if t in spans else [t]
    assert not spans
    return result


@pytest.mark.parametrize("length", [1, 2, 7, 100, 568])
def test_span_corruption_can_be_undone(length):
    tokens = np.random.default_rng(0).integers(3, 259, (4, length), dtype=np.int32)
    noise, spans = preprocessors.noise_counts(length)
    examples = corrupt(tokens)
    for ex, original in zip(examples, tokens, strict=True):
        assert undo(ex["inputs"], ex["targets"]) == original.tolist()
        assert len(ex["targets"]) == noise + spans
        assert len(ex["inputs"]) == length - noise + spans
        sentinels = ex["targets"][ex["targets"] > 258]
        assert sentinels.tolist() == list(range(358, 358 - spans, -1))
    if length >= 100:
        assert examples[0]["inputs"].tolist() != examples[1]["inputs"].tolist()
        again, other = corrupt(tokens), corrupt(tokens, seed=1)
        places = [(e["inputs"] > 258).tolist() for e in (examples[0], again[0], other[0])]
        assert places[0] == places[1] != places[2]


def test_span_corruption_fills_its_lengths():
    length = preprocessors.span_corruption_chunk_length(512, 114)
    noise, spans = preprocessors.noise_counts(length)
    assert length - noise + spans + 1 == 512 and noise + spans + 1 <= 114
    with pytest.raises(ConfigError, match="targets at least 3"):
        preprocessors.span_corruption_chunk_length(8, 2)


def test_span_corruption_task(config):
    cfg = config(
        mixture_or_task_name="python_stdlib_span_corruption",
        task_feature_lengths={"inputs": 256, "targets": 64},
        split="validation",
    )
    feed = make_feed(cfg, seqio.EncDecFeatureConverter)
    batch = feed.batch(0, None)
    inputs, targets = batch["encoder_input_tokens"], batch["decoder_target_tokens"]
    full = inputs[(inputs[:, -1] == EOS) & (batch["encoder_segment_ids"][:, -1] == 1)]
    assert len(full) >= 4, "most rows hold one full chunk that ends in EOS"
    assert (targets[:, 0] == 358).all()
    noise = (targets[(targets > 2) & (targets < 259)]).size
    kept = (inputs[(inputs > 2) & (inputs < 259)]).size
    assert noise / (noise + kept) == pytest.approx(0.15, abs=0.01)


def test_too_few_sentinels_are_refused(corpus):
    with pytest.raises(ConfigError, match="extra_ids"):
        preprocessors.check_sentinels(seqio.ByteVocabulary(extra_ids=3), 568)
    preprocessors.check_sentinels(seqio.ByteVocabulary(extra_ids=100), 568)


# --- other vocabularies and sources --------------------------------------------------------------


@pytest.fixture(scope="module")
def sentencepiece_model(corpus, tmp_path_factory):
    prefix = tmp_path_factory.mktemp("sentencepiece") / "small"
    sentencepiece.SentencePieceTrainer.train(
        input=sorted(str(p) for p in corpus.iterdir()),
        model_prefix=str(prefix),
        vocab_size=60,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return f"{prefix}.model"


def test_sentencepiece_by_a_path_from_gin(sentencepiece_model, corpus, config, converter):
    gin.parse_config(f"""
        from __gin__ import dynamic_registration
        from perex_t5x.data import tasks
        tasks.register_all.vocabulary = '{sentencepiece_model}'
        tasks.register_text_files.glob = '{corpus}/*.txt'
    """)
    cfg = config(mixture_or_task_name="text_files_lm", task_feature_lengths={"targets": 16})
    feed = make_feed(cfg, converter, repeat=False, pad_remainder=True)
    vocabulary = seqio.TaskRegistry.get("text_files_lm").output_features["targets"].vocabulary
    assert isinstance(vocabulary, seqio.SentencePieceVocabulary)
    tokens = np.concatenate([b["decoder_target_tokens"] for b in feed.epoch()])
    assert tokens.max() < vocabulary.vocab_size - 100  # the sentinels do not occur
    assert "gamma" in vocabulary.decode(tokens[0].tolist() + tokens[1].tolist() + tokens[2].tolist())
    task = seqio.TaskRegistry.get("text_files_lm")
    size = task.source.size_bytes("train")
    assert (tokens != 0).sum() < size / 2, "pieces are longer than bytes"
    gin.clear_config()
    get_mixture_or_task("python_stdlib_lm")  # registers all with bytes again
    after = seqio.TaskRegistry.get("python_stdlib_lm").output_features["targets"].vocabulary
    assert isinstance(after, seqio.ByteVocabulary)


def write_tfds(folder, texts):
    """A prepared TFDS dataset as it lies on disk: record files and their metadata."""
    folder.mkdir(parents=True)
    features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "url": np.str_})
    for split, split_texts in texts.items():
        path = folder / f"small_c4-{split}.tfrecord-00000-of-00001"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for text in split_texts:
                writer.write(features.serialize_example({"text": text, "url": "http://x"}))
    tfds.folder_dataset.write_metadata(
        data_dir=str(folder),
        features=features,
        split_infos=[
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=[len(split_texts)],
                num_bytes=0,
                filename_template=tfds.core.ShardedFileTemplate(
                    data_dir=folder,
                    template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                    dataset_name="small_c4",
                    split=split,
                    filetype_suffix="tfrecord",
                ),
            )
            for split, split_texts in texts.items()
        ],
    )


def test_c4_code_path_on_a_small_dataset(tmp_path, monkeypatch, config, converter):
    texts = {"train": [f"train document {i} " * 5 for i in range(20)], "validation": ["held out"]}
    write_tfds(tmp_path / "small_c4" / "en" / "3.1.0", texts)
    monkeypatch.setattr(seqio.utils, "_TFDS_DATA_DIR_OVERRIDE", str(tmp_path))
    gin.bind_parameter("perex_t5x.data.tasks.register_all.c4_name", "small_c4/en:3.1.0")
    cfg = config(mixture_or_task_name="c4_en_lm", batch_size=4)
    feeds = {
        kind: make_feed(
            config(**{**vars(cfg), "feed": kind, "shuffle": False}), converter, repeat=False, pad_remainder=True
        )
        for kind in ("auto", "streaming")
    }
    assert feeds["auto"].position(0)["feed"] == "cached"
    batches = {kind: list(feed.epoch()) for kind, feed in feeds.items()}
    tokens = {k: np.concatenate([x["decoder_target_tokens"] for x in b]) for k, b in batches.items()}
    np.testing.assert_array_equal(tokens["auto"], tokens["streaming"])
    assert (tokens["auto"] == EOS).sum() == 20
    assert (tokens["auto"] != 0).sum() == sum(len(t) + 1 for t in texts["train"])


def test_an_offline_seqio_cache_is_read(tmp_path, corpus, config, converter):
    """The layout that `seqio_cache_tasks` writes: tokenised documents before chunking."""
    tasks.register_text_files(glob=f"{corpus}/*.txt", name="offline_lm")
    folder = tmp_path / "offline_lm"
    folder.mkdir()
    document = seqio.ByteVocabulary().encode("only in the cache")
    with tf.io.TFRecordWriter(str(folder / "train.tfrecord-00000-of-00001")) as writer:
        value = tf.train.Feature(int64_list=tf.train.Int64List(value=document))
        example = tf.train.Example(features=tf.train.Features(feature={"targets": value}))
        writer.write(example.SerializeToString())
    features = {"targets": {"shape": [None], "dtype": "int32"}}
    (folder / "info.train.json").write_text(
        json.dumps({"num_shards": 1, "features": features, "seqio_version": "0.0.20"})
    )
    (folder / "stats.train.json").write_text(json.dumps({"examples": 1}))
    (folder / "COMPLETED").write_text("")
    before = seqio.get_global_cache_dirs()
    seqio.set_global_cache_dirs([str(tmp_path)])
    try:
        cfg = config(mixture_or_task_name="offline_lm", use_cached=True, batch_size=1)
        tokens = make_feed(cfg, converter).batch(0, None)["decoder_target_tokens"][0]
    finally:
        seqio.set_global_cache_dirs(before)
    assert seqio.ByteVocabulary().decode(tokens.tolist()) == "only in the cache"
    assert tokens[len(document)] == EOS


# --- registration ---------------------------------------------------------------------------------


def test_registering_again_replaces_unless_a_mixture_holds_the_task(corpus):
    register = functools.partial(tasks.register_text_files, name="again_lm")
    register(glob=f"{corpus}/*.txt")
    first = seqio.TaskRegistry.get("again_lm")
    register(glob=f"{corpus}/*.txt")
    assert seqio.TaskRegistry.get("again_lm") is first
    register(glob=f"{corpus}/doc1*.txt")
    second = seqio.TaskRegistry.get("again_lm")
    assert len(second.source.files("train")) < len(first.source.files("train"))
    seqio.MixtureRegistry.add("again_mixture", [("again_lm", 1.0)])
    try:
        with pytest.raises(ConfigError, match="part of mixture 'again_mixture'"):
            register(glob=f"{corpus}/doc2*.txt")
    finally:
        seqio.MixtureRegistry.remove("again_mixture")


def test_a_name_of_another_module_is_refused():
    seqio.TaskRegistry.add("foreign_lm", source=None, output_features={}, preprocessors=[])
    with pytest.raises(ConfigError, match="another module"):
        tasks.register_text_files(glob="x", name="foreign_lm")


def test_the_environment_names_the_files(corpus, monkeypatch):
    monkeypatch.setenv("PEREX_TEXT_FILES", f"{corpus}/*.txt")
    task = get_mixture_or_task("text_files_lm")
    assert len(task.source.files("train")) + len(task.source.files("validation")) == 40


# --- metrics --------------------------------------------------------------------------------------


def test_language_model_metrics_through_seqios_evaluator(tiny_lm):
    evaluator = seqio.Evaluator(
        tiny_lm,
        seqio.LMFeatureConverter(pack=False),
        eval_split="validation",
        sequence_length={"targets": 64},
    )

    def score_fn(ds, *unused):  # a uniform model over 256 bytes: log2(256) = 8 bits a token
        rows = list(ds.as_numpy_iterator())
        return [(i, -np.log(256) * ex["decoder_loss_weights"].sum()) for i, ex in rows]

    computed = evaluator.evaluate(compute_metrics=True, predict_fn=None, score_fn=score_fn, step=0)[0].result()[tiny_lm]
    assert computed["log_likelihood_per_token"] == pytest.approx(-np.log(256))
    # EOS costs bits but is no byte.
    assert 8.0 < computed["bits_per_byte"] < 9.0


def test_span_corruption_metrics():
    metric = metrics.exact_match_and_token_accuracy(seqio.ByteVocabulary())
    targets = [{"text": t} for t in ("abc", "xy")]
    result = metric(targets, ["abc", "xz"])
    assert result == {"exact_match": 50.0, "token_accuracy": 80.0}
