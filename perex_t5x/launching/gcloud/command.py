"""Runs a training or a sweep on TPU VMs: launch/gcloud_tpu.py COMMAND --flags

    launch/gcloud_tpu.py launch --sweep=sweeps/sqrt_lr.gin --dir=gs://bucket/sweeps/sqrt --topology=v5e:16x16 --spot
    launch/gcloud_tpu.py --gin_file=... --gin.MODEL_DIR=gs://bucket/run --topology=v5e-16 --dry_run

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
from perex_t5x.launching.gcloud import logs, remote, resource, session, steps
from perex_t5x.launching.gcloud.logs import Follower
from perex_t5x.launching.gcloud.remote import HostStatus
from perex_t5x.launching.gcloud.resource import GONE, Description, Resource
from perex_t5x.launching.gcloud.session import Options, Session
from perex_t5x.launching.gcloud.steps import Steps
from perex_t5x.launching.request import Request, define_launch_flags
from perex_t5x.launching.shell import Commands, Leftovers, say, with_notes

# Steps that need to know what runs; the others find an existing launch by its name.
_WITH_WORK = ("launch", "check", "create", "copy")
_BY_NAME = ("wait", "install", "start", "follow", "status", "stop", "collect", "delete")
_OF_ZONE = ("list", "delete_all")


def define_flags() -> None:
    define_launch_flags()
    flags.DEFINE_float("wait_hours", 24.0, "How many hours to wait for the slices.")
    flags.DEFINE_string("out", None, "Where `collect` puts metrics, logs and results; default launches/<name>.")
    flags.DEFINE_string("remote_python", None, "Python on the hosts; default: 3.11 or newer, installed if necessary.")
    flags.DEFINE_bool("reserved", False, "Use the project's reserved slices.")
    flags.DEFINE_bool("internal_ip", False, "Hosts without external addresses, reached from inside the network.")
    flags.DEFINE_multi_string("create_flag", [], "For `queued-resources create`, such as --create_flag=--network=n.")


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
    resource.check_create_flags(args.create_flag)
    request = Request.from_flags(args, with_work=command in _WITH_WORK)
    if request.slice is not None:
        request.slice.check_tpu_api()
    request = request.in_bucket().located(commands)
    target = Resource(request.name, request.project, request.zone, request.slices, args.internal_ip)
    out = args.out or os.path.join("launches", request.name)
    options = Options(out, args.wait_hours, args.remote_python, tuple(args.create_flag))
    todo = Steps(target, commands)
    if command == "launch":
        return _launch(request, todo, options)
    if command in _OF_ZONE:
        return _of_zone(command, request, todo)
    if command in _BY_NAME:
        return _by_name(command, args, request, todo, options)
    if command == "check":
        _check(request, todo)
    elif command == "create":
        _create(request, todo, options)
    else:
        _copy(request, todo)
    return 0


def _check(request: Request, todo: Steps) -> bundle.Checkout:
    """Everything that can be checked before anything is created."""
    files = bundle.checkout(request.allow_uncommitted)
    commands, checklist = todo.commands, checks.Checklist()
    checks.bucket(request, commands, checklist=checklist)
    checks.zone_has(request, commands, checklist)
    checks.quota(request, commands, checklist)
    todo.check_secrets(request.secrets)
    checks.check_gin(request, commands, checklist)
    cost = checks.preflight(request, commands, checklist)
    say(checks.summary(request, cost, files.commit, f"{request.project}, {request.zone}", checklist))
    return files


def _launch(request: Request, todo: Steps, options: Options) -> int:
    if (existing := session.find_existing(request, todo)) != GONE:
        return _join(request, todo, options, existing.state)
    files = _check(request, todo)
    checks.confirm("", request)
    # The checks take minutes, in which another launch of this name may have started: its hosts download its bundle.
    if todo.describe() != GONE and (existing := session.find_existing(request, todo)) != GONE:
        return _join(request, todo, options, existing.state)
    run = Session(todo, request, options, files.commit)
    try:
        with Leftovers(todo.commands, request.keep) as leftovers:
            run.bundle = todo.upload(request, files)
            run.make(leftovers)
    except steps.ExistsError:
        existing = session.find_existing(request, todo)
        if existing == GONE:
            raise
        return _join(request, todo, options, existing.state)
    return run.run()


def _join(request: Request, todo: Steps, options: Options, state: str) -> int:
    """Takes over a launch that another process has started: follows and restarts it as if this one had started it."""
    run = Session(todo, request, options, "joined")
    with _named(todo), Leftovers(todo.commands):  # SIGTERM acts as Ctrl-C
        if state != "ACTIVE":
            todo.wait(options.wait_hours)
        hosts = todo.status()
        run.bundle = todo.uploaded(steps.bundle_url(request.work.root, request.name))
        if run.bundle is None:  # `create` alone uploads nothing
            run.bundle = todo.upload(request, bundle.checkout(request.allow_uncommitted))
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
    files = _check(request, todo)
    checks.confirm("", request)
    with Leftovers(todo.commands, request.keep) as leftovers:
        leftovers.add(todo.target.what, todo.target.delete())
        try:
            todo.create(request, files.commit, options.create_flags)
        except steps.ExistsError as e:
            leftovers.keep(todo.target.what)
            e.add_note(todo.target.still_there)
            raise
    say(todo.target.still_there)


def _by_name(command: str, args: Any, request: Request, todo: Steps, options: Options) -> int:
    """Steps on an existing launch, which knows its number of slices."""
    if command == "collect":
        if not args.dir:
            raise ConfigError("--dir is missing. Give --dir=gs://..., the folder of the sweep or the run.")
        collect.collect(names.check_bucket_path(args.dir), request.name, options.out, todo.commands)
        return 0
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
    return 0


def _copy(request: Request, todo: Steps) -> None:
    files = bundle.checkout(request.allow_uncommitted)
    _find(todo, request)
    with _named(todo):
        todo.copy(todo.upload(request, files))


def _find(todo: Steps, request: Request) -> Description:
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
    return ended.exit_code


def _of_zone(command: str, request: Request, todo: Steps) -> int:
    existing = todo.list()
    for one in existing:
        print(f"{one.name}  {one.state}  {one.slices} slice(s)  commit {one.labels.get('perex-commit', '?')}")
    if command == "list" or not existing:
        say(f"{len(existing)} queued resource(s) of launches in {request.zone}")
        return 0
    if not request.yes and not request.dry_run:
        console.confirm(f"Delete all {len(existing)}?", refused="Nothing was deleted.")
    left = []
    for one in existing:
        target = dataclasses.replace(todo.target, name=one.name)
        try:
            Steps(target, todo.commands).delete()
        except TrainingError as e:
            say(str(e))
            left.append(target.still_there)
    if left:
        raise with_notes(TrainingError(f"{len(left)} of {len(existing)} were not deleted."), *left)
    return 0
