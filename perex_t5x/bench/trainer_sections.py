"""The trainer beside a bare loop and T5X, and how long commands take to start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from perex_t5x.bench.children import Child, ChildFailedError
from perex_t5x.bench.engine_sections import Options
from perex_t5x.bench.turns import in_turns

# A step takes more than half a second on two cores.
_BATCH_SIZE, _LENGTH = 192, 128
_HELP, _DRY_RUN, _FIRST_STEP = "--help", "dry run", "quickstart, first step"
_NOTHING, _JAX, _LIBRARIES = "python, nothing imported", "import jax", "import jax, flax, orbax, tensorflow, seqio"


def overhead(options: Options) -> Iterator[dict[str, Any]]:
    """The training loop and the bare one in one process, with the same compiled step's work: the framework's own cost."""
    batch_size, steps = (8, 2) if options.quick else (_BATCH_SIZE, 12)
    bindings = (f"BATCH_SIZE={batch_size}", f"STEPS={steps}", f"ROUNDS={options.rounds}")
    command = [sys.executable, "-m", "perex_t5x.bench", "--gin_file=models/tiny.gin", "--gin_file=runs/bench.gin"]
    command += [f"--gin.{binding}" for binding in bindings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"section": "overhead", "dimensions": {"batch": batch_size, "length": _LENGTH}}
    if done.returncode:
        yield row | {"peer": "perex_t5x", "problem": (done.stderr.strip().splitlines() or ["no message"])[-1]}
        return
    result = json.loads(done.stdout.splitlines()[-1])
    for peer, name in (("bare JAX loop", "bare_step_seconds_all"), ("perex_t5x", "step_seconds_all")):
        yield row | {"peer": peer, "seconds": result[name]}


def processes(options: Options) -> Iterator[dict[str, Any]]:
    """Each loop in processes of its own, which take turns: time to the first step, step time, peak memory."""
    batch_size, length, steps = (8, 32, 4) if options.quick else (_BATCH_SIZE, _LENGTH, 10)
    sizes = tuple(map(str, (batch_size, length, steps)))
    row = {"section": "processes", "dimensions": {"batch": batch_size, "length": length, "steps": steps}}
    kinds = {"bare JAX loop": "bare", "perex_t5x": "perex_t5x", "T5X": "t5x"}
    rows: dict[str, dict[str, Any]] = {peer: {**row, "peer": peer} for peer in kinds}

    def run(peer: str) -> float:
        if "problem" in rows[peer]:
            return 0.0
        options.note(peer)
        python, env = sys.executable, {}
        if peer == "T5X":  # in its own environment, this package's tasks are found here
            python, env = options.t5x_python, {"PYTHONPATH": os.path.dirname(_package())}
        try:
            with Child(python, "loop_child.py", (kinds[peer], *sizes), env) as child:
                result = child.greeting
        except ChildFailedError as e:
            absent = peer == "T5X" and "No module named 't5x'" in str(e)
            rows[peer]["problem"] = "not installed" if absent else str(e)
            return 0.0
        for name in ("first_step_seconds", "peak_bytes"):
            rows[peer].setdefault(name, []).append(result[name])
        rows[peer].setdefault("seconds", []).append(result["step_seconds"])
        rows[peer]["versions"] = result["versions"]
        return 0.0

    in_turns({peer: lambda peer=peer: run(peer) for peer in kinds}, min(options.rounds, 3), options.note)
    yield from rows.values()


def _package() -> str:
    import perex_t5x

    return os.path.dirname(os.path.abspath(perex_t5x.__file__))


def startup(options: Options) -> Iterator[dict[str, Any]]:
    """Seconds from the start of a process to its end, or to its first training step, beside what its imports take."""
    module = ["-m", "perex_t5x.train"]
    dry = [*module, "--gin_file=runs/quickstart.gin", "--gin.MODEL_DIR='run'", "--dry_run"]
    libraries = "import jax, flax, orbax.checkpoint, tensorflow, seqio; jax.devices()"
    measures: dict[str, Callable[[], float]] = {
        _NOTHING: lambda: _process_seconds(["-c", "pass"]),
        _HELP: lambda: _process_seconds([*module, "--help"]),
        _JAX: lambda: _process_seconds(["-c", "import jax; jax.devices()"]),
        _LIBRARIES: lambda: _process_seconds(["-c", libraries]),
        _DRY_RUN: lambda: _process_seconds(dry),
        _FIRST_STEP: _first_step_seconds,
    }
    in_turns({name: measures[name] for name in (_NOTHING, _LIBRARIES)}, 1)  # the files are in memory then
    for name, seconds in in_turns(measures, min(options.rounds, 3), options.note).items():
        yield {"section": "startup", "peer": name, "seconds": seconds}


# What a start is compared with.
BASELINES = {_HELP: _NOTHING, _DRY_RUN: _LIBRARIES, _FIRST_STEP: _LIBRARIES}


def _process_seconds(arguments: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p) or "", "TF_CPP_MIN_LOG_LEVEL": "2"}
        begun = time.monotonic()
        subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, check=True)
        return time.monotonic() - begun


def _first_step_seconds() -> float:
    with Child(sys.executable, "loop_child.py", ("quickstart", "0", "0", "1")) as child:
        return child.greeting["first_step_seconds"]
