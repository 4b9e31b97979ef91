"""Several real processes on this machine, as on several hosts: `launch/local --processes 2 --devices 4 -- ARGUMENTS`

    ./launch/local --processes 2 --devices 4 -- --gin_file=models/tiny.gin --gin_file=runs/pretrain.gin ...
    ./launch/local --module perex_t5x.eval -- --gin_file=...

Each process has its own fake CPU devices; they find each other over loopback, and everything they print comes out as one log
with the process's number in front. Ctrl-C reaches all of them, which then save and stop. When one fails the others are
stopped, and the exit status is that of the first failure.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

EXIT_TIMEOUT = 124
_PROGRESS = re.compile(rb"step \d+/\d+  ")
_NOISE = re.compile(
    rb"\[Gloo\] Rank|peer ranks\. Expected number of connected peer ranks"
)  # from several threads at once
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the processes to their end; returns the exit status."""
    options, arguments = _parse(sys.argv[1:] if argv is None else argv)
    port = _free_port()
    output = Output(sys.stdout, options.processes)
    commands = [sys.executable, "-m", options.module, *arguments]
    children = Children(output, grace=options.grace)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: children.forward(number))
    for index in range(options.processes):
        environment = _environment(index, options.processes, options.devices, port, live=output.live)
        children.start(commands, environment)
    return children.wait(options.timeout)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="launch/local", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=_positive, default=2, help="how many (default 2)")
    parser.add_argument("--devices", type=_positive, default=4, help="fake CPU devices of each (default 4)")
    parser.add_argument("--module", default="perex_t5x.train", help="what to run (default perex_t5x.train)")
    parser.add_argument("--timeout", type=float, default=None, help="stop all after so many seconds, with status 124")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between asking and killing (default 10)")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of the module, the same for all")
    own, theirs = (list(argv), None) if "--" not in argv else (argv[: argv.index("--")], argv[argv.index("--") + 1 :])
    if theirs is not None:
        return parser.parse_args(own), list(theirs)
    options, unknown = parser.parse_known_args(own)
    return options, [*unknown, *options.arguments]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _free_port() -> int:
    """A port that nobody listens at, outside the range that the system hands out by itself in the meantime."""
    candidates = random.SystemRandom().sample(range(20000, 32000), 100)
    for port in candidates:
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
        "XLA_FLAGS": f"{kept} --xla_force_host_platform_device_count={devices}".strip(),
        "PEREX_T5X_PROGRESS_SECONDS": "0.5" if live else os.environ.get("PEREX_T5X_PROGRESS_SECONDS", "10"),
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
                is_progress = index == 0 and _PROGRESS.match(text)
                if is_progress:
                    self._progress = shown[: os.get_terminal_size(self._stream.fileno()).columns - 1]
                erase = "\r\x1b[K"
                print(f"{erase}{'' if is_progress else shown + os.linesep}{self._progress}", end="", file=self._stream)
                self._stream.flush()
            except (OSError, ValueError):
                pass  # nobody reads any more; the processes matter more than their log

    def close(self) -> None:
        with self._lock:
            if self._progress:
                print(file=self._stream, flush=True)
            self._progress = ""


class Children:
    """The processes, from their start to the end of the last."""

    def __init__(self, output: Output, grace: float):
        self._output, self._grace = output, grace
        self._processes: list[subprocess.Popen] = []
        self._readers: list[threading.Thread] = []
        self._signals = 0

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        index = len(self._processes)
        parent = os.getpid()
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C reaches the launcher alone, which passes it on once.
            start_new_session=True,
            preexec_fn=lambda: _die_with(parent),
        )
        self._processes.append(process)
        reader = threading.Thread(target=self._read, args=(index, process.stdout), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, index: int, pipe: Any) -> None:
        for line in pipe:
            self._output.line(index, line)

    def forward(self, number: int) -> None:
        """Passes a signal on; the third time there is no waiting."""
        self._signals += 1
        self._send(signal.SIGKILL if self._signals > 2 else number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self, timeout: float | None) -> int:
        """Waits for all; stops the others once one has failed, or the time is over. Returns the exit status."""
        deadline = None if timeout is None else time.monotonic() + timeout
        status, stages = 0, []
        while any(p.poll() is None for p in self._processes):
            now = time.monotonic()
            failed = next(((i, p.returncode) for i, p in enumerate(self._processes) if p.poll()), None)
            if failed is not None and not status:
                status = _status(failed[1])
                if not self._signals:
                    self._say(f"process {failed[0]} ended with {_described(failed[1])}; the others are stopped.")
                # Left alone for a while they say themselves what they make of it.
                stages = self._stages(now + self._grace)
            if deadline is not None and now > deadline and not status:
                status = EXIT_TIMEOUT
                self._say(f"the time (--timeout {timeout:g}) is over; all processes are stopped.")
                stages = self._stages(now)
            if stages and now > stages[0][0]:
                self._send(stages.pop(0)[1])
            time.sleep(0.05)
        for reader in self._readers:
            reader.join(timeout=5.0)
        self._output.close()
        ends = [p.returncode for p in self._processes]
        return status or next((_status(code) for code in ends if code), 0)

    def _stages(self, begin: float) -> list[tuple[float, int]]:
        return [(begin, signal.SIGTERM), (begin + self._grace, signal.SIGKILL)]

    def _say(self, text: str) -> None:
        self._output.line(None, text.encode())


def _die_with(parent: int) -> None:
    """In a new process: has the kernel kill it when the launcher dies, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before this took effect
        os._exit(1)


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


def _described(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


if __name__ == "__main__":
    sys.exit(main())
