"""Child processes: they end with this one however it ends, hear its signals, and leave a status that machines can read.

Also the process of an XManager work unit, which XManager starts through a shell and whose status it does not keep:

    python -I -S subprocesses.py RECORD LAUNCHER_PID LOG COMMAND...

starts COMMAND, passes signals on, ends it when the launcher is gone, and writes {"pid": ..., "returncode": ...} to RECORD.
It ends with 0 itself, since XManager prints a stack trace for anything else. Python's own library is all it needs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

# Has the kernel kill the process when its parent dies, then becomes the command. Not a `preexec_fn`: the parent may have
# threads, and Python code between fork and exec may then hang.
_DIES_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_PERIOD = 0.1  # seconds between looks at processes
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")


class Child:
    """A process in a session of its own, so that Ctrl-C reaches it only through this process.

    It is killed when the thread that started it ends: start it in the main thread.

    Args:
      command: the program and its arguments.
      env: its environment; None: this process's.
      cwd: where it runs.
      log: a file to which everything it prints is appended.
      on_line: called, in a thread, with each line it prints, as bytes with the line's end. A line that ends with a carriage
        return is one that the next is to overwrite.
      edit: with `on_line`: what each line is replaced by, in the log too.
      status_file: where it writes how it ended (`perex_t5x.cli.status`); one of an earlier process is removed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        log: str | None = None,
        on_line: Callable[[bytes], None] | None = None,
        edit: Callable[[bytes], bytes] = bytes,
        status_file: str | None = None,
    ):
        environment = dict(os.environ if env is None else env)
        self._status_file = status_file
        prepare_status(environment, status_file)
        self._log = log
        self._log_start = os.path.getsize(log) if log and os.path.exists(log) else 0
        with contextlib.ExitStack() as opened:
            output: Any = opened.enter_context(open(log, "ab")) if log else None
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _DIES_WITH_PARENT, str(os.getpid()), *command],
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output if on_line is None else subprocess.PIPE,
                stderr=subprocess.STDOUT if output or on_line else None,
                start_new_session=True,
            )
        self._reader = None
        if on_line is not None:
            self._reader = threading.Thread(target=self._read, args=(on_line, edit), daemon=True)
            self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        """Its return code; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Waits for its end, and for the last of its lines; returns its return code."""
        code = self._process.wait()
        self.drain()
        return code

    def drain(self, seconds: float = 5.0) -> None:
        """After its end: waits for its last lines. Not for ever: a process of its own may hold the pipe."""
        if self._reader is not None:
            self._reader.join(seconds)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._process.send_signal(number)

    def status(self) -> Any:
        """After its end: a `status.Status`, from what it has written or from its exit code and the last line of its log."""
        from perex_t5x.cli import status

        return status.of_process(self._process.returncode, self._status_file, message=last_line(self.said()))

    def said(self, most: int = 20_000) -> str:
        """The end of what it has added to its log."""
        return "" if self._log is None else read_tail(self._log, most, self._log_start)

    def _read(self, on_line: Callable[[bytes], None], edit: Callable[[bytes], bytes]) -> None:
        with contextlib.ExitStack() as opened:
            log = opened.enter_context(open(self._log, "ab")) if self._log else None
            pipe = cast(io.BufferedReader, self._process.stdout)  # made with stdout=PIPE
            for line in map(edit, lines(pipe)):
                if log is not None:
                    log.write(line)
                    log.flush()
                on_line(line)


def prepare_status(environment: dict[str, str], path: str | None) -> None:
    """Has a process with this environment write its status to `path`; None: nowhere."""
    from perex_t5x.cli import status

    environment.pop(status.VARIABLE, None)
    if path is not None:
        environment[status.VARIABLE] = path
        with contextlib.suppress(OSError):
            os.unlink(path)


