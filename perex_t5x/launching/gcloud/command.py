"""Runs a training or a sweep on TPU VMs: launch/gcloud_tpu.py COMMAND --flags

    launch/gcloud_tpu.py launch --sweep=sweeps/sqrt_lr.gin --dir=gs://bucket/sweeps/sqrt --topology=v5e:16x16 --spot
    launch/gcloud_tpu.py --gin_file=... --gin.MODEL_DIR=gs://bucket/run --topology=v5e-16 --dry_run
    launch/gcloud_tpu.py launch --detach ...; then from any machine: launch/gcloud_tpu.py follow --dir=gs://bucket/run

COMMAND is `launch` (the default: all steps), or one step: check, create, wait, copy, install, start, follow, collect,
delete; or status, stop (the program; the slices stay), list (what launches have created in the zone), delete_all.
--dry_run prints every command and runs none. Project and zone come from gcloud's configuration, or --project and --zone.
See docs/launch.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from absl import flags

from perex_t5x.cli import console
from perex_t5x.errors import ConfigError, Reason, TrainingError, did_you_mean
from perex_t5x.launching import bundle, checks, collect, names
from perex_t5x.launching.gcloud import detached, logs, remote, resource, session, steps
from perex_t5x.launching.gcloud.bucket import GcloudFolder
from perex_t5x.launching.gcloud.detached import Watcher
from perex_t5x.launching.gcloud.logs import Follower
from perex_t5x.launching.gcloud.remote import HostStatus
from perex_t5x.launching.gcloud.resource import GONE, Description, Resource
from perex_t5x.launching.gcloud.session import Options, Session
from perex_t5x.launching.gcloud.steps import Steps
from perex_t5x.launching.request import LaunchFlags, Request, define_launch_flags
from perex_t5x.launching.shell import Commands, Leftovers, say

# Steps that need to know what runs; the others find an existing launch by its name.
_WITH_WORK = ("launch", "check", "create", "copy")
_BY_NAME = ("wait", "install", "start", "follow", "status", "stop", "collect", "delete")
_OF_ZONE = ("list", "delete_all")
_BY_BUCKET = ("status", "follow", "stop", "delete")  # of a detached launch


def define_flags() -> None:
    define_launch_flags()
    flags.DEFINE_float("wait_hours", 24.0, "How many hours to wait for the slices.")
    flags.DEFINE_string("out", None, "Where `collect` puts metrics, logs and results; default launches/<name>.")
    flags.DEFINE_string("remote_python", None, "Python on the hosts; default: 3.11 or newer, installed if necessary.")
    flags.DEFINE_bool("reserved", False, "Use the project's reserved slices.")
    flags.DEFINE_bool("internal_ip", False, "Hosts without external addresses, reached from inside the network.")
    flags.DEFINE_bool("detach", False, "Return once the slices are accepted: they run, resume and delete themselves.")
    flags.DEFINE_multi_string("create_flag", [], "For `queued-resources create`, such as --create_flag=--network=n")


def main(args: Any, words: list[str]) -> int:
    command = words[0] if words else "launch"
    known = (*_WITH_WORK, *_BY_NAME, *_OF_ZONE)
    if len(words) > 1 or command not in known:
        wrong = " ".join(words[1:] if command in known else words)
        raise ConfigError(f"{wrong!r} is not a command.{did_you_mean(wrong, known)} Known are {', '.join(known)}.")
    commands = Commands(dry_run=args.dry_run)
    if command in _OF_ZONE:
        args.name = args.name or "all"
    if args.reserved and (args.spot or args.reservation):
        raise ConfigError("--reserved excludes --spot and --reservation.")
    if args.detach and command not in ("launch", "check"):
        raise ConfigError(f"--detach is only for `launch` and `check`, not for `{command}`.")
    resource.check_create_flags(args.create_flag, args.detach)
    if command in _BY_NAME and args.dir:
        _find_detached(args, commands)
    request = (Request if command in _WITH_WORK else LaunchFlags).from_flags(args)
    if request.slice is not None:
        request.slice.check_tpu_api()
    if isinstance(request, Request):
        request.in_bucket()
    request = request.located(commands)
    target = Resource(request.name, request.project, request.zone, request.slices, args.internal_ip)
    out = args.out or os.path.join("launches", request.name)
    options = Options(out, args.wait_hours, args.remote_python, tuple(args.create_flag), args.detach)
    todo = Steps(target, commands)
    if command in _OF_ZONE:
        return _of_zone(command, request, todo)
    if not isinstance(request, Request):
        return _by_name(command, args, request, todo, options)
    if command == "launch":
        return _launch(request, todo, options)
    if command == "check":
        _check(request, todo, options)
    elif command == "create":
        _create(request, todo, options)
    else:
        _copy(request, todo)
    return 0


def _find_detached(args: Any, commands: Commands) -> None:
    """Completes the flags from the folder of a detached launch: it knows its name, its project and its zone."""
    root = names.check_bucket_path(args.dir)
    args.name = detached.find_launch(root, args.name, commands)
    if commands.dry_run or (args.project and args.zone):
        return
    if state := detached.read_state(GcloudFolder(steps.bundle_url(root, args.name), commands)):
        args.project, args.zone = args.project or state.project, args.zone or state.zone


def _check(request: Request, todo: Steps, options: Options) -> bundle.Checkout:
    """Everything that can be checked before anything is created."""
    files = bundle.checkout(request.allow_uncommitted)
    commands, checklist = todo.commands, checks.Checklist()
    checks.bucket(request, commands, checklist=checklist)
    checks.zone_has(request, commands, checklist)
    checks.quota(request, commands, checklist)
    todo.check_secrets(request.secrets)
    if request.secrets:
        checklist.checked(f"the secrets {', '.join(request.secrets.values())} exist")
        checklist.not_checked("whether the hosts' service account may read them")
    if options.detach:
        detached.check_account(request, commands, options.create_flags, checklist)
    checks.check_gin(request, commands, checklist)
    cost = checks.preflight(request, commands, checklist)
    say(checks.summary(request, cost, files.commit, f"{request.project}, {request.zone}", checklist))
    return files


def _launch(request: Request, todo: Steps, options: Options) -> int:
    listed = todo.resources()
    if (watcher := _detached_already(request, todo, listed)) is not None:
        say("\n".join(detached.ways(request.work.root, request.name)))
        return 0 if options.detach else watcher.follow()
    if (existing := session.find_existing(request, todo, listed)) != GONE:
        return _join(request, todo, options, existing.state)
    files = _check(request, todo, options)
    checks.confirm("", request)
    # The checks take minutes, in which another launch of this name may have started: its hosts download its bundle.
    if todo.describe() != GONE and (existing := session.find_existing(request, todo)) != GONE:
        return _join(request, todo, options, existing.state)
    if options.detach:
        return detached.launch(request, todo, options, files)
    try:
        with Leftovers(todo.commands, request.keep) as leftovers:
            run = Session(todo, request, options, files.commit, todo.upload(request, files))
            run.make(leftovers)
    except steps.ExistsError:
        existing = session.find_existing(request, todo)
        if existing == GONE:
            raise
        return _join(request, todo, options, existing.state)
    return run.run()


def _detached_already(request: Request, todo: Steps, listed: list[Description]) -> Watcher | None:
    """The running detached launch of this name; what is left of one that does not run any more is deleted."""
    found = detached.attempts(listed, request.name)
    if any(one.labels.get(resource.LABEL_RUN) != request.work.fingerprint for one in found):
        raise ConfigError(
            f"the launch {request.name} writes into another folder than {request.work.root}. Choose another --name."
        )
    watcher = _watcher(request.work.root, request.name, todo)
    if running := [one for one in found if one.exists_or_pending]:
        say(f"{running[-1].name} is {running[-1].state}, was launched with --detach, and needs nobody to watch it.")
        return watcher
    if found:
        say(f"{found[-1].name} is {found[-1].state}, and nothing continues it: it is deleted and created again.")
        watcher.delete()
    return None


def _watcher(root: str, name: str, todo: Steps) -> Watcher:
    return Watcher(name, GcloudFolder(steps.bundle_url(root, name), todo.commands, todo.target.project), todo)


def _join(request: Request, todo: Steps, options: Options, state: str) -> int:
    """Takes over a launch that another process has started: follows and restarts it as if this one had started it."""
    with _named(todo), Leftovers(todo.commands):  # SIGTERM acts as Ctrl-C
        if state != "ACTIVE":
            todo.wait(options.wait_hours)
        hosts = todo.status()
        uploaded = todo.uploaded(steps.bundle_url(request.work.root, request.name))
        if uploaded is None:  # `create` alone uploads nothing
            uploaded = todo.upload(request, bundle.checkout(request.allow_uncommitted))
    run = Session(todo, request, options, "joined", uploaded)
    if any(_has_stopped(host) for host in hosts):
        say("the program there has stopped: it is restarted, with the current package")
        with Leftovers(todo.commands, request.keep) as leftovers:
            leftovers.add(todo.target.what, todo.target.delete())
            run.bundle = todo.upload(request, bundle.checkout(request.allow_uncommitted))
            todo.stop()
            run.prepare()
            leftovers.keep(todo.target.what)
    return run.run()


def _has_stopped(host: HostStatus) -> bool:
    """Whether a host's worker has ended before its work was done.

    >>> [_has_stopped(HostStatus("w-0", remote.ENDED, code)) for code in (0, 3, 7, 130)]
    [False, False, True, True]
    """
    finished = (Reason.DONE.exit_code, Reason.SOME_FAILED.exit_code)
    return host.state == remote.LOST or (host.state == remote.ENDED and host.exit_code not in finished)


def _create(request: Request, todo: Steps, options: Options) -> None:
    session.check_folder(request, todo)
    files = _check(request, todo, options)
    checks.confirm("", request)
    with Leftovers(todo.commands, request.keep) as leftovers:
        leftovers.add(todo.target.what, todo.target.delete())
        try:
            todo.create(request, todo.target.create(request, files.commit, options.create_flags))
        except steps.ExistsError as e:
            leftovers.keep(todo.target.what)
            e.add_note(todo.target.still_there)
            raise
    say(todo.target.still_there)


def _by_name(command: str, args: Any, request: LaunchFlags, todo: Steps, options: Options) -> int:
    """Steps on an existing launch, which knows its number of slices."""
    if command == "collect":
        if not args.dir:
            raise ConfigError("--dir is missing. Give --dir=gs://..., the folder of the sweep or the run.")
        collect.collect(names.check_bucket_path(args.dir), request.name, options.out, todo.commands)
        return 0
    if (watcher := _by_bucket(args, request, todo)) is not None and command in _BY_BUCKET:
        return _watch(command, watcher)
    if command == "delete":
        todo.delete()
        return 0
    existing = _find(todo, request)
    if command == "follow":
        return _follow(todo)
    with _named(todo):
        if command == "wait":
            todo.wait(options.wait_hours)
        elif command == "install":
            todo.install(options.python)
        elif command == "start":
            todo.start()
        elif command == "stop":
            todo.stop()
        else:
            print(f"{request.name}: {existing.state}{': ' if existing.error else ''}{existing.error}")
            if existing.state == "ACTIVE":
                print("\n".join(str(host) for host in todo.status()), flush=True)
            if args.dir:
                folder = _watcher(names.check_bucket_path(args.dir), request.name, todo).folder
                print("\n".join(folder.progress()), flush=True)
    return 0


def _by_bucket(args: Any, request: LaunchFlags, todo: Steps) -> Watcher | None:
    """The detached launch of this name: by its folder in the bucket, or else by what its queued resources say of it."""
    if todo.commands.dry_run:
        return None
    if args.dir:
        watcher = _watcher(names.check_bucket_path(args.dir), request.name, todo)
        return watcher if detached.read_state(watcher.folder) is not None else None
    found = detached.attempts(todo.resources(), request.name)
    return _watcher(found[-1].root, request.name, todo) if found and found[-1].root else None


def _watch(command: str, watcher: Watcher) -> int:
    if command == "follow":
        return watcher.follow()
    if command == "status":
        print(watcher.status(), flush=True)
    elif command == "stop":
        watcher.stop()
    else:
        watcher.delete()
    return 0


def _copy(request: Request, todo: Steps) -> None:
    files = bundle.checkout(request.allow_uncommitted)
    _find(todo, request)
    with _named(todo):
        todo.copy(todo.upload(request, files))


def _find(todo: Steps, request: LaunchFlags) -> Description:
    """The existing launch of this name; raises `ConfigError` if there is none."""
    existing = todo.describe(dry=dataclasses.replace(GONE, state="ACTIVE", slices=request.slices))
    if existing.state == "GONE":
        raise ConfigError(f"there is no {todo.target.what}. To list launches: launch/gcloud_tpu.py list")
    todo.target = dataclasses.replace(todo.target, slices=existing.slices)
    return existing


@contextlib.contextmanager
def _named(todo: Steps) -> Iterator[None]:
    """A single step that fails deletes nothing; the slices, which cost money, are named."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as e:
        e.add_note(todo.target.still_there)
        raise


