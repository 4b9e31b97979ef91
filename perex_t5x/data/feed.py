"""A feed gives the training loop the global batch of a step; `make_feed` chooses and makes one."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from perex_t5x import distributed
from perex_t5x.data import lookup
from perex_t5x.data.device_batches import EndOfData, Shardings
from perex_t5x.errors import ConfigError
from perex_t5x.utils import FEEDS

# A token in a packed row: two bytes as input and as target, one each for weight, segment and (up
# to) two for its position. A byte of text is at most one token.
_BYTES_PER_SOURCE_BYTE = 8


@dataclasses.dataclass(frozen=True)
class FeedRequest:
    """All that describes a feed, checked.

    Attributes:
      cfg: the `perex_t5x.utils.DatasetConfig`.
      provider: SeqIO's task or mixture.
      converter: SeqIO's feature converter, made for `cfg.pack`.
      lengths: of the task's features.
      spec: shapes and dtypes of the global batch.
      seed: of the order; None without shuffling.
      repeat: epoch after epoch, or one epoch.
      pad_remainder: fill the last batch of an epoch with all-zero rows; only without `repeat`.
    """

    cfg: Any
    provider: Any
    converter: Any
    lengths: Mapping[str, int]
    spec: dict[str, jax.ShapeDtypeStruct]
    seed: int | None
    repeat: bool
    pad_remainder: bool


class Feed(abc.ABC):
    """Batches by step.

    Attributes:
      element_spec: shapes [batch_size, length] and dtypes of the global batch.
      num_examples: rows of one epoch; None if unknown.
      num_steps: batches until `EndOfData`; None if it repeats for ever or the end is not known.
      description: one line for the log.
      fingerprint: of the examples and what they depend on.
      has_state: whether `save_state` must be called for a checkpoint (streaming).
    """

    element_spec: dict[str, jax.ShapeDtypeStruct]
    num_examples: int | None
    num_steps: int | None
    description: str
    fingerprint: str
    has_state: bool = False
    _seed: int | None  # of the order; None without shuffling

    @property
    def batch_size(self) -> int:
        return next(iter(self.element_spec.values())).shape[0]

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches that it takes to see every row once; None if unknown."""
        if self.num_steps is not None:
            return self.num_steps
        return None if self.num_examples is None else math.ceil(self.num_examples / self.batch_size)

    @abc.abstractmethod
    def batch(self, step: int, sharding: Shardings | None = None) -> dict[str, Any]:
        """The global batch of step `step` (from 0): jax arrays, or NumPy without shardings."""

    @abc.abstractmethod
    def _position(self, step: int) -> dict[str, Any]:
        return {
            "step": int(step),
            "seed": self._seed,
            "shuffle": self._seed is not None,
            "batch_size": self.batch_size,
            "fingerprint": self.fingerprint,
        }

    def position(self, step: int) -> dict[str, Any]:
        """What a checkpoint at `step` has to remember, as JSON."""
        return self._position(step)

    def epoch(self, sharding: Shardings | None = None, max_steps: int | None = None) -> Iterator[dict[str, Any]]:
        """Batches 0, 1, ... of a feed that does not repeat, at most `max_steps`."""
        step = 0
        while max_steps is None or step < max_steps:
            try:
                batch = self.batch(step, sharding)
            except EndOfData:
                return
            yield batch
            step += 1

    def check_position(self, saved: Mapping[str, Any]) -> None:
        """Raises `ConfigError` if `saved` is a position in other data or another order."""
        current = self._position(int(saved.get("step", 0)))
        names = {
            "feed": "DatasetConfig.feed",
            "fingerprint": "the examples (task, lengths, pack, vocabulary, or the text itself)",
            "files": "the files that are streamed (names, sizes or content)",
            "num_examples": "the number of examples",
            "shuffle": "DatasetConfig.shuffle",
            "seed": "DatasetConfig.seed",
            "batch_size": "DatasetConfig.batch_size (BATCH_SIZE)",
        }
        changed = [
            f"{what}: saved {saved[key]!r}, now {current.get(key)!r}"
            for key, what in names.items()
            if key in saved and saved[key] != current.get(key)
        ]
        if changed:
            raise ConfigError(
                "The checkpoint's data position does not fit this configuration, so the run cannot continue where it "
                f"stopped. Changed: {'; '.join(changed)}. Restore the old setting, or begin another MODEL_DIR from "
                "this checkpoint's parameters with CheckpointConfig.restore.path."
            )

    def save_state(self, directory: str, step: int | None = None) -> None:  # noqa: B027
        """Writes what `position` cannot hold: nothing, for a cached feed."""

    def restore(self, directory: str) -> None:  # noqa: B027
        """Continues from what `save_state` wrote."""


