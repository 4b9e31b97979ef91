"""Commands of other programs (gcloud, kubectl, docker): run without a shell, retried, recorded, or only printed.

Whatever is known of those programs' own messages is here too: which ones mean that a resource is gone, which ones pass, and
what to do about a refusal. `Leftovers` deletes what they have created when a launch fails.
"""

from __future__ import annotations

import contextlib
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


def say(text: str) -> None:
    """Prints on stderr: stdout is for the commands of a dry run."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Completed:
    """What a command has said, and its status."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """Its last lines, errors first."""
        text = self.stderr.strip() or self.stdout.strip()
        return "\n".join(f"  {line}" for line in text.splitlines()[-_SHOWN_LINES:]) or "  (it said nothing)"


class CommandError(TrainingError):
    """A command that failed. `completed` is what it said."""

    def __init__(self, completed: Completed, message: str = ""):
        ended = f"ended with status {completed.returncode}"
        super().__init__(message or f"{shlex.join(completed.argv)} {ended}:\n{completed.said}")
        self.completed = completed


@dataclass
class Commands:
    """Runs commands, given as lists of arguments: no shell of this machine ever reads them.

    Attributes:
      dry_run: print every command on stdout, one on a line, and run none.
      wait: seconds before the first retry; doubled for each further one.
      record: all commands given so far.

    >>> Commands(dry_run=True).run(["gcloud", "compute", "tpus", "list", "--filter=a b"]).returncode
    gcloud compute tpus list '--filter=a b'
    0
    """

    dry_run: bool = False
    wait: float = field(default_factory=lambda: float(os.environ.get("PEREX_T5X_RETRY_SECONDS", "5")))
    record: list[tuple[str, ...]] = field(default_factory=list)
    sleep: Callable[[float], None] = time.sleep

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
        """Runs a command to its end and returns what it said.

        Args:
          argv: the command.
          check: raise `CommandError` where its status is not 0.
          timeout: seconds; a command that takes longer is ended, with status 124.
          retries: how often it is tried again where it fails, with growing pauses.
          retry_on: only where one of these regular expressions is found in what it said; none: always.
          input: what it reads from stdin.
          dry: what it is taken to have printed in a dry run.
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
            done = _run(argv, timeout, input, cwd)
            again = not retry_on or any(re.search(p, done.stdout + done.stderr) for p in retry_on)
            if done.returncode == 0 or attempt == retries or not again:
                break
            pause = self.wait * 2**attempt
            last = done.said.strip().splitlines()[-1].strip()
            say(f"{shlex.join(argv[:5])} ... failed ({last}); retrying in {pause:g} s")
            self.sleep(pause)
        if check and done.returncode != 0:
            raise CommandError(done)
        return done

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

    def read(self, argv: Sequence[str], *, dry: str = "", **options: object) -> str:
        """What a command prints."""
        return self.run(argv, dry=dry, **options).stdout.strip()


def check_installed(program: str) -> None:
    """Raises `ConfigError`, with the way to install it, for a program that is not there."""
    if shutil.which(program) is None:
        how = _INSTALL.get(os.path.basename(program), "install it, or put its folder on the PATH")
        raise ConfigError(f"{program} is not installed, or not on the PATH: {how}.")


def _run(argv: tuple[str, ...], timeout: float | None, input: str | None, cwd: str | None) -> Completed:
    """In a session of its own: Ctrl-C reaches this program alone, which then ends the command and cleans up."""
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
    try:
        out, err = process.communicate(input, timeout)
    except subprocess.TimeoutExpired:
        end(process)
        return Completed(argv, 124, "", f"ended after {timeout:g} s without an answer")
    except BaseException:
        end(process)
        raise
    return Completed(argv, process.returncode, out, err)


def end(process: subprocess.Popen, grace: float = 5.0, close: bool = True) -> None:
    """Ends a process and those it has started: asked first, then killed. `close=False`: a thread reads its streams."""
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


# In the words of gcloud and kubectl. No looser: a tool that breaks with FileNotFoundError has deleted nothing.
GONE = r"\bNOT_FOUND\b|\(NotFound\)|\b(was|were|be) not found\b|\bcould not be found\b"
NOT_GONE = rf"(?s)\A(?!.*({GONE}))"  # worth another try
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def still_there(what: str, delete: Sequence[str]) -> str:
    """The words that name a resource which stays."""
    return f"still there: {what}; delete it with: {shlex.join(delete)}"


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
        """Before the command that creates it: Ctrl-C may come in the middle of that. Deleting what is not there is fine."""
        self._created[what] = tuple(delete)

    def keep(self, what: str) -> None:
        """It is deleted, or shall stay whatever happens now."""
        self._created.pop(what, None)

    def delete_all(self) -> list[str]:
        """Deletes everything now; returns words for what is still there."""
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
        except (Exception, KeyboardInterrupt):  # a second Ctrl-C: then it is named
            return False
        return done.returncode == 0 or re.search(GONE, done.stderr) is not None

    def __enter__(self) -> Leftovers:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's is not
            self._former = {number: signal.signal(number, _interrupt) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                for words in self.delete_all():
                    error.add_note(words)
        finally:
            for number, handler in self._former.items():
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")


_KNOWN = (
    (
        r"[Qq]uota .*(exceeded|exhausted)|exceeded quota|QUOTA_EXCEEDED|[Qq]uota limit",
        "the project's quota is too small for these slices (or other queued resources, also suspended and failed ones, use "
        "it up: launch/gcloud_tpu.py list). Ask for more at https://console.cloud.google.com/iam-admin/quotas, service "
        "tpu.googleapis.com, in this zone; spot and on-demand slices have quotas of their own. Or take a smaller "
        "--topology.",
    ),
    (
        "no more capacity|Insufficient (reserved )?capacity|does not have enough resources|STOCKOUT|ZONE_RESOURCE_POOL",
        "the zone has no such slices free. Try again later, with --spot, in another --zone, or with a smaller --topology.",
    ),
    (
        r"has not been used in project|SERVICE_DISABLED|it is disabled|API \[tpu",
        "the Cloud TPU API is not enabled: gcloud services enable tpu.googleapis.com --project=PROJECT",
    ),
    (
        r"PERMISSION_DENIED|does not have permission|[Pp]ermission .*denied|403",
        "this account may not do that: it needs the roles roles/tpu.admin, roles/iam.serviceAccountUser and "
        "roles/storage.admin in the project, see docs/launch.md.",
    ),
    (
        r"Network is unreachable|Failed to resolve|Name or service not known|Max retries exceeded|name resolution",
        "this machine has no way to the cloud: is its network there?",
    ),
    (
        r"There was a problem refreshing your current auth tokens|do not currently have an active account|gcloud auth login",
        "this machine is not logged in: gcloud auth login",
    ),
    (r"RESOURCE_EXHAUSTED", "quota or capacity are used up: see docs/launch.md, usual failures."),
)


def explained(said: str) -> str:
    """What to do, for words that are known; else ''.

    >>> explained("Quota 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' exhausted. Limit 16 in zone us-west4-a")[:42]
    "the project's quota is too small for these"
    """
    return next((words for pattern, words in _KNOWN if re.search(pattern, said)), "")


def refusal(begin: str, said: str) -> str:
    """An error message: what failed, the cloud's own words, and what to do about it."""
    what_to_do = explained(said)
    return f"{begin}:\n{said}" + (f"\n{what_to_do[0].upper()}{what_to_do[1:]}" if what_to_do else "")
