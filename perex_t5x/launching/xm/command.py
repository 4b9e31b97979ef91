"""The command of launch/xm_launch.py: flags, executors, exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from perex_t5x import cli
from perex_t5x.cli import console
from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.launching import program, request
from perex_t5x.launching.xm import arguments

EXECUTORS = ("local", "vertex", "gke")


def define_flags(argv: Sequence[str], usage: str | None = None) -> None:
    """Before the command line is read. XManager's own flags are known once it is imported. `usage` is for --help."""
    request.define_flags()
    flags.DEFINE_string("executor", "local", "Where the runs run: local (this machine), vertex, or gke.")
    flags.DEFINE_integer("parallel", None, "With --executor=local: runs at once; default 1.")
    flags.DEFINE_bool("print_commands", False, "Check a sweep, print the command of every run, and stop.")
    flags.DEFINE_bool("follow", False, "With --executor=local: where this is running already, look on.")
    flags.DEFINE_string("repository", None, "With --executor=vertex: where an image of this checkout is put.")
    _define_gke_flags()
    program.show_in_help(usage, __name__)
    arguments.define_dotted(argv)
    with contextlib.suppress(ImportError):  # said once it is needed
        from xmanager import xm, xm_flags  # noqa: F401  (they define --xm_...)


def _define_gke_flags() -> None:
    """Those of launch/gke.py, to which --executor=gke hands them on; --image is one of them."""
    with contextlib.suppress(ImportError):
        from perex_t5x.launching.gke import options

        options.define_flags()
    if "image" not in flags.FLAGS:
        flags.DEFINE_string("image", None, "The container, such as europe-docker.pkg.dev/PROJECT/perex/perex:TAG.")


def main(words: Sequence[str]) -> None:
    """What `xmanager launch` calls with the flags read; does not return."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(program.guarded(_launch))


def _launch() -> int:
    words = arguments.reparsed()
    args = flags.FLAGS
    console.set_up(everything=args.alsologtostderr)
    if words:
        raise ConfigError(f"{words[0]!r} is not a flag. Flags are written --name=value, after `--`.")
    if args.executor not in EXECUTORS:
        raise ConfigError(
            f"--executor={args.executor}: known are {', '.join(EXECUTORS)}.{did_you_mean(args.executor, EXECUTORS)}"
        )
    return _EXECUTORS[args.executor](args)


def _local(args: Any) -> int:
    from perex_t5x.launching.xm import experiment

    experiment.modules()  # or the reason, before anything is read
    from perex_t5x.launching.xm import local

    return local.launch(args)


def _vertex(args: Any) -> int:
    from perex_t5x.launching.xm import vertex

    return vertex.launch(args)


def _gke(args: Any) -> int:
    from perex_t5x.launching.xm import handover

    return handover.gke(args)


_EXECUTORS = {"local": _local, "vertex": _vertex, "gke": _gke}


def run() -> None:
    """Without XManager's own command: `python launch/xm_launch.py ...`; does not return."""
    from absl import app

    try:
        app.run(main, argv=sys.argv, flags_parser=cli.parse_flags)
    except ConfigError as e:
        sys.exit(program.failed(e, cli.EXIT_CONFIG))
