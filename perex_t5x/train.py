"""Train a model: `python -m perex_t5x.train --gin_file=runs/quickstart.gin --gin.MODEL_DIR=...`

    python -m perex_t5x.train --gin_file=models/tiny.gin --gin_file=runs/pretrain.gin \\
      --gin.MODEL_DIR=runs/first --gin.MIXTURE_OR_TASK_NAME=python_stdlib_lm \\
      --gin.TASK_FEATURE_LENGTHS="{'targets': 128}" --gin.TRAIN_STEPS=1000

The same command, started again, resumes from the newest checkpoint in MODEL_DIR.
"""

from __future__ import annotations

if __name__ == "__main__":
    # First of all: processes have to find each other before anything that is imported uses a device. Does not return, so
    # there is one `perex_t5x.train`, the imported one, which Gin configures.
    from perex_t5x import cli

    cli.run("perex_t5x.train.train", __doc__)

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from absl import logging

from perex_t5x import checkpoints, distributed, evaluation, gin_utils, loop, run_dir
from perex_t5x.data import lookup
from perex_t5x.data.feed import batch_spec, make_feed
from perex_t5x.distributed import folder
from perex_t5x.errors import ConfigError
from perex_t5x.metrics import MetricsWriter
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.seeds import draw_seed
from perex_t5x.trainer import Trainer, TrainState
from perex_t5x.utils import CheckpointConfig, DatasetConfig, RestoreCheckpointConfig


def train(
    *,
    model: Any,
    train_dataset_cfg: DatasetConfig,
    train_eval_dataset_cfg: DatasetConfig | None = None,
    infer_eval_dataset_cfg: DatasetConfig | None = None,
    checkpoint_cfg: CheckpointConfig,
    partitioner: PjitPartitioner,
    trainer_cls: Callable[..., Trainer],
    model_dir: str,
    total_steps: int,
    eval_steps: int | None = 20,
    eval_period: int = 1000,
    stats_period: int | None = None,
    relative_steps: int | None = None,
    random_seed: int | None = None,
    use_hardware_rng: bool = False,
    summarize_config_fn: Callable[..., None] = gin_utils.summarize_gin_config,
    inference_evaluator_cls: Callable[..., Any] | None = None,
    profile_steps: tuple[int, int] | None = None,
    dry_run: bool = False,
) -> tuple[int, TrainState]:
    """Trains, and returns (last step, state).

    Args:
      model: see `perex_t5x.models`; carries its optimizer (`optimizer_def`).
      train_dataset_cfg: what to train on.
      train_eval_dataset_cfg: teacher-forced evaluation every `eval_period` steps; None: none.
      infer_eval_dataset_cfg: evaluation by decoding with a SeqIO evaluator, at the same steps; None: none.
      checkpoint_cfg: saving and restoring. Restored is, in this order: the newest checkpoint in `model_dir`,
        `checkpoint_cfg.restore.path`, nothing.
      partitioner: the mesh.
      trainer_cls: makes the trainer from (model, partitioner); in Gin `@trainer.Trainer`.
      model_dir: everything the run writes is in here.
      total_steps: the step to stop at, earlier training included.
      eval_steps: batches per evaluation; None: the whole split.
      eval_period: steps between evaluations.
      stats_period: steps between log lines; None: `eval_period`, at most 100.
      relative_steps: stop this many steps after the restored one, instead of at `total_steps`.
      random_seed: of initialisation and dropout; None: drawn once, and kept by the checkpoint.
      use_hardware_rng: of T5X. Masks here belong to examples, which a hardware generator cannot give: ignored.
      summarize_config_fn: writes `config.gin`.
      inference_evaluator_cls: `@seqio.Evaluator`, with its loggers bound.
      profile_steps: (first, last) steps to write a profiler trace of.
      dry_run: stop after all checks, before the first compile.
    """
    started = time.monotonic()
    if not isinstance(model_dir, str) or not model_dir:
        raise ConfigError(f"MODEL_DIR = {model_dir!r}: give a path, as a string: --gin.MODEL_DIR=\"'runs/first'\".")
    model_dir = os.path.expanduser(model_dir)
    _check(total_steps, relative_steps, eval_period, stats_period, use_hardware_rng)
    trainer = trainer_cls(model=model, partitioner=partitioner)
    trainer.check_batch_size(train_dataset_cfg.batch_size)
    partitioner.check_model(model.sharded_dimensions())
    logging.info("%s", partitioner.describe_batch(train_dataset_cfg.batch_size))

    spec = batch_spec(train_dataset_cfg, model.FEATURE_CONVERTER_CLS())
    lookup.check_vocabulary(train_dataset_cfg.mixture_or_task_name, model)
    if train_eval_dataset_cfg is not None:
        evaluation.check(partitioner, model, train_eval_dataset_cfg, eval_steps)
    if infer_eval_dataset_cfg is not None:
        lookup.check_evaluation(infer_eval_dataset_cfg, model.FEATURE_CONVERTER_CLS(), "infer_eval/utils.DatasetConfig")
    shapes, shardings, boxed_params = trainer.abstract_state({k: v.shape for k, v in spec.items()})
    summary = run_dir.summarize_model(boxed_params, shapes)
    logging.info("%s", summary)
    folder.prepare(model_dir, run_dir.tree_bytes(shapes), dry_run)
    # One process looks: another might see a checkpoint more, or less.
    source = distributed.from_process_0("where to start", lambda: _where_to_start(model_dir, checkpoint_cfg))
    own = source is not None and os.path.dirname(source) == checkpoints.absolute(model_dir)
    # A run goes on with all of its own state; what another one's checkpoint is used for is configurable.
    restore_cfg = None if own else checkpoint_cfg.restore
    start = checkpoints.check(source, shapes, restore_cfg) if source is not None else 0
    if source is not None and not own and relative_steps is None and start >= total_steps:
        raise ConfigError(
            f"{source} is at step {start}, and TRAIN_STEPS = {total_steps} counts its steps, so there is nothing to train. "
            f"Set TRAIN_STEPS above {start}, or TRAIN_STEPS_RELATIVE to the number of further steps."
        )
    is_writer = distributed.is_writer()
    if dry_run:
        if is_writer:
            print(
                f"dry run: the configuration is fine. {summary}. Starts from {source or 'scratch'}. Nothing was compiled."
            )
        return 0, shapes
    if is_writer:
        run_dir.write_model_info(model_dir, boxed_params, shardings.params, summary)
        summarize_config_fn(model_dir, None, 0)

    saved_run = checkpoints.read_run(source) if own else {}

    with ThreadPoolExecutor(1) as compiler:
        # The step compiles in the background while examples are read and parameters are made.
        compiling = compiler.submit(_timed, lambda: trainer.compiled_step(shapes, shardings, spec))
        feed = make_feed(train_dataset_cfg, model.FEATURE_CONVERTER_CLS(), saved_position=saved_run.get("data"))
        logging.info("%s", feed.description)
        evaluators = loop.make_evaluators(
            trainer, train_eval_dataset_cfg, infer_eval_dataset_cfg, inference_evaluator_cls, eval_steps, model_dir
        )
        for evaluator in evaluators:
            evaluator.compile(compiler, shapes.params, shardings.params)
        compiling_monitor = compiler.submit(trainer.compiled_monitor, shapes, shardings, spec)
        init_started = time.monotonic()
        seed = saved_run.get("random_seed", random_seed)
        seed = draw_seed() if seed is None else seed
        state = _initial_state(trainer, spec, shapes, shardings, seed, source, restore_cfg)
        init_seconds = time.monotonic() - init_started
        first_step = int(state.step)
        if own:
            feed.restore(checkpoints.data_dir(source))
        step_fn, compile_seconds = compiling.result()
        monitor_fn = compiling_monitor.result()

    last_step = total_steps
    if relative_steps is not None:
        # A resumed run still stops where it set out to.
        last_step = first_step + relative_steps
        if saved_run.get("relative_steps") == relative_steps and saved_run["last_step"] > first_step:
            last_step = saved_run["last_step"]
    writer = MetricsWriter(model_dir, enabled=is_writer)
    writer.forget_after(first_step)
    writer.write(
        "train",
        first_step,
        {
            "timing/compilation_seconds": compile_seconds,
            "timing/init_or_restore_seconds": init_seconds,
            "timing/start_seconds": time.monotonic() - started,
        },
    )
    run = loop.Loop(
        trainer=trainer,
        step_fn=step_fn,
        feed=feed,
        evaluators=evaluators,
        checkpointer=checkpoints.Checkpointer(model_dir, checkpoint_cfg.save),
        writer=writer,
        last_step=last_step,
        eval_period=eval_period,
        stats_period=stats_period or min(eval_period, 100),
        run_info={"random_seed": seed, "relative_steps": relative_steps, "last_step": last_step},
        profile_steps=profile_steps,
        model_dir=model_dir,
        monitor_fn=monitor_fn,
    )
    try:
        state = run(state)
    finally:
        run.close()
    return int(state.step), state


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.monotonic()
    return function(), time.monotonic() - begun


