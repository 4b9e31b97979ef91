"""The folder of a launch in the bucket, ROOT/.launch/NAME: what hosts and launchers leave there for each other.

    jobs.json                              see `launching.spec`
    state.json                             host 0: what runs, how far it is, as of when
    stop                                   whoever wants the launch to save and stop
    progress/JOB.json                      host 0: the job's attempts, from which step each began and how it ended
    errors/ATTEMPT/HOST.KIND.JOB.json      every host on which a job failed; KIND is 'own', 'echo' or 'result'
    errors/ATTEMPT/HOST.stopped            every host that was asked to stop
    logs/ATTEMPT/HOST/worker.00000.log     every host: what its worker says, in parts
    logs/ATTEMPT/HOST/job-JOB.00000.log    every host: what its processes of a job print, in parts

An attempt is one start of the workers on all hosts; a host is written SLICE-NUMBER, such as 0-0037. Hosts' clocks differ by
some milliseconds, so an error that only reports another process's end (an 'echo') comes after those that do not.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from perex_t5x import checkpoint_files
from perex_t5x.errors import Reason
from perex_t5x.files import write_atomically

MOST_FAILURES = 3  # attempts in a row that begin at the same step and fail
ATTEMPT = "PEREX_T5X_ATTEMPT"  # set by whoever starts the hosts, the same on all; else the minute of the start
SLICE = 1_000_000  # a host's index is its number in its slice, plus this for each slice before it
STATE, STOP = "state.json", "stop"
OWN, ECHO, RESULT = "own", "echo", "result"
_STOPPED = "stopped"
_MOST_ATTEMPTS = 50  # that are kept of a job
_MOST_READ = 256
_CONSEQUENCES = (Reason.PEER_LOST, Reason.UNREACHABLE)


def now() -> str:
    return as_time(datetime.datetime.now(datetime.UTC).timestamp())


def as_time(seconds: float) -> str:
    """
    >>> as_time(1700000000.25)
    '2023-11-14T22:13:20.250Z'
    """
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z"


def host_name(index: int) -> str:
    """
    >>> host_name(37), host_name(2 * SLICE + 5)
    ('0-0037', '2-0005')
    """
    return f"{index // SLICE}-{index % SLICE:04}"


def attempt_name(launch_id: str, environ: Mapping[str, str]) -> str:
    """The name of this start of the hosts; those of one launch, and of later launches, sort in their order.

    >>> attempt_name("20251118T030412Z-ab12", {"PEREX_T5X_ATTEMPT": "3"})
    '20251118T030412Z-ab12.3'
    """
    given = re.sub(r"[^\w.:+-]", "_", environ.get(ATTEMPT, ""))[:64]
    return f"{launch_id or 'launch'}.{given or datetime.datetime.now(datetime.UTC).strftime('%Y%m%dT%H%MZ')}"


def in_order(attempts: Iterable[str]) -> list[str]:
    """
    >>> in_order(["a.10", "a.9"])
    ['a.9', 'a.10']
    """
    key = [(re.sub(r"\d+", lambda digits: digits[0].rjust(20, "0"), name), name) for name in attempts]
    return [name for _, name in sorted(key)]


@dataclass(frozen=True)
class HostError:
    """How a job failed on one host.

    Attributes:
      time: UTC, with milliseconds: when the job's process said so, or ended.
      host: SLICE-NUMBER.
      reason, exit_code, message: of the job's status.
      traceback: the end of its log, from the last stack trace on.
      kind: OWN; ECHO of what another process of the job did; RESULT, a failure that is the result of a sweep's run.
    """

    time: str
    host: str
    job: str
    reason: Reason
    exit_code: int
    message: str
    traceback: str = ""
    kind: str = OWN

    def __str__(self) -> str:
        """
        >>> print(HostError("2025-11-18T12:03:11.201Z", "0-0037", "a", Reason.ERROR, 1, "ValueError: x"))
        host 37 (slice 0), 12:03:11.201, a: error (exit code 1): ValueError: x
        """
        slice_, _, number = self.host.partition("-")
        words = self.message.strip().splitlines()
        ended = f"{self.reason} (exit code {self.exit_code}){f': {words[0]}' if words else ''}"
        return f"host {int(number or 0)} (slice {slice_}), {self.time[11:23]}, {self.job}: {ended}"


def kind_of(reason: Reason, process: int, cause: int | None) -> str:
    """Whether a process that has failed is the cause itself: its own error, or a hang that the others have seen.

    >>> [kind_of(Reason.ERROR, 3, None), kind_of(Reason.ERROR, 3, 5), kind_of(Reason.PEER_LOST, 3, None)]
    ['own', 'echo', 'echo']
    >>> kind_of(Reason.PEER_LOST, 3, 3)
    'own'
    """
    if cause == process:
        return OWN
    return ECHO if cause is not None or reason in _CONSEQUENCES else OWN


@dataclass(frozen=True)
class Attempt:
    """One start of a job, as host 0 saw it.

    Attributes:
      name: of the attempt.
      started, ended: UTC; `ended` is "" while it runs, and for a host that is gone.
      step: of the newest checkpoint at its start; None without one.
      reason: why it ended; None as `ended`.
      error: in a line.
    """

    name: str
    started: str
    step: int | None
    ended: str = ""
    reason: Reason | None = None
    error: str = ""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Attempt:
        known = {field.name: content[field.name] for field in dataclasses.fields(cls) if field.name in content}
        reason = known.get("reason")
        return cls(**{**known, "reason": Reason(reason) if reason in list(Reason) else None})


@dataclass(frozen=True)
class LaunchFolder:
    """Reading raises whatever the store raises, except for what is not there."""

    path: str

    @classmethod
    def of(cls, root: str, name: str) -> LaunchFolder:
        """
        >>> LaunchFolder.of("gs://bucket/sweeps/a/", "b").path
        'gs://bucket/sweeps/a/.launch/b'
        """
        return cls(f"{root.rstrip('/')}/.launch/{name}")

    # --- files --------------------------------------------------------------------------------------------------------

    def read(self, *names: str) -> Any:
        """The content of a JSON file; None if it is not there, or is none."""
        from etils import epath

        try:
            return json.loads(epath.Path(self.join(*names)).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def write(self, content: Any, *names: str) -> None:
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        write_atomically(self.join(*names), text.encode(errors="replace").decode())

    def entries(self, *names: str) -> list[str]:
        """The names in a folder; [] if there is none."""
        return _names_in(self.join(*names))

    def join(self, *names: str) -> str:
        return "/".join([self.path, *names])

    # --- asking to stop -----------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Asks all hosts to save and stop. A later launch of the same name is not affected."""
        work = self.read("jobs.json") or {}
        self.write({"launch_id": work.get("launch_id", ""), "time": now()}, STOP)

    def stop_requested(self, launch_id: str) -> bool:
        content = self.read(STOP)
        return isinstance(content, dict) and content.get("launch_id") == launch_id

    # --- errors -------------------------------------------------------------------------------------------------------

    def write_error(self, attempt: str, error: HostError) -> None:
        content = {**dataclasses.asdict(error), "reason": str(error.reason)}
        self.write(content, "errors", attempt, f"{error.host}.{error.kind}.{error.job}.json")

    def write_stopped(self, attempt: str, host: str) -> None:
        self.write({"time": now()}, "errors", attempt, f"{host}.{_STOPPED}")

    def was_stopped(self, attempt: str) -> bool:
        """Whether a host was asked to stop: by a person, or by its cloud."""
        return any(name.endswith(f".{_STOPPED}") for name in self.entries("errors", attempt))

    def errors(
        self, attempt: str, job: str | None = None, kinds: Sequence[str] = (OWN, ECHO, RESULT)
    ) -> list[HostError]:
        """Of all hosts, the cause first: own errors, then echoes, then results; by time."""
        names: dict[str, list[str]] = {kind: [] for kind in kinds}
        for name in self.entries("errors", attempt):
            _, _, rest = name.partition(".")
            kind, _, rest = rest.partition(".")
            if kind in names and (job is None or rest == f"{job}.json"):
                names[kind].append(name)
        chosen = [name for kind in kinds for name in names[kind]][:_MOST_READ]
        with ThreadPoolExecutor(16) as pool:
            contents = list(pool.map(lambda name: self.read("errors", attempt, name), chosen))
        found = [_host_error(content) for content in contents if isinstance(content, dict)]
        return sorted(found, key=lambda e: ((OWN, ECHO, RESULT).index(e.kind), e.time, e.host))

    def attempts(self) -> list[str]:
        """Those in which something failed or was stopped, in order."""
        return in_order(self.entries("errors"))

    # --- attempts -----------------------------------------------------------------------------------------------------

    def read_attempts(self, job: str, launch_id: str) -> list[Attempt]:
        """The attempts of a job in this launch, in order; those of an earlier launch with the same name are forgotten."""
        content = self.read("progress", f"{job}.json")
        if not isinstance(content, dict) or content.get("launch_id") != launch_id:
            return []
        return [Attempt.of(attempt) for attempt in content.get("attempts", [])]

    def write_attempts(self, job: str, launch_id: str, attempts: Sequence[Attempt]) -> None:
        kept = [dataclasses.asdict(attempt) for attempt in attempts][-_MOST_ATTEMPTS:]
        self.write({"job": job, "launch_id": launch_id, "attempts": kept}, "progress", f"{job}.json")

    def failures(self, job: str, attempts: Sequence[Attempt], step: int | None) -> list[str]:
        """The errors of the newest attempts that began at `step` and failed, newest first.

        Attempts that were interrupted are left out. One whose host 0 was stopped, or is gone, because another host had
        failed is a failure: that host says so.
        """
        errors = []
        for attempt in reversed(attempts):
            if attempt.step != step:
                break
            own = self.errors(attempt.name, job, [OWN])
            if own:
                errors.append(str(own[0]))
            elif attempt.reason not in (None, Reason.INTERRUPTED, Reason.DONE) and not self.was_stopped(attempt.name):
                errors.append(f"{attempt.reason}: {attempt.error}")
            if len(errors) == MOST_FAILURES:
                break
        return errors


