#!/usr/bin/env python3
"""See perex_t5x/launching/gcloud/command.py, or --help, and docs/launch.md."""

import sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path[:] = [str(root), *(p for p in sys.path if Path(p or ".").resolve() != root / "launch")]

try:
    from perex_t5x.launching.gcloud import command
except ModuleNotFoundError as e:
    sys.exit(f"ERROR: {e}. Run this with the Python of an environment that has perex_t5x, such as .venv/bin/python.")

if __name__ == "__main__":
    command.main()
