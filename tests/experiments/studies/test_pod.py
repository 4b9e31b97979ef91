"""Studies at the size of a pod: their files, stage by stage, the chip-hours, and what the launchers make of them."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.experiments import studies
from perex_t5x.experiments.studies import pod
from perex_t5x.experiments.sweep import Sweep
from perex_t5x.experiments.sweep.directory import Folder
from perex_t5x.experiments.sweep.runs import Result
from perex_t5x.launching import gin_check
from perex_t5x.launching.spec import Job

SHORT = ("files = {'optimizer': ['optimizers/adamw.gin']}", "seeds = [0, 1, 2]")
ROOT = Path(__file__).parents[3]


def enlarged(name, model="150m", *bindings):
    found = studies.find(name)
    return found, pod.overridden(pod.enlarged(found, Sweep.load(found.file), model), bindings)


def written(folder, name, model="150m", *bindings):
    found, sweep = enlarged(name, model, *bindings)
    stage = pod.next_stage(found, sweep, str(folder / "results"), 1)
    if stage.number:
        pod.write(found, stage, pod.all_runs(found, sweep), model, str(folder))
    return stage


def flags_of(folder):
    return dict(line[2:].split("=", 1) for line in (folder / "stage.flags").read_text().splitlines())


@pytest.mark.parametrize("model", ["150m", pytest.param("1_2b", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", studies.NAMES)
def test_every_study_has_files_for_every_model(tmp_path, name, model):
    """What is written describes exactly the runs of the stage, with the large model, its mesh and C4."""
    stage = written(tmp_path, name, model, "seeds = [0, 1]")
    flags = flags_of(tmp_path)
    plan = Sweep.load(flags["sweep"]).plan(check=False)
    chosen = [run for run in plan.runs if re.search(flags["only"], run.name)]
    assert {run.name for run in chosen} == {run.name for run in stage.runs} and chosen
    data_shards = pod.Slice.of(pod.TARGETS[model].topology).chips
    for run in chosen:
        assert f"models/{model}.gin" in run.files and pod.TARGETS[model].mesh in run.files
        assert not any("nano" in file or "tiny" in file for file in run.files)
        assert "MIXTURE_OR_TASK_NAME = 'c4_en_lm'" in run.bindings and run.batch_size % data_shards == 0
        assert run.learning_rate <= 0.02
    readme = (tmp_path / "README.md").read_text()
    assert f"{len(chosen)} runs, at least " in readme and "{" not in readme.replace("${", "")
    assert f"--flagfile={tmp_path}/stage.flags" in readme


def test_a_stage_follows_from_the_results_of_the_one_before(tmp_path):
    first = written(
        tmp_path, "preconditioner", "150m", "files = {'optimizer': ['optimizers/adamw.gin']}", "seeds = [0, 1, 2]"
    )
    assert first.number == 1 and len(first.runs) == 4 * 2 and flags_of(tmp_path)["name"] == "preconditioner-150m-1"

    def finish(stage, best):
        for run in stage.runs:
            loss = 2 + abs(math.log2(run.values["rate_factor"] / best))
            Folder(str(tmp_path / "results")).write_result(run, Result(run.name, "done", True, eval_loss=loss))

    def again():
        return written(tmp_path, "preconditioner", "150m", *SHORT)

    finish(first, best=0.5)  # on the edge
    second = again()
    assert second.number == 2 and {run.values["rate_factor"] for run in second.runs} == {1.0}
    finish(second, best=0.5)
    third = again()
    assert third.number == 3 and [(run.values["rate_factor"], run.seed) for run in third.runs] == [(0.5, 2)]
    assert flags_of(tmp_path)["name"] == "preconditioner-150m-3"
    finish(third, best=0.5)
    assert again().number == 0


def test_chip_hours_are_steps_times_cycles():
    found, sweep = enlarged("preconditioner", "1_2b", "seeds = [0]", "rate_factors = [0.25]")
    (adamw,) = [run for run in pod.all_runs(found, sweep) if run.values["optimizer"].endswith("adamw.gin")]
    target = pod.TARGETS["1_2b"]
    seconds = target.cycles[pod.PLAIN] / 1.5e9 * adamw.batch_size / target.rows
    assert target.chip_hours(adamw) == pytest.approx(10_000 * seconds * 256 / 3600, rel=0.01)
    hours = pod.chip_hours(pod.all_runs(found, sweep), "1_2b")
    assert set(hours) == {pod.PLAIN, pod.STATISTICS} and hours[pod.STATISTICS] > 3 * hours[pod.PLAIN]


def test_problems_are_said_and_nothing_is_written(tmp_path):
    with pytest.raises(ConfigError, match="--model=8b: --scale=pod is for 150m and 1_2b"):
        enlarged("preconditioner", "8b")
    found, sweep = enlarged("preconditioner", "150m", "rate_factors = []", "batch_sizes = [0]")
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*batch_sizes.*rate_factors"):
        pod.next_stage(found, sweep, str(tmp_path), 1)
    found, sweep = enlarged("noise_scale")
    stage = pod.next_stage(found, sweep, str(tmp_path), 1, gin_bindings=["EVAL_STEPS = \\\n 5"])
    with pytest.raises(ConfigError, match="one on each line"):
        pod.write(found, stage, stage.runs, "150m", str(tmp_path / "a"))
    assert not list(tmp_path.iterdir())


def run_command(*argv):
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def launched(folder):
    """A dry run of TPU VMs, and the manifest for GKE; returns what the first says, and the second's jobs."""
    flags = [f"--flagfile={folder}/stage.flags", "--dir=gs://my-bucket/x", "--tfds_data_dir=gs://my-bucket/tfds"]
    where = ["--project=my-project", "--zone=us-west4-a", "--allow_uncommitted"]
    said = run_command(str(ROOT / "launch/gcloud_tpu.py"), "launch", "--dry_run", *flags, *where)
    skipped = ["--skip_gin_check", "--skip_preflight", "--image=registry/perex:1"]
    run_command(str(ROOT / "launch/gke.py"), "manifest", *flags, *skipped, f"--out={folder}/manifest.yaml")
    return said.stdout + said.stderr, (folder / "manifest.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model", pod.TARGETS)
