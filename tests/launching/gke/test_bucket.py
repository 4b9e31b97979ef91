"""What launch/gke.py says from the bucket: with the cluster after a failure, and without any cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from perex_t5x.errors import ConfigError, Reason, UnreachableError
from perex_t5x.launching import launch_folder
from perex_t5x.launching.gke import bucket, command
from perex_t5x.launching.launch_folder import HostError, LaunchFolder
from perex_t5x.launching.spec import Job, Work
from tests.launching.gke.test_command import Kubernetes


def jobs_json(root, launch, *names):
    jobs = tuple(Job(name, ("-m", "perex_t5x.train"), f"{root}/runs/{name}") for name in names)
    return json.loads(Work("sqrt", root, jobs, sweep={}, launch=launch, launch_id="l").to_json())


@pytest.fixture
def root(cloud_storage_in_process):
    return f"{cloud_storage_in_process.bucket}/sweeps/sqrt"


@pytest.mark.slow
def test_a_failed_launch_shows_its_first_error(tmp_path, cloud_storage, cloud_storage_in_process, monkeypatch, capsys):
    cluster, root = Kubernetes(tmp_path), f"{cloud_storage.bucket}/sqrt"
    cluster.scenario(timeline=["running", "failed"], exit_code=Reason.NO_PROGRESS.exit_code)
    done = cluster.run("--name=sqrt", f"--dir={root}", **cloud_storage.environment)
    assert done.returncode == Reason.NO_PROGRESS.exit_code, done.stderr
    assert "no_progress: a restart would end in the same way" in done.stderr and "no host has begun" in done.stderr
    # As the first pod would run it: its job fails.
    _, config_map = cluster.created()
    work = json.loads(config_map["data"]["file-0"])
    work["jobs"][0]["arguments"] = ["-c", "print('one chip is lost'); raise SystemExit(1)"]
    (tmp_path / "jobs.json").write_text(json.dumps(work))
    variables = {"TPU_WORKER_ID": "0", "PEREX_T5X_ATTEMPT": "3", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-m", "perex_t5x.launching.worker", f"--jobs={tmp_path / 'jobs.json'}"],
        env=cluster.environment(**cloud_storage.environment, **variables),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    status = cluster.run("status", "--name=sqrt", **cloud_storage.environment)
    assert status.returncode == 0, status.stderr
    assert "sqrt: failed" in status.stdout
    ours = status.stdout[status.stdout.index("sqrt: ended (error), as of") :].splitlines()
    [first] = [line for line in ours if line.startswith("  first error")]
    assert "first error of the newest attempt that failed: host 0 (slice 0)" in first and "one chip is lost" in first
    # The same from a machine without kubectl: what ran is known from the bucket.
    monkeypatch.setenv("PATH", "/nowhere")
    flags = {"dir": root, "name": "sqrt", "sweep": None, "gin_file": [], "dry_run": False, "poll_seconds": 0.0}
    assert command.main(SimpleNamespace(**flags), ["status"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert first in said and said == ours[: len(said)]
    [launch] = bucket.find(root, "sqrt")
    assert bucket.merged([launch]).launch_id == work["launch_id"]
    assert launch.folder.entries("logs", f"{work['launch_id']}.3") == ["0-0000"]
    with pytest.raises(ConfigError, match="holds no launch with the name 'other'.* It has sqrt"):
        bucket.find(root, "other")


def test_a_bucket_that_may_not_be_read_is_a_note(tmp_path):
    cluster = Kubernetes(tmp_path)
    cluster.scenario(timeline=["running", "failed"], exit_code=2)
    done = cluster.run("--name=sqrt", HOME=str(tmp_path))
    assert done.returncode == 2 and "which cannot be read from here: " in done.stderr
    assert "a configuration error, see the log" in done.stderr


def test_following_from_the_bucket(root, capsys):
    folders = [LaunchFolder.of(root, f"sqrt-{n}") for n in (0, 1)]
    for n, folder in enumerate(folders):
        folder.write(jobs_json(root, f"sqrt-{n}", f"run{n}"), "jobs.json")
    launches = bucket.find(root, "sqrt")
    assert [launch.name for launch in launches] == ["sqrt-0", "sqrt-1"]
    assert [job.name for job in bucket.merged(launches).jobs] == ["run0", "run1"]

    def state(n, attempt, **values):
        folders[n].write({"attempt": f"l.{attempt}", "time": launch_folder.now(), **values}, "state.json")

    def log(n, attempt, part, text):
        launch_folder.write_atomically(folders[n].join("logs", f"l.{attempt}", "0-0000", f"job-a.{part:05}.log"), text)

    def preempted():
        state(0, 0, phase="ended", reason="interrupted")
        log(0, 0, 1, "three\nfour\n")

    def ended():
        state(0, 1, phase="ended", reason="done")
        log(0, 1, 0, "five\n")
        failure = HostError(launch_folder.now(), "0-0007", "run1", Reason.DIVERGED, 5, "the loss is nan", kind="result")
        folders[1].write_error("l.0", failure)
        state(1, 0, phase="ended", reason="some_failed")

    state(0, 0, phase="running", job="run0", number=1, jobs=1, step=7)
    log(0, 0, 0, "one\ntwo\n")
    log(0, 0, 1, "three\n")
    todo = [preempted, ended]
    assert bucket.follow(launches, 0.0, lambda _: todo.pop(0)()) == Reason.SOME_FAILED.exit_code
    assert todo == []
    said = capsys.readouterr()
    assert said.out == "three\nfour\nfive\n"  # what was there before, from its newest part on
    lines = said.err.splitlines()
    assert [line for line in lines if line.startswith("sqrt-0")] == [
        "sqrt-0: running run0",
        "sqrt-0: ended (interrupted)",
        "sqrt-0: ended (done)",
    ]
    assert "host 7 (slice 0)" in lines[-1] and "the loss is nan" in lines[-1]


def test_a_bucket_that_does_not_answer_is_asked_again(root, monkeypatch, capsys):
    LaunchFolder.of(root, "sqrt").write({"phase": "ended", "reason": "done"}, "state.json")
    launches = [bucket.Launch(root, "sqrt")]
    read, broken = LaunchFolder.read, [OSError("429"), RuntimeError("503")]

    def fails(self, *names):
        if broken:
            raise broken.pop()
        return read(self, *names)

    monkeypatch.setattr(LaunchFolder, "read", fails)
    assert bucket.follow(launches, 0.0, lambda _: None) == 0
    assert "does not answer: RuntimeError: 503" in capsys.readouterr().err
    broken += [OSError("gone")] * 50
    with pytest.raises(UnreachableError, match="30 times"):
        bucket.follow(launches, 0.0, lambda _: None)
    broken.clear()
    LaunchFolder.of(root, "sqrt").write({"phase": "running"}, "state.json")

    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="sqrt continues"):
        bucket.follow(launches, 0.0, interrupted)


def test_stopping_through_the_bucket(root, capsys):
    folder = LaunchFolder.of(root, "sqrt")
    folder.write(jobs_json(root, "sqrt", "run0"), "jobs.json")
    bucket.stop(bucket.find(root, "sqrt"))
    assert folder.stop_requested("l") and not folder.stop_requested("another launch")
    assert "asked to save and stop" in capsys.readouterr().err


def test_without_the_name_of_a_launch():
    flags = {"dir": "gs://bucket/a", "name": None, "sweep": None, "gin_file": [], "dry_run": False, "poll_seconds": 1.0}
    with pytest.raises(ConfigError, match="--name is missing"):
        command.main(SimpleNamespace(**flags), ["status"])
