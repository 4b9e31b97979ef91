"""Several real processes on this machine, as on several hosts: `launch/local --processes 2 --devices 4 -- ARGUMENTS`

    ./launch/local --processes 2 --devices 4 -- --gin_file=models/tiny.gin --gin_file=runs/pretrain.gin ...
    ./launch/local --module perex_t5x.eval -- --gin_file=...

Each process has its own fake CPU devices; they find each other over loopback, and everything they print comes out as one log
with the process's number in front. Ctrl-C reaches all of them, which then save and stop. When one fails the others are
stopped, and the exit code is that of the first failure.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from perex_t5x.cli import status, subprocesses
from perex_t5x.cli.progress import OVERWRITE
from perex_t5x.errors import Reason

_PERIOD = 0.05  # seconds between looks at the processes
# From several threads at once.
_NOISE = re.compile(rb"\[Gloo\] Rank|peer ranks\. Expected number of connected peer ranks")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the processes to their end; returns the exit code."""
    options, arguments = _parse(sys.argv[1:] if argv is None else argv)
    port = free_port()
    output = Output(sys.stdout, options.processes)
    command = [sys.executable, "-m", options.module, *arguments]
    children: list[subprocesses.Child] = []
    signals: list[int] = []

    def forward(number: int) -> None:
        """The third signal does not wait."""
        signals.append(number)
        subprocesses.signal_all(children, signal.SIGKILL if len(signals) > 2 else number)

    status_file = os.environ.get(status.VARIABLE)
    with subprocesses.forwarding(forward, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        for index in range(options.processes):
            env = _environment(index, options.processes, options.devices, port, live=output.live)
            on_line = functools.partial(output.line, index)
            written = status_file if index == 0 else None
            children.append(subprocesses.Child(command, env=env, on_line=on_line, status_file=written))
        return wait(children, output, signals, options.grace, options.timeout)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="launch/local", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=_positive, default=2, help="how many (default 2)")
    parser.add_argument("--devices", type=_positive, default=4, help="fake CPU devices of each (default 4)")
    parser.add_argument("--module", default="perex_t5x.train", help="what to run (default perex_t5x.train)")
    parser.add_argument(
        "--timeout", type=float, default=math.inf, help="stop all after this many seconds, with exit code 124"
    )
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between asking and killing (default 10)")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of the module, the same for all")
    if "--" in argv:
        end = argv.index("--")
        return parser.parse_args(argv[:end]), list(argv[end + 1 :])
    options, unknown = parser.parse_known_args(argv)
    return options, [*unknown, *options.arguments]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
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


def _environment(index: int, count: int, devices: int, port: int, live: bool) -> dict[str, str]:
    kept = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        "PEREX_T5X_ATTEMPT": f"local-{os.getpid()}",  # which processes were started together
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
    children: Sequence[subprocesses.Child], output: Output, signals: list[int], grace: float, timeout: float
) -> int:
    """Waits for all; stops the others once one has failed, or the time is over. Returns the exit code."""
    deadline = time.monotonic() + timeout
    stopping, code = subprocesses.StagedStop(children, grace), 0
    while any(child.poll() is None for child in children):
        failed = next(((i, child.returncode) for i, child in enumerate(children) if child.poll()), None)
        if failed is not None and not code:
            code = subprocesses.exit_code(failed[1])
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
    return code or next((subprocesses.exit_code(child.returncode) for child in children if child.returncode), 0)


if __name__ == "__main__":
    sys.exit(main())