def lines(pipe: io.BufferedReader) -> Iterator[bytes]:
    r"""The lines of a pipe as they come, each with its end: \n, or \r for one that the next is to overwrite.

    >>> import io
    >>> list(lines(io.BufferedReader(io.BytesIO(b"a\nstep 1\rstep 2\r\nrest"))))
    [b'a\n', b'step 1\r', b'step 2\r\n', b'rest']
    """
    text, line = b"", b""
    for piece in iter(lambda: pipe.read1(65536), b""):
        if not text and line.endswith(b"\r"):
            piece = piece.removeprefix(b"\n")  # two pieces have divided a \r\n
        text += piece
        end = 0
        for match in _LINE.finditer(text):
            line, end = match[0], match.end()
            yield line
        text = text[end:]
    if text:
        yield text


def read_tail(path: str, most: int, start: int = 0) -> str:
    """The last `most` bytes of a file, from byte `start` on, as text; "" if there is no file."""
    try:
        with open(path, "rb") as f:
            end = f.seek(0, os.SEEK_END)
            f.seek(max(start, end - most))
            return f.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(text: str) -> str:
    """
    >>> last_line("a\\n b \\n\\n")
    'b'
    """
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def exit_code(returncode: int) -> int:
    """As a shell reports it: 128 + the number of the signal.

    >>> exit_code(2), exit_code(-9)
    (2, 137)
    """
    return 128 - returncode if returncode < 0 else returncode


def describe_exit(returncode: int) -> str:
    """
    >>> describe_exit(2), describe_exit(-9)
    ('exit code 2', 'signal SIGKILL')
    """
    return f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"


def signal_all(children: Iterable[Any], number: int) -> None:
    """To those that run."""
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


class StagedStop:
    """Ends processes in stages: SIGTERM after a delay, SIGKILL after the grace period for those that have not ended."""

    def __init__(self, children: Sequence[Any], grace: float, clock: Callable[[], float] = time.monotonic):
        self._children, self._grace, self._clock = children, grace, clock
        self._stages: list[tuple[float, int]] = []

    def begin(self, delay: float = 0.0) -> None:
        """To be called once; `tick` does the rest."""
        first = self._clock() + delay
        self._stages = [(first, signal.SIGTERM), (first + self._grace, signal.SIGKILL)]

    def tick(self) -> None:
        """Sends what is due."""
        if self._stages and self._clock() >= self._stages[0][0]:
            signal_all(self._children, self._stages.pop(0)[1])


@contextlib.contextmanager
def forwarding(send: Callable[[int], None], numbers: Iterable[int] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
    """Has `send(number)` called for each signal, in place of what it would do to this process."""
    former = {number: signal.signal(number, lambda number, frame: send(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


# --- the process of a work unit ---------------------------------------------------------------------------------------


def run_unit(argv: Sequence[str]) -> int:
    """See the top of this module."""
    record, launcher, log, command = argv[1], int(argv[2]), argv[3], list(argv[4:])
    asked: list[int] = []
    with forwarding(asked.append):
        _write_record(record, {"pid": os.getpid()})
        from perex_t5x.cli import status

        child = Child(command, log=log, status_file=os.environ.get(status.VARIABLE))
        while child.poll() is None:
            if asked:
                asked.clear()
                child.send_signal(signal.SIGTERM)
            if not _is_alive(launcher):
                child.send_signal(signal.SIGKILL)  # nobody is left who would collect the result
            time.sleep(_PERIOD)
        _write_record(record, {"pid": os.getpid(), "returncode": child.returncode})
    return 0


def _is_alive(pid: int) -> bool:
    """A shell may stand between the launcher and this process, so the parent's process number does not tell."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write_record(path: str, content: Mapping[str, int | None]) -> None:
    from perex_t5x import files

    if os.path.isdir(os.path.dirname(path)):  # else the launcher is gone, and its folder with it
        with contextlib.suppress(OSError):
            files.write_atomically(path, json.dumps(content))


if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from perex_t5x.cli import subprocesses

    sys.exit(subprocesses.run_unit(sys.argv))
