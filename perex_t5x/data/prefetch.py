"""Makes the next batches in a background thread while the devices work on this one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

from perex_t5x.data.device_batches import Shardings
from perex_t5x.data.feed import EndOfData, Feed


class prefetch(Iterator):  # noqa: N801 (used like a function: `for step, batch in prefetch(...)`)
    """Iterates over (step, batch) from `start_step`, up to `buffer` batches ahead.

    An exception of the feed is raised where the batch would have been. `close()` (or leaving a
    `with` block) stops the thread and waits for it; it may be called twice.
    """

    def __init__(self, feed: Feed, start_step: int, shardings: Shardings | None = None, buffer: int = 2):
        if buffer < 1:
            raise ValueError(f"buffer = {buffer}: must be at least 1")
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=buffer)
        self._stop = threading.Event()
        self._finished = False
        self._thread = threading.Thread(
            target=self._work, args=(feed, start_step, shardings), name="prefetch", daemon=True
        )
        self._thread.start()

    def _put(self, kind: str, value: Any) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put((kind, value), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _work(self, feed: Feed, step: int, shardings: Shardings | None) -> None:
        try:
            while self._put("batch", (step, feed.batch(step, shardings))):
                step += 1
        except EndOfData:
            self._put("end", None)
        except BaseException as e:
            self._put("error", e)

    def __next__(self) -> tuple[int, dict[str, Any]]:
        if self._finished:
            raise StopIteration
        kind, value = self._queue.get()
        if kind == "batch":
            return value
        self._finished = True
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        self._finished = True
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> prefetch:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
