"""Which of how many processes this one is: from flags, from the environment, or from the cluster it runs on."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from perex_t5x.distributed import store
from perex_t5x.errors import ConfigError, UnreachableError

_FLAGS = ("--coordinator_address", "--process_count", "--process_index")
_VARIABLES = (
    ("JAX_COORDINATOR_ADDRESS",),
    ("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT"),
    ("JAX_PROCESS_ID", "JAX_PROCESS_INDEX"),
)
_ATTEMPT = ("PEREX_T5X_ATTEMPT", "PEREX_T5X_JOB")  # which start of the hosts, set by launchers, and which of its jobs
_PAUSE = 2.0  # seconds between questions to a cluster that fails


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """This process among the others.

    Attributes:
      address: host:port of process 0.
      count: how many processes there are.
      index: which of them this one is.
      source: who said so, for messages.
      local_device_ids: the devices that a cluster gives to this process; None: all it sees.
      attempt: the same in all processes that were started together, and in no others; "" where no launcher says it.
    """

    address: str
    count: int
    index: int
    source: str = "flags"
    local_device_ids: Any = None
    attempt: str = ""

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def find(
    address: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    detection: str = "auto",
    timeout: int = 300,
    environ: Mapping[str, str] = os.environ,
    detect: Callable[..., tuple[Any, ...]] = store.detect_cluster,
) -> ProcessInfo | None:
    """Which process of a run this is; None if it is alone.

    A flag comes before the environment, and the environment before the cluster.

    >>> find("localhost:1234", environ={"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, detection="off").index
    1
    >>> find(environ={}, detection="off") is None
    True

    Args:
      address, count, index: of the flags.
      detection: 'auto' asks the cluster for what is not given; 'off' does not; else a method of JAX's to use.
      timeout: seconds that a cluster may take to answer.
      environ, detect: other ones, for tests.
    """
    if not detection.strip():  # JAX would take it for 'auto', and then for the name of a cluster that has to be there
        raise ConfigError(
            f"--cluster_detection={detection!r}: give auto, off, or a method that JAX knows, such as mpi4py."
        )
    given: list[Any] = [address, count, index]
    sources: list[str] = list(_FLAGS)
    for i, names in enumerate(_VARIABLES):
        name = next((n for n in names if environ.get(n)), None)
        if given[i] is None and name is not None:
            given[i] = environ[name] if i == 0 else _whole_number(name, environ[name])
            sources[i] = name
    if given[1] == 1 and given[2] in (None, 0):
        return None
    ids, way = None, "flags or the environment"
    if None in given and detection != "off":
        *found, ids = _detected(detect, detection, timeout)
        if found[1] is None and detection != "auto":
            raise ConfigError(f"--cluster_detection={detection}: JAX finds no such cluster around this process.")
        if found[1] is not None:
            if all(x is None for x in given):
                way = "the cluster"
            given = [theirs if own is None else own for own, theirs in zip(given, found, strict=True)]
    if all(x is None for x in given) or (given[1] == 1 and given[2] in (None, 0)):
        return None
    missing = [f"{f} (or {' or '.join(v)})" for f, v, x in zip(_FLAGS, _VARIABLES, given, strict=True) if x is None]
    if missing:
        had = [f"{s} = {x}" for s, x in zip(sources, given, strict=True) if x is not None]
        raise ConfigError(
            f"{_FLAGS[0]}, {_FLAGS[1]} and {_FLAGS[2]} belong together: give all three. Given: {', '.join(had)}; missing: "
            f"{', '.join(missing)}."
        )
    attempt = "/".join(environ[name] for name in _ATTEMPT if environ.get(name)) if environ.get(_ATTEMPT[0]) else ""
    return _checked(ProcessInfo(str(given[0]), given[1], given[2], way, ids, attempt), sources)


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name} = {text!r} is not a whole number.") from None


def _detected(detect: Callable[..., tuple[Any, ...]], detection: str, timeout: int) -> tuple[Any, ...]:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return detect(None if detection == "auto" else detection, timeout)
        except Exception as e:  # whatever a scheduler's interface may raise
            message = (
                f"this process seems to run on a cluster, but asking it for the other processes failed: {e}. Give "
                f"{', '.join(_FLAGS)}, or --cluster_detection=off to run alone."
            )
            if not isinstance(e, RuntimeError | OSError):
                raise ConfigError(message) from e
            # A metadata server that does not answer, a name that is not known yet: another time it may.
            if time.monotonic() + _PAUSE > deadline:
                raise UnreachableError(message) from e
            logging.warning("asking the cluster for the other processes failed, and is tried again: %s", e)
            time.sleep(_PAUSE)


def _checked(info: ProcessInfo, sources: list[str]) -> ProcessInfo:
    host, _, port = info.address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{sources[0]} = {info.address!r}: write HOST:PORT of process 0, such as 10.0.0.1:8476.")
    if info.count < 1:
        raise ConfigError(f"{sources[1]} = {info.count}: there is at least one process.")
    if not 0 <= info.index < info.count:
        raise ConfigError(
            f"{sources[2]} = {info.index} with {sources[1]} = {info.count}: indices go from 0 to {info.count - 1}."
        )
    return info
