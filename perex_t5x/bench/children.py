"""Processes that measure when they are asked to: one line of JSON in, one out.

A peer in a framework of its own has a process of its own, so that neither's threads, memory or environment are in the
other's numbers, and still takes turns with the programs here. The script needs nothing of this package: it may run under
another Python, in whose environment the peer is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from perex_t5x.errors import ConfigError

_FOUND = "import sys, importlib.util as u; print(*(m for m in sys.argv[1:] if u.find_spec(m)))"
_RUN = "import runpy, sys; sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def found(python: str, modules: Sequence[str]) -> list[str]:
    """Which of these top-level modules this Python has, without importing them."""
    try:
        ran = subprocess.run([python, "-c", _FOUND, *modules], capture_output=True, text=True)
    except OSError as e:
        raise ConfigError(f"{python}: cannot be started: {e.strerror or e}.") from None
    if ran.returncode:
        raise ConfigError(f"{python}: is this a Python? It ended with {ran.returncode}: {ran.stderr.strip()[-200:]}")
    return ran.stdout.split()


class ChildFailedError(Exception):
    """A child ended, or did not answer; says the last that it printed."""


class Child:
    """A script under some Python, which answers each line of JSON on its input by one on its output.

    Args:
      python: the interpreter.
      script: a file beside this one.
      arguments: of the script.
      env: added to this process's environment.
      timeout: seconds that it may take to answer.

    Attributes:
      greeting: the first thing it says, before it is asked.
    """

    def __init__(
        self,
        python: str,
        script: str,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ):
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 closed with the child
        self._lines: queue.Queue[str | None] = queue.Queue()
        environment = {**os.environ, **(env or {}), "BENCH_STARTED": repr(time.monotonic())}
        if os.path.dirname(python):  # it runs in another folder
            python = os.path.abspath(python)
        command = [python, "-c", _RUN, str(Path(__file__).parent / script), *arguments]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment,
                cwd=self._folder.name,
                text=True,
            )
        except OSError as e:
            raise ConfigError(f"{python}: cannot be started: {e.strerror or e}.") from None
        self._stdin, self._stdout = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)  # pipes
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.greeting = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, **question: Any) -> Any:
        """Its answer, a dictionary."""
        try:
            self._stdin.write(json.dumps(question) + "\n")
            self._stdin.flush()
        except OSError:
            raise ChildFailedError(self._last_words()) from None
        return self._answer()

    def _read(self) -> None:
        for line in self._stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _answer(self) -> Any:
        try:
            line = self._lines.get(timeout=self._timeout)
        except queue.Empty:
            raise ChildFailedError(f"no answer within {self._timeout:.0f} s") from None
        if line is None:
            self._process.wait()
            raise ChildFailedError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
        return (errors or lines or [f"ended with {self._process.returncode}"])[-1]

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        self._reader.join()  # it holds the pipe until the process has ended
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._stderr.close()
        self._folder.cleanup()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
