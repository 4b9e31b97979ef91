"""The command that kills and damages runs: its checks notice what they are for, and runs pass them."""

import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perex_t5x.chaos import __main__ as command
from perex_t5x.chaos import comparison, damage, storage
from perex_t5x.chaos import runs as runs_lib
from perex_t5x.chaos import trials as trials_lib
from perex_t5x.chaos.comparison import differences
from perex_t5x.chaos.faults import FAULTS
from perex_t5x.chaos.runs import SETTINGS, MissedError, Place
from perex_t5x.cli import subprocesses
from perex_t5x.errors import ConfigError
from tests import tiny

BINDINGS = (
    "TRAIN_STEPS = 8",
    "EVAL_PERIOD = 4",
    "utils.SaveCheckpointConfig.period = 4",
    "train_script.train.stats_period = 3",
)


@dataclasses.dataclass
class InThisProcess:
    """In place of `chaos.runs.Run`, for faults of folders: no process has to be started."""

    folder: Path
    feed: str

    def end(self, seconds):
        tiny.train(self.folder, *BINDINGS, f"train/utils.DatasetConfig.feed = '{self.feed}'")
        return 0


def begin(setting, place, devices=1):
    place.log.touch()
    return InThisProcess(place.folder, setting.feed)


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return trials_lib.Trials(tmp_path_factory.mktemp("chaos"), seed=0, begin=begin)


@pytest.fixture(scope="module")
def whole(trials):
    return trials.reference(SETTINGS["cached"])


@pytest.mark.parametrize("fault", ["flip_arrays"])  # all of them are slow: below
def test_trials_of_damaged_folders_are_good(trials, fault):
    result = trials.run(1, FAULTS[fault], "cached")
    assert result.good and result.resumed == "resumed at step 4", result


IN_THIS_PROCESS = [name for name, fault in FAULTS.items() if fault.on_folder and "status" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("fault", IN_THIS_PROCESS)
def test_trials_of_all_damaged_folders_are_good(trials, fault):
    result = trials.run(3, FAULTS[fault], FAULTS[fault].settings[0])
    print(result)
    assert result.good, result


def edit_metrics(folder, edit):
    path = folder / "metrics.jsonl"
    path.write_text("".join(edit(path.read_text().splitlines(keepends=True))))


def other_values(lines):
    row = json.loads(lines[-1])
    return [*lines[:-1], json.dumps({**row, "loss": row["loss"] * (1 + 1e-7)}) + "\n"]


def earlier_state(folder):
    shutil.rmtree(folder / "checkpoint_8")
    shutil.copytree(folder / "checkpoint_4", folder / "checkpoint_8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: None, ""),
        (lambda folder: edit_metrics(folder, lambda lines: lines[:-1]), "training_eval.* at step 8 is missing"),
        (lambda folder: edit_metrics(folder, lambda lines: [*lines, lines[1]]), "train at step 3 is there 2 times"),
        (lambda folder: edit_metrics(folder, other_values), "at step 8 differs"),
        (lambda folder: edit_metrics(folder, lambda lines: [*lines, "{"]), "the metrics cannot be read"),
        (lambda folder: (folder / ".writer").touch(), r"\.writer was left"),
        (lambda folder: (folder / "checkpoint_6.orbax-checkpoint-tmp").mkdir(), "orbax-checkpoint-tmp was left"),
        (lambda folder: shutil.rmtree(folder / "checkpoint_4"), "checkpoint_4 is missing"),
        (lambda folder: (folder / "checkpoint_4/run/metadata").unlink(), "checkpoint_4 is damaged"),
        (earlier_state, r"position in its data differs.*\['target'\].* differs by up to"),
    ],
)
def test_differences_are_noticed(whole, tmp_path, change, message):
    folder = shutil.copytree(whole, tmp_path / "run")
    change(folder)
    found = "; ".join(differences(folder, whole))
    assert re.search(message, found) if message else not found, found


