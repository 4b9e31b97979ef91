"""What the commands `python -m perex_t5x.preflight` and `.collectives` share: flags, quiet start, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from perex_t5x import cli, gin_utils
from perex_t5x.cli import console
from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.hardware.devices import use_cpu_backend


def define_flags() -> None:
    cli.define_flags()
    flags.DEFINE_string("topology", None, "TPU slice to compile for: v5e:4x4, or by its cloud name v5e-16.")
    flags.DEFINE_integer("slices", None, "How many such slices, joined by the data-centre network.")
    flags.DEFINE_integer("devices", None, "So many fake CPU devices instead.")


def start(args: Any) -> None:
    """Checks the shared flags and makes the CPU the backend. Before anything that looks for a device is imported."""
    if not args.gin_file:
        raise ConfigError("no --gin_file given: those of a training, such as models/150m.gin and runs/pretrain.gin.")
    if args.devices is not None and args.topology:
        raise ConfigError("--devices (fake CPU devices) and --topology (a TPU slice) exclude each other.")
    if args.devices is not None and args.devices < 1:
        raise ConfigError(f"--devices={args.devices}: must be at least 1.")
    console.set_up(everything=args.alsologtostderr)
    use_cpu_backend(args.devices)
    console.import_tensorflow_quietly()
    from perex_t5x import train as train_script

    sys.modules["__main__"].train = train_script.train  # ported files say `import __main__ as train_script`


def run(function: Callable[[Any], int | None], usage: str | None, argv: Sequence[str] | None = None) -> None:
    """Runs `function(flags)` as a command and ends with the status it returns; a user's slip is its message alone."""
    sys.modules["__main__"].__doc__ = usage

    try:
        args = gin_utils.rewrite_gin_args(sys.argv if argv is None else argv)
        app.run(lambda _: guarded(function), argv=args, flags_parser=cli.parse_flags)
    except ConfigError as e:
        _fail(e, cli.EXIT_CONFIG)


def guarded(function: Callable[[Any], int | None]) -> None:
    """Ends with the status that `function(flags)` returns; a user's slip is its message alone."""
    try:
        status = function(flags.FLAGS)
    except ConfigError as e:
        _fail(e, cli.EXIT_CONFIG)
    except TrainingError as e:
        _fail(e, cli.EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(cli.EXIT_INTERRUPTED)
    sys.exit(status or 0)


def _fail(error: Exception, status: int) -> None:
    print(f"\nERROR: {cli.cleaned(str(error))}", file=sys.stderr, flush=True)
    sys.exit(status)
