"""The last word when JAX's native code ends the process.

JAX's coordination client aborts the process, with a C++ stack trace, the moment process 0 is gone; there is no public way to
be asked first (its callback cannot take a Python function). The abort raises SIGABRT in the client's own thread, and there,
unlike in Python's handlers, which run later in the main thread, a C-level handler can still explain and end the process.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from typing import Any

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept: list[Any] = []  # C holds the only other reference


def on_abort(explain: Callable[[], None]) -> None:
    """Has `explain` called on SIGABRT. It ends the process, or returns to let the abort take its course."""
    handler = _HANDLER(lambda number: explain())
    _kept.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, _HANDLER]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, handler)


def as_usual() -> None:
    """Lets SIGABRT do again what it does without us."""
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
