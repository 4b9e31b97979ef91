"""XManager on this machine: a real sweep through `xmanager launch`, and every end of a run with a stand-in for it."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

pytest.importorskip("xmanager")

from perex_t5x.cli import subprocesses
from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.experiments.sweep.directory import Folder, InUseError
from perex_t5x.experiments.sweep.runs import Result, Run
from perex_t5x.launching.xm import local
from tests.experiments.sweep.support import plan
from tests.experiments.sweep.test_processes import STAND_IN

ROOT = Path(__file__).resolve().parents[3]


def xmanager(home, *arguments, python=False):
    """`xmanager launch launch/xm_launch.py -- ...` with its records under `home`."""
    script = str(ROOT / "launch" / "xm_launch.py")
    launcher = [sys.executable, "-c", "from xmanager.cli import cli; cli.entrypoint()", "launch", script, "--"]
    env = {
        **os.environ,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1"),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    command = [sys.executable, script] if python else launcher
    return subprocess.run(
        [*command, *arguments], env=env, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )


def recorded(home):
    """Titles of experiments and numbers of work units, as XManager's records have them."""
    from xmanager.xm_local.storage import database

    settings = database.sqlite_settings(str(home / ".xmanager" / "experiments.sqlite3"))
    records = database.Database(database.SqliteConnector, settings)
    found = [records.get_experiment(number) for number in records.list_experiment_ids()]
    return [e.experiment_title for e in found], sorted(unit.work_unit_id for e in found for unit in e.work_units)


@pytest.mark.slow
def test_two_runs_of_a_sweep_through_xmanager(tmp_path):
    files = ("models/nano.gin", "runs/pretrain.gin", "optimizers/adamw.gin")
    done = xmanager(
        tmp_path,
        "--sweep=sweeps/learning_rate.gin",
        *(f"--gin_file={name}" for name in files),
        "--sweep.seeds=[0]",
        "--sweep.rate_factors=[1.0, 2.0]",
        "--gin.MIXTURE_OR_TASK_NAME='uneven_documents_lm'",
        "--gin.MIXTURE_OR_TASK_MODULE='tests.tiny_tasks'",
        "--gin.TASK_FEATURE_LENGTHS={'targets': 16}",
        "--gin.BATCH_SIZE=8",
        "--gin.TRAIN_STEPS=4",
        "--gin.WARMUP_STEPS=2",
        "--gin.EVAL_PERIOD=2",
        "--gin.EVAL_STEPS=1",
        "--executor=local",
        "--parallel=2",
        "--dir=a sweep",
    )
    assert done.returncode == 0, done.stderr
    assert "may still be running" not in done.stdout  # what XManager says at exit of jobs that have ended
    assert "Traceback" not in done.stderr and "2 runs: 2 done." in done.stdout
    folder = tmp_path / "a sweep"
    with open(folder / "results.csv", encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [(r["name"], r["status"], r["steps"]) for r in rows] == [("x1_s0", "done", "4"), ("x2_s0", "done", "4")]
    assert all(0 < float(r["eval_loss"]) < 10 for r in rows)
    assert [r["name"] for r in json.loads((folder / "sweep.json").read_text())["runs"]] == ["x1_s0", "x2_s0"]
    assert "step 4/4" in (folder / "runs" / "x1_s0" / "log.txt").read_text()
    assert recorded(tmp_path) == (["learning_rate"], [1, 2])
    [experiment] = json.loads((folder / "xmanager.json").read_text())
    units = experiment["work_units"]
    assert [units[number]["run"] for number in ("1", "2")] == ["x1_s0", "x2_s0"]
    assert (units["2"]["learning_rate"], units["2"]["seed"]) == (0.016, 0) and units["2"]["pid"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--executor=loca"], "Did you mean 'local'?"),
        (["--executor=local", "--topology=v5e-8"], "--topology does not apply to --executor=local"),
        (["--executor=local", "hello"], "'hello' is not a flag"),
    ],
)
def test_slips_are_told_without_a_stack_trace(tmp_path, arguments, words):
    done = xmanager(tmp_path, *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / ".xmanager").exists(), "no experiment"


