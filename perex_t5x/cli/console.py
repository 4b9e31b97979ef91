"""What a command prints while it runs, one short line each; and what it asks on the terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
import time

from absl import logging as absl_logging

from perex_t5x.errors import ConfigError
from perex_t5x.hardware.devices import native_noise_hidden

_PACKAGE = __name__.split(".")[0]


class _ConsoleHandler(logging.Handler):
    """Prints to whatever `sys.stderr` is at the time: a live progress bar redirects it to stay below the messages."""

    def emit(self, record: logging.LogRecord) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
        # If stderr is closed or its disk is full, a message is not worth a run.
        with contextlib.suppress(OSError, ValueError):
            print(f"{clock} {mark}{record.getMessage()}", file=sys.stderr, flush=True)


def _is_ours_or_serious(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or f"/{_PACKAGE}/" in record.pathname.replace("\\", "/")


def set_up(everything: bool = False, quiet: bool = False) -> None:
    """Routes log messages to the terminal.

    Args:
      everything: other libraries' chatter, too (`--alsologtostderr`).
      quiet: warnings and errors only, as in processes other than the first.
    """
    absl_logging.set_verbosity(absl_logging.INFO)
    handler = _ConsoleHandler()
    if not everything:
        handler.addFilter(_is_ours_or_serious)
        handler.setLevel(logging.WARNING if quiet else logging.NOTSET)
    absl_logging.use_absl_handler()
    root = logging.getLogger()
    root.handlers = [handler]
    logging.getLogger("absl").handlers = []
    logging.getLogger("absl").propagate = True


def import_tensorflow_quietly() -> None:
    """Imports SeqIO and TensorFlow without their remarks on missing GPUs; TensorFlow reads data here, on the CPU."""
    with native_noise_hidden():
        import seqio  # noqa: F401
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")


def confirm(question: str, *, refused: str | None = None) -> bool:
    """Asks `question [y/N]` on the terminal; returns the answer. The end of input (Ctrl-D) is a no.

    Args:
      question: such as "Delete all 3?".
      refused: if given, a no raises `ConfigError` with this message, and so does a stdin that is not a terminal.

    Raises:
      ConfigError: see `refused`; without it a stdin that is not a terminal is a no.
    """
    if not is_interactive():
        if refused is None:
            return False
        raise ConfigError(f"{refused} {question!r} cannot be asked: stdin is not a terminal. Give --yes.")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not answer and refused is not None:
        raise ConfigError(refused)
    return answer


def is_interactive() -> bool:
    """Whether a person can be asked."""
    return sys.stdin is not None and sys.stdin.isatty()
