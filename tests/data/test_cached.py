import collections
import dataclasses
import itertools
import os

import jax
import numpy as np
import pytest
import seqio

from perex_t5x.data import device_batches, make_feed, stores, tasks
from perex_t5x.data.device_batches import prefetch
from perex_t5x.data.feed import EndOfData, batch_spec
from perex_t5x.errors import ConfigError


def equal(a, b):
    return set(a) == set(b) and all(np.array_equal(a[k], b[k]) for k in a)


def row_counts(batches):
    """How often each distinct row of targets occurs."""
    rows = [r.tobytes() for b in batches for r in b["decoder_target_tokens"] if r.any()]
    return collections.Counter(rows)


@pytest.fixture(scope="module", autouse=True)
def rows(config, converter):
    """Keeps the tiny task's rows alive, which all feeds over them share."""
    return make_feed(config(), converter)


@pytest.fixture
def feed(config, converter):
    return make_feed(config(), converter)


def test_feeds_share_their_rows(feed, rows):
    assert feed._stores[0] is rows._stores[0]


def test_spec_and_batches_agree(config, converter, feed):
    assert feed.element_spec == batch_spec(config(), converter)
    batch = feed.batch(0, None)
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        k: (v.shape, v.dtype) for k, v in feed.element_spec.items()
    }
    assert feed.has_state is False and "in memory" in feed.description


def test_an_epoch_sees_every_row_once_and_equals_seqio(config, converter):
    cfg = config()
    feed = make_feed(cfg, converter, repeat=False, pad_remainder=True)
    ours = row_counts(feed.epoch())
    ds = seqio.get_mixture_or_task("tiny_lm").get_dataset(cfg.task_feature_lengths, split="train", shuffle=False)
    ds = converter(pack=True)(ds, cfg.task_feature_lengths)
    theirs = collections.Counter(ex["decoder_target_tokens"].tobytes() for ex in ds.as_numpy_iterator())
    assert ours == theirs and sum(ours.values()) == feed.num_examples


@pytest.mark.parametrize("data, model", [(1, 1), (8, 1), (4, 2), (2, 4)])
def test_every_mesh_gets_the_same_global_batch(feed, shardings, data, model):
    for step in (0, 17):
        placed = feed.batch(step, shardings(feed, data, model))
        assert all(isinstance(x, jax.Array) for x in placed.values())
        assert equal(placed, feed.batch(step, None))


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_read_their_own_rows_once(feed, shardings, monkeypatch, hosts):
    """As on several hosts: shards of `hosts` row ranges, each read once for all features."""
    monkeypatch.setattr(device_batches, "_holds_all_rows", lambda shardings: False)
    reads = []
    read = feed._read
    monkeypatch.setattr(feed, "_read", lambda a, b: reads.append((a, b)) or read(a, b))
    placed = feed.batch(5, shardings(feed, hosts, 2))
    size = 8 // hosts
    assert sorted(reads) == [(40 + i * size, 40 + (i + 1) * size) for i in range(hosts)]
    assert equal(placed, feed.batch(5, None))


def test_a_batch_is_a_function_of_seed_and_step(config, converter, feed):
    again = make_feed(config(), converter)
    steps = [0, 3, feed.steps_per_epoch + 2]
    assert all(equal(again.batch(s, None), feed.batch(s, None)) for s in reversed(steps))
    other = make_feed(config(seed=4), converter)
    assert not equal(other.batch(0, None), feed.batch(0, None))
    assert other.fingerprint == feed.fingerprint


def test_resumed_equals_never_stopped(config, converter, feed, shardings):
    on_mesh = shardings(feed, 4)
    with prefetch(feed, 0, on_mesh) as batches:
        straight = [b for _, b in itertools.islice(batches, 6)]
    resumed = make_feed(config(), converter, saved_position=feed.position(3))
    with prefetch(resumed, 3, on_mesh) as batches:
        for (step, batch), expected in zip(batches, straight[3:], strict=False):
            assert equal(batch, expected), step


def test_a_drawn_seed_is_adopted_by_the_resumed_run(config, converter):
    first = make_feed(config(seed=None), converter)
    position = first.position(2)
    assert isinstance(position["seed"], int)
    resumed = make_feed(config(seed=None), converter, saved_position=position)
    assert equal(resumed.batch(2, None), first.batch(2, None))


@pytest.mark.parametrize(
    "change, named",
    [
        ({"seed": 4}, "DatasetConfig.seed: saved 3, now 4"),
        ({"batch_size": 4}, "BATCH_SIZE"),
        ({"shuffle": False}, "DatasetConfig.shuffle"),
        ({"task_feature_lengths": {"targets": 16}}, "the examples"),
    ],
)
def test_a_position_in_other_data_is_refused(config, converter, feed, change, named):
    with pytest.raises(ConfigError, match="does not fit") as e:
        make_feed(config(**change), converter, saved_position=feed.position(3))
    assert named in str(e.value)


