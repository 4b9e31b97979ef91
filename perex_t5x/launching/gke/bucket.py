"""A launch as its bucket shows it, without a cluster: what status, follow, collect and stop do with --dir=gs://..."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perex_t5x import buckets
from perex_t5x.errors import ConfigError, Reason, UnreachableError
from perex_t5x.launching import collect, launch_folder, names
from perex_t5x.launching.launch_folder import STATE, LaunchFolder
from perex_t5x.launching.shell import say
from perex_t5x.launching.spec import Work

_MOST_SILENT_POLLS = 30
_FIRST_HOST = launch_folder.host_name(0)


@dataclass(frozen=True)
class Launch:
    """One JobSet's folder in the bucket; a sweep that is split has several.

    Attributes:
      root: the folder of the sweep or the run.
      name: of the JobSet.
    """

    root: str
    name: str

    @property
    def folder(self) -> LaunchFolder:
        return LaunchFolder.of(self.root, self.name)

    @property
    def state(self) -> Mapping[str, Any]:
        """What host 0 has last said; {} before it has said anything."""
        content = self.folder.read(STATE)
        return content if isinstance(content, dict) else {}

    def lines(self) -> list[str]:
        """How far it is, where the time went, and the first error of all hosts."""
        if self.folder.read("jobs.json") is None:
            return [f"{self.name}: no host has begun yet"]
        return collect.status(self.root, self.name).lines()


def described(state: Mapping[str, Any]) -> str:
    """state.json in words that change when something happens.

    >>> described({"phase": "running", "job": "a", "step": 100}), described({"phase": "ended", "reason": "no_progress"})
    ('running a', 'ended (no_progress)')
    """
    phase = str(state.get("phase", "")) or "no host has begun yet"
    if phase == "ended":
        return f"{phase} ({state.get('reason', '')})"
    return f"{phase} {state.get('job', '')}".rstrip()


def find(root: str, group: str) -> list[Launch]:
    """The launch of this name, or its parts; raises `ConfigError` if the folder holds none, or cannot be read."""
    root = names.check_bucket_path(root)
    buckets.check(root, "--dir", writes=False)
    there = LaunchFolder(f"{root}/.launch").entries()
    own = [name for name in there if re.fullmatch(rf"{re.escape(group)}(-\d+)?", name)]
    if not own:
        others = f" It has {', '.join(there)}." if there else ""
        raise ConfigError(f"--dir={root} holds no launch with the name {group!r} (yet).{others}")
    return [Launch(root, name) for name in (own if group not in own else [group])]


def merged(launches: list[Launch]) -> Work:
    """What all of them run."""
    parts = [collect.read_work(launch.root, launch.name) for launch in launches]
    return dataclasses.replace(parts[0], jobs=tuple(job for part in parts for job in part.jobs))


def status(launches: list[Launch]) -> int:
    for launch in launches:
        print("\n".join(launch.lines()))
    return 0


def stop(launches: list[Launch]) -> int:
    """Asks the hosts to save and stop, which they do within half a minute; they are not restarted."""
    for launch in launches:
        launch.folder.request_stop()
        say(f"{launch.name}: asked to save and stop; its hosts look every half minute")
    say("A JobSet that has stopped uses no chips. It is deleted after --ttl_hours, or by `stop` with kubectl.")
    return 0


def follow(launches: list[Launch], poll_seconds: float, sleep: Callable[[float], None] = time.sleep) -> int:
    """Prints the log of host 0 and every change until all have ended for good; returns the exit code of the worst end."""
    logs = [_Log(launch) for launch in launches]
    shown: dict[str, str] = {}
    silent = 0
    try:
        while True:
            try:
                if (code := _look(launches, logs, shown)) is not None:
                    return code
                silent = 0
            except Exception as e:  # each library that reads buckets has its own
                silent += 1
                say(f"the bucket does not answer: {type(e).__name__}: {e}")
                if silent >= _MOST_SILENT_POLLS:
                    raise UnreachableError(f"{launches[0].root} has not answered {silent} times.") from e
            sleep(poll_seconds)
    except KeyboardInterrupt:
        names = ", ".join(launch.name for launch in launches)
        raise KeyboardInterrupt(f"no longer following; {names} continues.") from None


def _look(launches: list[Launch], logs: list[_Log], shown: dict[str, str]) -> int | None:
    """Prints what is new; returns the exit code once all have ended for good."""
    states = [launch.state for launch in launches]
    for launch, state, log in zip(launches, states, logs, strict=True):
        log.print(state)
        words = described(state)
        if shown.get(launch.name) != words:
            shown[launch.name] = words
            say(f"{launch.name}: {words}")
    reasons = [reason for state in states if (reason := _end(state)) is not None]
    if len(reasons) < len(states):
        return None
    for launch, reason in zip(launches, reasons, strict=True):
        if reason is not Reason.DONE:
            say("\n".join(launch.lines()))
    return max(reasons, key=lambda reason: reason is not Reason.DONE).exit_code


def _end(state: Mapping[str, Any]) -> Reason | None:
    """How it has ended for good; None while it runs, or is to be restarted."""
    reason = state.get("reason") if state.get("phase") == "ended" else None
    if reason not in list(Reason):
        return None
    return Reason(reason) if Reason(reason).final or reason == Reason.DONE else None


class _Log:
    """What host 0 prints, from the parts in the bucket, of the newest attempt; at first the newest parts alone."""

    def __init__(self, launch: Launch):
        self._launch = launch
        self._printed: dict[str, int] = {}
        self._whole: set[str] = set()
        self._first = True

    def print(self, state: Mapping[str, Any]) -> None:
        from etils import epath

        attempt, folder = str(state.get("attempt", "")), self._launch.folder
        logs = launch_folder.log_parts(folder.entries("logs", attempt, _FIRST_HOST)) if attempt else {}
        for parts in logs.values():
            for part in parts:
                path = folder.join("logs", attempt, _FIRST_HOST, part)
                newest = part == parts[-1]
                if path not in self._whole and (newest or not self._first):
                    text = epath.Path(path).read_text()
                    print(text[self._printed.get(path, 0) :], end="", flush=True)
                    self._printed[path] = len(text)
                if not newest:  # it does not grow any more
                    self._whole.add(path)
        self._first = False
