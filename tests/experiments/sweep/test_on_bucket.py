"""A sweep with --dir=gs://..., and its report, against the stand-in for Cloud Storage."""

import csv
import io
import json
import os
import sys

import pytest

from perex_t5x import buckets, cli, lease
from perex_t5x.errors import ConfigError
from perex_t5x.experiments import report
from perex_t5x.experiments.report import __main__ as report_command
from perex_t5x.experiments.sweep.directory import InUseError
from perex_t5x.experiments.sweep.runs import Run
from tests.experiments.sweep.support import plan


@pytest.fixture
def cloud(cloud_storage_in_process, tmp_path, monkeypatch):
    buckets.client.cache_clear()
    monkeypatch.chdir(tmp_path)
    yield cloud_storage_in_process
    assert not [name for name in os.listdir(tmp_path) if name.startswith("gs:")]


def test_runs_in_one_process_and_their_report(cloud, tmp_path):
    made, folder = (
        plan(seeds=[0], batch_sizes=[16], rule=["sqrt", "linear"], base_batch_size=16),
        f"{cloud.bucket}/a/sweep",
    )
    with lease.held(f"{folder}/.lock"), pytest.raises(InUseError, match="a sweep is running in this folder"):
        made.run(folder, together=True, overview=io.StringIO())
    results = made.run(folder, together=True, overview=io.StringIO())
    assert [r.status for r in results] == ["done"] * len(made.runs), results
    objects = cloud.objects("a/sweep/")
    for run in made.runs:
        assert {f"a/sweep/runs/{run.name}/{name}" for name in ("result.json", "config.gin")} <= set(objects)
        assert f"{folder}/runs/{run.name}'" in cloud.get(f"a/sweep/runs/{run.name}/config.gin").decode()
    rows = list(csv.DictReader(io.StringIO(cloud.get("a/sweep/results.csv").decode())))
    assert [(row["name"], row["status"]) for row in rows] == [(run.name, "done") for run in made.runs]
    assert "a/sweep/.lock" not in objects and "a/sweep/sweep.json" in objects

    # The same again runs nothing.
    before = cloud.stats()["writes"]
    again = made.run(folder, together=True, overview=io.StringIO())
    assert [r.eval_loss for r in again] == [r.eval_loss for r in results]
    changed = {name for name, count in cloud.stats()["writes"].items() if count != before.get(name)}
    assert {name for name in changed if ".access_" not in name} == {
        f"a/sweep/{n}" for n in ("sweep.json", "results.csv", ".lock")
    }

    # And its page, of the sweep and of a folder of sweeps; written here, or beside it.
    page = report.make([folder])
    assert all(run.name in page for run in made.runs) and made.runs[0].name in report.make([f"{cloud.bucket}/a"])
    out = f"{folder}/report.html"
    with pytest.raises(SystemExit) as end:
        report_command.main([folder, f"--out={out}", f"--figures={folder}/figures"])
    assert not end.value.code and cloud.get("a/sweep/report.html").startswith(b"<!")
    assert [name for name in cloud.objects("a/sweep/figures/") if name.endswith(".svg")]


# Behaves as `perex_t5x.train`, whose folder is in the bucket.
STAND_IN = """
import json, os, sys
from perex_t5x import buckets
bucket, name = buckets.split(sys.argv[1])
line = {"step": 8, "name": "training_eval/a", "loss_per_nonpadding_target_token": 1.5}
buckets.client().bucket(bucket).blob(f"{name}/metrics.jsonl").upload_from_string(json.dumps(line) + "\\n")
print("step 8/8")
code = int(sys.argv[2])
with open(os.environ["PEREX_T5X_STATUS_FILE"], "w") as f:
    json.dump({"reason": "configuration" if code else "done", "exit_code": code, "message": "no" * code}, f)
sys.exit(code)
"""


def test_runs_as_processes(cloud, tmp_path, monkeypatch):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(os.path.dirname(os.path.dirname(cli.__file__))))

    def command(self, root, python=None):
        return [sys.executable, str(tmp_path / "stand_in.py"), self.folder(root), "2" if self.seed else "0"]

    monkeypatch.setattr(Run, "command", command)
    folder = f"{cloud.bucket}/sweep"
    done, failed = plan(seeds=[0, 1]).run(folder, parallel=2, overview=io.StringIO())
    assert (done.status, done.eval_loss) == ("done", 1.5)
    assert failed.status == "failed" and f"(see {folder}/runs/s1/log.txt)" in failed.error
    assert cloud.get("sweep/runs/s0/log.txt") == b"step 8/8\n"
    assert json.loads(cloud.get("sweep/runs/s0/result.json"))["eval_loss"] == 1.5
    assert "sweep/runs/s1/result.json" not in cloud.objects()


def test_a_misspelled_bucket_is_no_local_folder(cloud):
    with pytest.raises(ConfigError, match="--dir = 'gs:/bucket/sweep': a bucket is written gs://bucket/sweep"):
        plan(seeds=[0]).run("gs:/bucket/sweep", together=True)
    with pytest.raises(ConfigError, match="there is no bucket gs://no-such-bucket"):
        plan(seeds=[0]).run("gs://no-such-bucket/sweep", together=True)
    with pytest.raises(ConfigError, match="there is no such folder"):
        report.make([f"{cloud.bucket}/nothing"])
