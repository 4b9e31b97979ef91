"""Configuration objects of a run, with T5X's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from absl import logging

from perex_t5x import arguments
from perex_t5x.arguments import Count, Interval, PositiveInt, Seed
from perex_t5x.best_checkpoints import SaveBestCheckpointer
from perex_t5x.errors import ConfigError
from perex_t5x.optimizers.checks import DType
from perex_t5x.schedules import create_learning_rate_scheduler

__all__ = [
    "CheckpointConfig",
    "DatasetConfig",
    "RestoreCheckpointConfig",
    "SaveCheckpointConfig",
    "create_learning_rate_scheduler",
    "round_vocab_size_to_multiple",
]

FeedKind = Literal["auto", "cached", "streaming"]
FEEDS = get_args(FeedKind)


def log_ignored(owner: str, given: Mapping[str, Any], ignored: Mapping[str, tuple[Any, str]]) -> None:
    """One line in the log for each argument of T5X's that has no effect here, where it is not its default.

    Args:
      owner: whose argument it is, in Gin.
      given: arguments by name.
      ignored: name -> (default, why it has no effect).
    """
    for name, (default, why) in ignored.items():
        if given[name] != default:
            logging.info("%s.%s = %r is ignored: %s.", owner, name, given[name], why)


@dataclass
class DatasetConfig:
    """Which examples, in which order, in what shape.

    Attributes:
      mixture_or_task_name: a registered SeqIO task or mixture.
      task_feature_lengths: length of every feature, e.g. {'targets': 512}. None: the longest example's (evaluation).
      split: 'train', 'validation', ...
      batch_size: of the *global* batch, over all devices and hosts.
      shuffle: whether the order is a random permutation of every epoch.
      seed: of that permutation. None: drawn once at the start of the run, and kept when it resumes.
      use_cached: read an offline SeqIO cache (`--seqio_additional_cache_dirs`).
      pack: put several short examples into one row; a row then is what the optimizers call an example.
      use_custom_packing_ops: of T5X; only False is supported.
      module: imported first, so that it can register the task.
      feed: 'cached' (an index-addressed copy: the batch is a function of seed and step, resuming costs nothing),
        'streaming' (tf.data, resumed by the iterator's saved state), or 'auto': cached where the task fits.
      cache_dir: where the index-addressed copy is kept and reused: a folder (as ArrayRecord), or gs://BUCKET/FOLDER, from
        which every process reads the rows that it needs. None: in memory.
      memory_limit_bytes: the largest (estimated) copy that 'auto' makes.
      trim_output_features: whether outputs are trimmed to their length, as in SeqIO.
      local_cache_bytes: how much of the local disk (~/.cache/perex_t5x/rows) may hold what was read of copies in buckets.
      use_memory_cache: of T5X, for evaluations; here `feed` says what is kept in memory ('streaming': nothing).
      runtime_preprocessors, num_prefetch_threads, num_workers: of AirIO's tasks in T5X; a SeqIO task has none of them.
    """

    mixture_or_task_name: str
    task_feature_lengths: Mapping[str, PositiveInt] | None
    split: str
    batch_size: PositiveInt
    shuffle: bool
    seed: Seed | None
    use_cached: bool = False
    pack: bool = False
    use_custom_packing_ops: bool = False
    module: str | None = None
    feed: FeedKind = "auto"
    cache_dir: str | None = None
    memory_limit_bytes: Count = 4 << 30
    trim_output_features: bool = True
    local_cache_bytes: Count = 16 << 30
    use_memory_cache: bool = True
    runtime_preprocessors: Sequence[Any] | None = None
    num_prefetch_threads: Count | None = None
    num_workers: Count | None = 0

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        if self.runtime_preprocessors:
            raise ConfigError(
                "DatasetConfig.runtime_preprocessors are AirIO's, and a SeqIO task would be read without them: give the "
                "task itself these preprocessors."
            )
        ignored = {
            "use_memory_cache": (True, "DatasetConfig.feed says what is kept in memory"),
            "num_prefetch_threads": (None, "it is AirIO's"),
            "num_workers": (0, "it is AirIO's"),
        }
        log_ignored("DatasetConfig", vars(self), ignored)
        if self.use_custom_packing_ops:
            raise ConfigError("DatasetConfig.use_custom_packing_ops = True is not supported: set it to False.")


@dataclass
class SaveCheckpointConfig:
    """When checkpoints are written and how many are kept.

    Attributes:
      period: steps between checkpoints; None: only at the end.
      dtype: parameters are cast to it in the checkpoint; None: as they are.
      keep: how many of the newest to keep; None: all.
      save_dataset: of T5X. The data position is always part of a checkpoint here; False is accepted and ignored.
      keep_dataset_checkpoints: of T5X: how many data positions are kept; here those of all checkpoints that are.
      checkpoint_steps: further steps that are saved.
      checkpointer_cls, checkpoint_manager_cls: of T5X; `@checkpoints.SaveBestCheckpointer` sets `keep_best` and what belongs
        to it. All else is one kind of checkpoint here: Orbax's.
      state_transformation_fns: functions of (state, its parameters' infos: None) -> state, or T5X's pair, one after the
        other before a save; a state is {'target': ..., 'state': ..., 'rng': ...}. A run resumes from what they return, so
        names and shapes of what it needs have to stay.
      period_minutes: a step is also saved once so many minutes have passed since the last save; None: time does not count.
      keep_every: besides the newest, checkpoints of steps that this number divides are kept; None: no more.
      keep_best: besides, so many are kept of those that were evaluated, the best by `keep_best_metric`.
      keep_best_metric: of an evaluation, such as 'training_eval/my_task/accuracy', or 'accuracy': the first task's. None:
        the model's loss.
      keep_best_mode: whether the best is the smallest ('min') or the largest ('max').
      keep_unmeasured: besides, those that have no value of that metric are kept.
      retries: how many saves in a row may fail while training continues; one more ends the run. 0: the first one does.
    """

    period: PositiveInt | None = None
    dtype: DType | None = "float32"
    keep: PositiveInt | None = None
    save_dataset: bool = True
    period_minutes: Annotated[float, Interval("(0, ∞)")] | None = None
    keep_every: PositiveInt | None = None
    keep_best: PositiveInt | None = None
    keep_best_metric: str | None = None
    keep_best_mode: Literal["min", "max"] = "min"
    retries: Count = 10
    keep_unmeasured: bool = False
    keep_dataset_checkpoints: PositiveInt | None = None
    checkpoint_steps: Sequence[PositiveInt] | None = None
    checkpointer_cls: Callable[..., Any] | None = None
    checkpoint_manager_cls: Callable[..., Any] | None = None
    state_transformation_fns: Sequence[Callable[..., Any]] = ()

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        ignored = {"keep_dataset_checkpoints": (None, "every checkpoint has its position in the data")}
        log_ignored("SaveCheckpointConfig", vars(self), ignored)
        for made_by in (self.checkpointer_cls, self.checkpoint_manager_cls):
            if isinstance(made_by, type) and issubclass(made_by, SaveBestCheckpointer):
                for name, value in made_by().settings(self.keep).items():
                    setattr(self, name, value)
        for name in ("keep_every", "keep_best"):
            if getattr(self, name) is not None and self.keep is None:
                raise ConfigError(
                    f"SaveCheckpointConfig.{name} = {getattr(self, name)} says what is kept besides the newest, and "
                    "keep = None keeps all. Set SaveCheckpointConfig.keep, too, for instance to 1."
                )
        if self.keep_best_metric is not None and self.keep_best is None:
            raise ConfigError(
                f"SaveCheckpointConfig.keep_best_metric = {self.keep_best_metric!r} is not used: set keep_best to the "
                "number of checkpoints to keep by it."
            )

    @property
    def keeps_best_of_training(self) -> bool:
        """Whether the best are those by a metric of training, not of an evaluation."""
        return bool(self.keep_best) and (self.keep_best_metric or "").startswith("train/")


@dataclass
class RestoreCheckpointConfig:
    """What a run starts from when its own MODEL_DIR holds no checkpoint.

    Attributes:
      path: a checkpoint (`.../checkpoint_1000`), or with mode 'latest' a run's folder. Empty: from scratch.
      mode: 'specific' | 'latest' | 'all' (evaluation only: every checkpoint in turn).
      dtype: parameters are cast to it when read; None: the model's own.
      assignment_map: (regular expression over this run's names, replacement in the checkpoint or None) pairs, first
        match counts; None initialises the leaf. Names look like 'target/decoder/decoder_norm/scale' and
        'state/param_states/0/mu/...'.
      fallback_to_scratch: leaves the checkpoint does not have are initialised instead of refused.
      strict: whether leaves that only the checkpoint has are an error.
      restore_dataset: of T5X: a run resumes with its data position always, and starts from another's without.
      checkpointer_cls, checkpoint_manager_cls: of T5X, and ignored: a checkpoint's folder says how it is read.
      state_transformation_fns: of T5X; only none. `assignment_map` renames and leaves out.
    """

    path: str | Sequence[str] | None = None
    mode: Literal["specific", "latest", "all"] = "latest"
    dtype: DType | None = None
    assignment_map: Sequence[tuple[str, str | None]] | None = None
    fallback_to_scratch: bool = False
    strict: bool = False
    restore_dataset: bool = False
    checkpointer_cls: Callable[..., Any] | None = None
    checkpoint_manager_cls: Callable[..., Any] | None = None
    state_transformation_fns: Sequence[Callable[..., Any]] = ()

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        if self.state_transformation_fns:
            raise ConfigError(
                "RestoreCheckpointConfig.state_transformation_fns is not supported: rename and leave out with "
                "RestoreCheckpointConfig.assignment_map, or write the transformed checkpoint with a script of your own."
            )
        ignored = {"restore_dataset": (False, "of another run's checkpoint the position in its data is never taken")}
        log_ignored("RestoreCheckpointConfig", vars(self), ignored)
        if isinstance(self.path, list | tuple):
            if len(self.path) > 1:
                raise ConfigError("RestoreCheckpointConfig.path: give one path.")
            self.path = self.path[0] if self.path else None
        for pattern, _ in self.assignment_map or ():
            try:
                re.compile(pattern)
            except re.error as e:
                raise ConfigError(
                    f"RestoreCheckpointConfig.assignment_map: {pattern!r} is not a regular expression: {e}."
                ) from None


@dataclass
class CheckpointConfig:
    """Saving and restoring together."""

    save: SaveCheckpointConfig | None = field(default_factory=SaveCheckpointConfig)
    restore: RestoreCheckpointConfig | None = field(default_factory=RestoreCheckpointConfig)


def round_vocab_size_to_multiple(vocabulary: Any, divisor: PositiveInt = 128) -> int:
    """A vocabulary's size, rounded up: `network.T5Config.vocab_size = @utils.round_vocab_size_to_multiple()`."""
    arguments.check("round_vocab_size_to_multiple", arguments.hints(round_vocab_size_to_multiple), {"divisor": divisor})
    if not isinstance(size := getattr(vocabulary, "vocab_size", None), int):
        raise ConfigError(
            f"round_vocab_size_to_multiple.vocabulary = {vocabulary!r}: must be a SeqIO vocabulary, such as "
            "@seqio.ByteVocabulary()."
        )
    return -(-size // divisor) * divisor
