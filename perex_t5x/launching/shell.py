"""Commands of other programs (gcloud, kubectl, docker): run without a shell, retried, recorded, or only printed.

Whatever is known of those programs' own messages is here too: which ones mean that a resource is gone, which ones pass, and
what to do about a refusal. `Leftovers` deletes what they have created when a launch fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from perex_t5x.errors import ConfigError, TrainingError

_INSTALL = {
    "gcloud": "install the Google Cloud SDK, https://cloud.google.com/sdk/docs/install, then: gcloud auth login",
    "gsutil": "it is part of the Google Cloud SDK, https://cloud.google.com/sdk/docs/install",
    "kubectl": "gcloud components install kubectl gke-gcloud-auth-plugin",
    "docker": "install Docker, https://docs.docker.com/engine/install",
    "git": "install git",
}
_SHOWN_LINES = 12
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

# What is known of the messages of gcloud, kubectl and docker.
# No looser: a tool that crashes with FileNotFoundError has deleted nothing.
GONE = r"\bNOT_FOUND\b|\(NotFound\)|\b(was|were|be) not found\b|\bcould not be found\b"
NOT_GONE = rf"(?s)\A(?!.*({GONE}))"  # worth another attempt
NO_BUCKET = r"not found|\b404\b"
ALREADY_EXISTS = r"ALREADY_EXISTS|already exists|\(AlreadyExists\)"
NO_SUCH_KIND = r"doesn't have a resource type"
FORBIDDEN = r"\(Forbidden\)"
PUSH_DENIED = r"(?i)denied|unauthorized|Unauthenticated|no basic auth"
# Failures to reach the cloud, not of the request. Names and limits contain numbers, too, so 500 alone means nothing.
GCLOUD_TRANSIENT = (
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL)\b|Connection (reset|refused|aborted)|timed out|Temporary failure"
    r"|Network is unreachable|Max retries exceeded|Failed to resolve|Name or service not known"
    r"|HTTPError:? 50[0234]|\b50[0234] (Internal|Bad|Service|Gateway|Server)"
)
KUBECTL_TRANSIENT = r"TLS handshake timeout|i/o timeout|connection refused|\(ServiceUnavailable\)|EOF"
# kubectl repeats a network problem five times in its own log before it reports it.
_KUBECTL_LOG = re.compile(r"^[EWI]\d{4} [\d:.]+ +\d+ \S+\.go:\d+\] .*\n", re.MULTILINE)


def say(text: str) -> None:
    """Prints on stderr: stdout is for the commands of a dry run."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Completed:
    """A command's output and exit status."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """The last lines of stderr, or else of stdout, indented for an error message."""
        text = self.stderr.strip() or self.stdout.strip()
        return "\n".join(f"  {line}" for line in text.splitlines()[-_SHOWN_LINES:]) or "  (no output)"

    def matches(self, pattern: str) -> bool:
        """Whether its error output contains one of the patterns above."""
        return re.search(pattern, self.stderr) is not None

    def without_kubectl_log(self) -> Completed:
        return dataclasses.replace(self, stderr=_KUBECTL_LOG.sub("", self.stderr))


class CommandError(TrainingError):
    """A command that failed; `completed` has its output."""

    def __init__(self, completed: Completed, message: str = ""):
        ended = f"exited with status {completed.returncode}"
        super().__init__(message or f"{shlex.join(completed.argv)} {ended}:\n{completed.said}")
        self.completed = completed


@dataclass
class Commands:
    """Runs commands, given as lists of arguments: no shell of this machine ever reads them.

    Attributes:
      dry_run: print every command on stdout, one per line, and run none.
      wait: seconds before the first retry; doubled for each further one.
      record: all commands so far.
      sleep: replaced in tests.

    >>> Commands(dry_run=True).run(["gcloud", "compute", "tpus", "list", "--filter=a b"]).returncode
    gcloud compute tpus list '--filter=a b'
    0
    """

    dry_run: bool = False
    wait: float = field(default_factory=lambda: float(os.environ.get("PEREX_T5X_RETRY_SECONDS", "5")))
    record: list[tuple[str, ...]] = field(default_factory=list)
    sleep: Callable[[float], None] = time.sleep
    _running: set[subprocess.Popen] = field(default_factory=set, init=False)
    _stopped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.dry_run:
            say("dry run: nothing is executed; the output assumes that every step succeeds")

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Sequence[str] = (),
        input: str | None = None,
        dry: str = "",
        cwd: str | None = None,
    ) -> Completed:
        """Runs a command to its end and returns its output.

        Args:
          argv: the command.
          check: raise `CommandError` if its exit status is not 0.
          timeout: seconds after which it is terminated, with status 124.
          retries: how often a failed command is retried, with growing pauses.
          retry_on: retry only if one of these regular expressions matches its output; none: always.
          input: its stdin.
          dry: its output in a dry run.
          cwd: its working directory.
        """
        argv = tuple(str(a) for a in argv)
        self.record.append(argv)
        if self.dry_run:
            given = "" if input is None else f"printf %s {shlex.quote(input)} | "
            print(given + shlex.join(argv), flush=True)
            return Completed(argv, 0, dry, "")
        check_installed(argv[0])
        for attempt in range(retries + 1):
            done = self._run(argv, timeout, input, cwd)
            again = not retry_on or any(re.search(p, done.stdout + done.stderr) for p in retry_on)
            if done.returncode == 0 or attempt == retries or not again or self._stopped:
                break
            pause = self.wait * 2**attempt
            last = done.said.strip().splitlines()[-1].strip()
            say(f"{shlex.join(argv[:5])} ... failed ({last}); retrying in {pause:g} s")
            self.sleep(pause)
        if check and done.returncode != 0:
            raise CommandError(done)
        return done

    def stop(self) -> None:
        """Ends what other threads are running through this object; nothing is retried, and each gets its failure."""
        self._stopped = True
        for process in list(self._running):
            end(process, close=False)

    def _run(self, argv: tuple[str, ...], timeout: float | None, input: str | None, cwd: str | None) -> Completed:
        """In its own session: Ctrl-C reaches this program alone, which then terminates the command and cleans up."""
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            cwd=cwd,
        )
        self._running.add(process)
        if self._stopped:  # in between
            end(process, close=False)
        try:
            out, err = process.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            end(process)
            return Completed(argv, 124, "", f"terminated after {timeout:g} s without an answer")
        except BaseException:
            end(process)
            raise
        finally:
            self._running.discard(process)
        return Completed(argv, process.returncode, out, err)

    def write(self, path: str, text: str) -> None:
        """Writes a file; in a dry run prints the command that would."""
        if self.dry_run:
            print(f"printf %s {shlex.quote(text)} > {shlex.quote(path)}", flush=True)
            return
        try:
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)
        except OSError as e:  # a full disk is seen when writing, and the error does not say where
            raise TrainingError(f"{path} cannot be written: {e.strerror}") from e

    def read(self, argv: Sequence[str], *, check: bool = True, timeout: float | None = None, dry: str = "") -> str:
        """A command's stdout, stripped; the arguments are those of `run`."""
        return self.run(argv, check=check, timeout=timeout, dry=dry).stdout.strip()


