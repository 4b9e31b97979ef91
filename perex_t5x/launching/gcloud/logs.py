"""Following a run: its log as it grows, its end, and a slice that is taken away."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import IO

from perex_t5x.errors import TrainingError
from perex_t5x.launching.gcloud import remote
from perex_t5x.launching.gcloud.steps import Steps, UnreachableError
from perex_t5x.launching.shell import end, say

PREEMPTED, DELETED, LOST, UNSTARTED = "preempted", "deleted", remote.LOST, "unstarted"
_MOST_CONNECTIONS = 20  # in a row that bring nothing
_GRACE_LOOKS = 5


@dataclass
class Follower:
    """Prints worker 0's log until the program has ended or the slices are gone; called again, from there on."""

    steps: Steps
    _bytes: int = 0
    _silent: int = 0

    def follow(self) -> str:
        """How it ended: the worker's exit status as text, 'preempted', 'deleted' (by somebody), 'lost' (the host knows
        nothing of its end), or 'unstarted'.

        Raises:
          TrainingError: no connection, though the slices are there; the program may be running.
        """
        if self.steps.commands.dry_run:
            self.steps.commands.run(self._argv())
            return "0"
        while True:
            ended = self._connection()
            if ended == "130":
                # Somebody has stopped it, or the slice is about to go: then that shows within a minute or two.
                return self._going() or ended
            if ended is not None:
                return ended
            if gone := self._gone():
                return gone
            if self._silent > _MOST_CONNECTIONS:
                raise TrainingError(
                    f"worker 0 of {self.steps.target.nodes[0]} cannot be reached any more, though its state is ACTIVE; the "
                    "program may be running."
                )
            pause = min(self.steps.poll, self.steps.commands.wait * 2 ** min(self._silent, 6))
            say(f"connection lost; again in {pause:g} s")
            self.steps.sleep(pause)

    def _argv(self) -> list[str]:
        target = self.steps.target
        return target.ssh(target.nodes[0], remote.follow(target.name, self._bytes), worker="0")

    def _gone(self, nodes: bool = True) -> str | None:
        """What became of the slices; None where they are there, or nobody can say so now: a running slice is worth more
        than a quick answer."""
        try:
            state = self.steps.describe().state
            if state in ("GONE", "DELETING"):
                return DELETED  # one that was taken away is SUSPENDED
            if state != "ACTIVE" or (nodes and not self.steps.nodes_ready()):
                return PREEMPTED
        except UnreachableError as e:
            say(str(e))
        return None

    def _going(self) -> str | None:
        for _ in range(_GRACE_LOOKS):
            if gone := self._gone():
                return gone
            self.steps.sleep(self.steps.poll)
        return None

    def _connection(self) -> str | None:
        """One connection; None where it ended before the program did."""
        argv = self._argv()
        self.steps.commands.record.append(tuple(argv))
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        self._silent += 1
        blank = 0  # lines; the last one before the exit status is not the log's
        try:
            while True:
                try:
                    line = lines.get(timeout=self.steps.poll)
                except queue.Empty:
                    # Nothing was said for a while: is the slice still there? A connection to one that is not may hang.
                    if gone := self._gone(nodes=False):
                        return gone
                    continue
                if line is None:
                    return None
                words = line.decode(errors="replace").split()
                if len(words) == 2 and words[0] == remote.EXIT:
                    self._bytes += max(blank - 1, 0)
                    return words[1]
                self._silent = 0
                blank, counted = (blank + 1, 0) if line == b"\n" else (0, blank + len(line))
                self._bytes += counted
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more: the run is worth more
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
        finally:
            end(process, grace=2, close=False)


def _read(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    with stream:
        for line in iter(stream.readline, b""):
            lines.put(line)
    lines.put(None)
