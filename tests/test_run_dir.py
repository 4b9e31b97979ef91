"""A run's folder belongs to one run at a time, and what is saved in it is finite."""

import os

import numpy as np
import pytest

from perex_t5x import checkpoints, lease, loop, run_dir
from perex_t5x.cli import status
from perex_t5x.errors import ConfigError, InUseError, Reason, TrainingError
from tests import tiny

SAVE_AT = "utils.SaveCheckpointConfig.period = {}"


def test_one_run_at_a_time_in_a_folder(tmp_path):
    other = run_dir.WriterLock(str(tmp_path))
    other.acquire()
    with pytest.raises(InUseError, match=rf"another run writes there \(process {os.getpid()} on .*\)") as refused:
        tiny.train(tmp_path, "TRAIN_STEPS = 2")
    assert refused.value.reason.exit_code == 4
    assert os.listdir(tmp_path) == [run_dir.LOCK]  # not a file is touched
    tiny.train(tmp_path, "TRAIN_STEPS = 2", "train_script.train.dry_run = True")  # which writes nothing
    other.release()
    tiny.train(tmp_path, "TRAIN_STEPS = 2")
    assert run_dir.LOCK not in os.listdir(tmp_path)
    with pytest.raises(ConfigError, match="BATCH_SIZE"):
        tiny.train(tmp_path, "TRAIN_STEPS = 3", "BATCH_SIZE = 32")
    assert run_dir.LOCK not in os.listdir(tmp_path)


def test_a_run_whose_folder_was_taken_over_stops_without_saving(tmp_path, monkeypatch):
    """As one that was suspended for minutes, and continues."""
    at_step = status.at_step

    def taken(step):
        at_step(step)
        if step == 3:
            monkeypatch.setattr(lease.Lease, "is_lost", True)

    monkeypatch.setattr(status, "at_step", taken)
    with pytest.raises(InUseError, match="has taken over from this one"):
        tiny.train(tmp_path, "TRAIN_STEPS = 9", SAVE_AT.format(2))
    assert [n for n in os.listdir(tmp_path) if n.startswith("checkpoint")] == ["checkpoint_2"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_folder_vanishes_stops_and_does_not_say_done(tmp_path, monkeypatch, replaced):
    at_step, folder = status.at_step, tmp_path / "run"

    def vanished(step):
        at_step(step)
        if step == 3:
            folder.rename(tmp_path / "elsewhere")
            if replaced:
                folder.mkdir()

    monkeypatch.setattr(status, "at_step", vanished)
    with pytest.raises(TrainingError, match="was removed or replaced while the run wrote there"):
        tiny.train(folder, "TRAIN_STEPS = 9", SAVE_AT.format(5))
    assert not list(folder.glob("checkpoint_*"))


def test_an_optimizer_state_that_is_not_finite_is_never_saved(tmp_path):
    (tmp_path / "own.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom tests import tiny\nOPTIMIZER = @tiny.overflowing\n"
    )
    files = ("models/tiny.gin", "runs/pretrain.gin", str(tmp_path / "own.gin"))
    message = "values of the optimizer's state after step 2 are not finite.*checkpoint_1 is"
    with pytest.raises(TrainingError, match=message):
        tiny.train(tmp_path, "TRAIN_STEPS = 3", SAVE_AT.format(1), files=files)
    assert checkpoints.newest(str(tmp_path)).endswith("checkpoint_1")


def test_a_single_number_of_an_optimizer_may_be_infinite():
    """As the best loss so far of `optax.contrib.reduce_on_plateau`; but it is never NaN."""
    finite = {"w": np.ones((2, 3)), "count": np.int32(1)}
    for best, expected in ((1.0, True), (np.inf, True), (np.nan, False)):
        assert [bool(x) for x in loop._finite(finite, {**finite, "best": np.float32(best)})] == [True, expected]
    assert [bool(x) for x in loop._finite({"w": np.array([1, np.inf])}, {})] == [False, True]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), Reason.NO_SPACE),
        (OSError(30, "Read-only file system"), Reason.ERROR),
        (RuntimeError("503 while writing gs://b/out/x"), Reason.ERROR),
        (RuntimeError("403 while writing gs://b/out/x"), Reason.CONFIGURATION),
    ],
)
def test_a_failed_write_of_results_names_its_binding(error, reason):
    with pytest.raises(TrainingError, match="EVAL_OUTPUT_DIR = 'gs://b/out': writing failed: ") as e:
        with run_dir.explained_writes("gs://b/out", "EVAL_OUTPUT_DIR"):
            raise error
    assert getattr(e.value, "reason", Reason.ERROR) is reason


def test_other_errors_are_left_alone():
    with pytest.raises(FileNotFoundError, match="data.txt"), run_dir.explained_writes("out", "EVAL_OUTPUT_DIR"):
        raise FileNotFoundError(2, "No such file", "data.txt")
