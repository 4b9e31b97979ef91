"""What XManager's executors cannot do, our own launchers do: the same flags, given to them.

XManager 0.8.5's Vertex executor knows TPU v2 and v3 alone. Its Kubernetes executor makes one pod a job and asks for no TPUs
(google.com/tpu) in it, so it cannot run a slice of several hosts.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import perex_t5x
from perex_t5x.errors import ConfigError
from perex_t5x.launching.xm import arguments

# Of launch/xm_launch.py alone.
_OWN = ("executor", "parallel", "print_commands", "follow", "repository")


def given(argv: Sequence[str] | None = None, without: Sequence[str] = ()) -> list[str]:
    """The flags of the command line that the other launchers know, too, as they were written.

    >>> given(["x.py", "--executor=gke", "--gin.A=1", "--parallel", "2", "--xm_upgrade_db", "--image=i"], without=["image"])
    ['--gin.A=1']
    """
    rest = iter(arguments.script_arguments(sys.argv if argv is None else argv)[1:])
    kept = []
    for arg in rest:
        name, _, value = arg.lstrip("-").partition("=")
        bare = name.removeprefix("no")
        if arg.startswith("-") and name.startswith("xm_"):  # XManager's own
            continue
        if not arg.startswith("-") or not {name, bare} & {*_OWN, *without}:
            kept.append(arg)
        elif not value and name in ("executor", "parallel", "image", "repository"):
            next(rest, None)  # its value is the next argument
    return kept


def other_ways(args: Any) -> str:
    """The two commands that run on any TPU, with the user's own flags."""
    image = [] if args.image else ["--image=HOST/PROJECT/REPOSITORY/NAME:TAG"]
    gcloud = ["./launch/gcloud_tpu.py", *given(without=["image"])]
    gke = ["./launch/gke.py", *given(), *image]
    return f"  {shlex.join(gcloud)}\n  {shlex.join(gke)}"


def gke(args: Any) -> int:
    """Becomes launch/gke.py, which makes JobSets; does not return."""
    script = Path(perex_t5x.__file__).resolve().parent.parent / "launch" / "gke.py"
    if not script.is_file():
        raise ConfigError(f"{script} is not there: launch from a checkout of perex_t5x.")
    argv = [sys.executable, str(script), *given()]
    print(
        "XManager's Kubernetes executor cannot run TPU slices; going on with launch/gke.py, which it does not record.",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os.execv(sys.executable, argv)
