"""Does the sign of a gradient point where the expected one does? Measured, beside what normal gradients would give.

Many examples' gradients are taken at fixed parameters. They are the whole population: its mean μ and deviation σ are known
exactly, coordinate by coordinate, and so is what is predicted for a mean of k examples drawn from it, were it normal:

    E[sign(mean of k)] · sign(μ) = erf(s√k / √2)        s = |μ|/σ

Measured is the same by drawing. They differ where gradients are skewed or heavy-tailed and k is too small to hide it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perex_t5x.cli.progress import Progress
from perex_t5x.experiments.sweep.plan import Plan
from perex_t5x.experiments.sweep.runs import Run
from perex_t5x.files import write_atomically

FILE = "signs.json"
_COORDINATES = 4096  # of all parameters, drawn once
_DRAWS = 32
_CHUNK = 64  # examples at a time


def measure(plan: Plan, folder: str, quick: bool) -> None:
    """Trains one configuration of the sweep and measures on the way; nothing is done where the file is there."""
    path = os.path.join(folder, FILE)
    if os.path.exists(path):
        return
    size = plan.sweep.base_batch_size or plan.runs[0].batch_size
    # The last seed was run at the best rate alone.
    run = min(plan.runs, key=lambda r: (r.batch_size != size, "sign_ema" not in r.name, -r.seed))
    print(f"measuring signs in the training {run.name}", flush=True)
    sizes = sorted({r.batch_size for r in plan.runs})
    found = along_training(run, folder, sizes, examples=512 if quick else 4096)
    write_atomically(path, json.dumps(found, indent=1) + "\n")


def along_training(run: Run, folder: str, sizes: Sequence[int], examples: int) -> dict[str, Any]:
    """Measurements after the warm-up and at the end of one run; its b1 says how far a moving average reaches."""
    from perex_t5x.experiments.sweep import in_process, plan, scaling
    from perex_t5x.train import Training
    from perex_t5x.utils import CheckpointConfig

    with (
        plan.quiet_logging(),
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(1) as compiler,
    ):
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

    def compile(self, *unused: Any) -> None:
        pass

    def evaluate(self, step: int, params: Any) -> dict[str, dict[str, float]]:
        if step in self.steps:
            gradients_NxC = _gradients(self.model, params, self.feed, self.last_step, self.examples)
            self.measured[step] = agreement(gradients_NxC, self.ks)
        return {}


def _reach(size: int, averaged: float) -> dict[str, int]:
    """How many examples stand behind a sign, by its place."""
    return {"example": 1, "batch": size, "average": round(size * averaged)}


def _gradients(model: Any, params: Any, feed: Any, first: int, examples: int) -> np.ndarray:
    """Gradients of single examples that the training has not seen, at some coordinates."""
    import jax
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
    >>> found = agreement(rng.normal(0.3, 1.0, (4000, 50)), {"example": 1, "batch": 16})
    >>> {name: abs(f["measured"] - f["predicted"]) < 0.03 for name, f in found.items()}
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
    found = {}
    for name, k in ks.items():
        if k == 1:
            signs_C = np.sign(gradients_NxC).mean(axis=0)
        else:
            drawn = (gradients_NxC[rng.integers(len(gradients_NxC), size=k)].mean(axis=0) for _ in range(draws))
            signs_C = np.mean([np.sign(mean) for mean in drawn], axis=0)
        right_C = signs_C * np.sign(mean_C)
        found[name] = {
            "k": k,
            "measured": float(right_C.mean()),
            "predicted": float(np.mean([math.erf(x) for x in snr_C * math.sqrt(k / 2)])),
            "pooled": math.erf(pooled * math.sqrt(k / 2)),
            "snr": pooled * float(np.sqrt(k)),
            "wrong": float((right_C < 0).mean()) if k == 1 else float("nan"),
        }
    return {name: {key: value for key, value in f.items() if np.isfinite(value)} for name, f in found.items()}
