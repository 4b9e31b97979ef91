"""From a request to JobSets: planned, the cluster checked, running ones found, all of them created or none."""

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
from perex_t5x.launching import image, shell
from perex_t5x.launching.gke import manifest
from perex_t5x.launching.gke.cluster import JOBSETS, Cluster, State
from perex_t5x.launching.gke.manifest import MOUNTED_AT, NODE_POOL, Shape, node_selector
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import CommandError, Commands, Leftovers, say
from perex_t5x.launching.spec import GIN_FOLDER

INSTALL_JOBSET, INSTALL_KUEUE = (
    f"kubectl apply --server-side --filename=https://github.com/kubernetes-sigs/{name}/releases/latest/download/manifests.yaml"
    for name in ("jobset", "kueue")
)
JOBS_FILE = "jobs.json"
# The folder of jobs.json is mounted read-only.
COMMAND = (
    *("python", "-m", "perex_t5x.launching.worker", f"--jobs={MOUNTED_AT}/{JOBS_FILE}"),
    *("--log_dir=/tmp/perex-logs", "--lock=/tmp/perex-worker.lock"),
)
_POLICY = {"maxRestarts", "restartStrategy", "rules"}  # all of them since JobSet v0.7
# Prints the names of a Secret's keys, and no value.
_KEYS = '--output=go-template={{range $key, $value := .data}}{{$key}}{{"\\n"}}{{end}}'
# Flags that `Shape` has under the same names.
_OF_SHAPE = (
    *("image", "namespace", "queue", "priority", "service_account", "grace_seconds", "host_network", "privileged"),
    *("spot", "reservation", "max_restarts"),
)


@dataclass(frozen=True)
class Planned:
    """One JobSet to be created, and the files of its ConfigMap."""

    shape: Shape
    files: Mapping[str, str]

    def jobset(self) -> dict[str, Any]:
        return manifest.jobset(self.shape, COMMAND, list(self.files))

    def config_map(self, owner: str | None = None) -> dict[str, Any]:
        return manifest.config_map(self.shape, self.files, owner)


def planned(request: Request, args: Any) -> list[Planned]:
    """All JobSets of a launch; raises `ConfigError` for what no cluster would accept."""
    work, slice_ = request.work, request.slice
    if not args.image:
        raise ConfigError(
            "--image is missing: the container image of the pods. How to build one from this checkout: docs/launch_gke.md."
        )
    if request.with_package:
        raise ConfigError("--with_package: pods install nothing; build your packages into the --image.")
    count = args.jobsets
    if not 1 <= count <= len(work.jobs):
        raise ConfigError(f"--jobsets={count}: valid are 1 to {len(work.jobs)}, the number of runs.")
    chips_per_host = args.chips_per_host or slice_.chips_per_host
    if chips_per_host < 1 or slice_.chips % chips_per_host:
        raise ConfigError(f"--chips_per_host={chips_per_host}: {slice_.topology} has {slice_.chips} chips.")
    if not math.isfinite(args.ttl_hours):
        raise ConfigError(f"--ttl_hours={args.ttl_hours} is not a number of hours.")
    launch = secrets.token_hex(4)
    gin = {f"{GIN_FOLDER}/{name}": _text(path) for name, path in work.gin_files.items()}
    plans = []
    for number in range(count):
        name = request.name if count == 1 else f"{request.name}-{number}"
        part = dataclasses.replace(work, jobs=work.jobs[number::count], launch=work.launch and name)
        shape = Shape(
            name=name,
            group=request.name,
            run=work.fingerprint,
            launch=launch,
            accelerator=slice_.gke_accelerator,
            topology=slice_.gke_topology,
            hosts=slice_.chips // chips_per_host,
            chips_per_host=chips_per_host,
            slices=request.slices,
            ttl_seconds=round(args.ttl_hours * 3600),
            secrets=request.secrets,
            **{name: getattr(args, name) for name in _OF_SHAPE},
        )
        plans.append(Planned(shape, {JOBS_FILE: part.to_json(), **gin}))
        plans[-1].config_map()  # fails if it is too large, before anything is created
    return plans


def with_pinned_image(plans: Sequence[Planned], commands: Commands) -> list[Planned]:
    """The same with the image's digest: what was checked is what all pods run, also after a restart."""
    by_digest = image.pinned(plans[0].shape.image, commands)
    return [dataclasses.replace(p, shape=dataclasses.replace(p.shape, image=by_digest)) for p in plans]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the Gin file {path} cannot be read: {e}") from e


def check_cluster(cluster: Cluster, shape: Shape) -> None:
    """Raises `ConfigError` with everything that is missing; what may still appear, such as nodes, is a warning."""
    problems = [*_jobset_problems(cluster), *_queue_problems(cluster, shape)]
    for kind, flag, name in (
        ("namespace", "namespace", shape.namespace if shape.namespace != "default" else None),
        ("serviceaccount", "service_account", shape.service_account),
        ("priorityclass", "priority", shape.priority),
    ):
        problems += _named_problems(cluster, kind, flag, name)
    problems += _secret_problems(cluster, shape)
    problems += _node_problems(cluster, shape)
    if problems:
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ConfigError(f"the cluster {cluster.context} is not ready:\n{listed}")


