"""The launcher: one log, one end, no process left behind."""

import os
import pty
import re
import signal
import subprocess
import time

import pytest

from perex_t5x.errors import Reason
from perex_t5x.launching import local
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


@pytest.mark.parametrize("arguments,message", [(["--processes", "0"], "positive"), (["--devices", "x"], "positive")])
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
