#!/usr/bin/env python3
"""Builds and pushes the container image of the committed files; see --help and docs/launch_xmanager.md."""

import sys
from pathlib import Path

try:
    import perex_t5x  # noqa: F401
except ModuleNotFoundError:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from perex_t5x import cli

if __name__ == "__main__":
    cli.run("perex_t5x.launching.image.main", flags="perex_t5x.launching.image.define_flags", extra="launch")
