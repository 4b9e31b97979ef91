"""What the launchers share as commands: flags, errors without a stack trace, exit codes, the last line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from perex_t5x import cli, gin_utils
from perex_t5x.cli import console
from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.launching.shell import Commands, Leftovers

_SHOWN = ("perex_t5x.launching.request", "perex_t5x.experiments.sweep.command", "perex_t5x.cli")


def run(
    function: Callable[[Any, list[str]], int | None],
    usage: str | None,
    argv: Sequence[str] | None = None,
    module: str = "",
) -> None:
    """Runs `function(flags, words)` as a command and ends with its status; `words` are the arguments that are no flags.
    `module` is the one that defines the launcher's own flags.

    Exit status: 0 done; 2 a slip, before anything was created; 1 it could not go on; 130 stopped by Ctrl-C or SIGTERM.
    The notes of an exception, such as what `Leftovers` could not delete, are the last lines of stderr.
    """
    from perex_t5x.experiments.sweep.command import rewritten

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    show_in_help(usage, module)

    def main(words: Sequence[str]) -> None:
        if hasattr(sys.stdout, "reconfigure"):  # logs of hosts hold any bytes, and terminals may know ASCII alone
            sys.stdout.reconfigure(errors="backslashreplace")
        console.set_up(everything=flags.FLAGS.alsologtostderr)
        sys.exit(guarded(lambda: function(flags.FLAGS, list(words[1:]))))

    try:
        args = rewritten(gin_utils.rewrite_gin_args(sys.argv if argv is None else argv))
        app.run(main, argv=args, flags_parser=cli.parse_flags)
    except ConfigError as e:
        sys.exit(failed(e, cli.EXIT_CONFIG))


def show_in_help(usage: str | None, module: str = "") -> None:
    """Has --help print `usage`, and the flags that `module` and the launchers' common modules have defined so far."""
    sys.modules["__main__"].__doc__ = usage
    for name in (module, *_SHOWN):
        for flag in flags.FLAGS.get_flags_for_module(name):
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)


def guarded(function: Callable[[], int | None]) -> int:
    """The status that `function` returns, or that of its error, which is printed as its message alone."""
    try:
        # There is nothing to delete yet, but SIGTERM is as Ctrl-C, so that the checks' own processes end with it.
        with Leftovers(Commands()):
            return function() or 0
    except ConfigError as e:
        return failed(e, cli.EXIT_CONFIG)
    except TrainingError as e:
        return failed(e, cli.EXIT_ERROR)
    except OSError as e:  # such as a full disk
        return failed(e, cli.EXIT_ERROR)
    except KeyboardInterrupt as e:
        return failed(e, cli.EXIT_INTERRUPTED)


def failed(error: BaseException, status: int) -> int:
    """Prints an error as its message and notes; the status."""
    message = cli.cleaned(str(error))
    shown = f"\nERROR: {message}" if status != cli.EXIT_INTERRUPTED else f"\n{message or 'interrupted'}"
    print("\n".join([shown, *getattr(error, "__notes__", [])]), file=sys.stderr, flush=True)
    return status
