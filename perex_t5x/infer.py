"""Predict or score every example of a task.

    python -m perex_t5x.infer --gin_file=models/tiny.gin --gin_file=runs/infer.gin ...

Writes `<task>-<mode>.jsonl-00000-of-00001` to the output folder: one JSON object per example, with its text and the model's
output. An inference that was killed goes on where it was, at the last `checkpoint_period`.
"""

from __future__ import annotations

if __name__ == "__main__":
    # First of all: processes have to find each other before anything that is imported uses a device. Does not return, so
    # there is one `perex_t5x.infer`, the imported one, which Gin configures.
    from perex_t5x import cli

    cli.run_gin("perex_t5x.infer.infer", __doc__)

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from absl import logging

from perex_t5x import arguments, checkpoints, distributed, gin_utils, run_dir
from perex_t5x.arguments import Count, PositiveInt, Seed
from perex_t5x.data import lookup
from perex_t5x.errors import ConfigError
from perex_t5x.inference import (
    IGNORED_OF_T5X,
    BatchRunner,
    check_outputs,
    check_params,
    paths_to_restore,
    restore_params,
)
from perex_t5x.inference_files import (
    TEXT,
    MergeFn,
    Output,
    WriteFn,
    by_name,
    decoding_bindings,
    merge_chunks_to_file,
    write_inferences_to_file,
)
from perex_t5x.models import protocol
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.utils import DatasetConfig, RestoreCheckpointConfig, log_ignored


