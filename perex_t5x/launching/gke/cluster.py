"""A cluster as kubectl reaches it: one context, one namespace."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.launching.gke.manifest import LAUNCH_LABEL, NAME_LABEL, RUN_LABEL
from perex_t5x.launching.shell import CommandError, Commands, Completed

JOBSETS = "jobsets.jobset.x-k8s.io"
ALREADY_EXISTS = r"\(AlreadyExists\)"
NOT_FOUND = r"\(NotFound\)"
NO_SUCH_KIND = r"doesn't have a resource type"
_PASSING = (r"TLS handshake timeout", r"i/o timeout", r"connection refused", r"\(ServiceUnavailable\)", r"EOF")
_SECONDS = 60.0
# kubectl says a trouble of the network five times in its own log before it says it to people.
_OWN_LOG = re.compile(r"^[EWI]\d{4} [\d:.]+ +\d+ \S+\.go:\d+\] .*\n", re.MULTILINE)


@dataclass(frozen=True)
class Cluster:
    """Where kubectl's commands go.

    Attributes:
      commands: by which they are run.
      namespace: of all that is looked at or created.
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
        """A question whose answer may be no; passing troubles of the network are retried."""
        done = self.commands.run(self.kubectl(*words), check=False, timeout=_SECONDS, retries=3, retry_on=_PASSING)
        return dataclasses.replace(done, stderr=_OWN_LOG.sub("", done.stderr))

    def get(self, kind: str, selector: str | None = None, *words: str) -> list[dict[str, Any]]:
        """The objects of a kind, as they are now; none in a dry run."""
        chosen = [f"--selector={selector}"] if selector else []
        done = self.ask("get", kind, *chosen, *words, "--output=json")
        if done.returncode != 0:
            raise CommandError(done)
        return json.loads(done.stdout)["items"] if done.stdout.strip() else []

    def jobsets(self, *, group: str | None = None, run: str | None = None) -> list[dict[str, Any]]:
        """Those of the launch `group`, those that write to the same folder as `run`, or all that launches have made."""
        chosen = [f"{NAME_LABEL}={group}"] if group else [NAME_LABEL]
        return self.get(JOBSETS, ",".join([f"{RUN_LABEL}={run}"] if run else chosen))

    def pods(self, jobset: str) -> list[dict[str, Any]]:
        """Of one JobSet."""
        return self.get("pods", f"jobset.sigs.k8s.io/jobset-name={jobset}")

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Creates an object, never changes one: two launches of one name collide here. Returns what the cluster made.

        Not retried: whether a lost answer was a yes is found out by the launch's label.
        """
        words = self.kubectl("create", "--filename=-", "--output=json")
        made = self.commands.run(words, input=json.dumps(manifest), timeout=_SECONDS, dry="{}").stdout
        return json.loads(made)

    def delete_launch(self, launch: str) -> list[str]:
        """The command that deletes what one launch has created, and nothing of any other's."""
        return self.kubectl("delete", f"{JOBSETS},configmaps", f"--selector={LAUNCH_LABEL}={launch}")

    def delete_group(self, group: str | None) -> list[str]:
        """The command that deletes the launch `group`; None: all launches of this namespace."""
        selector = f"{NAME_LABEL}={group}" if group else NAME_LABEL
        return self.kubectl("delete", f"{JOBSETS},configmaps", f"--selector={selector}")


def connected(commands: Commands, namespace: str, context: str | None) -> Cluster:
    """The cluster that kubectl talks to now; later it stays this one, whatever another terminal switches to."""
    if context or commands.dry_run:
        return Cluster(commands, namespace, context)
    done = commands.run(["kubectl", "config", "current-context"], check=False, timeout=_SECONDS)
    if done.returncode != 0 or not done.stdout.strip():
        raise ConfigError(
            "kubectl has no current context, so there is no cluster to launch on. For one that exists:\n"
            "  gcloud container clusters get-credentials CLUSTER --location=LOCATION --project=PROJECT\n"
            "How to make one: docs/launch_gke.md."
        )
    return Cluster(commands, namespace, done.stdout.strip())


def said(done: Completed, patterns: Sequence[str] | str) -> bool:
    """Whether kubectl's complaint is one of these."""
    found = [patterns] if isinstance(patterns, str) else patterns
    return any(re.search(pattern, done.stderr) for pattern in found)
