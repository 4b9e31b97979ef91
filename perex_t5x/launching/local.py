"""Several real processes on this machine, as on several hosts: `launch/local --processes 2 --devices 4 -- ARGUMENTS`

    ./launch/local --processes 2 --devices 4 -- --gin_file=models/tiny.gin --gin_file=runs/pretrain.gin ...
    ./launch/local --module perex_t5x.eval -- --gin_file=...
    ./launch/local --restarts 5 -- --gin_file=...

Each process has its own fake CPU devices; they find each other over loopback, and everything they print comes out as one log
with the process's number in front. Ctrl-C reaches all of them, which then save and stop. When one fails the others are
stopped, and the exit code is that of the first failure. With --restarts all are started again, unless the reason is one that
a restart does not mend; the exit code is then that of the last attempt.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import math
import os
import random
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from perex_t5x import files
from perex_t5x.cli import status, subprocesses
from perex_t5x.cli.progress import OVERWRITE
from perex_t5x.distributed.rendezvous import SECRET
from perex_t5x.errors import Reason

_SECRET = secrets.token_hex(16)
_MOST = 1024  # processes, or devices of each: more of them are a typing error, and start nowhere
_PERIOD = 0.05  # seconds between looks at the processes
# From several threads at once.
_NOISE = re.compile(rb"\[Gloo\] Rank|peer ranks\. Expected number of connected peer ranks")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the processes to their end; returns the exit code."""
    options, arguments = _parse(sys.argv[1:] if argv is None else argv)
    output = Output(sys.stdout, options.processes)
    command = [sys.executable, "-m", options.module, *arguments]
    children: list[subprocesses.Child] = []
    signals: list[int] = []
    deadline = time.monotonic() + options.timeout

    def forward(number: int) -> None:
        """The third signal does not wait."""
        signals.append(number)
        subprocesses.signal_all(children, signal.SIGKILL if len(signals) > 2 else number)

    def run_once(attempt: int) -> list[status.Status]:
        """Runs all processes to their end; returns how the one that failed first ended, or [] if none did."""
        port, failures = free_port(), []
        children.clear()
        for index in range(options.processes):
            env = _environment(index, options.processes, options.devices, port, attempt, live=output.live)
            on_line = functools.partial(output.line, index)
            written = status_file if index == 0 else os.path.join(folder, f"{index}.json")
            children.append(subprocesses.Child(command, env=env, on_line=on_line, status_file=written))
        wait(children, output, signals, options.grace, deadline, options.timeout, failures)
        return failures

    with (
        tempfile.TemporaryDirectory(prefix="launch-local-") as folder,
        subprocesses.forwarding(forward, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
    ):
        status_file = os.environ.get(status.VARIABLE) or os.path.join(folder, "0.json")
        ended = supervise(run_once, options.restarts, output.say, lambda: bool(signals), deadline)
        if ended.reason is not Reason.DONE and status.read(status_file) is None:  # a killed process writes none
            with contextlib.suppress(OSError):
                files.write_atomically(status_file, ended.to_json() + "\n")
        return ended.exit_code


def seconds_until_restart(failures: int) -> float:
    """The back-off after so many failed attempts.

    >>> [seconds_until_restart(failures) for failures in (1, 2, 3, 10)]
    [1.0, 2.0, 4.0, 60.0]
    """
    return min(2.0 ** min(failures - 1, 10), 60.0)


def supervise(
    run_once: Callable[[int], list[status.Status]],
    restarts: int,
    say: Callable[[str], None],
    asked_to_stop: Callable[[], bool],
    deadline: float = math.inf,
    clock: Any = time,
) -> status.Status:
    """Runs attempts until one succeeds, fails for a reason that a restart does not mend, or there were too many.

    Args:
      run_once: runs the attempt of a number, from 0; returns how it failed, [] if it did not.
      restarts: how many attempts may follow the first.
      say: prints a line.
      asked_to_stop: whether somebody has asked for the end of all attempts.
      deadline: after which nothing is started, in the clock's time.
      clock: has `monotonic` and `sleep`.

    Returns:
      How the last attempt ended.
    """
    failures: list[status.Status] = []
    for attempt in range(restarts + 1):
        failed = run_once(attempt)
        if not failed:
            if attempt:
                say(f"done, after {_times(attempt, 'restart')}: {_counted(failures)}.")
            return status.Status(Reason.DONE, 0)
        failures.append(failed[0])
        if asked_to_stop() or not failed[0].reason.retryable or failed[0].reason is Reason.TIMEOUT:
            break
        if attempt < restarts:
            seconds = seconds_until_restart(len(failures))
            say(f"restart {attempt + 1} of {restarts} in {seconds:g} s; the last attempt: {failed[0].ended}.")
            until = clock.monotonic() + seconds
            while clock.monotonic() < until and not asked_to_stop():
                clock.sleep(_PERIOD)
            if asked_to_stop():
                return status.Status(Reason.INTERRUPTED, Reason.INTERRUPTED.exit_code, "stopped between two attempts")
            if clock.monotonic() > deadline:
                break
    last = failures[-1]
    if restarts and not asked_to_stop():
        why = "" if last.reason.retryable else f", since a restart does not mend '{last.reason}'"
        at = "" if last.step is None else f" at step {last.step}"
        say(f"given up after {_times(len(failures) - 1, 'restart')}{why}. Attempts that failed: {_counted(failures)}.")
        say(f"the last error{at}: {last.message or last.ended}")
    return last


def _times(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _counted(failures: Sequence[status.Status]) -> str:
    """What failed how often: 'peer_lost (exit code 7) 2 times, killed by SIGKILL once'."""
    counts = collections.Counter(failure.ended for failure in failures)
    return ", ".join(f"{how} {'once' if n == 1 else f'{n} times'}" for how, n in counts.most_common())


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="launch/local", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=_positive, default=2, help="how many (default 2)")
    parser.add_argument("--devices", type=_positive, default=4, help="fake CPU devices of each (default 4)")
    parser.add_argument("--module", default="perex_t5x.train", help="what to run (default perex_t5x.train)")
    parser.add_argument(
        "--timeout", type=_seconds, default=math.inf, help="stop all after this many seconds, with exit code 124"
    )
    parser.add_argument("--grace", type=_seconds, default=10.0, help="seconds between asking and killing (default 10)")
    parser.add_argument(
        "--restarts", type=_count, default=0, help="how often all are started again after a failure (default 0)"
    )
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of the module, the same for all")
    if "--" in argv:
        end = argv.index("--")
        return parser.parse_args(argv[:end]), list(argv[end + 1 :])
    options, unknown = parser.parse_known_args(argv)
    return options, [*unknown, *options.arguments]


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number, at most {_MOST}")
    return int(text)


def _seconds(text: str) -> float:
    """Also 'inf'; 'nan' would be a limit that is never reached, and a negative one is a mistake."""
    with contextlib.suppress(ValueError):
        if float(text) >= 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def free_port() -> int:
    """A port that nobody listens at, outside the range that the system hands out by itself in the meantime."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    raise SystemExit("launch/local: no free port between 20000 and 32000.")


def _environment(index: int, count: int, devices: int, port: int, attempt: int, live: bool) -> dict[str, str]:
    kept = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        "PEREX_T5X_ATTEMPT": f"local-{os.getpid()}-{attempt}",  # which processes were started together
        SECRET: os.environ.get(SECRET) or _SECRET,  # others on this machine reach the port, too
        "XLA_FLAGS": f"{kept} --xla_force_host_platform_device_count={devices}".strip(),
        **({"PEREX_T5X_PROGRESS_SECONDS": "0.5", OVERWRITE: "1"} if live else {}),
        "PYTHONUNBUFFERED": "1",
    }


class Output:
    """One log of all processes. In a terminal the newest progress line stays at the bottom and is written over."""

    def __init__(self, stream: TextIO, processes: int):
        self.live = stream.isatty()
        self._stream = stream
        self._width = len(str(processes - 1))
        self._lock = threading.Lock()
        self._progress = ""

    def line(self, index: int | None, text: bytes) -> None:
        """Prints a line of a process, or of the launcher itself (None)."""
        if _NOISE.search(text):
            return
        prefix = "launch/local: " if index is None else f"[{index:>{self._width}}] "
        shown = prefix + text.decode(errors="replace").rstrip("\r\n")
        with self._lock:
            try:
                if not self.live:
                    print(shown, file=self._stream, flush=True)
                    return
                is_progress = index == 0 and text.endswith(b"\r")
                if is_progress:
                    self._progress = shown[: os.get_terminal_size(self._stream.fileno()).columns - 1]
                erase = "\r\x1b[K"
                print(f"{erase}{'' if is_progress else shown + os.linesep}{self._progress}", end="", file=self._stream)
                self._stream.flush()
            except (OSError, ValueError):
                pass  # nobody reads any more; the processes matter more than their log

    def say(self, text: str) -> None:
        self.line(None, text.encode())

    def close(self) -> None:
        with self._lock:
            if self._progress:
                print(file=self._stream, flush=True)
            self._progress = ""


def wait(
    children: Sequence[subprocesses.Child],
    output: Output,
    signals: list[int],
    grace: float,
    deadline: float,
    timeout: float,
    failures: list[status.Status],
) -> None:
    """Waits for all; stops the others once one has failed, or the time is over. Adds the first failure to `failures`."""
    first: int | None = None
    stopping, code = subprocesses.StagedStop(children, grace), 0
    while any(child.poll() is None for child in children):
        failed = next(((i, returncode) for i, child in enumerate(children) if (returncode := child.poll())), None)
        if failed is not None and not code:
            first, code = failed[0], subprocesses.exit_code(failed[1])
            if not signals:
                how = subprocesses.describe_exit(failed[1])
                output.say(f"process {failed[0]} ended with {how}; the others are stopped.")
            # Left alone for a while, the others say themselves what went wrong.
            stopping.begin(delay=grace)
        if time.monotonic() > deadline and not code:
            code = Reason.TIMEOUT.exit_code
            output.say(f"the time limit (--timeout {timeout:g}) is reached; all processes are stopped.")
            stopping.begin()
        stopping.tick()
        time.sleep(_PERIOD)
    for child in children:
        child.drain()
    output.close()
    if first is None and not code:  # all of them had ended between two looks
        first = next((i for i, child in enumerate(children) if child.returncode), None)
    if first is not None:
        failures.append(children[first].status())
    elif code:
        failures.append(status.Status(Reason.TIMEOUT, code, f"the time limit (--timeout {timeout:g}) is reached"))


if __name__ == "__main__":
    sys.exit(main())
