#!/usr/bin/env python3
"""See perex_t5x/launching/gke/command.py, or --help, and docs/launch_gke.md."""

import sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path[:] = [str(root), *(p for p in sys.path if Path(p or ".").resolve() != root / "launch")]

from perex_t5x import cli  # noqa: E402

if __name__ == "__main__":
    module = "perex_t5x.launching.gke.command"
    cli.run(f"{module}.main", flags=f"{module}.define_flags", extra="launch", positional=True, messages=(OSError,))
