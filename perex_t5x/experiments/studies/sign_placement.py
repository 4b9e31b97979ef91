"""Where should the sign stand? Three placements, each at its own best rate, and a test of the signal-to-noise argument."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perex_t5x.cli.progress import Progress
from perex_t5x.experiments.report.intervals import Mean
from perex_t5x.experiments.report.load import LoadedRun, RunSet
from perex_t5x.experiments.studies import analysis
from perex_t5x.experiments.studies.base import Finding, Pod, Study, notes, save, tune_then_run
from perex_t5x.experiments.studies.noise_scale import over_seeds
from perex_t5x.experiments.sweep.plan import Plan
from perex_t5x.experiments.sweep.runs import Run
from perex_t5x.files import as_path

FILE = "signs.json"
_COORDINATES = 4096  # of all parameters, drawn once
_DRAWS = 32
_CHUNK = 64  # examples at a time
_LATEST = "sign_ema"
PLACES = {"micro_sign": "example", "sign_sgd": "batch", "sign_ema": "average"}
_PAPER = "SignEMA is best: the sign as late as possible, by a signal-to-noise argument."
_OURS = (
    "The argument is the paper's; the formulas are our reading: the signal-to-noise ratio that enters the sign is s, s√B, "
    "s√(B·N) with N = (1+β)/(1−β), and the expected direction erf of it over √2, for normal gradients."
)


def analyse(folder: RunSet, path: str) -> list[Finding]:
    by_arm = analysis.grouped(folder.runs, lambda run: (run.batch_size, str(run.optimizer)))
    at_best = analysis.at_best_rate(by_arm)
    findings = [_order_finding(by_arm, at_best)] if at_best else []
    return [*findings, *_snr_finding(at_best), *_signs_finding(path)]


def _order_finding(by_arm: dict[Any, list[LoadedRun]], at_best: dict[Any, list[LoadedRun]]) -> Finding:
    rows, texts = [], []
    for size in sorted({size for size, _ in at_best}):
        here = {name: runs for (s, name), runs in at_best.items() if s == size}
        ranked = sorted(here, key=lambda name: analysis.final(here[name]).mean)
        latest = here.get(_LATEST, [])
        for name in ranked:
            m, difference = analysis.final(here[name]), analysis.paired(here[name], latest)
            edge = analysis.on_edge(by_arm[size, name], analysis.rate_of(here[name][0]))
            rows.append([size, name, analysis.number(here[name][0].learning_rate, 5), "yes" if edge else "no",
                         analysis.number(m.mean), analysis.interval(m), m.count, analysis.signed(difference)])  # fmt: skip
        texts.append(f"batch size {size}: {_ordered(ranked, here)}")
    edges = [f"{row[1]} at {row[0]}" for row in rows if row[3] == "yes"]
    text = (
        "From the lowest validation loss, each at its own best rate ('<' where the 95 % interval of the difference, seed by "
        f"seed, leaves out 0): {'; '.join(texts)}."
    )
    text += f" On the edge of its grid is the best rate of {', '.join(edges)}." if edges else ""
    columns = ["batch size", "optimizer", "best rate", "on the edge", "validation loss", "interval", "seeds",
               f"less {_LATEST}'s"]  # fmt: skip
    return analysis.finding("Which placement ends lowest", text, columns, rows, paper=_PAPER, plot="basins")


def _ordered(ranked: Sequence[str], here: dict[str, list[LoadedRun]]) -> str:
    """Names with the sign between neighbours.

    >>> done = lambda loss: [LoadedRun("a", seed=s, status="done", final_loss=loss + 0.01 * s) for s in range(3)]
    >>> _ordered(["sign_ema", "micro_sign"], {"sign_ema": done(1.0), "micro_sign": done(2.0)})
    'sign_ema < micro_sign'
    """
    text = ranked[0]
    for before, name in itertools.pairwise(ranked):
        text += f" {'<' if analysis.apart(analysis.paired(here[before], here[name])) else '≈'} {name}"
    return text


def _snr_finding(at_best: dict[Any, list[LoadedRun]]) -> list[Finding]:
    """What the monitor measured in the second half of the runs, and what enters the sign by the argument."""
    rows = []
    for (size, name), runs in sorted(at_best.items()):
        scale = over_seeds(runs, "all", 0.8)
        if not scale.count or name not in PLACES:
            continue
        s = Mean(scale.mean**-0.5, scale.high**-0.5, scale.low**-0.5, scale.count)  # s² = 1 / noise scale
        k = {"example": 1, "batch": size, "average": size * _averaged(runs[0])}[PLACES[name]]
        entering = s.mean * math.sqrt(k)
        rows.append([size, name, analysis.number(s.mean, 3), analysis.interval(s, 3), analysis.number(entering, 2),
                     analysis.number(math.erf(entering / math.sqrt(2)), 3)])  # fmt: skip
    if not rows:
        return []
    text = (
        "Measured is the signal-to-noise ratio s of one example's gradient, all coordinates together, late in the runs "
        "(monitor, moving averages). With it the argument predicts what enters the sign, and the expected direction."
    )
    columns = ["batch size", "optimizer", "s measured", "interval", "predicted to enter the sign",
               "predicted direction"]  # fmt: skip
    return [analysis.finding("Signal to noise", text, columns, rows, paper=_OURS, plot="snr")]


def _averaged(run: LoadedRun) -> float:
    """N = (1+β)/(1−β) of a run's optimizer."""
    b1 = next((value for name, value in run.config.items() if name.endswith(f"{run.optimizer}.b1")), "0.9")
    try:
        return (1 + float(b1)) / (1 - float(b1))
    except ValueError:
        return 19.0