def _check(
    total_steps: int,
    relative_steps: int | None,
    eval_period: int,
    stats_period: int | None,
    use_hardware_rng: bool,
) -> None:
    for name, value in (
        ("total_steps", total_steps),
        ("relative_steps", relative_steps),
        ("eval_period", eval_period),
        ("stats_period", stats_period),
    ):
        optional = name in ("relative_steps", "stats_period")
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            macro = " (macro TRAIN_STEPS)" if name == "total_steps" else ""
            raise ConfigError(f"train.{name} = {value!r}{macro}: must be a positive whole number.")
    if use_hardware_rng:
        logging.warning("train.use_hardware_rng is ignored: dropout masks are drawn per example.")


def _where_to_start(model_dir: str, config: CheckpointConfig) -> str | None:
    """The checkpoint to read: the newest in the run's folder, else the one to start from, else None."""
    own = checkpoints.newest(model_dir)
    if own is not None:
        return own
    if config.restore is None or not config.restore.path:
        return None
    return checkpoints.checkpoint_paths(config.restore.path, config.restore.mode)[-1]


def _initial_state(
    trainer: Trainer,
    spec: Any,
    shapes: TrainState,
    shardings: TrainState,
    seed: int,
    source: str | None,
    restore_cfg: RestoreCheckpointConfig | None,
) -> TrainState:
    """Restored where there is something to restore; what is missing is initialised."""
    input_shapes = {k: v.shape for k, v in spec.items()}

    def fresh() -> TrainState:
        init = jax.jit(lambda key: trainer.init_state(key, input_shapes), out_shardings=shardings)
        return init(jax.random.key(seed))

    if source is None:
        return fresh()
    # Another run's checkpoint gives parameters and optimizer state; the dropout of this run is its own.
    parts = ("target", "state", "rng") if restore_cfg is None else ("target", "state")
    restored = checkpoints.restore(source, shapes, shardings, restore_cfg, parts)
    base = fresh() if checkpoints.leaves_missing(shapes, restored) else shapes
    logging.info("starting from %s (step %d)", source, restored.step)
    return checkpoints.merge(base, restored)


def main(argv: Sequence[str] | None = None) -> None:
    from perex_t5x import cli

    cli.run(train, __doc__, argv)
