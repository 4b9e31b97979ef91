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

    cli.run("perex_t5x.chaos.__main__.main", __doc__, flags="perex_t5x.chaos.__main__.define_flags")

import collections
import dataclasses
import fnmatch
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perex_t5x.chaos.faults import FAULTS
from perex_t5x.chaos.runs import SETTINGS
from perex_t5x.chaos.trials import Result, Trials, plan
from perex_t5x.errors import ConfigError, Reason, did_you_mean

QUICK = ("kill", "sigterm", "kill_in_eval", "flip_arrays", "delete_run_json")


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
    results = []
    with Trials(root, args.seed) as trials:
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
