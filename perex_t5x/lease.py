"""One holder at a time of a folder, among processes and machines: a small file or object that only one process can have.

    with lease.held("gs://bucket/sweep/.lock", on_lost=stop.set):
        ...

Whoever holds it is named in it and renews it every `PERIOD` seconds. In a bucket it is made only if there is none
(ifGenerationMatch=0) and changed only by whoever knows its generation. On a file system the holder also locks the file
(flock), which the kernel releases when the process ends, however it ends.

A lease is taken over at once if its holder is known to be gone: a process of this machine that has ended, or one of an
earlier attempt of the same launch. One on another machine that has not been renewed for `STALE` seconds is taken over as
well; before that, `patient` ones wait until it has stood still for `SILENCE` seconds under their eyes, others are refused. A
live one is always refused. Whoever was suspended for so long that another has taken over learns that (`on_lost`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from absl import logging

from perex_t5x import buckets, files

PERIOD = 30.0  # seconds between renewals
STALE = 300.0  # seconds without one, by two machines' clocks; well above what these differ by
SILENCE = 100.0  # seconds without one, by this machine's clock alone
_POLL = 2.0  # seconds between looks at another's lease
LAUNCH, ATTEMPT = ("PEREX_T5X_LAUNCH", "PEREX_T5X_JOB"), "PEREX_T5X_ATTEMPT"  # set by launchers
# A file system without locks: NFS with `nolock`, Lustre without `flock`, some FUSE.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a lease, as it says itself.

    Attributes:
      host, process: its name and number.
      token: of this lease.
      since: when it was last written, in seconds since 1970.
      kernel: the boot of the machine, and the namespace in which `process` counts.
      born: when the process began, so that another one with its number is not taken for it.
      launch, attempt: set by launchers; a later attempt of a launch follows an earlier one that has ended.
    """

    host: str
    process: int
    token: str
    since: float
    kernel: str = ""
    born: str = ""
    launch: str = ""
    attempt: str = ""

    @classmethod
    def this_process(cls, token: str) -> Holder:
        launch = "/".join(os.environ.get(name, "") for name in LAUNCH) if os.environ.get(LAUNCH[0]) else ""
        process, attempt = os.getpid(), os.environ.get(ATTEMPT, "")
        return cls(socket.gethostname(), process, token, time.time(), _kernel(), _born(process) or "", launch, attempt)

    def __str__(self) -> str:
        return f"{self.process} on {self.host}"

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended."""
        here = Holder.this_process("")
        if self.launch and self.launch == here.launch and "" != self.attempt != here.attempt != "":
            return True
        if self.kernel != here.kernel if self.kernel else self.host != here.host:
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return bool(self.born) and self.born != _born(self.process)


def _kernel() -> str:
    """Which boot of which machine this is, and in which namespace processes are numbered; else its name."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} ?"


