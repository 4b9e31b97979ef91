"""XManager's records of experiments, where its local executor leaves a gap: it keeps no jobs of this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from absl import logging

_LONGEST = 255  # characters of the column


def insert_local_job(work_unit: Any, name: str, pid: int, settings: Mapping[str, Any]) -> None:
    """Writes down a work unit's job: its name, process, start and settings. Without it only numbers would be there."""
    from google.protobuf import text_format
    from xmanager.generated import data_pb2
    from xmanager.xm_local.storage import database

    job = data_pb2.LocalJob(pid=str(pid), cmd=shortened(settings), timestamp=int(time.time()))
    row = {
        "experiment_id": work_unit.experiment_id,
        "work_unit_id": work_unit.work_unit_id,
        "job_name": name[:_LONGEST],
        "job_data": text_format.MessageToString(data_pb2.Job(local=job), as_one_line=True),
    }
    query = (
        "INSERT INTO job (experiment_id, work_unit_id, job_name, job_data) "
        "VALUES (:experiment_id, :work_unit_id, :job_name, :job_data)"
    )
    try:
        with database.database().engine.begin() as connection:
            connection.execute(database.text(query), row)
    except Exception as e:  # the run itself does not need it
        logging.warning("XManager's records lack the settings of %s: %s", name, e)


def shortened(settings: Mapping[str, Any], most: int = 180) -> str:
    """As text that fits beside the rest of the job's data.

    >>> shortened({"learning_rate": 0.001, "seed": 0})
    'learning_rate=0.001 seed=0'
    """
    text = " ".join(f"{name}={value}" for name, value in settings.items())
    text = text.encode("ascii", "replace").decode()
    return text if len(text) <= most else text[: most - 3] + "..."
