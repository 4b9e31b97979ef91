"""Lets all processes stop at the same place when one of them is asked to."""

from __future__ import annotations

import threading


class Stopping:
    """Counts the places that the main thread passes, and holds it back at the one that all processes agree on.

    The main thread calls `passes` at places that all processes reach in the same order. When a stop is asked for, every
    process's watchdog freezes its count and tells the others; the largest of the counts is where all stop, since those that
    are behind can still get there. The answer comes from the watchdog, so a main thread that waits in a collective does not
    hold up the agreement; a main thread that reaches its frozen count first waits for it. Costs one lock a place.

    >>> stopping = Stopping()
    >>> stopping.passes(), stopping.passes()
    (True, True)
    >>> stopping.freeze()
    2
    >>> stopping.agree(3)  # another process was at 3
    >>> stopping.passes(), stopping.passes()
    (True, False)
    """

    def __init__(self) -> None:
        self.requested = False  # set by a signal handler, which must not take a lock
        self.mark = 0
        self.stopped = False  # the main thread is where all processes stop
        self._limit: int | None = None
        self._agreed = False
        self._changed = threading.Condition()

    def passes(self) -> bool:
        """Passes one more place; False where all processes stop instead."""
        with self._changed:
            while self._limit is not None and self.mark >= self._limit:
                if self._agreed:
                    self.stopped = True
                    return False
                self._changed.wait(0.1)  # in short waits, so that a second signal gets through
            self.mark += 1
            return True

    def freeze(self) -> int:
        """Lets the main thread pass no further for now; returns its count."""
        with self._changed:
            if self._limit is None:
                self._limit = self.mark
            return self._limit

    def agree(self, limit: int) -> None:
        """Lets the main thread go on up to `limit`, and no further."""
        with self._changed:
            self._limit, self._agreed = limit, True
            self._changed.notify_all()
