"""Wall-clock time: a configuration beside a bare JAX loop, or the per-example engine beside its alternatives. JSON lines.

    python -m perex_t5x.bench --gin_file=models/tiny.gin --gin_file=runs/bench.gin
    python -m perex_t5x.bench --engine=scanned,unrolled --rounds=9
    python -m perex_t5x.bench --zoo=all --table=zoo.md
    python -m perex_t5x.bench --t5x=decoder_only,encoder_decoder

The first times the training loop (feed, prefetching, metrics, log files, progress) and a bare JAX loop (the model's loss,
`jax.grad`, the optimizer, batches already on the devices) on the same model, mesh and batches; each number is the median
over the rounds. `framework_overhead` is the ratio of the two step times, minus one. For an optimizer that needs statistics
of the examples' gradients the bare loop uses the plain gradient and `optax.adamw`, so the overhead includes their cost. The
loop's folder is on local disk; with --gin.MODEL_DIR="'gs://...'" (or any other) a second loop writes there, and
`storage_overhead` is the ratio of its step time to the first one's, minus one (the median of the rounds' ratios). What a
round has left in the queue of metrics is written before the next one begins, and not timed: let a round take longer than the
10 seconds after which a part of the metrics is uploaded. With --gin.SAVE_PERIOD=10 a further loop saves a checkpoint every
ten steps; `saving_overhead` is the same ratio for it, of the times between steps: the end of a run, which waits for its last
checkpoint, is not among them.

The second times mean and mean square of a small model's per-example gradients, computed by a loop, `vmap`,
`optax.microbatching.micro_grad` and the engine (`surgery`; with clip_norm `clipped`, in one backward pass, and `two
passes`), beside the plain gradient. Every program runs all at once and at its own best microbatch size, the plain gradient
too; times are ratios to it, with quartiles. Temporary memory is the compiler's. `trace` is the processor time of
`jax.jit(program).trace`, the minimum over the rounds, caches cleared before each. A readable summary goes to stderr.

The third does so for the losses of `perex_t5x.zoo` (or some: --zoo='weight_*,lstm'), with the least time of the rounds, and
writes a table that marks the losses where `vmap` or `micro_grad` needs less time or memory than the engine.

The fourth, where T5X is installed, does so for training steps of T5X's example models: with T5X's own trainer and adamw, and
with ours (`perex_t5x.t5x_plugin`); times are ratios to the former, the median of the rounds' ratios.

Whatever is compared takes turns in every round. Cycles on a TPU, without one: `python -m perex_t5x.preflight.overhead`.
"""

from __future__ import annotations

if __name__ == "__main__":
    import sys

    from perex_t5x import cli  # see perex_t5x/train.py
    from perex_t5x.cli import flags as cli_flags

    def define_flags() -> None:
        from absl import flags

        cli_flags.define_training_flags()
        known = ("scanned", "unrolled", "mlp")  # `bench_engine.MODELS`, without importing JAX
        flags.DEFINE_list("engine", None, f"Time the per-example engine on these models: some of {', '.join(known)}.")
        flags.DEFINE_list(
            "zoo", None, "Time the per-example engine on these losses of the zoo: names, patterns, or all."
        )
        flags.DEFINE_list("t5x", None, "Time training inside T5X on its decoder_only, encoder_decoder, or both.")
        flags.DEFINE_string("table", None, "With --zoo: write the table into this Markdown file.")
        flags.DEFINE_integer("rounds", 5, "With --engine, --zoo or --t5x: rounds in which all programs take turns.")
        flags.DEFINE_list("microbatches", ["1", "4"], "With --engine: microbatch sizes to try, besides all at once.")
        flags.DEFINE_integer("examples", 16, "With --engine or --t5x: examples of the batch.")
        flags.DEFINE_integer("layers", 4, "With --engine or --t5x: layers.")

    def main(args: Any) -> None:
        def load() -> Callable[..., Any]:
            from perex_t5x import bench

            sys.modules["__main__"].benchmark = bench.benchmark  # where ported Gin files look for it
            return bench.benchmark

        if args.zoo is not None:
            from perex_t5x.bench_zoo import benchmark_zoo

            benchmark_zoo(args.zoo, args.rounds, args.table)
            return
        if args.t5x is not None:
            from perex_t5x.bench_t5x import benchmark_t5x

            benchmark_t5x(args.t5x, args.rounds, args.examples, args.layers)
            return
        if args.engine is None:
            from perex_t5x.cli import gin_command

            gin_command.call(load, args)
            return
        from perex_t5x.bench_engine import benchmark_engine

        benchmark_engine(args.engine, args.rounds, args.microbatches, args.examples, args.layers)

    cli.run(main, __doc__, flags=define_flags)

import contextlib
import functools
import json
import resource
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import jax
import optax
from etils import epath

