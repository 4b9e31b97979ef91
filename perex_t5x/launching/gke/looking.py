"""`status` and `list`: what is on the cluster now, in words."""

from __future__ import annotations

from perex_t5x.errors import ConfigError
from perex_t5x.launching.gke import state as states
from perex_t5x.launching.gke.cluster import Cluster
from perex_t5x.launching.gke.logs import command
from perex_t5x.launching.gke.state import State


def status(cluster: Cluster, group: str) -> int:
    """Prints how far each JobSet of a launch is, its pods, why some do not come up, and the cluster's last warnings."""
    found = [State.of(jobset) for jobset in cluster.jobsets(group=group)]
    if cluster.commands.dry_run:
        cluster.pods(group)
        cluster.get("events")
        return 0
    if not found:
        raise ConfigError(f"there is no launch {group} on the cluster. Those that are: ./launch/gke.py list")
    events = cluster.get("events")
    for state in found:
        pods = cluster.pods(state.name)
        print(f"{_line(state)}\n  pods: {states.pod_phases(pods)}")
        if codes := sorted(set(states.exit_codes(pods)) - {0}):
            print(f"  ended with exit status {', '.join(map(str, codes))}")
        for words in states.troubles(pods):
            print(f"  {words}")
        for words in states.warnings(events, state.name):
            print(f"  event: {words}")
    print(f"to follow it: {command('follow', cluster, group)}\nto stop it: {command('stop', cluster, group)}")
    return 0


def show_all(cluster: Cluster) -> int:
    """Prints every JobSet that launches have made in the namespace."""
    found = [State.of(jobset) for jobset in cluster.jobsets()]
    if cluster.commands.dry_run:
        return 0
    for state in sorted(found, key=lambda state: (state.group, state.name)):
        print(f"{_line(state)}, launched as {state.group} at {state.created}")
    if not found:
        print(f"nothing of ours in the namespace {cluster.namespace} of {cluster.context}.")
    return 0


def _line(state: State) -> str:
    restarts = f", restarted {state.restarts} times" if state.restarts else ""
    return f"{state.name}: {state.phase}{restarts}{': ' if state.words else ''}{state.words}"
