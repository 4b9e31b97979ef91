"""Following a run: its log as it grows, its end, and the preemption of its slices."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import IO

from perex_t5x.errors import Reason, TrainingError
from perex_t5x.launching.gcloud import remote
from perex_t5x.launching.gcloud.steps import Steps, UnreachableError
from perex_t5x.launching.shell import end, say

EXITED, PREEMPTED, DELETED, LOST, UNSTARTED = "exited", "preempted", "deleted", remote.LOST, remote.UNSTARTED
_MOST_CONNECTIONS = 20  # in a row without output
_GRACE_CHECKS = 5


@dataclass(frozen=True)
class Ended:
    """How following ended.

    Attributes:
      how: EXITED, PREEMPTED, DELETED (by somebody), LOST (the worker is gone and has left no exit code), or UNSTARTED.
      exit_code: of a worker that has EXITED.
    """

    how: str
    exit_code: int | None = None

    @property
    def reason(self) -> Reason | None:
        """Of a worker that has EXITED."""
        return None if self.exit_code is None else Reason.of_exit_code(self.exit_code)

    def __str__(self) -> str:
        return f"exit code {self.exit_code} ({self.reason})" if self.how == EXITED else self.how


@dataclass
class Follower:
    """Prints worker 0's log until the program has ended or the slices are gone; called again, it continues from there."""

    steps: Steps
    _bytes: int = 0
    _silent: int = 0

    def follow(self) -> Ended:
        """Returns how it ended.

        Raises:
          TrainingError: no connection although the slices exist; the program may be running.
        """
        if self.steps.commands.dry_run:
            self.steps.commands.run(self._argv())
            return Ended(EXITED, 0)
        while True:
            ended = self._connection()
            if ended is not None and ended.reason is Reason.INTERRUPTED:
                # Somebody has stopped it, or the slice is being preempted, which shows within a minute or two.
                return self._going() or ended
            if ended is not None:
                return ended
            if gone := self._gone():
                return gone
            if self._silent > _MOST_CONNECTIONS:
                raise TrainingError(
                    f"worker 0 of {self.steps.target.nodes[0]} cannot be reached although its state is ACTIVE; the program "
                    "may be running."
                )
            pause = min(self.steps.poll, self.steps.commands.wait * 2 ** min(self._silent, 6))
            say(f"connection lost; retrying in {pause:g} s")
            self.steps.sleep(pause)

    def _argv(self) -> list[str]:
        target = self.steps.target
        return target.ssh(target.nodes[0], remote.follow(target.name, self._bytes), worker="0")

    def _gone(self, nodes: bool = True) -> Ended | None:
        """How the slices ended; None while they exist, or if the cloud does not answer now: waiting is cheaper than giving
        up a running slice."""
        try:
            state = self.steps.describe().state
            if state in ("GONE", "DELETING"):
                return Ended(DELETED)  # one that was preempted is SUSPENDED
            if state != "ACTIVE" or (nodes and not self.steps.nodes_ready()):
                return Ended(PREEMPTED)
        except UnreachableError as e:
            say(str(e))
        return None

    def _going(self) -> Ended | None:
        for _ in range(_GRACE_CHECKS):
            if gone := self._gone():
                return gone
            self.steps.sleep(self.steps.poll)
        return None

    def _connection(self) -> Ended | None:
        """One connection; None where it ended before the program did."""
        argv = self._argv()
        self.steps.commands.record.append(tuple(argv))
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        self._silent += 1
        blank = 0  # lines; the last one before the host's status is not the log's
        try:
            while True:
                try:
                    line = lines.get(timeout=self.steps.poll)
                except queue.Empty:
                    # No output for a while: does the slice still exist? A connection to one that does not may hang.
                    if gone := self._gone(nodes=False):
                        return gone
                    continue
                if line is None:
                    return None
                if status := remote.HostStatus.parse(line.decode(errors="replace")):
                    self._bytes += max(blank - 1, 0)
                    return Ended(EXITED if status.state == remote.ENDED else status.state, status.exit_code)
                self._silent = 0
                blank, counted = (blank + 1, 0) if line == b"\n" else (0, blank + len(line))
                self._bytes += counted
                with contextlib.suppress(OSError, ValueError):  # a closed stdout must not end the run
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
        finally:
            end(process, grace=2, close=False)


def _read(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    with stream:
        for line in iter(stream.readline, b""):
            lines.put(line)
    lines.put(None)
