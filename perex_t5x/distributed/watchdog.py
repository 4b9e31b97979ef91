"""Which process is silent, or makes no progress while the others wait: decided from the processes' heartbeats."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from perex_t5x.errors import Reason

# Once a collective has failed somewhere a process has probably died: then this much silence is enough to know which.
TROUBLE_SECONDS = 5.0
_RESUME = "All processes stop. The same command resumes from the newest whole checkpoint."


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a process says of itself, again and again.

    Attributes:
      number: counts the beats.
      mark: how many things its main thread has begun; all processes begin the same ones, in the same order.
      doing: the last of them, for messages.
      patient: whether that may take long (compiling, restoring, evaluating, saving).
      trouble: whether its main thread has an error that another process may be the cause of.
    """

    number: int
    mark: int = 0
    doing: str = "starting"
    patient: bool = True
    trouble: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Beat:
        return cls(**json.loads(text))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why all processes stop.

    Attributes:
      process: the one because of which.
      text: the message.
      reason: with which all of them end.
      answers: whether that process can still be expected to hear of it.
    """

    process: int
    text: str
    reason: Reason = Reason.PEER_LOST
    answers: bool = True

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        value = json.loads(text)
        return cls(**{**value, "reason": Reason(value["reason"])})


def stopped(process: int, host: str, message: str, reason: Reason) -> Verdict:
    """A process that ended with an error of its own."""
    return Verdict(process, f"process {process} ({host}) stopped: {message}", reason)


def silent(process: int, host: str, seconds: float) -> Verdict:
    """A process of which nothing is heard."""
    return Verdict(
        process,
        f"process {process} ({host}) has not answered for {seconds:.0f} s: it was killed or suspended, or its host or the "
        f"network is gone. {_RESUME}",
        answers=False,
    )


def vanished(process: int, host: str) -> Verdict:
    """A process whose connection was closed without a message."""
    return Verdict(
        process,
        f"process {process} ({host}), the coordinator, has ended without a message: it was killed, or its own log says why. "
        f"{_RESUME}",
        answers=False,
    )


def stuck(process: int, host: str, seconds: float, doing: str) -> Verdict:
    """A process whose main thread makes no progress."""
    return Verdict(
        process,
        f"process {process} ({host}) makes no progress: for {seconds:.0f} s it has been {doing}, and the others wait for "
        f"it. {_RESUME}",
    )


def standing_still(hosts: Sequence[str], seconds: float, doing: str) -> Verdict:
    """All processes are there, and none of them makes progress."""
    return Verdict(
        0,
        f"all {len(hosts)} processes make no progress: for {seconds:.0f} s they have been {doing}, such as with storage or "
        f"a device that does not answer. {_RESUME}",
    )


@dataclasses.dataclass
class _Record:
    beat: Beat
    heard: float  # when its beat last changed
    behind: float | None = None  # since when it has been behind the foremost without a change


class Watchdog:
    """Looks at all processes' beats as they come.

    Args:
      hosts: of all processes, by index.
      timeout: seconds of silence after which a process is taken for dead, and without progress between steps.
      phase_timeout: seconds that a process may be behind the others in something that may take long, and that all of them
        may take for the same thing once they have begun to train.
      now: the time, in seconds; every call gives it.
      silence_of: the processes whose silence counts.
    """

    def __init__(self, hosts: Sequence[str], timeout: float, phase_timeout: float, now: float, silence_of: Any = None):
        self._hosts, self._timeout, self._phase_timeout = hosts, timeout, phase_timeout
        self._silence_of = range(len(hosts)) if silence_of is None else silence_of
        self._records = {i: _Record(Beat(-1), now) for i in range(len(hosts))}
        self._looked = self._moved = now  # when a process last began something

    def observe(self, process: int, beat: Beat, now: float) -> None:
        record = self._records[process]
        if beat.number != record.beat.number:
            record.heard = now
        if beat.mark != record.beat.mark:
            self._moved = now
        if (beat.mark, beat.patient) != (record.beat.mark, record.beat.patient):
            record.behind = None
        record.beat = beat

    def verdict(self, now: float) -> Verdict | None:
        """What is wrong, if anything is. To be asked much more often than the timeout."""
        gap, self._looked = now - self._looked, now
        if gap > self._timeout / 2:  # this process itself was suspended: no time to have heard anybody
            self._moved += gap
            for record in self._records.values():
                record.heard += gap
                record.behind = None
        trouble = any(r.beat.trouble for r in self._records.values())
        allowed = min(self._timeout, TROUBLE_SECONDS) if trouble else self._timeout
        for i in self._silence_of:
            if now - self._records[i].heard > allowed:
                return silent(i, self._hosts[i], now - self._records[i].heard)
        return self._without_progress(now)

    def _without_progress(self, now: float) -> Verdict | None:
        marks = {i: r.beat.mark for i, r in self._records.items()}
        foremost = max(marks.values())
        for i in sorted(marks, key=lambda i: (marks[i], i)):
            record = self._records[i]
            if record.beat.mark == foremost:
                record.behind = None
                continue
            if record.behind is None:
                record.behind = now
            waited = now - record.behind
            if waited > (self._phase_timeout if record.beat.patient else self._timeout):
                return stuck(i, self._hosts[i], waited, record.beat.doing)
        # Before they train, a large copy of the data may be in the making.
        if len(marks) > 1 and foremost and now - self._moved > self._phase_timeout:
            return standing_still(self._hosts, now - self._moved, self._records[0].beat.doing)
        return None
