"""Goodput: of a run's wall-clock time, over all its restarts, what was productive and what the rest went into.

Every start of a run is an attempt. Its process 0 notes at any time which one thing the main thread is about, and keeps the
sums in `MODEL_DIR/goodput/<when it began>.json`; `of_run` adds the attempts up. Light: a launcher on a laptop can read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from absl import logging

from perex_t5x import files
from perex_t5x.background import retried

FOLDER = "goodput"
PERIOD = 60.0  # seconds between writes, besides those at checkpoints and at the end
# In the order in which they are shown.
PHASES = {
    "steps": "productive steps",
    "repeated": "repeated steps",  # made again after a restart, since no checkpoint had them
    "compile": "compiling",
    "restore": "restoring or initialising",
    "save": "saving",
    "evaluate": "evaluating",
    "data": "waiting for data",
    "start": "starting",  # imports, finding the other processes, checks, opening the data
    "down": "down",  # between an attempt's last sign of life and the next one's start
}


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of a run, as far as it is recorded.

    Attributes:
      begun: milliseconds since 1970.
      milliseconds: by phase.
      first_step: that it began after.
      step: the last one that it made.
      done: whether it has reached the run's last step.
    """

    begun: int
    milliseconds: Mapping[str, int]
    first_step: int = 0
    step: int = 0
    done: bool = False

    @property
    def until(self) -> int:
        return self.begun + sum(self.milliseconds.values())

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Attempt:
        """Raises `ValueError` for anything else; fields and phases of a newer version are left out."""
        value = json.loads(text)
        if not isinstance(value, dict) or not isinstance(value.get("milliseconds"), dict):
            raise ValueError(f"not an attempt: {text[:80]!r}")
        sums = {phase: int(ms) for phase, ms in value["milliseconds"].items() if phase in PHASES}
        steps = {name: int(value[name]) for name in ("first_step", "step")}
        return cls(begun=int(value["begun"]), milliseconds=sums, **steps, done=value.get("done") is True)


@dataclasses.dataclass(frozen=True)
class Goodput:
    """What a run's wall-clock time went into.

    Attributes:
      milliseconds: by phase, every one of `PHASES`; they add up to the wall-clock time exactly.
      attempts: how many times the run was started.
      step: the last one that was made.
    """

    milliseconds: Mapping[str, int]
    attempts: int
    step: int

    @property
    def wall_clock(self) -> float:
        """Seconds."""
        return sum(self.milliseconds.values()) / 1000

    @property
    def seconds(self) -> dict[str, float]:
        return {phase: ms / 1000 for phase, ms in self.milliseconds.items()}

    @property
    def shares(self) -> dict[str, float]:
        """Of the wall-clock time, by phase."""
        total = max(1, sum(self.milliseconds.values()))
        return {phase: ms / total for phase, ms in self.milliseconds.items()}

    @property
    def line(self) -> str:
        """In one line, for people.

        >>> sums = {phase: 0 for phase in PHASES} | {"steps": 8_100_000, "down": 900_000}
        >>> Goodput(sums, attempts=2, step=400).line
        'goodput 90.0 % of 2 h 30 min in 2 attempts; down 10.0 %'
        """
        shares = self.shares
        productive = shares.pop("steps")
        rest = sorted(((share, phase) for phase, share in shares.items() if share >= 0.0005), reverse=True)
        lost = "".join(f"{'; ' if not i else ', '}{PHASES[phase]} {share:.1%}" for i, (share, phase) in enumerate(rest))
        starts = f"{self.attempts} attempt{'s' if self.attempts > 1 else ''}"
        return f"goodput {productive:.1%} of {_duration(self.wall_clock)} in {starts}{lost}".replace("%", " %")

    @property
    def metrics(self) -> dict[str, float]:
        """For the run's metrics: the shares, and the seconds that they are shares of."""
        shares = {f"goodput/{phase}": share for phase, share in self.shares.items()}
        return {**shares, "goodput/wall_clock_seconds": self.wall_clock}


