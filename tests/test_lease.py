"""One holder at a time: of an object in a bucket, and of a file."""

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


# --- a file -----------------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from perex_t5x import lease
lease.Lease(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / ".writer"


def hold_in_another_process(file):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def leave_file(file, **changes):
    """A lease of a process on another machine."""
    holder = lease.Holder("another-host", 17, "token", time.time(), "another-boot pid:[1]", "5")
    file.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(holder, **changes))))


def test_one_at_a_time_in_a_folder(file):
    with lease.held(str(file)):
        named = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(lease.HeldError, match=named), lease.held(str(file), patient=True):
            pass
    assert not file.exists()
    with lease.held(str(file)):
        pass


def test_a_live_process_is_refused_and_a_killed_one_followed_at_once(file):
    process = hold_in_another_process(file)
    with pytest.raises(lease.HeldError, match=f"process {process.pid} on"), lease.held(str(file), patient=True):
        pass
    process.kill()
    process.wait()
    assert file.exists()
    with lease.held(str(file)):  # not patient: it would be refused
        assert json.loads(file.read_text())["process"] == os.getpid()
    assert not file.exists()


def test_another_machine_is_waited_for_until_it_has_been_silent(file, monkeypatch):
    monkeypatch.setattr(lease, "SILENCE", 0.2)
    leave_file(file)
    with pytest.raises(lease.HeldError, match="process 17 on another-host"), lease.held(str(file)):
        pass
    with lease.held(str(file), patient=True):
        assert json.loads(file.read_text())["process"] == os.getpid()
    leave_file(file)
    os.utime(file, (time.time() - lease.STALE - 1,) * 2)
    with lease.held(str(file)):  # silent for long
        pass


@pytest.mark.parametrize("where", ["file", "bucket"])
def test_a_sign_of_life_of_another_machine(where, file, cloud_storage_in_process, path, monkeypatch):
    monkeypatch.setattr(lease, "SILENCE", 60.0)
    monkeypatch.setattr(lease, "_POLL", 0.05)
    cloud, looked = cloud_storage_in_process, []
    sleep = time.sleep
    leave_file(file)
    leave(cloud)

    def renewed(seconds):
        looked.append(seconds)
        os.utime(file, (1, time.time() + len(looked)))
        leave(cloud)
        sleep(0.01)

    monkeypatch.setattr(lease.time, "sleep", renewed)
    with pytest.raises(lease.HeldError, match="process 17 on another-host"):
        with lease.held(str(file) if where == "file" else path, patient=True):
            pass
    assert looked


def test_a_later_attempt_of_the_same_launch_does_not_wait(file, cloud_storage_in_process, path, monkeypatch):
    of_launch = {"launch": "launch-1/job", "attempt": "3"}
    leave_file(file, **of_launch)
    leave(cloud_storage_in_process, **of_launch)
    for name, value in zip((*lease.LAUNCH, lease.ATTEMPT), ("launch-1", "job", "3"), strict=True):
        monkeypatch.setenv(name, value)
    for at in (str(file), path):
        with pytest.raises(lease.HeldError), lease.held(at):  # two of one attempt
            pass
    monkeypatch.setenv(lease.ATTEMPT, "4")
    for at in (str(file), path):
        with lease.held(at):
            pass
    leave_file(file, **of_launch)
    monkeypatch.setenv(lease.LAUNCH[0], "launch-2")
    with pytest.raises(lease.HeldError), lease.held(str(file)):
        pass


def test_another_process_with_the_number_of_the_holder(cloud_storage_in_process, path):
    here = lease.Holder.this_process("token")
    changes = {"host": here.host, "process": here.process, "kernel": here.kernel}
    leave(cloud_storage_in_process, **changes, born=here.born)
    with pytest.raises(lease.HeldError), lease.held(path):
        pass
    leave(cloud_storage_in_process, **changes, born="1")
    with lease.held(path):
        pass


@pytest.mark.parametrize("content", ["", "17", "[]", "\x00\xff", "{"])
def test_a_file_that_is_not_ours(file, content):
    file.write_text(content)
    with lease.held(str(file)):
        assert json.loads(file.read_text())["process"] == os.getpid()
    assert not file.exists()


def test_without_locks_of_the_file_system(file, monkeypatch):
    monkeypatch.setattr(lease, "_lock", lambda file, kind: None)
    with lease.held(str(file)):
        with pytest.raises(lease.HeldError, match=f"process {os.getpid()}"), lease.held(str(file)):
            pass
    process = hold_in_another_process(file)
    with pytest.raises(lease.HeldError, match=f"process {process.pid}"), lease.held(str(file)):
        pass
    process.kill()
    process.wait()
    with lease.held(str(file)):
        pass


def test_a_file_is_renewed_and_its_loss_is_told(file, monkeypatch):
    monkeypatch.setattr(lease, "PERIOD", 0.05)
    lost = threading.Event()
    held = lease.Lease(str(file), on_lost=lost.set)
    held.acquire()
    first = file.stat().st_mtime_ns
    while file.stat().st_mtime_ns == first:
        time.sleep(0.02)
    file.unlink()  # by hand
    while not file.exists():
        time.sleep(0.02)
    assert not held.is_lost
    another = file.with_name("another")
    leave_file(another)
    another.replace(file)
    assert lost.wait(60) and held.is_lost
    held.release()
    assert json.loads(file.read_text())["process"] == 17  # not ours to remove
