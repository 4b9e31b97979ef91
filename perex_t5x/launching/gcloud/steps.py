"""The steps of a launch on TPU VMs. Each can be run alone, and again."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.launching import bundle, shell
from perex_t5x.launching.gcloud import remote, resource
from perex_t5x.launching.gcloud.resource import GONE, Description, Resource
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import Commands, Completed, say

# Failures of the way to the cloud, not of the request. Names and limits have numbers in them, too: 500 alone says nothing.
_PASSING = (
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL)\b|Connection (reset|refused|aborted)|timed out|Temporary failure"
    r"|Network is unreachable|Max retries exceeded|Failed to resolve|Name or service not known"
    r"|HTTPError:? 50[0234]|\b50[0234] (Internal|Bad|Service|Gateway|Server)",
)
_SSH_RETRIES = _CREATE_RETRIES = 3
_NODE_GONE = ("PREEMPTED", "TERMINATED", "STOPPING", "STOPPED", "DELETING")


class ExistsError(TrainingError):
    """A queued resource of this name was made in the meantime."""


class UnreachableError(TrainingError):
    """The cloud did not answer, which says nothing about what is there."""


@dataclass
class Steps:
    """
    Attributes:
      target: the queued resource.
      commands: runs gcloud.
      poll: seconds between two looks at a state.
      clock, sleep: other ones, for tests.
    """

    target: Resource
    commands: Commands
    poll: float = field(default_factory=lambda: float(os.environ.get("PEREX_T5X_POLL_SECONDS", "30")))
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    # --- the resource -------------------------------------------------------------------------------------------------

    def describe(self, dry: Description = GONE) -> Description:
        """What is there; `GONE` where nothing is."""
        if self.commands.dry_run:
            self.commands.run(self.target.describe())
            return dry
        done = self.commands.run(self.target.describe(), check=False, retries=4, retry_on=_PASSING)
        if done.returncode == 0:
            return resource.parsed(done.stdout)
        if re.search(shell.GONE, done.stderr):
            return GONE
        raise _unanswered(f"{self.target.what} cannot be looked at", done)

    def list(self) -> list[Description]:
        """What launches have made in this zone."""
        done = self.commands.run(self.target.list(), check=False, retries=4, retry_on=_PASSING, dry="[]")
        if done.returncode != 0:
            raise TrainingError(shell.refusal("the queued resources cannot be listed", done.said))
        return resource.all_of(done.stdout)

    def create(self, request: Request, commit: str, more: Sequence[str]) -> None:
        argv = self.target.create(request, commit, more)
        say(f"asking for {self.target.what}: {request.slices} x {request.slice.accelerator_type}")
        for attempt in range(_CREATE_RETRIES + 1):
            done = self.commands.run(argv, check=False)
            if done.returncode == 0:
                return
            if re.search(r"ALREADY_EXISTS|already exists", done.stderr):
                if attempt and self.describe().labels.get(resource.LABEL_RUN) == request.work.fingerprint:
                    return  # the cloud heard an earlier try, and only its answer was lost
                raise ExistsError(f"{self.target.what} exists already.")
            if attempt == _CREATE_RETRIES or not re.search(_PASSING[0], done.stderr):
                break
            say(f"{done.said.splitlines()[-1].strip()}; again")
            self.sleep(self.commands.wait * 2**attempt)
        raise TrainingError(shell.refusal(f"{self.target.what} was not created", done.said))

    def wait(self, hours: float) -> None:
        """Until the slices are there; raises where they never will be."""
        begun, shown = self.clock(), None
        while True:
            found = self.describe(dry=Description("", "ACTIVE", "", {}))
            if found.state != shown:
                say(f"{time.strftime('%H:%M:%S')} {self.target.name}: {found.state}")
                shown = found.state
            if found.state == "ACTIVE":
                return
            if found == GONE:
                raise TrainingError(f"{self.target.what} is gone: somebody has deleted it.")
            if not found.coming_or_there:
                raise TrainingError(
                    shell.refusal(f"{self.target.what} is {found.state}", found.error or "  (no reason given)")
                )
            if self.clock() - begun > hours * 3600:
                raise TrainingError(
                    f"{self.target.what} is {found.state} after {hours:g} hours (--wait_hours): the zone has no such slices "
                    "free. Try again later, with --spot, in another --zone, or with a smaller --topology."
                )
            self.sleep(self.poll)

    def delete(self) -> None:
        done = self.commands.run(self.target.delete(), check=False, retries=3, retry_on=[shell.NOT_GONE])
        if done.returncode == 0:
            say(f"deleted: {self.target.what}")
        elif re.search(shell.GONE, done.stderr):
            say(f"there is no {self.target.what}")
        else:
            raise TrainingError(shell.refusal(f"{self.target.what} was not deleted", done.said))

    def nodes_ready(self) -> bool:
        """Whether all nodes run; a queued resource can be ACTIVE while a node is being taken away or repaired."""
        return all(state == "READY" for state in self._node_states())

    def taken_away(self) -> bool:
        """Whether the slices, or one of them, were: a node is PREEMPTED before its queued resource is SUSPENDED."""
        state = self.describe().state
        if state != "ACTIVE":
            return state in ("SUSPENDING", "SUSPENDED")
        return any(state in _NODE_GONE for state in self._node_states())

    def _node_states(self) -> Iterator[str]:
        for node in self.target.nodes:
            done = self.commands.run(self.target.describe_node(node), check=False, retries=2, retry_on=_PASSING)
            if done.returncode == 0:
                yield json.loads(done.stdout).get("state", "UNKNOWN")
            elif re.search(shell.GONE, done.stderr):
                yield "DELETING"
            else:
                raise _unanswered(f"{node} cannot be looked at", done)

    # --- the hosts ----------------------------------------------------------------------------------------------------

    def on_all(self, script: str, doing: str) -> str:
        """Runs a script on every host of every slice; a host that fails is tried again, then named."""
        said = []
        for node in self.target.nodes:
            argv = self.target.ssh(node, script)
            done = self.commands.run(argv, check=False, retries=_SSH_RETRIES)
            said.append(done.stdout)
            if done.returncode != 0:
                failed = failed_workers(done.stderr)
                which = f"worker {', '.join(failed)} of {node}" if failed else f"a worker of {node}"
                raise TrainingError(f"{doing} failed on {which}, {_SSH_RETRIES + 1} times:\n{done.said}")
        return "".join(said)

    def upload(self, request: Request, files: bundle.Checkout) -> str:
        """Builds the bundle and brings it to the bucket; returns its address."""
        target = bundle.folder(request.name)
        url = bundle_url(request.work.root, request.name)
        with bundle.alone(target, self.commands.dry_run):
            packed = bundle.build(request.work, target, files, self.commands, request.with_package)
            for source, name in ((packed, "bundle.tar.gz"), (f"{target}/bundle/jobs.json", "jobs.json")):
                argv = ["gcloud", "storage", "cp", source, f"{url}/{name}", f"--project={self.target.project}"]
                done = self.commands.run(argv, check=False, retries=3, retry_on=_PASSING)
                if done.returncode != 0:
                    raise ConfigError(shell.refusal(f"{url} cannot be written", done.said))
        return url

    def uploaded(self, url: str) -> bool:
        """Whether the bundle is in the bucket."""
        argv = ["gcloud", "storage", "ls", f"{url}/bundle.tar.gz", f"--project={self.target.project}"]
        return self.commands.run(argv, check=False, retries=2, retry_on=_PASSING).returncode == 0

    def copy(self, url: str) -> None:
        say("copying the package and the Gin files to all workers")
        self.on_all(remote.copy(self.target.name, f"{url}/bundle.tar.gz"), "copying")

    def install(self, python: str | None = None) -> None:
        say("installing on all workers; this takes minutes")
        self.on_all(remote.install(self.target.name, python), "installing")

    def start(self) -> None:
        self.on_all(remote.start(self.target.name), "starting")
        say("started on all workers")

    def stop(self) -> None:
        self.on_all(remote.stop(self.target.name), "stopping")

    def status(self) -> str:
        """A line for every host."""
        return self.on_all(remote.status(self.target.name), "looking")


def _unanswered(begin: str, done: Completed) -> TrainingError:
    kind = UnreachableError if re.search(_PASSING[0], done.stderr) else TrainingError
    return kind(shell.refusal(begin, done.said))


def bundle_url(root: str, name: str) -> str:
    """
    >>> bundle_url("gs://bucket/sweeps/a", "b")
    'gs://bucket/sweeps/a/.launch/b'
    """
    return f"{root.rstrip('/')}/.launch/{name}"


def failed_workers(said: str) -> list[str]:
    """The workers that gcloud names as failed, or else those that it could not connect to.

    >>> failed_workers("##### Command execution on worker 2 failed with exit status 1. Continuing.")
    ['2']
    """
    named = re.findall(r"Command execution on worker (\d+) failed", said)
    if not named:
        tried = re.findall(r"Attempting to connect to worker (\d+)", said)
        named = [w for w in tried if tried.count(w) > 1]
    return sorted(set(named), key=int)


def print_lines(text: str) -> None:
    for line in text.splitlines():
        print(line, file=sys.stdout, flush=True)
