"""The Kubernetes objects of a launch: its JobSet (jobset.x-k8s.io/v1alpha2), the ConfigMap of its files, their YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from perex_t5x.errors import ConfigError
from perex_t5x.launching.spec import FINAL_REASONS

API_VERSION = "jobset.x-k8s.io/v1alpha2"
CONTAINER = "perex"
NAME_LABEL, RUN_LABEL, LAUNCH_LABEL = "perex-name", "perex-run", "perex-launch"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"
ACCELERATOR, TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
SPOT, RESERVATION = "cloud.google.com/gke-spot", "cloud.google.com/reservation-name"
FINAL_EXIT_CODES = tuple(sorted(reason.exit_code for reason in FINAL_REASONS))
# The TPU driver locks more memory than containers may by default.
_RAISED = ("sh", "-c", 'ulimit -l 68719476736; exec "$@"', "sh")
MOUNTED_AT = "/etc/perex"
MOST_BYTES = 1 << 20  # Kubernetes refuses more in one ConfigMap
LONGEST_NAME = 63
MOST = 2**31 - 1  # numbers in a manifest have 32 bits
REPLICATED_JOB = "slice"
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_IMAGE = re.compile(r"[a-z0-9][a-zA-Z0-9._:/-]*(@sha256:[0-9a-f]{64})?")
_SECRET = re.compile(r"([a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?)[/:]([-._a-zA-Z0-9]{1,253})", re.ASCII)
RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
_SURELY_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


@dataclass(frozen=True)
class Shape:
    """One JobSet.

    Attributes:
      name: of the JobSet; its jobs, pods and hostnames begin with it.
      group: the name of the launch, shared by all its JobSets.
      run: fingerprint of the folder that is written to: the same for two launches of the same run.
      launch: unique to this launch; finds what it leaves behind.
      accelerator, topology: the labels of GKE's TPU nodes, such as tpu-v5-lite-podslice and 16x16.
      hosts, chips_per_host: of one slice.
      privileged: a privileged container, which may lock memory for the TPU driver; False: it may only raise that limit.
      secrets: variable -> SECRET/KEY, a Kubernetes Secret of the namespace and its key.
      others: as the flags of these names.
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
    secrets: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise ConfigError("\n".join(problems))

    @property
    def config_map(self) -> str:
        """Its name, unique to a launch: what an earlier one of that name has left must neither conflict nor be mounted."""
        return f"{self.name}-{self.launch}"

    @property
    def secret_keys(self) -> dict[str, tuple[str, str]]:
        """Variable -> (Secret, key)."""
        matches = {variable: _SECRET.fullmatch(reference) for variable, reference in self.secrets.items()}
        return {variable: (match[1], match[2]) for variable, match in matches.items() if match}

    def _problems(self) -> list[str]:
        """All at once."""
        problems = []
        longest_pod_name = (
            f"{self.name}-{REPLICATED_JOB}-{self.slices - 1}-{self.hosts - 1}-abcde"  # Kubernetes appends five
        )
        if not _DNS_LABEL.fullmatch(self.name):
            problems.append(f"--name={self.name!r}: only a-z, 0-9 and -, beginning with a letter.")
        elif (excess := len(longest_pod_name) - LONGEST_NAME) > 0:
            problems.append(
                f"--name={self.name}: {excess} characters too long: a pod would be named {longest_pod_name!r}."
            )
        if not _IMAGE.fullmatch(self.image):
            problems.append(
                f"--image={self.image!r} is not an image name such as europe-docker.pkg.dev/PROJECT/perex/perex:TAG."
            )
        for flag, value in (("queue", self.queue), ("priority", self.priority), ("reservation", self.reservation)):
            problems.extend(_name_problems(flag, value, LONGEST_NAME))
        problems.extend(_name_problems("service_account", self.service_account, 253))
        if not _NAMESPACE.fullmatch(self.namespace) or len(self.namespace) > LONGEST_NAME:
            problems.append(f"--namespace={self.namespace!r}: only a-z, 0-9 and -, at most {LONGEST_NAME} characters.")
        for flag, number, least in (
            ("slices", self.slices, 1),
            ("max_restarts", self.max_restarts, 0),
            ("grace_seconds", self.grace_seconds, 1),
            ("ttl_hours", self.ttl_seconds, 0),
        ):
            if not least <= number <= MOST:
                problems.append(
                    f"--{flag} is {number}; valid: {least} to {MOST}{' seconds' if flag == 'ttl_hours' else ''}."
                )
        if self.slices > 1 and self.hosts == 1:
            problems.append(
                f"--slices={self.slices} with {self.topology}, a slice of one host: GKE joins only slices of several "
                "hosts. Choose a larger topology, or --slices=1."
            )
        for variable, reference in self.secrets.items():
            if not _SECRET.fullmatch(reference):
                problems.append(
                    f"--secret {variable}={reference}: on GKE the name of a Kubernetes Secret and a key in it: SECRET/KEY."
                )
        if self.spot and self.reservation:
            problems.append("--spot and --reservation exclude each other.")
        return problems


