"""Evaluation by decoding and scoring, with SeqIO's evaluator and the tasks' own metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

import numpy as np

from perex_t5x import distributed
from perex_t5x.data import lookup
from perex_t5x.errors import ConfigError
from perex_t5x.inference import BatchRunner
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.utils import DatasetConfig


class InferenceEvaluator:
    """Computes a task's `metric_fns` on predictions and scores of a model.

    Args:
      model: gives `predict_batch_with_aux` and `score_batch`.
      partitioner: the mesh.
      config: what to evaluate on; unpacked.
      evaluator_cls: `seqio.Evaluator`, with its loggers bound; None: without loggers.
      log_dir: where the loggers write.
    """

    def __init__(
        self,
        model: Any,
        partitioner: PjitPartitioner,
        config: DatasetConfig,
        evaluator_cls: Callable[..., Any] | None,
        log_dir: str,
    ):
        import seqio

        converter_cls = model.FEATURE_CONVERTER_CLS()
        provider = lookup.check_evaluation(config, converter_cls, "infer_eval/utils.DatasetConfig")
        self.tasks = [task.name for task in seqio.get_subtasks(provider)]
        try:
            self._evaluator = (evaluator_cls or seqio.Evaluator)(
                mixture_or_task_name=config.mixture_or_task_name,
                feature_converter=converter_cls(pack=False),
                eval_split=config.split,
                use_cached=config.use_cached,
                seed=config.seed,
                sequence_length=config.task_feature_lengths,
                log_dir=log_dir,
                **({} if distributed.is_writer() else {"logger_cls": ()}),
            )
        except ValueError as e:
            if "automatic sequence length detection" not in str(e):
                raise
            raise ConfigError(
                f"{config.mixture_or_task_name!r} cuts its examples to a length, so TASK_FEATURE_LENGTHS = None ('the "
                "longest') has no meaning for it: give lengths, for instance {'targets': 512}."
            ) from e
        if not self._evaluator.eval_tasks:
            raise ConfigError(
                f"none of {', '.join(self.tasks)} has both a split {config.split!r} and metric_fns: nothing to "
                "evaluate."
            )

        def predict(params: Any, batch: Any, keys_B: Any) -> Any:
            tokens, aux = model.predict_batch_with_aux(params, batch)
            return tokens, aux["scores"]

        self._predict = BatchRunner(predict, partitioner, config.batch_size)
        self._score = BatchRunner(lambda p, b, k: model.score_batch(p, b), partitioner, config.batch_size)

    def compile(self, executor: Executor, params_shapes: Any, params_shardings: Any) -> None:
        """Nothing ahead of time: which of predicting and scoring is needed, the tasks' metrics decide."""

    def evaluate(self, step: int, params: Any) -> dict[str, dict[str, float]]:
        """Returns {'inference_eval/<task>': metrics}."""

        def examples(dataset: Any) -> Iterator[tuple[int, Any]]:
            for index, example in dataset.as_numpy_iterator():
                yield int(index), {name: np.asarray(value) for name, value in example.items()}

        def predict(dataset: Any) -> list[tuple[int, list[int]]]:
            return [(i, tokens.tolist()) for i, (tokens, _) in self._predict(params, examples(dataset))]

        def predict_with_aux(dataset: Any) -> Any:
            rows = list(self._predict(params, examples(dataset)))
            return [(i, tokens.tolist()) for i, (tokens, _) in rows], {"scores": [float(s) for _, (_, s) in rows]}

        def score(dataset: Any) -> list[tuple[int, float]]:
            return [(i, float(s)) for i, s in self._score(params, examples(dataset))]

        metrics, _ = self._evaluator.evaluate(
            compute_metrics=True,
            step=step,
            predict_fn=predict,
            score_fn=score,
            predict_with_aux_fn=predict_with_aux,
        )
        return {
            f"inference_eval/{task}": {name: float(getattr(v, "value", v)) for name, v in values.items()}
            for task, values in metrics.result().items()
        }