from perex_t5x import arguments, gin_utils, loop, run_dir
from perex_t5x.arguments import Interval, PositiveInt
from perex_t5x.checkpoints import Checkpointer
from perex_t5x.cli.progress import Progress
from perex_t5x.data import lookup
from perex_t5x.data.feed import batch_spec, check_random_access, make_feed
from perex_t5x.metrics import MetricsWriter, flops_per_step, model_flops_utilization
from perex_t5x.models import protocol
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.train import Setup, timed
from perex_t5x.trainer import Trainer, TrainState
from perex_t5x.utils import DatasetConfig, SaveCheckpointConfig

_Name = TypeVar("_Name")


def in_turns(measures: Mapping[_Name, Callable[[], float]], rounds: int) -> dict[_Name, list[float]]:
    """Calls every measure once per round; returns the rounds' values by name.

    Whichever goes first may find a cooler machine, so the order alternates, too.

    >>> in_turns({"a": lambda: 1.0, "b": lambda: 2.0}, rounds=2)
    {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    values: dict[_Name, list[float]] = {name: [] for name in measures}
    for i in range(rounds):
        for name in list(measures)[:: 1 if i % 2 else -1]:
            values[name].append(measures[name]())
    return values


# --- training steps ---------------------------------------------------------------------------------------------------


def benchmark(
    *,
    name: str,
    model: protocol.Model,
    dataset_cfg: DatasetConfig,
    partitioner: PjitPartitioner,
    trainer_cls: Callable[..., Trainer],
    steps: PositiveInt = 50,
    rounds: PositiveInt = 5,
    model_dir: str | None = None,
    save_period: PositiveInt | None = None,
    pause: Annotated[float, Interval("[0, 3600]")] = 0.0,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Times `rounds` rounds of `steps` steps of each loop and prints the result as one JSON line.

    Args:
      name: of the configuration, for the output.
      model, dataset_cfg, partitioner, trainer_cls: as in `perex_t5x.train.train`.
      steps: per round.
      rounds: of each loop, taking turns.
      model_dir: where another loop writes; None: there is none. A folder in it is made, and removed at the end.
      save_period: steps between the checkpoints of another loop, in `model_dir` if there is one; None: there is none.
      pause: seconds that each step of the training loop waits without computing, as if it were chips that do. On a machine
        whose cores are its devices, whatever else they do is in every ratio.
      dry_run: stop after all checks.
    """
    arguments.check("benchmark", arguments.hints(benchmark), dict(locals()))
    with gin_utils.building():
        trainer = trainer_cls(model=model, partitioner=partitioner)
        trainer.check_batch_size(dataset_cfg.batch_size)
        partitioner.check_model(protocol.sharded_dimensions(model))
        converter = protocol.feature_converter_cls(model)
        check_random_access(dataset_cfg, converter, "the benchmark")
        lookup.check_vocabulary(dataset_cfg.mixture_or_task_name, model)
        if model_dir is not None:
            run_dir.prepare(model_dir, dry_run=True)
        spec = batch_spec(dataset_cfg, converter)
        setup = Setup(trainer, spec, *trainer.abstract_state({k: v.shape for k, v in spec.items()}))
        trainer.check_functions(setup.shapes.params)
    if dry_run:
        print("dry run: the configuration is fine.")
        return {}
    feed = make_feed(dataset_cfg, converter)
    step_fn, compile_seconds = timed(lambda: trainer.compiled_step(setup.shapes, setup.shardings, spec))

    def paused(*arguments: Any) -> Any:
        time.sleep(pause)
        return step_fn(*arguments)

    def framework(parent: str | None, paces: list[float], saves: SaveCheckpointConfig | None = None) -> Iterator[float]:
        state = setup.init(jax.random.key(0))
        return _framework_rounds(trainer, paused, feed, state, steps, parent, saves, paces)

    paces: dict[str, list[float]] = {"framework": [], "storage": [], "saving": []}
    loops = {
        "framework": framework(None, paces["framework"]),
        "bare": _bare_rounds(trainer, feed, setup.init(jax.random.key(0)), setup.shardings, steps),
    }
    if model_dir is not None:
        loops["storage"] = framework(model_dir, paces["storage"])
    if save_period is not None:
        saves = SaveCheckpointConfig(period=save_period, keep=1)
        loops["saving"] = framework(model_dir, paces["saving"], saves)
    for one in loops.values():
        next(one)  # warm up
    times = in_turns({kind: functools.partial(_seconds, one, steps) for kind, one in loops.items()}, rounds)
    for one in loops.values():
        one.close()

    medians = {kind: statistics.median(values) for kind, values in times.items()}
    step_seconds, bare_seconds = medians["framework"], medians["bare"]
    batch_size, *lengths = next(iter(spec.values())).shape
    length = lengths[0] if lengths else 1
    devices = partitioner.mesh.devices
    flops = flops_per_step(model, spec)
    result = {
        "name": name,
        "platform": devices.flat[0].platform,
        "devices": devices.size,
        "mesh": "x".join(str(size) for size in partitioner.mesh.shape.values()),
        "batch_size": batch_size,
        "length": length,
        "steps_per_second": 1 / step_seconds,
        "tokens_per_second": batch_size * length / step_seconds,
        "step_seconds": step_seconds,
        "step_seconds_all": times["framework"],
        "bare_step_seconds": bare_seconds,
        "bare_step_seconds_all": times["bare"],
        "framework_overhead": step_seconds / bare_seconds - 1,
        "compile_seconds": compile_seconds,
        "step_temp_bytes": temp_bytes(step_fn),
        "peak_memory_bytes": _peak_memory(devices.flat[0]),
        **model_flops_utilization(flops, 1 / step_seconds, devices.flat[0].device_kind, devices.size),
    }
    if model_dir is not None:
        result |= {"model_dir": model_dir, "storage_step_seconds_all": times["storage"]}
        # Round by round: what else the machine does changes from one to the next.
        result["storage_overhead"] = statistics.median(_ratios(times["storage"], times["framework"])) - 1
    if save_period is not None:
        ratios = _ratios(paces["saving"][1:], paces["framework"][1:])  # the first round warmed up
        result |= {"saving_overhead": statistics.median(ratios) - 1, "saving_overhead_all": [r - 1 for r in ratios]}
        result |= {"save_period": save_period, "checkpoint_bytes": run_dir.tree_bytes(setup.shapes)}
    print(json.dumps(result))
    return result


