"""Runs that end between a checkpoint and its evaluation, or between two log lines: resumed, their metrics are those of a run
that never stopped, line by line."""

import json
import os
import signal
import subprocess
import sys

import pytest

from perex_t5x import checkpoints
from perex_t5x.cli import status
from perex_t5x.evaluation import TrainEvaluator
from tests import tiny

BINDINGS = (
    "TRAIN_STEPS = 8",
    "EVAL_PERIOD = 4",
    "utils.SaveCheckpointConfig.period = 4",
    "train_script.train.stats_period = 3",  # so that checkpoint_4 is between two log lines
)


class Killed(BaseException):
    """In place of SIGKILL: nothing handles it."""


def lines(model_dir):
    """(name, step, values without times) of all lines that have values, in the order of steps."""
    found = []
    with open(os.path.join(model_dir, "metrics.jsonl"), encoding="utf-8") as f:
        for row in map(json.loads, f):
            values = {k: v for k, v in row.items() if not k.startswith(("timing/", "goodput/"))}
            if len(values) > 2:
                found.append((row["name"], row["step"], values))
    return sorted(found, key=lambda line: (line[1], line[0]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("whole")
    tiny.train(model_dir, *BINDINGS)
    found = lines(model_dir)
    evaluation = f"training_eval/{tiny.TASK}"
    assert [line[:2] for line in found] == [
        ("train", 3),
        (evaluation, 4),
        ("train", 6),
        ("train", 8),
        (evaluation, 8),
    ]
    return found


@pytest.mark.parametrize("step", [4, 8])
def test_a_killed_evaluation_is_made_up_for(tmp_path, monkeypatch, whole, step):
    evaluate = TrainEvaluator.evaluate

    def killed(self, at, *rest):
        if at == step:
            raise Killed
        return evaluate(self, at, *rest)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(TrainEvaluator, "evaluate", killed)
        tiny.train(tmp_path, *BINDINGS)
    assert checkpoints.newest(str(tmp_path)).endswith(f"checkpoint_{step}")
    assert lines(tmp_path) == [line for line in whole if line[1] < step or line[:2] == ("train", step)]
    tiny.train(tmp_path, *BINDINGS)
    assert lines(tmp_path) == whole
    tiny.train(tmp_path, *BINDINGS)  # and there is nothing left to make up for
    assert lines(tmp_path) == whole


def test_asked_to_stop_an_evaluation_is_left_and_made_up_for(tmp_path, monkeypatch, whole):
    batches, read = TrainEvaluator._batches, []

    def interrupting(self, name):
        for number, batch in enumerate(batches(self, name)):
            if number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            read.append(number)
            yield batch

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="checkpoint_4 is saved"):
        patch.setattr(TrainEvaluator, "_batches", interrupting)
        tiny.train(tmp_path, *BINDINGS)
    assert read == [0, 1]  # not evaluated to its end: the second batch was read, and then left
    assert lines(tmp_path) == whole[:1]
    tiny.train(tmp_path, *BINDINGS)
    assert lines(tmp_path) == whole


def test_stopped_at_a_step_whose_evaluation_is_due(tmp_path, monkeypatch, whole):
    def stopped_at_4(step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="checkpoint_4 is saved"):
        patch.setattr(status, "at_step", stopped_at_4)
        tiny.train(tmp_path, *BINDINGS)
    assert lines(tmp_path) == whole[:1]
    tiny.train(tmp_path, *BINDINGS)
    assert lines(tmp_path) == whole


def test_only_what_is_missing_is_written(tmp_path, monkeypatch):
    """One of two tasks has its line: it keeps it, and does not get another."""
    bindings = ("EVAL_PERIOD = 1", "TRAIN_STEPS = 1")
    init, a, b = TrainEvaluator.__init__, "training_eval/a", "training_eval/b"

    def two_tasks(self, *rest):
        init(self, *rest)
        self.folders = [a, b]

    monkeypatch.setattr(TrainEvaluator, "__init__", two_tasks)
    monkeypatch.setattr(TrainEvaluator, "evaluate", lambda *_: {a: {"loss": 1.0}, b: {"loss": 2.0}})
    tiny.train(tmp_path, *bindings)
    before = lines(tmp_path)
    assert [name for name, *_ in before] == ["train", a, b]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if f'"{b}"' not in line))
    assert len(lines(tmp_path)) == 2
    tiny.train(tmp_path, *bindings)
    assert lines(tmp_path) == before


@pytest.mark.slow
def test_a_process_killed_in_its_last_evaluation(tmp_path, whole):
    code = f"""
import os, signal, time
from perex_t5x.evaluation import TrainEvaluator
from tests import tiny
evaluate = TrainEvaluator.evaluate
def killed(self, step, *rest):
    if step < 8:
        return evaluate(self, step, *rest)
    while not os.path.exists({str(tmp_path / "checkpoint_8")!r}):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
TrainEvaluator.evaluate = killed
tiny.train({str(tmp_path)!r}, *{BINDINGS!r})
"""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": root}, timeout=600)
    assert ended.returncode == -signal.SIGKILL
    assert lines(tmp_path) == whole[:-1]
    tiny.train(tmp_path, *BINDINGS)
    assert lines(tmp_path) == whole
