"""From planned JobSets to ones that exist: found if they run already, created together, or not at all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.launching.gke.cluster import ALREADY_EXISTS, JOBSETS, Cluster, said
from perex_t5x.launching.gke.options import Planned
from perex_t5x.launching.gke.state import State
from perex_t5x.launching.leftovers import Leftovers
from perex_t5x.launching.shell import CommandError


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
        print(f"deleting the finished JobSet {names} of an earlier launch", file=sys.stderr, flush=True)
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
            print(f"created JobSet {plan.shape.name}", file=sys.stderr, flush=True)
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
