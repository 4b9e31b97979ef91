"""The engine beside its peers: statistics of one model, and how their cost grows with batch, length and depth."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from perex_t5x.bench import programs
from perex_t5x.bench.children import Child, ChildFailedError
from perex_t5x.bench.engine import MODELS, Size
from perex_t5x.bench.programs import CLIPPED, JAX_PRIVACY, MICRO_GRAD, MOMENTS, OURS, PLAIN, STATISTICS, VMAP
from perex_t5x.bench.turns import in_turns, working_bytes
from perex_t5x.errors import ConfigError
from perex_t5x.extras import is_installed
from perex_t5x.train import timed

JAX, TORCH = "JAX", "PyTorch"
OPACUS, GHOST, BACKPACK = "Opacus", "Opacus, ghost clipping", "BackPACK"
# Statistic -> the peers that can compute it, by framework.
PEERS = {
    JAX: {s: (OURS, VMAP, MICRO_GRAD) + ((JAX_PRIVACY,) if s != MOMENTS else ()) for s in STATISTICS},
    TORCH: {s: (OPACUS, BACKPACK) + ((GHOST,) if s != MOMENTS else ()) for s in STATISTICS},
}
# Of the growth's: one statistic each, what it is made for.
GROWING = {
    JAX: {MOMENTS: (OURS, VMAP, MICRO_GRAD), CLIPPED: (OURS, JAX_PRIVACY)},
    TORCH: {MOMENTS: (BACKPACK,), CLIPPED: (GHOST,)},
}
_TOLERANCE = 5e-3  # of a digest: clipping divides by norm + 1e-6 in some
_SMALLEST = Size(width=64, mlp=128, layers=2, vocabulary=128, length=16, examples=4)
_OF_TABLE = Size(width=256, mlp=1024, layers=4, vocabulary=4096, length=128, examples=8)
_OF_GROWTH = Size(width=128, mlp=512, layers=2, vocabulary=1024, length=64, examples=8)
AXES = {"batch": (8, 16, 32, 64, 128), "length": (64, 128, 256, 512, 1024), "depth": (2, 4, 8, 16, 32)}
_FIELD = {"batch": "examples", "length": "length", "depth": "layers"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What all sections share.

    Attributes:
      rounds: in which everything takes turns.
      quick: the smallest sizes, to try the command.
      torch_python, t5x_python: the interpreters in whose environments these are.
      note: called with a line of progress.
    """

    rounds: int
    quick: bool
    torch_python: str
    t5x_python: str
    note: Callable[[str], None]


def table(name: str, options: Options) -> Iterator[dict[str, Any]]:
    """Rows of all statistics of one model: 'mlp', 'decoder' (unrolled), or 'scanned' (rematerialised; JAX alone)."""
    size = _SMALLEST if options.quick else dataclasses.replace(_OF_TABLE, examples=16 if name == "mlp" else 8)
    torch_model = {"mlp": "mlp", "decoder": "decoder"}.get(name)
    model = {"decoder": "unrolled"}.get(name, name)
    yield from _measured({"section": name}, model, size, PEERS, (None, 4, 1), torch_model, options)


def growth(axis: str, options: Options) -> Iterator[dict[str, Any]]:
    """Rows of some statistics of the scanned decoder (unrolled in PyTorch), at all points of one axis."""
    for value in AXES[axis][: 2 if options.quick else None]:
        size = _SMALLEST if options.quick else _OF_GROWTH
        size = dataclasses.replace(size, **{_FIELD[axis]: value})
        options.note(f"{axis} {value}")
        head = {"section": axis, "value": value}
        yield from _measured(head, "scanned", size, GROWING, (None, 1), "decoder", options)
        jax.clear_caches()