def _host_error(content: Mapping[str, Any]) -> HostError:
    known = {field.name: content[field.name] for field in dataclasses.fields(HostError) if field.name in content}
    reason = Reason(known["reason"]) if known.get("reason") in list(Reason) else Reason.ERROR
    defaults = {"time": "", "host": "0-0000", "job": "", "exit_code": reason.exit_code, "message": ""}
    return HostError(**{**defaults, **known, "reason": reason})


def no_progress(step: int | None, errors: Sequence[str]) -> str:
    """The message of `Reason.NO_PROGRESS`.

    >>> no_progress(200, ["host 5 (slice 0), ...: error: x", "...", "..."])
    'no progress: 3 attempts in a row began at step 200 and failed. The last error: host 5 (slice 0), ...: error: x'
    """
    begin = "without a checkpoint" if step is None else f"at step {step}"
    return f"no progress: {len(errors)} attempts in a row began {begin} and failed. The last error: {errors[0]}"


def _names_in(folder: str) -> list[str]:
    """Sorted; [] if there is no such folder, for which TensorFlow, which reads gs://, has an exception of its own."""
    from etils import epath

    path = epath.Path(folder)
    try:
        return sorted(child.name.rstrip("/") for child in path.iterdir()) if path.is_dir() else []
    except (FileNotFoundError, NotADirectoryError):
        return []


