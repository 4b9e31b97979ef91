"""Errors that a user can fix, and the table of reasons and exit codes with which every command ends.

The message says what was wrong, where, and what to do about it; the command line prints it without a stack trace. Machines
read the exit code, or `status.json` (see `perex_t5x.cli.status`), never the message.
"""

from __future__ import annotations

import difflib
import enum
import errno
import re
from collections.abc import Iterable


class Reason(enum.StrEnum):
    """Why a process ended. Each has its own exit code; `Reason.of_exit_code` is the way back.

    >>> Reason.DIVERGED.exit_code, Reason.of_exit_code(5)
    (5, <Reason.DIVERGED: 'diverged'>)
    >>> Reason.of_exit_code(-9), Reason.of_exit_code(137)
    (<Reason.KILLED: 'killed'>, <Reason.KILLED: 'killed'>)
    """

    DONE = "done"
    ERROR = "error"  # anything unexpected: a bug, a disk that fails, a device that fails
    CONFIGURATION = "configuration"  # the configuration has to change first
    SOME_FAILED = "some_failed"  # of several jobs: all have ended, some of them for good without success
    BUSY = "busy"  # another process is already doing this
    DIVERGED = "diverged"  # loss or parameters are not finite; the same run would diverge again
    UNREACHABLE = "unreachable"  # at the start: processes did not find each other, or storage did not answer
    PEER_LOST = "peer_lost"  # another process of the run died, hangs or cannot be reached any more
    NO_SPACE = "no_space"  # the disk or the quota is full
    NO_PROGRESS = "no_progress"  # of a launch: several attempts in a row began at the same step and failed
    STOPPED = "stopped"  # of a launch: all hosts were asked to stop, and nobody is to restart them
    TIMEOUT = "timeout"  # a supervisor's time limit
    INTERRUPTED = "interrupted"  # asked to stop, by Ctrl-C or SIGTERM
    KILLED = "killed"  # by a signal; such a process leaves no status

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self]

    @property
    def final(self) -> bool:
        """Whether a restart without any change would be pointless: launchers end, and do not restart."""
        return self in _FINAL

    @property
    def retryable(self) -> bool:
        """Whether the same command, started again, may get further without any change.

        A full disk and a folder in use are among these: another host has an empty disk, and the folder may be free by then.
        A launch in which they persist ends with `NO_PROGRESS`.
        """
        return self is not Reason.DONE and self not in _FINAL

    @classmethod
    def of_exit_code(cls, code: int) -> Reason:
        """The reason behind an exit code, as `subprocess` (−9) or a shell (137) reports it."""
        if code < 0 or (code > 128 and code != _EXIT_CODES[cls.INTERRUPTED]):
            return cls.KILLED
        return next((reason for reason, known in _EXIT_CODES.items() if known == code), cls.ERROR)


_EXIT_CODES = {
    Reason.DONE: 0,
    Reason.ERROR: 1,
    Reason.CONFIGURATION: 2,
    Reason.SOME_FAILED: 3,
    Reason.BUSY: 4,
    Reason.DIVERGED: 5,
    Reason.UNREACHABLE: 6,
    Reason.PEER_LOST: 7,
    Reason.NO_SPACE: 8,
    Reason.NO_PROGRESS: 9,
    Reason.STOPPED: 10,
    Reason.TIMEOUT: 124,  # as of `timeout`(1)
    Reason.INTERRUPTED: 130,  # as of a shell after Ctrl-C
    Reason.KILLED: 137,  # of SIGKILL; other signals have 128 + their number
}
_FINAL = frozenset({Reason.CONFIGURATION, Reason.SOME_FAILED, Reason.DIVERGED, Reason.NO_PROGRESS, Reason.STOPPED})


class ConfigError(ValueError):
    """A configuration error, found before the first compile where possible."""

    reason = Reason.CONFIGURATION


class TrainingError(RuntimeError):
    """A run that cannot continue; the message says what is saved."""

    reason = Reason.ERROR


class UnreachableError(TrainingError):
    """The processes of a run did not find each other in time, or its storage did not answer."""

    reason = Reason.UNREACHABLE


class PeerLostError(TrainingError):
    """The processes of a run have lost each other."""

    reason = Reason.PEER_LOST


class InUseError(TrainingError):
    """Another process writes to the run's folder."""

    reason = Reason.BUSY


class NoSpaceError(TrainingError):
    """The disk, or the quota on it, is full."""

    reason = Reason.NO_SPACE


class DeniedError(TrainingError):
    """A permission is missing: the same would be refused again."""

    reason = Reason.CONFIGURATION


def is_denied(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, is an object store's refusal (403), in any of its clients' words.

    >>> is_denied(OSError("HTTP response code 403 with body ...")), is_denied(OSError("HTTP response code 503"))
    (True, False)
    """
    while error is not None:
        if re.search(r"\b403\b|PERMISSION_DENIED|does not have storage\.", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def first_line(error: BaseException) -> str:
    """What an error says, in a line; its class where it says nothing.

    >>> first_line(OSError("no\\nmore")), first_line(KeyError())
    ('no', 'KeyError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def writing_failed(message: str, cause: BaseException) -> TrainingError:
    """The error for something that could not be written, with the reason that fits its cause.

    >>> writing_failed("cannot write x", OSError(28, "No space left on device")).reason
    <Reason.NO_SPACE: 'no_space'>
    """
    if is_full_disk(cause):
        return NoSpaceError(message)
    return DeniedError(message) if is_denied(cause) else TrainingError(message)


class DivergedError(TrainingError):
    """The loss or the parameters are not finite; the same configuration would diverge again.

    Attributes:
      step: at which it was seen.
      finding: what was seen, in short: 'the loss is nan'.
      first_step: the first that is to blame.
    """

    reason = Reason.DIVERGED

    def __init__(self, message: str, step: int, finding: str, first_step: int | None = None):
        super().__init__(message)
        self.step, self.finding, self.first_step = step, finding, step if first_step is None else first_step


def did_you_mean(name: str, known: Iterable[str], *, count: int = 1) -> str:
    """Returns " Did you mean 'x'?" for the known names nearest to `name`, or "" if none is near.

    >>> did_you_mean("TRAIN_STEP", ["TRAIN_STEPS", "MODEL_DIR"])
    " Did you mean 'TRAIN_STEPS'?"
    >>> did_you_mean("zebra", ["TRAIN_STEPS"])
    ''
    >>> did_you_mean("num_layers", ["scan_layers", "num_encoder_layers", "num_decoder_layers"])  # those with all its words
    " Did you mean 'num_encoder_layers' or 'num_decoder_layers'?"
    """
    known, words = list(known), set(name.split("_"))
    near = difflib.get_close_matches(name, known, n=count, cutoff=0.9)  # a typing error
    if not near and len(words) > 1:
        near = [other for other in known if words < set(other.split("_"))]
    if not 0 < len(near) <= max(count, 2):
        near = difflib.get_close_matches(name, known, n=count, cutoff=0.6)
    if not near:
        return ""
    return " Did you mean " + " or ".join(repr(n) for n in near) + "?"
