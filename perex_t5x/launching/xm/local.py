"""--executor=local: every run a work unit of XManager on this machine, results as `perex_t5x.experiments.sweep` has them."""

from __future__ import annotations

import os
from typing import Any

from perex_t5x.errors import ConfigError
from perex_t5x.experiments.sweep import command
from perex_t5x.experiments.sweep.directory import InUseError
from perex_t5x.experiments.sweep.plan import Plan
from perex_t5x.experiments.sweep.runs import Result, absolute
from perex_t5x.launching.xm import following, single
from perex_t5x.launching.xm.experiment import Experiment


def launch(args: Any) -> int:
    """Runs the sweep, or the one run, to its end; returns the status of the command."""
    _check_flags(args)
    if not args.sweep:
        return single.launch(args)

    def run_plan(plan: Plan, folder: str) -> list[Result]:
        record = os.path.join(absolute(folder), "xmanager.json")
        try:
            with Experiment(args.name or plan.sweep.name, record) as experiment:
                return plan.run(folder, parallel=args.parallel, only=args.only, child=experiment.child)
        except InUseError as e:
            return following.instead(plan, absolute(folder), e, args.follow)

    return command.carry_out(args, run_plan)


def _check_flags(args: Any) -> None:
    slips = []
    if args.dir and "://" in args.dir:
        slips.append(f"--dir={args.dir}: --executor=local writes to a folder of this machine.")
    for name in ("topology", "slices", "spot", "reservation", "zone", "image"):
        if getattr(args, name):
            slips.append(f"--{name} is not for --executor=local, which runs on what this machine has.")
    if args.parallel is not None and args.parallel < 1:
        slips.append(f"--parallel={args.parallel}: must be at least 1.")
    if args.parallel is not None and not args.sweep:
        slips.append("--parallel is for a sweep: give --sweep, too.")
    if args.xm_use_multiplexer or args.xm_open_multiplexer_window:
        slips.append(
            "--xm_use_multiplexer: the runs write their output to log.txt in their folders, not to a terminal. "
            "Look at one with tail -f."
        )
    if slips:
        raise ConfigError("\n".join(slips))
