"""What `python -m perex_t5x.chaos` does to runs: signals at moments that are seen in the run's folder, and damaged folders.

A fault of a process gets a `Run` that has just been started; a fault of a folder gets that of a run that has ended. Each
returns in a few words what it did. Moments are watched for, never guessed from a clock: a fault whose moment did not come
before the run's end raises `MissedError`: it is tried again, and in the end its trial does not count as good.
"""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perex_t5x import checkpoint_files, checksums
from perex_t5x.chaos import damage, storage
from perex_t5x.chaos.runs import (
    CHECKPOINTS,
    LOGGED,
    FaultError,
    MissedError,
    Run,
    SkippedError,
    obeys_permissions,
    send,
)
from perex_t5x.errors import Reason

_PAUSE = 1.0  # seconds that a stopped process stands still
_BYTES = 64 * 1024  # the largest file while writing fails: metrics fit, arrays do not


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
      name: as in --faults and in the table.
      act: does it, to a `Run` or to a folder (`on_folder`), and says in a few words what it did.
      ends: how a run may end that it was done to.
      settings: those in which it makes sense: see `chaos.runs.SETTINGS`.
      on_folder: whether it is done to the folder of a run that has ended.
      loses_lines: it destroys metrics that nothing else holds: the lines before the checkpoint may be missing afterwards.
      needs_disk: the run's folder is on a small disk of its own.
      undo: makes the storage well again, once the run has ended.
    """

    name: str
    act: Callable[[Any, random.Random], str]
    ends: frozenset[Reason] = frozenset()
    settings: Sequence[str] = ("cached", "streaming", "other_mesh", "streaming_other_mesh")
    on_folder: bool = False
    loses_lines: bool = False
    needs_disk: bool = False
    undo: Callable[[Run], None] = lambda run: None


# --- moments ----------------------------------------------------------------------------------------------------------


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl so far; the last one may be half-written."""
    found = []
    try:
        text = (folder / "metrics.jsonl").read_text()
    except OSError:
        return []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def _is_starting(folder: Path) -> bool:
    return (folder / ".writer").exists()


def _is_compiling(folder: Path) -> bool:
    return (folder / "model-info.txt").exists()  # written just before; nothing else tells


def _is_saving(folder: Path, step: int) -> bool:
    return any(folder.glob(f"checkpoint_{step}.orbax-checkpoint-tmp*"))


def _is_committing(folder: Path, step: int) -> bool:
    return any(folder.glob(f"checkpoint_{step}.orbax-checkpoint-tmp*/{checksums.FILE}"))


def _is_evaluating(folder: Path, step: int) -> bool:
    """The checkpoint is committed, and its evaluation, which follows on saving, is not written."""
    if not checkpoint_files.is_whole(str(folder / f"checkpoint_{step}")):
        return False
    return not any(row["step"] == step and row["name"].startswith("training_eval/") for row in lines(folder))


def _at_step(step: int) -> Callable[[Path], bool]:
    return lambda folder: any(row["step"] >= step for row in lines(folder))


def _wait_for_some_step(run: Run, rng: random.Random) -> str:
    if run.place.bucket is not None:  # there lines are stored with checkpoints
        return storage.wait_for_checkpoint(run, rng)
    step = rng.choice(LOGGED[:-2])  # some steps are left
    run.wait_for(f"step {step}", _at_step(step))
    return f"step {step}"


# --- faults of processes ----------------------------------------------------------------------------------------------


def _kill(run: Run, rng: random.Random) -> str:
    on_disk = ("start-up", "compilation") if run.place.bucket is None else ()
    moment = rng.choice(("the first second", *on_disk, "training"))
    if moment == "start-up":
        run.wait_for(moment, _is_starting)
    elif moment == "compilation":
        run.wait_for(moment, _is_compiling)
    elif moment == "training":
        moment = _wait_for_some_step(run, rng)
    time.sleep(rng.uniform(0, 1.0 if moment == "the first second" else 0.3))
    if run.child.poll() is not None:
        raise MissedError("no trial: the run ended first")
    run.kill()
    return f"after {moment}"


def _at(what: str, is_now: Callable[[Path], bool], do: Callable[[Run], None]) -> Callable[[Run, random.Random], str]:
    def act(run: Run, rng: random.Random) -> str:
        run.wait_for(what, is_now)
        do(run)
        return f"in {what}"

    return act


