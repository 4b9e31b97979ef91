"""Runs one of the paper's studies and says what it found: `python -m perex_t5x.experiments.study NAME`

    python -m perex_t5x.experiments.study sqrt_scaling
    python -m perex_t5x.experiments.study preconditioner --quick

A study is a sweep (sweeps/NAME.gin) and an analysis. --gin_file, --gin.X and --sweep.X change the runs and the sweep, as for
`perex_t5x.experiments.sweep`. Started again, it resumes where it stopped. docs/studies.md says what each asks.

    python -m perex_t5x.experiments.study sqrt_scaling --scale=pod --model=150m --out=sqrt_150m

writes what the launchers need to run the study on a TPU slice, and the chip-hours that takes; it runs nothing.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from typing import Any

from perex_t5x import buckets, cli
from perex_t5x.cli import flags as cli_flags
from perex_t5x.errors import ConfigError, Reason
from perex_t5x.experiments.sweep import Sweep, command
from perex_t5x.experiments.sweep.runs import FAILED, absolute
from perex_t5x.files import as_path, write_atomically


def define_flags() -> None:
    from absl import flags

    cli_flags.define_training_flags()
    flags.DEFINE_string("study", None, "The study's name; also as the only argument that is not a flag.")
    flags.DEFINE_multi_string("sweep_bindings", [], "'seeds = [0]' in place of the file's. Shorter: --sweep.seeds=[0]")
    flags.DEFINE_string("dir", None, "The study's folder; default studies/NAME, with --quick studies/NAME_quick.")
    flags.DEFINE_bool("quick", False, "A version of at most two minutes, to see whether everything works.")
    flags.DEFINE_bool("analyse_only", False, "Runs nothing: findings and page from what the folder holds.")
    flags.DEFINE_integer("parallel", None, "Runs at once; default the number of cores.")
    flags.DEFINE_integer(
        "extensions",
        None,
        "How often a grid of rates is extended whose best lies on its edge; default 4, with --quick 1.",
    )
    flags.DEFINE_enum("scale", "here", ["here", "pod"], "Run it here; or write files that launch it on a TPU slice.")
    flags.DEFINE_string("model", "150m", "With --scale=pod: a model that is known there, 150m or 1_2b.")
    flags.DEFINE_string("out", None, "With --scale=pod: where the files are written; default studies/NAME_MODEL.")


def main(args: Any, names: list[str]) -> int:
    """Exit codes: 0 all runs finished; 1 some failed other than by diverging; 2 a configuration error; 130 interrupted."""
    from perex_t5x.experiments import studies

    names = names or [args.study] * bool(args.study)
    if len(names) != 1:
        given = f"one study at a time: {' '.join(names)}" if names else "no study given"
        raise ConfigError(f"{given}. There are {', '.join(studies.NAMES)}.")
    study = studies.find(names[0])
    if args.extensions is not None and args.extensions < 0:
        raise ConfigError(f"--extensions={args.extensions}: must be at least 0.")
    if args.scale == "pod":
        return _write_pod(args, study)
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
    from perex_t5x.cli import gin_command
    from perex_t5x.experiments.studies import base

    gin_command.load_training(args)
    quick = study.quick if args.quick else ()
    sweep = Sweep.load(study.file, [*quick, *args.sweep_bindings], args.gin_search_paths)
    default = 1 if args.quick else 4
    print(f"{study.name} in {folder}: {sweep.question}", flush=True)
    try:
        results = base.run_stages(
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
        sys.exit(Reason.INTERRUPTED.exit_code)
    return Reason.ERROR.exit_code if any(r.status == FAILED and not r.final for r in results) else 0


def _write_pod(args: Any, study: Any) -> int:
    """The files of the next stage; once none is left, what was found."""
    from perex_t5x.cli import gin_command
    from perex_t5x.experiments.studies import pod

    for name in ("quick", "dir", "analyse_only", "parallel"):
        if getattr(args, name):
            raise ConfigError(f"--{name} is not for --scale=pod, which runs nothing here. Its folder is --out.")
    gin_command.load_training(args)
    out = args.out or f"studies/{study.name}_{args.model}"
    sweep = pod.enlarged(study, Sweep.load(study.file, (), args.gin_search_paths), args.model)
    sweep = pod.overridden(sweep, args.sweep_bindings, args.gin_search_paths)
    given = {
        "gin_files": args.gin_file,
        "gin_bindings": args.gin_bindings,
        "search_paths": args.gin_search_paths,
        "flags": command.passed_on(args),
    }
    extensions = 4 if args.extensions is None else args.extensions
    stage = pod.next_stage(study, sweep, os.path.join(absolute(out), "results"), extensions, **given)
    if not stage.number:
        conclude(study, os.path.join(out, "results"))
        return 0
    whole = pod.all_runs(study, sweep, **given)
    print(f"{study.name} with {args.model}, stage {stage.number}: {pod.words(stage.runs, args.model)}")
    print(f"all stages, if every best rate lies in the middle of its grid: {pod.words(whole, args.model)}")
    if args.dry_run:
        print("dry run: nothing was written.")
        return 0
    pod.write(study, stage, whole, args.model, out)
    print(f"{out}/README.md  the commands, and how the chip-hours were counted")
    return 0


def conclude(study: Any, folder: str) -> list[dict[str, Any]]:
    """Analyses the folder, writes findings.json and report.html into it, and prints what was found."""
    from perex_t5x.experiments import report
    from perex_t5x.experiments.report import load

    buckets.check(folder, "--dir")
    if not as_path(os.path.join(folder, "sweep.json")).exists():
        raise ConfigError(f"--dir={folder} holds no study yet: leave --analyse_only out.")
    (loaded,) = load.load_folders([folder])
    if loaded.name != study.name:
        raise ConfigError(f"--dir={folder} holds the sweep {loaded.name!r}, not {study.name!r}. Choose another folder.")
    findings = study.analyse(loaded, absolute(folder))
    if not findings:
        findings = [{"title": "Nothing to say yet", "text": "Too few runs are finished for an answer."}]
    text = json.dumps(findings, indent=1, ensure_ascii=False)
    write_atomically(os.path.join(absolute(folder), "findings.json"), text)
    for finding in findings:
        print(f"\n{finding['title']}")
        print(textwrap.fill(finding.get("text", ""), 100, initial_indent="  ", subsequent_indent="  "))
    print(f"\nfindings  {folder}/findings.json")
    try:
        page = report.make([folder], command=f"python -m perex_t5x.experiments.study {study.name} --dir={folder}")
        write_atomically(os.path.join(absolute(folder), "report.html"), page)
        print(f"report    {os.path.join(folder, 'report.html')}")
    except ConfigError as e:  # the package for plots is an extra
        print(f"no page: {e}")
    return findings


if __name__ == "__main__":
    cli.run(main, __doc__, flags=define_flags, positional=True)
