"""The cached feed: an index-addressed copy of the examples, in an order that is pure arithmetic."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import jax
import numpy as np

from perex_t5x.data import device_batches, stores
from perex_t5x.data.device_batches import EndOfData
from perex_t5x.data.feed import Feed, FeedRequest
from perex_t5x.data.order import EpochOrder, MixedOrder
from perex_t5x.data.rows import from_records
from perex_t5x.errors import ConfigError


def _component_tasks(provider: Any, split: str) -> tuple[list[Any], list[float]]:
    """The tasks that have the split, with their mixing rates."""
    import seqio

    tasks = [t for t in seqio.get_subtasks(provider) if split.split("[")[0] in [str(s) for s in t.splits]]
    if isinstance(provider, seqio.Task):
        return tasks, [1.0]
    return tasks, [float(provider.get_rate(t)) for t in tasks]


def _check_hosts_agree(fingerprint: str, name: str) -> None:
    """Refuses hosts with different rows (another Python, other files): nothing else would notice."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    mine = np.frombuffer(bytes.fromhex(fingerprint), np.uint8)
    prints = [bytes(p).hex() for p in np.asarray(multihost_utils.process_allgather(mine))]
    if len(set(prints)) > 1:
        raise ConfigError(
            f"The hosts hold different examples of {name!r}: fingerprints {[p[:12] for p in prints]} by process. Give "
            "all of them the same files (for the embedded corpus: the same version of Python) and vocabulary."
        )


class CachedFeed(Feed):
    """Batches of step t are rows t·B ... (t+1)·B − 1 of an endless order.

    Guarantees: the batch is a function of (examples, seed, step), the same for any number of
    processes and any sharding; every epoch of a task sees each of its rows once; nothing has to be
    restored. A feed that does not repeat gives a mixture's tasks one after the other, each row once.
    """

    def __init__(self, request: FeedRequest):
        cfg, provider, spec, seed, repeat = request.cfg, request.provider, request.spec, request.seed, request.repeat
        started = time.monotonic()
        tasks, rates = _component_tasks(provider, cfg.split)
        self._stores = [stores.open_store(t, request.converter, cfg.split, request.lengths, cfg, spec) for t in tasks]
        sizes = [len(s) for s in self._stores]
        for task, size in zip(tasks, sizes, strict=True):
            if not size:
                raise ConfigError(
                    f"Task {task.name!r}, split {cfg.split!r}, gives no examples at all. Check its "
                    "source, and that its preprocessors do not filter everything out."
                )
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self.element_spec = dict(spec)
        self._dtypes = {name: feature.dtype for name, feature in spec.items()}
        self.num_examples = sum(sizes)
        self._seed = seed
        if repeat and len(sizes) > 1:
            self._order = MixedOrder(sizes, rates, seed)
        else:
            self._order = EpochOrder(self.num_examples, seed)
        self.num_steps = None
        if not repeat:
            full, rest = divmod(self.num_examples, self.batch_size)
            self.num_steps = full + (1 if rest and request.pad_remainder else 0)
            if not self.num_steps:
                raise ConfigError(
                    f"{provider.name!r}, split {cfg.split!r}, has {self.num_examples} rows, fewer "
                    f"than one batch of {self.batch_size}: make DatasetConfig.batch_size smaller."
                )
        prints = [s.fingerprint for s in self._stores]
        if len(prints) > 1:
            shares = [repr(r / sum(rates)) for r in rates] if repeat else []
            prints = [hashlib.sha256(" ".join(prints + shares).encode()).hexdigest()]
        self.fingerprint = prints[0]
        _check_hosts_agree(self.fingerprint, provider.name)
        self.description = (
            f"{provider.name}/{cfg.split}: cached {self._stores[0].where}, {self.num_examples} "
            f"rows, {sum(s.num_bytes for s in self._stores) / 1e6:.1f} MB, "
            f"{self.steps_per_epoch} steps of {self.batch_size} per epoch, seed {seed}, "
            f"fingerprint {self.fingerprint[:12]}, ready in {time.monotonic() - started:.1f} s"
        )

    def _records(self, rows: np.ndarray) -> np.ndarray:
        if len(self._stores) == 1:
            return self._stores[0].read(rows)
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        records = np.empty(len(rows), self._stores[0].dtype)
        for k in np.unique(owner):
            chosen = owner == k
            records[chosen] = self._stores[k].read(rows[chosen] - self._starts[k])
        return records

    def _read(self, first: int, last: int) -> dict[str, np.ndarray]:
        """Rows at places first..last of the order; all-zero rows behind the end."""
        end = last if self.num_steps is None else min(last, int(self._starts[-1]))
        if end <= first:
            records = np.empty(0, self._stores[0].dtype)
        else:
            records = self._records(self._order.rows(np.arange(first, end)))
        return from_records(records, self._dtypes, last - first)

    def batch(self, step: int, sharding: device_batches.Shardings | None = None) -> dict[str, Any]:
        if step < 0 or (self.num_steps is not None and step >= self.num_steps):
            raise EndOfData(f"step {step} of a feed of {self.num_steps} steps")
        start = step * self.batch_size
        if sharding is None:
            return self._read(start, start + self.batch_size)
        return device_batches.make_global_batch(
            lambda a, b: self._read(start + a, start + b), self.element_spec, sharding
        )

    def _position(self, step: int) -> dict[str, Any]:
        return {"feed": "cached", **super()._position(step), "num_examples": self.num_examples}
