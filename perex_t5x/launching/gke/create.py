"""From planned JobSets to ones that exist: found if they run already, created together, or not at all."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.launching.gke import manifest
from perex_t5x.launching.gke.cluster import ALREADY_EXISTS, JOBSETS, NO_SUCH_KIND, NOT_FOUND, Cluster, State, said
from perex_t5x.launching.gke.manifest import MOUNTED_AT, NODE_POOL, Shape, node_selector
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import CommandError, Leftovers, say
from perex_t5x.launching.spec import GIN_FOLDER

INSTALL_JOBSET = (
    "kubectl apply --server-side "
    "--filename=https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml"
)
INSTALL_KUEUE = (
    "kubectl apply --server-side "
    "--filename=https://github.com/kubernetes-sigs/kueue/releases/latest/download/manifests.yaml"
)
JOBS_FILE = "jobs.json"
# The folder of jobs.json is mounted for reading only.
COMMAND = (
    "python",
    "-m",
    "perex_t5x.launching.worker",
    f"--jobs={MOUNTED_AT}/{JOBS_FILE}",
    "--log_dir=/tmp/perex-logs",
    "--lock=/tmp/perex-worker.lock",
)


@dataclass(frozen=True)
class Planned:
    """One JobSet that is to be created, and the files of its ConfigMap."""

    shape: Shape
    files: Mapping[str, str]

    def jobset(self) -> dict[str, Any]:
        return manifest.jobset(self.shape, COMMAND, list(self.files))

    def config_map(self, owner: str | None = None) -> dict[str, Any]:
        shape = self.shape
        return manifest.config_map(shape.name, shape.launch, shape.namespace, manifest.labels(shape), self.files, owner)


def planned(request: Request, args: Any) -> list[Planned]:
    """All JobSets of a launch; raises `ConfigError` for what no cluster would take."""
    work, slice_ = request.work, request.slice
    if not args.image:
        raise ConfigError(
            "--image is not given: the container that the pods run. How to build one of this checkout: docs/launch_gke.md."
        )
    if request.with_package:
        raise ConfigError("--with_package: pods install nothing; build your packages into the --image.")
    count = args.jobsets
    if not 1 <= count <= len(work.jobs):
        raise ConfigError(f"--jobsets={count}: from 1 to {len(work.jobs)}, the number of runs.")
    chips_per_host = args.chips_per_host or slice_.chips_per_host
    if chips_per_host < 1 or slice_.chips % chips_per_host:
        raise ConfigError(f"--chips_per_host={chips_per_host}: {slice_.topology} has {slice_.chips} chips.")
    if not math.isfinite(args.ttl_hours):
        raise ConfigError(f"--ttl_hours={args.ttl_hours}: a number of hours.")
    launch = secrets.token_hex(4)
    gin = {f"{GIN_FOLDER}/{name}": _text(path) for name, path in work.gin_files.items()}
    found = []
    for number in range(count):
        part = dataclasses.replace(work, jobs=work.jobs[number::count])
        shape = Shape(
            name=request.name if count == 1 else f"{request.name}-{number}",
            group=request.name,
            run=work.fingerprint,
            launch=launch,
            image=args.image,
            accelerator=slice_.gke_accelerator,
            topology=slice_.gke_topology,
            hosts=slice_.chips // chips_per_host,
            chips_per_host=chips_per_host,
            slices=request.slices,
            namespace=args.namespace,
            queue=args.queue,
            priority=args.priority,
            service_account=args.service_account,
            spot=request.spot,
            reservation=request.reservation,
            max_restarts=request.max_restarts,
            grace_seconds=args.grace_seconds,
            ttl_seconds=round(args.ttl_hours * 3600),
            host_network=args.host_network,
            privileged=args.privileged,
        )
        found.append(Planned(shape, {JOBS_FILE: part.to_json(), **gin}))
        found[-1].config_map()  # too large? before anything is created
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the Gin file {path} cannot be read: {e}") from e


def check_cluster(cluster: Cluster, shape: Shape) -> None:
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
    say(f"note: {words}")


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


class AlreadyRunningError(ConfigError):
    """The same run is on the cluster; `group` is the name it was launched under."""

    def __init__(self, message: str, group: str):
        super().__init__(message)
        self.group = group


def check_free(cluster: Cluster, plans: Sequence[Planned]) -> list[State]:
    """Finished JobSets that stand in the way and may go.

    Raises:
      AlreadyRunningError: the same run, or one of the same name and folder, is not finished.
      ConfigError: another run has the name.
    """
    shape = plans[0].shape
    wanted = {plan.shape.name for plan in plans}
    ours = [State.of(jobset) for jobset in cluster.jobsets(run=shape.run)]
    if running := [state for state in ours if not state.finished]:
        state = running[0]
        raise AlreadyRunningError(
            f"this run is launched already: JobSet {state.name} is {state.phase} and writes to the same folder.",
            state.group,
        )
    for jobset in cluster.get(JOBSETS):
        state = State.of(jobset)
        if state.name in wanted and state.run != shape.run:
            raise ConfigError(
                f"--name={shape.group}: the JobSet {state.name} of this name belongs to another run ({state.phase}). "
                "Give another --name."
            )
    return [state for state in ours if state.name in wanted]


def create(cluster: Cluster, plans: Sequence[Planned], former: Sequence[State], leftovers: Leftovers) -> str:
    """Creates all JobSets of a launch with their ConfigMaps; returns their name among the `leftovers`.

    The JobSet comes first: its name is where two launches collide, and it owns the ConfigMap, which is deleted with it.
    Its pods wait for the ConfigMap, which takes a second.

    Raises:
      AlreadyRunningError: another launch was quicker.
    """
    for launch in dict.fromkeys(state.launch for state in former):
        names = ", ".join(state.name for state in former if state.launch == launch)
        say(f"deleting the finished JobSet {names} of an earlier launch")
        # All of that launch: its JobSets write to the same folder, so they are all finished.
        cluster.commands.run(cluster.delete_launch(launch), timeout=600)
    what = f"JobSets of this launch ({', '.join(plan.shape.name for plan in plans)})"
    # By the launch's own label: nothing of another launch is ever deleted, and what was created though its answer got
    # lost is found.
    leftovers.add(what, cluster.delete_launch(plans[0].shape.launch))
    for number, plan in enumerate(plans):
        try:
            made = cluster.create(plan.jobset())
        except CommandError as e:
            if not said(e.completed, ALREADY_EXISTS):
                raise
            if number == 0:
                leftovers.keep(what)  # there is nothing yet
            message = f"another launch was quicker: the JobSet {plan.shape.name} exists."
            raise AlreadyRunningError(message, plan.shape.group) from None
        if number == 0:
            _check_first(cluster, plan, made)
        cluster.create(plan.config_map(made.get("metadata", {}).get("uid")))
        if not cluster.commands.dry_run:
            say(f"created JobSet {plan.shape.name}")
    return what


def _check_first(cluster: Cluster, plan: Planned, made: dict[str, Any]) -> None:
    """Raises `AlreadyRunningError` if the same run was launched under another name in the same moment.

    Names cannot collide then, so the later one gives way; of two in the same second, both. To look after creating is what
    makes it sure: at least one of the two sees the other.
    """
    ours = made.get("metadata", {}).get("creationTimestamp", "")
    for jobset in cluster.jobsets(run=plan.shape.run):
        other = State.of(jobset)
        if other.launch == plan.shape.launch or other.finished:
            continue
        if other.created <= ours:
            message = f"another launch of the same run was quicker: JobSet {other.name} is {other.phase}."
            raise AlreadyRunningError(message, other.group)
