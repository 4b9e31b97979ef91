"""Runs jobs.json on a host, one job after another: `python -m perex_t5x.launching.worker --jobs=jobs.json`

The same on every host of a slice; the processes of a job find each other. Finished jobs (finished.json in their folders)
are skipped; others resume from their checkpoints. Ctrl-C and SIGTERM reach the job, which saves and stops.

Exit codes (`perex_t5x.errors.Reason`): 0 all jobs are done; 3 all have ended, some of them failed (a loss that diverged, a
configuration error in one run of a sweep); 2 a configuration error in a single run; 130 stopped; 4 a worker runs on this
host already; 9 a single run that failed three times in a row without a newer checkpoint (in a sweep such a run is marked
as failed); 10 the launch was asked to stop in its folder in the bucket; otherwise the code of the job that failed, which
resumes when the worker is started again. What the worker leaves in the bucket: `launching.launch_folder`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perex_t5x import lease
from perex_t5x.cli import subprocesses
from perex_t5x.cli.status import STEP_VARIABLE, Status
from perex_t5x.errors import ConfigError, Reason, UnreachableError
from perex_t5x.experiments.sweep import execute
from perex_t5x.files import is_remote
from perex_t5x.launching import environment, launch_folder, names
from perex_t5x.launching.launch_folder import Attempt, HostError, LaunchFolder
from perex_t5x.launching.reporter import Reporter
from perex_t5x.launching.spec import Job, Work

FINISHED = "finished.json"
_STACKS_AFTER = float(os.environ.get("PEREX_T5X_STACKS_SECONDS", "60"))  # after a job was asked to stop
HOST_INDEX = "PEREX_T5X_HOST"  # set by whoever knows it
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", required=True, help="jobs.json of the launch; the jobs run in its folder")
    parser.add_argument("--log_dir", help="folder of a log for every job; default: logs beside jobs.json")
    parser.add_argument("--lock", help="held while the worker runs; default: worker.lock beside jobs.json")
    options = parser.parse_args(argv)
    folder = os.path.dirname(os.path.abspath(options.jobs))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow reads gs:// here, and has much to say
    try:
        with open(options.jobs, encoding="utf-8") as f:
            work = Work.from_json(f.read())
        environment.check_secrets(work.secrets, os.environ)
        index = host_index()
    except (OSError, ConfigError) as e:
        print(f"\nERROR: {e}", file=sys.stderr, flush=True)
        return Reason.CONFIGURATION.exit_code
    with _alone(options.lock or os.path.join(folder, "worker.lock")) as alone:
        if not alone:
            print("ERROR: a worker of this launch is running on this host already.", file=sys.stderr, flush=True)
            return Reason.BUSY.exit_code
        return _Worker(work, folder, options.log_dir or os.path.join(folder, "logs"), index).run()


@contextlib.contextmanager
def _alone(path: str) -> Iterator[bool]:
    """Whether no other worker holds the lock. The system releases it when this process ends, however it ends."""
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

    def __init__(self, work: Work, folder: str, log_dir: str, index: int):
        self._work, self._folder, self._log_dir = work, folder, log_dir
        self._writer, self._host = index == 0, launch_folder.host_name(index)
        self._redact = environment.redactor(work.secrets, os.environ)
        self._asked: int | None = None
        self._stop_requested = False
        self._child: subprocesses.Child | None = None
        self._attempt = launch_folder.attempt_name(work.launch_id, os.environ)
        # Without the name of a launch, as in a jobs.json of an older version, on this host.
        path = LaunchFolder.of(work.root, work.launch) if work.launch else LaunchFolder(os.path.join(folder, "launch"))
        self._launch = path
        self._reporter: Reporter | None = None

    def run(self) -> int:
        os.makedirs(self._log_dir, exist_ok=True)
        with subprocesses.forwarding(self._pass_on):
            reporter = self._reporter = Reporter(
                self._launch, self._attempt, self._host, self._work.launch_id, self._writer, self._on_stop_requested
            )
            reason = Reason.ERROR
            try:
                if self._writer and self._work.launch:
                    with _not_worth_an_error("jobs.json is not stored in the launch's folder"):
                        self._launch.write(json.loads(self._work.to_json()), "jobs.json")  # for whoever asks how it is
                reason = self._run_jobs(reporter)
            except (ConfigError, UnreachableError) as e:
                self._say(f"ERROR: {e}")
                reason = e.reason
            finally:
                # A host that is asked to stop may be gone soon, and its job has had the time it needed.
                reporter.close(60.0 if self._asked is None else 20.0, reason=str(reason))
            return reason.exit_code

    def _run_jobs(self, reporter: Reporter) -> Reason:
        # Only once, before the first job, so that all hosts skip the same ones.
        finished = self._finished()
        failed = sum(mark["status"] != "done" for mark in finished.values())
        jobs = [job for job in self._work.jobs if job.name not in finished]
        if finished:
            self._say(f"{len(finished)} of {len(self._work.jobs)} jobs are finished already")
        for i, job in enumerate(jobs, len(finished) + 1):
            self._say(f"job {i} of {len(self._work.jobs)}: {job.name}")
            begun = time.monotonic()
            history = _History(self._launch, job, self._work.launch_id, self._attempt, self._writer)
            if (status := history.without_progress()) is None:
                history.begin()
                status = self._run(job, i, reporter)
                if self._writer:
                    _keep_log(job, self._log(job))
            if status.reason is Reason.INTERRUPTED or (self._asked is not None and status.reason is not Reason.DONE):
                return self._interrupted(job, history)
            mark = _mark(status, self._log(job), single=self._work.sweep is None)
            if status.reason is not Reason.DONE:
                self._report_error(job, status, is_result=mark is not None)
            history.end(status)
            if mark is None:
                self._say(f"{job.name}: {execute.failure(status, self._log(job))}")
                # In a sweep the next attempt finds it out, on all hosts alike, and continues with the next run.
                stuck = history.without_progress() if self._work.sweep is None and status.reason.retryable else None
                if stuck is not None:
                    self._say(f"{job.name}: {stuck.message}")
                    return stuck.reason
                return Reason.ERROR if status.reason in (Reason.SOME_FAILED, Reason.BUSY) else status.reason
            self._say(f"{job.name}: {mark['status']}{': ' if mark['error'] else ''}{mark['error']}")
            failed += mark["status"] != "done"
            if self._writer:
                ids = {"launch_id": self._work.launch_id, "seconds": round(time.monotonic() - begun, 1)}
                _write_mark(job, {**mark, **ids})
        return Reason.SOME_FAILED if failed else Reason.DONE

    def _finished(self) -> dict[str, dict[str, Any]]:
        try:
            return read_marks(self._work.jobs, self._work.launch_id)
        except Exception:
            if is_remote(self._work.root):
                from perex_t5x import buckets

                buckets.check(self._work.root, "the folder of the launch,")  # says what is wrong
            raise

    def _interrupted(self, job: Job, history: _History) -> Reason:
        """All processes of a job stop together, so another host may have been asked, and not this one."""
        with _not_worth_an_error("whether the launch is to stop is not known"):
            self._stop_requested |= self._launch.stop_requested(self._work.launch_id)
        self._say(f"{job.name}: stopped{', as was requested in the launch folder' if self._stop_requested else ''}")
        if self._asked is not None:
            with _not_worth_an_error("that this host was stopped is not stored"):
                self._launch.write_stopped(self._attempt, self._host)
        history.end(Status(Reason.INTERRUPTED, Reason.INTERRUPTED.exit_code))
        return Reason.STOPPED if self._stop_requested else Reason.INTERRUPTED

    def _report_error(self, job: Job, status: Status, is_result: bool) -> None:
        kind = launch_folder.kind_of(status.reason, status.process_index, status.caused_by)
        error = HostError(
            time=launch_folder.as_time(status.time or time.time()),
            host=self._host,
            job=job.name,
            reason=status.reason,
            exit_code=status.exit_code,
            message=status.message,
            traceback=launch_folder.tail_of_log("" if self._child is None else self._child.said(200_000)),
            kind=launch_folder.RESULT if is_result else kind,
        )
        with _not_worth_an_error("the error is not stored in the launch's folder"):
            self._launch.write_error(self._attempt, error)

    def _log(self, job: Job) -> str:
        return os.path.join(self._log_dir, f"{job.name}.log")

    def _run(self, job: Job, number: int, reporter: Reporter) -> Status:
        """How it ended."""
        if self._asked is not None:
            return Status(Reason.INTERRUPTED, Reason.INTERRUPTED.exit_code)
        variables = environment.of_job(self._work.environment, os.environ)
        cache = f"{self._work.root}/.jax_cache"  # in the bucket, so that a new slice finds it
        step_file = os.path.join(self._log_dir, f"{job.name}.step")
        with contextlib.suppress(OSError):
            os.unlink(step_file)
        reporter.begin_job(self._log(job), step_file, job=job.name, number=number, jobs=len(self._work.jobs))
        ours = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", STEP_VARIABLE: step_file}
        ours |= dict(zip(lease.LAUNCH, (self._work.launch_id, job.name), strict=True))
        self._child = subprocesses.Child(
            job.argv(),
            cwd=self._folder,
            env={"JAX_COMPILATION_CACHE_DIR": cache, **variables, **ours},
            log=self._log(job),
            on_line=_print,
            edit=self._redact,
            status_file=os.path.join(self._log_dir, f"{job.name}.status.json"),
        )
        if self._asked is not None:  # in between
            self._child.send_signal(self._asked)
        patience = threading.Thread(target=self._show_stacks, args=(self._child, job), daemon=True)
        patience.start()
        self._child.wait()
        status = self._child.status()
        words = {name: self._redacted(getattr(status, name)) for name in ("message", "finding")}
        return dataclasses.replace(status, **words)

    def _show_stacks(self, child: subprocesses.Child, job: Job) -> None:
        """Once, if a job does not stop in time: its log then says where its threads are."""
        while self._asked is None and child.poll() is None:
            time.sleep(1)
        until = time.monotonic() + _STACKS_AFTER
        while time.monotonic() < until and child.poll() is None:
            time.sleep(0.2)
        if child.poll() is None and _handles(child.pid, signal.SIGUSR1):  # else it would die of the signal
            self._say(f"{job.name} has not stopped for {_STACKS_AFTER:g} s; its threads:")
            child.send_signal(signal.SIGUSR1)

    def _redacted(self, text: str) -> str:
        return self._redact(text.encode(errors="surrogateescape")).decode(errors="replace")

    def _pass_on(self, number: int) -> None:
        self._asked = number
        if self._child is not None:
            self._child.send_signal(number)
        if self._reporter is not None:
            self._reporter.wake()

    def _on_stop_requested(self) -> None:
        """In the reporter's thread."""
        self._say("asked to stop in the launch's folder: the job saves and stops")
        self._stop_requested = True
        self._pass_on(signal.SIGTERM)

    def _say(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} worker: {text}"
        with contextlib.suppress(OSError, ValueError):
            print(line, flush=True)
        if self._reporter is not None:
            self._reporter.said(line)


