"""How large an index-addressed copy of a task would be, without reading it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A token in a packed row: two bytes as input and as target, one each for weight, segment and (up
# to) two for its position. A byte of text is at most one token.
_BYTES_PER_SOURCE_BYTE = 8


def tfds_split_bytes(source: Any, split: str) -> int | None:
    """The size that TFDS's metadata give: asking a thousand remote files instead takes minutes."""
    import seqio

    if not isinstance(source, seqio.TfdsDataSource) or source.tfds_dataset.name is None:
        return None
    splits = source.tfds_dataset.info.splits
    return int(splits[split].num_bytes) or None if split in splits else None


def _task_source_bytes(task: Any, split: str, use_cached: bool) -> int | None:
    import seqio
    import tensorflow as tf

    if use_cached and task.supports_caching:
        prefix = seqio.utils.get_cached_tfrecord_prefix(task.cache_dir, split)
        files = tf.io.gfile.glob(f"{prefix}*")
    elif hasattr(task.source, "size_bytes"):
        return task.source.size_bytes(split)
    elif tfds_bytes := tfds_split_bytes(task.source, split):
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
