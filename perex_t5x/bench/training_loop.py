"""A configuration's training loop beside a bare JAX loop: `python -m perex_t5x.bench --gin_file=runs/bench.gin ...`"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Annotated, Any

import jax
import optax
from etils import epath

from perex_t5x import arguments, gin_utils, loop, run_dir
from perex_t5x.arguments import Interval, PositiveInt
from perex_t5x.bench.turns import in_turns, peak_resident_bytes, temp_bytes
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

# Seconds of each round's steps.
Rounds = Generator[float, None, None]


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

    def framework(parent: str | None, paces: list[float], saves: SaveCheckpointConfig | None = None) -> Rounds:
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
) -> Rounds:
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


def _bare_rounds(trainer: Trainer, feed: Any, state: TrainState, shardings: TrainState, steps: int) -> Rounds:
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


def _peak_memory(device: Any) -> int:
    """The device's own count where it keeps one, else this process's largest resident size."""
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return peak_resident_bytes()
