"""What `python -m perex_t5x.chaos` does to runs: signals at moments that are seen in the run's folder, and damaged folders.

A fault of a process gets a `Run` that has just been started; a fault of a folder gets that of a run that has ended. Each
returns in a few words what it did. Moments are watched for, never guessed from a clock: a fault whose moment did not come
before the run's end raises `MissedError`: it is tried again, and in the end its trial does not count as good.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perex_t5x import checkpoint_files, checksums
from perex_t5x.chaos_runs import CHECKPOINTS, LOGGED, FaultError, MissedError, Run, kill, send
from perex_t5x.errors import Reason

_PAUSE = 1.0  # seconds that a stopped process stands still
_BYTES = 64 * 1024  # the largest file while writing fails: metrics fit, arrays do not


class SkippedError(Exception):
    """This machine cannot have the fault; the message says why."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
      name: as in --faults and in the table.
      act: does it, to a `Run` or to a folder (`on_folder`), and says in a few words what it did.
      ends: how a run may end that it was done to.
      settings: those in which it makes sense: see `chaos_runs.SETTINGS`.
      on_folder: whether it is done to the folder of a run that has ended.
      loses_lines: it destroys metrics that nothing else holds: the lines before the checkpoint may be missing afterwards.
    """

    name: str
    act: Callable[[Any, random.Random], str]
    ends: frozenset[Reason] = frozenset()
    settings: Sequence[str] = ("cached", "streaming", "other_mesh")
    on_folder: bool = False
    loses_lines: bool = False


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
    step = rng.choice(LOGGED[:-2])  # some steps are left
    run.wait_for(f"step {step}", _at_step(step))
    return f"step {step}"


# --- faults of processes ----------------------------------------------------------------------------------------------


def _kill(run: Run, rng: random.Random) -> str:
    moment = rng.choice(("the first second", "start-up", "compilation", "training"))
    if moment == "start-up":
        run.wait_for(moment, _is_starting)
    elif moment == "compilation":
        run.wait_for(moment, _is_compiling)
    elif moment == "training":
        moment = _wait_for_some_step(run, rng)
    time.sleep(rng.uniform(0, 1.0 if moment == "the first second" else 0.3))
    if run.child.poll() is not None:
        raise MissedError("no trial: the run ended first")
    kill(run.mark)
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


def _kill_all(run: Run) -> None:
    kill(run.mark)


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
    if os.geteuid() == 0:
        raise SkippedError("permissions do not bind the superuser")
    moment = _wait_for_some_step(run, rng)
    run.folder.chmod(0o500)
    run.end(seconds=120)
    run.folder.chmod(0o700)
    return f"after {moment}"


def _remove_folder(run: Run, rng: random.Random) -> str:
    moment = _wait_for_some_step(run, rng)
    # One rename, as a tool that cleans up does it first: nothing is half there.
    aside = run.folder.with_name(f"{run.folder.name}.removed")
    run.folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
    return f"after {moment}"


# --- faults of folders ------------------------------------------------------------------------------------------------

_FILES = {
    "arrays": "state/**/d/*",
    "manifest": "state/**/manifest.ocdbt",
    "metadata": "**/_*METADATA",
    "run_json": "run/metadata",
    "checksums": "checksums.json",
    "iterator": "data/**/*",
}


def _truncate(path: Path, rng: random.Random) -> str:
    size = rng.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"to {size} bytes"


def _delete(path: Path, rng: random.Random) -> str:
    path.unlink()
    return ""


def _flip(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    where, bit = rng.randrange(len(content)), rng.randrange(8)
    content[where] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {where}"


_DAMAGE = {"truncate": _truncate, "delete": _delete, "flip": _flip}


def _in_checkpoint(damage: Callable[[Path, random.Random], str], kind: str) -> Callable[[Path, random.Random], str]:
    """Damages a file of the newest checkpoint."""

    def act(folder: Path, rng: random.Random) -> str:
        checkpoint = Path(checkpoint_files.newest(str(folder)))
        candidates = sorted(p for p in checkpoint.glob(_FILES[kind]) if p.is_file() and p.stat().st_size)
        path = rng.choice(candidates)
        return f"{path.relative_to(folder)} {damage(path, rng)}".strip()

    return act


def _in_run(damage: Callable[[Path, random.Random], str], name: str) -> Callable[[Path, random.Random], str]:
    """Damages a file of a run that has steps left to make: it lacks its last checkpoint."""

    def act(folder: Path, rng: random.Random) -> str:
        shutil.rmtree(checkpoint_files.newest(str(folder)))
        return f"{name} {damage(folder / name, rng)}".strip()

    return act


def _torn_line(folder: Path, rng: random.Random) -> str:
    """The last line of the metrics is half there, as after a crash of the machine."""
    shutil.rmtree(checkpoint_files.newest(str(folder)))
    path = folder / "metrics.jsonl"
    content = path.read_bytes()
    start = content.rstrip(b"\n").rindex(b"\n") + 1
    os.truncate(path, rng.randrange(start + 1, len(content)))
    return "metrics.jsonl"


def _empty_checkpoint(folder: Path, rng: random.Random) -> str:
    path = checkpoint_files.newest(str(folder))
    shutil.rmtree(path)
    os.mkdir(path)
    return os.path.basename(path)


def _damage_all(folder: Path, rng: random.Random) -> str:
    """One bit in every checkpoint: the run starts from the beginning."""
    for path in checkpoint_files.whole(str(folder)):
        arrays = [p for p in Path(path).glob(_FILES["arrays"]) if p.is_file()]
        _flip(max(arrays, key=os.path.getsize), rng)
    return "a bit in each"


# --- the table --------------------------------------------------------------------------------------------------------

_KILLED, _ASKED = frozenset({Reason.KILLED}), frozenset({Reason.INTERRUPTED, Reason.DONE})
_FAILED = frozenset({Reason.ERROR, Reason.NO_SPACE, Reason.PEER_LOST, Reason.KILLED})
_BOTH = ("cached", "streaming", "other_mesh", "two_processes")
_CHECKPOINT = [
    Fault(f"{verb}_{kind}", _in_checkpoint(damage, kind), on_folder=True)
    for kind in ("arrays", "manifest", "metadata", "run_json", "checksums")
    for verb, damage in _DAMAGE.items()
]
_RUN = [
    Fault(
        f"{verb}_{name.split('.')[0]}",
        _in_run(damage, name),
        on_folder=True,
        settings=("cached", "streaming"),
        loses_lines=name == "metrics.jsonl",
    )
    for name in ("metrics.jsonl", "config.gin", "status.json")
    for verb, damage in _DAMAGE.items()
]
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", _kill, _KILLED, _BOTH),
        Fault("kill_one", _kill_one, _FAILED, ("two_processes",)),
        Fault("kill_in_startup", _at("start-up", _is_starting, _kill_all), _KILLED),
        Fault("kill_in_compile", _at("compilation", _is_compiling, _kill_all), _KILLED),
        Fault("kill_in_save", _at_checkpoint("the save", _is_saving, _kill_all), _KILLED, _BOTH),
        Fault("kill_in_commit", _at_checkpoint("the commit", _is_committing, _kill_all), _KILLED),
        Fault("kill_in_eval", _at_checkpoint("the evaluation", _is_evaluating, _kill_all), _KILLED, _BOTH),
        Fault("sigterm", _terminate, _ASKED, _BOTH),
        Fault("sigterm_in_startup", _at("start-up", _is_starting, _ask), _ASKED),
        Fault("sigterm_in_eval", _at_checkpoint("the evaluation", _is_evaluating, _ask), _ASKED),
        Fault("sigint_twice", _interrupt_twice, _ASKED | _KILLED),
        Fault("stop_and_continue", _suspend, frozenset({Reason.DONE}), ("cached", "streaming", "two_processes")),
        Fault("second_writer", _second_writer, frozenset({Reason.DONE}), ("cached", "streaming")),
        Fault("failing_writes", _failing_writes, _FAILED),
        Fault("read_only", _read_only, _FAILED),
        Fault("folder_removed", _remove_folder, _FAILED),
        *_CHECKPOINT,
        Fault("flip_iterator", _in_checkpoint(_flip, "iterator"), on_folder=True, settings=("streaming",)),
        Fault("flip_all_checkpoints", _damage_all, on_folder=True),
        Fault("empty_checkpoint", _empty_checkpoint, on_folder=True),
        *_RUN,
        Fault("torn_metrics", _torn_line, on_folder=True, settings=("cached", "streaming")),
    )
}
