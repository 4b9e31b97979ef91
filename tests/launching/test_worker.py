"""The worker: jobs in their order, marks, exit codes, signals."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from perex_t5x.errors import ConfigError, Reason
from perex_t5x.launching import collect, local, reporter, worker
from perex_t5x.launching.launch_folder import ATTEMPT, SLICE, LaunchFolder, log_parts
from perex_t5x.launching.spec import FINAL_REASONS, Job, Work
from tests.distributed import support


def job(tmp_path, name, code):
    code = f"open({str(tmp_path / 'order')!r}, 'a').write({name + ' '!r}); import sys, os, time\n{code}"
    return Job(name, ("-c", code), str(tmp_path / "out" / name))


def ends(reason, **more):
    """Code that ends as `perex_t5x.train` does."""
    code = Reason(reason).exit_code
    status = json.dumps({"reason": reason, "exit_code": code, **more})
    return f"open(os.environ['PEREX_T5X_STATUS_FILE'], 'w').write({status!r}); sys.exit({code})"


def start(tmp_path, jobs, sweep=True, index="0", launch_id="id", attempt="0", **options):
    more = {"launch": "w", "launch_id": launch_id}
    work = Work("w", str(tmp_path / "out"), tuple(jobs), {"name": "w"} if sweep else None, **more)
    (tmp_path / "jobs.json").write_text(work.to_json())
    command = [sys.executable, "-m", "perex_t5x.launching.worker", f"--jobs={tmp_path / 'jobs.json'}"]
    env = {**os.environ, worker.HOST_INDEX: index, ATTEMPT: attempt, "PEREX_T5X_REPORT_SECONDS": "0.2"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs the worker in this process, which starts faster: (exit code, what it printed)."""

    def run(jobs, sweep=True, index="0", launch_id="id", attempt="0"):
        what = {"name": "w"} if sweep else None
        work = Work("w", str(tmp_path / "out"), tuple(jobs), what, launch="w", launch_id=launch_id)
        (tmp_path / "jobs.json").write_text(work.to_json())
        for name, value in ((worker.HOST_INDEX, index), (ATTEMPT, attempt), ("PEREX_T5X_REPORT_SECONDS", "0.2")):
            monkeypatch.setenv(name, value)
        code = worker.main([f"--jobs={tmp_path / 'jobs.json'}"])
        return code, capfd.readouterr().out

    return run


def ran(tmp_path):
    return (tmp_path / "order").read_text().split()


def test_all_jobs_then_none_again(tmp_path):
    jobs = [job(tmp_path, "a", "print('hello of a')"), job(tmp_path, "b", "")]
    process = start(tmp_path, jobs)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "hello of a" in said
    assert (tmp_path / "logs" / "a.log").read_text() == "hello of a\n"
    assert json.loads((tmp_path / "out/b/finished.json").read_text())["status"] == "done"
    process = start(tmp_path, jobs)
    assert "2 of 2 jobs are finished already" in process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert ran(tmp_path) == ["a", "b"]
    # Other bindings: not finished.
    assert worker.read_marks([Job("a", ("-c", "other"), jobs[0].model_dir)]) == {}


def test_failures_of_a_sweep_are_results_but_a_crash_is_not(tmp_path):
    jobs = [
        job(
            tmp_path, "diverges", ends("diverged", step=7, finding="the loss is nan", message="the loss of step 7 ...")
        ),
        job(tmp_path, "misconfigured", ends("configuration", message="BATCH_SIZE = 3: no")),
        job(tmp_path, "crash", "sys.exit(0 if os.path.exists('ok') else 1)"),
        job(tmp_path, "last", ""),
    ]
    process = start(tmp_path, jobs)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "diverged at step 7: the loss is nan" in said
    assert ran(tmp_path) == ["diverges", "misconfigured", "crash"]
    (tmp_path / "ok").touch()  # also: jobs run in the folder of jobs.json
    process = start(tmp_path, jobs)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 3, said
    # The configuration error is tried again, as its cause may be fixed; what diverged would diverge again.
    assert ran(tmp_path)[3:] == ["misconfigured", "crash", "last"]
    assert "BATCH_SIZE = 3: no" in worker.read_mark(jobs[1].model_dir)["error"]


