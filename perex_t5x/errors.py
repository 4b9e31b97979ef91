"""Errors a user can mend: the message says what was wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A slip in the configuration, found before the first compile where possible.

    The command line prints the message alone, without a stack trace, and exits with status 2.
    """


class TrainingError(RuntimeError):
    """A run that cannot go on (non-finite loss, full disk); the message says what is saved."""


class DivergedError(TrainingError):
    """The loss or the parameters are not finite: the configuration's doing, so that another try would end alike.

    Attributes:
      step: at which it was seen.
      finding: what was seen, in short: 'the loss is nan'.
    """

    def __init__(self, message: str, step: int, finding: str):
        super().__init__(message)
        self.step, self.finding = step, finding


def did_you_mean(name: str, known: Iterable[str], *, count: int = 1) -> str:
    """Returns " Did you mean 'x'?" for the known names nearest to `name`, or "" if none is near.

    >>> did_you_mean("TRAIN_STEP", ["TRAIN_STEPS", "MODEL_DIR"])
    " Did you mean 'TRAIN_STEPS'?"
    >>> did_you_mean("zebra", ["TRAIN_STEPS"])
    ''
    """
    near = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)
    if not near:
        return ""
    return " Did you mean " + " or ".join(repr(n) for n in near) + "?"
