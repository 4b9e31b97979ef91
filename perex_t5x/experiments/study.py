"""Runs one of the paper's studies and says what it found: `python -m perex_t5x.experiments.study NAME`

    python -m perex_t5x.experiments.study sqrt_scaling
    python -m perex_t5x.experiments.study preconditioner --quick

A study is a sweep (sweeps/NAME.gin) and an analysis. --gin_file, --gin.X and --sweep.X change the runs and the sweep, as for
`perex_t5x.experiments.sweep`. Started again, it goes on where it stopped. docs/studies.md says what each asks.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags

from perex_t5x import cli
from perex_t5x.cli import console
from perex_t5x.errors import ConfigError
from perex_t5x.experiments.sweep import Sweep, command
from perex_t5x.experiments.sweep.directory import write_atomically
from perex_t5x.experiments.sweep.runs import FAILED, absolute

_QUICK_EXTENSIONS = 1


def main(argv: Sequence[str] | None = None) -> None:
    """Does not return. Exit status: 0 all runs finished; 1 some failed other than by diverging; 2 a slip; 130 stopped."""
    from perex_t5x.preflight import command as preflight_command

    cli.define_flags()
    flags.DEFINE_string("study", None, "The study's name; also as the first argument.")
    flags.DEFINE_multi_string("sweep_bindings", [], "'seeds = [0]' in place of the file's. Shorter: --sweep.seeds=[0].")
    flags.DEFINE_string("dir", None, "The study's folder; default studies/NAME, with --quick studies/NAME_quick.")
    flags.DEFINE_bool("quick", False, "A version of at most two minutes, to see whether everything works.")
    flags.DEFINE_bool("analyse_only", False, "Runs nothing: findings and page from what the folder holds.")
    flags.DEFINE_integer("parallel", None, "Runs at once; default the number of cores.")
    flags.DEFINE_integer(
        "extensions",
        None,
        "How often a grid of rates is extended whose best lies on its edge; default 4, with --quick 1.",
    )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    preflight_command.run(_main, __doc__, rewritten(sys.argv if argv is None else argv))


def rewritten(argv: Sequence[str]) -> list[str]:
    """The name as a flag, and --sweep.NAME=VALUE as absl reads it.

    >>> rewritten(["study", "overhead", "--sweep.seeds=[0]"])
    ['study', '--study=overhead', '--sweep_bindings=seeds = [0]']
    """
    named = [f"--study={arg}" if i == 1 and not arg.startswith("-") else arg for i, arg in enumerate(argv)]
    return command.rewritten(named)


def _main(args: Any) -> int:
    console.set_up(everything=args.alsologtostderr)
    from perex_t5x.experiments import studies

    if not args.study:
        raise ConfigError(f"no study given. There are {', '.join(studies.NAMES)}; the name comes first.")
    study = studies.find(args.study)
    if args.extensions is not None and args.extensions < 0:
        raise ConfigError(f"--extensions={args.extensions}: must be at least 0.")
    folder = args.dir or f"studies/{study.name}{'_quick' if args.quick else ''}"
    status = 0
    if not args.analyse_only:
        status = _run(args, study, folder)
        if args.dry_run:
            print("dry run: the study is fine. Nothing was run.")
            return 0
    conclude(study, folder)
    return status


def _run(args: Any, study: Any, folder: str) -> int:
    from perex_t5x.experiments.studies import execution

    command.start(args)
    quick = study.quick if args.quick else ()
    sweep = Sweep.load(study.file, [*quick, *args.sweep_bindings], args.gin_search_paths)
    default = _QUICK_EXTENSIONS if args.quick else 4
    print(f"{study.name} in {folder}: {sweep.question}", flush=True)
    try:
        results = execution.run(
            study,
            sweep,
            folder,
            gin_files=args.gin_file,
            gin_bindings=[*(study.quick_gin if args.quick else ()), *args.gin_bindings],
            search_paths=args.gin_search_paths,
            flags=command.passed_on(args),
            parallel=args.parallel,
            extensions=default if args.extensions is None else args.extensions,
            quick=args.quick,
            dry_run=args.dry_run,
        )
    except KeyboardInterrupt as e:
        print(f"\n{e}", file=sys.stderr, flush=True)
        sys.exit(cli.EXIT_INTERRUPTED)
    return cli.EXIT_ERROR if any(r.status == FAILED and not r.final for r in results) else 0


def conclude(study: Any, folder: str) -> list[dict[str, Any]]:
    """Analyses the folder, writes findings.json and report.html into it, and prints what was found."""
    from perex_t5x.experiments.report import folders

    if not os.path.exists(os.path.join(folder, "sweep.json")):
        raise ConfigError(f"--dir={folder} holds no study yet: leave --analyse_only out.")
    (loaded,) = folders.load([folder])
    if loaded.name != study.name:
        raise ConfigError(f"--dir={folder} holds the sweep {loaded.name!r}, not {study.name!r}. Choose another folder.")
    found = study.analyse(loaded, absolute(folder))
    if not found:
        found = [{"title": "Nothing to say yet", "text": "Too few runs are finished for an answer."}]
    write_atomically(os.path.join(absolute(folder), "findings.json"), json.dumps(found, indent=1, ensure_ascii=False))
    for finding in found:
        print(f"\n{finding['title']}")
        print(textwrap.fill(finding.get("text", ""), 100, initial_indent="  ", subsequent_indent="  "))
    print(f"\nfindings  {folder}/findings.json")
    try:
        print(f"report    {_page(study, folder)}")
    except ConfigError as e:  # the package for plots is an extra
        print(f"no page: {e}")
    return found


def _page(study: Any, folder: str) -> str:
    from perex_t5x.experiments import report

    text = report.make([folder], command=f"python -m perex_t5x.experiments.study {study.name} --dir={folder}")
    path = os.path.join(folder, "report.html")
    write_atomically(os.path.join(absolute(folder), "report.html"), text)
    return path


if __name__ == "__main__":
    main()
