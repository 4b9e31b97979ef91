"""A launch as its bucket shows it, without a cluster: what status, follow, collect and stop do with --dir=gs://..."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perex_t5x import buckets, goodput
from perex_t5x.errors import ConfigError, Reason
from perex_t5x.launching import collect, launch_folder, names
from perex_t5x.launching.launch_folder import STATE, LaunchFolder
from perex_t5x.launching.shell import say
from perex_t5x.launching.spec import Work

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

    @property
    def work(self) -> Work | None:
        """What runs; None before host 0 has begun."""
        content = self.folder.read("jobs.json")
        return None if content is None else Work.from_json(json.dumps(content))

    def lines(self, state: Mapping[str, Any] | None = None) -> list[str]:
        """How far it is, the first error of all hosts, and where the time went."""
        state = self.state if state is None else state
        shown = [f"{self.name}: {described(state)}"]
        if error := collect.first_error(self.root, self.name):
            shown.append(f"  first error of the newest attempt that failed: {error}")
        if (work := self.work) is not None:
            for job in work.jobs:
                if (len(work.jobs) == 1 or job.name == state.get("job")) and (line := goodput.summary(job.model_dir)):
                    shown.append(f"  {job.name}: {line}")
        return shown


def described(state: Mapping[str, Any]) -> str:
    """state.json in words.

    >>> described({"phase": "running", "job": "a", "number": 2, "jobs": 5, "step": 100, "time": "2025-11-18T12:03:11.201Z"})
    'running a (2 of 5), step 100, as of 2025-11-18 12:03:11 UTC'
    >>> described({"phase": "ended", "reason": "no_progress", "time": "2025-11-18T12:03:11.201Z"})
    'ended (no_progress), as of 2025-11-18 12:03:11 UTC'
    """
    if not state:
        return "no host has begun yet"
    words = str(state.get("phase", ""))
    if words == "ended":
        words += f" ({state.get('reason', '')})"
    elif state.get("job"):
        words += f" {state['job']} ({state.get('number')} of {state.get('jobs')})"
        words += f", step {state['step']}" if state.get("step") is not None else ""
    moment = str(state.get("time", ""))[:19].replace("T", " ")
    return f"{words}, as of {moment} UTC"


def find(root: str, group: str) -> list[Launch]:
    """The launch of this name, or its parts; raises `ConfigError` if the folder holds none, or cannot be read."""
    root = names.check_bucket_path(root)
    buckets.check(root, "--dir", writes=False)
    there = LaunchFolder(f"{root}/.launch").list()
    own = [name for name in there if re.fullmatch(rf"{re.escape(group)}(-\d+)?", name)]
    if not own:
        others = f" It has {', '.join(there)}." if there else ""
        raise ConfigError(f"--dir={root} holds no launch with the name {group!r} (yet).{others}")
    return [Launch(root, name) for name in (own if group not in own else [group])]


def merged(launches: list[Launch]) -> Work:
    """What all of them run."""
    parts = [work for launch in launches if (work := launch.work) is not None]
    if not parts:
        raise ConfigError(f"{launches[0].folder.path} has no jobs.json: no host has begun yet.")
    return dataclasses.replace(parts[0], jobs=tuple(job for part in parts for job in part.jobs))


def status(launches: list[Launch]) -> int:
    for launch in launches:
        print("\n".join(launch.lines()))
    return 0


def stop(launches: list[Launch]) -> int:
    """Asks the hosts to save and stop, which they do within half a minute; they are not restarted."""
    for launch in launches:
        launch.folder.request_stop()
        say(f"{launch.name}: asked to save and stop; it looks every 30 s. The JobSet uses no chips after that, and is")
    say("deleted after --ttl_hours, or with `stop` from a machine with kubectl.")
    return 0


def follow(launches: list[Launch], poll_seconds: float, sleep: Callable[[float], None] = time.sleep) -> int:
    """Prints the log of host 0 and every change until all have ended for good; returns the exit code of the worst end."""
    logs = [_Log(launch) for launch in launches]
    shown: dict[str, str] = {}
    while True:
        states = [launch.state for launch in launches]
        for launch, state, log in zip(launches, states, logs, strict=True):
            log.print(state)
            words = described({**state, "step": None} if state else {}).partition(", as of")[0]
            if shown.get(launch.name) != words:
                shown[launch.name] = words
                say(f"{launch.name}: {words}")
        reasons = [_end(state) for state in states]
        if all(reasons):
            for launch, state, reason in zip(launches, states, reasons, strict=True):
                if reason is not Reason.DONE:
                    say("\n".join(launch.lines(state)))
            return max((reason for reason in reasons), key=lambda reason: reason is not Reason.DONE).exit_code
        sleep(poll_seconds)


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
        logs = launch_folder.log_parts(folder.list("logs", attempt, _FIRST_HOST)) if attempt else {}
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
