"""Runs in one process: the numbers of `perex_t5x.train`, one program for all rates and seeds, and what a failure leaves."""

import csv
import io
import json
import os
import signal
import subprocess
import threading
import time

import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.evaluation import TrainEvaluator
from perex_t5x.experiments.sweep import Sweep, in_process, overview
from perex_t5x.experiments.sweep.directory import Folder
from perex_t5x.experiments.sweep.overview import Overview
from perex_t5x.loop import Loop
from perex_t5x.train import Training
from tests import tiny
from tests.experiments.sweep.support import BINDINGS, FILES, plan, rows, sweep_command


def run(made, folder, **options):
    return made.run(str(folder), together=True, overview=io.StringIO(), **options)


def names(folder):
    """The names in every line of metrics.jsonl, times included."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["name"], sorted(line)) for line in lines]


def assert_same_metrics(found, expected):
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key].keys() == values.keys(), key
        for name, value in values.items():
            assert float(found[key][name]) == pytest.approx(float(value), rel=1e-5, abs=1e-7), (key, name)


@pytest.mark.parametrize(
    ("files", "bindings"),
    [
        pytest.param(
            ["optimizers/adamw.gin", "runs/monitor.gin"],
            ["DROPOUT_RATE = 0.1", "train.stats_period = 2", "MONITOR_PERIOD = 3", "TRAIN_STEPS = 7"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["optimizers/micro_adam_msq.gin", "runs/monitor.gin"],
            ["MONITOR_PERIOD = 3", "TRAIN_STEPS = 7"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adamw", "micro_adam_msq"],
)
def test_equals_training_alone(tmp_path, files, bindings):
    files = ["models/tiny.gin", "runs/pretrain.gin", *files]
    made = plan(*bindings, files=files, rate_factors=[0.5, 1.0], seeds=[0, 3])
    results = run(made, tmp_path / "sweep")
    assert [r.status for r in results] == ["done"] * 4
    assert len({r.eval_loss for r in results}) == 4
    chosen = made.runs[3]
    assert chosen.seed == 3 and chosen.name == "x1_s3"
    alone = tmp_path / "alone"
    tiny.train(alone, *chosen.bindings, files=files)
    mine = tmp_path / "sweep" / "runs" / chosen.name
    assert_same_metrics(rows(mine), rows(alone))
    assert names(mine) == names(alone)
    for part in ("train", "training_eval/uneven_documents_lm", f"checkpoint_{made.runs[3].train_steps}"):
        assert (mine / part).is_dir() and (alone / part).is_dir(), part
    assert [p.name for p in sorted(mine.glob("train/*"))], "TensorBoard's"
    kept = [line for line in (mine / "config.gin").read_text().splitlines() if "MODEL_DIR" not in line]
    assert kept == [line for line in (alone / "config.gin").read_text().splitlines() if "MODEL_DIR" not in line]


def test_diverged_run_is_a_result_and_the_others_go_on(tmp_path):
    binding = "utils.create_learning_rate_scheduler.factors = 'constant'"
    results = run(plan(binding, "optax.adamw.weight_decay = 1.0", learning_rates=[0.01, 1e30]), tmp_path)
    assert [r.status for r in results] == ["done", "failed"]
    assert "diverged at step" in results[1].error and results[1].eval_loss is None and results[1].final
    with open(tmp_path / "results.csv", encoding="utf-8") as f:
        table = {row["name"]: row for row in csv.DictReader(f)}
    assert table["lr1e+30_s0"]["eval_loss"] == "" and table["lr1e+30_s0"]["status"] == "failed"
    assert float(table["lr0.01_s0"]["eval_loss"]) == results[0].eval_loss
    columns = "name status batch_size learning_rate seed steps examples_seen train_loss eval_loss best_eval_loss"
    assert list(table["lr0.01_s0"]) == [*columns.split(), "seconds", "error"]


def test_finished_runs_are_left_alone_and_new_values_are_added(tmp_path):
    run(plan(learning_rates=[0.01, 0.02]), tmp_path, only="lr0.01")
    folder = Folder(str(tmp_path))
    assert folder.result("lr0.01_s0").status == "done" and folder.result("lr0.02_s0") is None
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs" / "lr0.01_s0").rglob("*")}
    results = run(plan(learning_rates=[0.01, 0.02, 0.03]), tmp_path)
    assert [r.status for r in results] == ["done"] * 3
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "runs" / "lr0.01_s0").rglob("*")}


def test_one_program_serves_rates_and_seeds_and_no_run_is_made_twice(tmp_path, monkeypatch):
    programs, kept = [], {}
    original = in_process._lower
    monkeypatch.setattr(in_process, "_lower", lambda training: (programs.append(1), original(training))[1])
    made = plan(batch_sizes=[8, 16], rule=["sqrt", "linear"], seeds=[0, 1])
    results = run(made, tmp_path, only="linear", programs=kept)
    assert [r.status for r in results] == ["waiting"] * 4 + ["done"] * 4
    assert {r.examples_seen for r in results[4:]} == {128}
    assert len(programs) == len(kept) == 2, "one for each batch size"
    results = {r.name: r for r in run(made, tmp_path, programs=kept)}
    assert len(programs) == 2, "kept from the first call"
    assert results["sqrt_b16_s0"].seconds == 0.0 < results["sqrt_b8_s0"].seconds
    assert results["sqrt_b16_s0"].eval_loss == results["linear_b16_s0"].eval_loss
    assert results["sqrt_b8_s0"].eval_loss != results["linear_b8_s0"].eval_loss
    config = (tmp_path / "runs" / "sqrt_b16_s0" / "config.gin").read_text()
    assert "runs/sqrt_b16_s0'" in config and "linear_b16_s0" not in config
    assert rows(tmp_path / "runs" / "sqrt_b16_s0") == rows(tmp_path / "runs" / "linear_b16_s0")


def test_stopped_runs_resume_from_their_checkpoints(tmp_path, monkeypatch):
    """Ctrl-C in the middle; the same command ends with the numbers of runs that were never stopped."""
    made, shown = plan("train.stats_period = 1", seeds=[0, 1]), Overview.progress

    def interrupt(self, name, step, loss):
        shown(self, name, step, loss)
        if step == 5 and name == "s0":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the main thread hears it

    monkeypatch.setattr(Overview, "progress", interrupt)
    with pytest.raises(KeyboardInterrupt, match="of 2 runs are finished. The same command resumes"):
        run(made, tmp_path / "stopped", parallel=1)
    monkeypatch.undo()
    (saved,) = (tmp_path / "stopped" / "runs" / "s0").glob("checkpoint_*")
    assert 5 <= int(saved.name.removeprefix("checkpoint_")) < 8
    results = run(made, tmp_path / "stopped")
    assert [r.status for r in results] == ["done"] * 2
    run(made, tmp_path / "whole")
    for name in ("s0", "s1"):
        assert rows(tmp_path / "stopped" / "runs" / name) == rows(tmp_path / "whole" / "runs" / name)


def test_crash_of_one_run_does_not_stop_the_others_and_is_tried_again(tmp_path, monkeypatch):
    made = plan(seeds=[0, 1, 2])
    original = Training.run

    def run_training(self, *args, **options):
        if self.model_dir.endswith("s1"):
            raise MemoryError("no room")
        return original(self, *args, **options)

    monkeypatch.setattr(Training, "run", run_training)
    results = run(made, tmp_path)
    assert [r.status for r in results] == ["done", "failed", "done"] and "no room" in results[1].error
    monkeypatch.undo()
    assert [r.status for r in run(made, tmp_path)] == ["done"] * 3


@pytest.mark.slow
def test_a_killed_evaluation_is_made_up_for_before_there_is_a_result(tmp_path, monkeypatch):
    made, evaluate = plan(), TrainEvaluator.evaluate

    class Killed(BaseException):
        """In place of SIGKILL: the run's thread just ends."""

    def killed(self, step, *rest):
        if step == 8:
            raise Killed
        return evaluate(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda *_: None)
        patch.setattr(TrainEvaluator, "evaluate", killed)
        assert [r.status for r in run(made, tmp_path / "killed")] == ["waiting"]
    with monkeypatch.context() as patch:  # as a run would end that does not make up for it
        patch.setattr(Loop, "_make_up_for_evaluation", lambda *_: None)
        (refused,) = run(made, tmp_path / "killed")
    assert (refused.status, refused.final, refused.eval_loss) == ("failed", False, None)
    assert "the last validation loss is of step 4, and the last step is 8" in refused.error
    (result,) = run(made, tmp_path / "killed")
    (expected,) = run(made, tmp_path / "whole")
    assert (result.status, result.steps, result.eval_loss) == ("done", 8, expected.eval_loss)
    name = made.runs[0].name
    assert rows(tmp_path / "killed" / "runs" / name) == rows(tmp_path / "whole" / "runs" / name)


