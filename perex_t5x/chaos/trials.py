"""Trials: a fault is done to a run, or to the folder of one; the same command is started again, and its result compared."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from perex_t5x import checkpoint_files
from perex_t5x.chaos import storage
from perex_t5x.chaos.comparison import Lines, differences, differences_of_sweeps
from perex_t5x.chaos.faults import FAULTS, Fault
from perex_t5x.chaos.runs import (
    SETTINGS,
    FaultError,
    MissedError,
    Place,
    Run,
    Setting,
    SkippedError,
    kill,
    processes,
    start,
)
from perex_t5x.errors import ConfigError, Reason, TrainingError

_SECONDS = 240.0  # after which a run hangs
_GRACE = 10.0  # seconds that the other processes of a run may take to follow the first
_ATTEMPTS = 3  # to see the moment of a fault before the run ends


@dataclasses.dataclass
class Result:
    """Of one trial; `problems` are what should not be, `skipped` says why there was no trial."""

    number: int
    fault: str
    setting: str
    did: str = ""
    resumed: str = ""
    problems: list[str] = dataclasses.field(default_factory=list)
    skipped: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.problems

    @property
    def happened(self) -> str:
        """In a line.

        >>> Result(1, "kill", "cached", problems=["a", "b", "c", "d", "e"]).happened
        'a; b; c; and 2 more'
        """
        more = [f"and {len(self.problems) - 3} more"] if len(self.problems) > 3 else []
        return self.skipped or "; ".join([*self.problems[:3], *more]) or self.resumed


def plan(faults: Sequence[str], settings: Sequence[str], trials: int, seed: int) -> list[tuple[str, str]]:
    """(fault, setting) of each trial: the faults in turns, each in its settings in turns, from one that the seed chooses.

    >>> plan(["kill", "sigterm"], ["cached", "streaming"], 4, seed=0)
    [('kill', 'streaming'), ('sigterm', 'cached'), ('kill', 'cached'), ('sigterm', 'streaming')]
    """
    rng = random.Random(seed)
    possible = {name: [s for s in settings if s in FAULTS[name].settings] for name in faults}
    possible = {name: rng.sample(found, len(found)) for name, found in possible.items() if found}
    names = list(possible)
    if not names:
        raise ConfigError("--faults, --settings: none of these faults is for one of these settings.")
    rounds = [(names[i % len(names)], i // len(names)) for i in range(trials)]
    return [(name, possible[name][i % len(possible[name])]) for name, i in rounds]


class Trials:
    """Runs trials in a folder. The uninterrupted run of each setting is made once.

    Args:
      root: an empty folder.
      seed: of the moments and places that faults choose.
      begin: as `start`.
    """

    def __init__(self, root: Path, seed: int, begin: Callable[..., Run] = start):
        self._root, self._seed, self._begin = root, seed, begin
        self._references: dict[Setting, Path] = {}
        self._buckets = storage.Buckets()

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *exc: object) -> None:
        self._buckets.close()

    def reference(self, setting: Setting) -> Path:
        """The folder of the uninterrupted run, on a disk."""
        setting = dataclasses.replace(setting, devices_later=1, on_bucket=False)
        if setting not in self._references:
            kind = f"sweep_{setting.sweep}" if setting.sweep else f"{setting.feed}_{setting.processes}"
            place = self._place(f"uninterrupted_{kind}")
            code = self._begin(setting, place).end(_SECONDS)
            if code != 0:
                raise TrainingError(f"the uninterrupted run ended with {code}: see {place.log}")
            self._references[setting] = place.folder
        return self._references[setting]

    def _place(self, name: str) -> Place:
        return Place(self._root / name, self._root / f"{name}.log")

    @contextlib.contextmanager
    def _place_of(self, name: str, fault: Fault, setting: Setting) -> Iterator[Place]:
        """Where a trial happens; the storage that it needs is there meanwhile."""
        place = self._place(name)
        if setting.on_bucket:
            yield dataclasses.replace(place, bucket=self._buckets.make())
        elif fault.needs_disk:
            with storage.disk(self._root / f"{name}_disk") as disk:
                yield dataclasses.replace(place, folder=disk / "run")
        else:
            yield place

    def run(self, number: int, fault: Fault, setting_name: str) -> Result:
        """One trial. Its folder is removed if all is well."""
        result, begun = Result(number, fault.name, setting_name), time.monotonic()
        setting, name = SETTINGS[setting_name], f"trial_{number}_{fault.name}"
        rng = random.Random(f"{self._seed}/{number}/{fault.name}/{setting_name}")
        reference = self.reference(setting)
        try:
            with self._place_of(name, fault, setting) as place:
                try:
                    if fault.on_folder:
                        shutil.copytree(reference, place.folder)
                        result.did = fault.act(place.folder, rng)
                    else:
                        self._disturb(fault, setting, place, rng, result)
                    self._resume(fault, setting, place, reference, result)
                finally:
                    kill(place.mark)
        except SkippedError as e:
            result.skipped = f"skipped: {e}"
        except FaultError as e:  # nothing was tried, or something else than what should have happened did
            result.problems.append(str(e))
        if result.good:
            shutil.rmtree(self._root / name, ignore_errors=True)
            (self._root / f"{name}.log").unlink(missing_ok=True)
        result.seconds = round(time.monotonic() - begun, 1)
        return result

    def _disturb(self, fault: Fault, setting: Setting, place: Place, rng: random.Random, result: Result) -> None:
        """Starts a run, does the fault to it, and waits for its end. A moment that was missed is waited for again."""
        for attempt in range(1, _ATTEMPTS + 1):
            run = self._begin(setting, place)
            try:
                result.did = fault.act(run, rng)
                break
            except MissedError:
                if attempt == _ATTEMPTS or place.bucket is not None:
                    raise
            run.kill()
            run.end(_SECONDS)
            shutil.rmtree(place.folder)
        code = run.end(_SECONDS)
        fault.undo(run)
        if code is None:
            result.problems.append(f"the run hung for {_SECONDS:.0f} s")
        elif (reason := Reason.of_exit_code(code)) not in fault.ends:
            result.problems.append(f"the run ended as {reason} ({code})")
        result.problems += _left_processes(place.mark)

    def _resume(self, fault: Fault, setting: Setting, place: Place, reference: Path, result: Result) -> None:
        """The same command once more, which has to end well, and the comparison with the uninterrupted run."""
        if place.bucket is not None:
            storage.copy(place.bucket, place.folder)
        at = min((_newest_valid(folder) for folder in setting.run_folders(place.folder)), default=0)
        result.resumed = f"resumed at step {at}" if at else "started from the beginning"
        code = self._begin(setting, place, setting.devices_later).end(_SECONDS)
        if code != 0:
            ended = "hung" if code is None else f"ended as {Reason.of_exit_code(code)} ({code})"
            result.problems.append(f"started again, the run {ended}")
        if "Traceback (most recent call last)" in place.log.read_text(errors="replace"):
            result.problems.append("a stack trace was printed")
        result.problems += _left_processes(place.mark)
        if code != 0:
            return
        if place.bucket is not None:
            storage.copy(place.bucket, place.folder)
        if setting.sweep:
            result.problems += differences_of_sweeps(place.folder, reference)
            return
        since = at if fault.loses_lines else 0
        result.problems += differences(place.folder, reference, exact=setting.devices_later == 1, since=since)
        if lost := len(Lines(reference).values) - len(Lines(place.folder).values) if fault.loses_lines else 0:
            result.resumed += f", {lost} lines lost with the file"


def _newest_valid(folder: Path) -> int:
    valid = [path for path in checkpoint_files.whole(os.fspath(folder)) if not checkpoint_files.damage(path, own=True)]
    return max((checkpoint_files.step_of(path) or 0 for path in valid), default=0)


def _left_processes(mark: str) -> list[str]:
    """Those of a run that has ended; they may take some seconds to follow."""
    deadline = time.monotonic() + _GRACE
    while left := processes(mark):
        if time.monotonic() > deadline:
            kill(mark)
            return [f"{len(left)} process(es) were left"]
        time.sleep(0.05)
    return []
