"""finished.json in a job's folder, in a bucket or on a disk: what became of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perex_t5x.launching import names
from perex_t5x.launching.spec import Job

FILE = "finished.json"


def arguments_of(job: Job) -> str:
    """Changes with the job's command: a run with other bindings is not finished."""
    return names.fingerprint("\0".join(job.arguments))


def read(jobs: Iterable[Job]) -> dict[str, dict[str, Any]]:
    """Name -> mark, of the jobs that need not run again: done, or failed in a way that would repeat itself after hours."""
    jobs = list(jobs)
    with ThreadPoolExecutor(16) as pool:
        found = dict(zip([job.name for job in jobs], pool.map(lambda job: read_one(job.model_dir), jobs), strict=True))
    return {
        job.name: mark
        for job in jobs
        if (mark := found[job.name]) and mark.get("arguments") == arguments_of(job) and mark.get("exit") != 2
    }


def read_one(model_dir: str) -> dict[str, Any] | None:
    """The mark in a folder; None where there is none."""
    from etils import epath

    try:
        return json.loads((epath.Path(model_dir) / FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None


def keep_log(job: Job, path: str, most: int = 10_000_000) -> None:
    """Copies the end of a job's log into its folder: the host may be gone soon. A log is not worth a run."""
    from etils import epath

    try:
        with open(path, "rb") as f:
            f.seek(max(0, os.path.getsize(path) - most))
            said = f.read()
        folder = epath.Path(job.model_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.txt").write_bytes(said)
    except Exception as e:
        print(f"the log was not copied: {type(e).__name__}: {e}", file=sys.stderr, flush=True)


def write(job: Job, mark: Mapping[str, Any]) -> None:
    from etils import epath

    folder = epath.Path(job.model_dir)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"name": job.name, "arguments": arguments_of(job), **mark}, indent=1, ensure_ascii=False)
    (folder / FILE).write_text(text + "\n")
