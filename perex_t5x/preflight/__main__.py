"""Does a training fit on a TPU slice, and what will it cost? Answered by the TPU compiler, without a TPU.

    python -m perex_t5x.preflight --gin_file=models/150m.gin --gin_file=runs/pretrain.gin \\
      --gin_file=optimizers/micro_adam.gin --gin.TASK_FEATURE_LENGTHS="{'targets': 1024}" --topology=v5e:4x4

Compiles the real, sharded train step of the Gin files and prints memory, cycles, collectives, the cost of the per-example
statistics, and how each parameter's are reduced. --slices for several slices; --compare=adamw,micro_adam for columns side by
side, each an optimizer or Gin files (a.gin+b.gin); --breakdown for where the cycles go; --json and --html write files. Where
the step does not fit, a change that makes it fit is searched for, unless --no_search. Exit code 0 if everything fits, 1 if
not. Needs the extra perex_t5x[tpu].
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from perex_t5x import cli, files, preflight
from perex_t5x.errors import ConfigError, Reason


def _main(args: Any) -> int:
    for path in (args.json, args.html):
        _check_writable(path)
    preflight.start(args)
    # Not earlier: importing these may use a device.
    import jax

    from perex_t5x.cli import progress
    from perex_t5x.preflight import account, kernel_cycles, render, render_html, report_cache, search, step

    remat = [] if args.remat is None else [f"T5Config.remat_policy = {args.remat!r}"]
    columns = search.cases(args.gin_file, [*args.gin_bindings, *remat], args.gin_search_paths, args.compare)
    # JAX's cache cannot read programs for devices that are not there, and would warn about each.
    jax.config.update("jax_enable_compilation_cache", False)
    schedules = kernel_cycles.Schedules() if args.schedules else None
    cache, line = report_cache.ReportCache(report_cache.default_folder(), schedules), progress.Working()
    reports, searches, choices = [], [], []
    for case in columns:
        case.parse()
        target = step.CompileTarget.from_flags(args, *step.topology_macro())
        trainer, spec = step.build_parsed(target.devices())
        if policies := list(trainer.remat_choices()):
            choices.append(search.choose_remat(case, policies, target, cache, line, all=args.remat == "auto"))
            case = case.with_bindings(*choices[-1].bindings)
            trainer, spec = case.build(target.devices())
        reports.append(account.measure(case.name, target, trainer, spec, cache, line))
        if reports[-1].fits is False and not args.no_search:
            searches.append(search.search(case, target, cache, line))
    if args.json:  # before the table, whose reader may go away (`| head`)
        values = {"cases": [r.as_dict() for r in reports], "searches": [s.as_dict() for s in searches]}
        values["remat"] = [c.as_dict() for c in choices]
        _write(args.json, json.dumps(values, indent=1) + "\n")
    if args.html:
        shown = shlex.join(["python", "-m", "perex_t5x.preflight", *sys.argv[1:]])
        _write(args.html, render_html.html_page(reports, searches, shown))
    render.show(reports, searches, sys.stdout, args.breakdown)
    for choice in choices:
        print("\n".join(["", *choice.lines()]))
    return Reason.ERROR.exit_code if any(r.fits is False for r in reports) else 0


def _check_writable(path: str | None) -> None:
    """Before minutes of compiling."""
    folder = os.path.dirname(os.path.abspath(path or ""))
    if path and not os.path.isdir(folder):
        raise ConfigError(f"cannot write {path}: there is no folder {folder}. Create it first.")


def _write(path: str, text: str) -> None:
    try:
        files.write_atomically(path, text)
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror or e}.") from e
    print(f"written: {path}", file=sys.stderr)


def define_flags() -> None:
    from absl import flags

    preflight.define_flags()
    flags.DEFINE_list(
        "compare", [], "Columns: optimizers (adamw,micro_adam) or Gin files (a.gin+b.gin), added to the files."
    )
    flags.DEFINE_string("json", None, "Write the whole report to this file, as JSON.")
    flags.DEFINE_string("html", None, "Write a page with plots to this file.")
    flags.DEFINE_bool("breakdown", False, "Also print where the cycles go: attention, projections, MLP, copies, ...")
    flags.DEFINE_bool(
        "schedules", False, "Static schedules of all instructions in the lower bound; more than twice the compile time."
    )
    flags.DEFINE_string(
        "remat", None, "T5Config.remat_policy; 'auto' compiles a list of policies and takes the fastest that fits."
    )
    flags.DEFINE_bool("no_search", False, "Where the step does not fit, do not search for a change that makes it fit.")


def main(argv: Sequence[str] | None = None) -> None:
    cli.run(_main, __doc__, argv, flags=define_flags)


if __name__ == "__main__":
    main()
