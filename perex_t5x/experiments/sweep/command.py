"""The command `python -m perex_t5x.experiments.sweep`: flags, what it prints, exit codes."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from perex_t5x import cli
from perex_t5x.cli import console
from perex_t5x.errors import ConfigError
from perex_t5x.experiments.sweep import Sweep, summary

if TYPE_CHECKING:
    from perex_t5x.experiments.sweep.plan import Plan
    from perex_t5x.experiments.sweep.runs import Result


def main(usage: str | None, argv: Sequence[str] | None = None) -> None:
    """Does not return. Exit status: 0 all runs finished; 1 some failed other than by diverging; 2 a slip; 130 stopped."""
    from perex_t5x.preflight import command

    cli.define_flags()
    define_sweep_flags()
    flags.DEFINE_integer("parallel", None, "Runs at once; default 1, with --together the number of cores.")
    flags.DEFINE_bool(
        "together", False, "In this process, with one compiled step for all rates and seeds; small models."
    )
    flags.DEFINE_bool("print_commands", False, "Check, print the command of every run, and stop.")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    command.run(_main, usage, rewritten(sys.argv if argv is None else argv))


def define_sweep_flags() -> None:
    """Those that say what a sweep is; the launchers have them, too."""
    flags.DEFINE_string("sweep", None, "Gin file of the sweep, such as sweeps/sqrt_lr.gin.")
    flags.DEFINE_multi_string("sweep_bindings", [], "'seeds = [0]' in place of the file's. Shorter: --sweep.seeds=[0].")
    flags.DEFINE_string("dir", None, "The sweep's folder; default sweeps/<name>.")
    flags.DEFINE_string("only", None, "Regular expression: run only runs in whose names it is found.")


def rewritten(argv: Sequence[str]) -> list[str]:
    """--sweep.NAME=VALUE as absl reads it.

    >>> rewritten(["sweep", "--sweep.seeds=[0]", "--dir=a"])
    ['sweep', '--sweep_bindings=seeds = [0]', '--dir=a']
    """
    return [re.sub(r"^--?sweep\.(\w+)=", r"--sweep_bindings=\1 = ", arg, flags=re.DOTALL) for arg in argv]


def start(args: Any) -> None:
    """What has to be there before Gin files are read."""
    console.import_tensorflow_quietly()
    from perex_t5x import train as train_script

    sys.modules["__main__"].train = train_script.train  # ported files say `import __main__ as train_script`
    cli._configure_data()


def passed_on(args: Any) -> list[str]:
    """Flags that the runs' own processes get, too."""
    caches = args.seqio_additional_cache_dirs
    return [
        *([f"--tfds_data_dir={args.tfds_data_dir}"] if args.tfds_data_dir else []),
        *([f"--seqio_additional_cache_dirs={','.join(caches)}"] if caches else []),
    ]


def _main(args: Any) -> int:
    console.set_up(everything=args.alsologtostderr)
    if not args.sweep:
        raise ConfigError("no --sweep given. To begin with: --sweep=sweeps/learning_rate.gin --together")
    options = {"together": args.together, "parallel": args.parallel, "only": args.only}
    return carry_out(args, lambda plan, folder: plan.run(folder, **options))


def carry_out(args: Any, run_plan: Callable[[Plan, str], list[Result]]) -> int:
    """Checks the sweep that the flags describe, has `run_plan(plan, folder)` run it, and says what came of it.

    Returns the status with which the command ends.
    """
    start(args)
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

        if slips := Folder(absolute(folder)).check(plan):
            raise ConfigError("\n".join(slips))
        for run in plan.runs:
            print(f"  {run.name}: {'; '.join(run.own_bindings)}")
        print("dry run: the sweep is fine. Nothing was run.")
        return 0
    try:
        results = run_plan(plan, folder)
    except KeyboardInterrupt as e:
        print(f"\n{e}", file=sys.stderr, flush=True)
        return cli.EXIT_INTERRUPTED
    print(summary.closing_words(folder, plan.runs, results))
    return cli.EXIT_ERROR if any(r.status == "failed" and not r.final for r in results) else 0


def _announce(plan: Any, folder: str) -> None:
    axes = ", ".join(f"{len(values)} {axis}" for axis, values in plan.axes().items())
    print(f"{plan.sweep.name}: {len(plan.runs)} runs ({axes}) in {folder}")
    if plan.sweep.batch_sizes is not None:
        print(plan.described()["weight_decay"])
    for note in dict.fromkeys(f"batch size {run.batch_size}: {run.note}" for run in plan.runs if run.note):
        print(note)