def test_missing_xmanager_is_explained(tmp_path):
    hidden = tmp_path / "xmanager"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ImportError('not here')")
    script = str(ROOT / "launch" / "xm_launch.py")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, script, "--gin_file=a.gin"], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'perex_t5x[launch]'" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """An experiment whose runs are a stand-in, with XManager's records in `tmp_path`."""
    from absl import flags
    from xmanager.xm_local.storage import database

    from perex_t5x.launching.xm.experiment import Experiment

    monkeypatch.setenv("HOME", str(tmp_path))
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    hostile = f"$(touch {tmp_path}/touched)'\" `date`"

    def command(self, root, python=None):
        seconds = os.environ.get("STAND_IN_SECONDS", "0")
        return [sys.executable, str(script), self.folder(root), str(self.seed), seconds, hostile]

    monkeypatch.setattr(Run, "command", command)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    caches = (database.database, database.db_settings, database.db_connector)
    for cached in caches:
        cached.cache_clear()
    yield Experiment("a title", str(tmp_path / "sweep" / "xmanager.json"))
    for cached in caches:
        cached.cache_clear()


def test_every_end_has_its_result(tmp_path, experiment):
    with experiment:
        made = plan(seeds=[0, 1, 2, 3]).run(str(tmp_path / "sweep"), parallel=2, child=experiment.child)
    done, diverged, killed, slipped = made
    assert (done.status, done.eval_loss, done.steps) == ("done", 1.75, 8)
    assert (diverged.status, diverged.final) == ("failed", True)
    assert diverged.error == "diverged at step 5: the loss is nan"
    assert (killed.status, killed.final) == ("failed", False) and "SIGKILL" in killed.error
    assert "BATCH_SIZE = 3: no" in slipped.error and not slipped.final
    assert recorded(tmp_path) == (["a title"], [1, 2, 3, 4])
    [entry] = json.loads((tmp_path / "sweep" / "xmanager.json").read_text())
    assert [unit["run"] for unit in entry["work_units"].values()] == ["s0", "s1", "s2", "s3"]
    assert len({unit["pid"] for unit in entry["work_units"].values()}) == 4
    assert not (tmp_path / "touched").exists(), "a shell has read an argument"


def test_records_that_fail_in_the_middle_are_told(tmp_path, experiment, monkeypatch):
    from xmanager.xm_local.storage import database

    def full(*_):
        raise OSError("disk is full")

    with experiment:
        plan(seeds=[0]).run(str(tmp_path / "sweep"), child=experiment.child)
        monkeypatch.setattr(database.Database, "insert_work_unit", full)
        with pytest.raises(TrainingError, match=r"(?s)could not start s3: .*disk is full.*same command resumes"):
            plan(seeds=[0, 3]).run(str(tmp_path / "sweep"), child=experiment.child)


def test_finished_runs_make_no_experiment(tmp_path, experiment):
    folder = str(tmp_path / "sweep")
    plan(seeds=[0]).run(folder)
    with experiment:
        plan(seeds=[0]).run(folder, child=experiment.child)
    assert not (tmp_path / ".xmanager").exists()


def test_asked_to_stop_the_runs_save(tmp_path, experiment, monkeypatch):
    monkeypatch.setenv("STAND_IN_SECONDS", "60")
    folder = tmp_path / "sweep"
    started = [folder / "runs" / name / "log.txt" for name in ("s0", "s4")]

    def ask():
        deadline = time.monotonic() + 60
        while not all(p.exists() and "step 4/8" in p.read_text() for p in started) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=ask).start()
    with pytest.raises(KeyboardInterrupt, match="0 of 3 runs are finished"):
        with experiment:
            plan(seeds=[0, 4, 5]).run(str(folder), parallel=2, child=experiment.child)
    assert all((p.parent / "saved").exists() for p in started)
    assert not (folder / "runs" / "s5").exists()


