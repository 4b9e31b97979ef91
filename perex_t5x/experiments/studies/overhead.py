"""What statistics of the examples' gradients cost: the compiled steps of a sweep's configurations, timed in turns."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from perex_t5x.experiments.report.intervals import mean_interval
from perex_t5x.experiments.report.load import RunSet
from perex_t5x.experiments.studies import analysis
from perex_t5x.experiments.studies.base import Finding, Pod, Study, everything, notes, save
from perex_t5x.experiments.sweep import axes
from perex_t5x.experiments.sweep.plan import Plan
from perex_t5x.experiments.sweep.runs import Run
from perex_t5x.metrics import read_text

FILE = "overhead.json"
_PAPER = "For a transformer of 1.2 billion parameters about 17 % more compute, and no increase of peak memory."
_SECONDS = 0.2  # of steps in one turn, about
_BATCHES = 4


def measure(plan: Plan, folder: str, quick: bool) -> None:
    """Times the step of every configuration, all of one model in turns; what is measured already stays."""
    known = notes(folder, FILE)
    wanted = [run for run in plan.runs if run.seed == plan.runs[0].seed]
    for runs in analysis.grouped(wanted, lambda run: str(run.values.get("model", ""))).values():
        if all(run.name in known for run in runs):
            continue
        print(f"timing the steps of {', '.join(run.name for run in runs)}", flush=True)
        known |= time_steps(runs, turns=5 if quick else 21)
        save(folder, FILE, known)


# --- measuring --------------------------------------------------------------------------------------------------------


def time_steps(runs: Sequence[Run], turns: int) -> dict[str, dict[str, Any]]:
    """Name -> seconds of a step in each turn, bytes that the compiled step needs besides its arguments and results."""
    steps = [_Step(run) for run in runs]
    seconds: dict[str, list[float]] = {run.name: [] for run in runs}
    for step in steps:
        step.warm_up()
    for turn in range(turns):
        # Whoever goes first may find a cooler machine: they take turns in that, too.
        for step in steps[:: 1 if turn % 2 else -1]:
            seconds[step.name].append(step.seconds())
    return {
        step.name: {"seconds": seconds[step.name], "temp_bytes": step.temp_bytes, "values": dict(run.values)}
        for step, run in zip(steps, runs, strict=True)
    }


class _Step:
    """A compiled step with its state and some batches."""

    def __init__(self, run: Run):
        import jax

        from perex_t5x.experiments.sweep import in_process, plan
        from perex_t5x.train import Training

        self.name = run.name
        with plan.quiet_logging(), tempfile.TemporaryDirectory() as scratch:
            # Gin's configuration is read while tracing: all of this before the next one is parsed.
            plan.parse_configuration(run.files, run.bindings, run.search_paths, scratch)
            training = Training(in_process.train_arguments())
            training.close()  # it is never run, and its folder is about to vanish
            setup, feed = training.setup, training.make_feed()
            self._step = setup.trainer.compiled_step(setup.shapes, setup.shardings, setup.spec)
            self._state = setup.init(jax.random.key(run.seed))
        sharding = dict.fromkeys(setup.spec, setup.trainer.partitioner.data_sharding)
        self._batches = [feed.batch(i, sharding) for i in range(_BATCHES)]
        memory = self._step.memory_analysis()
        self.temp_bytes = int(memory.temp_size_in_bytes) if memory is not None else None
        self._count = 1

    def warm_up(self) -> None:
        """Also finds out how many steps make a turn."""
        self.seconds()
        self._count = max(2, round(_SECONDS / min(self.seconds() for _ in range(3))))

    def seconds(self) -> float:
        """Of one step, as a mean over a turn."""
        import jax

        begun = time.monotonic()
        for i in range(self._count):
            self._state, _ = self._step(self._state, self._batches[i % _BATCHES])
        jax.block_until_ready(self._state)
        return (time.monotonic() - begun) / self._count


# --- findings ---------------------------------------------------------------------------------------------------------


_IN_TURNS = (
    "turns, in which all configurations are timed one after another; memory is what the compiled step needs besides its"
)
_LOGGED = "of the runs' log periods, one run after another: only a machine with no other work is as fast in all of them"


def analyse(folder: RunSet, path: str) -> list[Finding]:
    known, how = notes(path, FILE), f"{_IN_TURNS} arguments and results"
    if not known:  # runs of processes of their own, such as a pod's
        known, how = _logged(folder, path), _LOGGED
    models = _entries(known).items()
    return [_finding(model, entries, how) for model, entries in models if "adamw" in entries and len(entries) > 1]


def _logged(folder: RunSet, path: str) -> dict[str, Any]:
    """What `time_steps` returns, from the steps per second that finished runs have logged."""
    known = {}
    for run in folder.runs if folder else ():
        rows = [json.loads(line) for line in read_text(os.path.join(path, "runs", run.name)).splitlines()]
        rates = [row["timing/steps_per_second"] for row in rows if row.get("timing/steps_per_second")]
        if run.finished and rates:
            values = {**run.values, "optimizer": run.optimizer}
            known[run.name] = {"seconds": [1 / rate for rate in rates], "temp_bytes": None, "values": values}
    return known


def _entries(known: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Model -> label of a configuration -> what was measured."""
    models: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in known.values():
        values = entry["values"]
        model = os.path.basename(str(values.get("model", "the model"))).removesuffix(".gin")
        label = os.path.basename(str(values.get("optimizer", "step"))).removesuffix(".gin")
        models.setdefault(model, {})[", ".join([label, *_more(values)])] = entry
    return models