def newest_step(model_dir: str) -> int | None:
    """The step of the newest whole checkpoint in a run's folder; None if there is none."""
    path = checkpoint_files.newest(model_dir)
    return None if path is None else checkpoint_files.step_of(path)


def tail_of_log(text: str, most: int = 12_000) -> str:
    """From the last stack trace of a log to its end; without one its last lines.

    >>> tail_of_log("a\\nTraceback (most recent call last):\\n  x\\nValueError: y\\n")
    'Traceback (most recent call last):\\n  x\\nValueError: y\\n'
    """
    starts = [
        m.start()
        for m in re.finditer(r"^(Traceback \(most recent|Fatal Python error|This is process \d+\.)", text, re.M)
    ]
    shown = text[starts[-1] :] if starts else "".join(text.splitlines(keepends=True)[-30:])
    return shown if len(shown) <= most else f"{shown[: most // 2]}\n...\n{shown[-most // 2 :]}"


def log_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Log -> its parts in order, of the names in a host's folder of logs.

    >>> log_parts(["job-a.00001.log", "job-a.00000.log", "worker.00000.log"])
    {'job-a': ['job-a.00000.log', 'job-a.00001.log'], 'worker': ['worker.00000.log']}
    """
    logs: dict[str, list[str]] = {}
    for name in sorted(names):
        if match := re.fullmatch(r"(.+)\.\d{5}\.log", name):
            logs.setdefault(match[1], []).append(name)
    return logs
