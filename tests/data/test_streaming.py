import itertools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from perex_t5x.data import lookup, make_feed, streaming, tasks
from perex_t5x.data.device_batches import prefetch
from perex_t5x.errors import ConfigError


def equal(a, b):
    return set(a) == set(b) and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.fixture
def stream(config, converter):
    def make(**changes):
        return make_feed(config(feed="streaming", **changes), converter)

    return make


def test_resumed_equals_never_stopped(stream, shardings, tmp_path, config, converter):
    """Saved at step 4 while prefetching is ahead of it, across an epoch's end."""
    feed = stream(pack=False, batch_size=64)
    on_mesh = shardings(feed, 4, 2)
    with prefetch(feed, 0, on_mesh) as batches:
        straight = [b for _, b in itertools.islice(batches, 4)]
        position = feed.position(4)
        feed.save_state(str(tmp_path))
        straight += [b for _, b in itertools.islice(batches, 8)]
    cached = make_feed(config(pack=False, batch_size=64), converter)
    assert cached.steps_per_epoch < 12, "the test goes across the end of an epoch"
    assert [p.name for p in tmp_path.iterdir()] == ["process_0-of-1"]

    resumed = make_resumed(stream, position, tmp_path)
    for step in range(4, 7):
        assert equal(resumed.batch(step, None), straight[step]), step
    # Saved again before all the batches that came with the first state were used up.
    again = tmp_path / "again"
    resumed.position(7)
    resumed.save_state(str(again))
    twice = make_resumed(stream, position, again)
    for step in range(7, 12):
        assert equal(twice.batch(step, None), straight[step]), step


def make_resumed(stream, position, directory):
    feed = stream(pack=False, batch_size=64)
    feed.check_position(json.loads(json.dumps(position)))
    feed.restore(str(directory))
    return feed


def test_steps_come_in_sequence(stream):
    feed = stream()
    feed.batch(0, None)
    with pytest.raises(ValueError, match="step 5 was asked for, 1 is next"):
        feed.batch(5, None)


def test_another_number_of_hosts_is_refused(stream, tmp_path):
    (tmp_path / "process_0-of-4").mkdir()
    with pytest.raises(ConfigError, match="saved by 4 processes and this run has 1"):
        stream().restore(str(tmp_path))
    with pytest.raises(ConfigError, match="process_0-of-1 is missing"):
        stream().restore(str(tmp_path / "nowhere"))


def test_one_epoch_can_be_gone_through_again_and_is_the_cached_one(config, converter):
    cfg = dict(shuffle=False, batch_size=16, pack=False)
    feed = make_feed(config(feed="streaming", **cfg), converter, repeat=False, pad_remainder=True)
    cached = make_feed(config(**cfg), converter, repeat=False, pad_remainder=True)
    first, second, other = (list(f.epoch()) for f in (feed, feed, cached))
    assert len(first) == len(second) == len(other) == cached.num_steps
    for a, b, c in zip(first, second, other, strict=True):
        assert equal(a, b) and equal(a, c)
    assert len(list(cached.epoch(max_steps=2))) == 2


class FakeDevice:
    def __init__(self, process_index):
        self.process_index = process_index


class FakeSharding:
    """Rows of a mesh of devices on several processes."""

    def __init__(self, processes_and_rows):
        self._rows = processes_and_rows

    def devices_indices_map(self, shape):
        return {FakeDevice(p): (slice(a, b), slice(None)) for p, a, b in self._rows}


