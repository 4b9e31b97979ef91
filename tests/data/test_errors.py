"""Every mistake a user can make with the data, and the error for it."""

import dataclasses
import types

import gin
import numpy as np
import pytest
import seqio
import tensorflow as tf

from perex_t5x.data import lookup, make_feed, rows, tasks
from perex_t5x.errors import ConfigError


def message(cfg, converter, **kwargs):
    with pytest.raises(ConfigError) as e:
        make_feed(cfg, converter, **kwargs)
    return str(e.value)


def test_unknown_task_lists_the_known_ones_nearest_first(config, converter):
    text = message(config(mixture_or_task_name="python_stdlib_ml"), converter)
    assert "MIXTURE_OR_TASK_NAME = 'python_stdlib_ml'" in text
    assert "Did you mean 'python_stdlib_lm'?" in text
    known = text.split("nearest first: ")[1].split(". ")[0].split(", ")
    assert known[0] == "python_stdlib_lm"
    assert {"c4_en_lm", "text_files_lm", "python_stdlib_span_corruption"} <= set(known)


def test_use_cached_without_a_cache(config, converter, tmp_path):
    before = seqio.get_global_cache_dirs()
    try:
        seqio.set_global_cache_dirs([str(tmp_path)])
        text = message(config(use_cached=True), converter)
    finally:
        seqio.set_global_cache_dirs(before)
    assert str(tmp_path) in text
    assert "USE_CACHED_TASKS = False" in text and "seqio_cache_tasks --tasks=tiny_lm" in text
    assert "no directories" in message(config(use_cached=True), converter)


def test_feature_length_missing(config, converter):
    text = message(config(task_feature_lengths={"target": 32}), converter)
    assert "TASK_FEATURE_LENGTHS = {'target': 32}" in text
    assert "no length for 'targets'" in text and "Did you mean 'targets'?" in text
    assert "no length for 'targets'" in message(config(task_feature_lengths=None), converter)
    with pytest.raises(ConfigError, match="task_feature_lengths = {'targets': 0}: .*whole number, at least 1"):
        config(task_feature_lengths={"targets": 0})


def test_task_without_the_models_features(config):
    cfg = config(task_feature_lengths={"inputs": 32, "targets": 32})
    text = message(cfg, seqio.EncDecFeatureConverter)
    assert "['inputs'] missing" in text and "python_stdlib_span_corruption" in text


def test_unknown_split(config, converter):
    text = message(config(split="valid"), converter)
    assert "DatasetConfig.split = 'valid'" in text and "train, validation" in text
    assert "train, validation" in message(config(split="train[:5]"), converter), "only TFDS has slices"


def test_glob_without_files(config, converter, tmp_path):
    tasks.register_text_files(glob=f"{tmp_path}/*.text", name="no_files_lm")
    text = message(config(mixture_or_task_name="no_files_lm"), converter)
    assert "No file matches" in text and "*.text" in text


def test_text_files_without_a_glob(config, converter, monkeypatch):
    monkeypatch.delenv("PEREX_TEXT_FILES", raising=False)
    text = message(config(mixture_or_task_name="text_files_lm"), converter)
    assert "tasks.register_text_files.glob" in text and "PEREX_TEXT_FILES" in text