def test_a_single_runs_slip_ends_with_2(tmp_path, run):
    assert run([job(tmp_path, "a", "sys.exit(2)")], sweep=False)[0] == 2


@pytest.mark.parametrize("sweep", [True, False])
@pytest.mark.parametrize("reason", ["unreachable", "peer_lost", "no_space", "error"])
def test_what_may_pass_is_started_again(tmp_path, run, sweep, reason):
    assert run([job(tmp_path, "a", ends(reason))], sweep=sweep)[0] == Reason(reason).exit_code
    assert Reason(reason) not in FINAL_REASONS, "launchers restart it"
    assert worker.read_marks([Job("a", (), str(tmp_path / "out" / "a"))]) == {}


def test_only_the_first_host_writes(tmp_path, run):
    assert run([job(tmp_path, "a", "")], index="3")[0] == 0
    # But its logs.
    assert [str(p.relative_to(tmp_path / "out")) for p in sorted((tmp_path / "out").rglob("*")) if p.is_file()] == [
        ".launch/w/logs/id.0/0-0003/worker.00000.log"
    ]


def test_no_progress_ends_a_single_run(tmp_path, run):
    """Three failures from the same step; a newer checkpoint is progress."""
    code = "os.makedirs('out/a/checkpoint_5/state/_METADATA', exist_ok=True)\nraise ValueError('some bug')"

    def attempt(number, **more):
        return run([job(tmp_path, "a", code)], sweep=False, attempt=str(number), **more)

    assert [attempt(n)[0] for n in range(3)] == [1, 1, 1]  # the first one began without a checkpoint
    exit_code, said = attempt(3)
    assert exit_code == Reason.NO_PROGRESS.exit_code and Reason.NO_PROGRESS in FINAL_REASONS
    assert "no progress: 3 attempts in a row began at step 5 and failed. The last error: host 0 (slice 0), " in said
    assert "ValueError: some bug" in said
    # A restart, on whatever host, runs nothing; a new launch does.
    assert attempt(4, index="1")[0] == 9 and len(ran(tmp_path)) == 4
    assert attempt(0, launch_id="later")[0] == 1 and len(ran(tmp_path)) == 5


