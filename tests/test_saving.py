"""Which checkpoints are made and kept, and what becomes of a run whose saves fail."""

import json
import logging
import os
import threading
import time

import pytest

from perex_t5x import checkpoint_files, checksums, saving
from perex_t5x.cli import status
from perex_t5x.errors import ConfigError, NoSpaceError, TrainingError
from perex_t5x.utils import SaveCheckpointConfig
from tests import tiny
from tests.distributed import support
from tests.test_checkpoint_files import assert_is_state, state

RUN = {"data": {"step": 0}}
FULL = OSError(28, "No space left on device")


def steps_in(folder):
    return [checkpoint_files.step_of(path) for path in checkpoint_files.whole(str(folder))]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; `clock.now += 1` moves it. Waiting moves it, too."""

    class Clock:
        now = 1000.0
        time_ns = staticmethod(time.time_ns)

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(saving, "time", clock)
    return clock


@pytest.fixture
def commits(monkeypatch):
    """Makes the commits of the steps in it fail, in the background."""
    failing, write = set(), checksums.write

    def fail(path):
        if any(f"checkpoint_{step}." in path.name for step in failing):
            raise FULL
        write(path)

    monkeypatch.setattr(checksums, "write", fail)
    monkeypatch.setattr(saving, "_LAST_WAITS", (0.0, 0.0))
    return failing


# --- when and what ----------------------------------------------------------------------------------------------------


def test_saved_by_minutes_besides_steps(tmp_path, clock):
    checkpointer = saving.Checkpointer(str(tmp_path), SaveCheckpointConfig(period=10, period_minutes=2))
    assert [step for step in range(1, 21) if checkpointer.is_due(step, last=False)] == [10, 20]
    clock.now += 119
    assert not checkpointer.is_due(21, last=False)
    clock.now += 1
    assert not checkpointer.is_due(21, last=False)  # a step is decided once
    assert checkpointer.is_due(22, last=False)
    checkpointer.save(state(22), RUN)
    assert not checkpointer.is_due(23, last=False)  # counted from the last save
    clock.now += 120
    assert checkpointer.is_due(24, last=False)
    checkpointer.close()


def test_several_processes_ask_process_0_at_common_steps(tmp_path, clock, monkeypatch):
    checkpointer = saving.Checkpointer(str(tmp_path), SaveCheckpointConfig(period_minutes=2))
    asked = []
    monkeypatch.setattr(saving.jax, "process_count", lambda: 2)
    monkeypatch.setattr(saving.distributed, "from_process_0", lambda name, function: asked.append(name) or True)
    # This process's own clock says that nothing is due.
    assert [step for step in range(1, 31) if checkpointer.is_due(step, last=False)] == [10, 20, 30]
    assert asked == ["time to save"] * 3


def test_newest_every_mth_and_best_are_kept(tmp_path):
    config = SaveCheckpointConfig(period=1, keep=1, keep_every=4, keep_best=2)
    losses = {1: 5.0, 2: 1.0, 3: float("nan"), 4: 4.0, 5: 2.0, 6: 3.0}
    checkpointer = saving.Checkpointer(str(tmp_path), config, best_metric="training_eval/b/loss")
    for step, loss in losses.items():
        checkpointer.save(state(step), RUN)
        checkpointer.wait()
        assert steps_in(tmp_path)[-1] == step
        # The evaluation of a step comes after its save.
        checkpointer.evaluated(step, {"training_eval/a": {"loss": -step}, "training_eval/b": {"loss": loss}})
    checkpointer.close()
    assert steps_in(tmp_path) == [2, 4, 5, 6]
    # A run that resumes knows them from its metrics.
    evaluations = [("training_eval/b", step, {"loss": loss}) for step, loss in losses.items()]
    checkpointer = saving.Checkpointer(
        str(tmp_path), config, best_metric="training_eval/b/loss", evaluations=evaluations
    )
    checkpointer.save(state(7), RUN)
    checkpointer.close()
    assert steps_in(tmp_path) == [2, 4, 5, 7]
    for step in (2, 7):
        assert_is_state(tmp_path / f"checkpoint_{step}", step)


def test_the_largest_may_be_the_best():
    config = SaveCheckpointConfig(keep=1, keep_best=1, keep_best_mode="max")
    assert saving.steps_to_keep([1, 2, 3], config, {1: 0.5, 2: 0.1}) == {1, 3}
    assert saving.steps_to_keep([1, 2, 3], config, {1: 0.5, 2: 0.5}) == {2, 3}  # of equals the newer


@pytest.mark.parametrize(
    "options,message",
    [
        ({"keep_every": 5}, "keep_every = 5 .*Set SaveCheckpointConfig.keep"),
        ({"keep_best": 1}, "keep_best = 1 .*Set SaveCheckpointConfig.keep"),
        ({"keep_best_metric": "loss"}, "set keep_best to"),
        ({"period_minutes": 0.0}, "period_minutes"),
    ],
)
def test_bad_policies_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SaveCheckpointConfig(**options)


def test_an_unknown_metric_is_named_with_those_there_are(tmp_path):
    config = SaveCheckpointConfig(keep=1, keep_best=1, keep_best_metric="acuracy")
    checkpointer = saving.Checkpointer(str(tmp_path), config, best_metric="training_eval/a/acuracy")
    with pytest.raises(ConfigError, match="keep_best_metric.*Did you mean 'training_eval/a/accuracy'"):
        checkpointer.evaluated(1, {"training_eval/a": {"accuracy": 1.0}})


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_save_is_tried_again_later(tmp_path, clock, commits, caplog):
    commits |= {2, 3}
    status.begin()
    checkpointer = saving.Checkpointer(str(tmp_path), SaveCheckpointConfig(period=100, keep=1))
    checkpointer.save(state(1), RUN)
    with caplog.at_level(logging.WARNING):
        checkpointer.save(state(2), RUN)
        assert not checkpointer.settle()
    assert "checkpoint_2 could not be written" in caplog.text and "tried again in 10 s" in caplog.text
    assert checkpointer.failures == 1 and checkpointer.latest_step() == 1
    assert_is_state(tmp_path / "checkpoint_1", 1)  # keep=1 does not count one that was never written
    assert not checkpointer.is_due(3, last=False)
    clock.now += 10
    assert not checkpointer.is_due(3, last=False)
    assert checkpointer.is_due(4, last=False)
    checkpointer.save(state(3), RUN)
    assert not checkpointer.settle() and checkpointer.failures == 2
    clock.now += 19
    assert not checkpointer.is_due(5, last=False)
    clock.now += 1
    assert checkpointer.is_due(6, last=False)
    checkpointer.save(state(6), RUN)
    checkpointer.wait()
    assert checkpointer.failures == 0 and not checkpointer.is_due(7, last=False)
    checkpointer.close()
    assert os.listdir(tmp_path) == ["checkpoint_6"]  # nothing half-written is left
    assert_is_state(tmp_path / "checkpoint_6", 6)
    assert json.loads(status.write(status.Reason.DONE).to_json())["failed_saves"] == 2


def test_too_many_failures_end_the_run(tmp_path, commits):
    commits |= {1, 2, 3}
    checkpointer = saving.Checkpointer(str(tmp_path), SaveCheckpointConfig(retries=1))
    checkpointer.save(state(1), RUN)
    assert not checkpointer.settle()
    checkpointer.save(state(2), RUN)
    with pytest.raises(NoSpaceError, match="No space left on device.*Earlier checkpoints are complete"):
        checkpointer.settle()


def test_a_failure_is_seen_without_waiting_and_removes_nothing(tmp_path, commits):
    """Orbax's own check would take the error from the thread that removes old checkpoints once there is none."""
    commits |= {2}
    checkpointer = saving.Checkpointer(str(tmp_path), SaveCheckpointConfig(keep=1))
    checkpointer.save(state(1), RUN)
    checkpointer.wait()
    checkpointer.save(state(2), RUN)
    while not checkpointer.failures:
        checkpointer.poll()
    assert steps_in(tmp_path) == [1]


