"""The fault table: what Cloud Storage does to a run that saves and writes, and what comes of it."""

import json
import subprocess
import sys

import pytest

from tests.distributed import support

# Shorter than in buckets.py, so that the test does not take minutes.
LIMITS = {
    "GCS_REQUEST_IDLE_TIMEOUT_SECS": "2",
    "GCS_RETRY_CONFIG_MAX_RETRIES": "3",
    "GCS_RETRY_CONFIG_MAX_DELAY_TIME_US": "300000",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "2",
}


@pytest.fixture
def start(cloud_storage):
    """Starts `tests.bucket_writer`; returns a function that gives it a command, and returns its answer."""
    processes = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.bucket_writer", f"{cloud_storage.bucket}/run"],
            cwd=support.ROOT, env=support.environment(**cloud_storage.environment, **LIMITS),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)

        def tell(*command):
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        assert json.loads(process.stdout.readline()) == {"value": "ready"}
        return tell

    yield start
    for process in processes:
        process.kill()
        process.wait()


def whole(cloud):
    names = cloud.objects("run/checkpoint_")
    return sorted(
        int(n.split("/")[1].removeprefix("checkpoint_")) for n in names if n.count("/") == 2 and "commit" in n
    )


@pytest.mark.slow
def test_fault_table(cloud_storage, start):
    cloud, step, tell = cloud_storage, 1, start()
    assert tell("save", 1) == {"value": 1}

    # Retried, by TensorFlow, TensorStore and the client library: nothing is lost, and two checkpoints are kept.
    busy = [{"action": "answer", "code": 503, "every": 7, "times": 3}]
    hangs = {"action": "hang", "seconds": 60, "operation": "insert", "times": 1}
    broken = [
        {**hangs, "name": "/d/"},  # of TensorStore
        {**hangs, "name": "/checkpoint_3/commit_success"},  # of TensorFlow
        {"action": "tear", "every": 4, "times": 4},
        {"action": "lose_answer", "every": 5, "times": 3, "operation": "insert|start|delete"},
    ]
    table = {
        "429 and 503": ({"writes_per_second": 1, "rules": busy}, {429, 503}),
        "connections that hang, torn uploads, lost answers": ({"rules": broken}, {0}),
        "slow": ({"latency": 0.02, "bytes_per_second": 300_000}, set()),
    }
    for row, (faults, codes) in table.items():
        step += 1
        cloud.faults(**faults)
        assert tell("save", step) == {"value": step}, row
        assert tell("write", "status.json", f"{step}") == tell("write", "status.json", f"{row}") == {"value": None}, row
        assert cloud.get("run/status.json").decode() == row
        assert codes <= {request["code"] for request in cloud.requests()}, row
        cloud.faults()
        assert whole(cloud) == [step - 1, step], row
        assert tell("restore") == {"value": step}, row

    # Not to be overcome: one error, whose reason says whether the same may work later; earlier checkpoints are whole.
    endless = {
        "an outage": ({"rules": [{"action": "answer", "code": 503, "operation": "insert|start"}]}, "error", True),
        "uploads that are always torn": ({"rules": [{"action": "tear", "name": "commit_success"}]}, "error", True),
        "no permission to write": ({"deny": ["storage.objects.create"]}, "configuration", False),
    }
    for row, (faults, reason, retryable) in endless.items():
        cloud.faults(**faults)
        answer = tell("save", step + 1)
        assert (answer["reason"], answer["retryable"]) == (reason, retryable), (row, answer)
        assert (
            "writing a checkpoint to gs://" in answer["error"] and "Earlier checkpoints are complete" in answer["error"]
        )
        cloud.faults()
        assert step in whole(cloud) and step + 1 not in whole(cloud), row
        assert tell("restore") == {"value": step}, row
    assert "storage.objects.create" in answer["error"]
    tell = start()  # as a launcher does
    assert tell("save", step + 1) == {"value": step + 1}  # over what was half-written
    assert tell("restore") == {"value": step + 1} and whole(cloud) == [step, step + 1]
