"""The streaming feed: tf.data for tasks too large for a copy, resumed by the iterator's own state."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import io
import json
import os
import threading
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from perex_t5x import distributed, files
from perex_t5x.data import device_batches, lookup
from perex_t5x.data.device_batches import EndOfData
from perex_t5x.data.feed import Feed, FeedRequest
from perex_t5x.data.rows import vocabulary_key
from perex_t5x.errors import ConfigError, is_denied

# Batches kept after they were handed out. A checkpoint is taken at the step that the training loop
# has reached, while prefetching has drawn more from the iterator: those go into the checkpoint too.
_KEEP = 16


@dataclasses.dataclass(frozen=True)
class DataShard:
    """The part of the source that a process reads, and the rows of the batch that it fills with it.

    Attributes:
      parts: into how many parts the source is divided.
      index: which of them.
      rows: ascending ranges (start, stop); the process's stream fills them in this order.
    """

    parts: int
    index: int
    rows: tuple[tuple[int, int], ...]

    def offset(self, row: int) -> int:
        """Where a row of the batch is in this process's part of it.

        >>> shard = DataShard(2, 1, ((4, 8), (12, 16)))
        >>> shard.offset(4), shard.offset(14)
        (0, 6)
        """
        before = 0
        for start, stop in self.rows:
            if start <= row < stop:
                return before + row - start
            before += stop - start
        raise ValueError(f"row {row} is not among {self.rows}")

    def words(self) -> str:
        """
        >>> DataShard(2, 1, ((4, 8), (12, 16))).words()
        'data shard 1 of 2 for rows 4-7, 12-15'
        """
        rows = ", ".join(f"{start}-{stop - 1}" for start, stop in self.rows)
        return f"data shard {self.index} of {self.parts} for rows {rows}"


def data_shards(sharding: jax.sharding.Sharding, batch_size: int) -> dict[int, DataShard]:
    """What each process reads: processes that hold the same rows share a data shard.

    With model parallelism across hosts several processes hold the same rows and must read the same. The shards are
    numbered by their first rows, so that the numbers depend on the sharding alone.

    Raises `ConfigError` where two processes share some of their rows but not all, or hold different numbers of rows.
    """
    rows_of = device_batches.rows_of_processes(sharding, batch_size)
    distinct = sorted(set(rows_of.values()))
    sizes = {sum(stop - start for start, stop in rows) for rows in distinct}
    if sizes != {batch_size // len(distinct)} or batch_size % len(distinct):
        shown = "; ".join(DataShard(len(distinct), i, rows).words() for i, rows in enumerate(distinct[:4]))
        raise ConfigError(
            f"The streaming feed divides a batch among the hosts, so any two of them must hold either the same rows or none "
            f"in common, and all the same number; this mesh divides {batch_size} rows otherwise ({shown}"
            f"{', ...' if len(distinct) > 4 else ''}). Change PjitPartitioner.num_partitions or its ici_mesh_shape so that "
            "`model` covers whole hosts or divides one, or set DatasetConfig.feed = 'cached'."
        )
    return {process: DataShard(len(distinct), distinct.index(rows), rows) for process, rows in rows_of.items()}


def check_hosts(cfg: Any, sharding: jax.sharding.Sharding) -> None:
    """Raises `ConfigError` if the batch of a `DatasetConfig` that asks for streaming cannot be divided among the hosts."""
    if cfg.feed == "streaming":
        data_shards(sharding, cfg.batch_size)


class StreamingFeed(Feed):
    """Batches in sequence from a SeqIO pipeline.

    A repeating feed is sharded: each process reads its own part of the source for the rows that its
    devices hold, so the global batch depends on the number of hosts and on the mesh. A feed of one
    epoch (evaluation) is read in whole by every process, which then keeps its own rows: all agree on
    where the data end. Asking for step 0 again restarts it.
    """

    def __init__(self, request: FeedRequest):
        cfg, provider, converter, seed = request.cfg, request.provider, request.converter, request.seed
        self._cfg, self._provider, self._converter = cfg, provider, converter
        self._lengths, self._seed, self._repeat = dict(request.lengths), seed, request.repeat
        self._pad_remainder = request.pad_remainder
        self.element_spec = dict(request.spec)
        self.num_examples = None
        self.num_steps = None
        self.has_state = request.repeat
        self._lock = threading.RLock()
        self._iterator: Any = None
        self._shard = DataShard(1, 0, ((0, self.batch_size),))  # until the mesh is known
        self._next_step = 0
        self._saved_step: int | None = None  # of the last `position`
        self._restore_from: str | None = None
        self._handed_out: collections.deque[tuple[int, dict]] = collections.deque(maxlen=_KEEP)
        self._ahead: collections.deque[dict] = collections.deque()
        key = [provider.name, cfg.split, sorted(self._lengths.items()), converter.pack, type(converter).__name__]
        key += [[n, vocabulary_key(f.vocabulary)] for n, f in sorted(provider.output_features.items())]
        self.fingerprint = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        self._files: str | None = None
        if request.repeat:  # the state of an iterator is a place in these files, and in no others
            find = functools.partial(lookup.files_fingerprint, provider, cfg.split, cfg.use_cached)
            self._files = distributed.from_process_0("files of the stream", find)
        self.description = (
            f"{provider.name}/{cfg.split}: streamed, batches of {self.batch_size}, seed {seed}, "
            f"{jax.process_count()} processes"
        )

    def _dataset(self, num_shards: int, shard: int) -> Any:
        import seqio
        import tensorflow as tf

        info = seqio.ShardInfo(index=shard, num_shards=num_shards) if num_shards > 1 else None
        ds = self._provider.get_dataset(
            self._lengths,
            split=self._cfg.split,
            use_cached=self._cfg.use_cached,
            shuffle=self._seed is not None,
            # Without shuffling, random preprocessing still has to be repeatable.
            seed=0 if self._seed is None else self._seed,
            shard_info=info,
            num_epochs=None if self._repeat else 1,
            trim_output_features=self._cfg.trim_output_features,
            # tf.data would write the whole cache into every checkpoint.
            try_in_mem_cache=False,
        )
        ds = self._converter(ds, self._lengths)
        ds = ds.batch(self.batch_size // num_shards, drop_remainder=self._repeat)
        options = tf.data.Options()
        options.deterministic = True
        return ds.with_options(options)

    def _start(self, sharding: device_batches.Shardings | None) -> None:
        shard = DataShard(1, 0, ((0, self.batch_size),))
        if self._repeat and jax.process_count() > 1:
            if sharding is None:
                raise ValueError("a streaming feed on several processes needs shardings")
            one = next(iter(sharding.values()))
            shard = data_shards(one, self.batch_size)[jax.process_index()]
        self._shard = shard
        self._iterator = iter(self._dataset(shard.parts, shard.index))
        self._next_step = 0
        if self._restore_from is not None:
            try:
                self._read_state(self._restore_from)
            except ConfigError:
                raise
            except Exception as e:  # of TensorFlow, JSON and NumPy: what they read was written by this package
                if is_denied(e) or files.is_remote(self._restore_from):
                    raise  # what cannot be reached is not damaged
                text = (str(e).strip() or type(e).__name__).splitlines()[0][:300]
                raise ConfigError(
                    f"Cannot resume the streaming feed from {self._restore_from}: {text}. If its files are damaged, move "
                    "the checkpoint away: the same command then starts from the one before it."
                ) from e

    def _draw(self) -> dict[str, np.ndarray]:
        if self._ahead:
            return self._ahead.popleft()
        try:
            tensors = next(self._iterator)
        except StopIteration:
            if self._next_step == 0:
                raise ConfigError(
                    f"{self._provider.name!r}, split {self._cfg.split!r}, gives no examples at all."
                ) from None
            raise EndOfData(f"the data end at step {self._next_step}") from None
        rows = {name: np.asarray(tensors[name]) for name in self.element_spec}
        count = len(next(iter(rows.values())))
        wanted = self.batch_size // self._shard.parts
        if count < wanted:
            if not self._pad_remainder:
                raise EndOfData(f"the data end at step {self._next_step}")
            rows = {
                name: np.concatenate([x, np.zeros((wanted - count, *x.shape[1:]), x.dtype)]) for name, x in rows.items()
            }
        return rows

    def batch(self, step: int, sharding: device_batches.Shardings | None = None) -> dict[str, Any]:
        with self._lock:
            if self._iterator is None or (step == 0 and not self._repeat):
                self._start(sharding)
                if self._restore_from is None:
                    self._next_step = step  # a run that begins at another one's checkpoint: its stream begins here
            if step != self._next_step:
                if self._restore_from is not None and not self._handed_out:
                    raise ConfigError(
                        f"Cannot resume the streaming feed from {self._restore_from}: it holds the state of step "
                        f"{self._next_step}, and the run is at {step}. If its files are damaged, move the checkpoint away."
                    )
                raise ValueError(
                    f"A streaming feed gives its batches in sequence: step {step} was asked for, "
                    f"{self._next_step} is next. Only a cached feed has random access."
                )
            rows = self._draw()
            self._next_step += 1
            if self.has_state:
                self._handed_out.append((step, rows))
        if sharding is None:
            return rows
        shard = self._shard

        def read(start: int, stop: int) -> device_batches.Rows:
            first = shard.offset(start)
            return {name: x[first : first + stop - start] for name, x in rows.items()}

        return device_batches.make_global_batch(read, self.element_spec, sharding)

    def position(self, step: int) -> dict[str, Any]:
        """As for every feed; the state of this step is then what `save_state` writes."""
        self._saved_step = int(step)
        return self._position(step)

    def _position(self, step: int) -> dict[str, Any]:
        files = {"files": self._files} if self._files else {}
        return {"feed": "streaming", **super()._position(step), **files, "process_count": jax.process_count()}

    # --- state --------------------------------------------------------------------------------

    def save_state(self, directory: str, step: int | None = None) -> None:
        """Writes the state at `step` (default: that of the last `position`) for this process.

        `process_<i>-of-<n>/` holds the iterator and the batches drawn from it since `step`.
        """
        import tensorflow as tf

        with self._lock:
            if self._iterator is None:
                raise ValueError("nothing to save: no batch was asked for yet")
            step = self._saved_step if step is None else step
            step = self._next_step if step is None else step
            ahead = [rows for s, rows in self._handed_out if s >= step]
            if len(ahead) != self._next_step - step:
                raise ValueError(
                    f"cannot save the state at step {step}: the feed is at {self._next_step} and "
                    f"keeps {len(self._handed_out)} batches"
                )
            ahead += list(self._ahead)
            folder = os.path.join(directory, _process_name())
            tf.io.gfile.makedirs(folder)
            tf.train.Checkpoint(iterator=self._iterator).write(os.path.join(folder, "iterator"))
            for i, rows in enumerate(ahead):
                buffer = io.BytesIO()  # a zip file seeks, which remote files cannot
                np.savez(buffer, **rows)
                with tf.io.gfile.GFile(os.path.join(folder, f"ahead_{i}.npz"), "wb") as f:
                    f.write(buffer.getvalue())
            with tf.io.gfile.GFile(os.path.join(folder, "state.json"), "w") as f:
                shard = {"shards": [self._shard.parts, self._shard.index], "rows": self._shard.rows}
                f.write(json.dumps({"step": step, "ahead": len(ahead), **shard}))

    def restore(self, directory: str) -> None:
        """Continues from a saved state; refuses one of another number of processes."""
        import tensorflow as tf

        if not tf.io.gfile.exists(os.path.join(directory, _process_name())):
            names = sorted(tf.io.gfile.listdir(directory)) if tf.io.gfile.exists(directory) else []
            states = [name.rstrip("/") for name in names if name.startswith("process_")]
            saved = states[0].rsplit("-", 1)[-1] if states else None
            if saved and int(saved) != jax.process_count():
                reason = (
                    f"it was saved by {saved} processes and this run has {jax.process_count()}: a "
                    "stream cannot be divided again. Resume on the old number of hosts, or begin "
                    "another MODEL_DIR from its parameters with CheckpointConfig.restore.path, or "
                    "train with DatasetConfig.feed = 'cached', which resumes on any number"
                )
            else:
                reason = f"{_process_name()} is missing (the folder has: {', '.join(states) or 'nothing'})"
            raise ConfigError(f"Cannot resume the streaming feed from {directory}: {reason}.")
        with self._lock:
            self._restore_from = directory
            self._iterator = None  # built with the next batch, when its sharding is known

    def _read_state(self, directory: str) -> None:
        import tensorflow as tf

        folder = os.path.join(directory, _process_name())
        if not files.is_remote(folder):
            for name in os.listdir(folder):  # TensorFlow would wait for a pipe, and not hear signals
                if os.path.exists(path := os.path.join(folder, name)) and not os.path.isfile(path):
                    raise ValueError(f"{path} is not a file")
        with tf.io.gfile.GFile(os.path.join(folder, "state.json")) as f:
            state = json.load(f)
        saved = _saved_shard(state, self.batch_size)
        if saved != self._shard:
            raise ConfigError(
                f"Cannot resume the streaming feed from {directory}: this process read {saved.words()}, and with this "
                f"mesh it would read {self._shard.words()}. Use the mesh of the saved run, or begin another MODEL_DIR "
                "from its parameters with CheckpointConfig.restore.path."
            )
        path = os.path.join(folder, "iterator")
        tf.train.Checkpoint(iterator=self._iterator).read(path).assert_consumed()
        self._ahead.clear()
        self._handed_out.clear()
        for i in range(state["ahead"]):
            path = os.path.join(folder, f"ahead_{i}.npz")
            with tf.io.gfile.GFile(path, "rb") as f:
                rows = read_arrays(f.read(), self.element_spec, path)
            expected = {n: (self.batch_size // saved.parts, *x.shape[1:]) for n, x in self.element_spec.items()}
            if {name: x.shape for name, x in rows.items()} != expected:
                raise ConfigError(f"{path} does not hold a batch of this run: {expected} is expected.")
            self._ahead.append(rows)
        self._next_step = int(state["step"])


def read_arrays(content: bytes, names: Iterable[str], path: str) -> dict[str, np.ndarray]:
    """Arrays of a file in NumPy's format `.npz`; `path` is for the message of the error. Nothing is unpickled."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as e:
        raise ConfigError(f"{path} is not a file of arrays as a checkpoint has them: {e}.") from e


def _saved_shard(state: Mapping[str, Any], batch_size: int) -> DataShard:
    parts, index = state["shards"]
    size = batch_size // parts
    # States of versions that knew only hosts with one range of rows name no rows.
    rows = state.get("rows", [[index * size, (index + 1) * size]])
    return DataShard(parts, index, tuple((start, stop) for start, stop in rows))


def _process_name() -> str:
    return f"process_{jax.process_index()}-of-{jax.process_count()}"
