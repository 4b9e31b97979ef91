"""The launch's folder: whose error is the first, and when restarts stop."""

import os

import pytest

from perex_t5x.errors import Reason
from perex_t5x.launching import launch_folder
from perex_t5x.launching.launch_folder import ECHO, OWN, RESULT, Attempt, HostError, LaunchFolder


@pytest.fixture
def folder(tmp_path):
    return LaunchFolder.of(str(tmp_path), "run")


def error(host, second, kind=OWN, reason=Reason.ERROR, job="a", message="x"):
    time = f"2025-11-18T12:00:{second:06.3f}Z"
    return HostError(time, launch_folder.host_name(host), job, reason, reason.exit_code, message, kind=kind)


def test_the_cause_comes_before_its_consequences(folder):
    first = error(launch_folder.SLICE + 5, 11.3, message="ValueError: y\nmore")
    for e in (
        error(0, 11.2, ECHO, Reason.PEER_LOST),
        error(1, 10, RESULT, Reason.DIVERGED, "b"),
        first,
        error(2, 11.4),
    ):
        folder.write_error("l.0", e)
    assert folder.errors("l.0")[0] == first
    assert str(first) == "host 5 (slice 1), 12:00:11.300, a: error (exit code 1): ValueError: y"
    assert [e.kind for e in folder.errors("l.0")] == [OWN, OWN, ECHO, RESULT]
    assert [e.host for e in folder.errors("l.0", "a", [ECHO])] == ["0-0000"]
    assert folder.errors("l.1") == [] and folder.attempts() == ["l.0"]


def attempts(*given):
    return [Attempt(f"l.{i}", "", step, "now" if reason else "", reason, "e") for i, (step, reason) in enumerate(given)]


@pytest.mark.parametrize(
    "given,count",
    [
        ([(4, Reason.ERROR)] * 3, 3),
        ([(4, Reason.ERROR)] * 2, 2),
        ([(2, Reason.ERROR), (4, Reason.ERROR), (4, Reason.PEER_LOST)], 2),  # between them it came from 2 to 4
        (
            [(4, Reason.ERROR), (4, Reason.INTERRUPTED), (4, None), (4, Reason.KILLED)],
            2,
        ),  # no failures, and no progress
        ([(4, Reason.NO_SPACE)] * 7, 3),
        ([(2, Reason.ERROR)] * 3, 0),
    ],
)
def test_failures_in_a_row(folder, given, count):
    assert len(folder.failures("a", attempts(*given), 4)) == count


def test_what_other_hosts_say_decides(folder):
    given = attempts((None, Reason.INTERRUPTED), (None, None), (None, Reason.PEER_LOST))
    folder.write_error("l.0", error(3, 1))  # and then the cluster has stopped host 0
    folder.write_error("l.1", error(3, 1, job="another"))
    folder.write_stopped("l.2", "1-0000")  # preempted, and so lost by the others
    assert folder.failures("a", given, None) == [str(error(3, 1))]


def test_attempts_are_those_of_this_launch(folder):
    folder.write_attempts("a", "id", attempts((4, Reason.ERROR), (None, None)))
    assert folder.read_attempts("a", "id") == attempts((4, Reason.ERROR), (None, None))
    assert folder.read_attempts("a", "later") == folder.read_attempts("b", "id") == []


def test_the_newest_whole_checkpoint(tmp_path):
    assert launch_folder.newest_step(str(tmp_path / "none")) is None
    for name in ("checkpoint_5", "checkpoint_10", "checkpoint_20.orbax-checkpoint-tmp-1", "checkpoint_x"):
        os.makedirs(tmp_path / name / "state" / "_METADATA")
    os.makedirs(tmp_path / "checkpoint_15")  # empty
    assert launch_folder.newest_step(str(tmp_path)) == 10


def test_stopping_is_for_one_launch(folder):
    assert not folder.stop_requested("id")
    folder.write({"launch_id": "id"}, "jobs.json")
    folder.request_stop()
    assert folder.stop_requested("id") and not folder.stop_requested("later")
