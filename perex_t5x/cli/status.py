"""status.json: how a process ended, for machines.

    {"reason": "diverged", "exit_code": 5, "step": 40, "message": "the loss of step 40 is nan: ...", "time": 1700000000.0,
     "process_index": 0, "host": "worker-0"}

Every end writes it, except a kill by a signal. It goes to the file that the environment variable PEREX_T5X_STATUS_FILE
names (`perex_t5x.cli.subprocesses` sets one for each process it starts) and, from process 0, into the folder of the run once
that exists. A file of an earlier run is removed at the start, so what is there belongs to the last one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import threading
import time
from typing import Any

from perex_t5x import files
from perex_t5x.errors import Reason

VARIABLE = "PEREX_T5X_STATUS_FILE"
STEP_VARIABLE = "PEREX_T5X_STEP_FILE"  # a local file that holds the last step, for whoever supervises a running process
FILE = "status.json"
_STEP_SECONDS = 5.0  # between two writes of the last step
_FOLDER_SECONDS = 20.0  # that the status may take into the run's folder


@dataclasses.dataclass(frozen=True)
class Status:
    """How a process ended.

    Attributes:
      reason: see `errors.Reason`; exit_code is its code, or that of the signal.
      message: the error's message, for people; "" if all is well.
      finding: the same in a few words, such as 'the loss is nan'; "" where there is nothing shorter.
      step: the last step that was dispatched; None before the first.
      time: seconds since 1970.
      process_index, host: which process of the run, and where.
      caused_by: the process of the run because of which this one ends, if it is known.
      failed_saves: how many checkpoints could not be written, also where later ones were.
    """

    reason: Reason
    exit_code: int
    message: str = ""
    finding: str = ""
    step: int | None = None
    time: float = 0.0
    process_index: int = 0
    host: str = ""
    caused_by: int | None = None
    failed_saves: int = 0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Status:
        """Raises `ValueError` for anything else; fields of a newer version are left out."""
        value = json.loads(text)
        if not isinstance(value, dict) or "reason" not in value:
            raise ValueError(f"not a status: {text[:80]!r}")
        known = {field.name for field in dataclasses.fields(cls)}
        reason = Reason(value["reason"]) if value["reason"] in list(Reason) else Reason.ERROR
        value = {"exit_code": reason.exit_code, **value, "reason": reason}
        return cls(**{name: v for name, v in value.items() if name in known})

    @property
    def ended(self) -> str:
        """Reason and exit code, for people.

        >>> Status(Reason.DIVERGED, 5).ended, Status(Reason.KILLED, 137).ended
        ('diverged (exit code 5)', 'killed by SIGKILL')
        """
        if self.reason is Reason.KILLED:
            return f"killed by {_signal_name(self.exit_code - 128)}"
        return f"{self.reason} (exit code {self.exit_code})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --- in the process that ends -----------------------------------------------------------------------------------------

_is_run = False
_folder: str | None = None
_file: str | None = None
_step: int | None = None
_process_index = 0
_step_file: str | None = None
_step_written = float("-inf")
_interruption = ""
_failed_saves = 0


def begin() -> None:
    """At the start of a command. The variable is taken out of the environment: it is not for this process's children."""
    global _is_run, _folder, _file, _step, _process_index, _step_file, _interruption, _failed_saves
    _is_run, _folder, _step, _process_index, _interruption, _failed_saves = False, None, None, 0, "", 0
    _file = os.environ.pop(VARIABLE, None)
    _step_file = os.environ.pop(STEP_VARIABLE, None)
    if _file is not None:
        with contextlib.suppress(OSError):
            os.unlink(_file)


def ended() -> None:
    """At the end of a command: whoever catches it may start another one, or train, in the same process."""
    global _is_run, _interruption
    _is_run, _interruption = False, ""


def is_run() -> None:
    """That this process is a run: its status is that of its folder. Processes that hold several runs are not."""
    global _is_run
    _is_run = True


def is_single_run() -> bool:
    """Whether this process is one run, from its start to its end."""
    return _is_run


def interrupted_by(name: str) -> None:
    """That a signal has asked this command to stop."""
    global _interruption
    _interruption = name


def interruption() -> str:
    """The signal that has asked this command to stop; "" if none has.

    A KeyboardInterrupt alone is not enough: libraries turn one that is raised in their initialisation into an error of
    theirs, and one that is raised in a callback from native code is lost.
    """
    return _interruption


def in_folder(folder: str) -> None:
    """Once the folder of a run is known, and will be written: the status goes there, too."""
    global _folder
    if not _is_run:
        return
    _folder = folder
    if _process_index == 0:
        with contextlib.suppress(Exception):
            from etils import epath

            (epath.Path(folder) / FILE).unlink(missing_ok=True)


def is_process(index: int) -> None:
    """Once this process knows which of several it is; only process 0 writes into the run's folder."""
    global _process_index
    _process_index = index


def at_step(step: int) -> None:
    """That a step has been dispatched."""
    global _step
    _step = step
    if _step_file is not None and time.monotonic() - _step_written > _STEP_SECONDS:
        _write_step()


def save_failed() -> None:
    """That a checkpoint could not be written."""
    global _failed_saves
    _failed_saves += 1


def _write_step() -> None:
    global _step_written
    _step_written = time.monotonic()
    if _step_file is not None and _step is not None:
        with contextlib.suppress(OSError), open(_step_file, "w", encoding="utf-8") as f:
            f.write(str(_step))


def write(
    reason: Reason,
    message: str = "",
    *,
    finding: str = "",
    step: int | None = None,
    caused_by: int | None = None,
) -> Status:
    """Writes how this process ends, wherever that is wanted. Never raises: a status is not worth an error."""
    _write_step()
    step, host = _step if step is None else step, socket.gethostname()
    code, index = reason.exit_code, _process_index
    status = Status(reason, code, message, finding, step, time.time(), index, host, caused_by, _failed_saves)
    if _file is not None:
        with contextlib.suppress(Exception):
            files.write_atomically(_file, status.to_json() + "\n")
    if _folder is not None and _process_index == 0:
        # A storage that is gone may have been the reason to end, and is not waited for.
        thread = threading.Thread(target=_write_into, args=(_folder, status), daemon=True)
        thread.start()
        thread.join(_FOLDER_SECONDS)
    return status


def _write_into(folder: str, status: Status) -> None:
    with contextlib.suppress(Exception):
        files.write_atomically(os.path.join(folder, FILE), status.to_json() + "\n")


# --- in the process that wants to know --------------------------------------------------------------------------------


def read(path: str) -> Status | None:
    """The status in a file or a folder; None if there is none."""
    try:
        path = os.path.join(path, FILE) if os.path.isdir(path) else path
        with open(path, encoding="utf-8") as f:
            return Status.from_json(f.read())
    except (OSError, ValueError):
        return None


def of_process(returncode: int, path: str | None = None, **more: Any) -> Status:
    """How a process ended: what it has written to `path`, if that fits its exit code, else what the code alone says.

    >>> of_process(-9).ended, of_process(2).reason
    ('killed by SIGKILL', <Reason.CONFIGURATION: 'configuration'>)
    """
    code = 128 - returncode if returncode < 0 else returncode
    written = read(path) if path else None
    # One that has written "done" may still be killed in its last moments, by a library's own clean-up.
    if written is not None and written.exit_code == code:
        return written
    return Status(Reason.of_exit_code(code), code, **more)