def test_no_progress_of_one_run_of_a_sweep(tmp_path, run):
    jobs = [job(tmp_path, "a", "sys.exit(1)"), job(tmp_path, "b", "")]
    assert [run(jobs, attempt=attempt)[0] for attempt in "0123"] == [1, 1, 1, 3]
    assert ran(tmp_path) == ["a", "a", "a", "b"]
    assert worker.read_mark(jobs[0].model_dir)["exit"] == 9
    assert list(worker.read_marks(jobs, "id")) == ["a", "b"] and list(worker.read_marks(jobs, "later")) == ["b"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_job_and_a_second_worker_is_refused(tmp_path, number):
    code = "import signal\nfor n in (2, 15): signal.signal(n, lambda n, f: (print('saved'), sys.exit(130)))\n"
    code += "print('ready', flush=True)\ntime.sleep(60)"
    process = start(tmp_path, [job(tmp_path, "a", code), job(tmp_path, "b", "")])
    while "ready" not in process.stdout.readline():
        pass
    second = start(tmp_path, [job(tmp_path, "a", code)])
    assert "running on this host already" in second.communicate(timeout=60)[0]
    assert second.returncode == 4
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "saved" in said
    assert ran(tmp_path) == ["a"]


def test_the_job_ends_with_a_killed_worker(tmp_path):
    process = start(tmp_path, [job(tmp_path, "a", "print(os.getpid(), flush=True)\ntime.sleep(100)")])
    pid = None
    while pid is None:
        line = process.stdout.readline().strip()
        pid = int(line) if line.isdigit() else None
    process.kill()
    process.wait()
    for _ in range(100):
        try:
            state = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the job outlives its worker")


def test_which_host():
    assert worker.host_index({}) == 0
    first = worker.host_index({"TPU_WORKER_ID": "0", "MEGASCALE_SLICE_ID": "0"})
    others = [
        worker.host_index({"TPU_WORKER_ID": w, "MEGASCALE_SLICE_ID": s})
        for w, s in (("1", "0"), ("0", "1"), ("1", "1"))
    ]
    assert first == 0 and 0 not in others and len(set(others)) == 3
    with pytest.raises(ConfigError):
        worker.host_index({worker.HOST_INDEX: "x"})


def test_jobs_json_that_cannot_be_read(tmp_path):
    (tmp_path / "jobs.json").write_text("{}")
    command = [sys.executable, "-m", "perex_t5x.launching.worker", f"--jobs={tmp_path / 'jobs.json'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "jobs.json cannot be read" in done.stderr and "Traceback" not in done.stderr


def folder_of(tmp_path):
    return LaunchFolder.of(str(tmp_path / "out"), "w")


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def test_logs_errors_and_state_are_in_the_launch_folder(tmp_path):
    """While the job runs, and at its end, from a host that is not the first."""
    code = "print('one', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)\nprint('two', flush=True)\n"
    code += ends("error", message="ValueError: x", time=1700000000.25, process_index=3)
    process = start(tmp_path, [job(tmp_path, "a", code)], sweep=False, index=str(SLICE + 3), attempt="7")
    logs = tmp_path / "out" / ".launch" / "w" / "logs" / "id.7" / "1-0003"
    wait_for(lambda: (logs / "job-a.00000.log").exists())
    assert (logs / "job-a.00000.log").read_text() == "one\n"
    (tmp_path / "go").touch()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert (logs / "job-a.00000.log").read_text() == "one\ntwo\n"
    own = (logs / "worker.00000.log").read_text()
    assert "worker: job 1 of 1: a" in own and "a: error (exit code 1): ValueError: x" in own
    error = collect.first_error(str(tmp_path / "out"), "w")
    assert str(error) == "host 3 (slice 1), 22:13:20.250, a: error (exit code 1): ValueError: x"
    assert "two" in error.traceback and error.kind == "own"
    assert not (logs.parents[2] / "state.json").exists()  # host 0 alone


def test_the_launch_is_asked_to_stop_in_its_folder(tmp_path, run):
    """The job saves; two workers of it, of which only one has looked, both end with `stopped`; a new launch runs again."""
    code = "import signal\nsignal.signal(15, lambda n, f: (print('saved', flush=True), sys.exit(130)))\n"
    code += "open(os.environ['PEREX_T5X_STEP_FILE'], 'w').write('12')\nprint('ready', flush=True)\ntime.sleep(60)"
    process = start(tmp_path, [job(tmp_path, "a", code)], sweep=False)
    folder = folder_of(tmp_path)
    wait_for(lambda: (folder.read("state.json") or {}).get("step") == 12)
    state = folder.read("state.json")
    assert (state["phase"], state["job"], state["jobs"], state["attempt"]) == ("running", "a", 1, "id.0")
    folder.write({"launch_id": "id"}, "jobs.json")
    folder.request_stop()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == Reason.STOPPED.exit_code and "saved" in said, said
    state = folder.read("state.json")
    assert (state["phase"], state["reason"]) == ("ended", "stopped")
    assert folder.was_stopped("id.0") and collect.first_error(str(tmp_path / "out"), "w") is None
    # One that is restarted by a launcher does nothing; in a later launch it runs.
    stopped = run([job(tmp_path, "a", "sys.exit(130)")], sweep=False, attempt="1", index="1")
    assert stopped[0] == Reason.STOPPED.exit_code
    assert run([job(tmp_path, "a", "")], sweep=False, launch_id="later")[0] == 0


def test_parts_of_a_log(tmp_path, monkeypatch):
    monkeypatch.setattr(reporter, "_PART_BYTES", 10)
    monkeypatch.setattr(reporter, "_MOST_PARTS", 3)
    log = tmp_path / "a.log"
    log.write_text("of an earlier attempt\n")
    folder = LaunchFolder(str(tmp_path / "launch"))
    made = reporter.Reporter(folder, "0", "0-0000", "id", False, lambda: None, period=0.01)
    made.begin_job(str(log), str(tmp_path / "step"), job="a")

    def parts():
        names = folder.entries("logs", "0", "0-0000")
        return ["".join(open(folder.join("logs", "0", "0-0000", n)).read() for n in log_parts(names).get("job-a", []))]

    def append(text):
        with log.open("a") as f:
            f.write(text)

    append("01234")
    wait_for(lambda: parts() == ["01234"])
    append("56789abcdefg")
    wait_for(lambda: parts() == ["0123456789abcdefg"])
    append("hijklmnopqrstuvwxyz")  # too many parts: the middle is left out
    made.close()
    assert parts() == ["0123456789abcdefghijqrstuvwxyz"]


def test_a_bucket_that_fails_does_not_fail_the_job(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".launch").write_text("a file in its place")
    jobs = [job(tmp_path, "a", "")]
    process = start(tmp_path, jobs)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "was not updated (1 times so far)" in said and worker.read_mark(jobs[0].model_dir)["status"] == "done"


@pytest.mark.parametrize("handles", [True, False])
def test_a_job_that_does_not_stop_shows_where_it_is(tmp_path, monkeypatch, handles):
    """One without a handler, which would die of the signal, is left alone."""
    monkeypatch.setenv("PEREX_T5X_STACKS_SECONDS", "0.3")
    code = "import signal, faulthandler\nsignal.signal(15, signal.SIG_IGN)\n"
    code += "faulthandler.register(signal.SIGUSR1)\n" if handles else ""
    code += "print('ready', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)"
    process = start(tmp_path, [job(tmp_path, "a", code)])
    while "ready" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    if handles:
        while "most recent call first" not in process.stdout.readline():
            pass
    else:
        time.sleep(2)
    (tmp_path / "go").touch()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said


@pytest.mark.slow
def test_a_bucket_that_may_not_be_read_is_a_configuration_error(cloud_storage, tmp_path):
    work = Work("w", f"{cloud_storage.bucket}/x", (Job("a", ("-c", ""), f"{cloud_storage.bucket}/x"),), launch="w")
    (tmp_path / "jobs.json").write_text(work.to_json())
    cloud_storage.faults(deny=["storage.objects.get", "storage.objects.list"])
    command = [sys.executable, "-m", "perex_t5x.launching.worker", f"--jobs={tmp_path / 'jobs.json'}"]
    env = {**os.environ, **cloud_storage.environment, worker.HOST_INDEX: "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ERROR: " in done.stdout and "storage.objects.get" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble,reasons",
    [("error in 1 at 20", ("error", "error")), ("hang in 1 at 20", ("peer_lost", "peer_lost")),
     ("kill in 1 at 20", ("peer_lost", "killed"))],
)  # fmt: skip
def test_of_two_real_processes_the_one_that_failed_is_the_first_error(tmp_path, trouble, reasons):
    made = Job("a", ("-m", "tests.distributed.worker"), str(tmp_path / "out"))
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    found = {"JAX_COORDINATOR_ADDRESS": f"localhost:{local.free_port()}", "JAX_NUM_PROCESSES": "2"}
    work = Work("w", str(tmp_path / "out"), (made,), launch="w", launch_id="id")
    hosts = []
    for index in "01":
        (tmp_path / index).mkdir()
        (tmp_path / index / "jobs.json").write_text(work.to_json())
        command = [sys.executable, "-m", "perex_t5x.launching.worker", f"--jobs={tmp_path / index / 'jobs.json'}"]
        env = support.environment(TROUBLE=trouble, XLA_FLAGS=flags, JAX_PLATFORMS="cpu", JAX_PROCESS_ID=index, **found)
        env |= {worker.HOST_INDEX: index, ATTEMPT: "0"}
        hosts.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [host.communicate(timeout=180)[0] for host in hosts]
    errors = folder_of(tmp_path).errors("id.0")
    assert [(e.host, e.kind, str(e.reason)) for e in errors] == [
        ("0-0001", "own", reasons[1]),
        ("0-0000", "echo", reasons[0]),
    ], said
    first = collect.first_error(str(tmp_path / "out"), "w")
    assert first == errors[0] and str(first).startswith("host 1 (slice 0), ")
    if trouble.startswith("hang"):
        assert "most recent call first" in first.traceback, "where it hangs"
