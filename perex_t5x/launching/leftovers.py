"""Nothing stays behind unnoticed: what was created is deleted when something fails, or named with the way to delete it.

    with Leftovers(commands) as leftovers:
        leftovers.add("queued resource a", ["gcloud", ..., "delete", "a"])   # before it is created
        ...
        leftovers.keep("queued resource a")                                  # it shall stay

Whatever ends the block early (an error, Ctrl-C, SIGTERM), each resource is deleted. One that cannot be deleted, or that
`--keep` keeps, is a note of the exception; `program.run` prints the notes as its last lines.
"""

from __future__ import annotations

import re
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from perex_t5x.launching.shell import Commands

# In the words of gcloud and kubectl. No looser: a tool that breaks with FileNotFoundError has deleted nothing.
GONE = r"\bNOT_FOUND\b|\(NotFound\)|\b(was|were|be) not found\b|\bcould not be found\b"
NOT_GONE = rf"(?s)\A(?!.*({GONE}))"  # worth another try
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def still_there(what: str, delete: Sequence[str]) -> str:
    """The words that name a resource which stays."""
    return f"still there: {what}; delete it with: {shlex.join(delete)}"


class Leftovers:
    """Resources of one launch, deleted in the reverse order of their creation."""

    def __init__(self, commands: Commands, keep: bool = False):
        self._commands, self._keep = commands, keep
        self._created: dict[str, tuple[str, ...]] = {}
        self._former: dict[int, Any] = {}

    def add(self, what: str, delete: Sequence[str]) -> None:
        """Before the command that creates it: Ctrl-C may come in the middle of that. Deleting what is not there is fine."""
        self._created[what] = tuple(delete)

    def keep(self, what: str) -> None:
        """It is deleted, or shall stay whatever happens now."""
        self._created.pop(what, None)

    def delete_all(self) -> list[str]:
        """Deletes everything now; returns words for what is still there."""
        left = []
        for what, delete in reversed(list(self._created.items())):
            if self._keep:
                left.append(still_there(what, delete))
                continue
            print(f"deleting {what}", file=sys.stderr, flush=True)
            if not self._deleted(delete):
                left.append(still_there(what, delete))
            self.keep(what)
        return left

    def _deleted(self, delete: Sequence[str]) -> bool:
        try:
            done = self._commands.run(delete, check=False, retries=2, retry_on=[NOT_GONE], timeout=1800)
        except (Exception, KeyboardInterrupt):  # a second Ctrl-C: then it is named
            return False
        return done.returncode == 0 or re.search(GONE, done.stderr) is not None

    def __enter__(self) -> Leftovers:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's is not
            self._former = {number: signal.signal(number, _interrupt) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                for words in self.delete_all():
                    error.add_note(words)
        finally:
            for number, handler in self._former.items():
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")
