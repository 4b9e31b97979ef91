"""A study at the size of a pod: files with which the launchers run it, stage by stage, and what it takes.

OUT/NAME.gin        the sweep: model, mesh, data, and everything that is run up to this stage
OUT/stage.flags     the launchers' flags for what this stage still has to run, read with --flagfile
OUT/README.md       the commands, the chip-hours, and how they were counted
OUT/results         what is collected, from which the next stage is made
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.experiments.studies.base import Study, rate_axis, rates
from perex_t5x.experiments.sweep import Sweep
from perex_t5x.experiments.sweep.directory import Folder
from perex_t5x.experiments.sweep.runs import Result, Run
from perex_t5x.files import check_path, write_atomically
from perex_t5x.hardware.slices import Slice, chip_of_topology

PLAIN, STATISTICS, CLIPPED = "plain gradient", "statistics", "statistics, examples clipped"
_PLAIN = ("adamw", "sign_ema", "sign_sgd")  # optimizers that read the mean alone


@dataclass(frozen=True)
class Target:
    """A shipped model on a slice.

    Attributes:
      mesh, topology: the mesh's Gin file, and the slice that it is for.
      batch_size, train_steps, warmup_steps: of a run, with 1024 tokens a row.
      learning_rate: AdamW's, where a study starts from one.
      rate_factors: times the rates of the optimizers' files, which were tuned for much smaller models.
      rows: of the batch for which `cycles` were counted, on the same slice.
      cycles: of a step on one chip, by preflight; see `counted`.
      counted: how.
    """

    mesh: str
    topology: str
    batch_size: int
    train_steps: int
    warmup_steps: int
    learning_rate: float
    rate_factors: tuple[float, ...]
    rows: int
    cycles: Mapping[str, float]
    counted: str

    def chip_hours(self, run: Run) -> float:
        """Of one run: its steps, at the cycles of its kind of step, which grow with the batch."""
        slice_ = Slice.of(self.topology)
        seconds = self.cycles[kind(run)] / chip_of_topology(self.topology).clock_hz * run.batch_size / self.rows
        return run.train_steps * seconds * slice_.chips / 3600


# Made by python -m perex_t5x.preflight with each model's files, --gin_file=optimizers/micro_adam.gin, the mesh, rows of 1024
# and T5Config.remat_policy = 'minimal_with_context'; of 1_2b see docs/throughput.md, of 150m clipped docs/per_example.md.
TARGETS = {
    "150m": Target(
        mesh="meshes/v5e_16.gin",
        topology="v5e:4x4",
        batch_size=256,
        train_steps=10_000,
        warmup_steps=1_000,
        learning_rate=0.001,
        rate_factors=(1 / 16, 1 / 8, 1 / 4, 1 / 2),
        rows=256,
        cycles={PLAIN: 233e6, STATISTICS: 261e6, CLIPPED: 462e6},
        counted="""\
They are preflight's (the compiler's estimates, and the kernels' static schedules), of the step compiled for
this slice with adamw and with micro_adam; with clipped examples they are twice what 8 rows a chip took on v5e-256.""",
    ),
    "1_2b": Target(
        mesh="meshes/v5e_256.gin",
        topology="v5e:16x16",
        batch_size=512,
        train_steps=10_000,
        warmup_steps=1_000,
        learning_rate=0.0005,
        rate_factors=(1 / 32, 1 / 16, 1 / 8, 1 / 4),
        rows=2048,
        cycles={PLAIN: 534e6, STATISTICS: 545e6, CLIPPED: 966e6},
        counted="""\
They are preflight's (the compiler's estimates, and the kernels' static schedules), of the step compiled for
this slice with adamw and with micro_adam (docs/throughput.md); clipped examples were not compiled, but are taken to cost
as much more than statistics alone as for 150m.""",
    ),
}


def kind(run: Run) -> str:
    """What a run's step computes.

    >>> from perex_t5x.experiments.sweep.runs import Result, Run
    >>> kind(Run("a", {"optimizer": "optimizers/micro_adam.gin", "Trainer.clip_norm": 1.0}, (), (), (), 8, 0.1, 5, 0, 40))
    'statistics, examples clipped'
    """
    if any(axis.endswith("clip_norm") and value is not None for axis, value in run.values.items()):
        return CLIPPED
    given = next((f for f in run.files if f.startswith("optimizers/")), "adamw.gin")  # model files have adamw
    name = os.path.basename(str(run.values.get("optimizer", given))).removesuffix(".gin")
    return PLAIN if name in _PLAIN else STATISTICS


# --- the sweep --------------------------------------------------------------------------------------------------------


def enlarged(study: Study, sweep: Sweep, model: str) -> Sweep:
    """The study's sweep with a larger model, its mesh, C4, and what `Study.pod` says."""
    target = target_of(model)
    files = [f for f in sweep.gin_files if not f.startswith("models/")]
    bindings = {
        "MIXTURE_OR_TASK_NAME": "c4_en_lm",
        "TASK_FEATURE_LENGTHS": {"targets": 1024},
        "BATCH_SIZE": target.batch_size,
        "TRAIN_STEPS": target.train_steps,
        "WARMUP_STEPS": target.warmup_steps,
        "EVAL_PERIOD": target.train_steps // 10,
    }
    changed: dict[str, Any] = {
        "gin_files": [f"models/{model}.gin", *files, target.mesh],
        "gin_bindings": bindings | dict(study.pod.bindings),
        "base_batch_size": target.batch_size,
    }
    if "model" in sweep.files:
        changed["files"] = {**sweep.files, "model": [f"models/{model}.gin"]}
    if study.pod.grid is not None:
        changed["grid"] = study.pod.grid
    if sweep.batch_sizes is not None:
        changed["batch_sizes"] = [round(share * target.batch_size) for share in study.pod.batch_sizes]
    if sweep.rate_factors is not None:
        changed["rate_factors"] = list(target.rate_factors)
    if sweep.base_learning_rate is not None:
        changed["base_learning_rate"] = target.learning_rate
    return dataclasses.replace(sweep, **changed)