def _at_checkpoint(
    what: str, is_now: Callable[[Path, int], bool], do: Callable[[Run], None]
) -> Callable[[Run, random.Random], str]:
    """At one of the run's checkpoints."""

    def act(run: Run, rng: random.Random) -> str:
        step = rng.choice(CHECKPOINTS)
        return _at(f"{what} of step {step}", lambda folder: is_now(folder, step), do)(run, rng)

    return act


def _ask(run: Run) -> None:
    run.child.send_signal(signal.SIGTERM)


def _kill_one(run: Run, rng: random.Random) -> str:
    moment = _wait_for_some_step(run, rng)
    workers = sorted(run.workers())
    if len(workers) < 2:
        raise MissedError(f"no trial: {len(workers)} process(es) were left after {moment}")
    number = rng.randrange(len(workers))
    send(workers[number], signal.SIGKILL)
    return f"{number + 1} of {len(workers)} after {moment}"


def _terminate(run: Run, rng: random.Random) -> str:
    moment = _wait_for_some_step(run, rng)
    _ask(run)
    return f"after {moment}"


def _interrupt_twice(run: Run, rng: random.Random) -> str:
    moment = _wait_for_some_step(run, rng)
    run.child.send_signal(signal.SIGINT)
    time.sleep(rng.uniform(0, 0.1))
    run.child.send_signal(signal.SIGINT)
    return f"after {moment}"


def _suspend(run: Run, rng: random.Random) -> str:
    moment = _wait_for_some_step(run, rng)
    workers = run.workers()
    for process in workers:
        send(process, signal.SIGSTOP)
    time.sleep(_PAUSE)
    for process in workers:
        send(process, signal.SIGCONT)
    return f"{_PAUSE:g} s after {moment}"


def _second_writer(run: Run, rng: random.Random) -> str:
    """The first run stands still meanwhile, so that it is there for certain."""
    run.wait_for("the first step", _at_step(3))
    workers = run.workers()
    for process in workers:
        send(process, signal.SIGSTOP)
    try:
        code = run.start().end(seconds=120)
    finally:
        for process in workers:
            send(process, signal.SIGCONT)
    if code != Reason.BUSY.exit_code:
        raise FaultError(f"the second run ended with {code}, not with {Reason.BUSY.exit_code} (busy)")
    return "the second was refused"


def _failing_writes(run: Run, rng: random.Random) -> str:
    """No file may grow beyond a limit that an array exceeds: write(2) fails, as on a full disk, with EFBIG."""
    run.wait_for("start-up", _is_starting)
    for process in run.workers():
        resource.prlimit(process, resource.RLIMIT_FSIZE, (_BYTES, _BYTES))
    return f"files of at most {_BYTES // 1024} KiB"


def _read_only(run: Run, rng: random.Random) -> str:
    if not obeys_permissions():
        raise SkippedError("permissions do not bind the superuser, and there is no setpriv(1)")
    moment = _wait_for_some_step(run, rng)
    run.folder.chmod(0o500)
    return f"after {moment}"


def _full_disk(run: Run, rng: random.Random) -> str:
    moment = _wait_for_some_step(run, rng)
    storage.fill(run.folder.parent)
    return f"after {moment}"


def _remove_folder(run: Run, rng: random.Random) -> str:
    moment = _wait_for_some_step(run, rng)
    # One rename, as a tool that cleans up does it first: nothing is half there.
    aside = run.folder.with_name(f"{run.folder.name}.removed")
    run.folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
    return f"after {moment}"


# --- the table --------------------------------------------------------------------------------------------------------

