"""Writes a report of sweeps and runs: one HTML page that works from a file, offline.

    python -m perex_t5x.experiments.report sweeps/sqrt_lr --out=report.html --figures=figures

Each argument is a sweep's folder, a run's, or a folder of either, on a disk or in a bucket; several are shown side by side.
docs/reports.md says what is in the page.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from perex_t5x import buckets, cli, files
from perex_t5x.errors import ConfigError


def define_flags() -> None:
    from absl import flags

    flags.DEFINE_string("out", "report.html", "The page to write.")
    flags.DEFINE_string("figures", None, "Also write each plot into this folder, as SVG and PNG.")
    flags.DEFINE_string("title", None, "The page's title.")


def main(argv: Sequence[str] | None = None) -> None:
    """Does not return."""
    given = sys.argv[1:] if argv is None else list(argv)
    command = shlex.join(["python", "-m", "perex_t5x.experiments.report", *given])
    run = functools.partial(_run, command=command)
    cli.run(run, __doc__, ["report", *given], flags=define_flags, extra="reports", positional=True)


def _run(args: Any, dirs: list[str], command: str) -> None:
    from perex_t5x.experiments import report

    if not dirs:
        raise ConfigError("no folder given: name a sweep's folder, a run's, or a folder of either.")
    buckets.check(args.out, "--out")
    buckets.check(args.figures or "", "--figures")
    out = args.out if files.is_remote(args.out) else os.path.abspath(args.out)
    if not files.is_remote(out) and (os.path.isdir(out) or not os.path.isdir(os.path.dirname(out))):
        raise ConfigError(f"--out={args.out}: give the name of a file in a folder that exists.")
    text = report.make(dirs, title=args.title, figures=args.figures, command=command)
    try:
        files.write_atomically(out, text)
    except OSError as e:
        raise ConfigError(f"--out={args.out}: cannot be written: {e.strerror or e}.") from e
    figures = f" and figures in {args.figures}" if args.figures else ""
    print(f"written: {args.out} ({len(text) / 1e6:.1f} MB){figures}")


if __name__ == "__main__":
    main()
