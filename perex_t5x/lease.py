"""One holder at a time, among machines: a small object in a bucket that only one process can create.

    with lease.held("gs://bucket/sweep/.lock", on_lost=stop.set):
        ...

The object is made only if there is none (ifGenerationMatch=0) and renewed every `PERIOD` seconds. One that has not been
renewed for `STALE` seconds, or whose process on this machine is gone, is taken over; whoever then comes back learns that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from perex_t5x import buckets

PERIOD = 30.0  # seconds between renewals
STALE = 300.0  # seconds without one; well above what clocks of two machines differ by


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a lease, as its object says."""

    host: str
    process: int
    token: str
    since: float

    def __str__(self) -> str:
        return f"{self.process} on {self.host}"

    @property
    def is_gone(self) -> bool:
        """Whether it was a process of this machine that has ended."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


class HeldError(RuntimeError):
    """Another process holds the lease."""

    def __init__(self, holder: Holder):
        super().__init__(f"held by process {holder}")
        self.holder = holder


@contextlib.contextmanager
def held(path: str, on_lost: Callable[[], Any] | None = None) -> Iterator[None]:
    """Holds the lease at `path` in the block; raises `HeldError` if another process does.

    Args:
      path: gs://BUCKET/NAME of the object.
      on_lost: called from a thread if another process has taken over, such as after a machine slept for a long time.
    """
    bucket, name = buckets.split(path)
    lease = _Lease(buckets.client().bucket(bucket).blob(name))
    lease.acquire()
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(PERIOD):
            try:
                if not lease.renew():
                    logging.warning("%s: another process has taken over, since this one was silent for too long", path)
                    if on_lost is not None:
                        on_lost()
                    return
            except Exception as e:  # an outage: the next renewal may pass
                logging.warning("%s could not be renewed: %s", path, e)

    thread = threading.Thread(target=renew, daemon=True, name="lease")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        lease.release()


class _Lease:
    def __init__(self, blob: Any):
        self._blob, self._token = blob, uuid.uuid4().hex
        self._generation = 0

    def acquire(self) -> None:
        for _ in range(3):  # a former holder may let go, or another may come, between the answer and the next request
            if self._write(0):
                return
            found = self._read()
            if found is None:
                continue
            holder, generation, age = found
            if holder.token == self._token:  # the answer to our own request was lost
                self._generation = generation
                return
            if not (holder.is_gone or age > STALE):
                raise HeldError(holder)
            logging.info("taking over from process %s, which ended without a word", holder)
            if self._write(generation):
                return
        raise HeldError(holder)

    def renew(self) -> bool:
        """False if another process has taken over."""
        if self._write(self._generation):
            return True
        found = self._read()
        if found is None:  # removed by hand
            return self._write(0)
        holder, self._generation, _ = found
        return holder.token == self._token

    def release(self) -> None:
        from google.api_core import exceptions

        with contextlib.suppress(exceptions.GoogleAPIError, OSError):  # gone, another's, or stale in a few minutes
            self._blob.delete(if_generation_match=self._generation, **buckets.request_options())

    def _write(self, generation: int) -> bool:
        """Whether the object had this generation, and is now ours."""
        from google.api_core import exceptions

        holder = Holder(socket.gethostname(), os.getpid(), self._token, time.time())
        try:
            self._blob.upload_from_string(
                json.dumps(dataclasses.asdict(holder)), if_generation_match=generation, **buckets.request_options()
            )
        except exceptions.PreconditionFailed:
            return False
        self._generation = self._blob.generation
        return True

    def _read(self) -> tuple[Holder, int, float] | None:
        """Holder, generation and seconds since the last renewal; None where there is no lease."""
        from google.api_core import exceptions

        options = buckets.request_options()
        try:
            self._blob.reload(**options)
            text = self._blob.download_as_bytes(if_generation_match=self._blob.generation, **options)
            generation, written = self._blob.generation, self._blob.updated
        except (exceptions.NotFound, exceptions.PreconditionFailed):
            return None
        try:
            holder = Holder(**json.loads(text))
        except (ValueError, TypeError):  # not ours: as good as stale
            return Holder("?", 0, "", 0.0), generation, STALE + 1
        return holder, generation, (datetime.datetime.now(datetime.UTC) - written).total_seconds()
