"""A launch that nobody watches: `launch --detach`, and following, asking and stopping it from any machine.

The hosts do everything themselves (`gcloud.startup`) and say in the launch's folder in the bucket how far they are. Here
that is read with gcloud, which is all that such a machine needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from perex_t5x.errors import ConfigError, Reason, TrainingError
from perex_t5x.launching import bundle, launch_folder, shell
from perex_t5x.launching.checks import Checklist
from perex_t5x.launching.gcloud import session, startup
from perex_t5x.launching.gcloud.bucket import GcloudFolder
from perex_t5x.launching.gcloud.resource import Description
from perex_t5x.launching.gcloud.session import Options
from perex_t5x.launching.gcloud.steps import ExistsError, Steps
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import Commands, Leftovers, say

REQUESTED, ENDED = "requested", "ended"  # states of the launch; also: starting, running, preempted
_STATE = "detached.json"
_DELETE_ROLES = ("roles/tpu.admin", "roles/editor", "roles/owner")
_ACT_AS_ROLES = ("roles/iam.serviceAccountUser", "roles/editor", "roles/owner")


@dataclass(frozen=True)
class State:
    """detached.json: the launch as its first host saw it last.

    Attributes:
      resource: the queued resource of the newest attempt.
      state: REQUESTED, 'starting', 'running', 'preempted' or ENDED.
      exit_code: of a launch that has ENDED.
      message: why, in words.
      time: UTC.
    """

    resource: str
    attempt: int
    project: str
    zone: str
    slices: int
    state: str
    exit_code: int | None
    restarts: int
    max_restarts: int
    message: str
    time: str
    launch_id: str = ""

    @classmethod
    def of(cls, content: Any) -> State | None:
        try:
            return cls(**{f.name: content[f.name] for f in dataclasses.fields(cls)})
        except (KeyError, TypeError):
            return None

    def content(self) -> dict[str, Any]:
        return {"version": 1, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        code = self.ended_with
        ended = "" if code is None else f" with exit code {code} ({Reason.of_exit_code(code)})"
        words = f": {self.message}" if self.message else ""
        return (
            f"{self.state}{ended} as of {self.time}{words}\n{self.resource}, after {self.restarts} restarts of at most "
            f"{self.max_restarts}"
        )

    @property
    def ended_with(self) -> int | None:
        """The exit code, once it has ended."""
        return self.exit_code if self.state == ENDED else None


def read_state(folder: GcloudFolder) -> State | None:
    """None if no detached launch has begun there."""
    return State.of(folder.read(_STATE))


def find_launch(root: str, name: str | None, commands: Commands) -> str:
    """The name of the launch in a folder, if only one was launched there."""
    if name:
        return name
    found = GcloudFolder(root, commands).entries(".launch")
    if len(found) != 1:
        which = f"is one of {', '.join(found)}" if found else "cannot be found: nothing was launched there"
        raise ConfigError(f"--name is missing, and {which} in {root}.")
    return found[0]


# --- launching --------------------------------------------------------------------------------------------------------


def check_account(
    request: Request, commands: Commands, create_flags: tuple[str, ...], checklist: Checklist | None = None
) -> None:
    """Prints a note if the hosts' service account has no role with which it can delete its slices; roles that it has
    through a group, a folder or an organisation do not show."""
    given = next((flag.partition("=")[2] for flag in create_flags if flag.startswith("--service-account=")), None)
    if not given:
        argv = ["gcloud", "projects", "describe", request.project, "--format=value(projectNumber)"]
        number = commands.run(argv, check=False, dry="NUMBER").stdout.strip()
        given = f"{number or 'NUMBER'}-compute@developer.gserviceaccount.com"
    done = commands.run(
        ["gcloud", "projects", "get-iam-policy", request.project, "--format=json"], check=False, dry="{}"
    )
    if commands.dry_run:
        return
    checklist = checklist or Checklist()
    grants = "\n".join(
        f"  gcloud projects add-iam-policy-binding {request.project} --member=serviceAccount:{given} --role={role}"
        for role in (_DELETE_ROLES[0], _ACT_AS_ROLES[0])
    )
    if done.returncode != 0:
        say(f"note: whether {given} may delete its slices is not known: the project's policy cannot be read.\n{grants}")
        checklist.not_checked(f"whether {given} may delete and request slices")
        return
    member = f"serviceAccount:{given}"
    roles = {b["role"] for b in json.loads(done.stdout or "{}").get("bindings", []) if member in b.get("members", [])}
    if not roles.intersection(_DELETE_ROLES) or not roles.intersection(_ACT_AS_ROLES):
        say(
            f"note: {given}, as which the hosts run, has no role in {request.project} with which it could delete the slices "
            f"at the end, or replace them when they are preempted. Unless it has one in another way:\n{grants}"
        )
        checklist.not_checked(
            f"whether {given} may delete and request slices in another way than by a role in the project"
        )
    else:
        checklist.checked(f"{given} may delete and request slices")


def launch(request: Request, todo: Steps, options: Options, files: bundle.Checkout) -> int:
    """Requests the slices with a start-up script that does the rest, and returns once they are accepted."""
    target, commands = todo.target, todo.commands
    uploaded = todo.upload(request, files)
    text = startup.script(request, target, uploaded, files.commit, options.python, options.create_flags)
    folder = os.path.join(bundle.folder(request.name), "")
    commands.write(f"{folder}startup.sh", text)
    commands.write(f"{folder}shutdown.sh", startup.shutdown_script(request.name))
    begun = State(
        resource=target.name,
        attempt=0,
        project=target.project,
        zone=target.zone,
        slices=target.slices,
        state=REQUESTED,
        exit_code=None,
        restarts=0,
        max_restarts=request.max_restarts,
        message="",
        time=launch_folder.now(),
        launch_id=request.work.launch_id,
    )
    commands.write(f"{folder}{_STATE}", json.dumps(begun.content()))
    todo.put(f"{folder}{_STATE}", f"{uploaded.folder}/{_STATE}")  # before the hosts do
    argv = startup.create(target, request, files.commit, options.create_flags, "0", folder)
    try:
        with Leftovers(commands, request.keep) as leftovers:
            leftovers.add(target.what, target.delete())
            try:
                todo.create(request, argv)
            except ExistsError as e:
                leftovers.keep(target.what)  # another launch has just created it
                e.add_note(target.still_there)
                raise
            session.check_folder(request, todo)
            existing = todo.describe(dry=Description("", "ACCEPTED", "", {}))
            if not existing.exists_or_pending:
                reason = existing.error or "  (no reason given)"
                raise TrainingError(shell.refusal(f"{target.what} is {existing.state}", reason))
    except ExistsError:
        raise
    except BaseException as e:
        failed = dataclasses.replace(begun, state=ENDED, exit_code=1, message=f"not created: {e}"[:500])
        GcloudFolder(uploaded.folder, commands, target.project).write(failed.content(), _STATE)
        raise
    say(
        f"{target.what} is {existing.state}. Nothing has to run here any more: its hosts install, run, resume and delete "
        "themselves."
    )
    say("\n".join(ways(request.work.root, request.name)))
    return 0


def ways(root: str, name: str) -> list[str]:
    """What to type, on any machine that can read the bucket."""
    where = shlex.join([f"--dir={root}", f"--name={name}"])
    lines = {"status": "how far it is", "follow": "its log", "stop": "it saves, stops and deletes its slices"}
    lines |= {"collect": "results, also while it runs", "delete": "its slices, at once"}
    return [f"  launch/gcloud_tpu.py {verb} {where}{'':<{9 - len(verb)}}# {words}" for verb, words in lines.items()]


# --- afterwards, from any machine -------------------------------------------------------------------------------------


def attempts(listed: Iterable[Description], name: str) -> list[Description]:
    """The queued resources of a detached launch, oldest first, among those of a zone."""
    numbered = [(one.attempt, one) for one in listed if one.launch == name and one.attempt is not None]
    return [one for _, one in sorted(numbered, key=lambda pair: pair[0])]


def _may_continue(one: Description) -> bool:
    """Whether it runs or will, or is being taken away, with hosts that may yet request its successor."""
    return one.exists_or_pending or one.state == "SUSPENDING"


@dataclass
class Watcher:
    """A detached launch, seen from outside.

    Attributes:
      name: of the launch.
      folder: of the launch, in the bucket.
      todo: for its queued resources.
    """

    name: str
    folder: GcloudFolder
    todo: Steps
    _shown: dict[str, int] = field(default_factory=dict)

    def status(self) -> str:
        state = self._state()
        return "\n".join([f"{self.name}: {state}", *self._resources(state), *self.folder.progress()])

    def _state(self) -> State:
        state = read_state(self.folder)
        if state is None:
            raise ConfigError(f"{self.folder.path} has no {_STATE}: nothing was launched there with --detach.")
        return state

    def _resources(self, state: State) -> list[str]:
        try:
            found = attempts(self.todo.resources(), self.name)
        except TrainingError as e:  # a machine that can read the bucket, and nothing else
            return [f"the queued resources are not known: {str(e).splitlines()[0]}"]
        lines = [f"{one.name}: {one.state}{': ' if one.error else ''}{one.error}" for one in found]
        if state.ended_with is None and not any(map(_may_continue, found)):
            lines.append("nothing runs, and no new slices are requested: launch again with the same flags to resume.")
        return lines

    def follow(self) -> int:
        """Prints the first host's log until the launch has ended; returns its exit code."""
        shown = None
        while True:
            state = self._state()
            self._print_log(state)
            if (state.state, state.resource, state.restarts) != shown:
                say(f"{self.name}: {state}")
                shown = (state.state, state.resource, state.restarts)
            if (code := state.ended_with) is not None:
                if code != 0 and (error := self.folder.first_error()) is not None:
                    say(f"first error: {error}\n{error.traceback}")
                return code
            if gone := self._gone(state):
                raise TrainingError(gone)
            self.todo.sleep(self.todo.poll)

    def _gone(self, state: State) -> str | None:
        """Why nobody will continue; None if somebody does, or the cloud does not say."""
        try:
            found = attempts(self.todo.resources(), self.name)
            if any(map(_may_continue, found)):
                return None
            again = read_state(self.folder)  # it may have ended in between, and deleted itself
        except TrainingError as e:
            say(str(e))
            return None
        if again is None or again != state:
            return None
        what = ", ".join(f"{one.name} is {one.state}" for one in found) or f"{state.resource} is gone"
        return (
            f"{what}, and no new slices are requested: launch again with the same flags to resume from what is saved."
        )

    def _print_log(self, state: State) -> None:
        """What is new in the first host's logs of the newest attempt."""
        attempts = launch_folder.in_order(n for n in self.folder.entries("logs") if n.startswith(f"{state.launch_id}."))
        for attempt in attempts[-2:]:  # the former one may have grown once more
            host = launch_folder.host_name(0)
            for name, size in sorted(self.folder.sizes("logs", attempt, host).items()):
                path = f"{attempt}/{name}"
                if not name.startswith(("worker.", "job-")) or size <= self._shown.get(path, 0):
                    continue
                new = self.folder.text("logs", attempt, host, name, part=(self._shown.get(path, 0), size)) or ""
                self._shown[path] = size
                with contextlib.suppress(OSError, ValueError):  # a closed stdout
                    sys.stdout.buffer.write(new.encode(errors="replace"))
                    sys.stdout.buffer.flush()

    def stop(self) -> None:
        self.folder.request_stop()
        say("asked to stop: within a minute or two the hosts save, stop and delete their slices")

    def delete(self) -> None:
        found = attempts(self.todo.resources(), self.name)
        if not found:
            say(f"there are no queued resources of the launch {self.name}")
        self.todo.delete_each(found)