def _jobset_problems(cluster: Cluster) -> list[str]:
    done = cluster.ask("get", "crd", JOBSETS, "--output=json")
    if done.returncode == 0:
        if cluster.commands.dry_run or _failure_policy(json.loads(done.stdout)) >= _POLICY:
            return []
        return [
            "its JobSet is older than v0.7: it cannot restart by exit code, or starts new pods while former ones still run. "
            f"Upgrade it:\n  {INSTALL_JOBSET}"
        ]
    if done.matches(shell.GONE):
        return [f"JobSet is not installed. Install it with:\n  {INSTALL_JOBSET}"]
    if done.matches(shell.FORBIDDEN):
        say("note: you lack the permission to see whether JobSet is installed; assuming that it is.")
        return []
    # At once: each further query would be retried, and fail in the same way.
    raise ConfigError(f"kubectl cannot reach the cluster {cluster.context}:\n{done.said}")


def _failure_policy(crd: dict[str, Any]) -> set[str]:
    """The fields of a failure policy that the installed JobSet knows."""
    try:
        version = next(v for v in crd["spec"]["versions"] if v["name"] == "v1alpha2")
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        return set(spec["properties"]["failurePolicy"]["properties"])
    except (KeyError, StopIteration):
        return set()


def _queue_problems(cluster: Cluster, shape: Shape) -> list[str]:
    queue = shape.queue
    if queue is None:
        return []
    done = cluster.ask("get", "localqueues.kueue.x-k8s.io", "--output=json")
    if done.matches(shell.NO_SUCH_KIND):
        return [f"--queue={queue}: Kueue is not installed. Leave --queue out, or install it with:\n  {INSTALL_KUEUE}"]
    if done.returncode != 0:
        return [f"--queue={queue}: kubectl cannot read it:\n{done.said}"]
    if cluster.commands.dry_run:
        return _quota_problems(cluster, shape, "")
    queues = {item["metadata"]["name"]: item.get("spec", {}) for item in json.loads(done.stdout)["items"]}
    if queue in queues:
        return _quota_problems(cluster, shape, queues[queue].get("clusterQueue", ""))
    there = f"it has {', '.join(queues)}" if queues else "it has none"
    return [f"--queue={queue}: no such LocalQueue in the namespace {cluster.namespace}; {there}."]


def _quota_problems(cluster: Cluster, shape: Shape, name: str) -> list[str]:
    """Whether Kueue's quota is large enough for one JobSet: a larger one would be queued forever."""
    done = cluster.ask("get", "clusterqueues.kueue.x-k8s.io", "--output=json")
    if done.returncode != 0:
        say(f"note: the quota of --queue={shape.queue} could not be read:\n{done.said}")
    if done.returncode != 0 or cluster.commands.dry_run:
        return []
    queues = {item["metadata"]["name"]: item["spec"] for item in json.loads(done.stdout)["items"]}
    if name not in queues:
        return [f"--queue={shape.queue}: it belongs to the ClusterQueue {name}, which does not exist."]
    spec = queues[name]
    flavors = [flavor for group in spec.get("resourceGroups", []) for flavor in group["flavors"]]
    quotas = [r["nominalQuota"] for f in flavors for r in f["resources"] if r["name"] == "google.com/tpu"]
    begin = f"--queue={shape.queue}: its ClusterQueue {name} has"
    if not quotas:
        return [f"{begin} no quota of google.com/tpu, so the pods would never be admitted (docs/launch_gke.md)."]
    if not all(str(quota).isdigit() for quota in quotas):  # such as 1k
        return []
    asked, most = shape.slices * shape.hosts * shape.chips_per_host, max(map(int, quotas))
    if asked <= most:
        return []
    if spec.get("cohort") or spec.get("cohortName"):
        say(
            f"note: {begin} a quota of {most} chips of one kind, {asked} are requested: it has to borrow from its cohort."
        )
        return []
    return [f"{begin} a quota of {most} chips of one kind, {asked} are requested: it would be queued forever."]


def _named_problems(cluster: Cluster, kind: str, flag: str, name: str | None) -> list[str]:
    if name is None:
        return []
    done = cluster.ask("get", kind, name, "--output=name")
    if done.returncode == 0:
        return []
    if done.matches(shell.GONE):
        where = "" if kind == "namespace" else f" (namespace {cluster.namespace})"
        return [f"--{flag}={name}: there is no such {kind}{where}."]
    say(f"note: whether the {kind} {name} exists is not known:\n{done.said}")
    return []


