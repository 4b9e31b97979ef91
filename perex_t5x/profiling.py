"""What a run shows of its own program on demand: a profiler's trace of some steps, and the compiled step as text."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
from absl import logging
from etils import epath

from perex_t5x import files
from perex_t5x.background import BackgroundWriter, retried
from perex_t5x.errors import writing_failed

PROFILE, HLO = "profile", "hlo"


class Profiler:
    """Traces some steps into `model_dir/profile`.

    The profiler writes to local disk; where the run's folder is remote, its files are then uploaded by a thread.

    Args:
      model_dir: the run's folder.
      steps: (first, last), counted from 1; None: none.
    """

    def __init__(self, model_dir: str, steps: tuple[int, int] | None):
        self._target, self._steps = os.path.join(model_dir, PROFILE), steps
        self._folder: str | None = None  # that is being traced into
        self._uploads = BackgroundWriter("profile", explained=self._explained)

    def starts(self, step: int) -> bool:
        """Starts a trace if `step` is the first one to trace; to be called before it is dispatched."""
        if self._steps is None or self._folder is not None or not self._steps[0] <= step <= self._steps[1]:
            return False
        self._folder = tempfile.mkdtemp(prefix="profile-") if files.is_remote(self._target) else self._target
        jax.profiler.start_trace(self._folder)
        return True

    def is_over(self, step: int) -> bool:
        """Whether a trace is running that `step` does not belong to; what is traced has to be awaited before `stop`."""
        return self._folder is not None and self._steps is not None and step > self._steps[1]

    def stop(self) -> None:
        """Ends the trace, if one is running."""
        if self._folder is None:
            return
        folder, self._folder = self._folder, None
        jax.profiler.stop_trace()
        if folder != self._target:
            self._uploads.put(lambda: _move(folder, self._target))

    def raise_errors(self) -> None:
        """Raises the error of an upload, if there was one; does not wait."""
        self._uploads.raise_errors()

    def close(self) -> None:
        """Ends the trace, and waits until it is stored."""
        self.stop()
        self._uploads.close()

    def _explained(self, e: Exception) -> Exception:
        return writing_failed(f"cannot write the profile to {self._target}: {str(e).strip().partition(chr(10))[0]}", e)


def _move(folder: str, target: str) -> None:
    try:
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                goal = epath.Path(target) / path.relative_to(folder).as_posix()
                retried(lambda path=path, goal=goal: goal.write_bytes(path.read_bytes()), f"writing {goal}")
        logging.info("the profile is in %s", target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_program(model_dir: str, lowered: Any, compiled: Any = None) -> None:
    """Writes `model_dir/hlo`: StableHLO as it goes into the compiler, and the optimised HLO that comes out, once it has."""
    folder = os.path.join(model_dir, HLO)
    _write(os.path.join(folder, "step.stablehlo.mlir"), lowered.as_text())
    if compiled is not None:
        _write(os.path.join(folder, "step.optimized_hlo.txt"), compiled.as_text())


def _write(path: str, text: str) -> None:
    retried(lambda: files.write_atomically(path, text), f"writing {path}")
