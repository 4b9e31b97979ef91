"""An XManager experiment on this machine whose work units are runs: `xm.Binary` on `xm_local.Local()`, no container.

XManager's own records (by default ~/.xmanager/experiments.sqlite3) then hold the experiment with its title and its work
units. Its local executor stores nothing about their jobs, so xmanager.json in the sweep's folder does: for each experiment
which work unit is which run, with its process and settings.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import logging

from perex_t5x import files
from perex_t5x.cli import status as status_lib
from perex_t5x.cli import subprocesses
from perex_t5x.errors import ConfigError, TrainingError
from perex_t5x.experiments.sweep import execute
from perex_t5x.experiments.sweep.runs import Run

_UNRECORDED = -signal.SIGKILL  # a process that has left no record was killed before it could write one


def modules() -> tuple[Any, Any]:
    """`xm` and `xm_local`; raises `ConfigError` if XManager is not installed."""
    try:
        from xmanager import xm, xm_local
    except ImportError as e:
        raise ConfigError(
            f"XManager cannot be imported ({e}). Install it with: pip install 'perex_t5x[launch]'. Without it, "
            "python -m perex_t5x.experiments.sweep takes the same flags."
        ) from e
    return xm, xm_local


class Experiment:
    """Created with its first work unit, so that a finished sweep leaves no empty experiment behind.

    Attributes:
      title: as XManager shows it.
      record: the path of xmanager.json.
    """

    def __init__(self, title: str, record: str):
        self.title, self.record = title, record
        self._xm, self._xm_local = modules()
        self._made: Any = None
        self._binary: Any = None
        self._entry: dict[str, Any] = {}
        self._scratch = tempfile.mkdtemp(prefix="perex_t5x_xm_")

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            if self._made is not None:
                close_quietly(self._made, *exc)
                _exit_quietly()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def child(self, run: Run, root: str, environment: dict[str, str]) -> execute.RunProcess:
        """Starts a run as a work unit; for `perex_t5x.experiments.sweep.execute.run`."""
        return _WorkUnit(self, run, root, environment)

    def add(self, run: Run, command: list[str], environment: Mapping[str, str], log: str) -> UnitProcess:
        made = self._open() if self._made is None else self._made
        number = len(self._entry["work_units"]) + 1
        status = os.path.join(self._scratch, f"{number}.json")
        arguments = ["-I", "-S", os.path.abspath(subprocesses.__file__), status, str(os.getpid()), log, *command]
        job = self._xm.Job(
            self._binary,
            executor=self._xm_local.Local(experimental_stream_output=False),
            name=run.name,
            args=arguments,
            env_vars={name: value for name, value in environment.items() if os.environ.get(name) != value},
        )

        async def launch(work_unit: Any, /, **settings: Any) -> None:
            await work_unit.add(job)

        with _explained(run):
            launched = made.add(launch, args=settings(run))
        self._entry["work_units"][str(number)] = {"run": run.name, **settings(run)}
        self._write_record()

        def started(pid: int) -> None:
            self._entry["work_units"][str(number)] |= {"pid": pid, "started": _now()}
            self._write_record()

        return UnitProcess(run, launched, status, started, environment.get(status_lib.VARIABLE), log)

    def _open(self) -> Any:
        try:
            made = self._xm_local.create_experiment(experiment_title=self.title)
        except Exception as e:  # of the database: not writable, of an older version, or its server is down
            raise ConfigError(f"XManager cannot open its records of experiments: {type(e).__name__}: {e}") from e
        made.__enter__()
        self._made = made
        python, here = self._xm.Binary(path=sys.executable), self._xm_local.Local.Spec()
        [self._binary] = made.package([self._xm.Packageable(executable_spec=python, executor_spec=here)])
        self._entry = {"experiment_id": made.experiment_id, "title": self.title, "started": _now(), "work_units": {}}
        logging.info("XManager experiment %d, %r", made.experiment_id, self.title)
        return made

    def _write_record(self) -> None:
        """Entries of earlier launches into the same folder are kept."""
        try:
            with open(self.record, encoding="utf-8") as f:
                earlier = json.load(f)
        except (OSError, ValueError):
            earlier = []
        others = [entry for entry in earlier if entry.get("experiment_id") != self._entry["experiment_id"]]
        text = json.dumps([*others, self._entry], indent=1, ensure_ascii=False, default=str)
        files.write_atomically(self.record, text + "\n")


class _WorkUnit(execute.RunProcess):
    """A run whose process is started by XManager."""

    def __init__(self, experiment: Experiment, run: Run, root: str, environment: dict[str, str]):
        self._experiment = experiment
        super().__init__(run, root, environment)

    def start(self, command: list[str], environment: dict[str, str]) -> UnitProcess:
        environment = {**environment, status_lib.VARIABLE: self.status_file}
        return self._experiment.add(self.run, command, environment, self.log)


class UnitProcess:
    """The part of `subprocesses.Child` that sweeps need, for the process of a work unit.

    Args:
      run, launched: the run, and the future of XManager's work unit.
      record: of `subprocesses.run_unit`.
      started: called with the process's id.
      status_file, log: of the run.
    """

    def __init__(
        self,
        run: Run,
        launched: asyncio.Future,
        record: str,
        started: Callable[[int], None],
        status_file: str | None = None,
        log: str = "",
    ):
        self.returncode: int | None = None
        self._run, self._launched, self._record, self._started = run, launched, record, started
        self._status_file, self._log = status_file, log
        self._ended: Any = None
        self._asked: int | None = None
        self._recorded = False

    def poll(self) -> int | None:
        if self.returncode is not None or not self._launched.done():
            return self.returncode
        if self._ended is None:
            with _explained(self._run):
                waiting = self._launched.result().wait_until_complete()
            self._ended = asyncio.run_coroutine_threadsafe(waiting, self._launched.get_loop())
        pid = self._read().get("pid")
        if pid and not self._recorded:
            self._recorded = True
            self._started(pid)
        if pid and self._asked is not None:
            number, self._asked = self._asked, None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if self._ended.done():
            self.returncode = self._read().get("returncode", _UNRECORDED)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Delivered once the process has started."""
        self._asked = number
        self.poll()

    def status(self) -> status_lib.Status:
        """After its end."""
        returncode = _UNRECORDED if self.returncode is None else self.returncode
        said = subprocesses.last_line(subprocesses.read_tail(self._log, 20_000))
        return status_lib.of_process(returncode, self._status_file, message=said)

    def _read(self) -> dict[str, int]:
        try:
            with open(self._record, encoding="utf-8") as f:
                return json.load(f)
        except (OSError, ValueError):
            return {}


