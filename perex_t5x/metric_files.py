"""The files of a run's metrics: lines of JSON, and TensorBoard's event files. Written in the background, read as one.

On a file system the lines are appended to `metrics.jsonl`. An object store cannot append: there they are in parts,
`metrics/<first step>.jsonl`. A part is uploaded again with each few seconds' new lines while it is small and young, and then
closed, so that neither the number of objects nor the bytes uploaded grow without bound.

`metrics.crc32c` has the checksum of each line of `metrics.jsonl`, so that one that has changed is not taken for a
measurement. It is written before the line: where this file is, a line whose checksum is not in it is not as it was written.
Cloud Storage keeps checksums of its objects itself.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from absl import logging
from etils import epath

from perex_t5x import checksums, files
from perex_t5x.background import BackgroundWriter, retried
from perex_t5x.errors import first_line, writing_failed

FILE, PARTS, CHECKSUMS = "metrics.jsonl", "metrics", "metrics.crc32c"
_PART = re.compile(r"(\d{10,})(_\d+)?\.jsonl")


class MetricsWriter:
    """Writes scalars to TensorBoard (`model_dir/<name>/`) and, one line per call, to the run's lines, from a thread.

    A call costs the caller microseconds, unless so much is waiting to be written that the queue is full: then it waits, and
    nothing is dropped. What could not be written is raised by whatever is called next. Only process 0 writes; on the
    others every call is a no-op.

    Args:
      model_dir: the run's folder.
      enabled: whether this process writes.
    """

    def __init__(self, model_dir: str, enabled: bool = True):
        self._model_dir, self._enabled = model_dir, enabled
        self._lines, self._events = _Lines(model_dir), _Events(model_dir)
        self._thread = BackgroundWriter("metrics", self._write_due, self._explained)

    def write(self, name: str, step: int, scalars: Mapping[str, float]) -> None:
        """Writes scalars of a step under a folder's name ('train', 'training_eval/<task>')."""
        if self._enabled:
            values = {key: float(value) for key, value in scalars.items()}
            self._thread.put(functools.partial(self._add, name, step, values))

    def put(self, job: Callable[[], object]) -> None:
        """Has something else written by the same thread, in its turn; errors that pass are tried again."""
        if self._enabled:
            self._thread.put(functools.partial(retried, job, f"writing to {self._model_dir}"))

    def raise_errors(self) -> None:
        """Raises the error of an earlier write, if there was one; does not wait."""
        self._thread.raise_errors()

    def flush_lines(self) -> None:
        """Waits until all lines are stored; event files follow without being waited for."""
        if self._enabled:
            self._thread.put(functools.partial(self._lines.write, now=True))
            self._thread.flush()
            self._thread.put(functools.partial(self._events.write, now=True))

    def flush(self) -> None:
        """Waits until everything is stored."""
        if self._enabled:
            self.flush_lines()
            self._thread.flush()

    def forget_after(self, step: int) -> int:
        """Drops the lines of steps after `step`, which a resumed run writes again.

        Returns:
          The last step that had a line, or `step` if that is later.
        """
        if not self._enabled:
            return step
        try:
            return retried(lambda: forget_after(self._model_dir, step), f"rewriting the metrics in {self._model_dir}")
        except Exception as e:
            raise self._explained(e) from e

    def names_at(self, step: int) -> list[str]:
        """The folders' names in the stored lines of a step."""
        return sorted({str(row.get("name")) for row in self._read() if row["step"] == step})

    def rows_of(self, names: Collection[str]) -> list[tuple[str, int, dict[str, Any]]]:
        """(name, step, values) of the stored lines under these folders' names."""
        rows = [row for row in self._read() if row.get("name") in names]
        return [(row["name"], row["step"], {k: v for k, v in row.items() if k not in ("name", "step")}) for row in rows]

    def _read(self) -> list[dict[str, Any]]:
        try:
            return retried(lambda: read_rows(self._model_dir), f"reading the metrics in {self._model_dir}")
        except Exception as e:
            raise self._explained(e) from e

    def close(self) -> None:
        """Writes everything, and ends the thread."""
        try:
            if self._enabled:
                self.flush()
        finally:
            self._thread.close()
            self._events.close()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _add(self, name: str, step: int, values: Mapping[str, float]) -> None:
        self._lines.add(
            step, json.dumps({"step": step, "name": name, **{k: _json_number(v) for k, v in values.items()}})
        )
        self._events.add(name, step, values)

    def _write_due(self) -> float | None:
        waits = [wait for wait in (self._lines.write(), self._events.write()) if wait is not None]
        return min(waits, default=None)

    def _explained(self, e: Exception) -> Exception:
        text = getattr(e, "strerror", None) or first_line(e)
        return writing_failed(
            f"cannot write metrics to {self._lines.place}: {text}. Free some space or choose another MODEL_DIR; the run "
            "resumes from its last checkpoint when started again.",
            e,
        )


