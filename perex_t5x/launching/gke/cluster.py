"""A cluster as kubectl reaches it (one context, one namespace), and what its objects say about a launch."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.launching import shell
from perex_t5x.launching.gke.manifest import CONTAINER, LAUNCH_LABEL, NAME_LABEL, RUN_LABEL
from perex_t5x.launching.shell import CommandError, Commands, Completed

JOBSETS = "jobsets.jobset.x-k8s.io"
_SECONDS = 60.0


@dataclass(frozen=True)
class Cluster:
    """Where kubectl's commands go.

    Attributes:
      commands: runs them.
      namespace: of everything that is read or created.
      context: of the kubeconfig; None is the current one.
    """

    commands: Commands
    namespace: str = "default"
    context: str | None = None

    def kubectl(self, *words: str) -> list[str]:
        """The whole command.

        >>> " ".join(Cluster(Commands(), "team-a", "gke_p_z_c").kubectl("get", "pods"))
        'kubectl --context=gke_p_z_c --namespace=team-a get pods'
        """
        context = [f"--context={self.context}"] if self.context else []
        return ["kubectl", *context, f"--namespace={self.namespace}", *words]

    def ask(self, *words: str) -> Completed:
        """A query that may fail; transient network problems are retried."""
        transient = [shell.KUBECTL_TRANSIENT]
        done = self.commands.run(self.kubectl(*words), check=False, timeout=_SECONDS, retries=3, retry_on=transient)
        return done.without_kubectl_log()

    def get(self, kind: str, selector: str | None = None, *words: str) -> list[dict[str, Any]]:
        """The objects of a kind, as they are now; none in a dry run."""
        chosen = [f"--selector={selector}"] if selector else []
        done = self.ask("get", kind, *chosen, *words, "--output=json")
        if done.returncode != 0:
            raise CommandError(done)
        return json.loads(done.stdout)["items"] if done.stdout.strip() else []

    def jobsets(self, *, group: str | None = None, run: str | None = None) -> list[dict[str, Any]]:
        """Those of the launch `group`, those that write to the same folder as `run`, or all that launches have created."""
        chosen = [f"{NAME_LABEL}={group}"] if group else [NAME_LABEL]
        return self.get(JOBSETS, ",".join([f"{RUN_LABEL}={run}"] if run else chosen))

    def pods(self, jobset: str) -> list[dict[str, Any]]:
        """Of one JobSet."""
        return self.get("pods", f"jobset.sigs.k8s.io/jobset-name={jobset}")

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Creates an object, never changes one: two launches with the same name collide here. Returns the created object.

        Not retried: whether it was created although the answer got lost is known from the launch's label.
        """
        words = self.kubectl("create", "--filename=-", "--output=json")
        made = self.commands.run(words, input=json.dumps(manifest), timeout=_SECONDS, dry="{}").stdout
        return json.loads(made)

    def delete_launch(self, launch: str) -> list[str]:
        """The command that deletes what this launch has created, and nothing else."""
        return self.kubectl("delete", f"{JOBSETS},configmaps", f"--selector={LAUNCH_LABEL}={launch}")

    def delete_group(self, group: str | None) -> list[str]:
        """The command that deletes the launch `group`; None: all launches of this namespace."""
        selector = f"{NAME_LABEL}={group}" if group else NAME_LABEL
        return self.kubectl("delete", f"{JOBSETS},configmaps", f"--selector={selector}")


def connected(commands: Commands, namespace: str, context: str | None) -> Cluster:
    """The cluster of kubectl's current context, kept for the whole launch even if another terminal switches contexts."""
    if context or commands.dry_run:
        return Cluster(commands, namespace, context)
    done = commands.run(["kubectl", "config", "current-context"], check=False, timeout=_SECONDS)
    if done.returncode != 0 or not done.stdout.strip():
        raise ConfigError(
            "kubectl has no current context, so there is no cluster to launch on. To use an existing one:\n"
            "  gcloud container clusters get-credentials CLUSTER --location=LOCATION --project=PROJECT\n"
            "How to create one: docs/launch_gke.md."
        )
    return Cluster(commands, namespace, done.stdout.strip())