def test_array_record_equals_memory_and_is_reused(config, converter, feed, tmp_path, monkeypatch):
    cfg = config(cache_dir=str(tmp_path))
    on_disk = make_feed(cfg, converter)
    assert "ArrayRecord" in on_disk.description
    assert on_disk.position(1) == feed.position(1)
    for step in (0, 2, 30):
        assert equal(on_disk.batch(step, None), feed.batch(step, None))

    def fail(*unused):
        raise AssertionError("read again")

    monkeypatch.setattr("perex_t5x.data.rows.read_rows", fail)
    assert equal(make_feed(cfg, converter).batch(1, None), feed.batch(1, None))
    with pytest.raises(AssertionError, match="read again"):
        make_feed(config(cache_dir=str(tmp_path), pack=False), converter)


def test_a_failed_writer_leaves_nothing(tmp_path):
    def chunks():
        yield np.zeros(3, np.int32)
        raise KeyboardInterrupt

    abandoned = tmp_path / f".copy.{stores.socket.gethostname()}.999999999.ab"
    abandoned.mkdir()  # of a writer that was killed outright
    with pytest.raises(KeyboardInterrupt):
        stores.write_copy(str(tmp_path / "copy"), chunks())
    assert os.listdir(tmp_path) == []


def test_the_last_batch_is_padded_with_weightless_rows(config, converter):
    cfg = config(shuffle=False, batch_size=16)
    feed = make_feed(cfg, converter, repeat=False, pad_remainder=True)
    rest = feed.num_examples % 16
    assert rest, "the corpus must not fill its last batch for this test to mean anything"
    assert feed.num_steps == feed.num_examples // 16 + 1
    last = feed.batch(feed.num_steps - 1, None)
    assert all((x[rest:] == 0).all() for x in last.values())
    assert last["decoder_loss_weights"][:rest].any(axis=1).all()
    with pytest.raises(EndOfData):
        feed.batch(feed.num_steps, None)
    dropping = make_feed(cfg, converter, repeat=False)
    assert len(list(dropping.epoch())) == feed.num_steps - 1


def test_a_corpus_smaller_than_a_batch(config, converter):
    large = config(batch_size=10_000)
    assert make_feed(large, converter).batch(0, None)["decoder_target_tokens"].any(axis=1).all()
    with pytest.raises(ConfigError, match="fewer than one batch"):
        make_feed(large, converter, repeat=False)


def test_hosts_with_different_rows_are_refused(config, converter, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gather = "jax.experimental.multihost_utils.process_allgather"
    monkeypatch.setattr(gather, lambda x: np.stack([x, x]))
    make_feed(config(), converter)
    monkeypatch.setattr(gather, lambda x: np.stack([x, x + np.uint8(1)]))
    with pytest.raises(ConfigError, match="hosts hold different examples of 'tiny_lm'"):
        make_feed(config(), converter)


@pytest.fixture(scope="module")
def mixture(corpus, tiny_lm):
    tasks.register_text_files(glob=f"{corpus}/doc0*.txt", name="few_lm")
    seqio.MixtureRegistry.add("tiny_mixture", [(tiny_lm, 3.0), ("few_lm", 1.0)])
    yield "tiny_mixture"
    seqio.MixtureRegistry.remove("tiny_mixture")


def test_a_mixture_keeps_its_rates_and_its_order(config, converter, mixture, shardings):
    feed = make_feed(config(mixture_or_task_name=mixture), converter)
    few = set(
        row_counts(
            make_feed(config(mixture_or_task_name="few_lm"), converter, repeat=False, pad_remainder=True).epoch()
        )
    )
    tiny = set(row_counts(make_feed(config(), converter, repeat=False, pad_remainder=True).epoch()))
    drawn = row_counts(feed.batch(s, None) for s in range(100))
    only_tiny = sum(n for row, n in drawn.items() if row in tiny - few)
    only_few = sum(n for row, n in drawn.items() if row in few - tiny)
    assert set(drawn) == tiny | few
    assert only_few <= 200 + 2 and only_tiny <= 600 + 2
    assert equal(feed.batch(7, shardings(feed, 4)), feed.batch(7, None))
    once = make_feed(config(mixture_or_task_name=mixture), converter, repeat=False, pad_remainder=True)
    assert sum(row_counts(once.epoch()).values()) == feed.num_examples


def test_auto_caches_what_fits_and_streams_the_rest(config, converter):
    assert make_feed(config(feed="auto"), converter).position(0)["feed"] == "cached"
    small = config(feed="auto", memory_limit_bytes=1000)
    assert make_feed(small, converter).position(0)["feed"] == "streaming"
    # A run that began cached stays so when its limit is changed.
    position = make_feed(config(), converter).position(0)
    assert make_feed(small, converter, saved_position=position).position(0)["feed"] == "cached"


def test_the_embedded_corpus(converter, config):
    cfg = config(mixture_or_task_name="python_stdlib_lm", task_feature_lengths={"targets": 128})
    feed = make_feed(dataclasses.replace(cfg, split="validation"), converter, repeat=False, pad_remainder=True)
    weights = np.concatenate([b["decoder_loss_weights"] for b in feed.epoch()])[: feed.num_examples]
    assert weights.mean() > 0.98, "packed rows are nearly full"
    source = seqio.get_mixture_or_task("python_stdlib_lm").source
    documents = len(source.files("validation"))
    # Every byte and one EOS per document; the standard library is valid UTF-8.
    assert weights.sum() == source.size_bytes("validation") + documents
    assert 0.02 < documents / (documents + len(source.files("train"))) < 0.09
