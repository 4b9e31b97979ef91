"""Configuration objects of a run, with T5X's names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from perex_t5x import arguments
from perex_t5x.arguments import Count, Interval, PositiveInt, Seed
from perex_t5x.errors import ConfigError
from perex_t5x.optimizers.checks import DType
from perex_t5x.schedules import create_learning_rate_scheduler

__all__ = [
    "CheckpointConfig",
    "DatasetConfig",
    "RestoreCheckpointConfig",
    "SaveCheckpointConfig",
    "create_learning_rate_scheduler",
]

FeedKind = Literal["auto", "cached", "streaming"]
FEEDS = get_args(FeedKind)


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

    def __post_init__(self) -> None:
        arguments.check_fields(self)
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
      period_minutes: a step is also saved once so many minutes have passed since the last save; None: time does not count.
      keep_every: besides the newest, checkpoints of steps that this number divides are kept; None: no more.
      keep_best: besides, so many are kept of those that were evaluated, the best by `keep_best_metric`.
      keep_best_metric: of an evaluation, such as 'training_eval/my_task/accuracy', or 'accuracy': the first task's. None:
        the model's loss.
      keep_best_mode: whether the best is the smallest ('min') or the largest ('max').
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

    def __post_init__(self) -> None:
        arguments.check_fields(self)
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
    """

    path: str | Sequence[str] | None = None
    mode: Literal["specific", "latest", "all"] = "latest"
    dtype: DType | None = None
    assignment_map: Sequence[tuple[str, str | None]] | None = None
    fallback_to_scratch: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        arguments.check_fields(self)
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
