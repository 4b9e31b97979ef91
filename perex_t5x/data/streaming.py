"""The streaming feed: tf.data for tasks too large for a copy, resumed by the iterator's own state."""

from __future__ import annotations

import collections
import hashlib
import io
import json
import os
import threading
from typing import Any

import jax
import numpy as np

from perex_t5x.data import device_batches
from perex_t5x.data.device_batches import EndOfData
from perex_t5x.data.feed import Feed, FeedRequest
from perex_t5x.data.rows import vocabulary_key
from perex_t5x.errors import ConfigError

# Batches kept after they were handed out. A checkpoint is taken at the step that the training loop
# has reached, while prefetching has drawn more from the iterator: those go into the checkpoint too.
_KEEP = 16


def data_shard(sharding: jax.sharding.Sharding, batch_size: int, process: int) -> tuple[int, int]:
    """(number of data shards, this process's): processes that hold the same rows share a shard.

    With model parallelism across hosts several processes hold the same rows and must read the same.
    """
    rows_of: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
    for device, index in sharding.devices_indices_map((batch_size, 1)).items():
        rows_of[device.process_index].add(device_batches.row_range(index, batch_size))
    ranges = {p: (min(r)[0], max(b for _, b in r)) for p, r in rows_of.items()}
    distinct = sorted(set(ranges.values()))
    parts = len(distinct)
    size = batch_size // parts
    if distinct != [(i * size, (i + 1) * size) for i in range(parts)]:
        raise ConfigError(
            f"The streaming feed needs every host to hold one equal, contiguous part of the batch, "
            f"but this mesh gives the row ranges {distinct} of {batch_size}. Order the mesh so that "
            "a host's devices are neighbours on the data axis, or set DatasetConfig.feed = 'cached'."
        )
    return parts, distinct.index(ranges[process])


class StreamingFeed(Feed):
    """Batches in sequence from a SeqIO pipeline.

    A repeating feed is sharded: each process reads its own part of the source, so the global batch
    depends on the number of hosts. A feed of one epoch (evaluation) is read in whole by every
    process, which then keeps its own rows: all agree on where the data end. Asking for step 0 again
    restarts it.
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
        self._shards: tuple[int, int] | None = None
        self._next_step = 0
        self._saved_step: int | None = None  # of the last `position`
        self._restore_from: str | None = None
        self._handed_out: collections.deque[tuple[int, dict]] = collections.deque(maxlen=_KEEP)
        self._ahead: collections.deque[dict] = collections.deque()
        key = [provider.name, cfg.split, sorted(self._lengths.items()), converter.pack, type(converter).__name__]
        key += [[n, vocabulary_key(f.vocabulary)] for n, f in sorted(provider.output_features.items())]
        self.fingerprint = hashlib.sha256(json.dumps(key).encode()).hexdigest()
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
        shards = (1, 0)
        if self._repeat and jax.process_count() > 1:
            if sharding is None:
                raise ValueError("a streaming feed on several processes needs shardings")
            one = next(iter(sharding.values()))
            shards = data_shard(one, self.batch_size, jax.process_index())
        self._shards = shards
        self._iterator = iter(self._dataset(*shards))
        self._next_step = 0
        if self._restore_from is not None:
            self._read_state(self._restore_from)

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
        wanted = self.batch_size // self._shards[0]
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
        parts, mine = self._shards
        offset = mine * (self.batch_size // parts)
        return device_batches.make_global_batch(
            lambda a, b: {name: x[a - offset : b - offset] for name, x in rows.items()}, self.element_spec, sharding
        )

    def position(self, step: int) -> dict[str, Any]:
        """As for every feed; the state of this step is then what `save_state` writes."""
        self._saved_step = int(step)
        return self._position(step)

    def _position(self, step: int) -> dict[str, Any]:
        return {"feed": "streaming", **super()._position(step), "process_count": jax.process_count()}

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
                f.write(json.dumps({"step": step, "ahead": len(ahead), "shards": self._shards}))

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
        with tf.io.gfile.GFile(os.path.join(folder, "state.json")) as f:
            state = json.load(f)
        if tuple(state["shards"]) != self._shards:
            raise ConfigError(
                f"Cannot resume the streaming feed from {directory}: this process read data shard "
                f"{state['shards'][1]} of {state['shards'][0]}, and with this mesh it would read "
                f"{self._shards[1]} of {self._shards[0]}. Use the mesh of the saved run."
            )
        path = os.path.join(folder, "iterator")
        tf.train.Checkpoint(iterator=self._iterator).read(path).assert_consumed()
        self._ahead.clear()
        self._handed_out.clear()
        for i in range(state["ahead"]):
            with tf.io.gfile.GFile(os.path.join(folder, f"ahead_{i}.npz"), "rb") as f:
                with np.load(io.BytesIO(f.read())) as rows:
                    self._ahead.append({name: rows[name] for name in self.element_spec})
        self._next_step = state["step"]


def _process_name() -> str:
    return f"process_{jax.process_index()}-of-{jax.process_count()}"
