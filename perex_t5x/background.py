"""Writing in a background thread, so that the chips do not wait for storage."""

from __future__ import annotations

import contextlib
import errno
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from absl import logging

_T = TypeVar("_T")

_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try
_SECONDS = 60.0  # after which nothing is tried again: a storage's own library may have tried for minutes
# Storage's own libraries, by name, since none of them is imported here: TensorFlow's, google-cloud-storage's, requests'.
_TRANSIENT = {
    "UnavailableError", "DeadlineExceededError", "ResourceExhaustedError", "AbortedError", "InternalError", "UnknownError",
    "TooManyRequests", "ServerError", "RetryError", "TransportError", "ConnectionError", "Timeout", "ChunkedEncodingError",
}  # fmt: skip
_TRANSIENT_ERRNO = {errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.EPIPE, errno.EAGAIN, errno.ESTALE}


class BackgroundWriter:
    """Calls functions in one thread, in the order given.

    `put` returns at once, unless `most` functions are waiting already: then it waits, and nothing is dropped. The first
    error ends the work: it is raised in the caller, by whatever method is called next, and what still waits is left undone.

    Args:
      name: of the thread.
      tick: called in the thread after the functions that were waiting; writes what is due, and returns the seconds until it
        wants to be called again, or None: after the next function.
      explained: makes the error that the caller sees from the one in the thread.
      most: functions that may wait.
    """

    def __init__(
        self,
        name: str,
        tick: Callable[[], float | None] = lambda: None,
        explained: Callable[[Exception], Exception] = lambda e: e,
        most: int = 1000,
    ):
        self._name, self._tick, self._explained = name, tick, explained
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(most)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def put(self, job: Callable[[], object]) -> None:
        """Has `job` called in the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        while True:
            self.raise_errors()
            try:
                return self._queue.put(job, timeout=0.5)
            except queue.Full:
                continue

    def raise_errors(self) -> None:
        """Raises the error of an earlier write, if there was one; does not wait."""
        if self._error is not None:
            raise self._explained(self._error) from self._error

    def flush(self) -> None:
        """Waits until all that was put is done."""
        if self._thread is not None:
            done = threading.Event()
            self.put(done.set)
            while not done.wait(0.5):
                self.raise_errors()
        self.raise_errors()

    def close(self) -> None:
        """Waits until all is done, and ends the thread. May be called twice."""
        try:
            self.flush()
        finally:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
                thread.join()

    def _work(self) -> None:
        wait: float | None = None
        while True:
            try:
                jobs = [self._queue.get(timeout=wait)]
                jobs += [self._queue.get_nowait() for _ in range(self._queue.qsize())]
            except queue.Empty:
                jobs = []
            try:
                if self._error is None:
                    for job in jobs:
                        if job is not None:
                            job()
                    wait = self._tick()
            except Exception as e:
                self._error, wait = e, None
            if jobs and jobs[-1] is None:
                return


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and signals like it are heard at the end, a second one at once.

    For libraries whose threads would go on writing, into a folder that is being removed by then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = {int(number): handler for number in numbers if callable(handler := signal.getsignal(number))}
    heard: list[int] = []

    def later(number: int, frame: Any) -> None:
        heard.append(number)
        if len(heard) > 1:
            former[number](number, frame)

    for number in former:
        signal.signal(number, later)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if heard:
        former[heard[0]](heard[0], None)


def retried(write: Callable[[], _T], what: str, pauses: tuple[float, ...] = _PAUSES) -> _T:
    """`write()`, tried again for about half a minute where the storage's error is one that passes."""
    begun = time.monotonic()
    for pause in pauses:
        try:
            return write()
        except Exception as e:
            if not is_transient(e) or time.monotonic() - begun > _SECONDS:
                raise
            logging.warning("%s failed (%s: %s): trying again in %g s", what, type(e).__name__, e, pause)
            time.sleep(pause)
    return write()


def is_transient(error: BaseException) -> bool:
    """Whether the same write may succeed in a moment: a time-out, a lost connection, a storage that asks to slow down.

    >>> is_transient(ConnectionResetError()), is_transient(TimeoutError()), is_transient(OSError(28, "No space left"))
    (True, True, False)
    >>> is_transient(PermissionError(13, "Permission denied")), is_transient(ValueError("bad"))
    (False, False)
    """
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & _TRANSIENT) or isinstance(error, TimeoutError)