def test_runs_end_with_a_launcher_that_was_killed(tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    status, log = tmp_path / "status", tmp_path / "log"
    run = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    started = subprocess.Popen(
        [sys.executable, "-I", "-S", subprocesses.__file__, str(status), str(launcher.pid), str(log), *run]
    )
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    assert started.wait(60) == 0
    assert json.loads(status.read_text())["returncode"] == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_a_sweep_that_runs_is_followed_to_its_end(tmp_path, monkeypatch):
    made, root = plan(seeds=[0, 1]), tmp_path / "sweep"
    kept = Folder(str(root))
    monkeypatch.setattr(local, "_PERIOD", 0.02)
    held, go_on = threading.Event(), threading.Event()

    def other(results):
        with kept.locked():
            described = kept.write_description(made)
            kept.write_results(described, {})
            held.set()
            assert go_on.wait(60)
            for run, result in zip(made.runs, results, strict=False):
                kept.write_result(run, result)

    class Said(io.StringIO):
        def write(self, text):
            go_on.set()  # it has looked
            return super().write(text)

    done = [Result(run.name, "done", True, eval_loss=1.0) for run in made.runs]
    for results in (done[:1], done):
        held.clear()
        go_on.clear()
        running = threading.Thread(target=other, args=[results])
        running.start()
        assert held.wait(60)
        with pytest.raises(ConfigError, match="--follow"):  # not a terminal
            local.follow_instead(made, str(root), InUseError("busy.", "1"), follow=False)
        if len(results) < 2:
            with pytest.raises(TrainingError, match="1 of 2 runs are finished"):
                local.follow_sweep(made, str(root), Said())
        else:
            assert [r.status for r in local.follow_sweep(made, str(root), Said())] == ["done", "done"]
        running.join()


@pytest.fixture
def single_run(tmp_path, monkeypatch):
    """A run of five steps in `tmp_path`/run, its Gin files taken as read."""
    run = local.SingleRun("run", {}, (), (), (), 8, None, 5, 0, 40, model_dir=str(tmp_path / "run"))
    monkeypatch.setattr(local, "from_flags", lambda args: run)
    monkeypatch.setattr(local, "_check", lambda run: None)
    monkeypatch.setattr(local, "_PERIOD", 0.01)
    return run


def test_a_single_run_that_runs_is_not_started_again(single_run):
    args = SimpleNamespace(dry_run=False, name=None, follow=False)
    with Folder(single_run.model_dir).locked():
        with pytest.raises(ConfigError, match=rf"running already \(process {os.getpid()}\).*--follow.*log.txt"):
            local.launch_single(args)


@pytest.mark.parametrize("steps", [5, 3])
def test_a_single_run_that_runs_is_followed_to_its_end(single_run, capsys, steps):
    args = SimpleNamespace(dry_run=False, name=None, follow=True)
    folder = Path(single_run.model_dir)

    def first():
        with Folder(str(folder)).locked():
            held.set()
            for step in range(1, steps + 1):
                time.sleep(0.02)
                with open(folder / "log.txt", "a") as log:
                    log.write(f"step {step}/5\n")
            row = {"name": "train", "step": steps, "loss_per_nonpadding_target_token": 2.5}
            (folder / "metrics.jsonl").write_text(json.dumps(row))

    held = threading.Event()
    thread = threading.Thread(target=first)
    thread.start()
    held.wait()
    if steps == 5:
        assert local.launch_single(args) == 0
    else:
        with pytest.raises(TrainingError, match="after 3 of 5 steps. The same command resumes it"):
            local.launch_single(args)
    thread.join()
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")] == [
        f"step {step}/5" for step in range(1, steps + 1)
    ]


@pytest.mark.parametrize("name", ["xm_launch.py", "build_image.py"])
def test_scripts_can_be_run(name):
    assert os.access(ROOT / "launch" / name, os.X_OK)


@pytest.mark.parametrize(
    ("name", "flag"), [("gke.py", "--queue"), ("build_image.py", "--repository"), ("xm_launch.py", "--executor")]
)
def test_help_shows_a_launchers_own_flags(name, flag):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, str(ROOT / "launch" / name), "--help"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert f"  {flag}: " in done.stdout