def _secret_problems(cluster: Cluster, shape: Shape) -> list[str]:
    """Pods whose Secret or key is missing would wait forever."""
    problems = []
    for variable, (secret, key) in shape.secret_keys.items():
        done = cluster.ask("get", "secret", secret, _KEYS)
        flag = f"--secret {variable}={shape.secrets[variable]}"
        if done.matches(shell.GONE):
            how = f"kubectl --namespace={cluster.namespace} create secret generic {secret} --from-file={key}=FILE"
            problems.append(f"{flag}: there is no such Secret (namespace {cluster.namespace}). Create it with: {how}")
        elif done.returncode != 0:
            say(f"note: whether the Secret {secret} exists is not known:\n{done.said}")
        elif not cluster.commands.dry_run and key not in (keys := done.stdout.split()):
            problems.append(f"{flag}: the Secret has no key {key}; it has {', '.join(keys) or 'none'}.")
    return problems


def _node_problems(cluster: Cluster, shape: Shape) -> list[str]:
    selector = ",".join(f"{key}={value}" for key, value in node_selector(shape).items())
    done = cluster.ask("get", "nodes", f"--selector={selector}", "--output=json")
    if done.returncode != 0:
        say(f"note: the cluster's nodes could not be listed:\n{done.said}")
        return []
    if cluster.commands.dry_run:
        return []
    nodes = json.loads(done.stdout)["items"]
    if not nodes:
        say(
            f"note: the cluster has no node with {selector} now. The pods wait for one: autoscaling or autoprovisioning "
            "creates nodes, otherwise add a node pool (docs/launch_gke.md)."
        )
        return []
    offered = {int(node["status"].get("allocatable", {}).get("google.com/tpu", 0)) for node in nodes} - {0}
    if offered and shape.chips_per_host not in offered:
        there = " or ".join(map(str, sorted(offered)))
        return [
            f"its nodes of {shape.accelerator} {shape.topology} offer {there} chips each, not {shape.chips_per_host}: "
            f"set --chips_per_host={min(offered)}, or no pod will ever be scheduled."
        ]
    pools = Counter(node["metadata"].get("labels", {}).get(NODE_POOL, "") for node in nodes)
    whole = sum(count // shape.hosts for count in pools.values())
    if whole < shape.slices:
        say(
            f"note: the cluster has {whole} complete slices of {shape.accelerator} {shape.topology} now, {shape.slices} are "
            "requested: the pods wait until there are more."
        )
    return []


class AlreadyRunningError(ConfigError):
    """The same run is on the cluster; `group` is the name it was launched under."""

    def __init__(self, message: str, group: str):
        super().__init__(message)
        self.group = group


def check_free(cluster: Cluster, plans: Sequence[Planned]) -> list[State]:
    """Finished JobSets of the same run and name, which may be deleted.

    Raises:
      AlreadyRunningError: a JobSet of the same run is not finished.
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
                "Choose another --name."
            )
    return [state for state in ours if state.name in wanted]


def create(cluster: Cluster, plans: Sequence[Planned], former: Sequence[State], leftovers: Leftovers) -> str:
    """Creates all JobSets of a launch with their ConfigMaps; returns their name among the `leftovers`.

    The JobSet comes first: its name is where two launches collide, and it owns the ConfigMap, which is deleted with it.
    Its pods wait for the ConfigMap, which takes a second.

    Raises:
      AlreadyRunningError: another launch was faster.
    """
    for launch in dict.fromkeys(state.launch for state in former):
        names = ", ".join(state.name for state in former if state.launch == launch)
        say(f"deleting the finished JobSet {names} of an earlier launch")
        # All JobSets of that launch write to the same folder, so they are all finished.
        cluster.commands.run(cluster.delete_launch(launch), timeout=600)
    what = f"JobSets of this launch ({', '.join(plan.shape.name for plan in plans)})"
    # By the launch's own label: nothing of another launch is ever deleted, and what was created although its answer got
    # lost is included.
    leftovers.add(what, cluster.delete_launch(plans[0].shape.launch))
    for number, plan in enumerate(plans):
        try:
            made = cluster.create(plan.jobset())
        except CommandError as e:
            if not e.completed.matches(shell.ALREADY_EXISTS):
                raise
            if number == 0:
                leftovers.keep(what)  # there is nothing yet
            message = f"another launch was faster: the JobSet {plan.shape.name} exists."
            raise AlreadyRunningError(message, plan.shape.group) from None
        if number == 0:
            _check_first(cluster, plan, made)
        cluster.create(plan.config_map(made.get("metadata", {}).get("uid")))
        if not cluster.commands.dry_run:
            say(f"created JobSet {plan.shape.name}")
    return what


def _check_first(cluster: Cluster, plan: Planned, made: dict[str, Any]) -> None:
    """Raises `AlreadyRunningError` if the same run was launched under another name at the same moment.

    Their names differ, so the later one gives way; of two in the same second, both. Checking after creating is what makes
    it safe: at least one of the two sees the other.
    """
    ours = made.get("metadata", {}).get("creationTimestamp", "")
    for jobset in cluster.jobsets(run=plan.shape.run):
        other = State.of(jobset)
        if other.launch == plan.shape.launch or other.finished:
            continue
        if other.created <= ours:
            message = f"another launch of the same run was faster: JobSet {other.name} is {other.phase}."
            raise AlreadyRunningError(message, other.group)
