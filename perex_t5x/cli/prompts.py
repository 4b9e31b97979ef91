"""Questions on the terminal."""

from __future__ import annotations

import sys

from perex_t5x.errors import ConfigError


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