class _Lines:
    """The lines of a run, as they are added."""

    period = 10.0  # seconds between uploads of a part; the store takes about one write per second for each object
    most_bytes = 512 * 1024  # of a part
    most_seconds = 1800.0  # that a part is added to

    def __init__(self, model_dir: str):
        self._remote = files.is_remote(model_dir)
        self._folder = model_dir
        self.place = os.path.join(model_dir, PARTS if self._remote else FILE)
        self._waiting: list[tuple[int, str]] = []
        self._part: str | None = None  # the path of the open part
        self._text, self._begun, self._uploaded = "", 0.0, -math.inf

    def add(self, step: int, line: str) -> None:
        self._waiting.append((step, line + "\n"))

    def write(self, now: bool = False) -> float | None:
        """Writes what is due, or everything; returns the seconds until the rest is due."""
        if not self._waiting:
            return None
        if not self._remote:
            lines = [line for _, line in self._waiting]
            for path, text in (
                (os.path.join(self._folder, CHECKSUMS), _checksums(lines)),
                (self.place, "".join(lines)),
            ):
                with open(path, "a", encoding="utf-8") as f:
                    f.write(text)
            self._waiting = []
            return None
        wait = self._uploaded + self.period - time.monotonic()
        if wait > 0 and not now:
            return wait
        if self._part is None:
            self._part, self._begun = self._new_part(self._waiting[0][0]), time.monotonic()
        self._text += "".join(line for _, line in self._waiting)
        self._waiting = []
        part = self._part
        retried(lambda: files.write_atomically(part, self._text), f"writing {part}")
        self._uploaded = time.monotonic()
        if len(self._text) > self.most_bytes or self._uploaded - self._begun > self.most_seconds:
            self._part, self._text = None, ""
        return None

    def _new_part(self, step: int) -> str:
        """A path that no part has: a resumed run begins with the step at which the last one may have begun a part."""
        number = 0
        while True:
            name = f"{step:010d}{f'_{number:03d}' if number else ''}.jsonl"
            path = epath.Path(self.place) / name
            if not retried(path.exists, f"reading {self.place}"):
                return os.fspath(path)
            number += 1


class _Events:
    """TensorBoard's event files. In an object store each flush uploads a file from its beginning: it is done rarely, and a
    file that has grown is followed by another one."""

    local_period, remote_period = 2.0, 60.0  # seconds between flushes
    most_bytes = 4 * 1024 * 1024  # of a file in an object store

    def __init__(self, model_dir: str):
        self._model_dir, self._remote = model_dir, files.is_remote(model_dir)
        self._writers: dict[str, Any] = {}
        self._bytes: dict[str, int] = {}
        self._flushed, self._dirty = -math.inf, False

    def add(self, name: str, step: int, values: Mapping[str, float]) -> None:
        import tensorflow as tf
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        if name not in self._writers:
            folder = os.path.join(self._model_dir, name)
            # Flushed by `write` alone: by default it would be after every tenth scalar. TensorFlow counts microseconds in
            # 32 bits, so half an hour is the most.
            make = functools.partial(tf.summary.create_file_writer, folder, max_queue=10**6, flush_millis=1_800_000)
            self._writers[name], self._bytes[name] = retried(make, f"writing {folder}"), 0
        # One event for all of them: serialised messages, joined, are the message with all of their values.
        text = b"".join(scalar_pb(key, value).SerializeToString() for key, value in values.items())
        self._writers[name].set_as_default()  # of this thread; `as_default` would flush at the end of its block
        tf.summary.experimental.write_raw_pb(text, step)
        self._bytes[name] += len(text)
        self._dirty = True

    def write(self, now: bool = False) -> float | None:
        """Flushes if it is due; returns the seconds until it is."""
        if not self._dirty:
            return None
        wait = self._flushed + (self.remote_period if self._remote else self.local_period) - time.monotonic()
        if wait > 0 and not now:
            return wait
        for name, writer in list(self._writers.items()):
            retried(writer.flush, f"writing {os.path.join(self._model_dir, name)}")
            if self._remote and self._bytes[name] > self.most_bytes:
                self._writers.pop(name).close()
        self._flushed, self._dirty = time.monotonic(), False
        return None

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}