def infer(
    *,
    mode: Literal["predict", "score", "predict_with_aux"] = "predict",
    model: protocol.Model,
    dataset_cfg: DatasetConfig,
    partitioner: PjitPartitioner,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    output_dir: str,
    checkpoint_period: PositiveInt = 100,
    shard_id: Count = 0,
    num_shards: PositiveInt = 1,
    merge_chunked_results: bool = True,
    write_fn: WriteFn = write_inferences_to_file,
    checkpoint_ds_iter: bool = True,
    train_state_initializer_cls: Any = None,
    fallback_init_rng: Seed | None = None,
    merge_fn: MergeFn = merge_chunks_to_file,
    summarize_config_fn: Callable[..., None] = gin_utils.summarize_gin_config,
    verify_matching_vocabs_fn: Callable[[DatasetConfig, Any], None] | None = lookup.verify_matching_vocabs,
    output_vocab_feature_name: str = "targets",
    file_extension: str = "jsonl",
    keep_aux_as_numpy: bool = False,
    use_orbax: bool = True,
    num_examples: PositiveInt | None = None,
    random_seed: Seed = 0,
    dry_run: bool = False,
) -> list[str]:
    """Runs the model over a task's examples; returns the files written.

    How a model predicts is its own: `decode_fn`, and what is bound to `predict_batch_with_aux`.

    Args:
      mode: 'predict' (text), 'score' (log likelihood of the targets), 'predict_with_aux' (text and its scores).
      model: the checkpoint's model.
      dataset_cfg: the task, its split and lengths.
      partitioner: the mesh.
      restore_checkpoint_cfg: which checkpoint.
      output_dir: results go here.
      checkpoint_period: batches between two writes; an inference that was killed loses no more than these.
      shard_id, num_shards: which part of the examples, for several inferences side by side into one folder.
      merge_chunked_results: False leaves the results of each period in a file of its own.
      write_fn, merge_fn: write the results of a period, and join them: `perex_t5x.inference_files`.
      fallback_init_rng: the seed of parameters that the checkpoint has not; None: they are refused.
      summarize_config_fn: writes `config.gin`.
      verify_matching_vocabs_fn: is called with (dataset configuration, model), and raises where their vocabularies differ;
        None: nothing is compared.
      output_vocab_feature_name: the feature whose vocabulary decodes predictions.
      file_extension: of the files.
      keep_aux_as_numpy: gives `write_fn` arrays instead of lists.
      checkpoint_ds_iter, train_state_initializer_cls, use_orbax: T5X's, without effect: an inference resumes by counting its
        examples.
      num_examples: only this many, the first ones; None: all.
      random_seed: of the samples.
      dry_run: stop after all checks.
    """
    given = dict(locals())
    import seqio

    arguments.check("infer", arguments.hints(infer), given)
    ignored = IGNORED_OF_T5X | {
        "checkpoint_ds_iter": (True, "an inference resumes by counting its examples"),
    }
    log_ignored("infer", given, ignored)
    fn = functools.partial(_run, model, mode)
    with gin_utils.building():
        if shard_id >= num_shards:
            raise ConfigError(f"infer.shard_id = {shard_id}: must be below infer.num_shards = {num_shards}.")
        protocol.require(model, protocol.Scores if mode == "score" else protocol.Predicts, f"infer.mode = {mode!r}")
        path = distributed.from_process_0("checkpoint", lambda: paths_to_restore(restore_checkpoint_cfg)[-1])
        converter_cls = protocol.feature_converter_cls(model)
        provider = lookup.check_evaluation(dataset_cfg, converter_cls, "DatasetConfig")
        if verify_matching_vocabs_fn is not None:
            verify_matching_vocabs_fn(dataset_cfg, model)
        partitioner.check_batch(dataset_cfg.batch_size, "DatasetConfig.batch_size")
        method = "score_batch" if mode == "score" else "predict_batch_with_aux"
        check_outputs(fn, model, partitioner, dataset_cfg, f"{type(model).__name__}.{method}", for_metrics=False)
        tasks = seqio.get_subtasks(provider)
        if mode != "score":  # scores are not decoded
            for task in tasks:
                _check_output_feature(task, output_vocab_feature_name)
        if dry_run:
            restore = functools.partial(check_params, fallback=fallback_init_rng is not None)
            restore(model, partitioner, path, restore_checkpoint_cfg, dataset_cfg)
        run_dir.prepare(output_dir, dry_run=dry_run, binding="INFER_OUTPUT_DIR")
        plan = {
            "checkpoint": path if "://" in path else os.path.realpath(path),
            "split": dataset_cfg.split,
            "task_feature_lengths": str(dict(dataset_cfg.task_feature_lengths or {})),
            "examples per chunk": str(checkpoint_period * dataset_cfg.batch_size),
            "num_examples": str(num_examples),
            "random_seed": str(random_seed),
            "decoding": "" if mode == "score" else decoding_bindings(),
        }
        place = output_dir, mode, file_extension, shard_id, num_shards
        outputs = [_output(task, plan, *place) for task in tasks]
        complete = distributed.from_process_0("complete", lambda: [output.is_complete() for output in outputs])
    is_writer = distributed.is_writer()
    if dry_run:
        if is_writer:
            print(f"dry run: the configuration is fine. Would {mode} with {path}.")
        return []
    if is_writer and shard_id == 0:
        summarize_config_fn(output_dir, None, 0)
    if not all(complete):
        params = restore_params(model, partitioner, path, restore_checkpoint_cfg, dataset_cfg, fallback_init_rng)
        runner = BatchRunner(fn, partitioner, dataset_cfg.batch_size, random_seed)
    for task, output, is_complete in zip(tasks, outputs, complete, strict=True):
        if is_complete:
            logging.info("%s is complete: nothing to do.", output.path)
            continue
        done = distributed.from_process_0("chunks", output.chunks_done)
        if done:
            logging.info("%s: going on after %d chunks.", output.path, done)
        size = checkpoint_period * dataset_cfg.batch_size
        examples = _examples(
            task, dataset_cfg, converter_cls(pack=False), num_examples, (shard_id, num_shards), done * size
        )
        # All processes compute, one writes.
        with run_dir.explained_writes(output_dir, "INFER_OUTPUT_DIR"):
            if is_writer:
                output.begin()
            for number in itertools.count(done):
                chunk = list(itertools.islice(examples, size))
                if not chunk:
                    break
                results = [result for _, result in runner(params, [(index, features) for index, features, _ in chunk])]
                if is_writer:
                    aux = by_name([aux for _, aux in results], keep_aux_as_numpy)
                    decoded = task.output_features.get(output_vocab_feature_name)
                    vocabulary = decoded and decoded.vocabulary
                    texts = [_with_texts(example, task) for _, _, example in chunk]
                    write_fn(output.chunk_path(number), ([x for x, _ in results], aux), texts, mode, vocabulary)
                    output.chunk_complete(number)
            if is_writer:
                output.complete(merge_fn if merge_chunked_results else None, checkpoints.step_of(path))
                logging.info("wrote %s", output.path if merge_chunked_results else output.tmp_dir)
    distributed.barrier("inferences are written")
    return [output.path if merge_chunked_results else output.tmp_dir for output in outputs]


