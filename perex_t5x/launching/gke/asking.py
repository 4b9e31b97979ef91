"""Questions on the terminal."""

from __future__ import annotations

import sys

from perex_t5x.errors import ConfigError


def yes(question: str) -> bool:
    """Whether the answer begins with y; the end of input is a no."""
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def require(question: str) -> None:
    """Raises `ConfigError` unless a person at a terminal says yes."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to answer on: give --yes.")
    if not yes(f"{question} [y/N] "):
        raise ConfigError("nothing was changed.")
