"""One run of a sweep, and its result."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perex_t5x.files import check_path, is_remote

DONE, FAILED, STOPPED, WAITING = "done", "failed", "stopped", "waiting"


@dataclass(frozen=True)
class Run:
    """A complete description of a run of `perex_t5x.train`.

    Attributes:
      name: of its folder.
      values: axis -> value.
      files: Gin files, in their order.
      bindings: of the sweep's configuration, then this run's own; all but MODEL_DIR.
      own_bindings: this run's own alone.
      batch_size, learning_rate, train_steps, seed: as they are in the run.
      examples: train_steps · batch_size.
      base_batch_size, base_learning_rate: from which they were scaled.
      group: the same for runs that differ in nothing but learning rate and seed.
      note: what could not be kept exactly; empty if all was.
      search_paths: further folders in which Gin files are searched.
      flags: further flags of `perex_t5x.train`, such as --tfds_data_dir=...
    """

    name: str
    values: Mapping[str, Any]
    files: tuple[str, ...]
    bindings: tuple[str, ...]
    own_bindings: tuple[str, ...]
    batch_size: int
    learning_rate: float | None
    train_steps: int
    seed: int
    examples: int
    base_batch_size: int | None = None
    base_learning_rate: float | None = None
    group: str = ""
    note: str = ""
    search_paths: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def folder(self, root: str) -> str:
        """Where the run writes, in the sweep's folder `root`; also with gs://..."""
        return f"{root.rstrip('/')}/runs/{self.name}"

    def command(self, root: str, python: str | None = None) -> list[str]:
        """The arguments of `python -m perex_t5x.train` for this run.

        >>> run = Run("b8_s0", {}, ("a.gin",), ("BATCH_SIZE = 8",), (), 8, 0.1, 5, 0, 40)
        >>> run.command("gs://bucket/sweep", "python")[3:]
        ['--gin_file=a.gin', '--gin_bindings=BATCH_SIZE = 8', "--gin_bindings=MODEL_DIR = 'gs://bucket/sweep/runs/b8_s0'"]
        """
        paths = [f"--gin_search_paths={','.join(self.search_paths)}"] if self.search_paths else []
        return [
            python or sys.executable,
            "-m",
            "perex_t5x.train",
            *paths,
            *(f"--gin_file={name}" for name in self.files),
            *(f"--gin_bindings={binding}" for binding in self.all_bindings(root)),
            *self.flags,
        ]

    def all_bindings(self, root: str) -> list[str]:
        """All bindings, with MODEL_DIR for the sweep's folder `root`."""
        return [*self.bindings, f"MODEL_DIR = {self.folder(root)!r}"]

    def described(self) -> dict[str, Any]:
        """Its entry in sweep.json."""
        return {
            "name": self.name,
            "values": dict(self.values),
            "files": list(self.files),
            "bindings": list(self.own_bindings),
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
            "train_steps": self.train_steps,
            "seed": self.seed,
            "examples": self.examples,
            **({"note": self.note} if self.note else {}),
        }


@dataclass(frozen=True)
class Result:
    """The result of a run: a row of results.csv, and its result.json.

    Attributes:
      status: done, failed, stopped or waiting.
      final: whether starting the sweep again would leave it as it is: done, or diverged.
      train_loss: per target token, averaged over the last log period.
      eval_loss: the last validation loss (`perex_t5x.metrics.loss_of`); of several tasks the mean.
      best_eval_loss: the smallest of the run.
      seconds: of the run, without waiting.
      error: why it failed.
    """

    name: str
    status: str = WAITING
    final: bool = False
    steps: int = 0
    examples_seen: int = 0
    train_loss: float | None = None
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    seconds: float = 0.0
    error: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def absolute(path: str) -> str:
    """The absolute path of a local folder; remote ones (gs://...) are returned unchanged."""
    check_path(path, "--dir")
    return path.rstrip("/") if is_remote(path) else os.path.abspath(os.path.expanduser(path))
