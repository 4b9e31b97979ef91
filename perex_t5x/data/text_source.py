"""A SeqIO source over text files, one document per file; and the embedded corpus, the Python standard library's source text.

The embedded corpus needs no download, is there on every machine, and is about 12 MB of real text. Its size and hash differ
between Python versions; both are logged, and the hash is part of a run's data fingerprint.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence

import seqio
import tensorflow as tf
from absl import logging

from perex_t5x.errors import ConfigError

VALIDATION_PERCENT = 5
# Beyond this the digest is taken over sizes and modification times: reading everything twice only
# to name it would double the cost of starting.
_HASH_CONTENTS_UP_TO = 256 * 2**20

# Tests are excluded for their size and sameness; the rest is not the standard library's own text.
_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "_bundled"}
)

# split -> [(name, path)]; the name is what the split and the digest depend on, so that the same
# files in another folder are the same corpus.
FilesBySplit = Mapping[str, Sequence[tuple[str, str]]]


def _bucket(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 10_000


def split_by_name(files: Sequence[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Splits (name, path) pairs into train and validation by a hash of the name.

    About 5 % of the files are validation, and a file never changes sides when others come or go,
    with one exception: two or more files always give both splits at least one.

    >>> both = split_by_name([(f"{i}.txt", f"/x/{i}.txt") for i in range(1000)])
    >>> len(both["train"]), len(both["validation"])
    (966, 34)
    """
    files = sorted(files)
    threshold = VALIDATION_PERCENT * 100
    train = [f for f in files if _bucket(f[0]) >= threshold]
    validation = [f for f in files if _bucket(f[0]) < threshold]
    if len(files) > 1 and not validation:
        validation = [min(files, key=lambda f: _bucket(f[0]))]
        train.remove(validation[0])
    if not train and validation:
        train = [max(files, key=lambda f: _bucket(f[0]))]
        validation.remove(train[0])
    return {"train": train, "validation": validation}


class TextFilesSource(seqio.DataSource):
    """Documents `{'text': ...}` from files; the files are listed when first needed.

    The pipeline is `from_tensor_slices` and `read_file` only, so that its iterator can be saved by
    `tf.train.Checkpoint`. Invalid UTF-8 becomes U+FFFD.

    Args:
      list_files: returns the files of each split.
      description: what the files are, for messages ("the files of glob '...'").
      how_to_fix: what to change when a split is empty, for the message.
    """

    def __init__(self, list_files: Callable[[], FilesBySplit], *, description: str, how_to_fix: str):
        super().__init__(splits=("train", "validation"))
        self._list_files = list_files
        self.description = description
        self._how_to_fix = how_to_fix

    @functools.cached_property
    def _files(self) -> FilesBySplit:
        return self._list_files()

    def files(self, split: str) -> Sequence[tuple[str, str]]:
        files = self._files[split]
        if not files:
            count = sum(len(f) for f in self._files.values())
            raise ConfigError(
                f"Split {split!r} of {self.description} is empty ({count} files in all splits). {self._how_to_fix}"
            )
        return files

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return True

    def list_shards(self, split: str) -> Sequence[str]:
        return [path for _, path in self.files(split)]

    def num_input_examples(self, split: str) -> int:
        return len(self.files(split))

    def size_bytes(self, split: str) -> int:
        return sum(os.path.getsize(path) for path in self.list_shards(split))

    @functools.lru_cache(maxsize=8)  # noqa: B019 (a source lives as long as its task)
    def digest(self, split: str) -> str:
        """sha256 over names and contents (names, sizes and times for a large corpus)."""
        sha = hashlib.sha256()
        size = self.size_bytes(split)
        for name, path in self.files(split):
            sha.update(name.encode() + b"\0")
            if size <= _HASH_CONTENTS_UP_TO:
                with open(path, "rb") as f:
                    content = f.read()
                sha.update(len(content).to_bytes(8, "big") + content)
            else:
                stat = os.stat(path)
                sha.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
        summary = f"{len(self.files(split))} files, {size / 1e6:.1f} MB, sha256 {sha.hexdigest()[:16]}"
        logging.info("%s, split %s: %s", self.description, split, summary)
        return sha.hexdigest()

    def get_dataset(
        self,
        split: str = "train",
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        *,
        sequence_length: Mapping[str, int] | None = None,
        use_cached: bool = False,
        num_epochs: int | None = 1,
    ) -> tf.data.Dataset:
        del sequence_length, use_cached, num_epochs
        paths = self.list_shards(split)
        if shard_info and shard_info.num_shards > len(paths):
            raise ConfigError(
                f"Split {split!r} of {self.description} has {len(paths)} files, too few for {shard_info.num_shards} "
                "hosts to stream one each: set DatasetConfig.feed = 'cached', or cut the text into more files."
            )
        self.digest(split)  # for its log line
        ds = tf.data.Dataset.from_tensor_slices(paths)
        if shard_info:
            ds = ds.shard(shard_info.num_shards, shard_info.index)
        if shuffle:
            ds = ds.shuffle(len(paths), seed=seed)

        def read(path):
            text = tf.strings.unicode_transcode(tf.io.read_file(path), "UTF-8", "UTF-8", errors="replace")
            return {"text": text}

        return ds.map(read, num_parallel_calls=tf.data.AUTOTUNE)


def list_stdlib_files(root: str | None = None) -> list[tuple[str, str]]:
    """Returns sorted (relative path, path) of the standard library's `*.py` files.

    >>> names = [name for name, _ in list_stdlib_files()]
    >>> "json/decoder.py" in names, any("site-packages" in n for n in names)
    (True, False)
    """
    root = root or sysconfig.get_paths()["stdlib"]
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in _EXCLUDED_FOLDERS]
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                files.append((os.path.relpath(path, root).replace(os.sep, "/"), path))
    if not files:
        raise ConfigError(
            f"The standard library at {root} holds no *.py files (a zipped or stripped Python). "
            "Use MIXTURE_OR_TASK_NAME = 'text_files_lm' with files of your own."
        )
    return sorted(files)
