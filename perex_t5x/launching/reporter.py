"""What a worker reports to the launch's folder while its jobs run: logs, how far it is, and whether it is asked to stop.

In a thread, every half a minute, and once more at the end: a bucket that is slow or fails never delays a job. Logs are
stored in parts; only the newest part is written again when it has grown.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perex_t5x.files import is_remote, write_atomically
from perex_t5x.launching import launch_folder
from perex_t5x.launching.launch_folder import LaunchFolder

_PART_BYTES = 512 * 1024
_MOST_PARTS = 200  # of a log; its last part then is the log's newest end
_LEAST_SECONDS = 1.1  # between two writes of one object: Cloud Storage allows one a second


@dataclass
class _Log:
    """A growing text and how much of it is stored.

    Attributes:
      name: of its parts.
      read: from a byte on, at most so many bytes.
      size: of the text now.
    """

    name: str
    read: Callable[[int, int], bytes]
    size: Callable[[], int]
    part: int = 0
    start: int = 0  # of the part
    stored: int = 0

    def changes(self) -> list[tuple[str, str]]:
        """Name and text of the parts that are to be written; to be confirmed by `store`."""
        size = self.size()
        if size <= self.stored:
            return []
        changed, part, start = [], self.part, self.start
        while size - start > _PART_BYTES and part < _MOST_PARTS - 1:
            changed.append((self._name(part), self._text(start, _PART_BYTES)))
            part, start = part + 1, start + _PART_BYTES
        changed.append((self._name(part), self._text(max(start, size - _PART_BYTES), _PART_BYTES)))
        self._next = (part, start, size)
        return changed

    def confirm(self) -> None:
        self.part, self.start, self.stored = self._next

    def _name(self, part: int) -> str:
        return f"{self.name}.{part:05}.log"

    def _text(self, start: int, most: int) -> str:
        return self.read(start, most).decode(errors="replace")


def _of_file(name: str, path: str) -> _Log:
    begin = os.path.getsize(path) if os.path.exists(path) else 0  # of earlier attempts on this host

    def read(start: int, most: int) -> bytes:
        with open(path, "rb") as f:
            f.seek(begin + start)
            return f.read(most)

    return _Log(name, read, lambda: os.path.getsize(path) - begin if os.path.exists(path) else 0)


class Reporter:
    """
    Args:
      folder: of the launch.
      attempt, host: which part of it is this host's.
      launch_id: of the launch, which a request to stop has to name.
      writer: whether this host writes state.json.
      on_stop: called, in the thread, once the launch is asked to stop.
      period: seconds between two reports.
    """

    def __init__(
        self,
        folder: LaunchFolder,
        attempt: str,
        host: str,
        launch_id: str,
        writer: bool,
        on_stop: Callable[[], None],
        period: float | None = None,
    ):
        self._folder, self._attempt, self._host, self._launch_id = folder, attempt, host, launch_id
        self._writer, self._on_stop = writer, on_stop
        self._period = float(os.environ.get("PEREX_T5X_REPORT_SECONDS", "30")) if period is None else period
        self._least = _LEAST_SECONDS if is_remote(folder.path) else 0.0
        self._own, self._lock = bytearray(), threading.Lock()
        self._logs = [
            _Log("worker", lambda start, most: bytes(self._own[start : start + most]), lambda: len(self._own))
        ]
        self._state: dict[str, Any] = {"phase": "starting", "attempt": attempt, "launch_id": launch_id}
        self._step_file: str | None = None
        self._failures = 0
        self._told_stop = self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="reporter")
        self._thread.start()

    def said(self, text: str) -> None:
        """That the worker has printed a line."""
        with self._lock:
            self._own += f"{text}\n".encode(errors="replace")

    def begin_job(self, log: str, step_file: str, **state: Any) -> None:
        """That a job is about to run; `state` is part of state.json."""
        with self._lock:
            self._logs.append(_of_file(f"job-{state['job']}", log))
            self._step_file = step_file
            self._state = {**self._state, "phase": "running", "step": None, **state}
        self._wake.set()

    def wake(self) -> None:
        """Reports at once; to be called from signal handlers, too."""
        self._wake.set()

    def close(self, timeout: float = 60.0, **state: Any) -> None:
        """Reports for the last time, with the last `state`, and waits for it, but not for long."""
        with self._lock:
            self._state = {**self._state, "phase": "ended", **state}
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            closing = self._closing
            begun = time.monotonic()
            steps = [
                self._copy_logs,
                *([self._write_state] if self._writer else []),
                *([] if closing else [self._look]),
            ]
            for step in steps:
                self._guarded(step)
            if closing:
                return
            time.sleep(max(0.0, self._least - (time.monotonic() - begun)))
            self._wake.wait(self._period)
            self._wake.clear()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as e:
            self._failures += 1
            if self._failures in (1, 10, 100, 1000):  # more would only hide the log
                words = f"the launch's folder {self._folder.path} was not updated ({self._failures} times so far)"
                print(f"{words}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)

    def _copy_logs(self) -> None:
        with self._lock:
            logs = list(self._logs)
        for log in logs:
            for name, text in (changes := log.changes()):
                write_atomically(self._folder.join("logs", self._attempt, self._host, name), text)
            if changes:
                log.confirm()

    def _write_state(self) -> None:
        with self._lock:
            state, step_file = dict(self._state), self._step_file
        if step_file is not None:
            try:
                with open(step_file, encoding="utf-8") as f:
                    state["step"] = int(f.read())
            except (OSError, ValueError):
                pass  # before the first step, or just being written
        self._folder.write({**state, "time": launch_folder.now()}, launch_folder.STATE)

    def _look(self) -> None:
        if not self._told_stop and self._folder.stop_requested(self._launch_id):
            self._told_stop = True
            self._on_stop()
