"""Every way in which a command ends: its exit code, and the status that it leaves, through real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from perex_t5x import cli
from perex_t5x.cli import status
from perex_t5x.cli.subprocesses import Child
from perex_t5x.errors import Reason
from perex_t5x.interrupts import Interrupts
from perex_t5x.launching import local
from tests.distributed import support


def start(tmp_path, *arguments, name="status.json", module="tests.cli.ending"):
    return Child(
        [sys.executable, "-m", module, *arguments],
        env=support.environment(),
        cwd=str(support.ROOT),
        log=str(tmp_path / f"{name}.log"),
        status_file=str(tmp_path / name),
    )


def ended(tmp_path, *arguments, **options):
    child = start(tmp_path, *arguments, **options)
    child.wait()
    return child.returncode, child.status(), child.said()


@pytest.mark.parametrize("kind", ["expected", "unexpected"])
def test_threads_of_libraries_do_not_keep_a_process_that_has_failed(kind):
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.ending", "stuck", kind],
        cwd=support.ROOT, env=support.environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert ("ERROR: it cannot continue" if kind == "expected" else "RuntimeError: a bug") in done.stderr


def test_objects_of_libraries_do_not_keep_a_process_that_has_failed():
    """What is destroyed with the interpreter may take for ever, too."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.ending", "torn_down"],
        cwd=support.ROOT, env=support.environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "ERROR: it cannot continue" in done.stderr


