"""The launcher: one log, one end, no process left behind."""

import os
import pty
import re
import signal
import subprocess
import time

import pytest

from perex_t5x.cli.status import Status
from perex_t5x.cli.status import read as read_status
from perex_t5x.errors import Reason
from perex_t5x.launching import local
from tests import tiny
from tests.distributed import support

SPEAKER = {"module": "tests.distributed.speaker"}


def test_one_log_with_prefixes():
    status, output = support.run("--gin_file=a", "wait_not", processes=3, devices=5, **SPEAKER)
    assert status == 0
    for i in range(3):
        assert f"[{i}] arguments --gin_file=a wait_not" in output
        assert f"[{i}] devices 5 3" in output
    assert "Gloo" not in output and "[0] step 1/2" in output


def test_first_failure_stops_the_others():
    begun = time.monotonic()
    status, output = support.run("fail1", "wait", grace=1, **SPEAKER)
    assert status == 7 and time.monotonic() - begun < 60
    assert "launch/local: process 1 ended with exit code 7; the others are stopped." in output
    assert "[0] asked to stop by SIGTERM" in output


def test_what_does_not_stop_is_killed():
    status, output = support.run("fail1", "wait", "stubborn", grace=1, **SPEAKER)
    assert status == 7
    assert not [pid for pid in pids(output) if alive(pid)]


def test_time_limit():
    status, output = support.run("wait", timeout=2, **SPEAKER)
    assert status == Reason.TIMEOUT.exit_code and "the time limit (--timeout 2) is reached" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_all_once(number):
    process = support.launch("wait", **SPEAKER)
    output = read_until_ready(process)
    process.send_signal(number)
    output += process.communicate(timeout=60)[0]
    assert process.returncode == (129 if number == signal.SIGHUP else 130)
    if number != signal.SIGHUP:
        assert output.count(f"asked to stop by {number.name}") == 2
    assert not [pid for pid in pids(output) if alive(pid)]


