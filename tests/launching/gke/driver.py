"""launch/gke.py with the slow parts left out: the Gin files are taken as read, preflight as done."""

import json
import os
import sys

from perex_t5x import cli
from perex_t5x.launching import spec
from perex_t5x.launching.gke import command


def made(args):
    """As many runs as $RUNS says, which write to --dir."""
    root = args.dir or "gs://bucket/sweeps/sqrt"
    runs = [
        spec.Job(f"run{n}", ("-m", "perex_t5x.train", *args.gin_bindings), f"{root}/runs/run{n}")
        for n in range(int(os.environ.get("RUNS", "1")))
    ]
    gin_files = json.loads(os.environ.get("GIN_FILES", "{}"))
    return spec.Work(root.rpartition("/")[2], root, tuple(runs), sweep={}, gin_files=gin_files)


if __name__ == "__main__":
    spec.make = made
    command._check = lambda *_: print("checked", file=sys.stderr)
    cli.run(command.main, flags=command.define_flags, positional=True, messages=(OSError,))