def test_lines_that_only_a_lost_file_had_may_be_missing_but_not_wrong(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    edit_metrics(folder, lambda lines: [line for line in lines if json.loads(line)["step"] > 4])
    assert differences(folder, whole) and not differences(folder, whole, since=4)
    edit_metrics(folder, lambda lines: [*lines, json.dumps({"step": 3, "name": "train", "loss": 1.0}) + "\n"])
    assert differences(folder, whole, since=4) == ["the line of train at step 3 differs"]


def test_a_run_on_another_mesh_may_differ_by_rounding_alone(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    edit_metrics(folder, other_values)
    assert not differences(folder, whole, exact=False)
    earlier_state(folder)
    assert differences(folder, whole, exact=False)


def test_a_resumed_run_that_fails_or_prints_a_stack_trace_is_not_good(trials, whole, monkeypatch):
    def failing(setting, place, devices=1):
        place.log.write_text("Traceback (most recent call last):")
        return type("Failing", (), {"end": lambda self, seconds: 1})()

    monkeypatch.setattr(trials, "_begin", failing)
    result = trials.run(2, FAULTS["delete_config"], "cached")
    assert result.problems == ["started again, the run ended as error (1)", "a stack trace was printed"]


@pytest.mark.parametrize(("misses", "problems"), [(2, []), (3, ["no trial"])])
def test_a_moment_that_was_missed_is_waited_for_again(trials, whole, monkeypatch, misses, problems):
    started = []

    def begin_nothing(setting, place, devices=1):
        place.folder.mkdir()
        started.append(place.folder)
        return type("Ended", (), {"end": lambda self, seconds: -9, "kill": lambda self: None})()

    def act(run, rng):
        if len(started) <= misses:
            raise MissedError("no trial")
        return "killed"

    monkeypatch.setattr(trials, "_begin", begin_nothing)
    monkeypatch.setattr(trials, "_resume", lambda *_: None)
    result = trials.run(4, dataclasses.replace(FAULTS["kill"], act=act), "cached")
    assert result.problems == problems and len(started) == 3


def test_processes_are_found_by_their_mark_and_killed(tmp_path):
    place = Place(tmp_path, tmp_path / "log")
    mark = place.mark
    pipe = "import os, subprocess, sys; r, w = os.pipe(); subprocess.run([sys.executable, '-c', 'input()'], stdin=r)"
    env = {**os.environ, runs_lib.MARK: mark}
    child = subprocesses.Child([sys.executable, "-c", pipe], env=env)
    run = runs_lib.Run(child, SETTINGS["cached"], place, start=None)
    run.wait_for("its child", lambda folder: len(runs_lib.processes(mark)) == 2)
    assert run.workers() == []  # nobody trains
    run.kill()
    assert run.end(seconds=60) == -9
    assert trials_lib._left_processes(mark) == []
    with pytest.raises(MissedError, match="no trial: the run ended before the end of time"):
        run.wait_for("the end of time", lambda folder: False)


def test_every_fault_and_every_setting_is_in_the_plan():
    planned = trials_lib.plan(list(FAULTS), list(SETTINGS), 60, seed=1)
    assert len(planned) == 60 and {fault for fault, _ in planned} == set(FAULTS)
    assert {setting for _, setting in planned} == set(SETTINGS)
    assert all(setting in FAULTS[fault].settings for fault, setting in planned)
    assert planned != trials_lib.plan(list(FAULTS), list(SETTINGS), 60, seed=2)
    with pytest.raises(ConfigError, match="none of these faults"):
        trials_lib.plan(["kill_one"], ["cached"], 1, seed=0)


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["the line of train at step 3 is missing"], 3)])
def test_the_exit_code_and_the_table(monkeypatch, tmp_path, capsys, problems, code):
    def trial(self, number, fault, setting):
        found = problems if fault.name == "kill" else []
        return trials_lib.Result(number, fault.name, setting, resumed="resumed at step 8", problems=found)

    monkeypatch.setattr(trials_lib.Trials, "run", trial)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    args = {"faults": ["kill", "sigt*m"], "settings": ["cached"], "trials": 4, "seed": 0, "quick": False, "json": False}
    assert command.main(dataclasses.make_dataclass("Args", [*args, "dir"])(*args.values(), str(tmp_path))) == code
    shown = capsys.readouterr().out.splitlines()
    good, what = ("**0**", f"{problems[0]} (2)") if problems else ("2", "resumed at step 8 (2)")
    assert shown[2:] == [
        f"| `kill` | cached | 2 | {good} | {what} |",
        "| `sigterm` | cached | 2 | 2 | resumed at step 8 (2) |",
        f"| all | | 4 | {2 if problems else 4} | |",
    ]


