"""The collectives of a training step, from the compiled program: what goes over which axes, how often, how many bytes.

    python -m perex_t5x.preflight.collectives --gin_file=models/150m.gin --gin_file=runs/pretrain.gin \\
      --gin_file=meshes/fsdp.gin --gin.TASK_FEATURE_LENGTHS="{'targets': 1024}" --topology=v5e:4x4

Compiles for a TPU slice without one (`--topology`, with `--slices` for several), or for fake CPU devices (`--devices=8`).
A file of `meshes/` that is named after a pod brings its topology along. `--markdown` prints the table as Markdown, `--each`
one line for every collective in the program. MODEL_DIR, TRAIN_STEPS and MIXTURE_OR_TASK_NAME need not be given: no data
is read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags

from perex_t5x import cli, console, gin_utils
from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.preflight import topology


def _main(args: Any) -> None:
    if not args.gin_file:
        raise ConfigError("no --gin_file given: those of a training, such as models/150m.gin and runs/pretrain.gin.")
    if args.devices is not None and args.topology:
        raise ConfigError("--devices (fake CPU devices) and --topology (a TPU slice) exclude each other.")
    if args.devices is not None and args.devices < 1:
        raise ConfigError(f"--devices={args.devices}: must be at least 1.")
    console.set_up(everything=args.alsologtostderr)
    topology.use_cpu_backend(args.devices)
    console.import_tensorflow_quietly()
    # Only now: these look for a device when they are imported.
    from perex_t5x import train as train_script
    from perex_t5x.preflight import step, table

    sys.modules["__main__"].train = train_script.train  # ported files say `import __main__ as train_script`
    step.parse_gin(args.gin_file, args.gin_bindings, args.gin_search_paths)
    devices = jax.devices("cpu")[: args.devices] if args.devices else _tpu_devices(args, *step.topology_macro())
    trainer, spec = step.build_parsed(devices)
    batch = trainer.partitioner.describe_batch(next(iter(spec.values())).shape[0])
    print(f"compiling for {len(devices)} x {devices[0].device_kind}: {batch}", file=sys.stderr, flush=True)
    found = step.report(step.compile_step(trainer, spec), trainer.partitioner.mesh)
    lines = table.rows(found.collectives, table.loop_sizes(trainer), args.each)
    print(table.as_text(lines, args.markdown) if lines else "no collectives")
    if not args.markdown:
        state, temporaries = table.format_bytes(found.argument_bytes), table.format_bytes(found.temp_bytes)
        print(f"\na device: state and batch {state}, temporaries {temporaries}")


def _tpu_devices(args: Any, default: str | None, default_slices: int) -> list[Any]:
    """What the flags name, or else the Gin files with their macros TOPOLOGY and NUM_SLICES."""
    name = args.topology or default
    if not name:
        raise ConfigError(
            "nothing to compile for: give --topology=v5e:4x4, a mesh file with a TOPOLOGY such as meshes/v5e_16.gin, or "
            "--devices=8 for fake CPU devices."
        )
    return topology.tpu_devices(name, default_slices if args.slices is None else args.slices)


def main(argv: Sequence[str] | None = None) -> None:
    cli.define_flags()
    flags.DEFINE_string("topology", None, "TPU slice to compile for: v5e:4x4, or by its cloud name v5e-16.")
    flags.DEFINE_integer("slices", None, "How many such slices, joined by the data-centre network.")
    flags.DEFINE_integer("devices", None, "So many fake CPU devices instead.")
    flags.DEFINE_bool("markdown", False, "Print the table as Markdown.")
    flags.DEFINE_bool("each", False, "One line for every collective in the program.")
    sys.modules["__main__"].__doc__ = __doc__

    def run(_: Sequence[str]) -> None:
        try:
            _main(flags.FLAGS)
        except ConfigError as e:
            _fail(e, cli.EXIT_CONFIG)
        except TrainingError as e:
            _fail(e, cli.EXIT_ERROR)

    try:
        args = gin_utils.rewrite_gin_args(sys.argv if argv is None else argv)
    except ConfigError as e:
        _fail(e, cli.EXIT_CONFIG)
    app.run(run, argv=args)


def _fail(error: Exception, status: int) -> None:
    # Gin adds a line for every configurable that was being made; the messages name their bindings themselves.
    message = re.sub(r"\n\s*In call to configurable .*", "", str(error))
    print(f"\nERROR: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