def _follow(todo: Steps) -> int:
    """Only follows: nothing is restarted, collected or deleted."""
    with _named(todo):
        ended = Follower(todo).follow()
    if ended.how == logs.DELETED:
        raise TrainingError(f"{todo.target.what} was deleted. Launch again to resume from what is saved.")
    if ended.how == logs.UNSTARTED:
        raise ConfigError(
            "nothing has been started there yet: launch/gcloud_tpu.py copy, install, start; or launch again."
        )
    if ended.how in (logs.PREEMPTED, logs.LOST):
        with _named(todo):
            raise TrainingError(f"{ended.how}: launch again with the same flags to resume from the newest checkpoint.")
    say(f"the program has ended with {ended}")
    say(todo.target.still_there)
    return Reason.ERROR.exit_code if ended.exit_code is None else ended.exit_code


def _of_zone(command: str, request: LaunchFlags, todo: Steps) -> int:
    existing = todo.resources()
    for one in existing:
        print(f"{one.name}  {one.state}  {one.slices} slice(s)  commit {one.labels.get('perex-commit', '?')}")
    if command == "list" or not existing:
        say(f"{len(existing)} queued resource(s) of launches in {request.zone}")
        return 0
    if not request.yes and not request.dry_run:
        console.confirm(f"Delete all {len(existing)}?", refused="Nothing was deleted.")
    todo.delete_each(existing)
    return 0