def test_saving_stops_the_loop_for_the_copy_only(tmp_path, monkeypatch):
    may_write, write = threading.Event(), checksums.write
    monkeypatch.setattr(checksums, "write", lambda path: may_write.wait() and write(path))
    checkpointer = saving.Checkpointer(str(tmp_path), SaveCheckpointConfig())
    checkpointer.save(state(1), RUN)  # returns before the commit
    checkpointer.poll()
    assert not steps_in(tmp_path)
    may_write.set()
    checkpointer.close()
    assert_is_state(tmp_path / "checkpoint_1", 1)


# --- in a run ---------------------------------------------------------------------------------------------------------


def test_a_run_trains_through_failed_saves_and_keeps_the_best(tmp_path, commits):
    """The save of step 2 fails, and so does the first one of the last step: training continues, and nothing is left out."""
    tries = []
    fails_twice = checksums.write

    def fail(path):
        if "checkpoint_6." in path.name and not tries:
            tries.append(6)
            raise FULL
        fails_twice(path)

    commits |= {2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "write", fail)
        tiny.train(
            tmp_path / "run", "TRAIN_STEPS = 6", "EVAL_PERIOD = 2", "utils.SaveCheckpointConfig.period = 2",
            "utils.SaveCheckpointConfig.keep = 1", "utils.SaveCheckpointConfig.keep_best = 1",
            "utils.SaveCheckpointConfig.keep_best_mode = 'max'",
        )  # fmt: skip
    assert tries == [6]
    assert steps_in(tmp_path / "run") == [4, 6]  # 4 has the largest loss but for 2, which was not written
    lines = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl", encoding="utf-8")]
    failed = [(row["step"], row["failed_saves"]) for row in lines if "failed_saves" in row]
    assert [count for _, count in failed][:2] == [1.0, 0.0] and failed[0][0] in (2, 3, 4)
    assert not [name for name in os.listdir(tmp_path / "run") if "tmp" in name]


