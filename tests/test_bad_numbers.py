"""Updates that are not finite are left out; after too many the run stops, or is rolled back without their batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import checkpoints
from perex_t5x import train as train_script
from perex_t5x.bad_numbers import SkippingFeed
from perex_t5x.data.cached import CachedFeed
from perex_t5x.data.streaming import StreamingFeed
from perex_t5x.errors import DivergedError
from perex_t5x.metric_files import read_rows
from perex_t5x.trainer import Trainer
from tests import tiny
from tests.test_train import assert_same_state

MARK = 300  # a token that no document has
SAVE = "utils.SaveCheckpointConfig.period = 2"
STREAMING = "train/utils.DatasetConfig.feed = 'streaming'"
FILE = """
from __gin__ import dynamic_registration
from perex_t5x import bad_numbers
from perex_t5x import train as train_script
train_script.train:
  bad_numbers = @bad_numbers.BadNumbers()
  train_eval_dataset_cfg = None
  stats_period = 1
"""


@pytest.fixture
def run(tmp_path):
    """Trains with a rule for bad numbers."""
    (tmp_path / "bad_numbers.gin").write_text(FILE)
    files = ("models/tiny.gin", "runs/pretrain.gin", str(tmp_path / "bad_numbers.gin"))
    return lambda name, *bindings: tiny.train(tmp_path / name, SAVE, *bindings, files=files)


@pytest.fixture
def poison(monkeypatch):
    """Has the gradients of these batches be NaN, wherever they are used; their losses stay finite."""
    bad = set()
    gradient = Trainer.gradient

    def poisoned(self, state, batch):
        found = gradient(self, state, batch)
        factor = jnp.where(jnp.any(batch["decoder_target_tokens"] == MARK), jnp.nan, 1.0)
        return dataclasses.replace(found, mean=jax.tree.map(lambda g: g * factor, found.mean))

    def marked(original):
        def batch(self, step, sharding=None):
            rows = original(self, step, sharding)
            if step in bad:
                tokens = rows["decoder_target_tokens"]
                rows["decoder_target_tokens"] = jax.device_put(np.asarray(tokens) * 0 + MARK, tokens.sharding)
            return rows

        return batch

    monkeypatch.setattr(Trainer, "gradient", poisoned)
    for feed in (CachedFeed, StreamingFeed):
        monkeypatch.setattr(feed, "batch", marked(feed.batch))
    return bad


def is_finite(tree):
    return all(np.isfinite(x).all() for x in jax.tree.leaves(tree))


def test_an_update_that_is_not_finite_is_left_out_and_counted(tmp_path, run, poison):
    poison.update([1, 3])
    rules = "bad_numbers.BadNumbers.most_skipped = 1"
    step, state = run("whole", "TRAIN_STEPS = 6", rules)
    assert step == 6 and is_finite(state.params)
    counted = {
        row["step"]: row["non_finite_updates"] for row in read_rows(tmp_path / "whole") if "non_finite_updates" in row
    }
    assert counted == {2: 1.0, 4: 1.0}
    assert all(np.isfinite(row["loss"]) for row in read_rows(tmp_path / "whole") if "loss" in row)
    run("parts", "TRAIN_STEPS = 4", rules)
    _, resumed = run("parts", "TRAIN_STEPS = 6", rules)
    assert_same_state(state, resumed)


def test_a_streak_is_continued_after_a_resume(run, poison):
    poison.update([3, 4])  # checkpoint_4 is in the middle
    rules = "bad_numbers.BadNumbers.most_skipped = 1"
    run("run", "TRAIN_STEPS = 4", rules)
    with pytest.raises(DivergedError, match="2 updates in a row are not finite.*checkpoint_4 is the newest") as e:
        run("run", "TRAIN_STEPS = 6", rules)
    assert (e.value.first_step, e.value.step) == (4, 5)


@pytest.mark.parametrize(
    "feed",
    [
        pytest.param("train/utils.DatasetConfig.feed = 'cached'", id="cached"),
        pytest.param(STREAMING, id="streaming", marks=pytest.mark.slow),
    ],
)
def test_rolled_back_equals_a_run_that_never_had_these_batches(tmp_path, monkeypatch, run, poison, feed):
    poison.update([4, 5])
    rules = ("bad_numbers.BadNumbers.most_skipped = 1", "bad_numbers.BadNumbers.then = 'roll_back'", feed)
    step, _ = run("rolled_back", "TRAIN_STEPS = 7", *rules)  # the last checkpoint is after the batches left out
    assert step == 7 and checkpoints.read_run(str(tmp_path / "rolled_back" / "checkpoint_7"))["data"]["skipped"] == [
        4,
        5,
    ]
    rows = read_rows(tmp_path / "rolled_back")
    assert [row["batches_left_out"] for row in rows if "batches_left_out" in row] == [2.0]
    _, resumed = run("rolled_back", "TRAIN_STEPS = 9", *rules)
    make_feed = train_script.make_feed
    monkeypatch.setattr(train_script, "make_feed", lambda *a, **k: SkippingFeed(make_feed(*a, **k), [4, 5], 0))
    _, expected = run("without", "TRAIN_STEPS = 9", *rules)
    assert_same_state(resumed, expected)
    assert tiny.losses(tmp_path / "rolled_back") == tiny.losses(tmp_path / "without")


def test_an_update_that_was_made_is_undone_by_a_rollback(tmp_path, run, poison):
    poison.add(4)  # the parameters after step 5 are NaN, which the loss of step 6 shows
    step, state = run("run", "TRAIN_STEPS = 8", "bad_numbers.BadNumbers.then = 'roll_back'")
    assert step == 8 and is_finite(state.params)
    assert checkpoints.read_run(str(tmp_path / "run" / "checkpoint_8"))["data"]["skipped"] == [4, 5]


def test_after_too_many_rollbacks_the_run_stops(run, poison):
    poison.update(range(4, 100))
    rules = ("bad_numbers.BadNumbers.then = 'roll_back'", "bad_numbers.BadNumbers.rollbacks = 2")
    with pytest.raises(DivergedError, match="parameters after step .* are not finite|the loss of step"):
        run("run", "TRAIN_STEPS = 12", *rules)


def test_the_shipped_file_trains(tmp_path):
    files = ("models/tiny.gin", "runs/pretrain.gin", "runs/bad_numbers.gin")
    step, _ = tiny.train(tmp_path, "TRAIN_STEPS = 2", "train_script.train.train_eval_dataset_cfg = None", files=files)
    assert step == 2
