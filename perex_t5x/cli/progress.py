"""What a person sees while a command works: a progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

# Set where the reader of the lines overwrites each with the next: they then end with a carriage return.
OVERWRITE = "PEREX_T5X_PROGRESS_OVERWRITE"


class Progress:
    """Shows step, loss, tokens/s and the time left. A context manager.

    In a terminal: a `rich` bar, refreshed at most ten times a second. Elsewhere: one line every `period` seconds (by
    default 10, or what the environment variable PEREX_T5X_PROGRESS_SECONDS says), and none from processes other than 0.
    """

    def __init__(
        self,
        start: int,
        total: int,
        *,
        enabled: bool = True,
        period: float | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if total < start:
            raise ValueError(f"total {total} is before start {start}")
        self._start, self._total, self._enabled = start, total, enabled
        self._period = float(os.environ.get("PEREX_T5X_PROGRESS_SECONDS", "10")) if period is None else period
        self._stream = stream or sys.stderr
        self._clock = clock
        self._begun = self._last = clock()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._enabled and self._stream.isatty():
            from rich import console, progress

            self._bar = progress.Progress(
                progress.TextColumn("[bold]{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[note]}"),
                progress.TimeElapsedColumn(),
                progress.TextColumn("ETA"),
                progress.TimeRemainingColumn(),
                console=console.Console(file=self._stream),
            )
            self._bar.start()
            self._task = self._bar.add_task("training", total=self._total, completed=self._start, note="")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Tells that `step` steps are done; `values` are shown as they are named."""
        if not self._enabled:
            return
        note = "  ".join(f"{name} {_short(value)}" for name, value in values.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=step, note=note)
            return
        now = self._clock()
        if now - self._last < self._period and step < self._total:
            return
        self._last = now
        done = step - self._start
        left = (now - self._begun) / done * (self._total - step) if done else float("nan")
        end = "\r" if os.environ.get(OVERWRITE) else "\n"
        print(f"step {step}/{self._total}  {note}  ETA {duration(left)}", end=end, file=self._stream, flush=True)


def _short(value: float) -> str:
    """Four significant digits, thousands shortened: 0.01234, 3.142, 52.1k.

    >>> _short(52133.0), _short(3.14159), _short(float("inf"))
    ('52.1k', '3.142', 'inf')
    """
    if math.isfinite(value) and abs(value) >= 10_000:
        return f"{value / 1000:.1f}k"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    if seconds != seconds:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
