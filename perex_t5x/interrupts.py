"""Signals that ask a run to stop: it saves and stops at the end of its step; of several processes all at the same one."""

from __future__ import annotations

import signal
import threading
from typing import Any

from absl import logging

from perex_t5x import distributed
from perex_t5x.cli import status


class Interrupts:
    """Ctrl-C or SIGTERM asks the loop to save and stop; a second one stops at once.

    Several processes stop at the same step, whichever of them was asked.

    Args:
      asked: set by whoever else wants the loop to stop, where signals are someone else's; None: signals alone.
    """

    def __init__(self, asked: threading.Event | None = None) -> None:
        self._asked = asked or threading.Event()
        self._handles_signals = asked is None and threading.current_thread() is threading.main_thread()
        self._former: dict[int, Any] = {}
        group = distributed.group()
        self._stopping = None if group is None else group.stopping

    def stop_here(self) -> bool:
        """Whether to save and stop now. All processes ask at the same places, and get the same answer."""
        return self._asked.is_set() if self._stopping is None else not self._stopping.passes()

    def __enter__(self) -> Interrupts:
        if self._handles_signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._note)
            if name := status.interruption():  # while starting, in a place where it was not heard
                self.__exit__()
                raise KeyboardInterrupt(f"stopped by {name} before the first step. The same command starts again.")
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self._asked.is_set():
            raise KeyboardInterrupt("stopped at once, without saving")
        self._asked.set()
        if self._stopping is not None:
            self._stopping.requested = True
        logging.info("asked to stop: saving a checkpoint after this step (a second signal stops at once)")
