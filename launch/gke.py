#!/usr/bin/env python3
"""JobSets on Google Kubernetes Engine; see --help and docs/launch_gke.md."""

import sys
from pathlib import Path

try:
    import perex_t5x  # noqa: F401
except ModuleNotFoundError:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from perex_t5x.launching import gke

if __name__ == "__main__":
    gke.main()
