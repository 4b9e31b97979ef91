"""Goodput: sums that are exact, over invented attempts and over a run that is killed and resumed."""

import os
import signal
import subprocess
import sys

import pytest

from perex_t5x import goodput, metrics
from perex_t5x.goodput import PHASES, Attempt, Recorder, add_up
from tests import tiny

RUN = (
    "TRAIN_STEPS = 8",
    "train.stats_period = 1",
    "utils.SaveCheckpointConfig.period = 4",
    "train.train_eval_dataset_cfg = None",
    "models.T5Config.num_decoder_layers = 1",
)


class Clock:
    """Stands for `time`: moves when told to."""

    def __init__(self, now):
        self.now = now

    def time(self):
        return self.now

    def monotonic(self):
        return self.now - 1_000_000.0  # counts from somewhere else


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(2_000_000.0)
    monkeypatch.setattr(goodput, "time", clock)
    return clock


def put(job):
    job()


def test_three_attempts_add_up_to_the_wall_clock():
    attempts = [
        Attempt(1_000, {"start": 700, "compile": 1300, "steps": 9000, "save": 50}, 0, 90),  # killed
        Attempt(20_000, {"start": 600, "restore": 401, "repeated": 3000, "steps": 10_000, "data": 7}, 60, 190),
        Attempt(34_008, {"start": 600, "restore": 400, "steps": 10_000, "evaluate": 3}, 190, 290, True),
    ]
    total = add_up(reversed(attempts))
    assert total.milliseconds == {
        "steps": 29_000, "repeated": 3000, "compile": 1300, "restore": 801, "save": 50, "evaluate": 3, "data": 7,
        "start": 1900, "down": 7950,
    }  # fmt: skip
    assert sum(total.milliseconds.values()) == attempts[-1].until - attempts[0].begun == 44_011
    assert total.wall_clock == 44.011 and sum(total.shares.values()) == pytest.approx(1, abs=1e-12)
    assert (total.attempts, total.step) == (3, 290)
    assert total.line.startswith(
        "goodput 65.9 % of 44 s in 3 attempts; down 18.1 %, repeated steps 6.8 %, starting 4.3 %"
    )
    assert total.metrics["goodput/steps"] == total.shares["steps"] and len(total.metrics) == len(PHASES) + 1

    # Continued a day after its end: that day is nobody's loss. Two hosts' clocks that differ take nothing away.
    continued = add_up([*attempts, Attempt(90_000_000, {"steps": 1}, 290, 291)])
    assert continued.milliseconds["down"] == 7950 and continued.wall_clock == 44.012
    assert add_up([attempts[0], Attempt(9_000, {"steps": 1})]).milliseconds["down"] == 0
    assert add_up([]) is None


def test_a_recorder_counts_every_moment_once(tmp_path, clock):
    begun = clock.now - 8.0  # of the process, which has imported for eight seconds
    recorder = Recorder(begun)
    clock.now += 1
    with recorder.phase("restore"):
        clock.now += 2
        with recorder.phase("compile"):
            clock.now += 4
        clock.now += 0.5
    recorder.follow(str(tmp_path), 10, reached=12)
    for step in range(11, 15):
        with recorder.phase("data"):
            clock.now += 0.25
        recorder.step(step)
        clock.now += 1
    with pytest.raises(KeyboardInterrupt), recorder.phase("save"):
        clock.now += 0.125
        raise KeyboardInterrupt
    recorder.write(put)
    (attempt,) = goodput.read_attempts(tmp_path)
    assert attempt == recorder.attempt() and os.listdir(tmp_path / "goodput") == [f"{round(begun * 1000):015d}.json"]
    recorded = {phase: ms for phase, ms in attempt.milliseconds.items() if ms}
    assert recorded == {
        "start": 9000, "restore": 2500, "compile": 4000, "data": 1000, "repeated": 2000, "steps": 2000, "save": 125,
    }  # fmt: skip
    assert (attempt.first_step, attempt.step, attempt.done) == (10, 14, False)
    assert attempt.until == round(clock.now * 1000)

    # The next attempt, from step 13: what the first one had made beyond is repeated; a record that is torn is left out.
    (tmp_path / "goodput" / "0.json").write_text('{"milliseconds": ')
    clock.now += 100
    following = Recorder()
    following.follow(str(tmp_path), 13, reached=13)
    for step in (14, 15):
        following.step(step)
        clock.now += 3
    following.write(put, due=False)  # the first, so it is
    clock.now += 1
    following.write(put, due=False)  # within the minute
    total = goodput.of_run(tmp_path)
    assert total.seconds["repeated"] == 5 and total.seconds["steps"] == 5 and total.seconds["down"] == 100
    following.done()
    following.write(put)
    assert goodput.of_run(tmp_path).seconds["steps"] == 6 and goodput.read_attempts(tmp_path)[-1].done
    assert goodput.summary(tmp_path).startswith("goodput 4.7 % of 2 min in 2 attempts; down ")
    assert goodput.summary(tmp_path / "elsewhere") == "" and Recorder().goodput().attempts == 1


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed(tmp_path):
    code = f"""
import os, signal, time
from perex_t5x.cli import status
from tests import tiny

def at_step(step):
    if step == 7:
        while not os.path.exists(os.path.join({str(tmp_path)!r}, 'checkpoint_4')):
            time.sleep(0.1)
        time.sleep(1)  # its lines are stored by now
        os.kill(os.getpid(), signal.SIGKILL)

status.at_step = at_step
tiny.train({str(tmp_path)!r}, *{RUN!r})
"""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    killed = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=600, check=False)
    assert killed.returncode == -signal.SIGKILL
    (first,) = goodput.read_attempts(tmp_path)
    assert (
        (first.first_step, first.done) == (0, False) and first.milliseconds["steps"] and not first.milliseconds["down"]
    )
    tiny.train(tmp_path, *RUN)
    first, second = goodput.read_attempts(tmp_path)
    assert (second.first_step, second.step, second.done) == (4, 8, True)
    assert (
        second.milliseconds["repeated"] > 0 and second.milliseconds["restore"] > 0 and second.milliseconds["save"] > 0
    )
    total = goodput.of_run(tmp_path)
    assert sum(total.milliseconds.values()) == second.until - first.begun
    assert total.milliseconds["down"] == second.begun - first.until >= 1000
    rows = [row for row in metrics.read_rows(tmp_path) if "loss" in row and row["name"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, 9))
    shares = [value for name, value in rows[-1].items() if name in {f"goodput/{phase}" for phase in PHASES}]
    assert len(shares) == len(PHASES) and sum(shares) == pytest.approx(1)
    assert 0 < rows[-1]["goodput/repeated"] < 1
    # Started again, it has nothing to do, and its time is not the run's.
    tiny.train(tmp_path, *RUN)
    assert goodput.of_run(tmp_path) == total


def test_the_start_of_a_process():
    begun = goodput.process_begun()
    assert abs(begun - os.stat(f"/proc/{os.getpid()}").st_ctime) < 5
