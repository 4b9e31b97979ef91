"""The folder of a launch in the bucket, through gcloud: a machine that looks at a launch needs nothing else.

Python's own access to buckets needs credentials of its own (`gcloud auth application-default login`); `gcloud auth login` is
what launchers ask for anyway.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from dataclasses import dataclass, field
from typing import Any

from perex_t5x import goodput
from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.launching import launch_folder, shell
from perex_t5x.launching.gcloud.steps import UnreachableError
from perex_t5x.launching.launch_folder import HostError, LaunchFolder
from perex_t5x.launching.shell import Commands, Completed

_NO_OBJECT = r"matched no objects|not found|\b404\b"
_MOST_ATTEMPTS = 5  # in which the first error is looked for


@dataclass(frozen=True)
class GcloudFolder(LaunchFolder):
    """Reading raises `TrainingError` if the bucket cannot be read."""

    commands: Commands = field(default_factory=Commands)
    project: str | None = None

    @property
    def root(self) -> str:
        """The folder of the sweep or the run."""
        return self.path.rpartition("/.launch/")[0]

    def text(self, *names: str, part: tuple[int, int] | None = None) -> str | None:
        """An object's content, or its bytes from the first number to before the second; None if there is no such object."""
        return self._cat(self.join(*names), *([f"--range={part[0]}-{part[1] - 1}"] if part else []))

    def read(self, *names: str) -> Any:
        with contextlib.suppress(ValueError):
            return json.loads(self.text(*names) or "")
        return None

    def write(self, content: Any, *names: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "content.json")
            if not self.commands.dry_run:
                self.commands.write(path, json.dumps(content) + "\n")
            done = self._run("cp", path, self.join(*names))
        if done.returncode != 0:
            raise ConfigError(shell.refusal(f"{self.join(*names)} cannot be written", done.said))

    def entries(self, *names: str) -> list[str]:
        return sorted(self.sizes(*names))

    def sizes(self, *names: str) -> dict[str, int]:
        """The names in a folder; of folders 0."""
        done = self._run("ls", "--long", f"{self.join(*names)}/")
        if done.returncode != 0 and not done.matches(_NO_OBJECT):
            raise _unread(f"{self.join(*names)} cannot be listed", done)
        lines = done.stdout.splitlines() if done.returncode == 0 else []
        found = [re.fullmatch(r"\s*(?:(\d+)\s+\S+\s+)?gs://\S*?/([^/\s]+)/?", line) for line in lines]
        return {match[2]: int(match[1] or 0) for match in found if match}

    def first_error(self) -> HostError | None:
        """That of the newest attempt in which a job failed; errors that only report another's come last."""
        for attempt in reversed(self.attempts()[-_MOST_ATTEMPTS:]):
            # Each is a call of gcloud, and 64 hosts may report the end of one.
            if errors := self.errors(attempt, kinds=[launch_folder.OWN]) or self.errors(attempt):
                return errors[0]
        return None

    def progress(self) -> list[str]:
        """In lines: the job that is running or ran last, its goodput, and the first error of all hosts."""
        state, work = self.read(launch_folder.STATE) or {}, self.read("jobs.json") or {}
        job = next((job for job in work.get("jobs", []) if job["name"] == state.get("job")), None)
        lines = []
        if job is not None:
            step = "" if state.get("step") is None else f", step {state['step']}"
            which = f"job {state.get('number')} of {state.get('jobs')}, {job['name']}"
            lines.append(f"{which}: {state.get('phase')}{step}, as of {state.get('time')}")
            lines += [f"{job['name']}: {line}"] if (line := self._goodput(job["model_dir"])) else []
        error = self.first_error()
        return [*lines, *([f"first error: {error}"] if error else [])]

    def _goodput(self, model_dir: str) -> str:
        attempts = []
        for line in (self._cat(f"{model_dir}/{goodput.FOLDER}/*.json") or "").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                attempts.append(goodput.Attempt.from_json(line))
        total = goodput.add_up(attempts)
        return total.line if total else ""

    def _cat(self, url: str, *options: str) -> str | None:
        done = self._run("cat", url, *options)
        if done.returncode == 0:
            return done.stdout
        if done.matches(_NO_OBJECT):
            return None
        raise _unread(f"{url} cannot be read", done)

    def _run(self, verb: str, *arguments: str) -> Completed:
        where = [f"--project={self.project}"] if self.project else []
        argv = ["gcloud", "storage", verb, *arguments, *where]
        return self.commands.run(argv, check=False, retries=3, retry_on=[shell.GCLOUD_TRANSIENT])


def _unread(begin: str, done: Completed) -> TrainingError:
    kind = UnreachableError if done.matches(shell.GCLOUD_TRANSIENT) else TrainingError
    return kind(shell.refusal(begin, done.said))