def _more(values: dict[str, Any]) -> list[str]:
    """The other axes; None is the default.

    >>> _more({"model": "a.gin", "Trainer.clip_norm": 2.0, "Trainer.microbatch_size": None, "seed": 0})
    ['clip_norm 2.0']
    """
    others = {axis: v for axis, v in values.items() if axis not in ("model", "optimizer", axes.SEED) and v is not None}
    return [f"{axis.rpartition('.')[2]} {value}" for axis, value in others.items()]


def _finding(model: str, entries: dict[str, dict[str, Any]], how: str) -> Finding:
    rows, texts, plain = [], [], entries["adamw"]
    count = min(len(entry["seconds"]) for entry in entries.values())
    base = np.asarray(plain["seconds"][:count])
    for label, entry in entries.items():
        ratios = np.asarray(entry["seconds"][:count]) / base
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        mean = mean_interval(ratios.tolist())
        memory = entry["temp_bytes"] / plain["temp_bytes"] if entry["temp_bytes"] and plain["temp_bytes"] else None
        rows.append([label, analysis.number(1e3 * float(np.median(entry["seconds"])), 2), analysis.number(middle, 3),
                     f"{low:.3f} to {high:.3f}", analysis.interval(mean, 3),
                     None if memory is None else analysis.number(entry["temp_bytes"] / 2**20, 2),
                     analysis.number(memory, 2)])  # fmt: skip
        if label != "adamw":
            more = "" if memory is None else f", {memory:.2f} the memory"
            texts.append(f"{label} {middle:.2f} times the time{more}")
    text = (
        f"{model}: a step, compared with adamw's on the plain gradient: {'; '.join(texts)}. Medians over {count} {how}."
    )
    columns = ["step", "ms", "times adamw", "quartiles", "interval of the mean", "memory, MiB", "times adamw"]
    return analysis.finding(f"The price of statistics, {model}", text, columns, rows, paper=_PAPER)


STUDY = Study(
    "overhead",
    everything,
    analyse,
    quick=[
        "files = {'model': ['models/nano.gin'], 'optimizer': ['optimizers/adamw.gin', 'optimizers/micro_adam.gin']}",
        "grid = {}",
    ],
    quick_gin=["TASK_FEATURE_LENGTHS = {'targets': 32}"],
    measure=measure,
    pod=Pod(
        grid={"Trainer.microbatch_size": [None]},
        bindings={"TRAIN_STEPS": 2000, "WARMUP_STEPS": 500, "EVAL_PERIOD": 2000},
    ),
)