def _born(process: int) -> str | None:
    """When a process began, in ticks since the boot; None where that is not told."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


class HeldError(RuntimeError):
    """Another process holds the lease."""

    def __init__(self, holder: Holder):
        super().__init__(f"held by process {holder}")
        self.holder = holder


@contextlib.contextmanager
def held(path: str, on_lost: Callable[[], Any] | None = None, *, patient: bool = False) -> Iterator[None]:
    """Holds the lease at `path` in the block; raises `HeldError` if another process does. For the arguments see `Lease`."""
    lease = Lease(path, on_lost)
    lease.acquire(patient=patient)
    try:
        yield
    finally:
        lease.release()


class Lease:
    """A lease, to be acquired and released.

    Args:
      path: gs://BUCKET/NAME of an object, or a file, whose folder exists.
      on_lost: called from a thread if another process has taken over, such as after a machine slept for a long time.
    """

    def __init__(self, path: str, on_lost: Callable[[], Any] | None = None):
        self.path, self._on_lost = path, on_lost
        self._place: _Place = _Object(path) if files.is_remote(path) else _File(path)
        self._token = uuid.uuid4().hex
        self._version: Any = None
        self._ended = threading.Event()
        self._lost = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken over since it was acquired."""
        return self._lost.is_set()

    def acquire(self, *, patient: bool = False) -> None:
        """Raises `HeldError` if another process holds it.

        Args:
          patient: wait while that process may be gone: a machine that was preempted says nothing.
        """
        self._take(patient)
        self._ended.clear()
        self._lost.clear()
        self._thread = threading.Thread(target=self._renew_until_ended, daemon=True, name="lease")
        self._thread.start()

    def release(self) -> None:
        """Lets go of it, unless it is another's by now. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ended.set()
        thread.join()
        self._place.delete(self._version)

    def _take(self, patient: bool) -> None:
        seen: tuple[Any, float] | None = None  # a version, and since when it has not changed
        waits = False
        lost_races = 0
        while True:
            if self._write(None):
                return
            found = self._place.read()
            if found is None:  # let go of, between the two
                lost_races += 1
                if lost_races > 100:
                    raise HeldError(_STRANGE)
                time.sleep(0.05)
                continue
            holder, version, age, is_live = found
            if holder.token == self._token:  # the answer to our own request was lost
                self._version = version
                return
            now = time.monotonic()
            if seen is not None and seen[0] != version:  # renewed, or another was faster
                raise HeldError(holder)
            seen = seen or (version, now)
            if not is_live and (holder.is_gone or age > STALE or now - seen[1] > SILENCE):
                logging.info("taking over %s from process %s, which ended without a word", self.path, holder)
                if self._write(version):
                    return
                lost_races += 1
                if lost_races > 2:
                    raise HeldError(holder)
                seen = None
                continue
            if is_live or not patient:
                raise HeldError(holder)
            if not waits:
                waits = True
                logging.warning(
                    "%s is held by process %s, which may be gone: waiting for up to %d s for a sign of life",
                    self.path, holder, SILENCE,
                )  # fmt: skip
            time.sleep(min(_POLL, SILENCE / 4))

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(PERIOD):
            try:
                if not self._renew():
                    logging.warning("%s: another process has taken over from this silent one", self.path)
                    self._lost.set()
                    if self._on_lost is not None:
                        self._on_lost()
                    return
            except Exception as e:  # an outage: the next renewal may pass
                logging.warning("%s could not be renewed: %s", self.path, e)

    def _renew(self) -> bool:
        """False if another process has taken over."""
        if self._write(self._version):
            return True
        found = self._place.read()
        if found is None:  # removed by hand
            return self._write(None)
        holder, version, _, _ = found
        if holder.token != self._token:
            return False
        self._version = version
        return True

    def _write(self, version: Any) -> bool:
        text = json.dumps(dataclasses.asdict(Holder.this_process(self._token)))
        written = self._place.write(text, version)
        if written is None:
            return False
        self._version = written
        return True


def _parsed(text: bytes | str) -> Holder | None:
    """None for what none of us has written."""
    try:
        content = json.loads(text)
        return Holder(
            **{field.name: content[field.name] for field in dataclasses.fields(Holder) if field.name in content}
        )
    except (ValueError, TypeError):
        return None


_STRANGE = Holder("?", 0, "", 0.0)  # of a file that is not ours: as good as stale


class _Place(Protocol):
    """Where a lease is kept. A version names what was read or written; None: that there is nothing."""

    def write(self, text: str, version: Any) -> Any | None:
        """The new version; None, and nothing is changed, if what is there is not `version`."""

    def read(self) -> tuple[Holder, Any, float, bool] | None:
        """Holder, version, seconds since it was written, and whether the holder is known to live; None: nothing there."""

    def delete(self, version: Any) -> None:
        """Removes it if it is `version`; errors do not matter: it is stale in a few minutes."""


class _Object:
    def __init__(self, path: str):
        bucket, self._name = buckets.split(path)
        self._bucket = buckets.client().bucket(bucket)

    def write(self, text: str, version: int | None) -> int | None:
        from google.api_core import exceptions

        blob = self._bucket.blob(self._name)  # a new one each time: it would ask for the generation that it has seen
        try:
            blob.upload_from_string(text, if_generation_match=version or 0, **buckets.request_options())
        except exceptions.PreconditionFailed:
            return None
        return blob.generation

    def read(self) -> tuple[Holder, int, float, bool] | None:
        from google.api_core import exceptions

        blob, options = self._bucket.blob(self._name), buckets.request_options()
        try:
            blob.reload(**options)
            text = blob.download_as_bytes(if_generation_match=blob.generation, **options)
            generation, written = blob.generation, blob.updated
        except (exceptions.NotFound, exceptions.PreconditionFailed):
            return None
        holder = _parsed(text)
        if holder is None:
            return _STRANGE, generation, STALE + 1, False
        return holder, generation, (datetime.datetime.now(datetime.UTC) - written).total_seconds(), False

    def delete(self, version: int) -> None:
        from google.api_core import exceptions

        with contextlib.suppress(exceptions.GoogleAPIError, OSError):
            self._bucket.blob(self._name).delete(if_generation_match=version, **buckets.request_options())


class _File:
    """A file whose holder keeps it open and locked, and touches it to renew it. Its version is its content and its time."""

    def __init__(self, path: str):
        self._path = path
        self._file: IO[str] | None = None  # ours while we hold it

    def write(self, text: str, version: tuple[str, int] | None) -> tuple[str, int] | None:
        if self._file is not None and self._is_still(self._file):  # ours: nobody else can have changed it
            os.utime(self._file.fileno())
            return self._version(self._file)
        self._close()
        file = self._open_locked()
        if file is None:
            return None
        found = self._version(file)
        expected = not found[0] if version is None else found == version
        if not expected:
            file.close()
            return None
        file.seek(0)
        file.truncate()
        file.write(text)
        file.flush()
        self._file = file
        return self._version(file)

    def read(self) -> tuple[Holder, tuple[str, int], float, bool] | None:
        for _ in range(20):
            try:
                with open(self._path, encoding="utf-8", errors="replace") as file:
                    version, locked = self._version(file), _lock(file, fcntl.LOCK_SH)
            except FileNotFoundError:
                return None
            holder, is_live = _parsed(version[0]), locked is False
            if holder is not None or not is_live:
                break
            time.sleep(0.05)  # its holder is writing it
        if holder is None:
            return (_STRANGE, version, STALE + 1, is_live) if version[0] or is_live else None
        age = time.time() - version[1] / 1e9
        if locked and holder.kernel and holder.kernel.split()[0] == _kernel().split()[0]:
            age = STALE + 1  # no process of this machine has locked it, in whichever container
        return holder, version, age, is_live

    def delete(self, version: tuple[str, int]) -> None:
        if self._file is not None and self._is_still(self._file):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._close()

    @staticmethod
    def _version(file: IO[str]) -> tuple[str, int]:
        file.seek(0)
        return file.read(), os.fstat(file.fileno()).st_mtime_ns

    def _open_locked(self) -> IO[str] | None:
        """The file, made if there is none, locked for us; None if another process has locked it."""
        while True:
            file = open(self._path, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115, kept open
            if _lock(file, fcntl.LOCK_EX) is False:
                file.close()
                return None
            if self._is_still(file):  # not removed between the two
                file.seek(0)
                return file
            file.close()

    def _is_still(self, file: IO[str]) -> bool:
        """Whether an open file is the one under our name."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _lock(file: IO[str], kind: int) -> bool | None:
    """Whether the file is now locked; False: by another process; None: the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in _NO_LOCKS:
            return None
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