def batch_spec(cfg: Any, feature_converter_cls: type) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the global batch, from the configuration alone; checks it all, reads no data."""
    _, lengths = _checked(cfg, feature_converter_cls)
    return spec_of(cfg, feature_converter_cls(pack=cfg.pack), lengths)


def feature_converter(**dtypes: str) -> type:
    """A SeqIO feature converter class that gives a model a task's features under their own names.

    For models of one's own: `FEATURE_CONVERTER_CLS = data.feature_converter(x="float32", label="int32")`. Features have one
    dimension each and are padded with zeros to their length in TASK_FEATURE_LENGTHS. They are not packed.
    """
    import seqio
    import tensorflow as tf

    features = {name: seqio.FeatureConverter.FeatureSpec(tf.as_dtype(dtype)) for name, dtype in dtypes.items()}

    class Converter(seqio.FeatureConverter):
        TASK_FEATURES = MODEL_FEATURES = features

        def __init__(self, pack: bool = False, **options: Any):
            if pack:
                raise ConfigError("DatasetConfig.pack = True: this model's features cannot be packed; set it to False.")
            super().__init__(pack=False, **options)

        def _convert_features(self, ds: Any, lengths: Mapping[str, int]) -> Any:
            ds = ds.map(lambda example: {name: example[name] for name in features})
            return seqio.utils.trim_and_pad_dataset(ds, lengths)

        def get_model_feature_lengths(self, lengths: Mapping[str, int]) -> Mapping[str, int]:
            return dict(lengths)

    Converter.__name__ = Converter.__qualname__ = (
        f"feature_converter({', '.join(f'{n}={d}' for n, d in dtypes.items())})"
    )
    return Converter


def _checked(cfg: Any, feature_converter_cls: type) -> tuple[Any, dict[str, int]]:
    """The task or mixture and its feature lengths, once everything that can be wrong with them is not."""
    provider = lookup.get_mixture_or_task(cfg.mixture_or_task_name, cfg.module)
    lookup.check_split(provider, cfg.split)
    lookup.check_offline_cache(provider, cfg.use_cached)
    return provider, lookup.check_feature_lengths(provider, cfg.task_feature_lengths, feature_converter_cls)


def spec_of(cfg: Any, converter: Any, lengths: Mapping[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the global batch from the lengths of the task's features."""
    for name, feature in converter.MODEL_FEATURES.items():
        if feature.rank != 1:
            raise ConfigError(
                f"feature {name!r} of {type(converter).__name__} has {feature.rank} dimensions, but a row has "
                "one: flatten it in a preprocessor (a single number becomes a row of length 1)."
            )
    dtypes = {name: feature.dtype for name, feature in converter.MODEL_FEATURES.items()}
    if converter.pack:
        dtypes.update(converter.PACKING_FEATURE_DTYPES)
    return {
        name: jax.ShapeDtypeStruct((cfg.batch_size, length), np.dtype(dtypes[name].as_numpy_dtype))
        for name, length in sorted(converter.get_model_feature_lengths(lengths).items())
    }


def _order_seed(cfg: Any, saved_position: Mapping[str, Any] | None) -> int | None:
    """The seed of the order, the same on every process; None without shuffling."""
    if not cfg.shuffle:
        return None
    if cfg.seed is not None:
        return int(cfg.seed)
    if saved_position and saved_position.get("seed") is not None:
        return int(saved_position["seed"])
    return distributed.draw_seed()


def _task_source_bytes(task: Any, split: str, use_cached: bool) -> int | None:
    import seqio
    import tensorflow as tf

    if use_cached and task.supports_caching:
        prefix = seqio.utils.get_cached_tfrecord_prefix(task.cache_dir, split)
        files = tf.io.gfile.glob(f"{prefix}*")
    elif hasattr(task.source, "size_bytes"):
        return task.source.size_bytes(split)
    elif tfds_bytes := lookup.tfds_split_bytes(task.source, split):
        return tfds_bytes
    else:
        files = task.source.list_shards(split)
    if files and all(tf.io.gfile.exists(f) for f in files):
        return sum(tf.io.gfile.stat(f).length for f in files)
    return None


