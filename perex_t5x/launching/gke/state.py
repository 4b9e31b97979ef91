"""What a cluster's objects say of a launch: how far a JobSet is, why a pod does not come up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perex_t5x.launching.gke.manifest import CONTAINER, LAUNCH_LABEL, NAME_LABEL, RUN_LABEL

COMPLETED, FAILED, QUEUED, RUNNING, STARTING = "completed", "failed", "queued", "running", "starting"
_INDICES = ("batch.kubernetes.io/job-completion-index", "jobset.sigs.k8s.io/job-index")
# Waiting for these passes by itself.
_USUAL_WAITS = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True)
class State:
    """Of one JobSet.

    Attributes:
      phase: queued by Kueue, starting, running, completed or failed.
      restarts: of all its pods together.
      words: what the cluster says of it.
      launch: the launch that made it.
    """

    name: str
    group: str
    run: str
    phase: str
    restarts: int
    words: str
    created: str
    launch: str

    @property
    def finished(self) -> bool:
        return self.phase in (COMPLETED, FAILED)

    @classmethod
    def of(cls, jobset: Mapping[str, Any]) -> State:
        """From what `kubectl get jobset -o json` says.

        >>> State.of({"metadata": {"name": "a"}, "status": {"restarts": 2, "terminalState": "Completed"}}).phase
        'completed'
        """
        metadata, status = jobset["metadata"], jobset.get("status", {})
        labels = metadata.get("labels", {})
        true = {c["type"]: c.get("message", "") for c in status.get("conditions", []) if c["status"] == "True"}
        jobs = status.get("replicatedJobsStatus", [])
        phase = STARTING
        if "Failed" in true or status.get("terminalState") == "Failed":
            phase = FAILED
        elif "Completed" in true or status.get("terminalState") == "Completed":
            phase = COMPLETED
        elif jobset.get("spec", {}).get("suspend"):
            phase = QUEUED
        elif jobs and all(job.get("ready", 0) + job.get("succeeded", 0) > 0 for job in jobs):
            phase = RUNNING
        words = {FAILED: true.get("Failed", ""), QUEUED: true.get("Suspended", "")}.get(phase, "")
        return cls(
            metadata["name"],
            labels.get(NAME_LABEL, metadata["name"]),
            labels.get(RUN_LABEL, ""),
            phase,
            status.get("restarts", 0),
            words,
            metadata.get("creationTimestamp", ""),
            labels.get(LAUNCH_LABEL, ""),
        )


def first_pod(pods: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The newest pod of process 0 of slice 0, if it has begun: its log is the run's."""
    found = [
        pod
        for pod in pods
        if all(_label(pod, label) == "0" for label in _INDICES)
        and pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")
    ]
    return max(found, key=lambda pod: pod["metadata"].get("creationTimestamp", ""), default=None)


def _label(pod: Mapping[str, Any], name: str) -> str | None:
    """Kubernetes before 1.28 has the index as an annotation only."""
    metadata = pod["metadata"]
    return metadata.get("labels", {}).get(name) or metadata.get("annotations", {}).get(name)


def exit_codes(pods: Iterable[Mapping[str, Any]]) -> list[int]:
    """With which the program has ended in pods, in no order."""
    codes = []
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses", []):
            if container["name"] == CONTAINER and (ended := container.get("state", {}).get("terminated")):
                codes.append(ended["exitCode"])
    return codes


def pod_phases(pods: Iterable[Mapping[str, Any]]) -> str:
    """
    >>> pod_phases([{"status": {"phase": "Running"}}, {"status": {"phase": "Pending"}}, {"status": {"phase": "Running"}}])
    '2 Running, 1 Pending'
    """
    counts = Counter(pod.get("status", {}).get("phase", "Unknown") for pod in pods)
    return ", ".join(f"{count} {phase}" for phase, count in counts.most_common()) or "none yet"


def troubles(pods: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why pods do not come up: each reason once, with how many it keeps and the first of them."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for pod in pods:
        status = pod.get("status", {})
        if status.get("phase") != "Pending":
            continue
        found = [
            (c.get("reason", ""), c.get("message", ""))
            for c in status.get("conditions", [])
            if c["type"] == "PodScheduled" and c["status"] == "False"
        ]
        for container in status.get("containerStatuses", []):
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason", _USUAL_WAITS[0]) not in _USUAL_WAITS:
                found.append((waiting["reason"], waiting.get("message", "")))
        for reason in found:
            reasons.setdefault(reason, []).append(pod["metadata"]["name"])
    return [
        f"{len(names)} {'pods wait' if len(names) > 1 else 'pod waits'} ({names[0]}): {reason}: {message}".rstrip(": ")
        + advice(reason)
        for (reason, message), names in reasons.items()
    ]


def advice(reason: str) -> str:
    """What usually helps."""
    if "Image" in reason:
        return "\n    the image is not there, or the nodes may not read it: look at --image and the registry's permissions."
    if reason == "Unschedulable":
        return "\n    no free slice of this kind: wait for one, or look at the node pools (docs/launch_gke.md)."
    return ""


def warnings(events: Iterable[Mapping[str, Any]], jobset: str, most: int = 5) -> list[str]:
    """The last warnings that concern a JobSet, its jobs or its pods."""
    own = [
        event
        for event in events
        if event.get("type") == "Warning"
        and (
            event["involvedObject"]["name"] == jobset or event["involvedObject"]["name"].startswith(f"{jobset}-slice-")
        )
    ]
    own.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
    return [f"{e['involvedObject']['name']}: {e.get('reason', '')}: {e.get('message', '')}" for e in own[-most:]]