def create_task_from_tfexample_file(
    paths: str | Sequence[str],
    file_type: Literal["tfrecord"],
    inputs_key: str,
    targets_key: str | None,
    features: Mapping[str, Any],
    task_id: str | None = None,
) -> str:
    """Registers a task of files of TFExamples, with a split 'infer'; returns its name.

    Args:
      paths: files, or patterns of them.
      file_type: 'tfrecord'.
      inputs_key, targets_key: the examples' fields with the texts; targets only for scores.
      features: 'inputs' and 'targets', each a `seqio.Feature`.
      task_id: part of the name; None: a digest of the other arguments.
    """
    from perex_t5x.data import tasks

    arguments.check("create_task_from_tfexample_file", arguments.hints(create_task_from_tfexample_file), dict(locals()))
    paths = [paths] if isinstance(paths, str) else list(paths)
    return tasks.register_tfexamples(paths, inputs_key, targets_key, features, task_id)


def _run(model: Any, mode: str, params: Any, batch: Any, keys_B: Any) -> tuple[Any, dict[str, Any]]:
    """(results, aux) of a batch."""
    if mode == "score":
        scores = model.score_batch(params, batch)
        return scores if isinstance(scores, tuple) else (scores, {})
    tokens, aux = model.predict_batch_with_aux(params, batch, keys_B)
    return tokens, dict(aux) if mode == "predict_with_aux" else {}


def _check_output_feature(task: Any, name: str) -> None:
    if name not in task.output_features:
        raise ConfigError(
            f"infer.output_vocab_feature_name = {name!r}: task {task.name!r} has {', '.join(task.output_features)}."
        )


def _output(task: Any, plan: Mapping[str, str], output_dir: str, mode: str, *part: Any) -> Output:
    return Output(output_dir, task.name, mode, *part, plan)  # pyright: ignore[reportCallIssue] (two are in `part`)


def _examples(
    task: Any, config: DatasetConfig, converter: Any, count: int | None, part: tuple[int, int], skip: int
) -> Iterator[tuple[int, dict[str, np.ndarray], dict[str, Any]]]:
    """Yields (index, model features, task's features) of each example, after the first `skip`."""
    import seqio

    def dataset() -> Any:
        raw = task.get_dataset(
            sequence_length=config.task_feature_lengths,
            split=config.split,
            shuffle=config.shuffle,
            seed=config.seed,
            num_epochs=1,
            use_cached=config.use_cached,
            shard_info=seqio.ShardInfo(*part) if part[1] > 1 else None,
            try_in_mem_cache=False,  # read once; `take` would make tf.data warn about a partial cache
        )
        return (raw if count is None else raw.take(count)).skip(skip)

    features = converter(dataset(), config.task_feature_lengths).as_numpy_iterator()
    for number, (example, own) in enumerate(zip(dataset().as_numpy_iterator(), features, strict=True), start=skip):
        yield number * part[1] + part[0], own, example


def _with_texts(example: Mapping[str, Any], task: Any) -> dict[str, Any]:
    """An example, and the text of each feature whose text its task does not keep."""
    texts = {}
    for name, feature in task.output_features.items():
        values = np.ravel(example[name]) if name in example else np.zeros(0)
        if name + TEXT not in example and np.issubdtype(values.dtype, np.integer):
            texts[name + TEXT] = feature.vocabulary.decode([int(t) for t in values])
    return {**example, **texts}