def overridden(sweep: Sweep, bindings: Sequence[str], search_paths: Sequence[str] = ()) -> Sweep:
    """With fields as the command line gives them: 'seeds = [0]'."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "sweep.gin")
        Path(file).write_text(gin_text(sweep, sweep.name, ""), encoding="utf-8")
        return Sweep.load(file, bindings, search_paths)


def target_of(model: str) -> Target:
    if model not in TARGETS:
        raise ConfigError(f"--model={model}: --scale=pod is for {' and '.join(TARGETS)}.")
    return TARGETS[model]


# --- the stages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What is to be launched next.

    Attributes:
      number: from 1; 0: nothing is left.
      sweep: which has all runs of this stage and of those before.
      runs: of this stage that have no result yet.
      given: how the command line changes the runs, as for `Sweep.plan`.
    """

    number: int
    sweep: Sweep
    runs: tuple[Run, ...] = ()
    given: Mapping[str, Sequence[str]] = field(default_factory=dict)


def next_stage(study: Study, sweep: Sweep, folder: str, extensions: int, **given: Sequence[str]) -> Stage:
    """The first stage of which runs have no result in `folder`; `given` as for `Sweep.plan`.

    Configurations are not built here, as the model's vocabulary may be out of reach: the launchers' `check` does it.
    """
    sweep.plan(check=False, **given)  # the whole description, before anything of it
    known: dict[str, Result] = {}
    for number, (parts, runs) in enumerate(_played(study, sweep, extensions, given, known), 1):
        known |= Folder(folder).results([run.name for run in runs if run.name not in known])
        if waiting := [run for run in runs if run.name not in known]:
            return Stage(number, _union(sweep, parts), tuple(waiting), given)
    return Stage(0, sweep)


