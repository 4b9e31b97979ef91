"""The runs of `python -m perex_t5x.chaos`: a small model in several settings, each trial's processes found by a mark."""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

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
_SWEEP = (
    "--sweep=sweeps/learning_rate.gin",
    "--sweep.gin_bindings={}",
    "--sweep.rate_factors=[1.0]",
    "--sweep.seeds=[0, 1]",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a run is started: its feed, its processes, its storage, on how many devices it resumes; or a sweep of two runs.

    Attributes:
      sweep: 'together', in one process; 'processes'; '': a run by itself.
    """

    feed: str = "cached"
    processes: int = 1
    devices_later: int = 1
    sweep: Literal["", "together", "processes"] = ""
    on_bucket: bool = False

    def command(self, folder: str) -> list[str]:
        """The same each time."""
        bindings = {**_SMALL_RUN, "train/utils.DatasetConfig.feed": self.feed}
        if not self.sweep:
            bindings["MODEL_DIR"] = folder
        arguments = ["--gin_file=models/nano.gin", "--gin_file=runs/pretrain.gin"]
        arguments += [f"--gin.{name}={value}" for name, value in bindings.items()]
        if self.sweep:
            how = ["--together"] if self.sweep == "together" else ["--parallel=2"]
            return [*_python("perex_t5x.experiments.sweep"), *_SWEEP, f"--dir={folder}", *how, *arguments]
        if self.processes == 1:
            return [*_python("perex_t5x.train"), *arguments]
        local = [f"--processes={self.processes}", "--devices=1", "--"]
        return [*_python("perex_t5x.launching.local"), *local, *arguments]

    def run_folders(self, folder: Path) -> list[Path]:
        """The folders of its runs, as far as they are there."""
        return sorted(folder.glob("runs/*")) if self.sweep else [folder]


def _python(module: str) -> list[str]:
    return [*_obeying_permissions(), sys.executable, "-m", module]


@functools.cache
def _obeying_permissions() -> tuple[str, ...]:
    """Where this is the superuser: without the right to write wherever it likes, so that runs are like anybody's."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        return ()
    return ("setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override")


def obeys_permissions() -> bool:
    """Whether the runs do."""
    return os.geteuid() != 0 or bool(_obeying_permissions())


SETTINGS = {
    "cached": Setting(),
    "streaming": Setting("streaming"),
    "other_mesh": Setting(devices_later=2),
    "streaming_other_mesh": Setting("streaming", devices_later=2),
    "two_processes": Setting(processes=2),
    "two_processes_streaming": Setting("streaming", processes=2),
    "sweep_together": Setting(sweep="together"),
    "sweep_processes": Setting(sweep="processes"),
    "bucket": Setting(on_bucket=True),
}


class FaultError(Exception):
    """Something else happened than should have; the trial is not good."""


class MissedError(FaultError):
    """The run ended before the moment of the fault."""


class SkippedError(Exception):
    """This machine cannot have the fault; the message says why."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a trial happens.

    Attributes:
      folder: the run's, or that of a copy of its bucket.
      log: what all of the trial's processes print.
      bucket: of the stand-in for Cloud Storage, see `chaos.storage`; None: the folder is the run's own.
    """

    folder: Path
    log: Path
    bucket: Any = None

    @property
    def mark(self) -> str:
        return str(self.log)

    @property
    def address(self) -> str:
        """The folder as the run knows it."""
        return str(self.folder) if self.bucket is None else f"{self.bucket.bucket}/run"


@dataclasses.dataclass
class Run:
    """A run that has been started; of several processes, `child` is their launcher.

    Attributes:
      start: starts the same command again and returns its run.
    """

    child: subprocesses.Child
    setting: Setting
    place: Place
    start: Callable[[], Run]

    @property
    def folder(self) -> Path:
        return self.place.folder

    def workers(self) -> list[int]:
        """The processes that train."""
        trains = {"together": "perex_t5x.experiments.sweep"}.get(self.setting.sweep, "perex_t5x.train")
        return [p for p in processes(self.place.mark) if trains in _arguments(p)]

    def wait_for(self, what: str, is_now: Callable[[Path], bool]) -> None:
        """Returns at a moment that the run's folder shows; of a sweep the folder of one of its runs."""
        while not any(is_now(folder) for folder in self.setting.run_folders(self.folder)):
            if self.child.poll() is not None:
                raise MissedError(f"no trial: the run ended before {what}")
            time.sleep(_PERIOD)

    def kill(self) -> None:
        """All of its processes, at once."""
        kill(self.place.mark)

    def end(self, seconds: float) -> int | None:
        """Waits for its end; returns its return code, or None if it had to be killed."""
        deadline = time.monotonic() + seconds
        while self.child.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
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


def start(setting: Setting, place: Place, devices: int = 1) -> Run:
    """Starts the run of a setting."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    further: Mapping[str, str] = {} if place.bucket is None else place.bucket.environment
    environment = {**os.environ, **further, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, MARK: place.mark}
    environment.pop("PJRT_NPROC", None)  # follows from the number of devices
    child = subprocesses.Child(setting.command(place.address), env=environment, log=str(place.log))
    return Run(child, setting, place, lambda: start(setting, place, devices))
