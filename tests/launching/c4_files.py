"""A small `c4/en:3.1.0` as TensorFlow Datasets prepares it, for tests that read it from a bucket."""

from __future__ import annotations

import os
from pathlib import Path

import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath

WORDS = ("def", "return", "for", "in", "self", "None")
SHARDS = {"train": 4, "validation": 2}


def write(root: Path, examples: int = 160) -> list[str]:
    """Writes it below `root`, a --tfds_data_dir; returns the paths of its files below `root`."""
    folder = epath.Path(root) / "c4" / "en" / "3.1.0"
    folder.mkdir(parents=True)
    info = tfds.builder("c4/en:3.1.0", data_dir=os.fspath(root / "nothing")).info
    splits = [_write_split(info, folder, split, examples, shards) for split, shards in SHARDS.items()]
    info.set_splits(tfds.core.SplitDict(splits))
    info.write_to_directory(folder)
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def _write_split(info, folder: epath.Path, split: str, examples: int, shards: int) -> tfds.core.SplitInfo:
    template = tfds.core.ShardedFileTemplate(
        data_dir=folder, dataset_name="c4", split=split, filetype_suffix="tfrecord"
    )
    lengths, size = [], 0
    for shard, path in enumerate(template.sharded_filepaths(shards)):
        records = [_example(info, f"{split} {number}", number) for number in range(shard, examples, shards)]
        with tf.io.TFRecordWriter(os.fspath(path)) as writer:
            for record in records:
                writer.write(record)
        lengths.append(len(records))
        size += sum(map(len, records))
    return tfds.core.SplitInfo(name=split, shard_lengths=lengths, num_bytes=size, filename_template=template)


def _example(info, begin: str, number: int) -> bytes:
    text = " ".join([begin, *(WORDS[(number * 7 + i) % len(WORDS)] for i in range(5 + number % 23))])
    values = {name: text if name == "text" else "x" for name in info.features}
    return info.features.serialize_example(info.features.encode_example(values))
