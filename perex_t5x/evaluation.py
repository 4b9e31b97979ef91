"""Evaluation: teacher-forced (the loss of held-out examples), and by the metrics of SeqIO tasks (predictions and scores)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from typing import Any

import gin
import jax
import numpy as np
from etils import epath

from perex_t5x import distributed
from perex_t5x.data import lookup
from perex_t5x.data.feed import Feed, batch_spec, make_feed
from perex_t5x.errors import ConfigError, did_you_mean, first_line
from perex_t5x.inference import BatchRunner, check_outputs
from perex_t5x.metrics import MetricSums
from perex_t5x.models import protocol
from perex_t5x.models.protocol import Model, feature_converter_cls
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.trainer import Trainer
from perex_t5x.utils import DatasetConfig


def task_names(config: DatasetConfig) -> list[str]:
    """A task's own name, or those of a mixture's tasks; each is evaluated by itself."""
    import seqio

    provider = lookup.get_mixture_or_task(config.mixture_or_task_name, config.module)
    return [task.name for task in seqio.get_subtasks(provider)]


def check(partitioner: PjitPartitioner, model: Model, config: DatasetConfig, eval_steps: int | None) -> None:
    """Raises `ConfigError` for anything that is wrong with a teacher-forced evaluation; reads no data."""
    if eval_steps is not None and eval_steps < 1 and eval_steps != -1:
        raise ConfigError(f"train.eval_steps = {eval_steps}: give at least 1, or None for the whole split.")
    partitioner.check_batch(config.batch_size, "train_eval/utils.DatasetConfig.batch_size")
    batch_spec(config, feature_converter_cls(model))


def check_inference(
    partitioner: PjitPartitioner,
    model: Model,
    config: DatasetConfig,
    binding: str,
    evaluator_cls: Callable[..., Any] | None = None,
) -> list[Any]:
    """The tasks that a decoding evaluation evaluates; raises `ConfigError` for anything wrong with it. Reads no data."""
    import seqio

    if evaluator_cls is not None:
        _make_what_is_bound("Evaluator")
    provider = lookup.check_evaluation(config, feature_converter_cls(model), binding)
    partitioner.check_batch(config.batch_size, f"{binding}.batch_size")
    every = seqio.get_subtasks(provider)
    tasks = [task for task in every if config.split.split("[")[0] in map(str, task.splits) and task.metric_fns]
    if not tasks:
        names = ", ".join(task.name for task in every)
        raise ConfigError(f"none of {names} has both a split {config.split!r} and metric_fns: nothing to evaluate.")
    for task in tasks:
        if task.score_metric_fns:
            protocol.require(model, protocol.Scores, f"a metric of task {task.name!r}")
        if task.predict_metric_fns or task.predict_with_aux_metric_fns:
            protocol.require(model, protocol.Predicts, f"a metric of task {task.name!r}")
        if config.task_feature_lengths is None and any(map(_needs_lengths, task.preprocessors)):
            raise ConfigError(
                f"{task.name!r} cuts its examples to a length, so {binding}.task_feature_lengths = None ('the longest') "
                "has no meaning for it: give lengths, for instance {'targets': 512}."
            )
        _check_target_field(task, config, evaluator_cls)
    name = type(model).__name__
    if any(task.predict_metric_fns or task.predict_with_aux_metric_fns for task in tasks):
        check_outputs(_predicting(model), model, partitioner, config, f"{name}.predict_batch_with_aux")
    if any(task.score_metric_fns for task in tasks):
        check_outputs(_scoring(model), model, partitioner, config, f"{name}.score_batch")
    return tasks


def _make_what_is_bound(name: str) -> None:
    """As the evaluation will; what cannot be made, such as `[@seqio.JSONLogger()]`, raises its own error."""
    try:
        gin.get_bindings(name, resolve_references=False)
    except ValueError:  # not registered
        return
    gin.get_bindings(name)


def _predicting(model: Any) -> Callable[..., Any]:
    def predict(params: Any, batch: Any, keys_B: Any) -> Any:
        tokens, aux = model.predict_batch_with_aux(params, batch, keys_B)
        return tokens, aux["scores"]

    return predict


def _scoring(model: Any) -> Callable[..., Any]:
    return lambda params, batch, keys_B: model.score_batch(params, batch)


def _check_target_field(task: Any, config: DatasetConfig, evaluator_cls: Callable[..., Any] | None) -> None:
    """SeqIO looks for the field when it evaluates, after hours of training."""
    try:
        field = gin.query_parameter("Evaluator.target_field_name") if evaluator_cls else None
    except ValueError:  # not bound
        return
    if not isinstance(field, str) or field == "targets":
        return
    lengths = config.task_feature_lengths
    fields = task.get_dataset(lengths, split=config.split, use_cached=config.use_cached, shuffle=False).element_spec
    if field not in fields:
        raise ConfigError(
            f"seqio.Evaluator.target_field_name = {field!r}: examples of {task.name!r} have no such field."
            f"{did_you_mean(str(field), list(fields))} They have {', '.join(fields)}."
        )


def _needs_lengths(preprocessor: Any) -> bool:
    """As SeqIO asks it."""
    parameter = inspect.signature(preprocessor).parameters.get("sequence_length")
    return parameter is not None and parameter.default is parameter.empty


class TrainEvaluator:
    """Evaluates every task of a dataset configuration on its first `eval_steps` batches.

    The batches are the same at every evaluation. `eval_steps` None or -1: the whole split, each example once.
    `keep_batches`: they stay on the devices, read once, and several threads may evaluate at a time.
    """

    def __init__(self, trainer: Trainer, config: DatasetConfig, eval_steps: int | None, keep_batches: bool = False):
        check(trainer.partitioner, trainer.model, config, eval_steps)
        self._trainer = trainer
        self._steps = None if eval_steps in (None, -1) else eval_steps
        converter = feature_converter_cls(trainer.model)
        self.feeds: dict[str, Feed] = {
            name: make_feed(
                dataclasses.replace(config, mixture_or_task_name=name), converter, pad_remainder=True, repeat=False
            )
            for name in task_names(config)
        }
        self.folders = [f"training_eval/{name}" for name in self.feeds]
        self._compiled: Future[Any] | None = None
        self._kept = {name: list(self._batches(name)) for name in self.feeds} if keep_batches else None

    def _batches(self, name: str) -> Iterable[Any]:
        feed, sharding = self.feeds[name], self._trainer.partitioner.data_sharding
        return feed.epoch({feature: sharding for feature in feed.element_spec}, self._steps)

    def compile(self, executor: Executor, params_shapes: Any, params_shardings: Any) -> None:
        """Starts compiling in the background."""
        spec = next(iter(self.feeds.values())).element_spec
        self._compiled = executor.submit(self._trainer.compiled_eval, params_shapes, params_shardings, spec)

    def evaluate(
        self, step: int, params: Any, between_batches: Callable[[], None] = lambda: None
    ) -> dict[str, dict[str, float]]:
        """Returns {'training_eval/<task>': metrics}."""
        del step
        assert self._compiled is not None, "`compile` comes first"
        eval_step = self._compiled.result()
        results: dict[str, dict[str, float]] = {}
        for name in self.feeds:
            outputs: list[Any] = []
            for batch in self._batches(name) if self._kept is None else self._kept[name]:
                between_batches()
                outputs.append(eval_step(params, batch))
                # One batch ahead and no further: whoever is asked to leave does not wait for all that was dispatched.
                jax.block_until_ready(outputs[-2:-1])
            results[f"training_eval/{name}"] = summarize(self._trainer.model, jax.device_get(outputs))
        return results


def summarize(model: Model, outputs: list[tuple[Any, Mapping[str, Any]]]) -> dict[str, float]:
    """Metrics of several evaluation batches, weighted by what is in them."""
    sums = MetricSums(model)
    for objective, batch_sums in outputs:
        sums.add(batch_sums, objective)
    return sums.summary()


class InferenceEvaluator:
    """Computes a task's `metric_fns` on predictions and scores of a model.

    Args:
      model: one that `perex_t5x.models.protocol.Predicts` or `Scores`, whichever the tasks' metrics need.
      partitioner: the mesh.
      config: what to evaluate on; unpacked.
      evaluator_cls: `seqio.Evaluator`, with its loggers bound; None: without loggers.
      log_dir: where the loggers write.
    """

    def __init__(
        self,
        model: Model,
        partitioner: PjitPartitioner,
        config: DatasetConfig,
        evaluator_cls: Callable[..., Any] | None,
        log_dir: str,
    ):
        import seqio
        import tensorflow as tf

        converter_cls = feature_converter_cls(model)
        tasks = check_inference(partitioner, model, config, "infer_eval/utils.DatasetConfig")
        if distributed.is_writer():
            epath.Path(log_dir).mkdir(parents=True, exist_ok=True)  # not every logger of SeqIO makes it
        loggers: dict[str, Any] = {} if distributed.is_writer() else {"logger_cls": ()}
        try:
            self._evaluator = (evaluator_cls or seqio.Evaluator)(
                mixture_or_task_name=config.mixture_or_task_name,
                feature_converter=converter_cls(pack=False),
                eval_split=config.split,
                use_cached=config.use_cached,
                seed=config.seed,
                sequence_length=config.task_feature_lengths,
                log_dir=log_dir,
                **loggers,
            )
        except (tf.errors.OpError, OSError):
            raise  # of what the examples are read from
        except Exception as e:
            text = first_line(e)
            raise ConfigError(
                f"the evaluator of {config.mixture_or_task_name!r} cannot be made: {text}. See what is bound to "
                "seqio.Evaluator, and to infer_eval/utils.DatasetConfig."
            ) from e
        self.folders = [f"inference_eval/{task.name}" for task in tasks]

        self._batch_size = config.batch_size
        self._predict = BatchRunner(_predicting(model), partitioner, config.batch_size)
        self._score = BatchRunner(_scoring(model), partitioner, config.batch_size)

    def compile(self, executor: Executor, params_shapes: Any, params_shardings: Any) -> None:
        """Nothing ahead of time: which of predicting and scoring is needed, the tasks' metrics decide."""

    def evaluate(
        self, step: int, params: Any, between_batches: Callable[[], None] = lambda: None
    ) -> dict[str, dict[str, float]]:
        """Returns {'inference_eval/<task>': metrics}."""

        def examples(dataset: Any) -> Iterator[tuple[int, Any]]:
            for number, (index, example) in enumerate(dataset.as_numpy_iterator()):
                if number % self._batch_size == 0:
                    between_batches()
                yield int(index), {name: np.asarray(value) for name, value in example.items()}

        def predict(dataset: Any) -> list[tuple[int, list[int]]]:
            return [(i, tokens.tolist()) for i, (tokens, _) in self._predict(params, examples(dataset))]

        def predict_with_aux(dataset: Any) -> Any:
            rows = list(self._predict(params, examples(dataset)))
            return [(i, tokens.tolist()) for i, (tokens, _) in rows], {"scores": [float(s) for _, (_, s) in rows]}

        def score(dataset: Any) -> list[tuple[int, float]]:
            return [(i, float(s)) for i, s in self._score(params, examples(dataset))]

        functions: dict[str, Any] = {"predict_fn": predict, "score_fn": score, "predict_with_aux_fn": predict_with_aux}
        metrics, _ = self._evaluator.evaluate(compute_metrics=True, step=step, **functions)
        return {
            f"inference_eval/{task}": {name: float(getattr(v, "value", v)) for name, v in values.items()}
            for task, values in metrics.result().items()
        }
