"""What the commands `python -m perex_t5x.preflight` and `.collectives` share: flags, and how they start."""

from __future__ import annotations

from typing import Any

from perex_t5x.cli import flags as cli_flags
from perex_t5x.errors import ConfigError


def define_flags() -> None:
    from absl import flags

    cli_flags.define_training_flags()
    flags.DEFINE_string("topology", None, "TPU slice to compile for: v5e:4x4, or by its cloud name v5e-16.")
    flags.DEFINE_integer("slices", None, "Number of such slices, joined by the data-centre network.")
    flags.DEFINE_integer("devices", None, "Compile for this number of fake CPU devices instead.")


def start(args: Any) -> None:
    """Checks the shared flags and makes the CPU the backend. Before importing anything that may use a device."""
    if not args.gin_file:
        raise ConfigError("no --gin_file given: those of a training, such as models/150m.gin and runs/pretrain.gin.")
    if args.devices is not None and args.topology:
        raise ConfigError("--devices (fake CPU devices) and --topology (a TPU slice) exclude each other.")
    if args.devices is not None and args.devices < 1:
        raise ConfigError(f"--devices={args.devices}: must be at least 1.")
    from perex_t5x.cli import gin_command
    from perex_t5x.hardware.devices import use_cpu_backend

    use_cpu_backend(args.devices)
    gin_command.load_training(args)