def test_whoever_catches_the_end_of_a_command_goes_on():
    code = (
        "import time; from perex_t5x import cli; cli.GRACE = 0.05\n"
        "try: cli.run(lambda args: 7, 'A command.', ['name'])\n"
        "except SystemExit as e: time.sleep(0.5); print('went on after', e.code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=support.ROOT, env=support.environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "went on after 7\n"), done.stderr


def test_a_signal_to_one_command_is_not_heard_by_the_next():
    def interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    assert cli.guarded(interrupted) == Reason.INTERRUPTED.exit_code
    with Interrupts() as interrupts:
        assert not interrupts.stop_here()


def test_a_process_whose_command_has_ended_is_no_longer_its_run():
    def run():
        status.is_run()
        assert status.is_single_run()

    assert (
        cli.guarded(run) == 0 and not status.is_single_run()
    )  # a run's time begins with its process, another's does not


@pytest.mark.parametrize(
    ("how", "reason", "code", "message"),
    [
        ("done", Reason.DONE, 0, ""),
        ("configuration", Reason.CONFIGURATION, 2, "BATCH_SIZE = 3: no"),
        ("diverged", Reason.DIVERGED, 5, "the loss of step 3 is nan: stopped"),
        ("no_space", Reason.NO_SPACE, 8, "[Errno 28] No space left on device"),
        ("failed", Reason.ERROR, 1, "it cannot continue"),
        ("error", Reason.ERROR, 1, "RuntimeError: a bug"),
    ],
)
def test_an_end_of_its_own(tmp_path, how, reason, code, message):
    (tmp_path / "status.json").write_text('{"reason": "interrupted", "exit_code": 130}')  # of an earlier process
    returncode, found, said = ended(tmp_path, how)
    assert (returncode, found.exit_code, found.reason, found.message) == (code, code, reason, message)
    assert found == status.read(str(tmp_path / "status.json")) and found.host == socket.gethostname()
    assert (found.step, found.finding) == ((3, "the loss is nan") if how == "diverged" else (None, ""))
    assert ("Traceback" in said) == (how == "error") and (message in said)


def test_an_exit_code_that_main_returns(tmp_path):
    assert ended(tmp_path, "returns", "3")[1].reason is Reason.SOME_FAILED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_interrupted(tmp_path, number):
    child = start(tmp_path, "interrupted")
    while "ready" not in child.said():
        assert child.poll() is None
    child.send_signal(number)
    assert child.wait() == 130
    found = child.status()
    assert (found.reason, found.exit_code, found.step) == (Reason.INTERRUPTED, 130, 7)
    assert "Traceback" not in child.said() and ("interrupted" in child.said() or number.name in child.said())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("into", ["error", "nothing"])
def test_a_signal_while_starting_is_heard_whatever_a_library_makes_of_it(tmp_path, number, into):
    child = start(tmp_path, "swallowed", into)
    while "ready" not in child.said():
        assert child.poll() is None
    child.send_signal(number)
    assert child.wait() == 130
    assert child.status().reason is Reason.INTERRUPTED and number.name in child.status().message
    assert f"stopped by {number.name}" in child.said()
    assert "training" not in child.said() and "Traceback" not in child.said()


def test_killed_leaves_no_status(tmp_path):
    (tmp_path / "status.json").write_text('{"reason": "done", "exit_code": 0}')
    returncode, found, _ = ended(tmp_path, "killed")
    assert returncode == -signal.SIGKILL and not (tmp_path / "status.json").exists()
    assert (found.reason, found.exit_code, found.ended) == (Reason.KILLED, 137, "killed by SIGKILL")


def test_a_status_that_does_not_fit_the_exit_code_is_not_believed(tmp_path):
    """A process that says "done" and is then killed by a library's clean-up has not ended well."""
    (tmp_path / "status.json").write_text('{"reason": "done", "exit_code": 0}')
    assert status.of_process(-signal.SIGSEGV, str(tmp_path / "status.json")).ended == "killed by SIGSEGV"
    (tmp_path / "status.json").write_text("{")
    assert status.of_process(2, str(tmp_path / "status.json")).reason is Reason.CONFIGURATION


# --- among others -----------------------------------------------------------------------------------------------------


def flags(port, index, count=2):
    return [
        f"--coordinator_address=localhost:{port}",
        f"--process_count={count}",
        f"--process_index={index}",
        "--heartbeat_timeout=3",
    ]


@pytest.mark.parametrize(("index", "message"), [(0, "only 1 of 2 processes came"), (1, "cannot connect to the coord")])
def test_the_others_do_not_come(tmp_path, index, message):
    port = local.free_port()
    code, found, _ = ended(tmp_path, "0 dies", *flags(port, index), "--initialization_timeout=1")
    assert (code, found.reason) == (6, Reason.UNREACHABLE) and message in found.message and found.reason.retryable
    assert found.process_index == index


def test_the_coordinator_is_lost_after_meeting(tmp_path):
    port = local.free_port()
    met = threading.Event()

    def meet_and_leave():
        with socket.create_server(("localhost", port)) as server:
            connection, _ = server.accept()
            connection.recv(1000)
            met.set()
            connection.close()

    threading.Thread(target=meet_and_leave, daemon=True).start()
    code, found, _ = ended(tmp_path, "0 dies", *flags(port, 1), "--initialization_timeout=6")
    assert met.is_set() and "lost the connection to the coordinator" in found.message
    assert (code, found.reason) == (6, Reason.UNREACHABLE) and found.reason.retryable


@pytest.mark.parametrize("index", [0, 1])
def test_a_peer_dies(tmp_path, index):
    port = local.free_port()
    children = [start(tmp_path, f"{index} dies", *flags(port, i), name=f"{i}.json") for i in range(2)]
    assert children[index].wait() == -signal.SIGKILL
    other = children[1 - index]
    other.wait()
    found = other.status()
    assert (other.returncode, found.reason) == (7, Reason.PEER_LOST), other.said()
    assert f"process {index} (" in found.message and found.process_index == 1 - index
    assert found == status.read(str(tmp_path / f"{1 - index}.json"))


def test_an_error_of_one_is_the_reason_of_all(tmp_path):
    port = local.free_port()
    children = [start(tmp_path, "1 fails", *flags(port, i), name=f"{i}.json") for i in range(2)]
    for child in children:
        assert child.wait() == 2, child.said()
    own, others = children[1].status(), children[0].status()
    assert own.reason is others.reason is Reason.CONFIGURATION
    assert own.message == "TRAIN_STEPS = 0: no" and "process 1 (" in others.message and own.message in others.message


# --- trainings --------------------------------------------------------------------------------------------------------


def test_a_training_that_diverges(tmp_path):
    """Its folder has the status, too, and a supervisor learns step and finding."""
    bindings = ("TRAIN_STEPS = 50", "BASE_LEARNING_RATE = 1e30", "train_script.train.train_eval_dataset_cfg = None")
    arguments = support.train_arguments(tmp_path / "run", *bindings)
    code, found, said = ended(tmp_path, *arguments, module="perex_t5x.train")
    assert (code, found.reason) == (5, Reason.DIVERGED), said
    assert found.step >= 1 and found.finding in ("the loss is nan", "the loss is inf", "the parameters are not finite")
    assert status.read(str(tmp_path / "run")) == found


def test_a_status_is_not_for_the_children_of_a_command(tmp_path):
    code = f"import os; from perex_t5x import cli; cli.guarded(lambda: 0); print({status.VARIABLE!r} in os.environ)"
    path = tmp_path / "s.json"
    environment = {**support.environment(), status.VARIABLE: str(path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=os.sep)
    assert done.stdout.strip() == "False" and json.loads(path.read_text())["reason"] == "done"


def test_a_process_that_hangs_shows_its_threads():
    code = "import time; from perex_t5x import cli; cli.guarded(lambda: (print('ready', flush=True), time.sleep(60)))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    shown = process.stderr.readline() + process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert "most recent call first" in shown and process.returncode == 0


def test_the_last_step_is_in_the_file_that_a_supervisor_names(tmp_path):
    steps = "[status.at_step(n) for n in (3, 4, 5)]"
    code = f"from perex_t5x import cli; from perex_t5x.cli import status; cli.guarded(lambda: {steps} and None)"
    environment = {**support.environment(), status.STEP_VARIABLE: str(tmp_path / "step")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert (tmp_path / "step").read_text() == "5"