class _History:
    """The attempts of one job. All hosts read them, host 0 writes them; neither is worth an error."""

    def __init__(self, folder: LaunchFolder, job: Job, launch_id: str, attempt: str, writer: bool):
        self._folder, self._job, self._launch_id, self._writer = folder, job, launch_id, writer
        self._name = attempt
        self._attempts: list[Attempt] = []
        with _not_worth_an_error("earlier attempts are not known"):
            kept = folder.read_attempts(job.name, launch_id)
            self._attempts = [a for a in kept if a.name != attempt or a.ended]  # host 0 may be faster

    def without_progress(self) -> Status | None:
        """The end of a job whose newest attempts all began where it would begin now, and failed."""
        if len(self._attempts) < launch_folder.MOST_FAILURES:
            return None
        with _not_worth_an_error("whether there is progress is not known"):
            step = launch_folder.newest_step(self._job.model_dir)
            errors = self._folder.failures(self._job.name, self._attempts, step)
            if len(errors) >= launch_folder.MOST_FAILURES:
                message = launch_folder.no_progress(step, errors)
                return Status(Reason.NO_PROGRESS, Reason.NO_PROGRESS.exit_code, message)
        return None

    def begin(self) -> None:
        step = None
        with _not_worth_an_error("the newest checkpoint is not known"):
            step = launch_folder.newest_step(self._job.model_dir)
        self._attempts.append(Attempt(self._name, launch_folder.now(), step))
        self._write()

    def end(self, status: Status) -> None:
        if not self._attempts or self._attempts[-1].ended:
            return  # it did not begin
        words = status.message.strip().splitlines()
        ended = {"ended": launch_folder.now(), "reason": status.reason, "error": words[0] if words else ""}
        self._attempts[-1] = dataclasses.replace(self._attempts[-1], **ended)
        self._write()

    def _write(self) -> None:
        if self._writer:
            with _not_worth_an_error("this attempt is not stored"):
                self._folder.write_attempts(self._job.name, self._launch_id, self._attempts)


