"""The headline example of docs/launch.md to its end, against stand-ins for gcloud and Cloud Storage.

A sweep on a slice of two hosts, which train as two processes, from C4 in a bucket. The slice is preempted in the middle of
the first run. Only what a laptop cannot do is smaller than in the docs: the model, the slice, the numbers of steps.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys

import pytest

from perex_t5x import metrics
from tests.launching import c4_files
from tests.launching.gcloud.support import ROOT, Cloud, finished, killed_workers, scenario

# What is smaller than in the docs.
SMALLER = {
    "--gin_file=models/150m.gin": ["--gin_file=models/tiny.gin"],
    "--gin_file=meshes/v5e_256.gin": ["--gin_file=meshes/fsdp.gin", "--topology=v5e-16"],
    "--gin.TASK_FEATURE_LENGTHS={'targets': 1024}": ["--gin.TASK_FEATURE_LENGTHS={'targets': 32}"],
    # All of C4 would not fit, and is streamed.
    "--gin.MIXTURE_OR_TASK_NAME=c4_en_lm": [
        "--gin.MIXTURE_OR_TASK_NAME=c4_en_lm",
        "--gin.utils.DatasetConfig.memory_limit_bytes=1000",
    ],
    "--gin.TRAIN_STEPS=20000": ["--gin.TRAIN_STEPS=40", "--gin.utils.SaveCheckpointConfig.period=5"],
    "--gin.WARMUP_STEPS=1000": ["--gin.WARMUP_STEPS=4"],
    "--gin.EVAL_PERIOD=1000": ["--gin.EVAL_PERIOD=20", "--gin.EVAL_STEPS=2"],
    "--sweep.batch_sizes=[256, 512, 1024]": ["--sweep.batch_sizes=[16, 32]"],
    "--sweep.base_batch_size=256": ["--sweep.base_batch_size=16"],
    "--sweep.seeds=[0, 1]": ["--sweep.seeds=[0]"],
}
DEVICES = 16  # of the slice: eight on each of two hosts, in the stand-in


def command_in_docs(bucket: str) -> list[str]:
    """The arguments of the launch in docs/launch.md."""
    text = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
    block = re.search(r"^\S*python launch/gcloud_tpu\.py launch \\\n(.*?)\n```", text, re.MULTILINE | re.DOTALL)[1]
    words = shlex.split(block.replace("\\\n", " ").replace("BUCKET", bucket))
    assert not set(SMALLER) - set(words), "docs/launch.md has another example"
    return ["launch", *(new for word in words for new in SMALLER.get(word, [word]))]


@pytest.fixture
def cloud(tmp_path, cloud_storage):
    one = Cloud(tmp_path)
    one.environment |= cloud_storage.environment
    one.environment |= {"JAX_PLATFORMS": "cpu", "PEREX_T5X_POLL_SECONDS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    yield one
    killed_workers(tmp_path)


def whole_checkpoints(cloud_storage) -> list[str]:
    """The marks of those that are committed; their parts have such marks, too."""
    names = cloud_storage.objects("sweeps/sqrt/runs/")
    return [name for name in names if re.search(r"/checkpoint_\d+/commit_success\.txt$", name)]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


@pytest.mark.slow
def test_the_docs_example_to_the_end(cloud, cloud_storage, tmp_path):
    for path in c4_files.write(tmp_path / "tfds"):
        cloud_storage.put(f"tfds/{path}", (tmp_path / "tfds" / path).read_bytes())
    # Slices find their processes through the metadata of TPU hosts; here the environment says where process 0 is.
    host = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "{worker}",
    }
    host |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // 2}", "JAX_PLATFORMS": "cpu"}
    scenario(cloud, states=["ACCEPTED", "ACTIVE"], host_environment=host)
    bucket = cloud_storage.bucket[len("gs://") :]
    flags = [*command_in_docs(bucket), "--yes", "--allow_uncommitted", "--out=collected"]
    where = ["--project=my-project", "--zone=us-west4-a"]
    process = cloud.popen(str(ROOT / "launch" / "gcloud_tpu.py"), *flags, *where)

    def saved() -> list[str]:
        assert process.poll() is None, process.communicate()
        return whole_checkpoints(cloud_storage)

    cloud.wait_for(saved, seconds=600)
    (cloud.folder / "preempt").touch()
    done = finished(process, timeout=900)  # on two busy cores
    assert done.status == 0, done.err
    assert "the slices were preempted" in done.err

    collected = tmp_path / "collected"
    # Nothing is left behind, and nothing downloaded that nobody reads.
    assert cloud.resources == {}
    assert not list(tmp_path.glob("hosts/*")) and not list(collected.rglob("bundle*.tar.gz"))

    # Both runs ended at their last step, each step was logged once, and the first one was resumed, not repeated.
    sweep = json.loads(cloud_storage.get("sweeps/sqrt/.launch/sqrt-lr/jobs.json"))
    assert len(sweep["jobs"]) == 2
    for job in sweep["jobs"]:
        folder = collected / "runs" / job["name"]
        assert json.loads((folder / "finished.json").read_text())["status"] == "done"
        rows = metrics.read_rows(os.fspath(folder))
        steps = [row["step"] for row in rows if row["name"] == "train" and "loss" in row]
        assert len(steps) == len(set(steps)) and max(steps) == job["train_steps"]
        attempts = [json.loads(path.read_text()) for path in sorted((folder / "goodput").glob("*.json"))]
        assert [attempt["first_step"] > 0 for attempt in attempts] == [
            False,
            *([True] if job is sweep["jobs"][0] else []),
        ]
        # Streamed by both hosts, each its own part of C4.
        states = [n for n in cloud_storage.objects(f"sweeps/sqrt/runs/{job['name']}/") if n.endswith("state.json")]
        shards = {tuple(json.loads(cloud_storage.get(name))["shards"]) for name in states}
        assert shards == {(2, 0), (2, 1)}
    report = subprocess.run(
        [sys.executable, "-m", "perex_t5x.experiments.report", str(collected)],
        env=cloud.environment, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert report.returncode == 0, report.stderr
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "b16_s0" in page and "b32_s0" in page and "goodput" in page.lower()
