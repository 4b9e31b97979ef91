"""Does clipping make the Adam family more stable? Every member at its best rate and beyond it, clipped or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optax

from perex_t5x import optimizers
from perex_t5x.experiments.report.intervals import Mean, mean_interval
from perex_t5x.experiments.report.load import LoadedRun, RunSet
from perex_t5x.experiments.studies import analysis
from perex_t5x.experiments.studies.base import Finding, Pod, Stages, Study, arms, narrowed, tune
from perex_t5x.experiments.sweep import Sweep

FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)  # of the best rate without clipping; all of them for what is clipped
BEYOND = FACTORS[2:]
GUESSING = math.log(256)  # the loss of a byte drawn blindly
BATCH, EXAMPLE, DATA = "max_norm", "clip_norm", "mixture_or_task_name"  # how the axes' names end
_BASELINE = "adamw"
_PAPER = (
    "MicroAdam and MicroAdamVar become more stable with gradient clipping and still end behind Adam. (Which clipping is "
    "not known to us.)"
)


class Arm(NamedTuple):
    """What is compared: everything but rate and seed."""

    data: str
    optimizer: str
    clipping: str  # in words; "" for none


# --- the stages -------------------------------------------------------------------------------------------------------


def stages(sweep: Sweep, extensions: int) -> Stages:
    """Tunes what is not clipped; then runs it and its clipped kin at the same multiples of the best rate."""
    clippings = [arm for arm in arms(sweep) if len(_norms(arm)) < 2]
    tuned = yield from tune(sweep, [arm for arm in clippings if not _norms(arm)], extensions)
    best = {_unclipped(t.arm): t.best for t in tuned}
    parts = []
    # What matters most comes first: interrupted, the study has compared something.
    for arm in sorted(clippings, key=lambda a: (_data(a) != "text", EXAMPLE in _norms(a), BATCH in _norms(a))):
        rates = [factor * best[_unclipped(arm)] for factor in (FACTORS if _norms(arm) else FACTORS[1:])]
        parts.append(narrowed(sweep, arm, rates, sweep.seeds))
    yield parts


def _norms(values: Mapping[str, Any]) -> dict[str, float]:
    """Which clipping is on.

    >>> _norms({"Trainer.clip_norm": 2.0, "clipping.batch_clipped.max_norm": None})
    {'clip_norm': 2.0}
    """
    ends = {axis.rpartition(".")[2]: value for axis, value in values.items()}
    return {end: ends[end] for end in (BATCH, EXAMPLE) if ends.get(end) is not None}


def _unclipped(arm: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(value for axis, value in arm.items() if not axis.endswith((BATCH, EXAMPLE)))


def _data(values: Mapping[str, Any]) -> str:
    """'text' or 'outliers'."""
    task = next((str(value) for axis, value in values.items() if axis.endswith(DATA)), "")
    return "outliers" if task.endswith("outliers") else "text"


# --- the analysis -----------------------------------------------------------------------------------------------------


def analyse(folder: RunSet, path: str) -> list[Finding]:
    del path
    by_arm = analysis.grouped(folder.runs, arm_of)
    best = {arm: analysis.best_rate(runs) for arm, runs in by_arm.items()}
    plain = {arm: rate for arm, rate in best.items() if not arm.clipping and rate is not None}
    if not plain:
        return []
    return [*_stability(by_arm, plain), *_behind(by_arm), _basins(by_arm, plain)]


def arm_of(run: LoadedRun) -> Arm:
    """Data, optimizer and clipping.

    >>> arm_of(LoadedRun("a", optimizer="adamw", values={"Trainer.clip_norm": 2.0}))
    Arm(data='text', optimizer='adamw', clipping='examples at 2')
    """
    kinds = {BATCH: "batch", EXAMPLE: "examples"}
    words = " and ".join(f"{kinds[end]} at {norm:g}" for end, norm in _norms(run.values).items())
    return Arm(_data(run.values), str(run.optimizer), words)


def capped(run: LoadedRun) -> float:
    """The final loss, at most that of guessing; a run that diverged guesses.

    >>> capped(LoadedRun("a", status="done", final_loss=2.5)), round(capped(LoadedRun("a", status="failed")), 3)
    (2.5, 5.545)
    """
    return GUESSING if run.finished_loss is None else min(run.finished_loss, GUESSING)


def beyond(runs: Sequence[LoadedRun], best: float) -> dict[int | None, float]:
    """Seed -> the mean capped loss at 2, 4 and 8 times the rate `best`, for seeds that ended at all of them."""
    by_seed: dict[int | None, dict[float, float]] = {}
    for run in runs:
        for factor in BEYOND:
            if ended(run) and math.isclose(analysis.rate_of(run), factor * best):
                by_seed.setdefault(run.seed, {})[factor] = capped(run)
    return {seed: sum(at.values()) / len(BEYOND) for seed, at in by_seed.items() if len(at) == len(BEYOND)}


def ended(run: LoadedRun) -> bool:
    """Whether it is a result: done, or diverged."""
    return run.finished or (run.status == "failed" and ("diverged" in run.error or "validation loss" in run.error))


def _difference(losses: Mapping[int | None, float], others: Mapping[int | None, float]) -> Mean:
    return mean_interval([losses[seed] - others[seed] for seed in losses if seed in others])


def _stability(by_arm: dict[Arm, list[LoadedRun]], plain: dict[Arm, float]) -> list[Finding]:
    rows, stable, unstable, alike = [], [], [], []
    for arm, runs in by_arm.items():
        unclipped = arm._replace(clipping="")
        if unclipped not in plain:
            continue
        rate = plain[unclipped]
        there = beyond(runs, rate)
        change = _difference(there, beyond(by_arm[unclipped], rate))
        at = [[r for r in runs if ended(r) and math.isclose(analysis.rate_of(r), f * rate)] for f in (1.0, *BEYOND)]
        lost = [run for runs_there in at[1:] for run in runs_there]
        share = sum(capped(run) >= GUESSING for run in lost) / len(lost) if lost else None
        means = [analysis.number(mean_interval([capped(r) for r in rs]).mean, 3) if rs else None for rs in at]
        rows.append(
            [*_words(arm), *means, analysis.number(share, 2), analysis.signed(change, 3) if arm.clipping else "–"]
        )
        if arm.clipping and change.count:
            kind = alike if not analysis.apart(change) else stable if change.mean < 0 else unstable
            kind.append(f"{arm.optimizer} on {arm.data}, {arm.clipping} ({change.mean:+.3f})")
    said = [("Lower with clipping", stable), ("higher", unstable), ("not apart", alike)]
    compared = "; ".join(f"{words}: {', '.join(names)}" for words, names in said if names)
    if not compared:
        return []
    text = (
        f"The mean loss at {_factors(BEYOND)} times the best rate without clipping, with clipping less without it, seed by "
        f"seed (95 % interval); what diverged or ended above guessing counts as {GUESSING:.3f}. {_sentence(compared)}."
    )
    columns = ["data", "optimizer", "clipping", "at the best rate", *(f"at {f:g} times" for f in BEYOND), "share lost",
               "clipping changes the mean by"]  # fmt: skip
    return [analysis.finding("Stability beyond the best rate", text, columns, rows, paper=_PAPER, plot="basins")]


def _behind(by_arm: dict[Arm, list[LoadedRun]]) -> list[Finding]:
    """Each at its own best rate, against AdamW under the same clipping."""
    at_best = analysis.at_best_rate(by_arm)
    rows, groups = [], {"behind": [], "before": [], "not apart": []}
    for arm, runs in at_best.items():
        adam = at_best.get(arm._replace(optimizer=_BASELINE), [])
        unclipped = at_best.get(arm._replace(clipping=""), [])
        difference, gain = analysis.paired(runs, adam), analysis.paired(runs, unclipped)
        m, rate = analysis.final(runs), analysis.rate_of(runs[0])
        is_baseline = arm.optimizer == _BASELINE
        rows.append([*_words(arm), analysis.number(runs[0].learning_rate, 5),
                     "yes" if analysis.on_edge(by_arm[arm], rate) else "no", analysis.number(m.mean), analysis.interval(m),
                     m.count, "–" if is_baseline else analysis.signed(difference),
                     analysis.signed(gain) if arm.clipping else "–"])  # fmt: skip
        if not is_baseline and difference.count:
            kind = "not apart" if not analysis.apart(difference) else "behind" if difference.mean > 0 else "before"
            groups[kind].append(f"{arm.optimizer} on {arm.data}{', ' * bool(arm.clipping)}{arm.clipping}")
    compared = "; ".join(f"{words}: {', '.join(names)}" for words, names in groups.items() if names)
    if not compared:
        return []
    text = (
        f"Each at its own best rate, seed by seed against {_BASELINE} on the same data with the same clipping. "
        f"{_sentence(compared)}."
    )
    columns = ["data", "optimizer", "clipping", "best rate", "on the edge", "validation loss", "interval", "seeds",
               f"less {_BASELINE}'s", "less that without clipping"]  # fmt: skip
    return [analysis.finding(f"Behind {_BASELINE}?", text, columns, rows, paper=_PAPER, plot="basins")]


def _basins(by_arm: dict[Arm, list[LoadedRun]], plain: dict[Arm, float]) -> Finding:
    rates = sorted({run.learning_rate for runs in by_arm.values() for run in runs if run.learning_rate})
    rows = []
    for arm, runs in by_arm.items():
        losses = [[capped(run) for run in runs if run.learning_rate == rate and ended(run)] for rate in rates]
        rows.append([*_words(arm), *(analysis.number(mean_interval(at).mean, 3) if at else None for at in losses)])
    text = f"Validation loss at every rate tried, at most {GUESSING:.3f}, means over the seeds that were run there. "
    text += f"Best without clipping, in multiples of the file's rate: {', '.join(_best_words(plain))}."
    return analysis.finding("The rates", text, ["data", "optimizer", "clipping", *(f"{r:g}" for r in rates)], rows,
                            plot="basins")  # fmt: skip


def _best_words(plain: dict[Arm, float]) -> list[str]:
    return [f"{arm.optimizer} on {arm.data} {rate:g}" for arm, rate in plain.items()]


def _words(arm: Arm) -> list[str]:
    return [arm.data, arm.optimizer, arm.clipping or "none"]


def _factors(factors: Sequence[float]) -> str:
    """
    >>> _factors((2.0, 4.0, 8.0))
    '2, 4 and 8'
    """
    words = [f"{factor:g}" for factor in factors]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- clipping of the batch gradient, in Gin ---------------------------------------------------------------------------


def batch_clipped(
    learning_rate: Any, optimizer: Callable[..., Any] = optax.adamw, max_norm: float | None = None
) -> Any:
    """An optimizer behind `optimizers.clip_by_global_norm`, for sweeps/batch_clip.gin; as it is where `max_norm` is None.

    >>> optimizers.needs_of(batch_clipped(0.1, optimizers.micro_adam, 1.0), 0.0)
    ('mean', 'mean_square')
    """
    made = optimizer(learning_rate=learning_rate)
    return made if max_norm is None else optax.chain(optimizers.clip_by_global_norm(max_norm), made)


STUDY = Study(
    "clipping",
    stages,
    analyse,
    quick=[
        "files = {'optimizer': ['optimizers/adamw.gin', 'optimizers/micro_adam.gin']}",
        "grid = {'clipping.batch_clipped.max_norm': [None, 0.25]}",
        "rate_factors = [2.0, 4.0]",
        "seeds = [0, 1, 2]",
    ],
    quick_gin=["TRAIN_STEPS = 60", "WARMUP_STEPS = 10", "EVAL_PERIOD = 30", "EVAL_STEPS = 8"],
    pod=Pod(grid={"clipping.batch_clipped.max_norm": [None, 1.0], "trainer.Trainer.clip_norm": [None, 2.0]}),
)
