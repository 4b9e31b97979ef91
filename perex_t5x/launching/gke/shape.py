"""What a JobSet is made from: plain values, checked when made."""

from __future__ import annotations

import re
from dataclasses import dataclass

from perex_t5x.errors import ConfigError

LONGEST_NAME = 63
MOST = 2**31 - 1  # of a number in a manifest: 32 bits
REPLICATED_JOB = "slice"
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_IMAGE = re.compile(r"[a-z0-9][a-zA-Z0-9._:/-]*(@sha256:[0-9a-f]{64})?")


@dataclass(frozen=True)
class Shape:
    """One JobSet.

    Attributes:
      name: of the JobSet; its jobs, pods and hostnames begin with it.
      group: the name of the launch, the same for all its JobSets.
      run: fingerprint of the folder that is written to: the same for two launches of the same run.
      launch: of this very launch; what it leaves behind is found by it.
      image: of the container.
      accelerator, topology: the labels of GKE's TPU nodes, such as tpu-v5-lite-podslice and 16x16.
      hosts, chips_per_host: of one slice.
      slices: how many slices work together.
      queue: Kueue's LocalQueue; None without Kueue.
      priority: a PriorityClass of the cluster.
      service_account: the Kubernetes one the pods run as; with Workload Identity it may write to the bucket.
      spot, reservation: which nodes are used.
      max_restarts: of the whole JobSet, after preemptions and crashes.
      grace_seconds: between the signal to stop and the kill; the run saves in them.
      ttl_seconds: after which a finished JobSet is deleted by the cluster.
      host_network: the pods use the nodes' own network: faster between slices, but without Workload Identity.
      privileged: the container may lock memory as the TPU's driver wants; False: it gets only the right to ask for that.
    """

    name: str
    group: str
    run: str
    launch: str
    image: str
    accelerator: str
    topology: str
    hosts: int
    chips_per_host: int
    slices: int = 1
    namespace: str = "default"
    queue: str | None = None
    priority: str | None = None
    service_account: str | None = None
    spot: bool = False
    reservation: str | None = None
    max_restarts: int = 10
    grace_seconds: int = 600
    ttl_seconds: int = 3 * 24 * 3600
    host_network: bool = False
    privileged: bool = True

    def __post_init__(self) -> None:
        if slips := self._slips():
            raise ConfigError("\n".join(slips))

    def coordinator(self) -> str:
        """The hostname of process 0 of slice 0, which JobSet's headless service makes known."""
        return f"{self.name}-{REPLICATED_JOB}-0-0.{self.name}"

    def longest_pod_name(self) -> str:
        """With the five characters that Kubernetes appends."""
        return f"{self.name}-{REPLICATED_JOB}-{self.slices - 1}-{self.hosts - 1}-abcde"

    def _slips(self) -> list[str]:
        """All at once."""
        slips = []
        if not _DNS_LABEL.fullmatch(self.name):
            slips.append(f"--name={self.name!r}: only a-z, 0-9 and -, beginning with a letter.")
        elif (excess := len(self.longest_pod_name()) - LONGEST_NAME) > 0:
            slips.append(
                f"--name={self.name}: {excess} characters too long, as pods would be called {self.longest_pod_name()!r}."
            )
        if not _IMAGE.fullmatch(self.image):
            slips.append(
                f"--image={self.image!r}: not an image; such as europe-docker.pkg.dev/PROJECT/perex/perex:TAG."
            )
        for flag, value in (("queue", self.queue), ("priority", self.priority), ("reservation", self.reservation)):
            slips.extend(_name_slips(flag, value, LONGEST_NAME))
        slips.extend(_name_slips("service_account", self.service_account, 253))
        if not _NAMESPACE.fullmatch(self.namespace) or len(self.namespace) > LONGEST_NAME:
            slips.append(f"--namespace={self.namespace!r}: only a-z, 0-9 and -, at most {LONGEST_NAME} characters.")
        for flag, number, least in (
            ("slices", self.slices, 1),
            ("max_restarts", self.max_restarts, 0),
            ("grace_seconds", self.grace_seconds, 1),
            ("ttl_hours", self.ttl_seconds, 0),
        ):
            if not least <= number <= MOST:
                slips.append(
                    f"--{flag} is {number}; from {least} to {MOST}{' seconds' if flag == 'ttl_hours' else ''}."
                )
        if self.slices > 1 and self.hosts == 1:
            slips.append(
                f"--slices={self.slices} with {self.topology}, a slice of one host: GKE joins only slices of several "
                "hosts. Take a larger topology, or --slices=1."
            )
        if self.spot and self.reservation:
            slips.append("--spot and --reservation exclude each other.")
        return slips


def _name_slips(flag: str, value: str | None, longest: int) -> list[str]:
    if value is None or (_DNS_SUBDOMAIN.fullmatch(value) and len(value) <= longest):
        return []
    return [f"--{flag}={value!r}: only a-z, 0-9, - and ., at most {longest} characters."]
