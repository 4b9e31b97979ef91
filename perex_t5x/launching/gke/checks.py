"""What a cluster must have before a JobSet is created on it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.launching.gke.cluster import JOBSETS, NO_SUCH_KIND, NOT_FOUND, Cluster, said
from perex_t5x.launching.gke.manifest import NODE_POOL, node_selector
from perex_t5x.launching.gke.shape import Shape

INSTALL_JOBSET = (
    "kubectl apply --server-side "
    "--filename=https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml"
)
INSTALL_KUEUE = (
    "kubectl apply --server-side "
    "--filename=https://github.com/kubernetes-sigs/kueue/releases/latest/download/manifests.yaml"
)


def check(cluster: Cluster, shape: Shape) -> None:
    """Raises `ConfigError` with all that is missing; what may come by itself, such as nodes, is a warning."""
    slips = [*_jobset_slips(cluster), *_queue_slips(cluster, shape)]
    for kind, flag, name in (
        ("namespace", "namespace", shape.namespace if shape.namespace != "default" else None),
        ("serviceaccount", "service_account", shape.service_account),
        ("priorityclass", "priority", shape.priority),
    ):
        slips += _named_slips(cluster, kind, flag, name)
    slips += _node_slips(cluster, shape)
    if slips:
        raise ConfigError(f"the cluster {cluster.context} is not ready:\n" + "\n".join(f"- {slip}" for slip in slips))


def _warn(words: str) -> None:
    print(f"note: {words}", file=sys.stderr, flush=True)


def _jobset_slips(cluster: Cluster) -> list[str]:
    done = cluster.ask("get", "crd", JOBSETS, "--output=json")
    if done.returncode == 0:
        if cluster.commands.dry_run or _has_rules(json.loads(done.stdout)):
            return []
        return [
            f"its JobSet is older than v0.6, which cannot restart by exit code. Install a newer one:\n  {INSTALL_JOBSET}"
        ]
    if said(done, NOT_FOUND):
        return [f"JobSet is not installed. Install it with:\n  {INSTALL_JOBSET}"]
    if said(done, r"\(Forbidden\)"):
        _warn("you may not see whether JobSet is installed on the cluster; it is taken to be.")
        return []
    # At once: each further question would be retried, and end in the same words.
    raise ConfigError(f"kubectl cannot reach the cluster {cluster.context}:\n{done.said}")


def _has_rules(crd: dict[str, Any]) -> bool:
    """Whether the JobSet that is installed knows rules of its failure policy."""
    try:
        version = next(v for v in crd["spec"]["versions"] if v["name"] == "v1alpha2")
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        return "rules" in spec["properties"]["failurePolicy"]["properties"]
    except (KeyError, StopIteration):
        return False


def _queue_slips(cluster: Cluster, shape: Shape) -> list[str]:
    queue = shape.queue
    if queue is None:
        return []
    done = cluster.ask("get", "localqueues.kueue.x-k8s.io", "--output=json")
    if said(done, NO_SUCH_KIND):
        return [f"--queue={queue}: Kueue is not installed. Leave --queue out, or install it with:\n  {INSTALL_KUEUE}"]
    if done.returncode != 0:
        return [f"--queue={queue}: kubectl cannot ask for it:\n{done.said}"]
    if cluster.commands.dry_run:
        return _quota_slips(cluster, shape, "")
    found = {item["metadata"]["name"]: item.get("spec", {}) for item in json.loads(done.stdout)["items"]}
    if queue in found:
        return _quota_slips(cluster, shape, found[queue].get("clusterQueue", ""))
    there = f"it has {', '.join(found)}" if found else "it has none"
    return [f"--queue={queue}: no such LocalQueue in the namespace {cluster.namespace}; {there}."]


def _quota_slips(cluster: Cluster, shape: Shape, name: str) -> list[str]:
    """That Kueue's quota is large enough for one JobSet: a larger one would be queued for ever."""
    done = cluster.ask("get", "clusterqueues.kueue.x-k8s.io", "--output=json")
    if done.returncode != 0:
        _warn(f"the quota of --queue={shape.queue} could not be looked at:\n{done.said}")
    if done.returncode != 0 or cluster.commands.dry_run:
        return []
    found = {item["metadata"]["name"]: item["spec"] for item in json.loads(done.stdout)["items"]}
    if name not in found:
        return [f"--queue={shape.queue}: it belongs to the ClusterQueue {name}, which does not exist."]
    spec = found[name]
    flavors = [flavor for group in spec.get("resourceGroups", []) for flavor in group["flavors"]]
    quotas = [r["nominalQuota"] for f in flavors for r in f["resources"] if r["name"] == "google.com/tpu"]
    begin = f"--queue={shape.queue}: its ClusterQueue {name} has"
    if not quotas:
        return [f"{begin} no quota of google.com/tpu, so it would never let the pods run (docs/launch_gke.md)."]
    if not all(str(quota).isdigit() for quota in quotas):  # such as 1k
        return []
    asked, most = shape.slices * shape.hosts * shape.chips_per_host, max(map(int, quotas))
    if asked <= most:
        return []
    if spec.get("cohort") or spec.get("cohortName"):
        _warn(f"{begin} a quota of {most} chips of one kind, {asked} are asked for: it has to borrow from its cohort.")
        return []
    return [f"{begin} a quota of {most} chips of one kind, {asked} are asked for: it would be queued for ever."]


def _named_slips(cluster: Cluster, kind: str, flag: str, name: str | None) -> list[str]:
    if name is None:
        return []
    done = cluster.ask("get", kind, name, "--output=name")
    if done.returncode == 0:
        return []
    if said(done, NOT_FOUND):
        where = "" if kind == "namespace" else f" (namespace {cluster.namespace})"
        return [f"--{flag}={name}: there is no such {kind}{where}."]
    _warn(f"whether the {kind} {name} exists could not be asked:\n{done.said}")
    return []


def _node_slips(cluster: Cluster, shape: Shape) -> list[str]:
    selector = ",".join(f"{key}={value}" for key, value in node_selector(shape).items())
    done = cluster.ask("get", "nodes", f"--selector={selector}", "--output=json")
    if done.returncode != 0:
        _warn(f"the cluster's nodes could not be looked at:\n{done.said}")
        return []
    if cluster.commands.dry_run:
        return []
    nodes = json.loads(done.stdout)["items"]
    if not nodes:
        _warn(
            f"the cluster has no node with {selector} now. The pods wait until there are some: with autoscaling or "
            "autoprovisioning they come by themselves, otherwise add a node pool (docs/launch_gke.md)."
        )
        return []
    offered = {int(node["status"].get("allocatable", {}).get("google.com/tpu", 0)) for node in nodes} - {0}
    if offered and shape.chips_per_host not in offered:
        there = " or ".join(map(str, sorted(offered)))
        return [
            f"its nodes of {shape.accelerator} {shape.topology} offer {there} chips each, not {shape.chips_per_host}: "
            f"give --chips_per_host={min(offered)}, or no pod will ever find a node."
        ]
    pools = Counter(node["metadata"].get("labels", {}).get(NODE_POOL, "") for node in nodes)
    whole = sum(count // shape.hosts for count in pools.values())
    if whole < shape.slices:
        _warn(
            f"the cluster has {whole} whole slices of {shape.accelerator} {shape.topology} now, {shape.slices} are asked "
            "for: the pods wait until there are more."
        )
    return []