def test_the_last_save_is_not_left_out_silently(tmp_path, commits):
    commits |= {1}
    with pytest.raises(TrainingError, match="No space left on device.*Earlier checkpoints are complete"):
        tiny.train(tmp_path, "TRAIN_STEPS = 1")


BEST = (
    "EVAL_PERIOD = 2",
    "utils.SaveCheckpointConfig.keep = 1",
    "utils.SaveCheckpointConfig.keep_best = 1",
    "utils.SaveCheckpointConfig.keep_best_mode = 'max'",  # the loss falls: the first one
)


def test_a_resumed_run_knows_the_best(tmp_path):
    for steps in (4, 8):
        tiny.train(tmp_path, f"TRAIN_STEPS = {steps}", "utils.SaveCheckpointConfig.period = 2", *BEST)
    assert steps_in(tmp_path) == [2, 8]


def test_the_best_needs_an_evaluation(tmp_path):
    with pytest.raises(ConfigError, match="keep_best = 1 needs an evaluation"):
        tiny.train(tmp_path, "TRAIN_STEPS = 2", *BEST, "train_script.train.train_eval_dataset_cfg = None")


@pytest.mark.slow
def test_two_processes_save_by_minutes_and_keep_the_best(tmp_path):
    bindings = ["TRAIN_STEPS = 25", "utils.SaveCheckpointConfig.period_minutes = 1e-6", *BEST]
    code, output = support.run(*support.train_arguments(tmp_path, *bindings), devices=2)
    assert code == 0, output
    assert steps_in(tmp_path) == [10, 25]  # they agree at every tenth step
