"""One holder at a time of an object in a bucket."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from perex_t5x import buckets, lease


@pytest.fixture
def path(cloud_storage_in_process):
    buckets.client.cache_clear()
    return f"{cloud_storage_in_process.bucket}/sweep/.lock"


def leave(cloud, **changes):
    """A lease of another process."""
    holder = lease.Holder("another-host", 17, "token", time.time())
    cloud.put("sweep/.lock", json.dumps(dataclasses.asdict(dataclasses.replace(holder, **changes))).encode())


def test_one_at_a_time(cloud_storage_in_process, path):
    with lease.held(path):
        with pytest.raises(lease.HeldError, match=f"process {os.getpid()} on {socket.gethostname()}"), lease.held(path):
            pass
        assert json.loads(cloud_storage_in_process.get("sweep/.lock"))["process"] == os.getpid()
    assert cloud_storage_in_process.objects() == []
    with lease.held(path):
        pass


def test_what_is_stale_is_taken_over(cloud_storage_in_process, path, monkeypatch):
    cloud = cloud_storage_in_process
    leave(cloud)
    with pytest.raises(lease.HeldError, match="process 17 on another-host"), lease.held(path):
        pass
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    leave(cloud, host=socket.gethostname(), process=ended.pid)  # of this machine, and gone
    with lease.held(path):
        pass
    leave(cloud)
    monkeypatch.setattr(lease, "STALE", -1.0)
    with lease.held(path):
        assert json.loads(cloud.get("sweep/.lock"))["process"] == os.getpid()


def test_it_is_renewed_and_a_loss_is_told(cloud_storage_in_process, path, monkeypatch):
    monkeypatch.setattr(lease, "PERIOD", 0.1)
    cloud, lost = cloud_storage_in_process, threading.Event()
    with lease.held(path, on_lost=lost.set):
        first = cloud.get("sweep/.lock")
        while cloud.get("sweep/.lock") == first:
            time.sleep(0.05)
        assert not lost.is_set()
        leave(cloud)
        assert lost.wait(60)
    assert json.loads(cloud.get("sweep/.lock"))["process"] == 17  # not ours to remove


def test_an_answer_that_is_lost_is_not_another_holder(cloud_storage_in_process, path):
    cloud_storage_in_process.faults(rules=[{"action": "lose_answer", "operation": "insert", "times": 1}])
    with lease.held(path):
        assert cloud_storage_in_process.objects() == ["sweep/.lock"]
    assert cloud_storage_in_process.objects() == []
