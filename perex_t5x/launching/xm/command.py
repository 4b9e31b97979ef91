"""The command of launch/xm_launch.py: flags, executors, exit codes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

import perex_t5x
from perex_t5x import cli
from perex_t5x.cli import console
from perex_t5x.cli import flags as cli_flags
from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.launching.request import define_launch_flags
from perex_t5x.launching.shell import say

EXECUTORS = ("local", "gke")


def define_flags() -> None:
    define_launch_flags()
    flags.DEFINE_string("executor", "local", "Where the runs are executed: local (this machine), or gke.")
    flags.DEFINE_integer("parallel", None, "With --executor=local: number of runs at once; default 1.")
    flags.DEFINE_bool("print_commands", False, "Check a sweep, print the command of every run, and stop.")
    flags.DEFINE_bool("follow", False, "With --executor=local: if this is running already, follow it.")
    with contextlib.suppress(ImportError):  # those of launch/gke.py, to which --executor=gke passes them
        from perex_t5x.launching.gke import command as gke_command

        gke_command.define_own_flags()
    if "image" not in flags.FLAGS:
        flags.DEFINE_string("image", None, "The container, such as europe-docker.pkg.dev/PROJECT/perex/perex:TAG.")
    with contextlib.suppress(ImportError):  # reported once it is needed
        from xmanager import xm, xm_flags  # noqa: F401  (they define --xm_...)


def define_for_xmanager(argv: Sequence[str], usage: str | None) -> None:
    """The same for `xmanager launch`, which reads the command line itself, once this is done. `usage` is for --help."""
    before = set(flags.FLAGS)
    define_flags()
    cli_flags.show_in_help(usage, set(flags.FLAGS) - before)
    define_dotted(argv)


def main(words: Sequence[str]) -> None:
    """Called by `xmanager launch` once the flags are read; does not return."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(cli.guarded(_from_xmanager, (OSError,)))


def _from_xmanager() -> int:
    if words := reparsed():
        raise ConfigError(f"{words[0]!r} is not a flag. Flags are written --name=value, after `--`.")
    console.set_up(everything=flags.FLAGS.alsologtostderr)
    return launch(flags.FLAGS)


def launch(args: Any) -> int:
    """The command, under `xmanager launch` and by itself."""
    if args.executor == "vertex":
        raise ConfigError(
            "--executor=vertex is gone: XManager 0.8.5 requests nothing newer than TPU v3 from Vertex AI. To run on TPU "
            f"VMs, or on a GKE cluster:\n{other_launchers(args)}"
        )
    if args.executor not in EXECUTORS:
        raise ConfigError(
            f"--executor={args.executor}: known are {', '.join(EXECUTORS)}.{did_you_mean(args.executor, EXECUTORS)}"
        )
    if args.executor == "gke":
        return hand_over_to_gke()
    from perex_t5x.launching.xm import local

    return local.launch(args)


# --- --gin.NAME=VALUE and --sweep.NAME=VALUE under `xmanager launch`, which reads flags before a script does ---

_DOTTED = re.compile(r"--?((?:gin|sweep)\.[^=]+)(=|$)", re.DOTALL)


def define_dotted(argv: Sequence[str]) -> None:
    """Defines the dotted flags of a command line, so that absl accepts them; `reparsed` then gives them their meaning."""
    for arg in argv:
        match = _DOTTED.match(arg)
        if match and match[1] not in flags.FLAGS:
            flags.DEFINE_multi_string(match[1], [], "A binding.")


def script_arguments(argv: Sequence[str]) -> list[str]:
    """The part of XManager's command line that is for the script.

    >>> script_arguments(["xmanager", "launch", "launch/xm_launch.py", "--", "--gin_file=a.gin"])
    ['launch/xm_launch.py', '--gin_file=a.gin']
    >>> script_arguments(["launch/xm_launch.py", "--gin_file=a.gin"])
    ['launch/xm_launch.py', '--gin_file=a.gin']
    """
    script = next((i for i, arg in enumerate(argv) if arg.endswith(".py")), 0)
    rest = list(argv[script + 1 :])
    return [argv[script], *(rest[1:] if rest[:1] == ["--"] else rest)]


def reparsed(argv: Sequence[str] | None = None) -> list[str]:
    """Parses the flags again, with the dotted ones rewritten; returns the arguments that are not flags.

    Raises:
      ConfigError: --gin.NAME without a value.
    """
    script, *given = script_arguments(sys.argv if argv is None else argv)
    given = cli_flags.rewrite(given)
    known = flags.FLAGS
    xm_launch_script = known.xm_launch_script if "xm_launch_script" in known else None
    known.unparse_flags()
    words = known([script, *given])
    if xm_launch_script:  # set by XManager itself
        known.xm_launch_script = xm_launch_script
    return words[1:]


# --- what XManager's executors cannot do, our own launchers do ------------------------------------------------------
# XManager 0.8.5's Vertex executor knows only TPU v2 and v3: machine type and tpuTopology of a newer chip cannot be given to
# it, and a custom job made without it would not be in XManager's records. Its Kubernetes executor makes one pod per job and
# requests no TPUs (google.com/tpu) in it, so it cannot run a slice of several hosts.

# Only of launch/xm_launch.py.
_OWN = ("executor", "parallel", "print_commands", "follow")


def given(argv: Sequence[str] | None = None, without: Sequence[str] = ()) -> list[str]:
    """The flags of the command line that the other launchers also know, as they were written.

    >>> given(["x.py", "--executor=gke", "--gin.A=1", "--parallel", "2", "--xm_upgrade_db", "--image=i"], without=["image"])
    ['--gin.A=1']
    """
    rest = iter(script_arguments(sys.argv if argv is None else argv)[1:])
    kept = []
    for arg in rest:
        name, _, value = arg.lstrip("-").partition("=")
        bare = name.removeprefix("no")
        if arg.startswith("-") and name.startswith("xm_"):  # XManager's own
            continue
        if not arg.startswith("-") or not {name, bare} & {*_OWN, *without}:
            kept.append(arg)
        elif not value and name in ("executor", "parallel", "image"):
            next(rest, None)  # its value is the next argument
    return kept


def other_launchers(args: Any) -> str:
    """The two commands that run on any TPU, with the user's flags."""
    image = [] if args.image else ["--image=HOST/PROJECT/REPOSITORY/NAME:TAG"]
    gcloud = ["./launch/gcloud_tpu.py", *given(without=["image"])]
    gke = ["./launch/gke.py", *given(), *image]
    return f"  {shlex.join(gcloud)}\n  {shlex.join(gke)}"


def hand_over_to_gke() -> int:
    """Becomes launch/gke.py, which creates JobSets; does not return."""
    script = Path(perex_t5x.__file__).resolve().parent.parent / "launch" / "gke.py"
    if not script.is_file():
        raise ConfigError(f"{script} does not exist: launch from a checkout of perex_t5x.")
    argv = [sys.executable, str(script), *given()]
    say(
        "XManager's Kubernetes executor cannot run TPU slices; continuing with launch/gke.py, which it does not record."
    )
    sys.stdout.flush()
    os.execv(sys.executable, argv)