@pytest.mark.parametrize("name", studies.NAMES)
def test_the_launchers_take_the_files(tmp_path, name, model):
    stage = written(tmp_path, name, model)
    said, manifest = launched(tmp_path)
    launch = f"{pod.launch_name(name, model)}-1"
    what = f"{len(stage.runs)} runs, one after another, into gs://my-bucket/x"
    assert what in said and f"slices    1 x {pod.TARGETS[model].topology}" in said
    assert f"queued-resources create {launch} " in said and f"name: {launch}" in manifest
    assert all(run.name in manifest for run in stage.runs)


@pytest.mark.slow
def test_the_command_writes_what_gcloud_takes(tmp_path):
    module = "perex_t5x.experiments.study"
    said = run_command("-m", module, "noise_scale", "--scale=pod", f"--out={tmp_path}", "--sweep.seeds=[0]").stdout
    assert said.startswith("noise_scale with 150m, stage 1: 2 runs, at least ") and "README.md" in said
    flags = [f"--flagfile={tmp_path}/stage.flags", "--dir=gs://my-bucket/x", "--project=p-roject", "--zone=us-west4-a"]
    done = run_command(str(ROOT / "launch/gcloud_tpu.py"), "launch", "--dry_run", *flags, "--allow_uncommitted")
    assert "2 runs, one after another, into gs://my-bucket/x" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", studies.NAMES)
def test_the_configurations_can_be_built_on_the_slice(name):
    """As the launchers' check does, with text and bytes from here in place of C4 and its vocabulary."""
    found, sweep = enlarged(
        name, "150m", "seeds = [0]", "rate_factors = [0.25]" if name != "noise_scale" else "seeds = [0]"
    )
    here = ["MIXTURE_OR_TASK_NAME = 'python_stdlib_lm'", "VOCABULARY = @seqio.ByteVocabulary()"]
    if name == "overhead":
        sweep = pod.overridden(sweep, ["rate_factors = None"])
    runs = pod.next_stage(found, sweep, "nowhere", 0, gin_bindings=here).runs
    jobs = [Job(run.name, tuple(run.command("gs://my-bucket/x")[1:]), "gs://my-bucket/x", run.batch_size, run.train_steps,
                run.group) for run in runs]  # fmt: skip
    report = gin_check.check(jobs, pod.TARGETS["150m"].topology, 1)
    assert report.problems == () and json.loads(report.to_json())["built"]