def test_sweeps_are_compared_run_by_run(whole, tmp_path):
    for name in ("reference", "sweep"):
        for run in ("x1_s0", "x1_s1"):
            shutil.copytree(whole, tmp_path / name / "runs" / run)
        (tmp_path / name / "results.csv").write_text("name,eval_loss,seconds\nx1_s0,1.5,2\n")
    sweep, reference = tmp_path / "sweep", tmp_path / "reference"
    (sweep / "results.csv").write_text("name,eval_loss,seconds\nx1_s0,1.5,3\n")
    assert not comparison.differences_of_sweeps(sweep, reference)
    (sweep / "results.csv").write_text("name,eval_loss,seconds\nx1_s0,1.6,2\n")
    (sweep / ".lock").touch()
    edit_metrics(sweep / "runs" / "x1_s1", lambda lines: lines[:-1])
    problems = "; ".join(comparison.differences_of_sweeps(sweep, reference))
    assert re.fullmatch(
        r"\.lock was left; results.csv differs; x1_s1: the line of training_eval.* is missing", problems
    )
    shutil.rmtree(sweep / "runs" / "x1_s0")
    assert "the run x1_s0 is missing" in comparison.differences_of_sweeps(sweep, reference)


def test_a_disk_can_be_full(tmp_path):
    try:
        with storage.disk(tmp_path / "disk") as disk:
            storage.fill(disk)
            (disk / "small").write_bytes(b"x")
            with pytest.raises(OSError, match="No space left"):
                (disk / "large").write_bytes(bytes(2**20))
            storage.empty(disk)
            (disk / "large").write_bytes(bytes(2**20))
    except runs_lib.SkippedError as e:
        pytest.skip(str(e))
    assert not (tmp_path / "disk").exists()


def test_a_run_in_a_bucket_is_copied_to_be_compared(cloud_storage, tmp_path):
    cloud_storage.put("run/checkpoint_8/state/d/x", b"1")
    cloud_storage.put("run/metrics/", b"")  # the mark of a folder
    cloud_storage.put("running", b"")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "old").touch()
    storage.copy(cloud_storage, tmp_path / "copy")
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()] == ["copy/checkpoint_8/state/d/x"]


@pytest.mark.parametrize("how", damage.WAYS)
def test_damage_is_damage(tmp_path, how):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    said = damage.WAYS[how](path, random.Random(0))
    changed = {"truncate": lambda b: b == bytes(range(100))[: len(b)] and len(b) < 100, "delete": lambda b: not b}
    one_bit = lambda b: sum((x ^ y).bit_count() for x, y in zip(b, range(100), strict=True)) == 1  # noqa: E731
    assert changed.get(how, one_bit)(path.read_bytes() if path.exists() else b""), said


def run_command(folder, *flags):
    root = Path(__file__).resolve().parents[2]
    line = [sys.executable, "-m", "perex_t5x.chaos", *flags, f"--dir={folder}"]
    return subprocess.run(line, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)


def test_a_real_run_is_killed_in_an_evaluation(tmp_path):
    done = run_command(tmp_path / "chaos", "--faults=kill_in_eval", "--settings=cached", "--trials=1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\| `kill_in_eval` \| cached \| 1 \| 1 \| resumed at step \d+ \|", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--quick"], ["--trials=60"]])
def test_the_command(flags, tmp_path):
    done = run_command(tmp_path / "chaos", *flags)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "| all | |" in done.stdout
