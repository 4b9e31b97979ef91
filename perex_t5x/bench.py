"""How fast is a configuration, and what does the framework cost? One JSON line.

    python -m perex_t5x.bench --gin_file=models/tiny.gin --gin_file=runs/bench.gin

The training loop (feed, prefetching, metrics, log files, progress) and a bare JAX loop (the model's loss, `jax.grad`,
the optimizer, batches already on the devices) take turns on the same model, mesh and batches; each number is the median
over the rounds. `framework_overhead` is the ratio of the two step times, less one. For an optimizer that needs statistics of
the examples' gradients the bare loop takes the plain gradient and `optax.adamw`: the overhead is then their price, too.
"""

from __future__ import annotations

if __name__ == "__main__":
    from perex_t5x import cli  # see perex_t5x/train.py

    cli.run_gin("perex_t5x.bench.benchmark", __doc__)

import functools
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

from perex_t5x import loop
from perex_t5x.checkpoints import Checkpointer
from perex_t5x.cli.progress import Progress
from perex_t5x.data.feed import make_feed
from perex_t5x.metrics import MetricsWriter, model_flops_utilization
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.trainer import Trainer, TrainState
from perex_t5x.utils import DatasetConfig


def benchmark(
    *,
    name: str,
    model: Any,
    dataset_cfg: DatasetConfig,
    partitioner: PjitPartitioner,
    trainer_cls: Callable[..., Trainer],
    steps: int = 50,
    rounds: int = 5,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Times `rounds` rounds of `steps` steps of each loop and prints the result as one JSON line.

    Args:
      name: of the configuration, for the output.
      model, dataset_cfg, partitioner, trainer_cls: as in `perex_t5x.train.train`.
      steps: per round.
      rounds: of each loop, taking turns.
      dry_run: stop after all checks.
    """
    trainer = trainer_cls(model=model, partitioner=partitioner)
    trainer.check_batch_size(dataset_cfg.batch_size)
    partitioner.check_model(model.sharded_dimensions())
    if dry_run:
        print("dry run: the configuration is fine.")
        return {}
    feed = make_feed(dataset_cfg, model.FEATURE_CONVERTER_CLS())
    spec = feed.element_spec
    input_shapes = {k: v.shape for k, v in spec.items()}
    shapes, shardings, _ = trainer.abstract_state(input_shapes)
    begun = time.monotonic()
    step_fn = trainer.compiled_step(shapes, shardings, spec)
    compile_seconds = time.monotonic() - begun

    def fresh() -> TrainState:
        init = jax.jit(lambda key: trainer.init_state(key, input_shapes), out_shardings=shardings)
        return init(jax.random.key(0))

    framework = _framework_rounds(trainer, step_fn, feed, fresh(), steps)
    bare = _bare_rounds(trainer, feed, fresh(), shardings, steps)
    times: dict[str, list[float]] = {"framework": [], "bare": []}
    next(framework), next(bare)  # warm up
    for i in range(rounds):
        # Whoever goes first may find a cooler machine: they take turns in that, too.
        for kind, run in (("framework", framework), ("bare", bare))[:: 1 if i % 2 else -1]:
            times[kind].append(next(run) / steps)
    framework.close()
    bare.close()

    step_seconds, bare_seconds = (statistics.median(times[kind]) for kind in ("framework", "bare"))
    tokens = next(iter(spec.values())).shape
    devices = partitioner.mesh.devices
    flops = model.flops_per_step(tokens[0], {k: v.shape[1] for k, v in spec.items()})
    memory = step_fn.memory_analysis()
    result = {
        "name": name,
        "platform": devices.flat[0].platform,
        "devices": devices.size,
        "mesh": "x".join(str(size) for size in partitioner.mesh.shape.values()),
        "batch_size": tokens[0],
        "length": tokens[1],
        "steps_per_second": 1 / step_seconds,
        "tokens_per_second": tokens[0] * tokens[1] / step_seconds,
        "step_seconds": step_seconds,
        "step_seconds_all": times["framework"],
        "bare_step_seconds": bare_seconds,
        "bare_step_seconds_all": times["bare"],
        "framework_overhead": step_seconds / bare_seconds - 1,
        "compile_seconds": compile_seconds,
        "step_temp_bytes": memory.temp_size_in_bytes if memory is not None else None,
        "peak_memory_bytes": _peak_memory(devices.flat[0]),
        **model_flops_utilization(flops, 1 / step_seconds, devices.flat[0].device_kind, devices.size),
    }
    print(json.dumps(result))
    return result


def _framework_rounds(trainer: Trainer, step_fn: Any, feed: Any, state: TrainState, steps: int) -> Iterator[float]:
    """Seconds of `steps` steps in the training loop, again and again."""
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(folder, None)
        writer = MetricsWriter(folder)
        while True:
            run = loop.Loop(
                trainer=trainer,
                step_fn=step_fn,
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
            yield time.monotonic() - begun


def _bare_rounds(trainer: Trainer, feed: Any, state: TrainState, shardings: TrainState, steps: int) -> Iterator[float]:
    """Seconds of `steps` steps of what one would write without a framework, again and again."""
    model, sharding = trainer.model, trainer.partitioner.data_sharding
    batches = [feed.batch(i, {k: sharding for k in feed.element_spec}) for i in range(steps)]
    plain = trainer.needs(state.params) == ("mean",)  # else what the statistics cost belongs to the overhead
    optimizer = model.optimizer_def(learning_rate=1e-3) if plain else optax.adamw(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        (loss, _), grads = jax.value_and_grad(model.loss_fn, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_shapes = jax.eval_shape(optimizer.init, state.params)
    opt_shardings = trainer.partitioner.shardings_like_params(opt_shapes, shardings.params, state.params)
    with trainer.partitioner.constraints():
        params = state.params
        opt_state = jax.jit(optimizer.init, out_shardings=opt_shardings)(params)
        places = (shardings.params, opt_shardings)
        compiled = (
            jax.jit(step, donate_argnums=(0, 1), out_shardings=(*places, None))
            .lower(params, opt_state, batches[0])
            .compile()
        )
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
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
