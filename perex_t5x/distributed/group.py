"""The processes of a run while it runs: heartbeats, stopping at the same step, and the end of all when one has ended."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from perex_t5x.cli import status
from perex_t5x.distributed import watchdog
from perex_t5x.distributed.watchdog import Beat, Verdict, Watchdog
from perex_t5x.errors import Reason

_LINGER_SECONDS = 5.0  # that process 0, which holds the store, waits for the others to have read why


class Stopping:
    """Counts the points that the main thread passes, and holds it back at the one that all processes agree on.

    The main thread calls `passes` at points that all processes reach in the same order. When a stop is asked for, every
    process's watchdog freezes its count and tells the others; the largest of the counts is where all stop, since those that
    are behind can still get there. The answer comes from the watchdog, so a main thread that waits in a collective does not
    hold up the agreement; a main thread that reaches its frozen count first waits for it. Costs one lock per point.

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
        """Passes one more point; False where all processes stop instead."""
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
        """Lets the main thread continue up to `limit`, and no further."""
        with self._changed:
            self._limit, self._agreed = limit, True
            self._changed.notify_all()


class Group:
    """This process among the others, with a watchdog: two threads that run whatever the main thread does.

    One thread talks to the store: it writes this process's beat, reads whether somebody has stopped or asks to stop, and in
    process 0 judges all beats. The other only looks at the clock: talking blocks when process 0 is suspended.

    The store's keys: `beat/<i>`; `event/verdict`, why all stop; `event/beat`, process 0's; `event/stop`, somebody was asked
    to stop; `event/limit/<i>`, see `Stopping`; `bye/<i>`, it has read the verdict.
    """

    def __init__(
        self,
        store: Any,
        index: int,
        hosts: Sequence[str],
        *,
        timeout: float,
        phase_timeout: float,
        exit_process: Callable[[int], Any] = os._exit,
    ):
        self.store, self.index, self.hosts = store, index, list(hosts)
        self.timeout, self.phase_timeout = timeout, phase_timeout
        self.stopping = Stopping()
        self._now = (0, "starting", True)  # mark, what, patient; one assignment, which the other threads see as a whole
        self._interval = min(max(timeout / 10, 0.1), 1.0)
        self._exit = exit_process
        self._trouble = False
        self._failure: tuple[float, Verdict] | None = None  # of the main thread: since when, what
        self._number = 0
        self._answered = time.monotonic()
        self._watchdog = Watchdog(hosts, timeout, phase_timeout, self._answered, silence_of=range(1, len(hosts)))
        self._coordinator = Watchdog(hosts[:1], timeout, phase_timeout, self._answered)
        self._told_limit = False
        self._over = threading.Event()
        self._leaving = threading.Lock()
        self._threads = [
            threading.Thread(target=self._talk, name="watchdog-talk", daemon=True),
            threading.Thread(target=self._look, name="watchdog-look", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the watchdog; the run is over."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=5.0)
        faulthandler.cancel_dump_traceback_later()

    # --- what the main thread tells -----------------------------------------------------------------------------------

    def doing(self, what: str, patient: bool) -> None:
        """The main thread begins something. All processes begin the same things in the same order."""
        self._now = (self._now[0] + 1, what, patient)

    def failing(self, message: str, reason: Reason) -> None:
        """The main thread has an error and cleans up. If it is not done in time, the watchdog ends this process."""
        if self._failure is None:
            verdict = watchdog.stopped(self.index, self.hosts[self.index], message, reason)
            self._failure = (time.monotonic(), verdict)

    def wait_for_verdict(self) -> None:
        """After an error that another process may be the cause of: waits until it is clear which, or that none is.

        Does not return if there is one: the watchdog then ends this process.
        """
        self._trouble = True
        deadline = time.monotonic() + min(self.timeout, watchdog.TROUBLE_SECONDS) + 4 * self._interval
        while (left := deadline - time.monotonic()) > 0:
            # A supervisor that has seen the other process end may ask this one to stop; it does so in a moment anyway.
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(left)

    def leave(self, message: str, reason: Reason, shown: str | None = None) -> None:
        """Ends this process, and with it all others, which say 'process i (host) stopped: message'.

        Args:
          message: why.
          reason: with which all of them end.
          shown: printed here; None: nothing, it is already.
        """
        self.end(watchdog.stopped(self.index, self.hosts[self.index], message, reason), shown or "")

    # --- threads ------------------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        while not self._over.is_set():
            if self._exit is os._exit:  # not in a test
                # Should Python itself be stuck (a native call that holds its lock), this ends the process.
                with contextlib.suppress(ValueError, OSError, AttributeError):
                    faulthandler.dump_traceback_later(2 * self.timeout + 30, exit=True)
            try:
                self._talk_once()
                self._answered = time.monotonic()
            except Exception:  # the store does not answer: the other thread keeps the time
                if self._over.is_set():
                    return
            self._over.wait(self._interval)

    def _talk_once(self) -> None:
        self._number += 1
        beat = Beat(self._number, *self._now, self._trouble)
        self.store.set("event/beat" if self.index == 0 else f"beat/{self.index}", beat.to_json())
        if self.stopping.requested:
            self.store.set("event/stop", str(self.index))
        events = self.store.under("event")
        if "verdict" in events:
            self.end(Verdict.from_json(events["verdict"]))
        if "stop" in events:
            self._agree_to_stop(events)
        now = time.monotonic()
        if self.index:
            if "beat" in events:
                self._coordinator.observe(0, Beat.from_json(events["beat"]), now)
            verdict = self._coordinator.verdict(now)
        else:
            self._watchdog.observe(0, beat, now)
            for process, text in self.store.under("beat").items():
                self._watchdog.observe(int(process), Beat.from_json(text), now)
            verdict = self._watchdog.verdict(now)
        if verdict is not None:
            self.end(verdict)
        if self._failure is not None and now - self._failure[0] > self.timeout:
            self.end(self._failure[1])

    def _agree_to_stop(self, events: dict[str, str]) -> None:
        if not self._told_limit:
            self.store.set(f"event/limit/{self.index}", str(self.stopping.freeze()))
            self._told_limit = True
        limits = [int(text) for key, text in events.items() if key.startswith("limit/")]
        if len(limits) == len(self.hosts):
            self.stopping.agree(max(limits))

    def _look(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(self._interval):
            gap, looked = time.monotonic() - looked, time.monotonic()
            if gap > self.timeout / 2:  # this process itself was suspended
                self._answered += gap
            waited = looked - self._answered
            if waited > self.timeout:
                if self._failure is not None:
                    self.end(self._failure[1])
                self.end(watchdog.silent(0, self.hosts[0], waited))

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self, verdict: Verdict, shown: str | None = None) -> None:
        """Tells the others, prints the message unless it is already shown, and ends the process; does not return."""
        if not self._leaving.acquire(blocking=False):
            threading.Event().wait()  # another thread is at it
        if sys.stderr.isatty():
            print("\x1b[?25h", end="", file=sys.stderr)  # a progress bar hides the cursor
        is_stuck = shown is None and verdict.process == self.index and self._failure is None
        said_by_others = shown is None
        shown = f"\nERROR: {verdict.text}" if shown is None else shown
        with contextlib.suppress(OSError, ValueError):
            if is_stuck:
                print(f"This is process {self.index}. Its threads:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=sys.stderr)
            if shown:
                print(shown, file=sys.stderr, flush=True)
        if said_by_others:
            status.write(verdict.reason, verdict.text, caused_by=verdict.process)
        # Talking blocks if process 0 is suspended.
        telling = threading.Thread(target=self._tell, args=(verdict,), daemon=True)
        telling.start()
        telling.join(_LINGER_SECONDS + 1.0 if self.index == 0 else 2.0)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        self._exit(verdict.reason.exit_code)

    def _tell(self, verdict: Verdict) -> None:
        with contextlib.suppress(Exception):
            self.store.set_once("event/verdict", verdict.to_json())
            if self.index:
                self.store.set(f"bye/{self.index}", "")
                return
            expected = len(self.hosts) - 1 - (not verdict.answers)
            deadline = time.monotonic() + _LINGER_SECONDS
            while time.monotonic() < deadline and len(self.store.under("bye")) < expected:
                time.sleep(0.05)

    def end_without_coordinator(self) -> None:
        """Ends this process because process 0 is gone; does not return."""
        self.end(watchdog.vanished(0, self.hosts[0]))


# --- the last word when JAX's native code ends the process ------------------------------------------------------------
#
# JAX's coordination client aborts the process, with a C++ stack trace, the moment process 0 is gone; there is no public way
# to be asked first (its callback cannot take a Python function). The abort raises SIGABRT in the client's own thread, and
# there, unlike in Python's handlers, which run later in the main thread, a C-level handler can still explain and end the
# process.

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handlers: list[Any] = []  # C holds the only other reference


def on_abort(explain: Callable[[], None]) -> None:
    """Has `explain` called on SIGABRT. It ends the process, or returns to let the abort take its course."""
    handler = _HANDLER(lambda number: explain())
    _handlers.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, _HANDLER]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, handler)


def abort_as_usual() -> None:
    """Undoes `on_abort`."""
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
