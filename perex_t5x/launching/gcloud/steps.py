"""The steps of a launch on TPU VMs. Each can be run by itself, and again."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.launching import bundle, shell
from perex_t5x.launching.gcloud import remote, resource
from perex_t5x.launching.gcloud.remote import HostStatus
from perex_t5x.launching.gcloud.resource import GONE, Description, Resource
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import Commands, Completed, say, with_notes

_SSH_RETRIES = _CREATE_RETRIES = 3
_AT_ONCE = 16  # slices; each is one gcloud, which connects to all its hosts
_NODE_GONE = ("PREEMPTED", "TERMINATED", "STOPPING", "STOPPED", "DELETING")


class ExistsError(TrainingError):
    """A queued resource of this name was created in the meantime."""


class UnreachableError(TrainingError):
    """The cloud did not answer, so what exists is not known."""


@dataclass(frozen=True)
class Bundle:
    """A bundle in the bucket. Its name has its content: a later launch does not change what hosts of this one download.

    Attributes:
      folder: of the launch in the bucket.
      sha256: of the archive.
    """

    folder: str
    sha256: str

    @property
    def url(self) -> str:
        return f"{self.folder}/bundle-{self.sha256[:16]}.tar.gz"


@dataclass
class Steps:
    """
    Attributes:
      target: the queued resource.
      commands: runs gcloud.
      poll: seconds between two checks of a state.
      clock, sleep: replaced in tests.
    """

    target: Resource
    commands: Commands
    poll: float = field(default_factory=lambda: float(os.environ.get("PEREX_T5X_POLL_SECONDS", "30")))
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    # --- the resource -------------------------------------------------------------------------------------------------

    def describe(self, dry: Description = GONE) -> Description:
        """The queued resource; `GONE` if there is none."""
        if self.commands.dry_run:
            self.commands.run(self.target.describe())
            return dry
        done = self.commands.run(self.target.describe(), check=False, retries=4, retry_on=[shell.GCLOUD_TRANSIENT])
        if done.returncode == 0:
            return Description.of(json.loads(done.stdout))
        if done.matches(shell.GONE):
            return GONE
        raise _unanswered(f"{self.target.what} cannot be described", done)

    def resources(self) -> list[Description]:
        """The queued resources that launches have created in this zone."""
        transient = [shell.GCLOUD_TRANSIENT]
        done = self.commands.run(self.target.list_all(), check=False, retries=4, retry_on=transient, dry="[]")
        if done.returncode != 0:
            raise TrainingError(shell.refusal("the queued resources cannot be listed", done.said))
        return [one for item in json.loads(done.stdout or "[]") if (one := Description.of(item)).ours]

    def create(self, request: Request, argv: Sequence[str]) -> None:
        say(f"requesting {self.target.what}: {request.slices} x {request.slice.accelerator_type}")
        for attempt in range(_CREATE_RETRIES + 1):
            done = self.commands.run(argv, check=False)
            if done.returncode == 0:
                return
            if done.matches(shell.ALREADY_EXISTS):
                if attempt and self.describe().labels.get(resource.LABEL_RUN) == request.work.fingerprint:
                    return  # an earlier attempt succeeded, and only its answer was lost
                raise ExistsError(f"{self.target.what} exists already.")
            if attempt == _CREATE_RETRIES or not done.matches(shell.GCLOUD_TRANSIENT):
                break
            say(f"{done.said.splitlines()[-1].strip()}; retrying")
            self.sleep(self.commands.wait * 2**attempt)
        raise TrainingError(shell.refusal(f"{self.target.what} was not created", done.said))

    def wait(self, hours: float) -> None:
        """Waits until the slices are ACTIVE; raises if they never will be."""
        begun, shown = self.clock(), None
        while True:
            now = self.describe(dry=Description("", "ACTIVE", "", {}))
            if now.state != shown:
                say(f"{time.strftime('%H:%M:%S')} {self.target.name}: {now.state}")
                shown = now.state
            if now.state == "ACTIVE":
                return
            if now == GONE:
                raise TrainingError(f"{self.target.what} is gone: somebody has deleted it.")
            if not now.exists_or_pending:
                reason = now.error or "  (no reason given)"
                raise TrainingError(shell.refusal(f"{self.target.what} is {now.state}", reason))
            if self.clock() - begun > hours * 3600:
                raise TrainingError(
                    f"{self.target.what} is {now.state} after {hours:g} hours (--wait_hours): the zone has no such slices "
                    "available. Try again later, with --spot, in another --zone, or with a smaller --topology."
                )
            self.sleep(self.poll)

    def delete(self) -> None:
        done = self.commands.run(self.target.delete(), check=False, retries=3, retry_on=[shell.NOT_GONE])
        if done.returncode == 0:
            say(f"deleted: {self.target.what}")
        elif done.matches(shell.GONE):
            say(f"there is no {self.target.what}")
        else:
            raise TrainingError(shell.refusal(f"{self.target.what} was not deleted", done.said))

    def delete_each(self, found: Sequence[Description]) -> None:
        """Deletes several queued resources; one that cannot be deleted does not keep the others, and is named at the end."""
        left = []
        for one in found:
            target = self.target.renamed(one.name)
            try:
                dataclasses.replace(self, target=target).delete()
            except TrainingError as e:
                say(str(e))
                left.append(target.still_there)
        if left:
            raise with_notes(TrainingError(f"{len(left)} of {len(found)} were not deleted."), *left)

    def nodes_ready(self) -> bool:
        """Whether all nodes run; a queued resource can be ACTIVE while a node is being preempted or repaired."""
        return all(state == "READY" for state in self._node_states())

    def preempted(self) -> bool:
        """Whether a slice was preempted: a node is PREEMPTED before its queued resource is SUSPENDED."""
        state = self.describe().state
        if state != "ACTIVE":
            return state in ("SUSPENDING", "SUSPENDED")
        return any(state in _NODE_GONE for state in self._node_states())

    def _node_states(self) -> Iterator[str]:
        for node in self.target.nodes:
            argv = self.target.describe_node(node)
            done = self.commands.run(argv, check=False, retries=2, retry_on=[shell.GCLOUD_TRANSIENT])
            if done.returncode == 0:
                yield json.loads(done.stdout).get("state", "UNKNOWN")
            elif done.matches(shell.GONE):
                yield "DELETING"
            else:
                raise _unanswered(f"{node} cannot be described", done)

    def check_secrets(self, secrets: Mapping[str, str]) -> None:
        """Raises `ConfigError` for a --secret that does not exist, is disabled, or that this user may not see."""
        for secret in remote.parse_secrets(secrets, self.target.project):
            argv = [*secret.command("describe"), "--format=json"]
            done = self.commands.run(argv, check=False, retries=2, retry_on=[shell.GCLOUD_TRANSIENT], dry="{}")
            state = json.loads(done.stdout or "{}").get("state", "ENABLED") if done.returncode == 0 else None
            if state == "ENABLED":
                continue
            which = f"version {secret.version} of the secret {secret.secret!r} in {secret.project}"
            where = f"--secret {secret.variable}: {which}"
            how = (
                f"Create it: gcloud secrets create {secret.secret} --project={secret.project} --data-file=FILE. The hosts' "
                "service account needs roles/secretmanager.secretAccessor on it, see docs/launch.md."
            )
            raise ConfigError(f"{where} is {state}." if state else f"{where} cannot be found:\n{done.said}\n{how}")

    # --- the hosts ----------------------------------------------------------------------------------------------------

    def on_all(self, script: str, doing: str, retries: int = _SSH_RETRIES, timeout: float | None = None) -> str:
        """Runs a script on every host of every slice, on all slices at the same time, and returns their output, slice by
        slice; failing hosts are retried, then named."""
        # With the same record, and it can be stopped alone.
        commands = self.commands if self.commands.dry_run else dataclasses.replace(self.commands)

        def on_node(node: str) -> str:
            done = commands.run(self.target.ssh(node, script), check=False, retries=retries, timeout=timeout)
            if done.returncode == 0:
                return done.stdout
            failed = shell.failed_workers(done.stderr)
            which = f"worker {', '.join(failed)} of {node}" if failed else f"a worker of {node}"
            raise TrainingError(f"{doing} failed on {which}, {retries + 1} times:\n{done.said}")

        if self.commands.dry_run or self.target.slices == 1:
            return "".join(on_node(node) for node in self.target.nodes)
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            running = [pool.submit(on_node, node) for node in self.target.nodes]
            try:
                for first in concurrent.futures.as_completed(running):
                    first.result()  # raises the first failure
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                commands.stop()
                raise
        return "".join(each.result() for each in running)

    def upload(self, request: Request, files: bundle.Checkout) -> Bundle:
        """Builds the bundle and uploads it to the bucket."""
        target = bundle.folder(request.name)
        url = bundle_url(request.work.root, request.name)
        with bundle.alone(target, self.commands.dry_run):
            packed = bundle.build(request.work, target, files, self.commands, request.with_package)
            uploaded = Bundle(url, "SHA256" if self.commands.dry_run else _sha256(packed))
            self.put(packed, uploaded.url)
            self.put(f"{target}/bundle/jobs.json", f"{url}/jobs.json")
            digest = os.path.join(target, "bundle.sha256")
            self.commands.write(digest, uploaded.sha256)
            self.put(digest, f"{url}/bundle.sha256")
        return uploaded

    def put(self, source: str, url: str) -> None:
        """Uploads a file."""
        argv = ["gcloud", "storage", "cp", source, url, f"--project={self.target.project}"]
        done = self.commands.run(argv, check=False, retries=3, retry_on=[shell.GCLOUD_TRANSIENT])
        if done.returncode != 0:
            raise ConfigError(shell.refusal(f"{url} cannot be written", done.said))

    def uploaded(self, folder: str) -> Bundle | None:
        """The newest bundle of the launch in the bucket; None if there is none.

        Its checksum becomes part of a script for the hosts, and whoever may write to the bucket may have written it.
        """
        argv = ["gcloud", "storage", "cat", f"{folder}/bundle.sha256", f"--project={self.target.project}"]
        done = self.commands.run(argv, check=False, retries=2, retry_on=[shell.GCLOUD_TRANSIENT])
        digest = done.stdout.strip()
        if done.returncode != 0 or not re.fullmatch("[0-9a-f]{64}", digest):
            return None
        own = Path(bundle.folder(self.target.name), "bundle.sha256")
        if not own.is_file() or own.read_text().strip() != digest:
            say("note: another machine has built this launch's bundle; its checksum is the one in the bucket")
        return Bundle(folder, digest)

    def copy(self, uploaded: Bundle) -> None:
        say("copying the package and the Gin files to all workers")
        self.on_all(remote.copy(self.target.name, uploaded.url, uploaded.sha256), "copying")

    def install(self, python: str | None = None) -> None:
        say("installing on all workers; this takes minutes")
        self.on_all(remote.install(self.target.name, python), "installing")

    def start(self, secrets: Mapping[str, str] | None = None) -> None:
        found = remote.parse_secrets(secrets or {}, self.target.project)
        attempt = "ATTEMPT" if self.commands.dry_run else time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.on_all(remote.start(self.target.name, found, attempt), "starting")
        say("started on all workers")

    def keep_logs(self, url: str) -> None:
        """Stores every host's worker.log in the bucket. The workers store logs themselves, unless they die hard."""
        self.on_all(remote.keep_logs(self.target.name, url), "storing logs", retries=0, timeout=300)

    def stop(self) -> None:
        self.on_all(remote.stop(self.target.name), "stopping")

    def status(self) -> list[HostStatus]:
        """Of every host."""
        lines = self.on_all(remote.status(self.target.name), "asking for the status").splitlines()
        return [status for line in lines if (status := HostStatus.parse(line))]


def _unanswered(begin: str, done: Completed) -> TrainingError:
    kind = UnreachableError if done.matches(shell.GCLOUD_TRANSIENT) else TrainingError
    return kind(shell.refusal(begin, done.said))


def _sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def bundle_url(root: str, name: str) -> str:
    """
    >>> bundle_url("gs://bucket/sweeps/a", "b")
    'gs://bucket/sweeps/a/.launch/b'
    """
    return f"{root.rstrip('/')}/.launch/{name}"
