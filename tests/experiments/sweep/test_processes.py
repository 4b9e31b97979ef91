"""Runs as processes: with a stand-in for the training, and (slow) with the training itself."""

import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from perex_t5x.experiments.sweep.runs import Run
from tests.experiments.sweep.support import plan, rows, sweep_command

# Behaves as `perex_t5x.train`: writes metrics, prints progress, saves and stops when asked, fails as the seed says.
STAND_IN = """
import json, os, signal, sys, time
folder, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
os.makedirs(folder, exist_ok=True)
def stop(*_):
    open(os.path.join(folder, "saved"), "w").close()
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
print("step 4/8  loss 2.5  tokens/s 1.0  ETA 0:01", flush=True)
time.sleep(seconds)
with open(os.path.join(folder, "metrics.jsonl"), "a") as f:
    name = "loss_per_nonpadding_target_token"
    f.write(json.dumps({"step": 8, "name": "train", name: 2.0}) + "\\n")
    f.write(json.dumps({"step": 4, "name": "training_eval/a", name: 1.5}) + "\\n")
    if seed != 6 or os.path.exists(os.path.join(folder, "saved")):
        f.write(json.dumps({"step": 8, "name": "training_eval/a", name: 1.75}) + "\\n")
def end(reason, code, **more):
    with open(os.environ["PEREX_T5X_STATUS_FILE"], "w") as f:
        json.dump({"reason": reason, "exit_code": code, **more}, f)
    sys.exit(code)
if seed == 1:
    end("diverged", 5, step=5, message="the loss of step 5 is nan: stopped before saving", finding="the loss is nan")
if seed == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if seed == 3:
    end("configuration", 2, message="BATCH_SIZE = 3: no")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    def command(self, root, python=None):
        seconds = os.environ.get("STAND_IN_SECONDS", "0")
        return [sys.executable, str(script), self.folder(root), str(self.seed), seconds]

    monkeypatch.setattr(Run, "command", command)


def test_every_end_has_its_result(tmp_path, stand_in):
    made, folder, shown = plan(seeds=[0, 1, 2, 3]), tmp_path / "sweep", io.StringIO()
    done, diverged, killed, wrong = made.run(str(folder), parallel=2, overview=shown)
    assert (done.status, done.final, done.steps, done.examples_seen) == ("done", True, 8, 128)
    assert (done.train_loss, done.eval_loss, done.best_eval_loss) == (2.0, 1.75, 1.5)
    assert (diverged.status, diverged.final, diverged.eval_loss) == ("failed", True, None)
    assert diverged.error == "diverged at step 5: the loss is nan"
    assert (killed.status, killed.final) == ("failed", False) and "SIGKILL" in killed.error
    assert "BATCH_SIZE = 3: no" in wrong.error and not wrong.final
    assert "1 done, 0 running, 0 waiting, 3 failed of 4" in shown.getvalue()
    kept = sorted(p.parent.name for p in folder.glob("runs/*/result.json"))
    assert kept == ["s0", "s1"], "the other two are tried again"
    assert "step 4/8" in (folder / "runs" / "s0" / "log.txt").read_text()


def test_asked_to_stop_the_runs_save_and_the_rest_waits(tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("STAND_IN_SECONDS", "60")
    made, folder = plan(seeds=[0, 4, 5]), tmp_path / "sweep"

    def ask():
        deadline = time.monotonic() + 30
        while len(list(folder.glob("runs/*/log.txt"))) < 2 or not all(
            p.read_text() for p in folder.glob("runs/*/log.txt")
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(KeyboardInterrupt, match="0 of 3 runs are finished"):
        made.run(str(folder), parallel=2, overview=io.StringIO())
    asking.join()
    assert sorted(p.parent.name for p in folder.glob("runs/*/saved")) == ["s0", "s4"]
    assert (folder / "results.csv").read_text().count("stopped") == 2
    monkeypatch.setenv("STAND_IN_SECONDS", "0")
    assert [r.status for r in made.run(str(folder), overview=io.StringIO())] == ["done"] * 3


def test_a_result_without_the_evaluation_of_its_last_step_is_refused(tmp_path, stand_in):
    made, folder = plan(seeds=[6]), tmp_path / "sweep"
    (result,) = made.run(str(folder), overview=io.StringIO())
    assert (result.status, result.final, result.eval_loss) == ("failed", False, None)
    assert "the last validation loss is of step 4, and the last step is 8" in result.error
    assert not list(folder.glob("runs/*/result.json"))
    (folder / "runs" / "s6" / "saved").touch()
    (result,) = made.run(str(folder), overview=io.StringIO())  # the run makes up for it
    assert (result.status, result.eval_loss) == ("done", 1.75)


@pytest.mark.slow
def test_processes_give_the_numbers_of_one_process(tmp_path):
    arguments = ["--sweep.seeds=[0]", "--sweep.rate_factors=[0.5, 1.0]"]
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.getcwd()}
    for name, how in (("a", ["--parallel=2"]), ("b", ["--together"])):
        command = sweep_command(tmp_path / name, *arguments, *how)
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert ended.returncode == 0, ended.stderr
    for run in ("x0.5_s0", "x1_s0"):
        a, b = (rows(tmp_path / name / "runs" / run) for name in ("a", "b"))
        assert a.keys() == b.keys()
        key = max(k for k in a if k[0].startswith("training_eval"))
        loss = "loss_per_nonpadding_target_token"
        assert a[key][loss] == pytest.approx(b[key][loss], rel=2e-4)
