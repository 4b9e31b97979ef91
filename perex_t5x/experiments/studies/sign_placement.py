"""Where should the sign stand? Three placements, each at its own best rate, and a test of the signal-to-noise argument."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from typing import Any

from perex_t5x.experiments.report.folders import Study as Folder
from perex_t5x.experiments.report.intervals import Mean
from perex_t5x.experiments.report.load import Run
from perex_t5x.experiments.studies import analysis, signs
from perex_t5x.experiments.studies.base import Finding, Stages, Study, arms, narrowed
from perex_t5x.experiments.studies.noise_scale import over_seeds
from perex_t5x.experiments.studies.tuning import tune
from perex_t5x.experiments.sweep import Sweep

_LATEST = "sign_ema"
PLACES = {"micro_sign": "example", "sign_sgd": "batch", "sign_ema": "average"}
_PAPER = "SignEMA is best: the sign as late as possible, by a signal-to-noise argument."
_OURS = (
    "The argument is the paper's; the formulas are our reading: the signal-to-noise ratio that enters the sign is s, s√B, "
    "s√(B·N) with N = (1+β)/(1−β), and the expected direction erf of it over √2, for normal gradients."
)


def stages(sweep: Sweep, extensions: int) -> Stages:
    """Tunes every placement at every batch size, then runs each at its best rate on all seeds."""
    found = yield from tune(sweep, arms(sweep), extensions)
    yield [narrowed(sweep, tuned.arm, [tuned.best], sweep.seeds) for tuned in found]


def analyse(folder: Folder, path: str) -> list[Finding]:
    by_arm = analysis.grouped(folder.runs, lambda run: (run.batch_size, str(run.optimizer)))
    at_best = {}
    for arm, runs in by_arm.items():
        best = analysis.best_rate(runs)
        if best is not None:
            at_best[arm] = [run for run in runs if run.finished and analysis.rate_of(run) == best]
    found = [_order_finding(by_arm, at_best)] if at_best else []
    return [*found, *_snr_finding(at_best), *_signs_finding(path)]


def _order_finding(by_arm: dict[Any, list[Run]], at_best: dict[Any, list[Run]]) -> Finding:
    rows, texts = [], []
    for size in sorted({size for size, _ in at_best}):
        here = {name: runs for (s, name), runs in at_best.items() if s == size}
        ranked = sorted(here, key=lambda name: analysis.final(here[name]).mean)
        latest = here.get(_LATEST, [])
        for name in ranked:
            m, difference = analysis.final(here[name]), analysis.paired(here[name], latest)
            edge = analysis.on_edge(by_arm[size, name], analysis.rate_of(here[name][0]))
            less = f"{difference.mean:+.4f} ({analysis.interval(difference)})" if difference.count else "–"
            rows.append([size, name, analysis.number(here[name][0].learning_rate, 5), "yes" if edge else "no",
                         analysis.number(m.mean), analysis.interval(m), m.count, less])  # fmt: skip
        texts.append(f"batch size {size}: {_ordered(ranked, here)}")
    edges = [f"{row[1]} at {row[0]}" for row in rows if row[3] == "yes"]
    text = (
        "From the lowest validation loss, each at its own best rate ('<' where the 95 % interval of the difference, seed by "
        f"seed, leaves out 0): {'; '.join(texts)}."
    )
    text += f" On the edge of its grid is the best rate of {', '.join(edges)}." if edges else ""
    columns = ["batch size", "optimizer", "best rate", "on the edge", "validation loss", "interval", "seeds",
               f"less {_LATEST}'s"]  # fmt: skip
    table = {"columns": columns, "rows": rows}
    return {"title": "Which placement ends lowest", "text": text, "paper": _PAPER, "table": table, "plot": "basins"}


def _ordered(ranked: Sequence[str], here: dict[str, list[Run]]) -> str:
    """Names with the sign between neighbours.

    >>> done = lambda loss: [Run("a", seed=s, status="done", final_loss=loss + 0.01 * s) for s in range(3)]
    >>> _ordered(["sign_ema", "micro_sign"], {"sign_ema": done(1.0), "micro_sign": done(2.0)})
    'sign_ema < micro_sign'
    """
    text = ranked[0]
    for before, name in itertools.pairwise(ranked):
        text += f" {'<' if analysis.apart(analysis.paired(here[before], here[name])) else '≈'} {name}"
    return text


def _snr_finding(at_best: dict[Any, list[Run]]) -> list[Finding]:
    """What the monitor measured in the second half of the runs, and what enters the sign by the argument."""
    rows = []
    for (size, name), runs in sorted(at_best.items()):
        scale = over_seeds(runs, "all", 0.8)
        if not scale.count or name not in PLACES:
            continue
        s = Mean(*(x**-0.5 for x in (scale.mean, scale.high, scale.low)), scale.count)  # s² = 1 / noise scale
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
    columns = [
        "batch size",
        "optimizer",
        "s measured",
        "interval",
        "predicted to enter the sign",
        "predicted direction",
    ]
    table = {"columns": columns, "rows": rows}
    return [{"title": "Signal to noise", "text": text, "paper": _OURS, "table": table, "plot": "snr"}]


def _averaged(run: Run) -> float:
    """N = (1+β)/(1−β) of a run's optimizer."""
    b1 = next((value for name, value in run.config.items() if name.endswith(f"{run.optimizer}.b1")), "0.9")
    try:
        return (1 + float(b1)) / (1 - float(b1))
    except ValueError:
        return 19.0


def _signs_finding(path: str) -> list[Finding]:
    """The direct measurement, if it was made."""
    try:
        with open(os.path.join(path, signs.FILE), encoding="utf-8") as f:
            found = json.load(f)
    except (FileNotFoundError, ValueError):
        return []
    rows, texts = [], []
    for entry in found["measured"]:
        for name, values in entry["signs"].items():
            place, size = name.split()
            if place == "example" and size != str(found["batch_sizes"][0]):
                continue  # the same at every batch size
            shown = "1" if place == "example" else size
            rows.append([entry["step"], place, shown, values["k"], analysis.number(values["snr"], 3),
                         *(analysis.number(values[key], 3) for key in ("measured", "predicted", "pooled"))])  # fmt: skip
        wrong = next(v["wrong"] for v in entry["signs"].values() if "wrong" in v)
        texts.append(f"{wrong:.0%} at step {entry['step']}")
    text = (
        f"In the training {found['run']}, at fixed parameters: how far the sign of a mean of k examples points to the sign "
        "of the expected gradient (1: always, 0: by chance), mean over coordinates; measured by drawing, predicted for "
        "normal gradients with each coordinate's own ratio, and with one ratio for all. Coordinates in which most single "
        f"examples point away from the expected gradient: {', '.join(texts)}."
    )
    columns = [
        "step",
        "sign of the",
        "batch size",
        "k",
        "ratio, pooled",
        "measured",
        "predicted",
        "predicted, one ratio",
    ]
    table = {"columns": columns, "rows": rows}
    return [{"title": "The argument, measured", "text": text, "paper": _OURS, "table": table}]


STUDY = Study(
    "sign_placement",
    stages,
    analyse,
    quick=["batch_sizes = [16]", "rate_factors = [1.0, 2.0, 4.0]", "seeds = [0, 1, 2]"],
    quick_gin=["TRAIN_STEPS = 40", "WARMUP_STEPS = 8", "EVAL_PERIOD = 20", "EVAL_STEPS = 8", "MONITOR_PERIOD = 8"],
    measure=signs.measure,
)
