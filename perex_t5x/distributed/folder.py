"""A run's folder, which all processes must see."""

from __future__ import annotations

import time
import uuid

from absl import logging
from etils import epath

from perex_t5x import distributed, run_dir
from perex_t5x.errors import ConfigError

_PROBE = ".seen_by_all_"
_SECONDS = 60.0  # a network file system may take so long to show another host's new file


def prepare(folder: str, checkpoint_bytes: int = 0, dry_run: bool = False, *, binding: str = "MODEL_DIR") -> None:
    """`run_dir.prepare`, first in process 0; raises `ConfigError` if a process sees another folder under this name."""
    if distributed.is_writer():
        run_dir.prepare(folder, checkpoint_bytes, dry_run)
    if distributed.group() is None or dry_run:
        return
    probe = epath.Path(folder) / distributed.from_process_0("probe", lambda: _leave_probe(folder))
    deadline = time.monotonic() + _SECONDS
    while not probe.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{binding} = {folder!r}: process 0 wrote a file there that this process does not see. Checkpoints are "
                "written by all processes together, so the folder must be on storage that they share, such as gs:// or a "
                "network file system."
            )
        time.sleep(0.1)
    if not distributed.is_writer():
        run_dir.prepare(folder, checkpoint_bytes)
    distributed.barrier("probe seen")
    if distributed.is_writer():
        probe.unlink()


def _leave_probe(folder: str) -> str:
    """Writes a file that only this run can have written; returns its name."""
    for old in epath.Path(folder).glob(f"{_PROBE}*"):  # of runs that were killed meanwhile
        logging.info("removing %s", old)
        old.unlink()
    name = f"{_PROBE}{uuid.uuid4().hex}"
    (epath.Path(folder) / name).write_text("")
    return name
