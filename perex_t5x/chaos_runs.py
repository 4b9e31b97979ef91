"""The runs of `python -m perex_t5x.chaos`: a small model in several settings, each trial's processes found by a mark."""

from __future__ import annotations

import dataclasses
import glob
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from perex_t5x.cli import subprocesses

MARK = "PEREX_T5X_CHAOS"  # in the environment of all processes of a trial
_PERIOD = 0.002  # seconds between looks at a run's folder
CHECKPOINTS, LOGGED = range(8, 25, 8), range(3, 25, 3)  # steps of the small run
_SMALL_RUN = {
    "MIXTURE_OR_TASK_NAME": "python_stdlib_lm",
    "TASK_FEATURE_LENGTHS": "{'targets': 16}",
    "TRAIN_STEPS": CHECKPOINTS[-1],
    "BATCH_SIZE": 4,
    "RANDOM_SEED": 7,
    "DROPOUT_RATE": 0.1,
    "WARMUP_STEPS": 5,
    "EVAL_PERIOD": CHECKPOINTS.step,
    "EVAL_STEPS": 1200,  # long enough to be killed in
    "train/utils.DatasetConfig.seed": 3,
    "train/utils.DatasetConfig.split": "validation",  # the smaller one
    "utils.SaveCheckpointConfig.period": CHECKPOINTS.step,
    "train_script.train.stats_period": LOGGED.step,  # so that checkpoints are between two lines
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a run is started: its feed, its processes, and on how many devices it resumes."""

    feed: str = "cached"
    processes: int = 1
    devices_later: int = 1

    def command(self, folder: Path) -> list[str]:
        """The same each time."""
        bindings = {**_SMALL_RUN, "train/utils.DatasetConfig.feed": self.feed, "MODEL_DIR": folder}
        arguments = ["--gin_file=models/nano.gin", "--gin_file=runs/pretrain.gin"]
        arguments += [f"--gin.{name}={value}" for name, value in bindings.items()]
        if self.processes == 1:
            return [sys.executable, "-m", "perex_t5x.train", *arguments]
        local = ["perex_t5x.launching.local", f"--processes={self.processes}", "--devices=1"]
        return [sys.executable, "-m", *local, "--", *arguments]


SETTINGS = {
    "cached": Setting(),
    "streaming": Setting("streaming"),
    "other_mesh": Setting(devices_later=2),
    "two_processes": Setting(processes=2),
}


class FaultError(Exception):
    """Something else happened than should have; the trial is not good."""


class MissedError(FaultError):
    """The run ended before the moment of the fault."""


@dataclasses.dataclass
class Run:
    """A run that has been started; of several processes, `child` is their launcher.

    Attributes:
      start: starts the same command again and returns its run.
    """

    child: subprocesses.Child
    folder: Path
    mark: str
    start: Callable[[], Run]

    def workers(self) -> list[int]:
        """The processes that train."""
        return [p for p in processes(self.mark) if "perex_t5x.train" in _arguments(p)]

    def wait_for(self, what: str, is_now: Callable[[Path], bool]) -> None:
        """Returns at a moment that the run's folder shows."""
        while not is_now(self.folder):
            if self.child.poll() is not None:
                raise MissedError(f"no trial: the run ended before {what}")
            time.sleep(_PERIOD)

    def end(self, seconds: float) -> int | None:
        """Waits for its end; returns its return code, or None if it had to be killed."""
        deadline = time.monotonic() + seconds
        while self.child.poll() is None:
            if time.monotonic() > deadline:
                kill(self.mark)
                self.child.wait()
                return None
            time.sleep(0.02)
        return self.child.wait()


def processes(mark: str) -> list[int]:
    """The processes whose environment has this mark, whoever their parents are."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            if wanted in Path(path).read_bytes().split(b"\0"):
                found.append(int(path.split("/")[2]))
        except OSError:  # another user's, or gone
            continue
    return found


def kill(mark: str) -> None:
    """Ends the processes with this mark, all at once."""
    for process in processes(mark):
        send(process, signal.SIGKILL)


def _arguments(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def send(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


def start(setting: Setting, folder: Path, mark: str, devices: int = 1) -> Run:
    """Starts the run of a setting in a folder; its log is beside that."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, MARK: mark}
    environment.pop("PJRT_NPROC", None)  # follows from the number of devices
    child = subprocesses.Child(setting.command(folder), env=environment, log=f"{folder}.log")
    return Run(child, folder, mark, lambda: start(setting, folder, mark, devices))