def _duration(seconds: float) -> str:
    """
    >>> _duration(59.4), _duration(61), _duration(7260)
    ('59 s', '1 min', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def add_up(attempts: Iterable[Attempt]) -> Goodput | None:
    """The goodput of a run from its attempts; None where there are none.

    What lies between an attempt's last record and the next one's start is down, unless the attempt had reached the run's
    last step: a run that is continued later was not down.

    >>> first = Attempt(0, {"start": 1000, "steps": 5000}, 0, 10)
    >>> second = Attempt(8000, {"start": 1000, "repeated": 500, "steps": 2500}, 8, 15)
    >>> total = add_up([first, second])
    >>> total.milliseconds["steps"], total.milliseconds["repeated"], total.milliseconds["down"], total.wall_clock
    (7500, 500, 2000, 12.0)
    """
    ordered = sorted(attempts, key=lambda attempt: attempt.begun)
    if not ordered:
        return None
    sums = dict.fromkeys(PHASES, 0)
    for attempt in ordered:
        for phase, ms in attempt.milliseconds.items():
            sums[phase] += ms
    for former, following in itertools.pairwise(ordered):
        if not former.done:
            sums["down"] += max(0, following.begun - former.until)  # clocks of two hosts may differ
    return Goodput(sums, len(ordered), max(attempt.step for attempt in ordered))


def add_up_all(runs: Sequence[Goodput]) -> Goodput:
    """That of several runs together."""
    sums = {phase: sum(run.milliseconds[phase] for run in runs) for phase in PHASES}
    return Goodput(sums, sum(run.attempts for run in runs), max(run.step for run in runs))


def of_run(model_dir: str | os.PathLike[str]) -> Goodput | None:
    """The goodput of a run, from its folder, local or remote; None where nothing is recorded."""
    return add_up(read_attempts(model_dir))


def summary(model_dir: str | os.PathLike[str]) -> str:
    """The goodput of a run in one line; "" where nothing is recorded."""
    goodput = of_run(model_dir)
    return "" if goodput is None else goodput.line


def read_attempts(model_dir: str | os.PathLike[str]) -> list[Attempt]:
    """All attempts that a run's folder has a record of, in order; one that cannot be read is left out."""
    from etils import epath

    folder = epath.Path(model_dir) / FOLDER
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    with ThreadPoolExecutor(16) as pool:  # a run that is preempted often has many
        texts = list(pool.map(_read, paths))
    attempts = []
    for text in texts:
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            attempts.append(Attempt.from_json(text))
    return attempts


def _read(path: os.PathLike[str]) -> str:
    try:
        return files.read_bytes(path).decode(errors="replace")
    except OSError:
        if files.is_remote(path):
            raise  # and tried again: what cannot be reached may be another time
        return ""


class Recorder:
    """Notes what the main thread of an attempt is about: one thing at a time, so that the sums are the attempt's time.

    Time in which the loop waits for a step's results is the devices', so it counts as that of steps.

    Args:
      begun: seconds since 1970; None: now.
    """

    def __init__(self, begun: float | None = None):
        now = time.time()
        self._begun = now if begun is None else min(begun, now)
        self._since = time.monotonic() - (now - self._begun)
        self._phase = "start"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._earlier: list[Attempt] = []
        self._path: str | None = None
        self._first_step = self._step = self._reached = 0
        self._done = False
        self._written = 0.0

    def follow(self, model_dir: str, step: int, reached: int) -> None:
        """That this attempt of the run in `model_dir` begins after `step`, and an earlier one may have got to `reached`."""
        try:
            self._earlier = retried(lambda: read_attempts(model_dir), f"reading the goodput of {model_dir}")
        except Exception as e:  # what the run costs is not worth its end
            logging.warning("the goodput of earlier attempts cannot be read: %s", e)
        self._path = os.path.join(model_dir, FOLDER, f"{round(self._begun * 1000):015d}.json")
        self._first_step = self._step = step
        self._reached = max([reached, *(attempt.step for attempt in self._earlier)])

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of a block as this phase's."""
        before = self._phase
        self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    def step(self, step: int) -> None:
        """That `step` is dispatched now: from here on time is that of steps, repeated ones if an earlier attempt had it."""
        self._enter("repeated" if step <= self._reached else "steps")
        self._step = step

    def done(self) -> None:
        """That the run's last step is made and saved."""
        self._enter("save")
        self._done = True

    def _enter(self, name: str) -> None:
        now = time.monotonic()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = name, now

    def attempt(self) -> Attempt:
        """This attempt, until now."""
        self._enter(self._phase)
        sums = {phase: round(1000 * seconds) for phase, seconds in self._seconds.items()}
        return Attempt(round(1000 * self._begun), sums, self._first_step, self._step, self._done)

    def goodput(self) -> Goodput:
        """The run's, until now."""
        total = add_up([*self._earlier, self.attempt()])
        assert total is not None
        return total

    def write(self, put: Callable[[Callable[[], Any]], Any], due: bool = True) -> None:
        """Has the record stored by `put`, which calls functions in a thread; without `due` only once a minute."""
        if self._path is None or not (due or time.monotonic() - self._written > PERIOD):
            return
        self._written = time.monotonic()
        path, text = self._path, self.attempt().to_json()
        put(lambda: files.write_atomically(path, text))


def process_begun() -> float:
    """When this process was started, in seconds since 1970; where the system does not say, now."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as f:
            ticks = int(f.read().rpartition(")")[2].split()[19])  # field 22, after the program's name in parentheses
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
