"""Teacher-forced evaluation: the loss of held-out examples under the current parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, Future
from typing import Any

import jax

from perex_t5x.data import lookup
from perex_t5x.data.feed import Feed, batch_spec, make_feed
from perex_t5x.errors import ConfigError
from perex_t5x.metrics import MetricSums
from perex_t5x.partitioning import PjitPartitioner
from perex_t5x.trainer import Trainer
from perex_t5x.utils import DatasetConfig


def task_names(config: DatasetConfig) -> list[str]:
    """A task's own name, or those of a mixture's tasks; each is evaluated by itself."""
    import seqio

    provider = lookup.get_mixture_or_task(config.mixture_or_task_name, config.module)
    return [task.name for task in seqio.get_subtasks(provider)]


def check(partitioner: PjitPartitioner, model: Any, config: DatasetConfig, eval_steps: int | None) -> None:
    """Raises `ConfigError` for anything that is wrong with a teacher-forced evaluation; reads no data."""
    if eval_steps is not None and eval_steps < 1 and eval_steps != -1:
        raise ConfigError(f"train.eval_steps = {eval_steps}: give at least 1, or None for the whole split.")
    partitioner.check_batch(config.batch_size, "train_eval/utils.DatasetConfig.batch_size")
    batch_spec(config, model.FEATURE_CONVERTER_CLS())


class TrainEvaluator:
    """Evaluates every task of a dataset configuration on its first `eval_steps` batches.

    The batches are the same at every evaluation. `eval_steps` None or -1: the whole split, each example once.
    `keep_batches`: they stay on the devices, read once, and several threads may evaluate at a time.
    """

    def __init__(self, trainer: Trainer, config: DatasetConfig, eval_steps: int | None, keep_batches: bool = False):
        check(trainer.partitioner, trainer.model, config, eval_steps)
        self._trainer = trainer
        self._steps = None if eval_steps in (None, -1) else eval_steps
        converter = trainer.model.FEATURE_CONVERTER_CLS()
        self.feeds: dict[str, Feed] = {
            name: make_feed(
                dataclasses.replace(config, mixture_or_task_name=name),
                converter,
                pad_remainder=True,
                repeat=False,
            )
            for name in task_names(config)
        }
        self._compiled: Future[Any] | None = None
        self._kept = {name: list(self._batches(name)) for name in self.feeds} if keep_batches else None

    def _batches(self, name: str) -> Iterable[Any]:
        feed, sharding = self.feeds[name], self._trainer.partitioner.data_sharding
        return feed.epoch({feature: sharding for feature in feed.element_spec}, self._steps)

    def compile(self, executor: Executor, params_shapes: Any, params_shardings: Any) -> None:
        """Starts compiling in the background."""
        spec = next(iter(self.feeds.values())).element_spec
        self._compiled = executor.submit(self._trainer.compiled_eval, params_shapes, params_shardings, spec)

    def evaluate(self, step: int, params: Any) -> dict[str, dict[str, float]]:
        """Returns {'training_eval/<task>': metrics}."""
        del step
        eval_step = self._compiled.result()
        results: dict[str, dict[str, float]] = {}
        for name in self.feeds:
            batches = self._batches(name) if self._kept is None else self._kept[name]
            outputs = [eval_step(params, batch) for batch in batches]
            results[f"training_eval/{name}"] = summarize(jax.device_get(outputs))
        return results


def summarize(outputs: list[tuple[Any, Mapping[str, Any]]]) -> dict[str, float]:
    """Metrics of several evaluation batches, weighted by what is in them."""
    sums = MetricSums()
    for objective, batch_sums in outputs:
        sums.add(batch_sums, objective)
    return sums.summary()
