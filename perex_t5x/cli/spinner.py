"""A line that says what is being done and for how long, while the compiler says nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

_FRAME_SECONDS = 0.2
_LINE_SECONDS = 30.0


class Working:
    """In a terminal one line that counts seconds; elsewhere a line when it ends, and one every half minute before.

        working = Working()
        with working("compiling"):
            ...

    It writes to a copy of stderr's file descriptor: the compiler's noise is kept from the original.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._stream = stream or _copy_of_stderr()
        self._clock = clock
        self._live = self._stream.isatty()

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        begun, done = self._clock(), threading.Event()
        watcher = threading.Thread(target=self._watch, args=(what, begun, done), daemon=True)
        watcher.start()
        word = "stopped after"
        try:
            yield
            word = ""
        finally:
            done.set()
            watcher.join()
            seconds = f"{self._clock() - begun:.0f} s"
            self._write(f"{what}: {word} {seconds}" if word else f"{what}: {seconds}", last=True)

    def _watch(self, what: str, begun: float, done: threading.Event) -> None:
        while not done.wait(_FRAME_SECONDS if self._live else _LINE_SECONDS):
            self._write(f"{what} ... {self._clock() - begun:.0f} s", last=False)

    def _write(self, line: str, last: bool) -> None:
        # A message is not worth the work: stderr may be closed.
        with contextlib.suppress(OSError, ValueError):
            start = "\r\x1b[K" if self._live else ""
            self._stream.write(start + line + ("\n" if last or not self._live else ""))
            self._stream.flush()


def _copy_of_stderr() -> TextIO:
    try:
        return open(os.dup(sys.stderr.fileno()), "w", encoding="utf-8")
    except (OSError, ValueError):  # replaced by something without a descriptor, as in a notebook
        return sys.stderr