def _signs_finding(path: str) -> list[Finding]:
    """The direct measurement, if it was made."""
    saved = notes(path, FILE)
    if not saved:
        return []
    rows, texts = [], []
    for entry in saved["measured"]:
        for name, values in entry["signs"].items():
            place, size = name.split()
            if place == "example" and size != str(saved["batch_sizes"][0]):
                continue  # the same at every batch size
            shown = "1" if place == "example" else size
            rows.append([entry["step"], place, shown, values["k"], analysis.number(values["snr"], 3),
                         *(analysis.number(values[key], 3) for key in ("measured", "predicted", "pooled"))])  # fmt: skip
        wrong = next(v["wrong"] for v in entry["signs"].values() if "wrong" in v)
        texts.append(f"{wrong:.0%} at step {entry['step']}")
    text = (
        f"In the training {saved['run']}, at fixed parameters: how far the sign of a mean of k examples points to the sign "
        "of the expected gradient (1: always, 0: by chance), mean over coordinates; measured by drawing, predicted for "
        "normal gradients with each coordinate's own ratio, and with one ratio for all. Coordinates in which most single "
        f"examples point away from the expected gradient: {', '.join(texts)}."
    )
    columns = ["step", "sign of the", "batch size", "k", "ratio, pooled", "measured", "predicted",
               "predicted, one ratio"]  # fmt: skip
    return [analysis.finding("The argument, measured", text, columns, rows, paper=_OURS)]


# --- measured directly ------------------------------------------------------------------------------------------------
#
# Many examples' gradients are taken at fixed parameters. They are the whole population: its mean μ and deviation σ are known
# exactly, coordinate by coordinate, and so is what is predicted for a mean of k examples drawn from it, were it normal:
#
#     E[sign(mean of k)] · sign(μ) = erf(s√k / √2)        s = |μ|/σ
#
# Measured is the same by drawing. They differ where gradients are skewed or heavy-tailed and k is too small to hide it.


def measure(plan: Plan, folder: str, quick: bool) -> None:
    """Trains one configuration of the sweep and measures on the way; nothing is done where the file is there."""
    if as_path(os.path.join(folder, FILE)).exists():
        return
    size = plan.sweep.base_batch_size or plan.runs[0].batch_size
    # The last seed was run at the best rate alone.
    run = min(plan.runs, key=lambda r: (r.batch_size != size, "sign_ema" not in r.name, -r.seed))
    print(f"measuring signs in the training {run.name}", flush=True)
    sizes = sorted({r.batch_size for r in plan.runs})
    save(folder, FILE, along_training(run, sizes, examples=512 if quick else 4096))