def all_runs(study: Study, sweep: Sweep, **given: Sequence[str]) -> list[Run]:
    """Those of all stages, if every best rate lies in the middle of its grid."""
    grid, axis = rates(sweep), rate_axis(sweep)
    middle, runs = grid[len(grid) // 2], []
    known: dict[str, Result] = {}
    for _, runs in _played(study, sweep, 0, given, known):
        for run in runs:
            known[run.name] = Result(run.name, eval_loss=abs(math.log(run.values.get(axis, middle) / middle)))
    return runs


def _played(
    study: Study, sweep: Sweep, extensions: int, given: Mapping[str, Any], known: Mapping[str, Result]
) -> Iterator[tuple[list[Sweep], list[Run]]]:
    """The sweeps and runs of all stages up to each; the caller adds their results to `known` before it asks for the next."""
    stages, parts = study.stages(sweep, extensions), []
    runs: dict[str, Run] = {}
    new = next(stages)
    while True:
        parts = [*parts, *new]
        for part in new:
            for run in part.plan(check=False, **given).runs:
                runs.setdefault(run.name, run)
        yield parts, list(runs.values())
        try:
            new = stages.send([(run, known[name]) for name, run in runs.items()])
        except StopIteration:
            return


def _union(sweep: Sweep, parts: Sequence[Sweep]) -> Sweep:
    """One sweep that has the runs of all parts, and others: the launchers choose by name."""
    changed: dict[str, Any] = {"seeds": sorted({seed for part in parts for seed in part.seeds})}
    for axis in ("rate_factors", "learning_rates"):
        if getattr(sweep, axis) is not None:
            changed[axis] = sorted({rate for part in parts for rate in getattr(part, axis)})
    return dataclasses.replace(sweep, **changed)


# --- what it takes, and the files -------------------------------------------------------------------------------------


def chip_hours(runs: Sequence[Run], model: str) -> dict[str, float]:
    """Kind of step -> chip-hours of these runs."""
    hours: dict[str, float] = {}
    for run in runs:
        hours[kind(run)] = hours.get(kind(run), 0.0) + target_of(model).chip_hours(run)
    return hours


def words(runs: Sequence[Run], model: str) -> str:
    """What they take, in one line."""
    total, slice_ = sum(chip_hours(runs, model).values()), Slice.of(target_of(model).topology)
    price = f", about ${total * slice_.price:,.0f} at ${slice_.price:g} per chip-hour" if slice_.price else ""
    hours = f"{total:,.0f} chip-hours, {total / slice_.chips:,.1f} hours of {slice_.topology}"
    return f"{len(runs)} runs, at least {hours}{price}"


def write(study: Study, stage: Stage, whole: Sequence[Run], model: str, out: str) -> None:
    """Writes the stage's files into `out`; `whole` are the runs of all stages, as `all_runs` has them."""
    check_path(out, "--out")
    out = os.path.abspath(os.path.expanduser(out))
    file = os.path.join(out, f"{study.name}.gin")
    only = "|".join(re.escape(run.name) for run in stage.runs)
    flags = [
        f"--sweep={file}",
        f"--only=^({only})$",
        f"--name={launch_name(study.name, model)}-{stage.number}",
        *(f"--gin_file={name}" for name in stage.given.get("gin_files", ())),
        *(f"--gin_bindings={binding}" for binding in stage.given.get("gin_bindings", ())),
        *(f"--gin_search_paths={name}" for name in stage.given.get("search_paths", ())),
        *stage.given.get("flags", ()),
    ]
    if broken := next((flag for flag in flags if "\n" in flag), None):
        raise ConfigError(f"{broken!r}: a file of flags has one on each line. Put it into a --gin_file.")
    write_atomically(file, gin_text(stage.sweep, study.name, model))
    write_atomically(os.path.join(out, "stage.flags"), "\n".join(flags) + "\n")
    write_atomically(os.path.join(out, "README.md"), _readme(study, stage, whole, model, out))


def launch_name(study: str, model: str) -> str:
    """
    >>> launch_name("sign_placement", "1_2b")
    'sign-placement-1-2b'
    """
    return f"{study}-{model}".replace("_", "-")


def gin_text(sweep: Sweep, study: str, model: str) -> str:
    """The sweep as a Gin file."""
    default = Sweep("")
    lines = [
        f"# The study {study} with models/{model}.gin. Written by --scale=pod; README.md has the commands.",
        "from __gin__ import dynamic_registration",
        "",
        "from perex_t5x.experiments import sweep",
        "",
        "sweep.Sweep:",
    ]
    for part in dataclasses.fields(Sweep):
        value = getattr(sweep, part.name)
        if value != getattr(default, part.name):
            lines.append(f"  {part.name} = {_plain(value)!r}")
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    """Without the tuples and mappings of other types that Gin's parser does not read back."""
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _readme(study: Study, stage: Stage, whole: Sequence[Run], model: str, out: str) -> str:
    target, sweep = target_of(model), stage.sweep
    table = []
    for said, runs in ((f"stage {stage.number}", stage.runs), ("all", whole)):
        for name, hours in chip_hours(runs, model).items():
            count = sum(kind(run) == name for run in runs)
            table.append(f"| {said} | {name} | {count} | {target.cycles[name] / 1e6:,.0f} M | {hours:,.0f} |")
    return _README.format(
        title=sweep.title,
        question=sweep.question,
        name=study.name,
        model=model,
        number=stage.number,
        topology=target.topology,
        chips=Slice.of(target.topology).chips,
        takes=words(stage.runs, model),
        all=words(whole, model),
        table="\n".join(table),
        rows=target.rows,
        counted=target.counted,
        out=out,
        folder=f"gs://BUCKET/studies/{study.name}_{model}",
        launch=f"{launch_name(study.name, model)}-{stage.number}",
    )


_README = """\
# {title}: {model}

{question}

The study `{name}` with `models/{model}.gin` on {topology} ({chips} chips). A study is run in stages:
what a stage finds, such as the best rates, decides what the next one runs.

## What it takes

Stage {number}: {takes}.
All stages, if every best rate lies in the middle of its grid: {all}.

| | step | runs | cycles | chip-hours |
|---|---|---|---|---|
{table}

Steps times cycles at the chip's clock times chips. The cycles are those of a step of {rows} rows of 1024 tokens, and are
taken to grow with the batch.
{counted}

It is a lower bound: collectives are taken to be hidden, and evaluation, monitoring, input, compiling and restarts come on
top. `check`, below, compiles the steps of this very stage and says what they take.

## Launch

From a checkout of perex_t5x, one of these (`check` first). BUCKET holds C4 for TFDS in `tfds/`, and takes the results;
docs/launch.md, docs/launch_gke.md and docs/launch_xmanager.md of the package say what else has to be there.

```sh
flags="--flagfile={out}/stage.flags --dir={folder} --tfds_data_dir=gs://BUCKET/tfds"
python launch/gcloud_tpu.py check $flags --spot
python launch/gcloud_tpu.py launch $flags --spot
python launch/gke.py launch $flags --image=IMAGE
xmanager launch launch/xm_launch.py -- --executor=gke $flags --image=IMAGE
```

## Then

Collect the results, and write the next stage; when none is left, the same command says what was found.

```sh
python launch/gcloud_tpu.py collect --name={launch} --dir={folder} --out={out}/results
python -m perex_t5x.experiments.study {name} --scale=pod --model={model} --out={out}
```
"""