def test_configurations_that_need_a_process_of_their_own(tmp_path):
    results = run(plan("train.infer_eval_dataset_cfg = @train_eval/utils.DatasetConfig()"), tmp_path)
    assert "leave --together out" in results[0].error
    results = run(plan("RestoreCheckpointConfig.path = 'somewhere'"), tmp_path / "a")
    assert "this path does not exist" in results[0].error
    with pytest.raises(ConfigError, match="matches none of the 1 runs' names"):
        run(plan(), tmp_path / "b", only="nothing")
    with pytest.raises(ConfigError, match="--parallel=0"):
        run(plan(), tmp_path / "b", parallel=0)


@pytest.mark.slow
def test_killed_sweep_loses_no_finished_run_and_repeats_none(tmp_path):
    changes, factors = (
        ["TRAIN_STEPS = 40"],
        ["rate_factors = [0.5, 0.7, 1.0, 1.4]", "seeds = [0]", "gin_bindings = {}"],
    )
    arguments = [f"--gin_bindings={c}" for c in changes] + [f"--sweep_bindings={f}" for f in factors]
    command = sweep_command(tmp_path, "--together", "--parallel=1", *arguments)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 500
        while not list(tmp_path.glob("runs/*/result.json")):
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = list(tmp_path.glob("runs/*/result.json"))
    assert 1 <= len(finished) < 4
    before = {p: p.stat().st_mtime_ns for f in finished for p in f.parent.rglob("*")}
    again = Sweep.load("sweeps/learning_rate.gin", factors).plan(FILES, [*BINDINGS, *changes], check=False)
    results = run(again, tmp_path)
    assert [r.status for r in results] == ["done"] * 4
    assert before == {p: p.stat().st_mtime_ns for f in finished for p in f.parent.rglob("*")}
    words = overview.closing_words("there", again.runs, results)
    assert "4 runs: 4 done." in words and "perex_t5x.experiments.report there" in words
    best = min(results, key=lambda r: r.eval_loss)
    assert f"{best.values['rate_factor']!s:<24} {best.eval_loss:>15.4f}" in words
