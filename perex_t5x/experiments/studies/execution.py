"""Runs a study's stages in one folder, as one sweep that grows."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from perex_t5x.experiments.studies.base import Study
from perex_t5x.experiments.sweep import Sweep
from perex_t5x.experiments.sweep.directory import Folder
from perex_t5x.experiments.sweep.plan import Plan
from perex_t5x.experiments.sweep.runs import Result, Run, absolute
from perex_t5x.files import write_atomically

NOTES = "study.json"


def run(
    study: Study,
    sweep: Sweep,
    folder: str,
    *,
    gin_files: Sequence[str] = (),
    gin_bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    flags: Sequence[str] = (),
    parallel: int | None = None,
    extensions: int = 4,
    quick: bool = False,
    dry_run: bool = False,
    overview: Any = None,
) -> list[Result]:
    """Runs what is not yet done of all stages, and what is measured besides; returns the results of all runs.

    The whole description is checked before the first run, also what belongs to later stages.
    """
    folder = absolute(folder)
    whole = sweep.plan(gin_files, gin_bindings, search_paths, flags=flags)
    if slips := Folder(folder).check(whole):
        from perex_t5x.errors import ConfigError

        raise ConfigError("\n".join(slips))
    if dry_run:
        return []
    begun, stages, runs = time.monotonic(), study.stages(sweep, extensions), {}
    parts, results = next(stages), []
    programs: dict[str, Any] = {}  # a stage more is not a compilation more
    try:
        while True:
            _add(runs, parts, gin_files, gin_bindings, search_paths, flags)
            grown = dataclasses.replace(whole, runs=tuple(runs.values()))
            results = grown.run(folder, together=True, parallel=parallel, overview=overview, programs=programs)
            try:
                parts = stages.send(list(zip(grown.runs, results, strict=True)))
            except StopIteration:
                break
        if study.measure is not None:
            study.measure(grown, folder, quick)
    finally:
        if os.path.isdir(folder):
            _note(folder, study.name, sweep, quick, time.monotonic() - begun)
    return results


def _add(runs: dict[str, Run], parts: Sequence[Sweep], *given: Any) -> None:
    gin_files, gin_bindings, search_paths, flags = given
    for part in parts:
        plan: Plan = part.plan(gin_files, gin_bindings, search_paths, check=False, flags=flags)
        for made in plan.runs:
            runs.setdefault(made.name, made)


def _note(folder: str, name: str, sweep: Sweep, quick: bool, seconds: float) -> None:
    """What the analysis cannot see in the runs; seconds are added up over all starts."""
    former = notes(folder).get("seconds", 0.0)
    noted = {"study": name, "seeds": list(sweep.seeds), "quick": quick, "seconds": round(former + seconds, 1)}
    write_atomically(os.path.join(folder, NOTES), json.dumps(noted) + "\n")


def notes(folder: str) -> dict[str, Any]:
    """What `run` has noted; empty where it has not been."""
    try:
        with open(os.path.join(folder, NOTES), encoding="utf-8") as f:
            return json.load(f)
    except (FileNotFoundError, ValueError):
        return {}
