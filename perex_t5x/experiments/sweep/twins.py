"""Runs of one sweep with the same configuration, such as those at the base batch size under several rules.

One of them is run, the others are copies of it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence

from perex_t5x.experiments.sweep.directory import Folder
from perex_t5x.experiments.sweep.runs import Result, Run


def firsts(runs: Sequence[Run], finished: Mapping[str, Result]) -> dict[str, Run]:
    """Name -> the run that stands for it: the first with its configuration, or one that is finished."""
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], Run] = {}
    for run in sorted(runs, key=lambda r: r.name not in finished):  # stable: finished ones first, else in order
        found.setdefault((run.files, run.bindings), run)
    return {run.name: found[run.files, run.bindings] for run in runs}


def copy(kept: Folder, first: Run, twin: Run, result: Result) -> Result:
    """Copies what `first` has written, but for checkpoints, into the twin's folder; returns its result."""
    source, target = kept.path("runs", first.name), kept.path("runs", twin.name)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("checkpoint_*", "result.json*"))
    config = os.path.join(target, "config.gin")
    if os.path.exists(config):
        with open(config, encoding="utf-8") as f:
            text = f.read()
        with open(config, "w", encoding="utf-8") as f:
            f.write(text.replace(repr(source), repr(target)))
    return dataclasses.replace(result, name=twin.name, values=dict(twin.values), seconds=0.0)