def along_training(run: Run, sizes: Sequence[int], examples: int) -> dict[str, Any]:
    """Measurements after the warm-up and at the end of one run; its b1 says how far a moving average reaches."""
    from perex_t5x.experiments.sweep import in_process, plan, scaling
    from perex_t5x.train import Training
    from perex_t5x.utils import CheckpointConfig

    with plan.quiet_logging(), tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(1) as compiler:
        plan.parse_configuration(run.files, run.bindings, run.search_paths, scratch)
        base = scaling.read_settings()
        warmup = base.steps["warmup_steps"].value if "warmup_steps" in base.steps else max(1, base.train_steps // 10)
        warmup = min(warmup, base.train_steps)
        b1 = (base.optimizer.numbers("b1") if base.optimizer else {}).get("b1", 0.9)
        averaged = (1 + b1) / (1 - b1)
        ks = {f"{place} {size}": k for size in sizes for place, k in _reach(size, averaged).items()}
        # The signs are an evaluation, at the warm-up's end and the run's.
        unsaved = CheckpointConfig(save=None, restore=None)
        changes = {"train_eval_dataset_cfg": None, "checkpoint_cfg": unsaved, "eval_period": warmup}
        training = Training({**in_process.train_arguments(), **changes})
        steps = {warmup, training.last_step}
        signs = _Signs(training.trainer.model, training.make_feed(), steps, training.last_step, examples, ks)
        programs = dataclasses.replace(training.compile(compiler), evaluators=[signs])
        training.run(programs, training.make_feed(), progress=functools.partial(Progress, enabled=False))
    measured = [{"step": step, "examples": step * run.batch_size, "signs": s} for step, s in signs.measured.items()]
    return {"run": run.name, "batch_sizes": list(sizes), "averaged": averaged, "measured": measured}


@dataclass
class _Signs:
    """An evaluator, see `perex_t5x.loop.Evaluator`: keeps what `agreement` says at some steps, and writes no metrics."""

    model: Any
    feed: Any
    steps: set[int]
    last_step: int
    examples: int
    ks: Mapping[str, int]
    measured: dict[int, Any] = field(default_factory=dict)
    folders: Sequence[str] = ()

    def compile(self, *unused: Any) -> None:
        pass

    def evaluate(self, step: int, params: Any, between_batches: Callable[[], None]) -> dict[str, dict[str, float]]:
        if step in self.steps:
            gradients_NxC = _gradients(self.model, params, self.feed, self.last_step, self.examples, between_batches)
            self.measured[step] = agreement(gradients_NxC, self.ks)
        return {}


def _reach(size: int, averaged: float) -> dict[str, int]:
    """How many examples stand behind a sign, by its place."""
    return {"example": 1, "batch": size, "average": round(size * averaged)}


def _gradients(
    model: Any, params: Any, feed: Any, first: int, examples: int, between_batches: Callable[[], None]
) -> np.ndarray:
    """Gradients of single examples that the training has not seen, at some coordinates."""
    import jax
    import jax.flatten_util
    import jax.numpy as jnp

    flat, unravel = jax.flatten_util.ravel_pytree(params)
    chosen = np.sort(np.random.default_rng(0).permutation(flat.size)[:_COORDINATES])

    def gradient(row: Any) -> jax.Array:
        batch = {name: x[None] for name, x in row.items()}
        loss = lambda p: model.loss_fn(unravel(p), batch)[0]  # noqa: E731
        return jax.grad(loss)(flat)[chosen]

    several = jax.jit(jax.vmap(gradient))
    rows: list[np.ndarray] = []
    waiting: dict[str, list[np.ndarray]] = {}
    step, count = first, 0
    while count < examples:
        between_batches()
        batch = feed.batch(step)
        for name, x in batch.items():
            waiting.setdefault(name, []).append(np.asarray(x))
        step += 1
        if sum(len(x) for x in next(iter(waiting.values()))) >= _CHUNK:
            chunk = {name: jnp.asarray(np.concatenate(xs)[:_CHUNK]) for name, xs in waiting.items()}
            rows.append(np.asarray(several(chunk)))
            count, waiting = count + _CHUNK, {}
    return np.concatenate(rows)[:examples]


def agreement(gradients_NxC: np.ndarray, ks: Mapping[str, int], draws: int = _DRAWS) -> dict[str, dict[str, float]]:
    """Name -> k, measured and predicted mean over coordinates of E[sign(mean of k)]·sign(μ), and the pooled prediction.

    `wrong` is the share of coordinates in which signs of single examples point away from μ (measured for k = 1 alone).

    >>> rng = np.random.default_rng(0)
    >>> agreements = agreement(rng.normal(0.3, 1.0, (4000, 50)), {"example": 1, "batch": 16})
    >>> {name: abs(f["measured"] - f["predicted"]) < 0.03 for name, f in agreements.items()}
    {'example': True, 'batch': True}
    >>> skewed = np.where(rng.random((4000, 50)) < 0.1, 14.0, -1.0)  # rarely large: the mean is above 0, most signs below
    >>> agreement(skewed, {"example": 1})["example"]["wrong"]
    1.0
    """
    mean_C, deviation_C = gradients_NxC.mean(axis=0), gradients_NxC.std(axis=0)
    alive = (deviation_C > 0) & (mean_C != 0)
    gradients_NxC, mean_C, deviation_C = gradients_NxC[:, alive], mean_C[alive], deviation_C[alive]
    snr_C = np.abs(mean_C) / deviation_C
    pooled = float(np.sqrt((mean_C**2).sum() / (deviation_C**2).sum()))
    rng = np.random.default_rng(1)
    agreements = {}
    for name, k in ks.items():
        if k == 1:
            signs_C = np.sign(gradients_NxC).mean(axis=0)
        else:
            drawn = (gradients_NxC[rng.integers(len(gradients_NxC), size=k)].mean(axis=0) for _ in range(draws))
            signs_C = np.mean([np.sign(mean) for mean in drawn], axis=0)
        right_C = signs_C * np.sign(mean_C)
        agreements[name] = {
            "k": k,
            "measured": float(right_C.mean()),
            "predicted": float(np.mean([math.erf(x) for x in snr_C * math.sqrt(k / 2)])),
            "pooled": math.erf(pooled * math.sqrt(k / 2)),
            "snr": pooled * float(np.sqrt(k)),
            "wrong": float((right_C < 0).mean()) if k == 1 else float("nan"),
        }
    return {name: {key: value for key, value in f.items() if np.isfinite(value)} for name, f in agreements.items()}


STUDY = Study(
    "sign_placement",
    tune_then_run,
    analyse,
    quick=["batch_sizes = [16]", "rate_factors = [1.0, 2.0, 4.0]", "seeds = [0, 1, 2]"],
    quick_gin=["TRAIN_STEPS = 40", "WARMUP_STEPS = 8", "EVAL_PERIOD = 20", "EVAL_STEPS = 8", "MONITOR_PERIOD = 8"],
    measure=measure,
    pod=Pod(batch_sizes=[0.5, 4.0], bindings={"MONITOR_PERIOD": 500}),
)