def check_installed(program: str) -> None:
    """Raises `ConfigError`, with the way to install it, if a program is missing."""
    if shutil.which(program) is None:
        how = _INSTALL.get(os.path.basename(program), "install it, or put its folder on the PATH")
        raise ConfigError(f"{program} is not installed, or not on the PATH: {how}.")


def end(process: subprocess.Popen, grace: float = 5.0, close: bool = True) -> None:
    """Terminates a process and its children: SIGTERM first, then SIGKILL. `close=False`: a thread reads its streams."""
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            break
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None and close:
            with contextlib.suppress(OSError):
                stream.close()


def still_there(what: str, delete: Sequence[str]) -> str:
    """The line that names a resource which was not deleted."""
    return f"still there: {what}; delete it with: {shlex.join(delete)}"


def with_notes(error: BaseException, *notes: str) -> BaseException:
    """The error itself; the command prints its notes as its last lines."""
    for note in notes:
        error.add_note(note)
    return error


class Leftovers:
    """Resources of one launch: when it fails they are deleted, or named together with the command that deletes them.

        with Leftovers(commands) as leftovers:
            leftovers.add("queued resource a", ["gcloud", ..., "delete", "a"])   # before it is created
            ...
            leftovers.keep("queued resource a")                                  # it is meant to stay

    Whatever ends the block early (an error, Ctrl-C, SIGTERM), the resources are deleted in the reverse order of their
    creation. One that cannot be deleted, or that `--keep` keeps, becomes a note of the exception; the command prints the
    notes as its last lines.
    """

    def __init__(self, commands: Commands, keep: bool = False):
        self._commands, self._keep = commands, keep
        self._created: dict[str, tuple[str, ...]] = {}
        self._former: dict[int, Any] = {}

    def add(self, what: str, delete: Sequence[str]) -> None:
        """To be called before the command that creates it, as Ctrl-C may interrupt that one. Deleting nothing is fine."""
        self._created[what] = tuple(delete)

    def keep(self, what: str) -> None:
        """Forgets a resource: it is deleted already, or is meant to stay."""
        self._created.pop(what, None)

    def delete_all(self) -> list[str]:
        """Deletes everything now; returns a line for each resource that is still there."""
        left = []
        for what, delete in reversed(list(self._created.items())):
            if self._keep:
                left.append(still_there(what, delete))
                continue
            say(f"deleting {what}")
            if not self._deleted(delete):
                left.append(still_there(what, delete))
            self.keep(what)
        return left

    def _deleted(self, delete: Sequence[str]) -> bool:
        try:
            done = self._commands.run(delete, check=False, retries=2, retry_on=[NOT_GONE], timeout=1800)
        except (Exception, KeyboardInterrupt):  # a second Ctrl-C: then the resource is named
            return False
        return done.returncode == 0 or done.matches(GONE)

    def __enter__(self) -> Leftovers:
        if threading.current_thread() is threading.main_thread():
            # nohup ignores SIGHUP, which stays so.
            handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._former = {number: signal.signal(number, _interrupt) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                with_notes(error, *self.delete_all())
        finally:
            for number, handler in self._former.items():
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")


# What a message means -> what to do; the first that matches.
_KNOWN = {
    r"[Qq]uota .*(exceeded|exhausted)|exceeded quota|QUOTA_EXCEEDED|[Qq]uota limit": (
        "the project's quota is too small for these slices, or used up by other queued resources (suspended and failed ones "
        "count, see launch/gcloud_tpu.py list). Request more at https://console.cloud.google.com/iam-admin/quotas, service "
        "tpu.googleapis.com, in this zone; spot and on-demand slices have separate quotas. Or choose a smaller --topology."
    ),
    "no more capacity|Insufficient (reserved )?capacity|does not have enough resources|STOCKOUT|ZONE_RESOURCE_POOL": (
        "the zone has no such slices available. Try again later, with --spot, in another --zone, or with a smaller "
        "--topology."
    ),
    r"has not been used in project|SERVICE_DISABLED|it is disabled|API \[tpu": (
        "the Cloud TPU API is not enabled: gcloud services enable tpu.googleapis.com --project=PROJECT"
    ),
    r"PERMISSION_DENIED|does not have permission|[Pp]ermission .*denied|403": (
        "this account may not do that: it needs the roles roles/tpu.admin, roles/iam.serviceAccountUser and "
        "roles/storage.admin in the project, see docs/launch.md."
    ),
    r"Network is unreachable|Failed to resolve|Name or service not known|Max retries exceeded|name resolution": (
        "this machine cannot reach the cloud: check its network."
    ),
    r"There was a problem refreshing your current auth tokens|do not currently have an active account|gcloud auth login": (
        "this machine is not logged in: gcloud auth login"
    ),
    r"RESOURCE_EXHAUSTED": "quota or capacity is exhausted: see docs/launch.md, usual failures.",
}


def explained(said: str) -> str:
    """What to do about a known message; else ''.

    >>> explained("Quota 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' exhausted. Limit 16 in zone us-west4-a")[:42]
    "the project's quota is too small for these"
    """
    return next((words for pattern, words in _KNOWN.items() if re.search(pattern, said)), "")


def failed_workers(said: str) -> list[str]:
    """The workers that gcloud reports as failed, or else those that it could not connect to.

    >>> failed_workers("##### Command execution on worker 2 failed with exit status 1. Continuing.")
    ['2']
    """
    named = re.findall(r"Command execution on worker (\d+) failed", said)
    if not named:
        tried = re.findall(r"Attempting to connect to worker (\d+)", said)
        named = [w for w in tried if tried.count(w) > 1]
    return sorted(set(named), key=int)


def refusal(begin: str, said: str) -> str:
    """An error message: what failed, the cloud's own words, and what to do about it."""
    what_to_do = explained(said)
    return f"{begin}:\n{said}" + (f"\n{what_to_do[0].upper()}{what_to_do[1:]}" if what_to_do else "")