@contextlib.contextmanager
def _not_worth_an_error(what: str) -> Iterator[None]:
    """Prints what fails in the launch's folder: the jobs matter more."""
    try:
        yield
    except Exception as e:
        print(f"{what}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as f:
            caught = next(line.split()[1] for line in f if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (number - 1) & 1)
    except (OSError, StopIteration, ValueError):
        return False


def _mark(status: Status, log: str, single: bool) -> dict[str, Any] | None:
    """The mark of a job that has ended for good; None for one that is to be restarted, and for a single run with a
    configuration error."""
    if status.reason is Reason.DONE:
        return {"status": "done", "error": "", "exit": 0}
    if status.reason is Reason.NO_PROGRESS:
        return None if single else {"status": "failed", "error": status.message, "exit": status.exit_code}
    if status.reason is Reason.DIVERGED:
        return {"status": "failed", "error": execute.divergence(status), "exit": status.exit_code}
    if status.reason is Reason.CONFIGURATION and not single:
        return {"status": "failed", "error": execute.failure(status, log), "exit": status.exit_code}
    return None


def _print(line: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):  # stdout is closed: the log has the line
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def host_index(environ: Mapping[str, str] = os.environ) -> int:
    """0 for the first host of the first slice, which writes what all hosts would write alike; larger for the others.

    From the environment (`PEREX_T5X_HOST`, or what GKE sets), then from a TPU VM's metadata.

    >>> host_index({"TPU_WORKER_ID": "0", "MEGASCALE_SLICE_ID": "2"}) > 0, host_index({"PEREX_T5X_HOST": "0"})
    (True, 0)
    """
    if environ.get(HOST_INDEX):
        return _number(HOST_INDEX, environ[HOST_INDEX])
    if environ.get("TPU_WORKER_ID"):
        return _number("TPU_WORKER_ID", environ["TPU_WORKER_ID"]) + _slice(environ.get("MEGASCALE_SLICE_ID"))
    if not os.path.exists("/dev/accel0") and not os.path.exists("/dev/vfio/0"):
        return 0  # without a TPU there is no metadata
    worker = _metadata("agent-worker-number")
    slice_id = re.search(r"^MEGASCALE_SLICE_ID:\s*'?(\d+)", _metadata("tpu-env") or "", re.MULTILINE)
    return _number("agent-worker-number", worker or "0") + _slice(slice_id and slice_id[1])


def _slice(text: str | None) -> int:
    return launch_folder.SLICE * _number("MEGASCALE_SLICE_ID", text) if text else 0


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is not a number.")
    return int(text)


def _metadata(key: str) -> str | None:
    request = urllib.request.Request(_METADATA + key, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode().strip()
    except (urllib.error.URLError, OSError):
        return None


def command_fingerprint(job: Job) -> str:
    """Changes with the job's command: a run with other bindings is not finished."""
    return names.fingerprint("\0".join(job.arguments))


def read_marks(jobs: Iterable[Job], launch_id: str = "") -> dict[str, dict[str, Any]]:
    """Name -> mark, of the jobs that need not run again: done, or failed in a way that would repeat itself after hours.

    What has ended without progress is tried again in a new launch: its cause may be fixed by then.
    """
    jobs = list(jobs)
    with ThreadPoolExecutor(16) as pool:
        marks = dict(zip([job.name for job in jobs], pool.map(lambda job: read_mark(job.model_dir), jobs), strict=True))
    return {
        job.name: mark
        for job in jobs
        if (mark := marks[job.name])
        and mark.get("arguments") == command_fingerprint(job)
        and mark.get("exit") != Reason.CONFIGURATION.exit_code
        and (mark.get("exit") != Reason.NO_PROGRESS.exit_code or mark.get("launch_id") == launch_id)
    }


def read_mark(model_dir: str) -> dict[str, Any] | None:
    """The mark in a job's folder, in a bucket or on a disk; None if there is none."""
    from etils import epath

    try:
        return json.loads((epath.Path(model_dir) / FINISHED).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _keep_log(job: Job, path: str, most: int = 10_000_000) -> None:
    """Copies the end of a job's log into its folder, as the host may be gone soon. Must not fail the run."""
    try:
        with open(path, "rb") as f:
            f.seek(max(0, os.path.getsize(path) - most))
            _write(job, "log.txt", f.read())
    except Exception as e:
        print(f"the log was not copied: {type(e).__name__}: {e}", file=sys.stderr, flush=True)


def _write_mark(job: Job, mark: Mapping[str, Any]) -> None:
    text = json.dumps({"name": job.name, "arguments": command_fingerprint(job), **mark}, indent=1, ensure_ascii=False)
    _write(job, FINISHED, f"{text}\n".encode())


def _write(job: Job, name: str, content: bytes) -> None:
    from etils import epath

    folder = epath.Path(job.model_dir)
    if not is_remote(job.model_dir):  # folders in a bucket are parts of names
        folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
