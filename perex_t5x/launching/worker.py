"""Runs jobs.json on a host, one job after another: `python -m perex_t5x.launching.worker --jobs=jobs.json`

The same on every host of a slice; the jobs find each other by themselves. Jobs that are finished (finished.json in their
folders) are skipped; others go on from their checkpoints. Ctrl-C and SIGTERM reach the job, which saves and stops.

Exit status: 0 all jobs are done; 3 all have ended, some as failures (a loss that diverged, a slip in one run of a sweep);
2 a slip in a single run; 130 stopped; 1 a job broke off: started again, it goes on; 4 a worker runs on this host already.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from perex_t5x.errors import ConfigError, Reason
from perex_t5x.experiments.sweep import processes
from perex_t5x.launching import host, marks
from perex_t5x.launching.spec import Job, Work

EXIT_SOME_FAILED = 3
EXIT_BUSY = 4
# Processes that did not find each other in time: no slip of the configuration, though it has the same status.
_MISSED = re.compile(r"found no way to the coordinator|of \d+ processes came within")
_KEPT = 200_000  # of a job's last words


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    folder = os.path.dirname(os.path.abspath(options.jobs))
    try:
        with open(options.jobs, encoding="utf-8") as f:
            work = Work.from_json(f.read())
        writer = host.index() == 0
    except (OSError, ConfigError) as e:
        print(f"\nERROR: {e}", file=sys.stderr, flush=True)
        return Reason.CONFIGURATION.exit_code
    with _alone(options.lock or os.path.join(folder, "worker.lock")) as alone:
        if not alone:
            print("ERROR: a worker of this launch is running on this host already.", file=sys.stderr, flush=True)
            return EXIT_BUSY
        return _Worker(work, folder, options.log_dir or os.path.join(folder, "logs"), writer).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", required=True, help="jobs.json of the launch; the jobs run in its folder")
    parser.add_argument("--log_dir", help="folder of a log for every job; default: logs beside jobs.json")
    parser.add_argument("--lock", help="held while the worker runs; default: worker.lock beside jobs.json")
    return parser


@contextlib.contextmanager
def _alone(path: str) -> Iterator[bool]:
    """Whether no other worker holds the lock. The system lets go of it when this process ends, however."""
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield True


class _Worker:
    """The jobs of one host."""

    def __init__(self, work: Work, folder: str, log_dir: str, writer: bool):
        self._work, self._folder, self._log_dir, self._writer = work, folder, log_dir, writer
        self._asked: int | None = None
        self._process: subprocess.Popen | None = None

    def run(self) -> int:
        os.makedirs(self._log_dir, exist_ok=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)
        # Once, before the first job: all hosts skip the same ones.
        finished = marks.read(self._work.jobs)
        failed = sum(mark["status"] != "done" for mark in finished.values())
        jobs = [job for job in self._work.jobs if job.name not in finished]
        if finished:
            _say(f"{len(finished)} of {len(self._work.jobs)} jobs are finished already")
        for i, job in enumerate(jobs, len(finished) + 1):
            _say(f"job {i} of {len(self._work.jobs)}: {job.name}")
            begun = time.monotonic()
            status, said = self._run(job)
            if self._writer:
                marks.keep_log(job, self._log(job))
            if status == Reason.INTERRUPTED.exit_code or (self._asked is not None and status != 0):
                _say(f"{job.name}: stopped")
                return Reason.INTERRUPTED.exit_code
            mark = _mark(job, status, said, self._log(job), single=self._work.sweep is None)
            if mark is None:
                _say(f"{job.name}: {processes.reason(status, said, self._log(job))}")
                return (
                    Reason.CONFIGURATION.exit_code
                    if status == Reason.CONFIGURATION.exit_code and not _MISSED.search(said)
                    else Reason.ERROR.exit_code
                )
            _say(f"{job.name}: {mark['status']}{': ' if mark['error'] else ''}{mark['error']}")
            failed += mark["status"] != "done"
            if self._writer:
                marks.write(job, {**mark, "seconds": round(time.monotonic() - begun, 1)})
        return EXIT_SOME_FAILED if failed else 0

    def _log(self, job: Job) -> str:
        return os.path.join(self._log_dir, f"{job.name}.log")

    def _run(self, job: Job) -> tuple[int, str]:
        """Its exit status and the end of what it said."""
        if self._asked is not None:
            return Reason.INTERRUPTED.exit_code, ""
        with open(self._log(job), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", processes.DIES_WITH_PARENT, str(os.getpid()), *job.argv()],
                cwd=self._folder,
                env=_environment(self._work.root),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if self._asked is not None:  # in between
                self._process.send_signal(self._asked)
            said = _copied(self._process.stdout, log)
            status = self._process.wait()
        self._process = None
        return status, said

    def _pass_on(self, number: int, frame: Any) -> None:
        self._asked = number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def _mark(job: Job, status: int, said: str, log: str, single: bool) -> dict[str, Any] | None:
    """What became of a job that has ended; None for one that shall be started again, or is a single run's slip."""
    if status == 0:
        return {"status": "done", "error": "", "exit": 0}
    if (why := processes.diverged(status, said)) is not None:
        return {"status": "failed", "error": why, "exit": status}
    if status == Reason.CONFIGURATION.exit_code and not single and not _MISSED.search(said):
        return {"status": "failed", "error": processes.reason(status, said, log), "exit": status}
    return None


def _copied(source: IO[bytes], log: IO[bytes]) -> str:
    """Copies lines to the log and to stdout until the end; returns the last of them."""
    kept = b""
    for line in iter(source.readline, b""):
        log.write(line)
        log.flush()
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more: the log has it
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        kept = (kept + line)[-_KEPT:]
    return kept.decode(errors="replace")


def _environment(root: str) -> Mapping[str, str]:
    return {
        "JAX_COMPILATION_CACHE_DIR": f"{root}/.jax_cache",  # with the run, so that a new slice finds it
        **os.environ,
        "PYTHONUNBUFFERED": "1",
    }


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"{time.strftime('%H:%M:%S')} worker: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
