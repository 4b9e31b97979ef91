"""What is known about a training before data is read and anything is compiled: the model on the mesh, and the start."""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
from absl import logging

from perex_t5x import checkpoint_files, checkpoints, evaluation, loop, run_dir
from perex_t5x.actions import ActionMode, Actions
from perex_t5x.data import streaming
from perex_t5x.data.feed import batch_spec
from perex_t5x.errors import ConfigError
from perex_t5x.models import protocol
from perex_t5x.trainer import Trainer, TrainState
from perex_t5x.utils import CheckpointConfig, log_ignored


@dataclasses.dataclass(frozen=True)
class Setup:
    """What follows from a configuration whatever its learning rate and seed."""

    trainer: Trainer
    spec: Mapping[str, Any]
    shapes: TrainState
    shardings: TrainState
    boxed_params: Any
    computation: str = ""  # of the model: see `protocol.DescribesComputation`

    @property
    def summary(self) -> str:
        """Parameters and bytes in one line."""
        return run_dir.summarize_model(self.boxed_params, self.shapes)

    @property
    def init(self) -> Any:
        """The key of a seed -> a fresh state; jitted."""
        input_shapes = {k: v.shape for k, v in self.spec.items()}
        return jax.jit(lambda key: self.trainer.init_state(key, input_shapes), out_shardings=self.shardings)


@dataclasses.dataclass(frozen=True)
class Programs:
    """What runs execute, compiled or being compiled. It holds no state: several runs may use it at once.

    Attributes:
      init: the key of a seed -> a fresh state.
      step: (state, batch) -> (state, metrics), or with the learning rate as a third argument; and the seconds it took to
        compile.
      monitor: `Trainer.monitor_step`; None without a monitor.
      evaluators: see `loop.Evaluator`.
    """

    init: Callable[[jax.Array], TrainState]
    step: Future[tuple[Callable[..., tuple[TrainState, Any]], float]]
    monitor: Future[Callable[..., Any] | None]
    evaluators: Sequence[loop.Evaluator]


def make_setup(args: types.SimpleNamespace, trainer: Trainer) -> Setup:
    """From the arguments of `train`; raises `ConfigError` for whatever can be seen without data and without compiling."""
    model, config = trainer.model, args.train_dataset_cfg
    protocol.require(model, protocol.Model, "training")
    trainer.check_batch_size(config.batch_size)
    trainer.partitioner.check_model(protocol.sharded_dimensions(model))
    streaming.check_hosts(config, trainer.partitioner.data_sharding)
    logging.info("%s", trainer.partitioner.describe_batch(config.batch_size))
    converter = protocol.feature_converter_cls(model)
    spec = batch_spec(config, converter)
    verify = args.verify_matching_vocabs_fn or (lambda config, model: None)
    verify(config, model)
    if args.train_eval_dataset_cfg is not None:
        evaluation.check(trainer.partitioner, model, args.train_eval_dataset_cfg, args.eval_steps)
        verify(args.train_eval_dataset_cfg, model)
    save = args.checkpoint_cfg.save
    if (
        save is not None
        and save.keep_best
        and not save.keeps_best_of_training
        and args.train_eval_dataset_cfg is args.infer_eval_dataset_cfg is None
    ):
        raise ConfigError(
            f"SaveCheckpointConfig.keep_best = {save.keep_best} needs an evaluation: set train.train_eval_dataset_cfg, "
            "or keep_best = None."
        )
    if args.infer_eval_dataset_cfg is not None:
        verify(args.infer_eval_dataset_cfg, model)
        binding = "infer_eval/utils.DatasetConfig"
        evaluation.check_inference(
            trainer.partitioner, model, args.infer_eval_dataset_cfg, binding, args.inference_evaluator_cls
        )
    make_actions(args)
    with trainer.partitioner.manual():
        computation = protocol.describe_computation(model, spec)
    setup = Setup(trainer, spec, *trainer.abstract_state({k: v.shape for k, v in spec.items()}), computation)
    trainer.check_functions(setup.shapes.params)
    logging.info("%s; %s", setup.summary, setup.computation)
    return setup


def make_actions(args: types.SimpleNamespace) -> Actions:
    """Raises `ConfigError` for those that would see nothing."""
    configs = {
        ActionMode.TRAIN_EVAL: args.train_eval_dataset_cfg,
        ActionMode.INFER_EVAL: args.infer_eval_dataset_cfg,
    }
    has_evaluations = args.eval_period or args.run_eval_before_training
    names = {mode: evaluation.task_names(config) for mode, config in configs.items() if config and has_evaluations}
    return Actions(args.actions, names)


def check_arguments_of_t5x(args: types.SimpleNamespace) -> None:
    """One line for what has no effect here; refused is what would change the run if it were left out."""
    ignored = {
        "use_hardware_rng": (False, "dropout masks are drawn per example"),
        "concurrent_metrics": (True, "metrics are always written in a thread, and actions see them all the same"),
        "use_orbax": (True, "checkpoints are always Orbax's"),
    }
    log_ignored("train", vars(args), ignored)
    for name, instead in (
        ("get_dataset_fn", "register a SeqIO task, and give its name to DatasetConfig.mixture_or_task_name"),
        ("train_eval_get_dataset_fn", "register a SeqIO task, and give its name to train_eval/DatasetConfig"),
        ("train_state_initializer_cls", "bind RestoreCheckpointConfig, or give the model other initial variables"),
    ):
        if getattr(args, name) is not None:
            raise ConfigError(f"train.{name} = {getattr(args, name)!r} is not supported: {instead}.")


def where_to_start(model_dir: str, config: CheckpointConfig, dry_run: bool) -> str | None:
    """The checkpoint to read: the newest valid one in the run's folder, else the one to start from, else None."""
    own = checkpoint_files.newest_valid(model_dir, dry_run=dry_run)
    if own is not None or config.restore is None or not config.restore.path:
        return own
    path = checkpoints.checkpoint_paths(config.restore.path, config.restore.mode)[-1]
    if refusal := checkpoint_files.refusal(path):
        raise checkpoint_files.DamagedError(f"RestoreCheckpointConfig.path = {config.restore.path!r}: {refusal}")
    return path


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What `function` returns, and the seconds it took."""
    begun = time.monotonic()
    return function(), time.monotonic() - begun
