"""Storage that fails: a disk of its own, which can be full, and a bucket, which refuses, stalls and forgets.

The bucket is in the stand-in for Cloud Storage that the tests have (`tests/standins/cloud_storage.py`), so it is there in a
checkout alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import perex_t5x
from perex_t5x import checkpoint_files
from perex_t5x.chaos.runs import CHECKPOINTS, Run, SkippedError

_DISK = 24  # MiB
_LEFT_FREE = 64 * 1024  # bytes of a full disk: metrics fit for a while, checkpoints do not
_FILLER = "filler"
# Shorter than those of `perex_t5x.buckets`, so that an outage is over in seconds.
_LIMITS = {
    "GCS_REQUEST_IDLE_TIMEOUT_SECS": "2",
    "GCS_RETRY_CONFIG_MAX_RETRIES": "3",
    "GCS_RETRY_CONFIG_MAX_DELAY_TIME_US": "300000",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "2",
}


# --- a disk -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def disk(at: Path) -> Iterator[Path]:
    """A small file system of its own, in memory, mounted at a new folder; unmounted in the end."""
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}m", "tmpfs", str(at)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        at.rmdir()
        raise SkippedError("no file system can be mounted here")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)
        at.rmdir()


def fill(at: Path) -> None:
    """Fills a disk up to a few bytes."""
    with open(at / _FILLER, "wb", buffering=0) as f, contextlib.suppress(OSError):
        while f.write(bytes(_LEFT_FREE)):
            pass
    os.truncate(at / _FILLER, max(0, os.path.getsize(at / _FILLER) - _LEFT_FREE))


def empty(at: Path) -> None:
    """Takes back what `fill` did."""
    (at / _FILLER).unlink(missing_ok=True)


# --- a bucket ---------------------------------------------------------------------------------------------------------


class Buckets:
    """Buckets of a stand-in for Cloud Storage, which is started with the first and ends with `close`."""

    def __init__(self) -> None:
        self._running = contextlib.ExitStack()
        self._make: Any = None

    def make(self) -> Any:
        """An empty bucket: see `CloudStorage` in `tests/standins/cloud_storage.py`."""
        if self._make is None:
            self._make = self._running.enter_context(_stand_in().running())
        made = self._make()
        made.environment |= _LIMITS
        return made

    def close(self) -> None:
        self._running.close()


def _stand_in() -> Any:
    path = Path(perex_t5x.__file__).parents[1] / "tests" / "standins" / "cloud_storage.py"
    if not path.exists():
        raise SkippedError("the stand-in for Cloud Storage is in a checkout's tests, not in the package")
    spec = importlib.util.spec_from_file_location("cloud_storage_stand_in", path)
    assert spec is not None and spec.loader is not None  # of a file that is there
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy(bucket: Any, folder: Path) -> None:
    """Copies the run's objects, as they are, into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in bucket.objects("run/"):
        if not name.endswith("/"):  # marks of folders
            path = folder / name.removeprefix("run/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bucket.get(name))


def wait_for_checkpoint(run: Run, rng: random.Random) -> str:
    """Until one of the first checkpoints is committed to the bucket."""
    step = rng.choice(CHECKPOINTS[:-1])
    mark = f"run/{checkpoint_files.PREFIX}_{step}/commit_success.txt"
    run.wait_for(f"checkpoint_{step}", lambda _: mark in run.place.bucket.objects(mark))
    return f"checkpoint_{step}"


def failing(what: str, **faults: Any) -> Callable[[Run, random.Random], str]:
    """Faults from the run's first request to its end."""

    def act(run: Run, rng: random.Random) -> str:
        run.place.bucket.faults(**faults)
        return what

    return act


def failing_later(what: str, **faults: Any) -> Callable[[Run, random.Random], str]:
    """Faults from a committed checkpoint to the run's end."""

    def act(run: Run, rng: random.Random) -> str:
        moment = wait_for_checkpoint(run, rng)
        run.place.bucket.faults(**faults)
        return f"{what} after {moment}"

    return act
