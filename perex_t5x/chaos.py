"""Does a run survive? Real runs of a small model are killed and damaged, resumed, and compared with one that never was.

    python -m perex_t5x.chaos                                    60 trials, each fault at least once
    python -m perex_t5x.chaos --quick                            three minutes
    python -m perex_t5x.chaos --faults='kill*,flip_arrays' --settings=streaming --trials=10 --seed=3

Every trial starts `python -m perex_t5x.train`, does one thing to it or to its folder, and starts the same command again.
Afterwards the last checkpoint (parameters, optimizer state, random key, position in the data), the metrics and the
evaluations must equal those of the uninterrupted run, bit for bit on the same mesh, with no line missing or there twice; no
process, temporary folder or lock may be left, and nobody may have printed a stack trace. Prints a table of faults and
outcomes; exit code 0 only if every trial is good, 3 otherwise. What is promised: docs/reliability.md.
"""

from __future__ import annotations

if __name__ == "__main__":
    from perex_t5x import cli

    cli.run("perex_t5x.chaos.main", __doc__, flags="perex_t5x.chaos.define_flags")

import collections
import dataclasses
import fnmatch
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perex_t5x import checkpoint_files
from perex_t5x.chaos_faults import FAULTS, Fault, SkippedError
from perex_t5x.chaos_runs import SETTINGS, FaultError, MissedError, Run, Setting, kill, processes, start
from perex_t5x.errors import ConfigError, Reason, TrainingError, did_you_mean

QUICK = ("kill", "sigterm", "kill_in_eval", "flip_arrays", "delete_run_json")
_SECONDS = 240.0  # after which a run hangs
_GRACE = 10.0  # seconds that the other processes of a run may take to follow the first
_ATTEMPTS = 3  # to see the moment of a fault before the run ends
_LEFT = re.compile(r"\.writer|\.seen_by_all_.*|.*\.orbax-checkpoint-tmp.*|.*\.tmp")
_ON_OTHER_MESH = {"rtol": 1e-3, "atol": 2e-4}  # sums in another order; a tenth of one update


# --- what must hold ---------------------------------------------------------------------------------------------------


def differences(folder: Path, reference: Path, *, exact: bool = True, since: int = 0) -> list[str]:
    """What a run's folder has otherwise than that of the uninterrupted run; [] if nothing.

    Args:
      folder, reference: of two runs that have ended.
      exact: bit for bit; False: within rounding.
      since: lines of metrics up to this step may be missing (not wrong, and not twice).
    """
    found = [f"{path.name} was left" for path in folder.iterdir() if _LEFT.fullmatch(path.name)]
    found += _other_state(folder, reference, exact)
    try:
        ours, theirs = _metrics(folder), _metrics(reference)
    except (OSError, ValueError, KeyError) as e:
        return [*found, f"metrics.jsonl cannot be read: {e}"]
    found += [f"{_name(key)} is there {n} times" for key, n in ours.counts.items() if n > 1]
    missing = [key for key in theirs.values if key not in ours.values and key[0] > since]
    found += [f"{_name(key)} is missing" for key in missing]
    found += [f"{_name(key)} is not a line of the run" for key in ours.values if key not in theirs.values]
    common = [key for key in ours.values if key in theirs.values]
    return found + [f"{_name(k)} differs" for k in common if not _same(ours.values[k], theirs.values[k], exact)]


def _name(key: tuple[int, str]) -> str:
    return f"the line of {key[1]} at step {key[0]}"


@dataclasses.dataclass
class _Lines:
    values: dict[tuple[int, str], dict[str, Any]]
    counts: collections.Counter[tuple[int, str]]


def _metrics(folder: Path) -> _Lines:
    """Metrics and evaluations by step and name, without times; lines that hold nothing else are left out."""
    lines = _Lines({}, collections.Counter())
    for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(text)
        key = (row.pop("step"), row.pop("name"))
        values = {name: value for name, value in row.items() if not name.startswith(("timing/", "goodput/"))}
        if values:
            lines.values[key] = values
            lines.counts[key] += 1
    return lines


def _same(a: Mapping[str, Any], b: Mapping[str, Any], exact: bool) -> bool:
    if exact or a.keys() != b.keys():
        return a == b
    close = {"rel_tol": _ON_OTHER_MESH["rtol"], "abs_tol": _ON_OTHER_MESH["atol"]}
    return all(math.isclose(float(a[name]), float(b[name]), **close) for name in a)


def _other_state(folder: Path, reference: Path, exact: bool) -> list[str]:
    import numpy as np

    steps = [{checkpoint_files.step_of(p) for p in checkpoint_files.whole(str(f))} for f in (folder, reference)]
    found = [f"checkpoint_{step} is missing" for step in sorted(steps[1] - steps[0])]
    for path in checkpoint_files.whole(str(folder)):
        if damage := checkpoint_files.damage(path, own=True):
            found.append(f"{os.path.basename(path)} is damaged: {damage}")
    if found:
        return found
    last = f"checkpoint_{max(steps[1])}"
    if _position(folder / last) != _position(reference / last):
        found.append("the run's position in its data differs")
    ours, theirs = _arrays(folder / last), _arrays(reference / last)
    if ours.keys() != theirs.keys():
        return [*found, "the names of the arrays differ"]
    for name, value in ours.items():
        other = theirs[name]
        same = np.array_equal if exact else lambda a, b: np.allclose(a, b, **_ON_OTHER_MESH)
        if value.dtype != other.dtype or not same(value, other):
            largest = np.max(np.abs(np.float64(value) - np.float64(other)), initial=0.0)
            found.append(f"{name} differs by up to {largest:.2g}")
    return found


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


