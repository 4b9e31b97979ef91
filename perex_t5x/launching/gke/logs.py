"""Following a launch: the log of process 0, and changes on the cluster, until all JobSets are finished."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perex_t5x import buckets
from perex_t5x.errors import ConfigError, Reason, TrainingError
from perex_t5x.launching.gke import bucket
from perex_t5x.launching.gke.cluster import FAILED, Cluster, State, exit_codes, first_pod, troubles
from perex_t5x.launching.gke.manifest import CONTAINER, LAUNCH_LABEL, NAME_LABEL
from perex_t5x.launching.shell import CommandError, Leftovers, end, say, with_notes
from perex_t5x.launching.spec import FINAL_REASONS, Work

_MOST_SILENT_POLLS = 30


@dataclass
class Log:
    """The log of process 0, as kubectl streams it to stdout; started again for every new pod."""

    cluster: Cluster
    process: subprocess.Popen | None = None
    pod: str = ""
    alive: str = ""
    _done: set[str] = field(default_factory=set)

    def attend(self, pod: Mapping[str, Any] | None) -> None:
        """Streams a pod's log unless it is being streamed already; a broken stream continues from where it was last seen."""
        if pod is None:
            return
        metadata, ended = pod["metadata"], pod["status"]["phase"] != "Running"
        uid, again = metadata.get("uid", metadata["name"]), []
        if uid in self._done:
            return
        if uid == self.pod and self.process is not None:
            if self.process.poll() is None:
                self.alive = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                return
            if ended and self.process.returncode == 0:
                self._done.add(uid)
                return
            again = [f"--since-time={self.alive}"] if self.alive else []
        self.close()
        self.pod, self.alive = uid, self.alive if again else ""
        words = ("logs", "--follow", f"--container={CONTAINER}", *again, f"pod/{metadata['name']}")
        self.process = subprocess.Popen(
            self.cluster.kubectl(*words), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def drain(self, seconds: float = 30.0) -> None:
        """Waits for kubectl to print the rest."""
        if self.process is not None:
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.close()

    def close(self) -> None:
        if self.process is not None:
            end(self.process)
            self.process = None


def follow(cluster: Cluster, group: str, poll_seconds: float = 10.0, begun: Callable[[], None] = lambda: None) -> int:
    """Prints what happens until all JobSets of a launch are finished.

    Whatever interrupts it after `begun()`, the launch continues, and the last line says how to stop it.

    Returns:
      The exit code of the command: 0 all completed; 2 a configuration error; 3 some runs of the sweep failed for good;
      those of other final reasons, such as 9 without progress; 1 anything else.
    """
    log = Log(cluster)
    try:
        with Leftovers(cluster.commands):  # nothing to delete; SIGTERM acts as Ctrl-C
            begun()
            if cluster.commands.dry_run:
                cluster.jobsets(group=group)
                return 0
            return _follow(cluster, group, poll_seconds, log)
    except KeyboardInterrupt:
        told = f"no longer following; {group} continues. To follow it again: {command('follow', cluster, group)}"
        raise with_notes(KeyboardInterrupt(told), _how_to_stop(cluster, group)) from None
    except ConfigError:
        raise  # there is nothing to stop
    except Exception as e:
        e.add_note(_how_to_stop(cluster, group))
        raise
    finally:
        log.close()


def _how_to_stop(cluster: Cluster, group: str) -> str:
    return f"to stop and delete it: {command('stop', cluster, group)}"


def _follow(cluster: Cluster, group: str, poll_seconds: float, log: Log) -> int:
    seen: dict[str, str] = {}
    silent = 0
    last: list[State] = []
    while True:
        try:
            states = [State.of(jobset) for jobset in cluster.jobsets(group=group)]
            open_ = [state for state in states if not state.finished]
            watched = next(iter(open_ or states), None)
            pods = cluster.pods(watched.name) if watched else []
            silent = 0
        except CommandError as e:
            silent += 1
            _say(seen, "kubectl", f"the cluster does not answer:\n{e.completed.said}")
            if silent >= _MOST_SILENT_POLLS:
                raise TrainingError(
                    f"the cluster has not answered {silent} times; {group} may still be running. "
                    f"To follow it again: {command('follow', cluster, group)}"
                ) from e
            time.sleep(poll_seconds)
            continue
        if watched is None:
            why = " any more: it was deleted." if last else ". To list launches: ./launch/gke.py list"
            raise ConfigError(f"there is no launch {group} on the cluster{why}")
        for gone in {state.name for state in last} - {state.name for state in states}:
            _say(seen, gone, f"{gone}: deleted")
        last = states
        for state in states:
            _say(seen, state.name, state.line)
        for words in troubles(pods):
            _say(seen, words, f"{watched.name}: {words}")
        log.attend(first_pod(pods))
        if not open_:
            log.drain()
            return _finished(cluster, group, states)
        time.sleep(poll_seconds)


def _say(seen: dict[str, str], subject: str, words: str) -> None:
    """Prints what has changed."""
    if seen.get(subject) != words:
        seen[subject] = words
        say(words)


def _finished(cluster: Cluster, group: str, states: list[State]) -> int:
    failed = [state for state in states if state.phase == FAILED]
    if not failed:
        say(f"{group} is finished. {_how_to_delete(cluster, group)}")
        return 0
    reasons = {Reason.of_exit_code(code) for state in failed for code in exit_codes(cluster.pods(state.name))}
    if Reason.CONFIGURATION in reasons:
        reason, why = Reason.CONFIGURATION, "a configuration error, see the log: a restart would end in the same way"
    elif Reason.SOME_FAILED in reasons:
        reason, why = Reason.SOME_FAILED, "all runs have ended, some of them failed for good, for example by diverging"
    elif Reason.STOPPED in reasons:
        reason, why = Reason.STOPPED, "asked to stop through the bucket, and saved; launched again it resumes"
    elif final := reasons.intersection(FINAL_REASONS):
        reason, why = sorted(final)[0], f"{', '.join(sorted(final))}: a restart would end in the same way"
    else:
        reason, why = Reason.ERROR, f"given up after {max(state.restarts for state in failed)} restarts"
    for line in from_bucket(cluster, group, [state.name for state in failed]):
        say(line)
    say(
        f"{group}: {', '.join(state.name for state in failed)} failed: {why}.\n"
        f"details: {command('status', cluster, group)}\n{_how_to_delete(cluster, group)}"
    )
    return reason.exit_code


def from_bucket(cluster: Cluster, group: str, jobsets: list[str]) -> list[str]:
    """What the launch's folder says: how far the run is, the first error of all hosts, goodput. A bucket that this machine
    may not read is a note: the cluster has said the rest."""
    try:
        root = work_of(cluster, group).root
        buckets.check(root, "the launch's folder", writes=False)
        return [line for name in jobsets for line in bucket.Launch(root, name).lines()]
    except Exception as e:
        return [f"note: logs and errors of all hosts are in the bucket, which cannot be read from here: {e}"]


def work_of(cluster: Cluster, group: str) -> Work:
    """What a launch runs, read from its ConfigMaps, which exist as long as its JobSets."""
    maps = cluster.get("configmaps", f"{NAME_LABEL}={group}")
    if not maps:
        raise ConfigError(
            f"there is no launch {group} on the cluster (any more). Its results are in the bucket: give `collect` the flags "
            "of the launch, including --sweep or --gin_file."
        )
    # A ConfigMap that no JobSet owns (it was created from a manifest) may be left from an earlier launch.
    newest = max(maps, key=lambda one: one["metadata"].get("creationTimestamp", ""))
    launch = newest["metadata"]["labels"].get(LAUNCH_LABEL)
    maps = [one for one in maps if one["metadata"]["labels"].get(LAUNCH_LABEL) == launch]
    parts = [Work.from_json(one["data"]["file-0"]) for one in maps]
    return dataclasses.replace(parts[0], jobs=tuple(job for part in parts for job in part.jobs))


def _how_to_delete(cluster: Cluster, group: str) -> str:
    return f"It uses no chips any more; to delete it and its logs: {command('stop', cluster, group)}"


def command(name: str, cluster: Cluster, group: str) -> str:
    """The launch/gke.py command for an existing launch."""
    context = [f"--context={cluster.context}"] if cluster.context else []
    namespace = [f"--namespace={cluster.namespace}"] if cluster.namespace != "default" else []
    return shlex.join(["./launch/gke.py", name, f"--name={group}", *namespace, *context])