def test_processes_with_the_same_rows_read_the_same_shard():
    # 4 processes of 2 devices; model parallelism of 4 joins processes 0 and 1, 2 and 3.
    sharding = FakeSharding([(p, 8 * (p // 2), 8 * (p // 2) + 8) for p in range(4) for _ in "ab"])
    shards = streaming.data_shards(sharding, 16)
    assert [(shards[p].parts, shards[p].index) for p in range(4)] == [(2, 0), (2, 0), (2, 1), (2, 1)]


def test_a_process_fills_the_rows_of_its_devices_whatever_their_order():
    interleaved = FakeSharding([(1, 0, 4), (0, 4, 8), (0, 8, 12), (1, 12, 16)])
    assert streaming.data_shards(interleaved, 16) == {
        0: streaming.DataShard(2, 1, ((4, 12),)),
        1: streaming.DataShard(2, 0, ((0, 4), (12, 16))),
    }


@pytest.mark.parametrize("rows", [
    [(0, 0, 4), (0, 4, 8), (1, 4, 8), (1, 8, 12), (2, 8, 12), (2, 12, 16)],  # some rows in common
    [(0, 0, 4), (0, 4, 8), (0, 8, 12), (1, 12, 16)],  # not equally many
])  # fmt: skip
def test_rows_that_cannot_be_divided_are_refused(rows):
    with pytest.raises(ConfigError, match=r"data shard 0 of \d for rows 0-.*feed = 'cached'"):
        streaming.data_shards(FakeSharding(rows), 16)


def test_the_state_of_another_mesh_is_refused(stream, tmp_path):
    feed = stream()
    feed.batch(0, None)
    feed.save_state(str(tmp_path), 1)
    path = tmp_path / "process_0-of-1" / "state.json"
    state = json.loads(path.read_text())
    assert state["rows"] == [[0, 8]]
    for change, reason in ({"rows": [[0, 2], [6, 8]]}, "rows 0-1, 6-7"), ({"shards": [2, 1]}, "data shard 1 of 2"):
        path.write_text(json.dumps(state | change))
        resumed = stream()
        resumed.restore(str(tmp_path))
        with pytest.raises(ConfigError, match=f"{reason}.* it would read data shard 0 of 1 for rows 0-7"):
            resumed.batch(1, None)
    del state["rows"]  # a state of an earlier version
    path.write_text(json.dumps(state))
    resumed = stream()
    resumed.restore(str(tmp_path))
    assert equal(resumed.batch(1, None), feed.batch(1, None))


def test_feeds_are_imported_without_tensorflow():
    code = (
        "import sys, perex_t5x.data, perex_t5x.data.feed, perex_t5x.data.device_batches, "
        "perex_t5x.data.cached, perex_t5x.data.streaming; "
        "print([m for m in ('tensorflow', 'seqio', 'grain') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_hosts_are_named_in_the_position(stream):
    assert stream().position(0)["process_count"] == jax.process_count()


def test_other_files_are_refused(config, converter, tmp_path):
    """The state of an iterator is a place in files: in others it would be another place, without a word."""
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"some words of document {i}")
    tasks.register_text_files(glob=f"{tmp_path}/*.txt", name="changing_lm")

    def feed():
        return make_feed(config(mixture_or_task_name="changing_lm", feed="streaming"), converter)

    position = json.loads(json.dumps(feed().position(0)))
    _, path = tasks.seqio.TaskRegistry.get("changing_lm").source.files("train")[2]
    content = open(path, encoding="utf-8").read()
    os.utime(path, (1, 1))
    feed().check_position(position)  # the same files at another time
    for other in (content.replace("some", "same"), content + "!", ""):
        open(path, "w", encoding="utf-8").write(other)
        with pytest.raises(ConfigError, match="the files that are streamed"):
            feed().check_position(position)
        feed().check_position({k: v for k, v in position.items() if k != "files"})  # of an earlier version
    open(path, "w", encoding="utf-8").write(content)
    feed().check_position(position)


def test_the_files_of_a_function_are_not_known():
    import seqio

    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, splits=("train",))
    features = {"targets": seqio.Feature(seqio.ByteVocabulary())}
    task = seqio.Task("of_a_function", source, preprocessors=[], output_features=features)
    assert lookup.files_fingerprint(task, "train", False) is None
