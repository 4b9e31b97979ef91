"""The command that kills and damages runs: its checks notice what they are for, and runs pass them."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perex_t5x import chaos, chaos_runs
from perex_t5x.chaos_faults import FAULTS
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
    """In place of `chaos_runs.Run`, for faults of folders: no process has to be started."""

    folder: Path
    feed: str

    def end(self, seconds):
        tiny.train(self.folder, *BINDINGS, f"train/utils.DatasetConfig.feed = '{self.feed}'")
        return 0


def begin(setting, folder, mark, devices=1):
    Path(f"{folder}.log").touch()
    return InThisProcess(folder, setting.feed)


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return chaos.Trials(tmp_path_factory.mktemp("chaos"), seed=0, begin=begin)


@pytest.fixture(scope="module")
def whole(trials):
    return trials.reference(chaos.SETTINGS["cached"])


@pytest.mark.parametrize("fault", ["flip_arrays", "empty_checkpoint", "torn_metrics"])
def test_trials_of_damaged_folders_are_good(trials, fault):
    result = trials.run(1, FAULTS[fault], "cached")
    assert result.good and result.resumed == "resumed at step 4", result


IN_THIS_PROCESS = [name for name, fault in FAULTS.items() if fault.on_folder and "status" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name for name in IN_THIS_PROCESS if name != "flip_metrics"])
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
        (lambda folder: edit_metrics(folder, lambda lines: [*lines, "{"]), "metrics.jsonl cannot be read"),
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
    found = "; ".join(chaos.differences(folder, whole))
    assert re.search(message, found) if message else not found, found


def test_lines_that_only_a_lost_file_had_may_be_missing_but_not_wrong(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    edit_metrics(folder, lambda lines: [line for line in lines if json.loads(line)["step"] > 4])
    assert chaos.differences(folder, whole) and not chaos.differences(folder, whole, since=4)
    edit_metrics(folder, lambda lines: [*lines, json.dumps({"step": 3, "name": "train", "loss": 1.0}) + "\n"])
    assert chaos.differences(folder, whole, since=4) == ["the line of train at step 3 differs"]


def test_a_run_on_another_mesh_may_differ_by_rounding_alone(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    edit_metrics(folder, other_values)
    assert not chaos.differences(folder, whole, exact=False)
    earlier_state(folder)
    assert chaos.differences(folder, whole, exact=False)


def test_a_resumed_run_that_fails_or_prints_a_stack_trace_is_not_good(trials, whole, monkeypatch):
    def failing(setting, folder, mark, devices=1):
        Path(f"{folder}.log").write_text("Traceback (most recent call last):")
        return type("Failing", (), {"end": lambda self, seconds: 1})()

    monkeypatch.setattr(trials, "_begin", failing)
    result = trials.run(2, FAULTS["delete_config"], "cached")
    assert result.problems == ["started again, the run ended as error (1)", "a stack trace was printed"]


@pytest.mark.parametrize(("misses", "problems"), [(2, []), (3, ["no trial"])])
def test_a_moment_that_was_missed_is_waited_for_again(trials, whole, monkeypatch, misses, problems):
    started = []

    def begin_nothing(setting, folder, mark, devices=1):
        folder.mkdir()
        started.append(folder)
        return type("Ended", (), {"end": lambda self, seconds: -9, "mark": mark})()

    def act(run, rng):
        if len(started) <= misses:
            raise chaos_runs.MissedError("no trial")
        return "killed"

    monkeypatch.setattr(trials, "_begin", begin_nothing)
    monkeypatch.setattr(trials, "_resume", lambda *_: None)
    result = trials.run(4, dataclasses.replace(FAULTS["kill"], act=act), "cached")
    assert result.problems == problems and len(started) == 3


def test_processes_are_found_by_their_mark_and_killed(tmp_path):
    mark = str(tmp_path)
    pipe = "import os, subprocess, sys; r, w = os.pipe(); subprocess.run([sys.executable, '-c', 'input()'], stdin=r)"
    env = {**os.environ, chaos_runs.MARK: mark}
    child = subprocesses.Child([sys.executable, "-c", pipe], env=env)
    run = chaos_runs.Run(child, tmp_path, mark, start=None)
    run.wait_for("its child", lambda folder: len(chaos_runs.processes(mark)) == 2)
    assert run.workers() == []  # nobody trains
    chaos_runs.kill(mark)
    assert run.end(seconds=60) == -9
    assert chaos._left_processes(mark) == []
    with pytest.raises(chaos_runs.MissedError, match="no trial: the run ended before the end of time"):
        run.wait_for("the end of time", lambda folder: False)


def test_every_fault_and_every_setting_is_in_the_plan():
    planned = chaos.plan(list(FAULTS), list(chaos.SETTINGS), 60, seed=1)
    assert len(planned) == 60 and {fault for fault, _ in planned} == set(FAULTS)
    assert {setting for _, setting in planned} == set(chaos.SETTINGS)
    assert all(setting in FAULTS[fault].settings for fault, setting in planned)
    assert planned != chaos.plan(list(FAULTS), list(chaos.SETTINGS), 60, seed=2)
    with pytest.raises(ConfigError, match="none of these faults"):
        chaos.plan(["kill_one"], ["cached"], 1, seed=0)


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["the line of train at step 3 is missing"], 3)])
def test_the_exit_code_and_the_table(monkeypatch, tmp_path, capsys, problems, code):
    def trial(self, number, fault, setting):
        found = problems if fault.name == "kill" else []
        return chaos.Result(number, fault.name, setting, resumed="resumed at step 8", problems=found)

    monkeypatch.setattr(chaos.Trials, "run", trial)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    args = {"faults": ["kill", "sigt*m"], "settings": ["cached"], "trials": 4, "seed": 0, "quick": False, "json": False}
    assert chaos.main(dataclasses.make_dataclass("Args", [*args, "dir"])(*args.values(), str(tmp_path))) == code
    shown = capsys.readouterr().out.splitlines()
    good, what = ("**0**", f"{problems[0]} (2)") if problems else ("2", "resumed at step 8 (2)")
    assert shown[2:] == [
        f"| `kill` | cached | 2 | {good} | {what} |",
        "| `sigterm` | cached | 2 | 2 | resumed at step 8 (2) |",
        f"| all | | 4 | {2 if problems else 4} | |",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [["--quick"], ["--faults=kill_one,kill_in_save", "--settings=two_processes", "--trials=2"]]
)
def test_the_command(flags, tmp_path):
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "perex_t5x.chaos", *flags, f"--dir={tmp_path / 'chaos'}"]
    result = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "| all | |" in result.stdout
