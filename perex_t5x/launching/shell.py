"""Commands of other programs (gcloud, kubectl, docker): run without a shell, retried, recorded, or only printed."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from perex_t5x.errors import ConfigError, TrainingError

_INSTALL = {
    "gcloud": "install the Google Cloud SDK, https://cloud.google.com/sdk/docs/install, then: gcloud auth login",
    "gsutil": "it is part of the Google Cloud SDK, https://cloud.google.com/sdk/docs/install",
    "kubectl": "gcloud components install kubectl gke-gcloud-auth-plugin",
    "docker": "install Docker, https://docs.docker.com/engine/install",
    "git": "install git",
}
_SHOWN_LINES = 12


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
            said = "dry run: no command is run; what is said here is what a launch says in which all goes well"
            print(said, file=sys.stderr, flush=True)

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
            print(f"{shlex.join(argv[:5])} ... failed ({last}); again in {pause:g} s", file=sys.stderr, flush=True)
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
