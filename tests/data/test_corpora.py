"""Text files, copies of rows and states of streams in any condition: batches, or an error of ours, and in the end."""

import itertools
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import seqio
from hypothesis import example, given
from hypothesis import strategies as st

from perex_t5x.data import feed as feed_lib
from perex_t5x.data import tasks
from perex_t5x.utils import DatasetConfig
from tests import fuzzing

_numbers = itertools.count()
CONTENTS = st.one_of(
    fuzzing.ODD_TEXT, st.just(b""), st.just(b"some text " * 20), st.text().map(lambda t: t.encode("utf-8", "replace"))
)
NAMES = ["a.txt", "b.txt", "c.txt", "d e.txt", "é.txt", "[x].txt", "*.txt", "\udcff.txt", ".hidden.txt"]
ENTRIES = st.one_of(CONTENTS, st.sampled_from(["folder", "dangling", "fifo"]))


def config(glob: str, kind: str, cache_dir: str | None = None) -> DatasetConfig:
    name = f"corpus_{next(_numbers)}_lm"
    tasks.register_text_files(glob=glob, name=name)
    return DatasetConfig(
        mixture_or_task_name=name, task_feature_lengths={"targets": 16}, split="train", batch_size=2, shuffle=True, seed=3,
        pack=True, feed=kind, cache_dir=cache_dir,
    )  # fmt: skip


def make(cfg: DatasetConfig):
    return feed_lib.make_feed(cfg, seqio.DecoderFeatureConverter)


def check_batch(batch) -> None:
    for name, rows in batch.items():
        assert rows.shape == (2, 16), name
    tokens = batch["decoder_target_tokens"]
    assert tokens.min() >= 0 and tokens.max() < 384  # what a model of the byte vocabulary can look up


def check_files(entries, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, entry in zip(NAMES, entries, strict=False):
            path = Path(folder, name)
            if entry == "folder":
                path.mkdir()
            elif entry == "dangling":
                path.symlink_to("nowhere")
            elif entry == "fifo":
                os.mkfifo(path)
            else:
                path.write_bytes(entry)

        def read():
            feed = make(config(f"{folder}/*.txt", kind))
            for step in range(3):
                check_batch(feed.batch(step))

        fuzzing.refused(read)


def check_copy(damages) -> None:
    """A copy that was damaged is refused, or gives rows that a model can take."""
    with tempfile.TemporaryDirectory() as folder:
        for i in range(4):
            Path(folder, f"{i}.txt").write_text(f"document {i} " * 20)
        cfg = config(f"{folder}/*.txt", "cached", f"{folder}/copy")
        rows = make(cfg).batch(0)
        for damage in damages:
            if any(Path(folder, "copy").iterdir()):
                fuzzing.damage_folder(Path(folder, "copy"), damage)

        def read():
            again = make(cfg).batch(0)
            for name in rows:
                np.testing.assert_array_equal(again[name], rows[name])

        fuzzing.refused(read)


def check_state(damages) -> None:
    """A stream that is restored from a damaged state gives the same batches, or is refused."""
    with tempfile.TemporaryDirectory() as folder:
        for i in range(4):
            Path(folder, f"{i}.txt").write_text(f"document {i} " * 20)
        cfg = config(f"{folder}/*.txt", "streaming")
        feed = make(cfg)
        feed.batch(0), feed.batch(1)
        state = Path(folder, "state")
        feed.save_state(str(state), 1)
        for damage in damages:
            if any(state.iterdir()):
                fuzzing.damage_folder(state, damage)

        def restore():
            again = make(cfg)
            again.restore(str(state))
            check_batch(again.batch(1))
            check_batch(again.batch(2))

        fuzzing.refused(restore)


DAMAGED = st.lists(fuzzing.DAMAGES, min_size=1, max_size=2)


@example([b"text"] * 8, "cached")  # one of the names is not UTF-8
@fuzzing.few(4)
@given(entries=st.lists(ENTRIES, max_size=6), kind=st.sampled_from(["cached", "streaming", "auto"]))
def test_odd_files(entries, kind):
    check_files(entries, kind)


@pytest.mark.slow
@fuzzing.many(300)
@given(entries=st.lists(ENTRIES, max_size=8), kind=st.sampled_from(["cached", "streaming", "auto"]))
def test_many_odd_files(entries, kind):
    check_files(entries, kind)


NOTHING = ("cut", 0.5, b"")


@example([("unreadable", 0.0, NOTHING)])  # NotADirectoryError of a rename
@example([("loop", 0.5, NOTHING)])
@example([("folder", 0.5, NOTHING)])  # copy.json
@example([("fifo", 0.99, NOTHING)])
@fuzzing.few(2)
@given(damages=DAMAGED)
def test_a_damaged_copy(damages):
    check_copy(damages)


@pytest.mark.slow
@fuzzing.many(400)
@given(damages=DAMAGED)
def test_many_damaged_copies(damages):
    check_copy(damages)


@example([("delete", 0.99, NOTHING)])  # state.json: NotFoundError
@example([("content", 0.99, NOTHING)])  # JSONDecodeError
@example([("content", 0.6, ("flip", 0.6, b""))])  # DataLossError
@example([("fifo", 0.6, NOTHING)])  # waited for without end
@fuzzing.few(1)
@given(damages=DAMAGED)
def test_a_damaged_state(damages):
    check_state(damages)


@pytest.mark.slow
@fuzzing.many(400)
@given(damages=DAMAGED)
def test_many_damaged_states(damages):
    check_state(damages)