# --- trials -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """Of one trial; `problems` are what should not be, `skipped` says why there was no trial."""

    number: int
    fault: str
    setting: str
    did: str = ""
    resumed: str = ""
    problems: list[str] = dataclasses.field(default_factory=list)
    skipped: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.problems

    @property
    def happened(self) -> str:
        """In a line.

        >>> Result(1, "kill", "cached", problems=["a", "b", "c", "d", "e"]).happened
        'a; b; c; and 2 more'
        """
        more = [f"and {len(self.problems) - 3} more"] if len(self.problems) > 3 else []
        return self.skipped or "; ".join([*self.problems[:3], *more]) or self.resumed


def plan(faults: Sequence[str], settings: Sequence[str], trials: int, seed: int) -> list[tuple[str, str]]:
    """(fault, setting) of each trial: the faults in turns, each in its settings in turns, from one that the seed chooses.

    >>> plan(["kill", "sigterm"], ["cached", "streaming"], 4, seed=0)
    [('kill', 'streaming'), ('sigterm', 'cached'), ('kill', 'cached'), ('sigterm', 'streaming')]
    """
    rng = random.Random(seed)
    possible = {name: [s for s in settings if s in FAULTS[name].settings] for name in faults}
    possible = {name: rng.sample(found, len(found)) for name, found in possible.items() if found}
    names = list(possible)
    if not names:
        raise ConfigError("--faults, --settings: none of these faults is for one of these settings.")
    rounds = [(names[i % len(names)], i // len(names)) for i in range(trials)]
    return [(name, possible[name][i % len(possible[name])]) for name, i in rounds]


class Trials:
    """Runs trials in a folder. The uninterrupted run of each setting is made once.

    Args:
      root: an empty folder.
      seed: of the moments and places that faults choose.
      begin: as `start`.
    """

    def __init__(self, root: Path, seed: int, begin: Callable[..., Run] = start):
        self._root, self._seed, self._begin = root, seed, begin
        self._references: dict[Setting, Path] = {}

    def reference(self, setting: Setting) -> Path:
        """The folder of the uninterrupted run."""
        setting = dataclasses.replace(setting, devices_later=1)
        if setting not in self._references:
            folder = self._root / f"uninterrupted_{setting.feed}_{setting.processes}"
            code = self._begin(setting, folder, str(folder)).end(_SECONDS)
            if code != 0:
                raise TrainingError(f"the uninterrupted run ended with {code}: see {folder}.log")
            self._references[setting] = folder
        return self._references[setting]

    def run(self, number: int, fault: Fault, setting_name: str) -> Result:
        """One trial. Its folder is removed if all is well."""
        result, begun = Result(number, fault.name, setting_name), time.monotonic()
        setting, folder = SETTINGS[setting_name], self._root / f"trial_{number}_{fault.name}"
        rng = random.Random(f"{self._seed}/{number}/{fault.name}/{setting_name}")
        reference = self.reference(setting)
        try:
            if fault.on_folder:
                shutil.copytree(reference, folder)
                result.did = fault.act(folder, rng)
            else:
                self._disturb(fault, setting, folder, rng, result)
            self._resume(fault, setting, folder, reference, result)
        except SkippedError as e:
            result.skipped = f"skipped: {e}"
        except FaultError as e:  # nothing was tried, or something else than what should have happened did
            result.problems.append(str(e))
        finally:
            kill(str(folder))
        if result.good:
            shutil.rmtree(folder, ignore_errors=True)
            Path(f"{folder}.log").unlink(missing_ok=True)
        result.seconds = round(time.monotonic() - begun, 1)
        return result

    def _disturb(self, fault: Fault, setting: Setting, folder: Path, rng: random.Random, result: Result) -> None:
        """Starts a run, does the fault to it, and waits for its end. A moment that was missed is waited for again."""
        for attempt in range(1, _ATTEMPTS + 1):
            run = self._begin(setting, folder, str(folder))
            try:
                result.did = fault.act(run, rng)
                break
            except MissedError:
                if attempt == _ATTEMPTS:
                    raise
            kill(run.mark)
            run.end(_SECONDS)
            shutil.rmtree(folder)
        code = run.end(_SECONDS)
        if code is None:
            result.problems.append(f"the run hung for {_SECONDS:.0f} s")
        elif (reason := Reason.of_exit_code(code)) not in fault.ends:
            result.problems.append(f"the run ended as {reason} ({code})")
        result.problems += _left_processes(run.mark)

    def _resume(self, fault: Fault, setting: Setting, folder: Path, reference: Path, result: Result) -> None:
        """The same command once more, which has to end well, and the comparison with the uninterrupted run."""
        at = max((checkpoint_files.step_of(p) for p in _valid(folder)), default=0)
        result.resumed = f"resumed at step {at}" if at else "started from the beginning"
        code = self._begin(setting, folder, str(folder), setting.devices_later).end(_SECONDS)
        if code != 0:
            ended = "hung" if code is None else f"ended as {Reason.of_exit_code(code)} ({code})"
            result.problems.append(f"started again, the run {ended}")
        if "Traceback (most recent call last)" in Path(f"{folder}.log").read_text(errors="replace"):
            result.problems.append("a stack trace was printed")
        result.problems += _left_processes(str(folder))
        if code == 0:
            since = at if fault.loses_lines else 0
            result.problems += differences(folder, reference, exact=setting.devices_later == 1, since=since)
            if lost := len(_metrics(reference).values) - len(_metrics(folder).values) if fault.loses_lines else 0:
                result.resumed += f", {lost} lines lost with the file"


def _valid(folder: Path) -> list[str]:
    return [path for path in checkpoint_files.whole(str(folder)) if not checkpoint_files.damage(path, own=True)]


def _left_processes(mark: str) -> list[str]:
    """Those of a run that has ended; they may take some seconds to follow."""
    deadline = time.monotonic() + _GRACE
    while left := processes(mark):
        if time.monotonic() > deadline:
            kill(mark)
            return [f"{len(left)} process(es) were left"]
        time.sleep(0.05)
    return []


# --- the command ------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """Faults and settings, how many trials were good, and what happened, in Markdown."""
    rows: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        rows.setdefault((result.fault, result.setting), []).append(result)
    order = {name: number for number, name in enumerate(FAULTS)}
    text = ["| fault | setting | trials | good | what happened |", "|---|---|---|---|---|"]
    for (fault, setting), cell in sorted(rows.items(), key=lambda row: (order[row[0][0]], row[0][1])):
        happened = collections.Counter(r.happened for r in sorted(cell, key=lambda r: (r.good, r.number)))
        said = " / ".join(f"{what} ({n})" if n > 1 else what for what, n in happened.items())
        tried = [r for r in cell if not r.skipped]
        good = sum(r.good for r in tried)
        shown = f"{good}" if good == len(tried) else f"**{good}**"
        text.append(f"| `{fault}` | {setting} | {len(tried)} | {shown} | {said} |")
    tried = [r for r in results if not r.skipped]
    return "\n".join([*text, f"| all | | {len(tried)} | {sum(r.good for r in tried)} | |"])


def define_flags() -> None:
    from absl import flags

    flags.DEFINE_integer("trials", 60, "How many.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the moments and places of the faults.")
    flags.DEFINE_list("faults", ["*"], f"Which, as names or patterns: {', '.join(FAULTS)}.")
    flags.DEFINE_list("settings", ["*"], f"Which, as names or patterns: {', '.join(SETTINGS)}.")
    flags.DEFINE_bool("quick", False, f"Three minutes: {', '.join(QUICK)}, once each, in the first setting.")
    flags.DEFINE_string(
        "dir", None, "A new folder for the runs; those of trials that are not good stay. None: a temporary one."
    )
    flags.DEFINE_bool("json", False, "Print a line of JSON for each trial instead of the table.")


def main(args: Any) -> int:
    faults, settings = _chosen("faults", args.faults, FAULTS), _chosen("settings", args.settings, SETTINGS)
    planned = plan(faults, settings, args.trials, args.seed)
    if args.quick:
        planned = plan(QUICK, ["cached"], len(QUICK), args.seed)
    root = Path(args.dir or tempfile.mkdtemp(prefix="perex_t5x_chaos_")).absolute()
    if root.is_dir() and any(root.iterdir()):
        raise ConfigError(f"--dir={args.dir}: the folder is not empty. Name a new one.")
    root.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_PLATFORMS"] = "cpu"  # here arrays are only read
    trials, results = Trials(root, args.seed), []
    for number, (fault, setting) in enumerate(planned, 1):
        result = trials.run(number, FAULTS[fault], setting)
        results.append(result)
        verdict = "-" if result.skipped else "good" if result.good else "NOT GOOD"
        said = f"{number}/{len(planned)} {fault}, {setting} ({result.did}): {verdict}, {result.happened}"
        print(f"{said} [{result.seconds:.0f} s]", file=sys.stderr, flush=True)
        if args.json:
            print(json.dumps({**dataclasses.asdict(result), "good": result.good}), flush=True)
    if not args.json:
        print(table(results))
    bad = [result for result in results if not result.good]
    if bad:
        print(f"{len(bad)} of {len(results)} trials are not good: see {root}", file=sys.stderr)
    elif not args.dir:
        shutil.rmtree(root, ignore_errors=True)
    return Reason.SOME_FAILED.exit_code if bad else 0


def _chosen(flag: str, patterns: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """
    >>> _chosen("settings", ["*ed"], SETTINGS)
    ['cached']
    """
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise ConfigError(f"--{flag}={pattern}: there is none of this name.{did_you_mean(pattern, known)}")
    return [name for name in known if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
