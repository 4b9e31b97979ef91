"""Real processes whose coordinator is late, of an earlier attempt, or dies at the start: a reason to wait, or to restart."""

import contextlib
import signal
import socket
import time

import pytest

from perex_t5x.errors import Reason
from perex_t5x.launching.local import free_port
from tests.distributed import support

WORKER, LEFTOVER = "tests.distributed.worker", "tests.distributed.leftover"


@pytest.fixture
def start():
    """Starts processes (index, count) of an attempt; all are ended with the test."""
    port, started = free_port(), []

    def one(index, count, module=WORKER, attempt="2", **env):
        where = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(count)}
        ids = {
            "JAX_PROCESS_ID": str(index),
            "PEREX_T5X_ATTEMPT": attempt,
            "STEPS": "5",
            "INITIALIZATION_TIMEOUT": "300",
        }
        process = support.start_process(module, devices=2, **{**where, **ids, **env})
        process.port = port
        started.append(process)
        return process

    yield one
    for process in started:
        process.kill()
        process.communicate()


def until_listening(process):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        with contextlib.suppress(OSError):
            return socket.create_connection(("localhost", process.port), timeout=1.0).close()
        time.sleep(0.1)
    raise AssertionError("nobody listens")


def until_said(process, words):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return
    raise AssertionError("".join(lines))


def ended(process):
    output, _ = process.communicate(timeout=400)
    return process.returncode, output


def test_a_coordinator_of_an_earlier_attempt_is_waited_out(start):
    """It listens for three processes where there are now two; the new coordinator comes last, and waits for its port."""
    stale = start(0, 3, LEFTOVER, attempt="1", MODE="wait")
    until_listening(stale)
    other = start(1, 2)
    first = start(0, 2)
    until_said(other, "belongs to attempt '2'")
    until_said(first, "cannot listen at port")
    stale.send_signal(signal.SIGKILL)
    assert [ended(first)[0], ended(other)[0]] == [0, 0]


@pytest.mark.parametrize("mode", ["connected", pytest.param("met", marks=pytest.mark.slow)])
def test_a_coordinator_that_dies_at_the_start_is_a_lost_peer(start, mode):
    until_listening(start(0, 2, LEFTOVER, MODE=mode))
    # On a busy machine it may die before JAX has connected them, which then waits for all of this time.
    code, output = ended(start(1, 2, INITIALIZATION_TIMEOUT="15" if mode == "met" else "60"))
    assert code == Reason.PEER_LOST.exit_code, output
    assert "the coordinator" in output


@pytest.mark.slow
def test_a_run_of_an_earlier_attempt_is_waited_out(start):
    """JAX's own service answers at the address, and then nobody, for a while."""
    stale = [start(i, 2, attempt="1", STEPS="1000000") for i in range(2)]
    until_listening(stale[0])
    time.sleep(5)  # they compute
    other = start(1, 2)
    until_said(other, "something else answers")
    for process in stale:
        process.send_signal(signal.SIGKILL)
        process.wait()
    time.sleep(2)
    first = start(0, 2)
    assert [ended(first)[0], ended(other)[0]] == [0, 0]