_KILLED, _ASKED, _DONE = (
    frozenset(ends) for ends in ({Reason.KILLED}, {Reason.INTERRUPTED, Reason.DONE}, {Reason.DONE})
)
_FAILED = frozenset({Reason.ERROR, Reason.NO_SPACE, Reason.PEER_LOST, Reason.KILLED, Reason.UNREACHABLE})
_REFUSED = frozenset({Reason.CONFIGURATION})  # somebody has to grant a permission: no restart mends that
_ONE = ("cached", "streaming", "other_mesh", "streaming_other_mesh")  # process
_SWEEPS = ("sweep_together", "sweep_processes")
_TWO = ("two_processes", "two_processes_streaming")
_ALL = (*_ONE, *_TWO, *_SWEEPS)
_RUN_FILES = {
    "metrics": "metrics.jsonl",
    "line_checksums": "metrics.crc32c",
    "config": "config.gin",
    "status": "status.json",
}
_DAMAGE = [
    *(
        Fault(f"{verb}_{kind}", damage.in_checkpoint(how, kind), on_folder=True)
        for kind in ("arrays", "manifest", "metadata", "run_json", "checksums")
        for verb, how in damage.WAYS.items()
    ),
    Fault("flip_iterator", damage.in_checkpoint(damage.flip, "iterator"), settings=("streaming",), on_folder=True),
    Fault("flip_all_checkpoints", damage.in_all_checkpoints, on_folder=True),
    Fault("empty_checkpoint", damage.empty_checkpoint, on_folder=True),
    *(
        Fault(
            f"{verb}_{kind}",
            damage.in_run(how, name),
            settings=("cached", "streaming"),
            on_folder=True,
            loses_lines=kind in ("metrics", "line_checksums"),
        )
        for kind, name in _RUN_FILES.items()
        for verb, how in damage.WAYS.items()
    ),
    Fault("torn_metrics", damage.torn_line, settings=("cached", "streaming"), on_folder=True),
]


def _on_bucket(name: str, act: Callable[[Run, random.Random], str], ends: frozenset[Reason]) -> Fault:
    return Fault(name, act, ends, ("bucket",), undo=lambda run: run.place.bucket.faults())


_BUSY = {"action": "answer", "code": 503, "every": 7}
_TORN = [
    {"action": "tear", "every": 4, "times": 4},
    {"action": "lose_answer", "every": 5, "times": 3, "operation": "insert|start|delete"},
    {"action": "hang", "seconds": 30, "every": 40, "times": 2},
]
_STORAGE = [
    Fault("failing_writes", _failing_writes, _FAILED),
    Fault("full_disk", _full_disk, _FAILED, needs_disk=True, undo=lambda run: storage.empty(run.folder.parent)),
    Fault("read_only", _read_only, _FAILED, undo=lambda run: run.folder.chmod(0o700)),
    Fault("folder_removed", _remove_folder, _FAILED),
    _on_bucket("storage_busy", storage.failing("429 and 503", writes_per_second=1, rules=[_BUSY]), _DONE),
    _on_bucket("storage_torn", storage.failing("connections that end", rules=_TORN), _DONE),
    _on_bucket("storage_slow", storage.failing("slow", latency=0.03, bytes_per_second=300_000), _DONE),
    _on_bucket("storage_denied", storage.failing_later("403", deny=["storage.objects.create"]), _REFUSED),
    _on_bucket("storage_outage", storage.failing_later("503", rules=[{"action": "answer", "code": 503}]), _FAILED),
]
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", _kill, _KILLED, (*_ALL, "bucket")),
        Fault("kill_one", _kill_one, _FAILED | {Reason.SOME_FAILED}, (*_TWO, "sweep_processes")),
        Fault("kill_in_startup", _at("start-up", _is_starting, Run.kill), _KILLED, _ALL),
        Fault("kill_in_compile", _at("compilation", _is_compiling, Run.kill), _KILLED, _ALL),
        Fault("kill_in_save", _at_checkpoint("the save", _is_saving, Run.kill), _KILLED, _ALL),
        Fault("kill_in_commit", _at_checkpoint("the commit", _is_committing, Run.kill), _KILLED, _ALL),
        Fault("kill_in_eval", _at_checkpoint("the evaluation", _is_evaluating, Run.kill), _KILLED, _ALL),
        Fault("sigterm", _terminate, _ASKED, (*_ALL, "bucket")),
        Fault("sigterm_in_startup", _at("start-up", _is_starting, _ask), _ASKED, _ALL),
        Fault("sigterm_in_eval", _at_checkpoint("the evaluation", _is_evaluating, _ask), _ASKED, _ALL),
        Fault("sigint_twice", _interrupt_twice, _ASKED | _KILLED, _ALL),
        Fault("stop_and_continue", _suspend, _DONE, _ALL),
        Fault("second_writer", _second_writer, _DONE, ("cached", "streaming")),
        *_STORAGE,
        *_DAMAGE,
    )
}
