"""The command `python -m perex_t5x.experiments.sweep`: flags, what it prints, exit codes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perex_t5x.cli import flags as cli_flags
from perex_t5x.errors import ConfigError, Reason
from perex_t5x.experiments.sweep import Sweep

if TYPE_CHECKING:
    from perex_t5x.experiments.sweep.plan import Plan
    from perex_t5x.experiments.sweep.runs import Result


def define_flags() -> None:
    from absl import flags

    cli_flags.define_training_flags()
    cli_flags.define_sweep_flags()
    flags.DEFINE_integer("parallel", None, "Runs at once; default 1, with --together the number of cores.")
    flags.DEFINE_bool(
        "together", False, "In this process, with one compiled step for all rates and seeds; small models."
    )
    flags.DEFINE_bool("print_commands", False, "Check, print the command of every run, and stop.")


def passed_on(args: Any) -> list[str]:
    """Flags that the runs' own processes get, too."""
    caches = args.seqio_additional_cache_dirs
    return [
        *([f"--tfds_data_dir={args.tfds_data_dir}"] if args.tfds_data_dir else []),
        *([f"--seqio_additional_cache_dirs={','.join(caches)}"] if caches else []),
    ]


def main(args: Any) -> int:
    """Exit codes: 0 all runs finished; 1 some failed other than by diverging; 2 a configuration error; 130 interrupted."""
    if not args.sweep:
        raise ConfigError("no --sweep given. To begin with: --sweep=sweeps/learning_rate.gin --together")
    options = {"together": args.together, "parallel": args.parallel, "only": args.only}
    return carry_out(args, lambda plan, folder: plan.run(folder, **options))


def carry_out(args: Any, run_plan: Callable[[Plan, str], list[Result]]) -> int:
    """Checks the sweep that the flags describe, has `run_plan(plan, folder)` run it, and says what came of it.

    Returns the status with which the command ends.
    """
    from perex_t5x.cli import gin_command
    from perex_t5x.experiments.sweep import overview

    gin_command.load_training(args)
    sweep = Sweep.load(args.sweep, args.sweep_bindings, args.gin_search_paths)
    plan = sweep.plan(args.gin_file, args.gin_bindings, args.gin_search_paths, flags=passed_on(args))
    folder = args.dir or f"sweeps/{sweep.name}"
    if args.print_commands:
        for run in plan.runs:
            print(shlex.join(run.command(folder, "python")))
        return 0
    _announce(plan, folder)
    if args.dry_run:
        from perex_t5x.experiments.sweep.directory import Folder
        from perex_t5x.experiments.sweep.runs import absolute

        if problems := Folder(absolute(folder)).check(plan):
            raise ConfigError("\n".join(problems))
        for run in plan.runs:
            print(f"  {run.name}: {'; '.join(run.own_bindings)}")
        print("dry run: the sweep is fine. Nothing was run.")
        return 0
    try:
        results = run_plan(plan, folder)
    except KeyboardInterrupt as e:
        print(f"\n{e}", file=sys.stderr, flush=True)
        return Reason.INTERRUPTED.exit_code
    print(overview.closing_words(folder, plan.runs, results))
    return Reason.ERROR.exit_code if any(r.status == "failed" and not r.final for r in results) else 0


def _announce(plan: Any, folder: str) -> None:
    axes = ", ".join(f"{len(values)} {axis}" for axis, values in plan.axes().items())
    print(f"{plan.sweep.name}: {len(plan.runs)} runs ({axes}) in {folder}")
    if plan.sweep.batch_sizes is not None:
        print(plan.described()["weight_decay"])
    for note in dict.fromkeys(f"batch size {run.batch_size}: {run.note}" for run in plan.runs if run.note):
        print(note)