def _name_problems(flag: str, value: str | None, longest: int) -> list[str]:
    if value is None or (_DNS_SUBDOMAIN.fullmatch(value) and len(value) <= longest):
        return []
    return [f"--{flag}={value!r}: only a-z, 0-9, - and ., at most {longest} characters."]


def jobset(shape: Shape, command: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
    """The JobSet: one job per slice, one pod per host, all of them running `command`.

    Args:
      shape: the plain values.
      command: what every pod runs. It must hold no user input, as Kubernetes expands $(NAME) in it.
      paths: the files that are mounted under `MOUNTED_AT`.
    """
    queue = {QUEUE_LABEL: shape.queue} if shape.queue else {}
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": {
            "name": shape.name,
            "namespace": shape.namespace,
            "labels": {**labels(shape), **queue},
            # A slice of several hosts is a node pool: one job per pool. A slice of one host is just a node.
            **({"annotations": {EXCLUSIVE: NODE_POOL}} if shape.hosts > 1 else {}),
        },
        "spec": {
            "ttlSecondsAfterFinished": shape.ttl_seconds,
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {
                "maxRestarts": shape.max_restarts,
                # New pods only when all former ones are gone: one that meets a former coordinator fails with it.
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {"name": "finalExitCode", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                ],
            },
            "replicatedJobs": [
                {"name": REPLICATED_JOB, "replicas": shape.slices, "template": {"spec": _job(shape, command, paths)}}
            ],
        },
    }


def labels(shape: Shape) -> dict[str, str]:
    """By which `follow`, `stop` and `list` find the objects of a launch."""
    return {NAME_LABEL: shape.group, RUN_LABEL: shape.run, LAUNCH_LABEL: shape.launch}


def _job(shape: Shape, command: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "parallelism": shape.hosts,
        "completions": shape.hosts,
        # One pod alone cannot continue: whatever else ends a pod, eviction included, restarts all of them together.
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(FINAL_EXIT_CODES)},
                }
            ]
        },
        "template": {"metadata": {"labels": labels(shape)}, "spec": _pod(shape, command, paths)},
    }