def test_no_orphans_when_the_launcher_is_killed():
    process = support.launch("wait", "stubborn", **SPEAKER)
    output = read_until_ready(process)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids(output)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_in_a_terminal_progress_stays_on_one_line():
    master, slave = pty.openpty()
    command = [
        *["-m", "perex_t5x.launching.local", "--processes", "2", "--devices", "1", "--module"],
        SPEAKER["module"],
        "--",
        "x",
    ]
    with subprocess.Popen(
        [support.sys.executable, *command], cwd=support.ROOT, env=support.environment(), stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        text = b""
        while True:
            try:
                piece = os.read(master, 4096)
            except OSError:  # the terminal's other end is closed
                break
            if not piece:
                break
            text += piece
    os.close(master)
    assert process.returncode == 0
    assert b"\r\x1b[K[0] step 1/2" in text and b"step 1/2  loss 3.1  ETA 0:01\r\n[0] ready" not in text


class Clock:
    """Waiting takes no time."""

    def __init__(self):
        self.now = self.waited = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def supervise(*reasons, restarts=2, asked=(), deadline=1e9):
    """Attempts that end so; returns (how all ended, how many there were, what was said, seconds)."""
    said, attempts, clock = [], [], Clock()

    def run_once(attempt):
        attempts.append(attempt)
        reason = reasons[attempt]
        return [] if reason is Reason.DONE else [Status(reason, reason.exit_code, f"{reason}!", step=10 * attempt)]

    ended = local.supervise(run_once, restarts, said.append, lambda: len(attempts) in asked, deadline, clock)
    return ended.reason, attempts, " ".join(said), round(clock.now)


def test_a_failed_group_is_restarted_with_back_off():
    reason, attempts, said, seconds = supervise(Reason.PEER_LOST, Reason.KILLED, Reason.DONE)
    assert (reason, attempts, seconds) == (Reason.DONE, [0, 1, 2], 1 + 2)
    assert "restart 1 of 2 in 1 s" in said and "restart 2 of 2 in 2 s" in said and "done, after 2 restarts" in said


def test_it_is_given_up_with_a_report():
    reason, attempts, said, _ = supervise(*[Reason.NO_SPACE, Reason.PEER_LOST, Reason.PEER_LOST])
    assert (reason, attempts) == (Reason.PEER_LOST, [0, 1, 2])
    assert "given up after 2 restarts. Attempts that failed: peer_lost (exit code 7) 2 times, no_space" in said
    assert "the last error at step 20: peer_lost!" in said


@pytest.mark.parametrize("reason", [r for r in Reason if not r.retryable] + [Reason.TIMEOUT])
def test_what_a_restart_does_not_mend_is_not_restarted(reason):
    ended, attempts, said, _ = supervise(reason)
    assert ended is reason and attempts == [0] and "restart 1" not in said


def test_whoever_asks_for_the_end_gets_it():
    assert supervise(Reason.INTERRUPTED, asked=[1])[:2] == (Reason.INTERRUPTED, [0])
    # Between two attempts: asked while it waits.
    clock, asked = Clock(), []
    clock.sleep = lambda seconds: asked.append(1)
    failure = Status(Reason.PEER_LOST, 7)
    ended = local.supervise(lambda attempt: [failure], 2, lambda text: None, lambda: bool(asked), 1e9, clock)
    assert ended.exit_code == 130


def test_nothing_is_started_after_the_time_limit():
    assert supervise(Reason.PEER_LOST, Reason.DONE, deadline=0.5)[:2] == (Reason.PEER_LOST, [0])


def test_real_processes_are_restarted(tmp_path):
    codes, written = tmp_path / "codes", tmp_path / "status.json"
    environment = {"PEREX_T5X_STATUS_FILE": str(written)}
    codes.write_text("7 -9 0")
    status, output = support.run(f"codes:{codes}", processes=1, own=["--restarts", "2"], **SPEAKER, **environment)
    assert status == 0 and codes.read_text() == ""
    assert "done, after 2 restarts: peer_lost (exit code 7) once, killed by SIGKILL once." in output
    codes.write_text("-9 -9 0")
    status, output = support.run(f"codes:{codes}", processes=1, own=["--restarts", "1"], **SPEAKER, **environment)
    assert status == 137 and codes.read_text() == "0" and "given up after 1 restart." in output
    assert read_status(str(written)).exit_code == 137  # a killed process leaves none itself


@pytest.mark.parametrize(
    "arguments,message",
    [(["--processes", "0"], "positive"), (["--devices", "x"], "positive"), (["--restarts", "-1"], "whole number")],
)
def test_slips(arguments, message, capsys):
    with pytest.raises(SystemExit):
        local.main(arguments)
    assert message in capsys.readouterr().err


def pids(output: str) -> list[int]:
    found = [int(pid) for pid in re.findall(r"ready (\d+)", output)]
    assert len(found) == 2
    return found


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def read_until_ready(process) -> str:
    output = ""
    while output.count("ready") < 2:
        line = process.stdout.readline()
        assert line, output
        output += line
    return output


def test_the_script_can_be_run():
    script = support.ROOT / "launch" / "local"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert "perex_t5x.launching.local" in script.read_text()


@pytest.mark.slow
def test_a_killed_process_of_a_run_costs_nothing(tmp_path):
    """Process 1 is killed in the first attempt; the supervised run ends as one in which nothing happened."""
    bindings = [
        "TRAIN_STEPS = 10",
        "utils.SaveCheckpointConfig.period = 3",
        "train_script.train.stats_period = 1",
        "MIXTURE_OR_TASK_MODULE = 'tests.distributed.trouble'",
    ]
    status, output = support.run(*support.train_arguments(tmp_path / "whole", *bindings), devices=2)
    assert status == 0, output
    trouble = {"TROUBLE": "kill in 1 at 8", "TROUBLE_ATTEMPT": "-0"}
    arguments = [*support.train_arguments(tmp_path / "killed", *bindings), "--heartbeat_timeout=5"]
    status, output = support.run(*arguments, devices=2, own=["--restarts", "1"], **trouble)
    assert status == 0 and "done, after 1 restart: killed by SIGKILL once." in output, output
    assert tiny.losses(tmp_path / "whole") == tiny.losses(tmp_path / "killed")
    assert read_status(str(tmp_path / "killed")).reason is Reason.DONE
