"""Plays a study's stages without training."""

from perex_t5x.experiments.studies import base
from perex_t5x.experiments.sweep import axes
from perex_t5x.experiments.sweep.runs import Result, Run


def played(stages, loss):
    """The stages' sweeps, and the values of every run in their order; `loss(values)` is None for a run that fails."""
    sweeps, outcomes = [], {}
    parts = next(stages)
    try:
        while True:
            sweeps.append(parts)
            for part in parts:
                rates = [{base.rate_axis(part): rate} for rate in base.rates(part)]
                for values in axes.product([base.arms(part), rates, [{"seed": seed} for seed in part.seeds]]):
                    run = Run(str(values), values, (), (), (), 8, 0.1, 5, values["seed"], 40)
                    if run.name not in outcomes:
                        outcomes[run.name] = (run, Result(run.name, eval_loss=loss(values)))
            parts = stages.send(list(outcomes.values()))
    except StopIteration:
        return sweeps, [run.values for run, _ in outcomes.values()]
