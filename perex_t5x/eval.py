"""Evaluate a checkpoint: `python -m perex_t5x.eval --gin_file=models/tiny.gin --gin_file=runs/eval.gin ...`

Prints one JSON line per checkpoint and task, and writes them to `metrics.jsonl` in the output folder, next to the
files of the SeqIO loggers.
"""

from __future__ import annotations

if __name__ == "__main__":
    # First of all: processes have to find each other before anything that is imported uses a device. Does not return, so
    # there is one `perex_t5x.eval`, the imported one, which Gin configures.
    from perex_t5x import cli

    cli.run_gin("perex_t5x.eval.evaluate", __doc__)

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from etils import epath

from perex_t5x import arguments, checkpoints, distributed, files, gin_utils, run_dir
from perex_t5x.arguments import Seed
from perex_t5x.data import lookup
from perex_t5x.evaluation import InferenceEvaluator, TrainEvaluator, check_inference
from perex_t5x.inference import IGNORED_OF_T5X, check_params, paths_to_restore, restore_params
from perex_t5x.models.protocol import Model
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.trainer import Trainer
from perex_t5x.utils import DatasetConfig, RestoreCheckpointConfig, log_ignored


def evaluate(
    *,
    model: Model,
    dataset_cfg: DatasetConfig,
    partitioner: PjitPartitioner,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    output_dir: str,
    inference_evaluator_cls: Callable[..., Any] | None = None,
    training_evaluator_cls: Callable[..., Trainer] | None = None,
    summarize_config_fn: Callable[..., None] = gin_utils.summarize_gin_config,
    train_state_initializer_cls: Any = None,
    train_eval_get_dataset_fn: Any = None,
    fallback_init_rng: Seed | None = None,
    use_orbax: bool = True,
    dry_run: bool = False,
) -> dict[int, dict[str, dict[str, float]]]:
    """Evaluates with the tasks' metrics; returns {step: {task: metrics}}.

    Args:
      model: the checkpoint's model.
      dataset_cfg: what to evaluate on.
      partitioner: the mesh.
      restore_checkpoint_cfg: which checkpoint; mode 'all' evaluates each in the folder.
      output_dir: results go here.
      inference_evaluator_cls: `@seqio.Evaluator`, with its loggers bound.
      training_evaluator_cls: `@trainer.Trainer`, the loss of the whole split, teacher-forced.
      summarize_config_fn: writes `config.gin`.
      fallback_init_rng: the seed of parameters that the checkpoint has not; None: they are refused.
      train_state_initializer_cls, train_eval_get_dataset_fn, use_orbax: T5X's, without effect.
      dry_run: stop after all checks.
    """
    given = dict(locals())
    arguments.check("evaluate", arguments.hints(evaluate), given)
    ignored = IGNORED_OF_T5X | {
        "train_eval_get_dataset_fn": (None, "examples are those of the SeqIO task in dataset_cfg"),
    }
    log_ignored("evaluate", given, ignored)
    with gin_utils.building():
        paths = distributed.from_process_0("checkpoints", lambda: paths_to_restore(restore_checkpoint_cfg))
        lookup.verify_matching_vocabs(dataset_cfg, model)
        check_inference(partitioner, model, dataset_cfg, "DatasetConfig", inference_evaluator_cls)
        for path in paths if dry_run else ():  # else each in its turn: their number may be large
            fallback = fallback_init_rng is not None
            check_params(model, partitioner, path, restore_checkpoint_cfg, dataset_cfg, fallback)
        teacher_forced = None
        if training_evaluator_cls is not None:
            trainer = training_evaluator_cls(model=model, partitioner=partitioner)
            teacher_forced = TrainEvaluator(trainer, dataset_cfg, None)
        run_dir.prepare(output_dir, dry_run=dry_run, binding="EVAL_OUTPUT_DIR")
    is_writer = distributed.is_writer()
    if dry_run:
        if is_writer:
            print(f"dry run: the configuration is fine. Would evaluate {', '.join(paths)}.")
        return {}
    if is_writer:
        summarize_config_fn(output_dir, None, 0)
    evaluator = InferenceEvaluator(model, partitioner, dataset_cfg, inference_evaluator_cls, output_dir)
    results = {}
    lines = []
    for number, path in enumerate(paths):
        params = restore_params(model, partitioner, path, restore_checkpoint_cfg, dataset_cfg, fallback_init_rng)
        step = checkpoints.step_of(path) or 0
        with run_dir.explained_writes(output_dir, "EVAL_OUTPUT_DIR"):  # by SeqIO's loggers
            results[step] = evaluator.evaluate(step, params)
            if teacher_forced is not None:
                if number == 0:
                    with ThreadPoolExecutor(1) as executor:
                        shardings = jax.tree.map(lambda x: x.sharding, params)
                        teacher_forced.compile(executor, jax.eval_shape(lambda x: x, params), shardings)
                results[step] |= teacher_forced.evaluate(step, params)
        for task, metrics in results[step].items():
            line = json.dumps({"step": step, "name": task, **metrics})
            if is_writer:
                print(line)
            lines.append(line + "\n")
    if is_writer:
        written = epath.Path(output_dir) / "metrics.jsonl"
        with run_dir.explained_writes(output_dir, "EVAL_OUTPUT_DIR"):
            files.write_atomically(written, (written.read_text() if written.exists() else "") + "".join(lines))
    return results
