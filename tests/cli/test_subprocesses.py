"""Child processes: their lines and log, signals, stages of stopping, and what they leave behind."""

import os
import signal
import sys
import time

from perex_t5x.cli import status, subprocesses
from perex_t5x.cli.subprocesses import Child
from perex_t5x.errors import Reason


def python(code):
    return [sys.executable, "-c", code]


def eventually(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_lines_and_log(tmp_path):
    lines = []
    child = Child(
        python("import sys; print('a'); print('step 1', end='\\r'); sys.stdout.flush(); print('last', end='')"),
        log=str(tmp_path / "log"),
        on_line=lines.append,
    )
    assert child.wait() == 0
    assert lines == [b"a\n", b"step 1\r", b"last"]
    assert (tmp_path / "log").read_bytes() == b"a\nstep 1\rlast"
    again = Child(python("print('b')"), log=str(tmp_path / "log"))
    assert again.wait() == 0 and again.said() == "b\n"  # its own part


def test_a_session_and_an_environment_of_its_own(tmp_path):
    code = f"import os; print(os.getsid(0) == os.getpid(), os.environ.get({status.VARIABLE!r}), os.environ['X'])"
    for path in (None, str(tmp_path / "status.json")):
        child = Child(
            python(code), env={"X": "1", status.VARIABLE: "inherited"}, log=str(tmp_path / "log"), status_file=path
        )
        child.wait()
        assert child.said() == f"True {path} 1\n"


def test_the_status_of_one_that_leaves_none_is_its_last_line(tmp_path):
    child = Child(python("print('first'); raise SystemExit('it broke')"), log=str(tmp_path / "log"))
    child.wait()
    found = child.status()
    assert (found.reason, found.exit_code, found.message) == (Reason.ERROR, 1, "it broke")


def test_stopping_in_stages(tmp_path):
    code = "import signal, time; signal.signal(15, signal.{}); print('ready', flush=True); time.sleep(60)"
    children = [Child(python(code.format(how)), log=str(tmp_path / how)) for how in ("SIG_DFL", "SIG_IGN")]
    eventually(lambda: all("ready" in child.said() for child in children))
    now = [100.0]
    stop = subprocesses.StagedStop(children, grace=5, clock=lambda: now[0])
    stop.tick()
    stop.begin(delay=2)
    stop.tick()
    assert [child.poll() for child in children] == [None, None]
    now[0] += 2
    stop.tick()
    assert children[0].wait() == -signal.SIGTERM and children[1].poll() is None
    now[0] += 5
    stop.tick()
    assert children[1].wait() == -signal.SIGKILL


def test_signals_are_passed_on_and_handlers_put_back():
    heard, former = [], signal.getsignal(signal.SIGTERM)
    with subprocesses.forwarding(heard.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert heard == [signal.SIGTERM, signal.SIGINT] and signal.getsignal(signal.SIGTERM) is former


def test_it_does_not_outlive_its_parent(tmp_path):
    code = (
        "import sys, time; from perex_t5x.cli.subprocesses import Child; "
        f"child = Child([sys.executable, '-c', 'import time; time.sleep(60)'], log={str(tmp_path / 'log')!r}); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    parent = Child(python(code), log=str(tmp_path / "pid"))
    eventually(lambda: parent.said().strip().isdigit())
    pid = int(parent.said())
    parent.send_signal(signal.SIGKILL)
    parent.wait()

    def is_gone():
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
                return f.read().rsplit(")", 1)[1].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    eventually(is_gone)
