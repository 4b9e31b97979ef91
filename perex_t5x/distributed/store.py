"""What of JAX's private side the processes need, and nothing else touches.

JAX runs a coordination service in process 0, with a key-value store that all processes reach, but gives no public handle to
it; nor can one ask for the cluster it would detect without joining it. Both are taken from `jax._src` here.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import Any

import jax

_PREFIX = "perex_t5x/"


class Store:
    """Strings by key, seen by all processes. Calls block while process 0 does not answer, and raise once it is gone."""

    def __init__(self, client: Any):
        self._client = client
        self._uses: collections.Counter[str] = collections.Counter()

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(_PREFIX + key, value, allow_overwrite=True)

    def set_once(self, key: str, value: str) -> bool:
        """Sets a key that nobody has set; returns False if somebody has."""
        try:
            self._client.key_value_set(_PREFIX + key, value, allow_overwrite=False)
        except jax.errors.JaxRuntimeError as e:
            if "ALREADY_EXISTS" not in str(e):
                raise
            return False
        return True

    def get(self, key: str, seconds: float) -> str:
        """Waits for a key; raises `TimeoutError` if it does not come."""
        try:
            return self._client.blocking_key_value_get(_PREFIX + key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise
            raise TimeoutError(f"{key} was not set within {seconds:g} s") from None

    def under(self, folder: str) -> dict[str, str]:
        """All keys that begin with `folder/`, without it."""
        start = f"{_PREFIX}{folder}/"
        try:
            found = self._client.key_value_dir_get(start)
        except jax.errors.JaxRuntimeError as e:
            if "NOT_FOUND" not in str(e):
                raise
            return {}
        return {key.removeprefix(start): value for key, value in found}

    def barrier(self, name: str, seconds: float) -> None:
        """Returns once all processes are here; a name may be used again."""
        try:
            self._client.wait_at_barrier(self._unique(name), int(seconds * 1000))
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise
            raise TimeoutError(f"not all processes came to {name!r} within {seconds:g} s") from None

    def from_process_0(self, name: str, function: Callable[[], Any], index: int, seconds: float) -> Any:
        """The value that `function` returns in process 0, as JSON carries it; it is called there only."""
        key = self._unique(name)
        if index:
            return json.loads(self.get(key, seconds))
        text = json.dumps(function())
        self.set(key, text)
        return json.loads(text)

    def _unique(self, name: str) -> str:
        self._uses[name] += 1
        return f"{name}#{self._uses[name]}"


def connected_store() -> Store | None:
    """The store of the processes that `jax.distributed` has joined; None if it has not."""
    global _store
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        return None
    if _store is None or _store._client is not client:
        _store = Store(client)
    return _store


_store: Store | None = None


def detect_cluster(method: str | None, seconds: int) -> tuple[str | None, int | None, int | None, Any]:
    """(coordinator address, process count, process index, local device ids), None for what is not found.

    The same that `jax.distributed.initialize()` without arguments would find: TPU pods, GKE, SLURM, Open MPI.
    """
    from jax._src import clusters

    return clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, method, seconds)
