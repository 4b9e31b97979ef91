"""What a run's folder has otherwise than that of the run that was left alone."""

from __future__ import annotations

import collections
import csv
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perex_t5x import checkpoint_files, metric_files

_LEFT = re.compile(r"\.writer|\.lock|\.seen_by_all_.*|.*\.orbax-checkpoint-tmp.*|.*\.tmp")
_ON_OTHER_MESH = {"rtol": 1e-3, "atol": 2e-4}  # sums in another order; a tenth of one update


def differences(folder: Path, reference: Path, *, exact: bool = True, since: int = 0) -> list[str]:
    """What differs, a line each; [] if nothing does.

    Args:
      folder, reference: of two runs that have ended.
      exact: bit for bit; False: within rounding.
      since: lines of metrics up to this step may be missing (not wrong, and not twice).
    """
    problems = [f"{path.name} was left" for path in folder.iterdir() if _LEFT.fullmatch(path.name)]
    problems += _other_state(folder, reference, exact)
    try:
        ours, theirs = Lines(folder), Lines(reference)
    except (OSError, ValueError, KeyError) as e:
        return [*problems, f"the metrics cannot be read: {e}"]
    problems += [f"{_name(key)} is there {n} times" for key, n in ours.counts.items() if n > 1]
    missing = [key for key in theirs.values if key not in ours.values and key[0] > since]
    problems += [f"{_name(key)} is missing" for key in missing]
    problems += [f"{_name(key)} is not a line of the run" for key in ours.values if key not in theirs.values]
    common = [key for key in ours.values if key in theirs.values]
    return problems + [f"{_name(k)} differs" for k in common if not _same(ours.values[k], theirs.values[k], exact)]


def differences_of_sweeps(folder: Path, reference: Path) -> list[str]:
    """The same of all runs of a sweep, and of its table of results."""
    ours, theirs = ({path.name: path for path in root.glob("runs/*")} for root in (folder, reference))
    problems = [f"{path.name} was left" for path in folder.iterdir() if _LEFT.fullmatch(path.name)]
    problems += [f"the run {name} is missing" for name in theirs if name not in ours]
    problems += [f"the run {name} is not one of the sweep's" for name in ours if name not in theirs]
    if _results(folder) != _results(reference):
        problems.append("results.csv differs")
    common = [name for name in ours if name in theirs]
    return problems + [f"{name}: {p}" for name in common for p in differences(ours[name], theirs[name])]


def _results(folder: Path) -> list[dict[str, str]]:
    with open(folder / "results.csv", encoding="utf-8") as f:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(f)]


def _name(key: tuple[int, str]) -> str:
    return f"the line of {key[1]} at step {key[0]}"


@dataclasses.dataclass(init=False)
class Lines:
    """Metrics and evaluations of a run by step and name, without times; lines that hold nothing else are left out.

    Read as they are stored: a line that is half there raises a ValueError.
    """

    values: dict[tuple[int, str], dict[str, Any]]
    counts: collections.Counter[tuple[int, str]]

    def __init__(self, folder: Path):
        self.values, self.counts = {}, collections.Counter()
        texts = [path.read_text() for path in metric_files.stored_files(folder)]
        if not texts:
            raise FileNotFoundError("there are none")
        for text in "".join(texts).splitlines():
            row = json.loads(text)
            key = (row.pop("step"), row.pop("name"))
            values = {name: value for name, value in row.items() if not name.startswith(("timing/", "goodput/"))}
            values.pop("failed_saves", None)  # of the storage, not of the training
            if values:
                self.values[key] = values
                self.counts[key] += 1


def _same(a: Mapping[str, Any], b: Mapping[str, Any], exact: bool) -> bool:
    if exact or a.keys() != b.keys():
        return a == b
    close = {"rel_tol": _ON_OTHER_MESH["rtol"], "abs_tol": _ON_OTHER_MESH["atol"]}
    return all(math.isclose(float(a[name]), float(b[name]), **close) for name in a)


def _other_state(folder: Path, reference: Path, exact: bool) -> list[str]:
    import numpy as np

    steps = [{checkpoint_files.step_of(p) or 0 for p in checkpoint_files.whole(str(f))} for f in (folder, reference)]
    problems = [f"checkpoint_{step} is missing" for step in sorted(steps[1] - steps[0])]
    for path in checkpoint_files.whole(str(folder)):
        if damage := checkpoint_files.damage(path, own=True):
            problems.append(f"{os.path.basename(path)} is damaged: {damage}")
    if problems:
        return problems
    last = f"checkpoint_{max(steps[1])}"
    if _position(folder / last) != _position(reference / last):
        problems.append("the run's position in its data differs")
    ours, theirs = _arrays(folder / last), _arrays(reference / last)
    if ours.keys() != theirs.keys():
        return [*problems, "the names of the arrays differ"]
    for name, value in ours.items():
        other = theirs[name]
        same = np.array_equal if exact else functools.partial(np.allclose, **_ON_OTHER_MESH)
        if value.dtype != other.dtype or not same(value, other):
            largest = np.max(np.abs(np.float64(value) - np.float64(other)), initial=0.0)
            problems.append(f"{name} differs by up to {largest:.2g}")
    return problems


def _position(checkpoint: Path) -> dict[str, Any]:
    run = checkpoint_files.read_run(str(checkpoint))
    run.get("unlogged", {}).pop("seconds", None)
    return run


def _arrays(checkpoint: Path) -> dict[str, Any]:
    """Parameters, optimizer state, step and random key by name, on the host, whatever mesh they are from."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from etils import epath

    state = epath.Path(checkpoint) / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = ocp.PyTreeCheckpointHandler().metadata(state).tree
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        read = checkpointer.restore(state, args=ocp.args.PyTreeRestore(restore_args=arguments))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(read)}
