"""Writes a report of sweeps and runs: one HTML page that works from a file, offline.

    python -m perex_t5x.experiments.report sweeps/sqrt_lr --out=report.html --figures=figures

Several folders are shown side by side. docs/reports.md says what is in the page.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from perex_t5x.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        "python -m perex_t5x.experiments.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("dirs", nargs="+", metavar="DIR", help="a sweep's folder, a run's, or a folder of either")
    parser.add_argument("--out", default="report.html", help="the page to write (%(default)s)")
    parser.add_argument("--figures", metavar="FOLDER", help="also write each plot there, as SVG and PNG")
    parser.add_argument("--title", help="the page's title")
    args = parser.parse_args(given)
    try:
        _run(args, shlex.join(["python", "-m", "perex_t5x.experiments.report", *given]))
    except ConfigError as e:
        print(f"\nERROR: {e}", file=sys.stderr)
        sys.exit(2)


def _run(args: argparse.Namespace, command: str) -> None:
    from perex_t5x.experiments import report

    out = os.path.abspath(args.out)
    if os.path.isdir(out) or not os.path.isdir(os.path.dirname(out)):
        raise ConfigError(f"--out={args.out}: give the name of a file in a folder that exists.")
    text = report.make(args.dirs, title=args.title, figures=args.figures, command=command)
    temporary = f"{out}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as f:
            f.write(text)
        os.replace(temporary, out)
    except OSError as e:
        raise ConfigError(f"--out={args.out}: cannot be written: {e.strerror or e}.") from e
    print(
        f"written: {args.out} ({len(text) / 1e6:.1f} MB)", *([f"and figures in {args.figures}"] if args.figures else [])
    )


if __name__ == "__main__":
    main()