def _measured(
    head: Mapping[str, Any],
    model: str,
    size: Size,
    peers: Mapping[str, Mapping[str, Sequence[str]]],
    sizes: Sequence[int | None],
    torch_model: str | None,
    options: Options,
) -> Iterator[dict[str, Any]]:
    loss, params, batch = MODELS[model](size)
    head = {**head, "dimensions": dataclasses.asdict(size) | {"examples": batch.shape[0]}}
    rows = {}
    options.note("compiling")
    wanted = _wanted(loss, peers[JAX], [s for s in sizes if s is None or batch.shape[0] % s == 0])
    compiled = _compiled({key: make for key, make in wanted.items() if make is not None}, params, batch)
    for key in wanted:
        peer, statistic, micro = key
        row = {**head, "framework": JAX, "peer": peer, "statistic": statistic, "size": micro}
        if wanted[key] is None:
            rows[key] = row | {"problem": "not installed"}
            continue
        value = None if statistic == PLAIN else programs.digest(statistic, compiled[key](params, batch))
        rows[key] = row | {"bytes": working_bytes(compiled[key]), "digest": value}

    def seconds(key: Any) -> float:
        return timed(lambda: jax.block_until_ready(compiled[key](params, batch)))[1]

    measures: dict[Any, Callable[[], float]] = {key: functools.partial(seconds, key) for key in compiled}
    with _torch(torch_model, params, batch, options) as child:
        if torch_model is not None:
            options.note("PyTorch's, once to compare")
            for key, row in _torch_rows(child, peers[TORCH]).items():
                rows[key] = {**head, "framework": TORCH, **row}
                if "problem" not in row:
                    measures[key] = functools.partial(_asked, child, *key[:2])
        expected = {statistic: rows[OURS, statistic, None]["digest"] for statistic in peers[JAX]}
        for key, row in rows.items():
            if (value := row.get("digest")) is None or math.isclose(value, expected[key[1]], rel_tol=_TOLERANCE):
                continue
            row["problem"] = f"its result is another: {value:.6g}, not {expected[key[1]]:.6g}"
            del measures[key]
        options.note(f"{len(measures)} programs, once to warm up")
        in_turns(measures, 1)
        times = in_turns(measures, options.rounds, options.note)
    for key, row in rows.items():
        yield row | ({"seconds": times[key]} if key in times else {})


def _wanted(
    loss: Any, peers: Mapping[str, Sequence[str]], sizes: Sequence[int | None]
) -> dict[tuple[str, str, int | None], Any]:
    """(peer, statistic, microbatch size) -> program; None for one that is not installed."""
    found: dict[tuple[str, str, int | None], Any] = {(PLAIN, PLAIN, s): programs.plain(loss, s) for s in sizes}
    for statistic, names in peers.items():
        for peer, size in itertools.product(names, sizes):
            if peer == JAX_PRIVACY and not is_installed("jax_privacy"):
                found[peer, statistic, None] = None
            elif (program := programs.of_library(peer, statistic, loss, size)) is not None:
                found[peer, statistic, size] = program
    return found


def _compiled(wanted: Mapping[Any, Any], params: Any, batch: Any) -> dict[Any, Any]:
    lowered = {key: jax.jit(program).lower(params, batch) for key, program in wanted.items()}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True))


# --- PyTorch ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _torch(kind: str | None, params: Any, batch: Any, options: Options) -> Iterator[Child | str]:
    """PyTorch's process with these parameters; or why there is none."""
    if kind is None:
        yield "not compared"
        return
    threads = os.cpu_count() or 1
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        leaves = jax.tree_util.tree_leaves_with_path(params)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        for i, (_, leaf) in enumerate(leaves):
            np.save(folder / f"{i}.npy", leaf)
        np.save(folder / "batch.npy", batch)
        (folder / "names.json").write_text(json.dumps(names))
        # Idle threads sleep, so that they take nothing from JAX's turn.
        env = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "OMP_NUM_THREADS": str(threads)}
        child: Child | str
        try:
            child = stack.enter_context(
                Child(options.torch_python, "torch_child.py", (kind, str(folder), str(threads)), env)
            )
        except ChildFailedError as e:
            child = "not installed" if "No module named 'torch'" in str(e) else str(e)
        yield child


def _torch_rows(child: Child | str, peers: Mapping[str, Sequence[str]]) -> dict[Any, dict[str, Any]]:
    """A row for each program, checked once; with a problem where it is not there or does not work."""
    rows = {}
    for peer, statistic in [(TORCH, PLAIN), *((p, s) for s, names in peers.items() for p in names)]:
        row: dict[str, Any] = {"peer": PLAIN if statistic == PLAIN else peer, "statistic": statistic, "size": None}
        rows[peer, statistic, TORCH] = row
        if isinstance(child, str):
            row["problem"] = child
        elif peer in child.greeting["problems"]:
            row["problem"] = child.greeting["problems"][peer]
        else:
            row |= {"versions": child.greeting["versions"], "threads": child.greeting["threads"]}
            answer = child.ask(program=f"{peer}/{statistic}", what="check")
            if "error" in answer:
                row["problem"] = answer["error"]
            else:
                row |= {"bytes": answer["bytes"], "digest": None if statistic == PLAIN else answer["digest"]}
    return rows


def _asked(child: Child, peer: str, statistic: str) -> float:
    answer = child.ask(program=f"{peer}/{statistic}", what="time")
    if "error" in answer:
        raise ConfigError(f"{peer}, {statistic}: {answer['error']}")
    return answer["seconds"]