def estimate_bytes(provider: Any, split: str, use_cached: bool, spec: Mapping[str, Any]) -> int | None:
    """An upper estimate of the copy's bytes in memory; None where the source's size is unknown.

    The larger of what the text itself takes and of one row per source example: unpacked short
    examples are mostly padding.
    """
    import seqio

    row_bytes = sum(feature.shape[1] * 2 for feature in spec.values())
    total = 0
    for task in seqio.get_subtasks(provider):
        if split.split("[")[0] not in [str(s) for s in task.splits]:
            continue
        source_bytes = _task_source_bytes(task, split, use_cached)
        if source_bytes is None:
            return None
        packed = any(name.endswith("_segment_ids") for name in spec)
        examples = 0 if packed else (task.num_input_examples(split) or 0)
        total += max(source_bytes * _BYTES_PER_SOURCE_BYTE, examples * row_bytes)
    return int(total)


def _fits(provider: Any, cfg: Any, spec: Mapping[str, Any]) -> bool:
    estimate = estimate_bytes(provider, cfg.split, cfg.use_cached, spec)
    name = cfg.mixture_or_task_name
    if estimate is None:
        logging.info(
            "%s: the size of its source is unknown, so it is streamed; DatasetConfig.feed = "
            "'cached' makes an index-addressed copy.",
            name,
        )
        return False
    fits = estimate <= cfg.memory_limit_bytes
    logging.info(
        "%s: about %.2f GiB as an index-addressed copy, %s DatasetConfig.memory_limit_bytes = %.2f GiB: %s.",
        name,
        estimate / 2**30,
        "within" if fits else "above",
        cfg.memory_limit_bytes / 2**30,
        "cached" if fits else "streamed",
    )
    return fits


def make_feed(
    cfg: Any,
    feature_converter_cls: type,
    *,
    pad_remainder: bool = False,
    repeat: bool = True,
    saved_position: Mapping[str, Any] | None = None,
) -> Feed:
    """Makes the feed that a `DatasetConfig` describes.

    Args:
      cfg: a `perex_t5x.utils.DatasetConfig`.
      feature_converter_cls: the model's, from SeqIO.
      pad_remainder: fill the last batch of an epoch with all-zero rows (zero loss weights); only without `repeat`.
      repeat: epoch after epoch without end (training), or one epoch (evaluation).
      saved_position: of the checkpoint to resume from. It is checked, and its seed is adopted where `cfg.seed` is None.
    """
    provider, lengths = _checked(cfg, feature_converter_cls)
    converter = feature_converter_cls(pack=cfg.pack)
    spec = spec_of(cfg, converter, lengths)
    kind = _kind(cfg, provider, spec, saved_position)
    seed = _order_seed(cfg, saved_position)
    if kind == "cached":
        from perex_t5x.data.cached import CachedFeed as FeedClass
    else:
        from perex_t5x.data.streaming import StreamingFeed as FeedClass
    feed = FeedClass(FeedRequest(cfg, provider, converter, lengths, spec, seed, repeat, pad_remainder))
    if saved_position:
        feed.check_position(saved_position)
    return feed


def check_random_access(cfg: Any, feature_converter_cls: type, purpose: str) -> None:
    """Raises `ConfigError` if the feed of a `DatasetConfig` would be a stream; reads no data."""
    provider, lengths = _checked(cfg, feature_converter_cls)
    if _kind(cfg, provider, spec_of(cfg, feature_converter_cls(pack=cfg.pack), lengths), None) == "streaming":
        raise ConfigError(
            f"DatasetConfig.feed = {cfg.feed!r} streams {cfg.mixture_or_task_name!r}, and {purpose} reads batches again: "
            "set DatasetConfig.feed = 'cached', with DatasetConfig.cache_dir if it does not fit into memory."
        )


def _kind(cfg: Any, provider: Any, spec: Mapping[str, Any], saved_position: Mapping[str, Any] | None) -> str:
    """'cached' or 'streaming'."""
    kind = cfg.feed
    if kind == "auto" and saved_position and saved_position.get("feed") in FEEDS:
        kind = saved_position["feed"]  # a changed limit must not turn a resumed run's data around
    if kind == "auto":
        # One process decides: another may see other sizes.
        fits = distributed.from_process_0("does it fit", lambda: _fits(provider, cfg, spec))
        kind = "cached" if fits else "streaming"
    return kind