def test_one_file_has_no_validation_split(config, converter, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    tasks.register_text_files(glob=f"{tmp_path}/*.txt", name="one_file_lm")
    text = message(config(mixture_or_task_name="one_file_lm", split="validation"), converter)
    assert "'validation'" in text and "validation_glob" in text


@pytest.fixture(scope="module")
def nothing_task():
    """A task whose preprocessors filter everything out."""
    seqio.TaskRegistry.add(
        "nothing_lm",
        source=seqio.FunctionDataSource(nothing, splits=["train"]),
        output_features={"targets": seqio.Feature(seqio.ByteVocabulary())},
        preprocessors=[seqio.preprocessors.tokenize],
    )
    yield "nothing_lm"
    seqio.TaskRegistry.remove("nothing_lm")


def nothing(split, shuffle_files, seed=None):
    ds = tf.data.Dataset.from_tensor_slices({"targets": ["a", "b"]})
    return ds.filter(lambda ex: False)


def test_no_examples(config, converter, nothing_task):
    cfg = config(mixture_or_task_name=nothing_task, pack=False)
    text = message(dataclasses.replace(cfg, feed="cached"), converter)
    assert "no examples at all" in text and "'nothing_lm'" in text
    # A source of unknown size is streamed; one epoch, since an endless one of nothing never ends.
    stream = make_feed(cfg, converter, repeat=False)
    assert stream.position(0)["feed"] == "streaming"
    with pytest.raises(ConfigError, match="no examples at all"):
        stream.batch(0, None)


def test_bad_feed_name(config):
    with pytest.raises(ConfigError, match=r"Did you mean 'streaming'\?"):
        config(feed="streamin")


def test_module_that_cannot_be_imported(config, converter):
    text = message(config(module="no_such_module.tasks"), converter)
    assert "MIXTURE_OR_TASK_MODULE" in text and "no_such_module" in text


def test_vocabulary_file_missing():
    with pytest.raises(ConfigError, match="no such file"):
        tasks.register_text_files(glob="x", name="x_lm", vocabulary="/nowhere/sp.model")


def test_remote_cache_dir(config, converter):
    text = message(config(cache_dir="s3://bucket/rows"), converter)
    assert "DatasetConfig.cache_dir" in text and "mounted" in text


@pytest.mark.parametrize("name, reason", [("c4/en:3.1.0", ""), ("c4/en:0.0.9", "only: 3.1.0")])
def test_c4_that_is_not_prepared(config, converter, tmp_path, monkeypatch, name, reason):
    monkeypatch.setattr(seqio.utils, "_TFDS_DATA_DIR_OVERRIDE", str(tmp_path))
    gin.bind_parameter("perex_t5x.data.tasks.register_all.c4_name", name)
    text = message(config(mixture_or_task_name="c4_en_lm"), converter)
    assert name in text and "not prepared" in text and "--tfds_data_dir" in text
    assert str(tmp_path) in text and reason in text


def test_values_that_the_copy_cannot_hold():
    dtype = np.dtype([("decoder_target_tokens", np.uint8, (2,))])
    with pytest.raises(ConfigError, match="values from 3 to 300, outside its vocabulary"):
        rows.to_records({"decoder_target_tokens": np.array([[3, 300]])}, dtype, "wrong_lm")


def test_examples_that_may_not_be_trimmed(config, converter):
    seqio.TaskRegistry.add(
        "long_lm",
        source=seqio.FunctionDataSource(long_text, splits=["train"]),
        output_features={"targets": seqio.Feature(seqio.ByteVocabulary())},
        preprocessors=[seqio.preprocessors.tokenize],
    )
    cfg = config(mixture_or_task_name="long_lm", feed="cached", batch_size=1)
    assert make_feed(cfg, converter).num_examples == 2
    text = message(dataclasses.replace(cfg, trim_output_features=False), converter)
    assert "'long_lm'" in text and "trim_output_features = True" in text


def long_text(split, shuffle_files, seed=None):
    return tf.data.Dataset.from_tensor_slices({"targets": ["a" * 100, "b"]})


def test_a_model_of_ones_own_may_have_a_vocabulary_and_no_config():
    model = types.SimpleNamespace(output_vocabulary=seqio.ByteVocabulary(extra_ids=100))
    lookup.check_vocabulary("python_stdlib_lm", model)
    model.output_vocabulary = seqio.SentencePieceVocabulary("gs://elsewhere/a.model")
    with pytest.raises(ConfigError, match="the model's VOCABULARY is SentencePieceVocabulary"):
        lookup.check_vocabulary("python_stdlib_lm", model)