COMPLETED, FAILED, QUEUED, RUNNING, STARTING = "completed", "failed", "queued", "running", "starting"
_INDICES = ("batch.kubernetes.io/job-completion-index", "jobset.sigs.k8s.io/job-index")
# Normal reasons to wait.
_USUAL_WAITS = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True)
class State:
    """Of one JobSet.

    Attributes:
      phase: queued by Kueue, starting, running, completed or failed.
      restarts: of all its pods together.
      words: the cluster's message about it.
      launch: the launch that created it.
      image: of its pods.
    """

    name: str
    group: str
    run: str
    phase: str
    restarts: int
    words: str
    created: str
    launch: str
    image: str

    @property
    def finished(self) -> bool:
        return self.phase in (COMPLETED, FAILED)

    @property
    def line(self) -> str:
        """In words."""
        restarts = f", restarted {self.restarts} times" if self.restarts else ""
        return f"{self.name}: {self.phase}{restarts}{': ' if self.words else ''}{self.words}"

    @classmethod
    def of(cls, jobset: Mapping[str, Any]) -> State:
        """From `kubectl get jobset -o json`.

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
            image_of(jobset),
        )


def image_of(jobset: Mapping[str, Any]) -> str:
    """
    >>> image_of({"metadata": {"name": "a"}})
    ''
    """
    for job in jobset.get("spec", {}).get("replicatedJobs", []):
        return job["template"]["spec"]["template"]["spec"]["containers"][0]["image"]
    return ""


def first_pod(pods: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The newest pod of process 0 of slice 0 that has started: its log is the run's."""
    candidates = [
        pod
        for pod in pods
        if all(_label(pod, label) == "0" for label in _INDICES)
        and pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")
    ]
    return max(candidates, key=lambda pod: pod["metadata"].get("creationTimestamp", ""), default=None)


def _label(pod: Mapping[str, Any], name: str) -> str | None:
    """A label or annotation: before Kubernetes 1.28 the index is an annotation only."""
    metadata = pod["metadata"]
    return metadata.get("labels", {}).get(name) or metadata.get("annotations", {}).get(name)


def exit_codes(pods: Iterable[Mapping[str, Any]]) -> list[int]:
    """Exit codes of the program in these pods, in no order."""
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
    """Why pods do not start: each reason once, with the number of pods and the first of them."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for pod in pods:
        status = pod.get("status", {})
        if status.get("phase") != "Pending":
            continue
        blocking = [
            (c.get("reason", ""), c.get("message", ""))
            for c in status.get("conditions", [])
            if c["type"] == "PodScheduled" and c["status"] == "False"
        ]
        for container in status.get("containerStatuses", []):
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason", _USUAL_WAITS[0]) not in _USUAL_WAITS:
                blocking.append((waiting["reason"], waiting.get("message", "")))
        for reason in blocking:
            reasons.setdefault(reason, []).append(pod["metadata"]["name"])
    return [
        f"{len(names)} {'pods wait' if len(names) > 1 else 'pod waits'} ({names[0]}): {reason}: {message}".rstrip(": ")
        + advice(reason)
        for (reason, message), names in reasons.items()
    ]


def advice(reason: str) -> str:
    """What usually helps."""
    if "Image" in reason:
        return "\n    the image does not exist, or the nodes may not read it: check --image and the registry's permissions."
    if reason == "Unschedulable":
        return "\n    no free slice of this kind: wait for one, or check the node pools (docs/launch_gke.md)."
    return ""


def warnings(events: Iterable[Mapping[str, Any]], jobset: str, most: int = 5) -> list[str]:
    """The last warnings about a JobSet, its jobs or its pods."""
    about = re.compile(rf"{re.escape(jobset)}(-slice-.*)?")
    own = [e for e in events if e.get("type") == "Warning" and about.fullmatch(e["involvedObject"]["name"])]
    own.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
    return [f"{e['involvedObject']['name']}: {e.get('reason', '')}: {e.get('message', '')}" for e in own[-most:]]
