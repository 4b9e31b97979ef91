#!/usr/bin/env python3
"""Runs and sweeps through XManager; see docs/launch_xmanager.md.

xmanager launch launch/xm_launch.py -- --sweep=sweeps/learning_rate.gin --executor=local --parallel=2
xmanager launch launch/xm_launch.py -- --gin_file=runs/quickstart.gin --gin.MODEL_DIR=runs/one

With --executor=gke all flags of launch/gke.py.
"""

import sys
from pathlib import Path

try:
    import perex_t5x  # noqa: F401
except ImportError:
    sys.path.append(str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from perex_t5x import cli

    module = "perex_t5x.launching.xm.command"
    cli.run(f"{module}.launch", __doc__, flags=f"{module}.define_flags", extra="launch", messages=(OSError,))

from perex_t5x.launching.xm import command

command.define_for_xmanager(sys.argv, __doc__)
main = command.main  # XManager calls it once it has read the flags
