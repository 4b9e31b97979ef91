"""What a command prints while it runs: this package's own messages and everybody's warnings, one short line each."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator

from absl import logging as absl_logging

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


@contextlib.contextmanager
def native_noise_hidden() -> Iterator[None]:
    """Holds back what native libraries write to the stderr file descriptor; shown after all if the block fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(kept, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def import_tensorflow_quietly() -> None:
    """Imports SeqIO and TensorFlow without their remarks on missing GPUs; TensorFlow reads data here, on the CPU."""
    with native_noise_hidden():
        import seqio  # noqa: F401
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
