"""Predict or score every example of a task.

    python -m perex_t5x.infer --gin_file=models/tiny.gin --gin_file=runs/infer.gin ...

Writes `<task>-<mode>.jsonl` to the output folder: one JSON object per example, with its text and the model's output.
"""

from __future__ import annotations

if __name__ == "__main__":
    # First of all: processes have to find each other before anything that is imported uses a device. Does not return, so
    # there is one `perex_t5x.infer`, the imported one, which Gin configures.
    from perex_t5x import cli

    cli.run_gin("perex_t5x.infer.infer", __doc__)

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jax
import numpy as np
from absl import logging
from etils import epath

from perex_t5x import arguments, distributed, files, gin_utils, run_dir
from perex_t5x.arguments import Count, Interval, PositiveInt, Seed
from perex_t5x.data import lookup
from perex_t5x.inference import BatchRunner, check_outputs, check_params, paths_to_restore, restore_params
from perex_t5x.models import decoding, protocol
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.utils import DatasetConfig, RestoreCheckpointConfig


def infer(
    *,
    mode: Literal["predict", "score", "predict_with_aux"] = "predict",
    model: protocol.Model,
    dataset_cfg: DatasetConfig,
    partitioner: PjitPartitioner,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    output_dir: str,
    num_examples: PositiveInt | None = None,
    decode_method: Literal["greedy", "temperature", "beam"] = "greedy",
    num_decodes: PositiveInt = 1,
    temperature: Annotated[float, Interval("(0, ∞)")] = 1.0,
    top_k: Count = 0,
    random_seed: Seed = 0,
    dry_run: bool = False,
) -> list[str]:
    """Runs the model over a task's examples; returns the files written.

    Args:
      mode: 'predict' (text), 'score' (log likelihood of the targets), 'predict_with_aux' (text and its score).
      model: the checkpoint's model.
      dataset_cfg: the task, its split and lengths.
      partitioner: the mesh.
      restore_checkpoint_cfg: which checkpoint.
      output_dir: results go here.
      num_examples: only this many, the first ones; None: all.
      decode_method: 'greedy', 'temperature' (samples) or 'beam'.
      num_decodes: beams of 'beam', or samples of which 'temperature' keeps the most likely.
      temperature: divides the logits before sampling.
      top_k: samples among the k most likely tokens only; 0: among all.
      random_seed: of the samples.
      dry_run: stop after all checks.
    """
    import seqio

    arguments.check("infer", arguments.hints(infer), dict(locals()))
    sampling = {"num_decodes": num_decodes, "temperature": temperature, "top_k": top_k}

    def predict(params: Any, batch: Any, keys_B: Any) -> Any:
        tokens, aux = model.predict_batch_with_aux(params, batch, keys_B, decode_method=decode_method, **sampling)
        return tokens, aux["scores"]

    fn = (lambda p, b, k: model.score_batch(p, b)) if mode == "score" else predict
    with gin_utils.building():
        protocol.require(model, protocol.Scores if mode == "score" else protocol.Predicts, f"infer.mode = {mode!r}")
        keys = jax.random.key(random_seed)
        decoding.check_arguments(decode_method, keys, num_decodes, temperature, top_k, 0.6, None)
        path = distributed.from_process_0("checkpoint", lambda: paths_to_restore(restore_checkpoint_cfg)[-1])
        converter_cls = protocol.feature_converter_cls(model)
        provider = lookup.check_evaluation(dataset_cfg, converter_cls, "DatasetConfig")
        partitioner.check_batch(dataset_cfg.batch_size, "DatasetConfig.batch_size")
        method = "score_batch" if mode == "score" else "predict_batch_with_aux"
        check_outputs(fn, model, partitioner, dataset_cfg, f"{type(model).__name__}.{method}")
        if dry_run:
            check_params(model, partitioner, path, restore_checkpoint_cfg, dataset_cfg)
        run_dir.prepare(output_dir, dry_run=dry_run, binding="INFER_OUTPUT_DIR")
    is_writer = distributed.is_writer()
    if dry_run:
        if is_writer:
            print(f"dry run: the configuration is fine. Would {mode} with {path}.")
        return []
    if is_writer:
        gin_utils.summarize_gin_config(output_dir)
    params = restore_params(model, partitioner, path, restore_checkpoint_cfg, dataset_cfg)

    runner = BatchRunner(fn, partitioner, dataset_cfg.batch_size, random_seed)
    written = []
    for task in seqio.get_subtasks(provider):
        texts, examples = _examples(task, dataset_cfg, converter_cls(pack=False), num_examples)
        target = epath.Path(output_dir) / f"{task.name}-{mode}.jsonl"
        # All processes compute, one writes.
        with (
            run_dir.explained_writes(output_dir, "INFER_OUTPUT_DIR"),
            files.atomic_writer(target) if is_writer else contextlib.nullcontext() as f,
        ):
            for index, result in runner(params, examples):
                if f is not None:
                    row = {"index": index, **next(texts), **_result(mode, result, model)}
                    f.write(json.dumps(row, ensure_ascii=False) + "\n")
        if is_writer:
            logging.info("wrote %s", target)
        written.append(os.fspath(target))
    return written


def _examples(
    task: Any, config: DatasetConfig, converter: Any, count: int | None
) -> tuple[Iterator[Any], Iterator[Any]]:
    """Returns two parallel iterators: each example's text, and its enumerated model features."""

    def dataset() -> Any:
        raw = task.get_dataset(
            sequence_length=config.task_feature_lengths,
            split=config.split,
            shuffle=config.shuffle,
            seed=config.seed,
            num_epochs=1,
            use_cached=config.use_cached,
            try_in_mem_cache=False,  # read once; `take` would make tf.data warn about a partial cache
        )
        return raw if count is None else raw.take(count)

    def texts() -> Iterator[dict[str, str]]:
        for example in dataset().as_numpy_iterator():
            row = {}
            for name, feature in task.output_features.items():
                if name in example:
                    values = np.ravel(example[name])
                    is_text = np.issubdtype(values.dtype, np.integer)
                    row[name] = feature.vocabulary.decode([int(t) for t in values]) if is_text else values.tolist()
            yield row

    def features() -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        converted = converter(dataset(), config.task_feature_lengths)
        yield from enumerate(converted.as_numpy_iterator())

    return texts(), features()


def _result(mode: str, result: Any, model: Any) -> dict[str, Any]:
    if mode == "score":
        return {"score": float(result)}
    tokens, score = result
    row: dict[str, Any] = {"prediction": model.output_vocabulary.decode([int(t) for t in tokens])}
    if mode == "predict_with_aux":
        row["score"] = float(score)
    return row
