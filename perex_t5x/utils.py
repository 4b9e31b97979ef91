"""Configuration objects of a run, with T5X's names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perex_t5x.errors import ConfigError, did_you_mean
from perex_t5x.schedules import create_learning_rate_scheduler

__all__ = [
    "CheckpointConfig",
    "DatasetConfig",
    "RestoreCheckpointConfig",
    "SaveCheckpointConfig",
    "create_learning_rate_scheduler",
]

FEEDS = ("auto", "cached", "streaming")


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
    task_feature_lengths: Mapping[str, int] | None
    split: str
    batch_size: int
    shuffle: bool
    seed: int | None
    use_cached: bool = False
    pack: bool = False
    use_custom_packing_ops: bool = False
    module: str | None = None
    feed: str = "auto"
    cache_dir: str | None = None
    memory_limit_bytes: int = 4 << 30
    trim_output_features: bool = True
    local_cache_bytes: int = 16 << 30

    def __post_init__(self) -> None:
        if self.feed not in FEEDS:
            raise ConfigError(
                f"DatasetConfig.feed = {self.feed!r}: must be one of {', '.join(FEEDS)}."
                f"{did_you_mean(self.feed, FEEDS)}"
            )
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ConfigError(f"DatasetConfig.batch_size = {self.batch_size!r}: must be a positive whole number.")
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
    """

    period: int | None = None
    dtype: str | None = "float32"
    keep: int | None = None
    save_dataset: bool = True

    def __post_init__(self) -> None:
        for name in ("period", "keep"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"SaveCheckpointConfig.{name} = {value!r}: must be None or at least 1.")


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
    mode: str = "latest"
    dtype: str | None = None
    assignment_map: Sequence[tuple[str, str | None]] | None = None
    fallback_to_scratch: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        modes = ("specific", "latest", "all")
        if self.mode not in modes:
            raise ConfigError(
                f"RestoreCheckpointConfig.mode = {self.mode!r}: must be one of {', '.join(modes)}."
                f"{did_you_mean(str(self.mode), modes)}"
            )
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