def _ratios(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    return [value / base for value, base in zip(values, baseline, strict=True)]


def _seconds(rounds: Iterator[float], steps: int) -> float:
    return next(rounds) / steps


@contextlib.contextmanager
def _folder_in(parent: str | None) -> Iterator[str]:
    """A new folder, there for a while: in `parent`, which may be remote, or where temporary files go."""
    if parent is None:
        with tempfile.TemporaryDirectory() as folder:
            yield folder
        return
    folder = epath.Path(parent) / f"bench-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    try:
        yield str(folder)
    finally:
        folder.rmtree()


def _framework_rounds(
    trainer: Trainer,
    step_fn: Any,
    feed: Any,
    state: TrainState,
    steps: int,
    parent: str | None,
    saves: SaveCheckpointConfig | None,
    paces: list[float],
) -> Iterator[float]:
    """Seconds of `steps` steps in the training loop, again and again; its folder is in `parent`.

    `paces` gets each round's seconds between the calls of two steps: the loop makes one when that before the last has ended.
    """
    calls: list[float] = []

    def noted_step(*arguments: Any) -> Any:
        calls.append(time.monotonic())
        return step_fn(*arguments)

    with (
        _folder_in(parent) as folder,
        contextlib.closing(Checkpointer(folder, saves)) as checkpointer,
        contextlib.closing(MetricsWriter(folder)) as writer,
    ):
        while True:
            run = loop.Loop(
                trainer=trainer,
                step_fn=noted_step,
                feed=feed,
                evaluators=(),
                checkpointer=checkpointer,
                writer=writer,
                last_step=int(state.step) + steps,
                eval_period=10**9,
                stats_period=10,
                run_info={},
                profile_steps=None,
                model_dir=folder,
                progress=functools.partial(Progress, enabled=False),
            )
            begun = time.monotonic()
            state = jax.block_until_ready(run(state))
            seconds = time.monotonic() - begun
            writer.flush()  # else it would be another loop's time
            paces.append((calls[-1] - calls[0]) / max(1, len(calls) - 1))
            calls.clear()
            yield seconds


def _bare_rounds(trainer: Trainer, feed: Any, state: TrainState, shardings: TrainState, steps: int) -> Iterator[float]:
    """Seconds of `steps` steps of what one would write without a framework, again and again."""
    model, sharding = trainer.model, trainer.partitioner.data_sharding
    batches = [feed.batch(i, {k: sharding for k in feed.element_spec}) for i in range(steps)]
    plain = trainer.needs(state.params) == ("mean",)  # else the overhead includes the cost of the statistics
    optimizer = model.optimizer_def(learning_rate=1e-3) if plain else optax.adamw(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        gradient = jax.value_and_grad(model.loss_fn, has_aux=True)
        (loss, _), grads = gradient(params, batch, None, model.loss_normalizer(batch))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_shapes = jax.eval_shape(optimizer.init, state.params)
    opt_shardings = trainer.partitioner.shardings_like_params(opt_shapes, shardings.params, state.params)
    with trainer.partitioner.constraints():
        params = state.params
        opt_state = jax.jit(optimizer.init, out_shardings=opt_shardings)(params)
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(shardings.params, opt_shardings, None))
        compiled = jitted.lower(params, opt_state, batches[0]).compile()
    while True:
        begun = time.monotonic()
        for batch in batches:
            params, opt_state, _ = compiled(params, opt_state, batch)
        jax.block_until_ready(params)
        yield time.monotonic() - begun


def temp_bytes(compiled: Any) -> int | None:
    """Memory that a compiled program needs besides its arguments and results; None where not known."""
    memory = compiled.memory_analysis()
    return None if memory is None else int(memory.temp_size_in_bytes)


def _peak_memory(device: Any) -> int:
    """The device's own count where it keeps one, else this process's largest resident size."""
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
