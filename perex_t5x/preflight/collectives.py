"""The collectives of a training step, from the compiled program: over which axes, how often, how many bytes.

    python -m perex_t5x.preflight.collectives --gin_file=models/150m.gin --gin_file=runs/pretrain.gin \\
      --gin_file=meshes/fsdp.gin --gin.TASK_FEATURE_LENGTHS="{'targets': 1024}" --topology=v5e:4x4

Compiles for a TPU slice without one (`--topology`, with `--slices` for several), or for fake CPU devices (`--devices=8`).
A file of `meshes/` that is named after a pod sets its topology. `--markdown` prints the table as Markdown, `--each` one line
for every collective in the program. MODEL_DIR, TRAIN_STEPS and MIXTURE_OR_TASK_NAME need not be given: no data is read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from perex_t5x import cli, preflight


def _main(args: Any) -> None:
    preflight.start(args)
    # Not earlier: importing these may use a device.
    from perex_t5x.preflight import account, render, step

    step.parse_gin(args.gin_file, args.gin_bindings, args.gin_search_paths)
    devices = step.CompileTarget.from_flags(args, *step.topology_macro()).devices()
    trainer, spec = step.build_parsed(devices)
    batch = trainer.partitioner.describe_batch(next(iter(spec.values())).shape[0])
    print(f"compiling for {len(devices)} x {devices[0].device_kind}: {batch}", file=sys.stderr, flush=True)
    report = step.report(step.compile_step(trainer, spec), trainer.partitioner.mesh)
    rows = render.collective_rows(report.collectives, account.loop_sizes(trainer), args.each)
    print(render.collectives_text(rows, args.markdown) if rows else "no collectives")
    if not args.markdown:
        state, temporaries = render.format_bytes(report.argument_bytes), render.format_bytes(report.temp_bytes)
        print(f"\nper device: state and batch {state}, temporaries {temporaries}")


def define_flags() -> None:
    from absl import flags

    preflight.define_flags()
    flags.DEFINE_bool("markdown", False, "Print the table as Markdown.")
    flags.DEFINE_bool("each", False, "One line for every collective in the program.")


def main(argv: Sequence[str] | None = None) -> None:
    cli.run(_main, __doc__, argv, flags=define_flags)


if __name__ == "__main__":
    main()
