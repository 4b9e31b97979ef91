"""Several processes: meeting at the start, being the same, failing and stopping together. See docs/multi_host.md.

    connect(...)                    before the first use of a device; alone: nothing
    check_same("configuration", consistency.configuration_items())
    doing("saving", patient=True)   what the main thread is about, for the watchdog
    from_process_0("seed", draw)    one process decides, all learn
    finish() or fail(...)           the end of all

Without other processes every function is a no-op, or does its work alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from perex_t5x.cli import status
from perex_t5x.distributed import consistency, process_info, rendezvous
from perex_t5x.distributed import store as store_lib
from perex_t5x.distributed.group import Group, abort_as_usual, on_abort
from perex_t5x.errors import ConfigError, PeerLostError, Reason, first_line

INITIALIZATION_TIMEOUT = 300
HEARTBEAT_TIMEOUT = 100
PHASE_TIMEOUT = 3600

_group: Group | None = None
_info: process_info.ProcessInfo | None = None


def connect(
    coordinator_address: str | None = None,
    process_count: int | None = None,
    process_index: int | None = None,
    *,
    cluster_detection: str = "auto",
    initialization_timeout: int = INITIALIZATION_TIMEOUT,
    heartbeat_timeout: int = HEARTBEAT_TIMEOUT,
    phase_timeout: int = PHASE_TIMEOUT,
) -> process_info.ProcessInfo | None:
    """Joins the other processes, if there are any, and starts to watch them. Before the first use of a device.

    Args:
      coordinator_address, process_count, process_index: what the flags say; see `process_info.find` for the rest.
      cluster_detection: 'auto', 'off', or a method of JAX's.
      initialization_timeout: seconds to wait for the others.
      heartbeat_timeout: seconds after which a process that is silent, or makes no progress between steps, ends the run.
      phase_timeout: the same for one that is behind the others in compiling, restoring, evaluating or saving.

    Returns:
      Which process this is; None if it is alone.
    """
    global _group, _info
    seconds = {
        "--initialization_timeout": initialization_timeout,
        "--heartbeat_timeout": heartbeat_timeout,
        "--phase_timeout": phase_timeout,
    }
    for flag, value in seconds.items():
        if value < 1:
            raise ConfigError(f"{flag}={value}: give at least 1 second.")
    info = process_info.find(
        coordinator_address, process_count, process_index, detection=cluster_detection, timeout=initialization_timeout
    )
    if info is None:
        return None
    status.is_process(info.index)
    hosts = rendezvous.meet(info, initialization_timeout)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    _info = info
    on_abort(_explain_abort)
    try:
        jax.distributed.initialize(
            info.address,
            info.count,
            info.index,
            local_device_ids=info.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=initialization_timeout,
            # Later than our own watchdog, which says more.
            heartbeat_timeout_seconds=2 * heartbeat_timeout + 30,
            shutdown_timeout_seconds=heartbeat_timeout,
        )
    except (RuntimeError, ValueError) as e:
        raise PeerLostError(
            f"all {info.count} processes met at {info.address}, but JAX could not connect them: {e}. Did one of them end "
            "at once? Is a proxy set in the environment?"
        ) from e
    _group = Group(
        store_lib.connected_store(), info.index, hosts, timeout=heartbeat_timeout, phase_timeout=phase_timeout
    )
    _group.start()
    return info


def _explain_abort() -> None:
    """Ends the process with our own message if JAX aborts it because process 0 is gone."""
    if _info is None:
        return
    try:
        socket.create_connection((_info.host, _info.port), timeout=2.0).close()
    except OSError:
        if _group is not None:
            _group.end_without_coordinator()
        message = f"the coordinator (process 0) at {_info.address} ended while the processes were being connected."
        print(f"\nERROR: {message}", file=sys.stderr, flush=True)
        status.write(Reason.PEER_LOST, message)
        os._exit(Reason.PEER_LOST.exit_code)


def group() -> Group | None:
    """The processes of this run; None alone."""
    return _group


def is_writer() -> bool:
    """Whether this process is the one that writes logs, metrics and reports."""
    return jax.process_index() == 0


def doing(what: str, *, patient: bool = False) -> None:
    """Tells the watchdog what the main thread begins now, and whether that may take long.

    To be called by all processes in the same order: whoever has begun fewer things than the others keeps them waiting.
    """
    if _group is not None:
        _group.doing(what, patient)


def barrier(name: str) -> None:
    """Waits for all processes, without using a device: nothing times out while one of them works."""
    store = store_lib.connected_store()
    if store is None:
        return
    with _explained(name):
        store.barrier(name, _patience())


def from_process_0(name: str, function: Callable[[], Any]) -> Any:
    """The value of `function()` in process 0, in all processes; something that JSON can hold.

    >>> from_process_0("answer", lambda: 42)  # alone
    42
    """
    store = store_lib.connected_store()
    if store is None:
        return function()
    with _explained(name):
        return store.from_process_0(name, function, jax.process_index(), _patience())


def draw_seed() -> int:
    """A seed from the operating system, the same on every process."""
    return from_process_0("seed", lambda: secrets.randbits(31))


def check_same(topic: str, items: Mapping[str, str]) -> None:
    """Raises `ConfigError` in all processes, naming who differs in what, unless all call it with the same items."""
    if _group is not None:
        with _explained(topic):
            consistency.check(_group.store, topic, items, _group.index, _group.hosts, _group.phase_timeout)


def failing(error: BaseException) -> None:
    """Tells the watchdog that this process is about to end with an error; cleaning up may hang on the others."""
    if _group is not None:
        _group.failing(first_line(error), getattr(error, "reason", Reason.ERROR))


def stop_together() -> bool:
    """The end of a run that all processes have agreed to interrupt; False if this is not one, or there are no others."""
    if _group is None or not _group.stopping.stopped:
        return False
    finish()
    return True


def fail(message: str, reason: Reason, *, error: BaseException | None = None, shown: str | None = None) -> None:
    """Ends this process for a reason, and all others with it; alone: returns.

    Args:
      message: what the others say of it.
      reason: with which all of them end.
      error: if it may come of another process's end, what that process says is waited for first.
      shown: what is printed here.
    """
    if _group is None:
        return
    if error is not None and _may_come_of_others(error):
        _group.wait_for_verdict()
    _group.leave(message, reason, shown)


def finish() -> None:
    """The end of a run that went well: waits for all, then disconnects."""
    global _group
    if _group is None:
        return
    doing("finishing", patient=True)
    barrier("finished")
    _group.close()
    _group = None
    abort_as_usual()
    jax.distributed.shutdown()


def _patience() -> float:
    return PHASE_TIMEOUT if _group is None else _group.phase_timeout


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns waiting in vain into an error that says for what."""
    try:
        yield
    except TimeoutError as e:
        raise PeerLostError(f"the processes lost each other at {name!r}: {e} (--phase_timeout).") from e


def _may_come_of_others(error: BaseException) -> bool:
    """Whether an error, or one behind it, is of a kind that a peer's death causes."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, jax.errors.JaxRuntimeError) or "DEADLINE_EXCEEDED" in text or "UNAVAILABLE" in text:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


__all__ = [
    "barrier",
    "check_same",
    "connect",
    "consistency",
    "doing",
    "draw_seed",
    "fail",
    "failing",
    "finish",
    "from_process_0",
    "group",
    "is_writer",
    "stop_together",
]
