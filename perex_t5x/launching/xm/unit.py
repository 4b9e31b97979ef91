"""The process of a work unit: starts the run, passes signals on, and writes down how it ended.

    python -I -S unit.py STATUS_FILE LAUNCHER_PID LOG_FILE COMMAND...

XManager starts a local job through a shell, keeps no status of it, and prints a stack trace for any but 0. So this ends with
0, and the run's own status is in STATUS_FILE: {"pid": ..., "returncode": ...}. It imports nothing but Python's own library:
it has to be there at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time

_PERIOD = 0.1  # seconds between looks


def main(argv: list[str]) -> int:
    status, launcher, log, command = argv[1], int(argv[2]), argv[3], argv[4:]
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: asked.append(n))
    _write(status, {"pid": os.getpid()})
    with open(log, "ab") as output:
        # This process has one thread, so a function between fork and exec is safe.
        run = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, preexec_fn=_die_with_parent
        )
    while run.poll() is None:
        if asked:
            asked.clear()
            run.send_signal(signal.SIGTERM)
        if not _alive(launcher):
            run.kill()  # nobody is left who would collect the result
        time.sleep(_PERIOD)
    _write(status, {"pid": os.getpid(), "returncode": run.returncode})
    return 0


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _alive(pid: int) -> bool:
    """A shell may stand between the launcher and this process, so the parent's process number does not tell."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write(path: str, content: dict[str, int]) -> None:
    """There in whole, or as it was. The folder is gone where the launcher is."""
    with contextlib.suppress(OSError):
        with open(f"{path}.tmp", "w", encoding="utf-8") as f:
            json.dump(content, f)
        os.replace(f"{path}.tmp", path)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