@contextlib.contextmanager
def _explained(run: Run) -> Iterator[None]:
    """XManager records a work unit before it starts it: a full disk, or a database that another process has locked, shows
    only here, in the middle of a sweep."""
    try:
        yield
    except Exception as e:
        raise TrainingError(
            f"XManager could not start {run.name}: {type(e).__name__}: {e}\nThe same command resumes what is not "
            "finished."
        ) from e


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def settings(run: Run) -> dict[str, Any]:
    """What distinguishes a run, as numbers and text, which XManager accepts."""
    numbers = {"batch_size": run.batch_size, "learning_rate": run.learning_rate}
    values = {**run.values, **numbers, "seed": run.seed if run.values else None}  # that of a single run is not known
    return {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in values.items() if v is not None}


def close_quietly(experiment: Any, *exc: Any) -> None:
    """Ends an experiment without printing "Waiting for local jobs to complete" although there are none any more."""
    with contextlib.redirect_stdout(io.StringIO()):
        experiment.__exit__(*exc)


def _exit_quietly() -> None:
    """Otherwise XManager prints at exit that it terminates jobs "that may still be running", although all have ended."""

    def silence() -> None:  # runs before what was registered earlier, XManager's among it
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        sys.stdout = io.StringIO()

    atexit.register(silence)
