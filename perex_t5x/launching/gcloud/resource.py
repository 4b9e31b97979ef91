"""A queued resource, and the gcloud commands about it as lists of arguments; nothing is run here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.launching import names
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import still_there

LABEL_NAME, LABEL_RUN, LABEL_COMMIT = "perex-name", "perex-run", "perex-commit"
# Of a detached launch.
LABEL_ATTEMPT, METADATA_ATTEMPT, METADATA_ROOT = "perex-attempt", "perex-attempt", "perex-root"
_QUEUED = ("compute", "tpus", "queued-resources")


@dataclass(frozen=True)
class Resource:
    """Where the slices of a launch are, or will be. One queued resource holds all slices, which are created together.

    Attributes:
      name: of the queued resource; with one slice also of its node.
      project, zone: where.
      slices: how many nodes it has.
      internal_ip: reach the hosts at their internal addresses.
      launch: the name of the launch, if it is another one.
    """

    name: str
    project: str
    zone: str
    slices: int = 1
    internal_ip: bool = False
    launch: str = ""

    def renamed(self, name: str) -> Resource:
        """Another queued resource of the same launch."""
        return dataclasses.replace(self, name=name, launch=self.launch or self.name)

    @property
    def where(self) -> list[str]:
        return [f"--project={self.project}", f"--zone={self.zone}"]

    @property
    def nodes(self) -> list[str]:
        """
        >>> Resource("a", "my-project", "us-west4-a", 2).nodes
        ['a-0', 'a-1']
        """
        return [self.name] if self.slices == 1 else [f"{self.name}-{i}" for i in range(self.slices)]

    @property
    def what(self) -> str:
        """For messages."""
        return f"queued resource {self.name} ({self.project}, {self.zone})"

    def create(
        self, request: Request, commit: str, more: Sequence[str] = (), labels: Mapping[str, str] | None = None
    ) -> list[str]:
        """Requests the slices. Only gcloud's alpha commands know named reservations, and the shapes of some chips."""
        one = self.slices == 1
        nodes = [f"--node-id={self.name}"] if one else [f"--node-count={self.slices}", f"--node-prefix={self.name}"]
        ours = {LABEL_NAME: self.launch or self.name, LABEL_RUN: request.work.fingerprint}
        labels = {**ours, LABEL_COMMIT: names.label_value(commit), **(labels or {})}
        tier = []
        if request.spot:
            tier = ["--spot"]
        elif request.reservation:
            where = f"projects/{self.project}/locations/{self.zone}/reservations/"
            tier = [f"--reservation={'' if '/' in request.reservation else where}{request.reservation}"]
        elif request.reserved:
            tier = ["--reserved"]
        alpha = ["alpha"] if request.reservation or request.slice.needs_alpha else []
        internal = ["--internal-ips"] if self.internal_ip else []
        image = f"--runtime-version={request.slice.runtime_version}"
        labelled = "--labels=" + ",".join(f"{key}={value}" for key, value in labels.items())
        return [
            *("gcloud", *alpha, *_QUEUED, "create", self.name, *self.where, *nodes, *request.slice.gcloud_flags()),
            *(image, labelled, *tier, *internal, *more, "--quiet"),
        ]

    def describe(self) -> list[str]:
        return ["gcloud", *_QUEUED, "describe", self.name, *self.where, "--format=json"]

    def delete(self) -> list[str]:
        """Deletes it with its nodes, running or not."""
        return ["gcloud", *_QUEUED, "delete", self.name, *self.where, "--force", "--quiet"]

    @property
    def still_there(self) -> str:
        """The line that names it if it is not deleted."""
        return still_there(self.what, self.delete())

    def list_all(self) -> list[str]:
        """Those of the zone, whoever created them."""
        return ["gcloud", *_QUEUED, "list", *self.where, "--format=json"]

    def describe_node(self, node: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "tpu-vm", "describe", node, *self.where, "--format=json"]

    def ssh(self, node: str, script: str, worker: str = "all") -> list[str]:
        """Runs a script on hosts of a node. It arrives literally: no shell on this machine reads it."""
        internal = ["--internal-ip"] if self.internal_ip else []
        how = [f"--worker={worker}", *internal, "--ssh-flag=-o ServerAliveInterval=30", "--quiet"]
        return ["gcloud", "compute", "tpus", "tpu-vm", "ssh", node, *self.where, *how, f"--command={script}"]


_OWN_FLAGS = (
    *("accelerator-type", "labels", "node-count", "node-id", "node-prefix", "project", "reservation", "reserved"),
    *("runtime-version", "spot", "topology", "type", "zone"),
)


def check_create_flags(flags: Sequence[str], detached: bool = False) -> None:
    """Raises `ConfigError` for a --create_flag that would override one of the launch's own, such as its labels.

    >>> check_create_flags(["--network=n"])
    """
    for flag in flags:
        name = flag.partition("=")[0]
        if not name.startswith("--"):
            raise ConfigError(f"--create_flag={flag!r} is not a gcloud flag, such as --create_flag=--network=n.")
        if name[2:] in (*_OWN_FLAGS, *(("metadata", "metadata-from-file") if detached else ())):
            raise ConfigError(f"--create_flag={flag!r}: {name} is set by the launch itself.")


@dataclass(frozen=True)
class Description:
    """A queued resource as `describe` or `list` shows it.

    Attributes:
      state: ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING, ACTIVE, FAILED, SUSPENDING, SUSPENDED, ...; 'GONE' if there is
        none.
    """

    name: str
    state: str
    error: str
    labels: dict[str, str]
    slices: int = 1
    root: str = ""  # of a detached launch: where it writes

    @classmethod
    def of(cls, described: dict[str, Any]) -> Description:
        """
        >>> Description.of({"name": "projects/p/locations/z/queuedResources/a", "state": {"state": "ACTIVE"}}).state
        'ACTIVE'
        """
        state = described.get("state", {})
        specs = described.get("tpu", {}).get("nodeSpec", [])
        labels = next((spec.get("node", {}).get("labels", {}) for spec in specs), {})
        several = [s.get("multisliceParams") or s.get("multiNodeParams") or {} for s in specs]
        count = sum(int(s.get("nodeCount", 1)) for s in several)
        errors = [value["error"] for value in state.values() if isinstance(value, dict) and "error" in value]
        error = "; ".join(str(e.get("message", e)) for e in errors)
        name = described.get("name", "").rpartition("/")[2]
        metadata = next((spec.get("node", {}).get("metadata", {}) for spec in specs), {})
        return cls(name, state.get("state", "UNKNOWN"), error, labels, count or 1, metadata.get(METADATA_ROOT, ""))

    @property
    def ours(self) -> bool:
        return LABEL_NAME in self.labels

    @property
    def launch(self) -> str:
        """The name of its launch."""
        return self.labels.get(LABEL_NAME, self.name)

    @property
    def attempt(self) -> int | None:
        """Of a detached launch: how many queued resources it had before this one; None of others."""
        text = self.labels.get(LABEL_ATTEMPT, "")
        return int(text) if text.isdigit() else None

    @property
    def exists_or_pending(self) -> bool:
        return self.state in ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")


GONE = Description("", "GONE", "", {})
