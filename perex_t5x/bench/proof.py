"""Everything beside its peers, in sections: `python -m perex_t5x.bench`."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from perex_t5x import files
from perex_t5x.bench import engine_sections, page, results, trainer_sections
from perex_t5x.bench.children import found
from perex_t5x.bench.engine_sections import AXES, Options
from perex_t5x.errors import ConfigError, did_you_mean

Rows = Iterator[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Section:
    """A part that can be measured alone, in a few minutes."""

    about: str
    measure: Callable[[Options], Rows]


SECTIONS: dict[str, Section] = {
    "mlp": Section("statistics of an MLP, in JAX and PyTorch", functools.partial(engine_sections.table, "mlp")),
    "decoder": Section("of a decoder, in JAX and PyTorch", functools.partial(engine_sections.table, "decoder")),
    "scanned": Section(
        "of the decoder, scanned and rematerialised, in JAX", functools.partial(engine_sections.table, "scanned")
    ),
    **{
        axis: Section(f"how they grow with the {axis}", functools.partial(engine_sections.growth, axis))
        for axis in AXES
    },
    "overhead": Section("the training loop beside a bare one, in one process", trainer_sections.overhead),
    "processes": Section("ours, a bare loop and T5X, in processes of their own", trainer_sections.processes),
    "startup": Section("--help, a dry run, the quickstart's first step", trainer_sections.startup),
}


def chosen(names: Sequence[str] | None) -> list[str]:
    """Sections of these names, in their order; None: all.

    >>> chosen(["startup", "mlp"])
    ['mlp', 'startup']
    """
    for name in names or ():
        if name not in SECTIONS:
            raise ConfigError(
                f"--sections={name}: no section of this name.{did_you_mean(name, SECTIONS)} They are {', '.join(SECTIONS)}."
            )
    return [name for name in SECTIONS if names is None or name in names]


def run(args: Any) -> int:
    """The command, with its parsed flags; 1 if a section failed or a check did."""
    names = chosen(args.sections)
    if args.check is not None and not args.check > 0:
        raise ConfigError(f"--check={args.check}: a factor above 0, such as 1.5.")
    if args.reference is not None and args.check is None:
        raise ConfigError("--reference is read by --check=FACTOR, which is not given.")
    files.check_path(args.folder, "--folder")
    reference = None if args.reference is None else results.read(args.reference)
    if args.reference is not None and not reference:
        raise ConfigError(f"--reference={args.reference}: there is no such file.")
    stored = os.path.join(args.folder, "benchmarks.json")
    kept = results.read(stored)
    options = Options(
        rounds=args.rounds,
        quick=args.quick,
        torch_python=args.torch_python or sys.executable,
        t5x_python=args.t5x_python or sys.executable,
        note=lambda words: print(f"  {words}", file=sys.stderr, flush=True),
    )
    if args.dry_run:
        for name in names:
            print(f"{name}: {SECTIONS[name].about}" + ("; stored already, would be measured again" * (name in kept)))
        for line in _peers(options):
            print(line)
        return 0
    failed = measure(names, options, stored, kept)
    on_page = [
        name for name in SECTIONS if name in kept
    ]  # some perhaps of earlier runs: each says its rounds and its day
    for path in page.write(args.folder, kept, command(on_page, args)) if kept else []:
        print(path, file=sys.stderr)
    problems = []
    if args.check is not None:
        problems = results.too_large({name: kept[name] for name in names if name in kept}, args.check, reference)
        for problem in problems:
            print(f"--check={args.check:g}: {problem}", file=sys.stderr)
    if failed:
        print(f"not measured: {', '.join(failed)}; --sections={','.join(failed)} tries them again.", file=sys.stderr)
    return 1 if failed or problems else 0


def _peers(options: Options) -> Iterator[str]:
    """Where each peer is looked for, and whether it is there."""
    for python, modules in (
        (sys.executable, ["jax_privacy"]),
        (options.torch_python, ["torch", "opacus", "backpack"]),
        (options.t5x_python, ["t5x"]),
    ):
        there = found(python, modules)
        yield f"peers in {python}: " + ", ".join(m if m in there else f"{m} (not installed)" for m in modules)


def measure(names: Sequence[str], options: Options, stored: str, kept: dict[str, Any]) -> list[str]:
    """Measures sections, adds each to `kept` and stores that when it is done; returns those that failed."""
    failed = []
    for i, name in enumerate(names):
        print(f"{name} ({i + 1} of {len(names)}): {SECTIONS[name].about}", file=sys.stderr, flush=True)
        begun = time.monotonic()
        rows = []
        try:
            for row in SECTIONS[name].measure(options):
                rows.append(row)
                print(json.dumps(row), flush=True)
        except ConfigError:
            raise
        except Exception:
            traceback.print_exc()  # the others are measured nevertheless
            failed.append(name)
            continue
        kept[name] = {
            "rows": rows,
            "versions": results.versions(),
            "machine": results.machine(),
            "date": datetime.date.today().isoformat(),
            "quick": options.quick,
        }
        results.write(stored, {key: kept[key] for key in SECTIONS if key in kept})
        options.note(f"{time.monotonic() - begun:.0f} s")
    return failed


def command(names: Sequence[str], args: Any) -> str:
    """What measures these sections, without this machine's paths."""
    words = ["python -m perex_t5x.bench"]
    if len(names) < len(SECTIONS):
        words.append(f"--sections={','.join(names)}")
    words += [f"--rounds={args.rounds}", f"--folder={shlex.quote(args.folder)}"]
    return " ".join([*words, *(["--quick"] if args.quick else [])])