def _json_number(value: float) -> float | str:
    """JSON has no NaN; a string keeps the line readable by every parser."""
    return value if math.isfinite(value) else str(value)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_rows(model_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All metrics of a run, a dict for each line, in order; a line that cannot be read, such as a half-written one, or has
    changed since it was written, is left out, and a run without metrics has none.

    Args:
      model_dir: the run's folder, local or remote; its lines may be in one file or in parts.
    """
    rows = [_row(line) for line in read_text(model_dir).splitlines()]
    return [row for row in rows if row is not None]


def read_text(model_dir: str | os.PathLike[str]) -> str:
    """All lines of a run's metrics as they are stored, in order, but those that have changed since they were written; ""
    where there are none."""
    paths = stored_files(model_dir)
    with ThreadPoolExecutor(16) as pool:  # a long run in a bucket has hundreds of parts
        texts = list(pool.map(_read_unchanged, paths))
    if len(texts) < 2 or paths[0].name != FILE:
        return "".join(texts)
    # Both kinds: begun by an earlier version, or resumed in a folder that was copied from a bucket.
    lines = "".join(text if text.endswith("\n") or not text else text + "\n" for text in texts).splitlines(
        keepends=True
    )
    return "".join(sorted(lines, key=_step_of))


def newest_text(model_dir: str | os.PathLike[str], size: int = 20_000) -> str:
    """The end of the lines, at least one if there is one that is not longer than `size`; may begin within a line."""
    paths = stored_files(model_dir)
    if not paths:
        return ""
    if files.is_remote(model_dir):
        return _read(paths[-1])[-size:]
    with open(max(paths, key=os.path.getmtime), "rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - size))
        return f.read().decode("utf-8", errors="replace")


def stored_files(model_dir: str | os.PathLike[str]) -> list[epath.Path]:
    """The files that hold a run's lines, in order."""
    folder = epath.Path(model_dir)
    whole, parts = folder / FILE, folder / PARTS
    names = sorted(p.name for p in parts.iterdir() if _PART.fullmatch(p.name)) if parts.is_dir() else []
    found = [whole, *(parts / name for name in names)]
    return [path for path in found if (path.is_file() if files.is_remote(path) else os.path.isfile(path))]  # no pipe


def forget_after(model_dir: str | os.PathLike[str], step: int) -> int:
    """Drops the lines of steps after `step`, and those that cannot be read or have changed, of which a copy is kept.

    Returns:
      The last step that had a line, or `step` if that is later.
    """
    if not files.is_remote(model_dir):
        files.clear_way(os.path.join(model_dir, FILE))
        files.clear_way(os.path.join(model_dir, CHECKSUMS))
    paths, last = stored_files(model_dir), float(step)
    for i, path in enumerate(paths):
        first = _first_step(path)
        if i + 1 < len(paths) and path.name != FILE and (_first_step(paths[i + 1]) or 0) <= step:
            continue  # steps do not decrease from part to part, so all of these are kept
        stored = _read(path).splitlines(keepends=True)
        lines = [line for line in _unchanged(path, stored) if _row(line) is not None]
        if strange := _whole(stored) - _whole(lines):
            copy = files.free_path(path, "damaged")
            path.copy(copy)
            logging.warning(
                "%s: %d lines are not as they were written, and are dropped; kept as %s", path, strange, copy
            )
        last = max([last, *map(_step_of, lines)])
        if first is not None and first > step:
            path.unlink()
            continue
        # A line without its end, as a full disk leaves it, would run into the next one that is written.
        kept = [line if line.endswith("\n") else f"{line.rstrip()}\n" for line in lines if _step_of(line) <= step]
        if kept != stored:
            files.write_atomically(path, "".join(kept))
        if path.name == FILE and not files.is_remote(path):
            # After its lines: for a moment there are checksums of lines that are gone, and not the opposite.
            files.write_atomically(path.parent / CHECKSUMS, _checksums(kept))
    return int(last)


def _first_step(path: epath.Path) -> int | None:
    match = _PART.fullmatch(path.name)
    return int(match[1]) if match else None


def _read(path: epath.Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")


def _read_unchanged(path: epath.Path) -> str:
    stored = _read(path).splitlines(keepends=True)
    lines = _unchanged(path, stored)
    if changed := _whole(stored) - _whole(lines):
        logging.warning("%s: %d lines have changed since they were written, and are left out", path, changed)
    return "".join(lines)


def _whole(lines: Sequence[str]) -> int:
    """How many there are, without the last one if it is half-written."""
    return sum(line.endswith("\n") for line in lines[-1:]) + len(lines[:-1])


def _unchanged(path: epath.Path, lines: list[str]) -> list[str]:
    """The lines whose checksums are recorded; all of them where nothing is."""
    recorded = path.parent / CHECKSUMS
    if path.name != FILE or not recorded.is_file():  # a run's of an earlier version
        return lines
    known = _read(recorded).splitlines()
    if len(known) < _whole(lines):  # they are written first, so it is this file that is damaged, and tells nothing
        return lines
    known = set(known)
    return [line for line in lines if _checksum(line) in known]


def _checksums(lines: Sequence[str]) -> str:
    return "".join(f"{_checksum(line)}\n" for line in lines)


def _checksum(line: str) -> str:
    return checksums.of_bytes(line.rstrip("\n").encode())


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        is_row = isinstance(row, dict) and isinstance(row.get("name", ""), str) and not isinstance(row["step"], bool)
        return row if is_row and math.isfinite(row["step"]) else None
    except (
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
    ):  # also in files that something else has written
        return None


def _step_of(line: str) -> float:
    row = _row(line)
    return math.inf if row is None else row["step"]
