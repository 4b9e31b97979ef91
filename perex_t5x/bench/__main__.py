"""Times and memory, each beside a baseline in the same run. JSON lines.

    python -m perex_t5x.bench
    python -m perex_t5x.bench --sections=mlp,decoder --torch_python=.peers/bin/python --rounds=7
    python -m perex_t5x.bench --gin_file=models/tiny.gin --gin_file=runs/bench.gin
    python -m perex_t5x.bench --engine=scanned,unrolled --rounds=9
    python -m perex_t5x.bench --zoo=all --table=zoo.md
    python -m perex_t5x.bench --t5x=decoder_only,encoder_decoder

The first is everything beside its peers, in sections that can be run one at a time (--sections): statistics of per-example
gradients beside `vmap(grad)`, `optax.microbatching.micro_grad`, jax_privacy, and in PyTorch Opacus and BackPACK, each as a
ratio to its own framework's plain gradient; how they grow with batch, length and depth; the trainer beside a bare JAX loop
and T5X; and how long commands take to start. A peer that is not installed is named as such. What is measured is stored in
--folder as benchmarks.json, where a later run with other sections is merged into it, and written there as a page with plots
(benchmarks.md, images/). With --check=1.5 it ends with 1 if a statistic of ours takes more than 1.5 times the time or
memory of the best other JAX library in the same run, or a training step more than 1.5 times the bare loop's; with
--reference=FILE, an earlier benchmarks.json, also if such a ratio, or that of a start to its imports, is more than 1.5 times
the ratio there.

The second form times the training loop (feed, prefetching, metrics, log files, progress) and a bare JAX loop (the model's
loss, `jax.grad`, the optimizer, batches already on the devices) on the same model, mesh and batches; each number is the
median over the rounds. `framework_overhead` is the ratio of the two step times, minus one. For an optimizer that needs
statistics of the examples' gradients the bare loop uses the plain gradient and `optax.adamw`, so the overhead includes their
cost. The loop's folder is on local disk; with --gin.MODEL_DIR="'gs://...'" (or any other) a second loop writes there, and
`storage_overhead` is the ratio of its step time to the first one's, minus one (the median of the rounds' ratios). What a
round has left in the queue of metrics is written before the next one begins, and not timed: let a round take longer than the
10 seconds after which a part of the metrics is uploaded. With --gin.SAVE_PERIOD=10 a further loop saves a checkpoint every
ten steps; `saving_overhead` is the same ratio for it, of the times between steps: the end of a run, which waits for its last
checkpoint, is not among them.

The third times mean and mean square of a small model's per-example gradients, computed by a loop, `vmap`,
`optax.microbatching.micro_grad` and the engine (`surgery`; with clip_norm `clipped`, in one backward pass, and `two
passes`), beside the plain gradient. Every program runs all at once and at its own best microbatch size, the plain gradient
too; times are ratios to it, with quartiles. Temporary memory is the compiler's. `trace` is the processor time of
`jax.jit(program).trace`, the minimum over seven rounds or more, caches cleared before each; nothing has been compiled by
then. A readable summary goes to stderr.

The fourth does so for the losses of `perex_t5x.zoo` (or some: --zoo='weight_*,lstm'), with the least time of the rounds, and
writes a table that marks the losses where `vmap` or `micro_grad` needs less time or memory than the engine.

The fifth, where T5X is installed, does so for training steps of T5X's example models: with T5X's own trainer and adamw; with
ours inside T5X (`perex_t5x.t5x_plugin`); and outside of it, our trainer with our models of the same architectures and sizes.
Times are ratios to the first, the median of the rounds' ratios.

Whatever is compared takes turns in every round. Cycles on a TPU, without one: `python -m perex_t5x.preflight.overhead`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from perex_t5x import cli
from perex_t5x.cli import flags as cli_flags


def define_flags() -> None:
    from absl import flags

    cli_flags.define_training_flags()
    known = ("scanned", "unrolled", "mlp")  # `engine.MODELS`, without importing JAX
    flags.DEFINE_list("sections", None, "Which sections of the whole to run; the default is all: see --dry_run.")
    flags.DEFINE_string("folder", "runs/bench", "Where the whole stores benchmarks.json, benchmarks.md and its plots.")
    flags.DEFINE_bool("quick", False, "The whole at the smallest sizes: to try it, not to measure.")
    flags.DEFINE_float("check", None, "End with 1 if something takes more than this many times its baseline.")
    flags.DEFINE_string("reference", None, "With --check: an earlier benchmarks.json, whose ratios are also compared.")
    flags.DEFINE_string("torch_python", None, "The Python in whose environment PyTorch, Opacus and BackPACK are.")
    flags.DEFINE_string("t5x_python", None, "The Python in whose environment T5X is.")
    flags.DEFINE_list("engine", None, f"Time the per-example engine on these models: some of {', '.join(known)}.")
    flags.DEFINE_list("zoo", None, "Time the per-example engine on these losses of the zoo: names, patterns, or all.")
    flags.DEFINE_list("t5x", None, "Time training inside T5X on its decoder_only, encoder_decoder, or both.")
    flags.DEFINE_string("table", None, "With --zoo: write the table into this Markdown file.")
    flags.DEFINE_integer("rounds", 5, "Rounds in which all programs take turns; not with --gin_file.", lower_bound=1)
    flags.DEFINE_list("microbatches", ["1", "4"], "With --engine: microbatch sizes to try, besides all at once.")
    flags.DEFINE_integer("examples", 16, "With --engine or --t5x: examples of the batch.")
    flags.DEFINE_integer("layers", 4, "With --engine or --t5x: layers.")


def main(args: Any) -> int | None:
    if args.zoo is not None:
        from perex_t5x.bench.zoo import benchmark_zoo

        benchmark_zoo(args.zoo, args.rounds, args.table)
    elif args.t5x is not None:
        from perex_t5x.bench.inside_t5x import benchmark_t5x

        benchmark_t5x(args.t5x, args.rounds, args.examples, args.layers)
    elif args.engine is not None:
        from perex_t5x.bench.engine import benchmark_engine

        benchmark_engine(args.engine, args.rounds, args.microbatches, args.examples, args.layers)
    elif args.gin_file:
        from perex_t5x.cli import gin_command

        gin_command.call(_load, args)
    else:
        from perex_t5x.bench import proof

        return proof.run(args)
    return None


def _load() -> Callable[..., Any]:
    from perex_t5x import bench

    vars(sys.modules["__main__"])["benchmark"] = bench.benchmark  # where ported Gin files look for it
    return bench.benchmark


if __name__ == "__main__":
    cli.run(main, __doc__, flags=define_flags)
