"""Runs a training or a sweep as JobSets on Google Kubernetes Engine: launch/gke.py COMMAND --flags

    launch/gke.py --sweep=sweeps/sqrt_lr.gin --dir=gs://bucket/sweeps/sqrt --topology=v5e:16x16 --image=IMAGE
    launch/gke.py manifest --gin_file=... --gin.MODEL_DIR=gs://bucket/run --topology=v5e-16 --image=IMAGE --out=run.yaml

    launch    (default) checks everything, creates the JobSets, follows them
    manifest  writes what `launch` would create, to --out or stdout
    follow    follows a launch: --name=...
    status    shows the state of a launch, why pods do not start, and the first error of all hosts: --name=...
    collect   downloads metrics, logs and results to --out or launches/<name>: --name=...
    stop      stops a launch, which saves, and deletes it: --name=..., or --all; the same as delete
    list      lists all launches of the namespace

With --dir=gs://... beside --name, `follow`, `status`, `collect` and `stop` read and write the bucket alone, without kubectl.
Where: --context, --namespace, --queue, --priority, --service_account, --spot, --reservation. How many: --slices, --jobsets.
--dry_run prints every command and runs none. See docs/launch_gke.md.

Exit codes: 0 done; 2 a configuration error; 3 some runs of the sweep failed for good; 9 restarts without progress;
10 stopped; 1 other failures; 130 no longer following.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from absl import flags

from perex_t5x.cli import console
from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.launching import checks, collect, names
from perex_t5x.launching.gke import bucket, create, logs
from perex_t5x.launching.gke.cluster import Cluster, State, connected, exit_codes, pod_phases, troubles, warnings
from perex_t5x.launching.gke.create import JOBS_FILE
from perex_t5x.launching.gke.logs import command
from perex_t5x.launching.gke.manifest import as_yaml
from perex_t5x.launching.request import Request, define_launch_flags
from perex_t5x.launching.shell import Commands, Leftovers, say

# Seconds that a process waits for the others: nodes start, and pull the image, minutes apart.
_PATIENCE = "3600"
_MOST_POLL_SECONDS = 3600


def define_flags() -> None:
    define_launch_flags()
    define_own_flags()


def define_own_flags() -> None:
    """Those that no other launcher has."""
    flags.DEFINE_string("image", None, "The container, such as europe-docker.pkg.dev/PROJECT/perex/perex:TAG.")
    flags.DEFINE_integer("jobsets", 1, "Split the runs of a sweep over this many JobSets, which run side by side.")
    flags.DEFINE_string("context", None, "kubectl's context; default: the current one.")
    flags.DEFINE_string("namespace", "default", "The cluster's namespace.")
    flags.DEFINE_string("queue", None, "Kueue's LocalQueue; on clusters made by xpk: multislice-queue.")
    flags.DEFINE_string("priority", None, "PriorityClass of the pods; on clusters made by xpk: very-low to very-high.")
    flags.DEFINE_string("service_account", None, "Kubernetes service account that may write to the bucket.")
    flags.DEFINE_integer("chips_per_host", None, "For node pools of unusual machines, such as v5e-8 with two hosts.")
    flags.DEFINE_integer("grace_seconds", 600, "How long a run may take to save when it is stopped.")
    flags.DEFINE_float("ttl_hours", 72, "Hours after which a finished JobSet is deleted, with the logs of its pods.")
    flags.DEFINE_bool("host_network", False, "Use the nodes' network: faster between slices, no Workload Identity.")
    flags.DEFINE_bool("privileged", True, "Privileged containers, as with xpk; --noprivileged if they are forbidden.")
    flags.DEFINE_string("out", None, "For `manifest` the file, default stdout; for `collect` the folder.")
    flags.DEFINE_bool("all", False, "For `stop`: every launch of the namespace.")
    flags.DEFINE_float("poll_seconds", 10, "Seconds between two queries of the cluster while following.")


def main(args: Any, words: list[str]) -> int:
    known = {
        "launch": _launch,
        "manifest": _manifest,
        "follow": _follow,
        "status": _status,
        "collect": _collect,
        "stop": _stop,
        "delete": _stop,
        "list": _list,
    }
    if len(words) > 1:
        raise ConfigError(f"one command at a time: {' '.join(words)}")
    name = words[0] if words else "launch"
    if name not in known:
        raise ConfigError(f"{name!r} is not a command; known are {', '.join(known)}.{did_you_mean(name, known)}")
    if not 0 <= args.poll_seconds <= _MOST_POLL_SECONDS:
        raise ConfigError(f"--poll_seconds={args.poll_seconds}: valid are 0 to {_MOST_POLL_SECONDS}.")
    return known[name](args)


def _launch(args: Any) -> int:
    asked = _request(args)
    plans, cluster = create.planned(asked, args), _cluster(args)
    create.check_cluster(cluster, plans[0].shape)
    plans = create.with_pinned_image(plans, cluster.commands)
    try:
        former = create.check_free(cluster, plans)
        _check(asked, cluster, plans)
        with Leftovers(cluster.commands, asked.keep) as leftovers:
            what = create.create(cluster, plans, former, leftovers)
            return logs.follow(cluster, asked.name, args.poll_seconds, lambda: leftovers.keep(what))
    except create.AlreadyRunningError as e:
        return _offer(e, cluster, asked, args)


def _request(args: Any) -> Request:
    waiting = args["initialization_timeout"]
    if not waiting.present:
        waiting.parse(_PATIENCE)
    return Request.from_flags(args).in_bucket()


def _check(asked: Request, cluster: Cluster, plans: list[create.Planned]) -> None:
    """What all launchers check before they create anything, and the confirmation."""
    commands, checklist = cluster.commands, checks.Checklist()
    _check_bucket(asked, commands, checklist)
    checks.check_gin(asked, commands, checklist)
    cost = checks.preflight(asked, commands, checklist)
    if "@" not in plans[0].shape.image:
        checklist.not_checked("what the image's tag will name when pods start: its digest is not known")
    checklist.not_checked("whether the image has the code of this checkout, which these checks have used")
    checklist.not_checked("whether the cluster has free nodes, and can pull the image")
    if (count := len(plans)) > 1:  # side by side: the same chip-hours in less time
        cost = dataclasses.replace(cost, chips=cost.chips * count, hours=cost.hours and cost.hours / count)
    shape = plans[0].shape
    where = (
        f"cluster {cluster.context or '(the current one)'}, namespace {cluster.namespace}: "
        + (f"{count} JobSets side by side, each of " if count > 1 else f"JobSet {shape.name} of ")
        + f"{shape.slices} x {shape.hosts} pods with {shape.chips_per_host} chips"
        + (f", in the queue {shape.queue}" if shape.queue else "")
    )
    checks.confirm(checks.summary(asked, cost, f"that of the image {shape.image}", where, checklist), asked)


def _check_bucket(asked: Request, commands: Commands, checklist: checks.Checklist) -> None:
    """gcloud is needed for nothing else here: without it, or without a project, the bucket is assumed to exist."""
    project = asked.project
    if not commands.dry_run and not project and shutil.which("gcloud"):
        project = commands.read(["gcloud", "config", "get-value", "project"], check=False)
    if project and project != "(unset)" and (commands.dry_run or shutil.which("gcloud")):
        checks.bucket(dataclasses.replace(asked, project=project), commands, must_see=False, checklist=checklist)
    elif not commands.dry_run:
        checklist.not_checked("whether the bucket exists")
        say("note: the bucket was not checked: gcloud is not installed, or there is no --project.")


def _offer(error: create.AlreadyRunningError, cluster: Cluster, asked: Request, args: Any) -> int:
    """Follows the running launch, if the user wants that."""
    how = logs.command("follow", cluster, error.group)
    if not asked.yes and not console.is_interactive():
        raise ConfigError(f"{error}\nTo follow it: {how}") from None
    say(str(error))
    if not asked.yes and not console.confirm("Follow it?"):
        say(f"nothing was created. To follow it: {how}")
        return 0
    return logs.follow(cluster, error.group, args.poll_seconds)


def _manifest(args: Any) -> int:
    plans = create.with_pinned_image(create.planned(_request(args), args), Commands())
    text = as_yaml(part for plan in plans for part in (plan.config_map(), plan.jobset()))
    if args.out is None:
        print(text, end="")
        return 0
    try:
        Path(args.out).write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--out={args.out}: {e.strerror}") from e
    say(f"wrote {args.out}. To launch it: kubectl create {shlex.quote(f'--filename={args.out}')}")
    return 0


def _in_bucket(args: Any) -> list[bucket.Launch] | None:
    """The launch as its bucket shows it, if only --dir says where it is; None: as the cluster does."""
    if not args.dir or args.sweep or args.gin_file:
        return None
    if args.dry_run:
        raise ConfigError(
            "--dry_run: with --dir nothing is run but reads and writes of the bucket. Leave one of them out."
        )
    return bucket.find(args.dir, _name(args))


def _follow(args: Any) -> int:
    if launches := _in_bucket(args):
        return bucket.follow(launches, args.poll_seconds)
    return logs.follow(_cluster(args), _name(args), args.poll_seconds)


def _collect(args: Any) -> int:
    if args.sweep or args.gin_file:
        asked = _request(args)
        name, work, commands = asked.name, asked.work, Commands(args.dry_run)
    elif launches := _in_bucket(args):
        name, work, commands = _name(args), bucket.merged(launches), Commands(args.dry_run)
    else:
        name, cluster = _name(args), _cluster(args)
        if args.dry_run:
            raise ConfigError("a dry run of `collect` needs the flags of the launch, including --sweep or --gin_file.")
        work, commands = logs.work_of(cluster, name), cluster.commands
    out = args.out or os.path.join("launches", name)
    if not commands.dry_run:
        kept = os.path.join(out, ".launch", name)
        os.makedirs(kept, exist_ok=True)
        Path(kept, JOBS_FILE).write_text(work.to_json(), encoding="utf-8")
    collect.collect(work.root, name, out, commands)
    return 0


def _stop(args: Any) -> int:
    if bool(args.all) == bool(args.name):
        raise ConfigError("give either --name=..., or --all for every launch of the namespace.")
    group = None if args.all else _name(args)
    if group and (launches := _in_bucket(args)):
        return bucket.stop(launches)
    cluster = _cluster(args)
    jobsets = [jobset["metadata"]["name"] for jobset in cluster.jobsets(group=group)]
    if not jobsets and not args.dry_run:
        say(f"there are no JobSets {f'of {group}' if group else 'of launches'}; other objects of theirs are deleted.")
    if args.all and jobsets and not args.yes:
        console.confirm(f"Stop and delete {', '.join(jobsets)}?", refused="Nothing was changed.")
    cluster.commands.run(cluster.delete_group(group), timeout=1800)
    if jobsets:
        say(
            f"deleted {', '.join(jobsets)}; running pods have --grace_seconds to save, and to copy the last lines of their "
            "logs to .launch in the launch's folder."
        )
    return 0


def _cluster(args: Any) -> Cluster:
    return connected(Commands(args.dry_run), args.namespace, args.context)


def _name(args: Any) -> str:
    if args.name is None:
        raise ConfigError("--name is missing: the name of the launch. To list launches: ./launch/gke.py list")
    return names.check_name(args.name)


def _status(args: Any) -> int:
    """Prints the state of each JobSet of a launch, its pods, why some do not start, and the cluster's last warnings."""
    if launches := _in_bucket(args):
        return bucket.status(launches)
    cluster, group = _cluster(args), _name(args)
    states = [State.of(jobset) for jobset in cluster.jobsets(group=group)]
    if cluster.commands.dry_run:
        cluster.pods(group)
        cluster.get("events")
        return 0
    if not states:
        raise ConfigError(f"there is no launch {group} on the cluster. To list launches: ./launch/gke.py list")
    events = cluster.get("events")
    for state in states:
        pods = cluster.pods(state.name)
        print(f"{state.line}\n  image: {state.image}\n  pods: {pod_phases(pods)}")
        if codes := sorted(set(exit_codes(pods)) - {0}):
            print(f"  exit codes {', '.join(map(str, codes))}")
        for words in troubles(pods):
            print(f"  {words}")
        for words in warnings(events, state.name):
            print(f"  event: {words}")
    for line in logs.from_bucket(cluster, group, [state.name for state in states]):
        print(line)
    print(f"to follow it: {command('follow', cluster, group)}\nto stop it: {command('stop', cluster, group)}")
    return 0


def _list(args: Any) -> int:
    """Prints every JobSet that launches have created in the namespace."""
    cluster = _cluster(args)
    states = [State.of(jobset) for jobset in cluster.jobsets()]
    if cluster.commands.dry_run:
        return 0
    for state in sorted(states, key=lambda state: (state.group, state.name)):
        print(f"{state.line}, launched as {state.group} at {state.created}")
    if not states:
        print(f"no launches in the namespace {cluster.namespace} of {cluster.context}.")
    return 0