def _pod(shape: Shape, command: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        # No run asks Kubernetes for anything; credentials for the bucket come from the metadata server.
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": shape.grace_seconds,
        "nodeSelector": node_selector(shape),
        "containers": [_container(shape, command)],
        "volumes": [
            {"name": "files", "configMap": {"name": shape.config_map, "items": mounted_items(paths)}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if shape.spot:
        pod["tolerations"] = [{"key": SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}]
    if shape.service_account:
        pod["serviceAccountName"] = shape.service_account
    if shape.priority:
        pod["priorityClassName"] = shape.priority
    if shape.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return pod


def node_selector(shape: Shape) -> dict[str, str]:
    """The labels of the nodes that the pods may run on."""
    return {
        ACCELERATOR: shape.accelerator,
        TOPOLOGY: shape.topology,
        **({SPOT: "true"} if shape.spot else {}),
        **({RESERVATION: shape.reservation} if shape.reservation else {}),
    }


def _container(shape: Shape, command: Sequence[str]) -> dict[str, Any]:
    chips = {"google.com/tpu": str(shape.chips_per_host)}
    return {
        "name": CONTAINER,
        "image": shape.image,
        "command": list(command) if shape.privileged else [*_RAISED, *command],
        "securityContext": {"privileged": True} if shape.privileged else {"capabilities": {"add": ["SYS_RESOURCE"]}},
        "env": _environment(shape),
        # TPU runtime, JAX's coordinator, multislice coordinator. Informative: Kubernetes opens all ports.
        "ports": [{"containerPort": port} for port in (8471, 8482, *((8080,) if shape.slices > 1 else ()))],
        "resources": {"requests": dict(chips), "limits": dict(chips)},
        "volumeMounts": [
            {"name": "files", "mountPath": MOUNTED_AT, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _environment(shape: Shape) -> list[dict[str, Any]]:
    """GKE sets TPU_WORKER_ID and TPU_WORKER_HOSTNAMES for indexed jobs with a subdomain.

    The multislice variables are set here: JobSet does not set them.
    """
    attempt = {"fieldRef": {"fieldPath": f"metadata.labels['{RESTART_ATTEMPT}']"}}
    environment: list[dict[str, Any]] = [
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "PEREX_T5X_ATTEMPT", "valueFrom": attempt},
    ]
    for variable, (secret, key) in shape.secret_keys.items():
        environment.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    if shape.slices > 1:
        index = {"fieldRef": {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/job-index']"}}
        environment += [
            {"name": "MEGASCALE_NUM_SLICES", "value": str(shape.slices)},
            {"name": "MEGASCALE_SLICE_ID", "valueFrom": index},
            # Process 0 of slice 0, from JobSet's headless service.
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": f"{shape.name}-{REPLICATED_JOB}-0-0.{shape.name}"},
        ]
    return environment


def config_map(shape: Shape, files: Mapping[str, str], owner: str | None = None) -> dict[str, Any]:
    """The ConfigMap that holds `files` for a JobSet.

    Keys must not contain a slash, so they are numbered, and `mounted_items` maps them to paths.

    Args:
      shape: of the JobSet.
      files: path under `MOUNTED_AT` -> text.
      owner: uid of the JobSet, with which the ConfigMap is deleted; None in a manifest file.
    """
    for path in files:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ConfigError(
                f"the file {path!r} cannot be sent to the cluster: its path must be below the working directory."
            )
    size = sum(len(text.encode()) for text in files.values())
    if size > MOST_BYTES - 16 * 1024:  # the rest for keys, labels and the JSON around them
        largest = ", ".join(sorted(files, key=lambda path: -len(files[path]))[:3])
        raise ConfigError(
            f"the runs' descriptions and Gin files take {size:,} bytes; Kubernetes allows {MOST_BYTES:,} per ConfigMap. The "
            f"largest: {largest}. Split the runs over more JobSets (--jobsets), launch some of them with --only=..., or "
            "build your Gin files into the image."
        )
    metadata: dict[str, Any] = {"name": shape.config_map, "namespace": shape.namespace, "labels": labels(shape)}
    if owner:
        metadata["ownerReferences"] = [{"apiVersion": API_VERSION, "kind": "JobSet", "name": shape.name, "uid": owner}]
    data = {f"file-{number}": text for number, text in enumerate(files.values())}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "data": data}


def mounted_items(paths: Sequence[str]) -> list[dict[str, str]]:
    """Which key of the ConfigMap becomes which file.

    >>> mounted_items(["jobs.json", "gin/runs/mine.gin"])
    [{'key': 'file-0', 'path': 'jobs.json'}, {'key': 'file-1', 'path': 'gin/runs/mine.gin'}]
    """
    return [{"key": f"file-{number}", "path": path} for number, path in enumerate(paths)]


class _Dumper(yaml.SafeDumper):
    """Quotes whatever could be read as a number: PyYAML writes 1234e567 unquoted, and Kubernetes would read a float."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = None if _SURELY_TEXT.fullmatch(text) else '"'
    style = "|" if "\n" in text else plain
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represented)


def as_yaml(objects: Iterable[dict[str, Any]]) -> str:
    """Several objects as one YAML file.

    >>> print(as_yaml([{"kind": "JobSet", "run": "1234e567", "replicas": 2, "on": "true"}]), end="")
    kind: JobSet
    run: "1234e567"
    replicas: 2
    'on': 'true'
    """
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
