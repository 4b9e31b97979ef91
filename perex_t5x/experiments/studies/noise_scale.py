"""How large is the critical batch size, and how does it move over training?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perex_t5x.experiments.report import intervals
from perex_t5x.experiments.report.dataset import by_batch_size
from perex_t5x.experiments.report.intervals import Mean
from perex_t5x.experiments.report.load import LoadedRun, RunSet
from perex_t5x.experiments.studies import analysis
from perex_t5x.experiments.studies.base import Finding, Pod, Study, everything

PREFIX = "noise_scale_smoothed/"
SHARES = (0.05, 0.2, 0.5, 1.0)  # of the run, at which the scale is read
_WINDOW = 0.25  # of the share: measurements that far around it
_PAPER = (
    "Nothing that we know of. For its square-root rule, which 'breaks at large batch sizes', the critical batch size is the "
    "natural place; that is our reading. That the scale grows over training is known from McCandlish et al. 2018."
)


def analyse(folder: RunSet, path: str) -> list[Finding]:
    del path
    by_size = by_batch_size([run for run in folder.runs if run.finished])
    by_size = {size: runs for size, runs in by_size.items() if any(PREFIX + "all" in r.monitored for r in runs)}
    if not by_size:
        return []
    return [_over_training(by_size), _by_group(by_size)]


def read_at(run: LoadedRun, group: str, share: float) -> float:
    """The noise scale of a group after a share of the run: the geometric mean of the measurements around it."""
    steps, values = run.monitored.get(PREFIX + group, (np.empty(0), np.empty(0)))
    if not len(steps):
        return float("nan")
    reach = steps[-1] * share
    near = (np.abs(steps - reach) <= _WINDOW * reach) & np.isfinite(values) & (values > 0)
    return float(np.exp(np.mean(np.log(values[near])))) if near.any() else float("nan")


def over_seeds(runs: Sequence[LoadedRun], group: str, share: float) -> Mean:
    """Geometric mean and interval over the seeds."""
    m = intervals.mean_interval([np.log(read_at(run, group, share)) for run in runs])
    return m.mapped(lambda x: float(np.exp(x)))


def _over_training(by_size: dict[int, list[LoadedRun]]) -> Finding:
    rows, texts = [], []
    for size, runs in by_size.items():
        means = [over_seeds(runs, "all", share) for share in SHARES]
        rows.append([f"batch {size}", *(f"{m.mean:.3g} ({analysis.interval(m, 0)})" for m in means)])
        texts.append(f"{means[0].mean:.3g} to {means[-1].mean:.3g} examples in the runs with batch size {size}")
    examples = max(float(run.examples(run.evaluation[0])[-1]) for runs in by_size.values() for run in runs)
    text = (
        f"From {SHARES[0]:.0%} of the run to its end ({examples:,.0f} examples) the noise scale goes "
        f"from {'; from '.join(texts)}. Geometric means over seeds, with intervals."
    )
    columns = ["runs with", *(f"after {share:.0%}" for share in SHARES)]
    return analysis.finding(
        "The critical batch size over training", text, columns, rows, paper=_PAPER, plot="noise_scale"
    )


def _by_group(by_size: dict[int, list[LoadedRun]]) -> Finding:
    """Kinds of parameters at the end of the runs with the largest batch size, where measurements are clearest."""
    size, runs = list(by_size.items())[-1]
    groups = sorted({key.removeprefix(PREFIX) for run in runs for key in run.monitored if key.startswith(PREFIX)})
    rows, ends = [], {}
    for group in groups:
        first, last = (over_seeds(runs, group, share) for share in (SHARES[0], SHARES[-1]))
        ends[group] = last.mean
        rows.append([group, *(f"{m.mean:.3g} ({analysis.interval(m, 0)})" for m in (first, last))])
    named = {g: x for g, x in ends.items() if g != "all" and np.isfinite(x)}
    text = f"In the runs with batch size {size}."
    if named:
        low, high = min(named, key=lambda g: named[g]), max(named, key=lambda g: named[g])
        text += (
            f" At the end the clearest signal is that of {low} ({named[low]:.3g} examples), the weakest that of {high} "
            f"({named[high]:.3g}); all parameters together have {ends.get('all', float('nan')):.3g}."
        )
    columns = ["parameters", f"after {SHARES[0]:.0%}", "at the end"]
    return analysis.finding("By kind of parameter", text, columns, rows, plot="noise_scale")


STUDY = Study(
    "noise_scale",
    everything,
    analyse,
    quick=["seeds = [0, 1, 2]"],
    quick_gin=["TRAIN_STEPS = 160", "WARMUP_STEPS = 16", "EVAL_PERIOD = 80", "EVAL_STEPS = 8", "MONITOR_PERIOD = 8"],
    pod=Pod(batch_sizes=[1.0, 4.0], bindings={"MONITOR_PERIOD": 50}),
)
