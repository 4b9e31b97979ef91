"""By which second moment should the momentum be divided? The Adam family, each member at its own best rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from perex_t5x.experiments.report.dataset import losses_by_seed
from perex_t5x.experiments.report.intervals import mean_interval
from perex_t5x.experiments.report.load import LoadedRun, RunSet
from perex_t5x.experiments.studies import analysis
from perex_t5x.experiments.studies.base import Finding, Pod, Study, tune_then_run
from perex_t5x.optimizers import descend, scale_by_moments
from perex_t5x.optimizers.base import Mask, StatisticsTransformation

_BASELINE = "adamw"
_PAPER = "A preconditioner dominated by μ² serves best."
_PAPER_CLIPPING = (
    "MicroAdam and MicroAdamVar become more stable with gradient clipping and still end behind Adam. (Which clipping "
    "is not known to us; here every example's gradient is clipped.)"
)
_SIGNAL, _VARIANCE = ("micro_adam_msq", "adamw"), ("micro_adam", "micro_adam_var")
Arm = tuple[str, str]  # optimizer, clipping in words


def analyse(folder: RunSet, path: str) -> list[Finding]:
    del path
    by_arm = analysis.grouped(folder.runs, arm_of)
    at_best = analysis.at_best_rate(by_arm)
    if not at_best:
        return []
    return [
        _order_finding(by_arm, at_best),
        *_contrast_finding(at_best),
        *_clipping_finding(by_arm, at_best),
        _basin_finding(by_arm, at_best),
    ]


def arm_of(run: LoadedRun) -> Arm:
    """Optimizer and clipping.

    >>> arm_of(LoadedRun("a", optimizer="adamw", values={"Trainer.clip_norm": 2.0}))
    ('adamw', 'clipped at 2')
    """
    norm = next((v for axis, v in run.values.items() if axis.endswith("clip_norm")), None)
    return str(run.optimizer), "" if norm is None else f"clipped at {norm:g}"


def label(arm: Arm) -> str:
    return ", ".join(part for part in arm if part)


def _order_finding(by_arm: dict[Arm, list[LoadedRun]], at_best: dict[Arm, list[LoadedRun]]) -> Finding:
    """All arms by their loss, with the difference to the baseline."""
    ranked = sorted(at_best, key=lambda arm: analysis.final(at_best[arm]).mean)
    baseline = at_best.get((_BASELINE, ""), [])
    rows, groups = [], {"better": [], "worse": [], "alike": []}
    for arm in ranked:
        runs, m = at_best[arm], analysis.final(at_best[arm])
        difference = analysis.paired(runs, baseline)
        edge = analysis.on_edge(by_arm[arm], analysis.rate_of(runs[0]))
        rows.append([label(arm), analysis.number(runs[0].learning_rate, 5), "yes" if edge else "no", analysis.number(m.mean),
                     analysis.interval(m), m.count, analysis.signed(difference)])  # fmt: skip
        if arm != (_BASELINE, ""):
            kind = "alike" if not analysis.apart(difference) else "better" if difference.mean < 0 else "worse"
            groups[kind].append(label(arm))
    text = f"At its own best rate each, from the lowest validation loss: {'; '.join(label(arm) for arm in ranked)}. "
    said = {
        "better": f"Clearly below {_BASELINE} (95 % interval of the difference, seed by seed)",
        "worse": f"clearly above {_BASELINE}",
        "alike": f"not apart from {_BASELINE}",
    }
    parts = [f"{said[kind]}: {', '.join(names)}" for kind, names in groups.items() if names]
    text += "; ".join(parts)[:1].upper() + "; ".join(parts)[1:] + "."
    edges = [row[0] for row in rows if row[2] == "yes"]
    text += (
        f" On the edge of its grid is the best rate of {', '.join(edges)}." if edges else " No best rate is on an edge."
    )
    columns = ["optimizer", "best rate", "on the edge", "validation loss", "interval", "seeds", f"less {_BASELINE}'s"]
    return analysis.finding(f"{label(ranked[0])} ends lowest", text, columns, rows, paper=_PAPER, plot="basins")


def _contrast_finding(at_best: dict[Arm, list[LoadedRun]]) -> list[Finding]:
    """Those that weigh μ² most against those that weigh σ² most."""

    def of_seed(names: tuple[str, str], clipping: list[str]) -> dict[int | None, float]:
        """The mean over these arms, for seeds that all of them have."""
        arms = [losses_by_seed(at_best.get((name, c), [])) for name in names for c in clipping]
        return {seed: sum(a[seed] for a in arms) / len(arms) for seed in set.intersection(*map(set, arms))}

    clippings = sorted({clipping for _, clipping in at_best})
    rows = []
    for said, chosen in [*((c or "not clipped", [c]) for c in clippings), ("all", clippings)]:
        signal, variance = of_seed(_SIGNAL, chosen), of_seed(_VARIANCE, chosen)
        difference = mean_interval([variance[seed] - signal[seed] for seed in variance if seed in signal])
        if difference.count:
            rows.append(
                [said, analysis.signed(difference), difference.count, "yes" if analysis.apart(difference) else "no"]
            )
    if not rows:
        return []
    text = (
        f"The mean of {' and '.join(_VARIANCE)}, which are dominated by σ², less that of {' and '.join(_SIGNAL)}, in which "
        f"σ² counts for little, seed by seed: {rows[-1][1]}. It is the comparison that the paper's sentence is about, and "
        "less noisy than single pairs."
    )
    columns = ["", "difference", "seeds", "apart"]
    return [analysis.finding("Signal or variance", text, columns, rows, paper=_PAPER, plot="basins")]


def _clipping_finding(by_arm: dict[Arm, list[LoadedRun]], at_best: dict[Arm, list[LoadedRun]]) -> list[Finding]:
    """What clipping changes: at the best rate, and beyond it."""
    rows, texts = [], []
    for arm in at_best:
        plain = (arm[0], "")
        if not arm[1] or plain not in at_best:
            continue
        change = analysis.paired(at_best[arm], at_best[plain])
        beyond = [_beyond(by_arm[a], at_best[a]) for a in (plain, arm)]
        rows.append([arm[0], analysis.signed(change), *(analysis.number(x) for x in beyond)])
        verb = "nothing that shows" if not analysis.apart(change) else f"{change.mean:+.3f}"
        texts.append(f"{arm[0]} {verb}")
    if not rows:
        return []
    text = (
        f"At the best rates clipping changes the loss by: {'; '.join(texts)}. How stable an optimizer is shows beyond its "
        "best rate: the loss at twice that rate, less that at the best (the same seeds)."
    )
    columns = ["optimizer", "clipping changes the loss by", "rise at twice the rate", "the same, clipped"]
    title = "What clipping of examples changes"
    return [analysis.finding(title, text, columns, rows, paper=_PAPER_CLIPPING, plot="basins")]


def _beyond(runs: Sequence[LoadedRun], best: Sequence[LoadedRun]) -> float | None:
    """How much higher the loss is at twice the best rate; inf where runs failed there, None where none was made."""
    rate = analysis.rate_of(best[0])
    there = [run for run in runs if math.isclose(analysis.rate_of(run), 2 * rate)]
    if not there:
        return None
    return math.inf if not all(run.finished for run in there) else analysis.paired(there, best).mean


def _basin_finding(by_arm: dict[Arm, list[LoadedRun]], at_best: dict[Arm, list[LoadedRun]]) -> Finding:
    """All rates that were tried."""
    rates = sorted({run.learning_rate for runs in by_arm.values() for run in runs if run.learning_rate})
    rows = []
    for arm, runs in by_arm.items():
        means = [analysis.final([run for run in runs if run.learning_rate == rate]).mean for rate in rates]
        rows.append([label(arm), *(analysis.number(mean, 3) for mean in means)])
    best = {label(arm): runs[0].learning_rate for arm, runs in at_best.items()}
    text = "Validation loss at every rate tried, means over the seeds that were run there. Best rates: "
    text += "; ".join(f"{name} {rate:g}" for name, rate in best.items()) + "."
    columns = ["optimizer", *(f"{rate:g}" for rate in rates)]
    paper = "Our reading: where the signal is weak √v of MicroAdam is about √B times Adam's, and so is its best rate."
    return analysis.finding("The rates", text, columns, rows, paper=paper, plot="basins")


def adam_between(
    learning_rate: Any,
    a: float = 1.0,
    b: float | str = 0.25,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    mask: Mask | None = None,
) -> StatisticsTransformation:
    """Adam's step with v averaging a·μ̂² + b·σ̂², see `optimizers.scale_by_moments`.

    (1, "1/B") is Adam, (1, 1) MicroAdam, (0, 1) MicroAdamVar, (1, 0) MicroAdamMSQ; other arguments as theirs.

    >>> adam_between(0.1).needs
    ('mean', 'mean_square')
    """
    direction = scale_by_moments(a, b, b1, b2, eps, name="adam_between")
    return descend(direction, learning_rate, weight_decay, mask)


STUDY = Study(
    "preconditioner",
    tune_then_run,
    analyse,
    quick=[
        "files = {'optimizer': ['optimizers/adamw.gin', 'optimizers/micro_adam.gin']}",
        "rate_factors = [0.5, 1.0, 2.0]",
        "seeds = [0, 1, 2]",
    ],
    quick_gin=["TRAIN_STEPS = 60", "WARMUP_STEPS = 10", "EVAL_PERIOD = 30", "EVAL_STEPS = 8"],
    pod=Pod(grid={}),
)
