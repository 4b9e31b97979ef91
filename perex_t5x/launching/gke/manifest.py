"""The JobSet of a launch as Kubernetes reads it (jobset.x-k8s.io/v1alpha2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perex_t5x.launching.gke.files import MOUNTED_AT, config_map_name, mounted_items
from perex_t5x.launching.gke.shape import REPLICATED_JOB, Shape

API_VERSION = "jobset.x-k8s.io/v1alpha2"
CONTAINER = "perex"
NAME_LABEL, RUN_LABEL, LAUNCH_LABEL = "perex-name", "perex-run", "perex-launch"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"
ACCELERATOR, TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
SPOT, RESERVATION = "cloud.google.com/gke-spot", "cloud.google.com/reservation-name"
# A slip, and a sweep some of whose runs failed for good: starting again would end in the same way.
FINAL_EXIT_CODES = (2, 3)
# The TPU's driver locks memory, more than containers may by default.
_RAISED = ("sh", "-c", 'ulimit -l 68719476736; exec "$@"', "sh")


def jobset(shape: Shape, command: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
    """The JobSet: one job a slice, one pod a host, all of them running `command`.

    Args:
      shape: the plain values.
      command: what every pod runs. Nothing of the user's belongs here, as Kubernetes replaces $(NAME) in it.
      paths: the files that the pods find under `files.MOUNTED_AT`.
    """
    queue = {QUEUE_LABEL: shape.queue} if shape.queue else {}
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": {
            "name": shape.name,
            "namespace": shape.namespace,
            "labels": {**labels(shape), **queue},
            # A slice of several hosts is a node pool: no two jobs on one, no job on two. Of one host, it is a node.
            **({"annotations": {EXCLUSIVE: NODE_POOL}} if shape.hosts > 1 else {}),
        },
        "spec": {
            "ttlSecondsAfterFinished": shape.ttl_seconds,
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {
                "maxRestarts": shape.max_restarts,
                "rules": [
                    {
                        "name": "finalExitCode",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": REPLICATED_JOB,
                    "replicas": shape.slices,
                    "template": {"spec": _job(shape, command, paths)},
                }
            ],
        },
    }


def labels(shape: Shape) -> dict[str, str]:
    """By which `follow`, `stop` and `list` find what belongs together."""
    return {NAME_LABEL: shape.group, RUN_LABEL: shape.run, LAUNCH_LABEL: shape.launch}


def _job(shape: Shape, command: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "parallelism": shape.hosts,
        "completions": shape.hosts,
        # One pod alone cannot go on: whatever else ends one, eviction too, restarts all of them together.
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
    files = config_map_name(shape.name, shape.launch)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": shape.grace_seconds,
        "nodeSelector": node_selector(shape),
        "containers": [_container(shape, command)],
        "volumes": [
            {"name": "files", "configMap": {"name": files, "items": mounted_items(paths)}},
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
        # TPU runtime, JAX's coordinator, and the one between slices: for the reader, Kubernetes opens all.
        "ports": [{"containerPort": port} for port in (8471, 8482, *((8080,) if shape.slices > 1 else ()))],
        "resources": {"requests": dict(chips), "limits": dict(chips)},
        "volumeMounts": [
            {"name": "files", "mountPath": MOUNTED_AT, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _environment(shape: Shape) -> list[dict[str, Any]]:
    """TPU_WORKER_ID and TPU_WORKER_HOSTNAMES come from GKE, for indexed jobs with a subdomain.

    The variables that join slices are written out: JobSet by itself does not set them.
    """
    environment: list[dict[str, Any]] = [{"name": "PYTHONUNBUFFERED", "value": "1"}]
    if shape.slices > 1:
        index = {"fieldRef": {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/job-index']"}}
        environment += [
            {"name": "MEGASCALE_NUM_SLICES", "value": str(shape.slices)},
            {"name": "MEGASCALE_SLICE_ID", "valueFrom": index},
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": shape.coordinator()},
        ]
    return environment
