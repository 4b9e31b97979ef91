"""What a launch leaves in the bucket, and what a machine that can read the bucket alone gets out of it."""

import datetime
import json
import os
import subprocess
import sys

import pytest

from perex_t5x.errors import ConfigError, Reason
from perex_t5x.launching import collect, launch_folder, worker
from perex_t5x.launching.launch_folder import LaunchFolder
from perex_t5x.launching.shell import Commands
from perex_t5x.launching.spec import Job, Work


def mark(job, status, **more):
    os.makedirs(job.model_dir, exist_ok=True)
    content = {"arguments": worker.command_fingerprint(job), "status": status, "exit": 0, "error": "", **more}
    with open(f"{job.model_dir}/finished.json", "w") as f:
        json.dump(content, f)


def test_status_of_a_sweep(tmp_path):
    jobs = tuple(Job(name, ("-m", "x", name), str(tmp_path / "runs" / name)) for name in "abc")
    folder = LaunchFolder.of(str(tmp_path), "w")
    with pytest.raises(ConfigError, match="no launch with the name 'w'"):
        collect.status(str(tmp_path), "w")
    folder.write(json.loads(Work("s", str(tmp_path), jobs, {}, launch="w", launch_id="id").to_json()), "jobs.json")
    assert collect.status(str(tmp_path), "w").lines() == ["w: no host has begun yet"]
    with pytest.raises(ConfigError, match="It has w"):
        collect.status(str(tmp_path), "v")
    mark(jobs[0], "done")
    mark(jobs[1], "failed", exit=5, error="diverged at step 7: the loss is nan")
    folder.write_attempts("c", "id", [launch_folder.Attempt("id.0", "", None), launch_folder.Attempt("id.1", "", 40)])
    os.makedirs(f"{jobs[2].model_dir}/checkpoint_40/state/_METADATA")
    with open(f"{jobs[2].model_dir}/metrics.jsonl", "w") as f:
        f.write('{"step": 50, "name": "train", "loss": 2.5}\n{"step": 50, "name": "training_eval/x", "loss": 3.0}\n')
    state = {"phase": "running", "job": "c", "step": 55, "time": launch_folder.now(), "attempt": "id.1"}
    folder.write(state, "state.json")
    found = collect.status(str(tmp_path), "w")
    assert (found.done, found.failed["b"][:8], found.checkpoint, found.attempts) == (("a",), "diverged", 40, 2)
    assert found.metrics["step"] == 50 and not found.ended and found.silent_seconds < 60
    assert found.lines()[0].startswith("w: running c, step 55, as of 20")
    assert found.lines()[1:] == [
        "  1 of 3 jobs done, 1 failed",
        "  failed: b: diverged at step 7: the loss is nan",
        "  c: newest checkpoint at step 40, started 2 time(s)",
        "  c: loss 2.5 at step 50",
    ]
    ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=10)
    folder.write({**state, "time": launch_folder.as_time(ago.timestamp())}, "state.json")
    assert "silent for 10 minutes" in collect.status(str(tmp_path), "w").lines()[1]
    for reason, ended in ((Reason.SOME_FAILED, True), (Reason.PEER_LOST, False)):
        folder.write({**state, "phase": "ended", "reason": str(reason)}, "state.json")
        found = collect.status(str(tmp_path), "w")
        assert (found.reason, found.ended) == (reason, ended)
    assert found.lines()[0].startswith("w: ended (peer_lost), as of ")


def test_a_worker_on_a_bucket_and_what_another_machine_sees(cloud_storage_in_process, tmp_path, monkeypatch):
    """The first host of a sweep: one run is done, the next fails; then everything is read and downloaded without gcloud."""
    cloud = cloud_storage_in_process
    root = f"{cloud.bucket}/x"
    failing = "import sys; print('hello', flush=True); raise ValueError('some bug')"
    jobs = (
        Job("a", ("-c", "print('hello of a')"), f"{root}/runs/a"),
        Job("b", ("-c", failing), f"{root}/runs/b"),
    )
    (tmp_path / "jobs.json").write_text(Work("s", root, jobs, {}, launch="w", launch_id="id").to_json())
    cloud.put("x/runs/b/checkpoint_3/commit_success.txt", b"")
    cloud.put("x/runs/b/checkpoint_3/state/_METADATA", b"")
    cloud.put("x/runs/b/checkpoint_5/state/d", b"")  # not whole
    cloud.put("x/.launch/w/bundle-0123abcd.tar.gz", b"")
    cloud.put("x/runs/a/metrics/0000000001.jsonl", b'{"step": 1, "name": "train", "loss": 2.5}\n')
    cloud.faults(writes_per_second=1)
    command = [sys.executable, "-m", "perex_t5x.launching.worker", f"--jobs={tmp_path / 'jobs.json'}"]
    more = {worker.HOST_INDEX: "0", launch_folder.ATTEMPT: "0", "PEREX_T5X_REPORT_SECONDS": "1"}
    done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not updated" not in done.stderr
    cloud.faults()
    logs = "x/.launch/w/logs/id.0/0-0000"
    assert cloud.get(f"{logs}/job-a.00000.log") == b"hello of a\n"
    assert b"ValueError: some bug" in cloud.get(f"{logs}/job-b.00000.log")
    assert not [name for name in cloud.objects() if name.endswith("/")], "no folders are made"

    found = collect.status(root, "w")
    assert (found.phase, found.reason, found.done, found.job) == ("ended", Reason.ERROR, ("a",), "b")
    assert found.checkpoint == 3 and found.attempts == 1
    assert found.first_error.host == "0-0000" and found.first_error.message == "ValueError: some bug"
    assert found.first_error.traceback.startswith("Traceback (most recent call last)")

    monkeypatch.setenv("PATH", "")
    counts = []
    for _ in range(2):
        before = len(cloud.requests())
        assert collect.collect(root, "w", str(tmp_path / "out"), Commands()).jobs == jobs
        counts.append(sum(request["operation"] == "read" for request in cloud.requests()[before:]))
    assert counts[0] > 5 and counts[1] == 0, "what is here already is not downloaded again"
    here = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {"runs/a/finished.json", "runs/a/metrics/0000000001.jsonl", f"{logs[2:]}/job-b.00000.log"} <= here
    assert not [name for name in here if "checkpoint_" in name or "bundle" in name]
