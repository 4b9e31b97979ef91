"""Processes that meet, or do not: every one of them is told the same reason, in time."""

import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from perex_t5x.distributed import rendezvous
from perex_t5x.distributed.process_info import ProcessInfo
from perex_t5x.errors import ConfigError, UnreachableError


@pytest.fixture
def port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.fixture(autouse=True)
def _no_service(monkeypatch):
    monkeypatch.setattr(rendezvous, "_wait_for_service", lambda *arguments: None)


def meet(port, *processes, timeout=30.0, attempt=""):
    """What each of the processes (index, count) returns or raises; they are threads here."""

    def one(process):
        try:
            return rendezvous.meet(ProcessInfo(f"localhost:{port}", process[1], process[0], attempt=attempt), timeout)
        except (ConfigError, UnreachableError) as e:
            return f"{e.reason}: {e}"

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def connected(port):
    """A connection to whoever listens, as soon as somebody does."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("localhost", port))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_all_learn_all_hosts(port):
    results = meet(port, (2, 3), (0, 3), (1, 3))
    assert results == [[socket.gethostname()] * 3] * 3


def test_missing_process_is_named(port):
    begun = time.monotonic()
    results = meet(port, (0, 3), (1, 3), timeout=1.0)
    assert time.monotonic() - begun < 10
    assert len(set(results)) == 1
    assert "only 2 of 3 processes came within 1 s" in results[0] and "missing: process 2." in results[0]


def test_two_counts_within_an_attempt(port):
    first, second = meet(port, (0, 2), (1, 3), attempt="1")
    assert "process 0 (" in first and "says 2" in first and "says 3" in first and "--process_count" in first
    assert first.startswith("configuration: ") and second == first


def test_two_counts_may_be_of_two_attempts(port):
    """Nothing says that they were started together: a later one may fit."""
    results = meet(port, (0, 2), (1, 3), timeout=2.0)
    assert all(r.startswith("unreachable: ") and "says 2" in r and "says 3" in r for r in results)
    with ThreadPoolExecutor(2) as pool:
        wrong = pool.submit(lambda: meet(port, (1, 3), timeout=2.0)[0])
        assert meet(port, (0, 2), (1, 2)) == [[socket.gethostname()] * 2] * 2
        assert wrong.result().startswith("unreachable: ")


def test_two_processes_with_one_index_within_an_attempt(port):
    results = meet(port, (0, 3), (1, 3), (1, 3), attempt="1")
    assert all(r.startswith("configuration: two processes have --process_index=1") for r in results)


def test_of_two_processes_with_one_index_the_later_one_counts(port):
    """A host that was lost leaves a connection behind that nobody closes."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: meet(port, (0, 3))[0])
        lost = connected(port)
        lost.sendall(b'{"greeting": "perex_t5x rendezvous 1", "index": 1, "count": 3, "host": "lost", "pid": 1}\n')
        assert b"waiting" in lost.recv(1000)
        later = pool.submit(lambda: meet(port, (1, 3))[0])
        assert lost.recv(1000) == b""  # its place is taken
        assert meet(port, (2, 3))[0] == later.result() == first.result() == [socket.gethostname()] * 3
        lost.close()


def test_second_process_0_on_a_host(port):
    with socket.create_server(("", port)):
        (result,) = meet(port, (0, 2), timeout=0.5)
    assert result.startswith("unreachable: process 0 cannot listen at port") and "--process_index=0" in result
    if os.geteuid():
        assert meet(1, (0, 2))[0].startswith("configuration: process 0 cannot listen at port 1 ")


def test_processes_of_another_attempt_do_not_meet(port):
    """Both process 0s are on one host: the second waits for the port, and its callers for it."""
    with ThreadPoolExecutor(2) as pool:
        stale = pool.submit(lambda: meet(port, (0, 2), timeout=3.0, attempt="1")[0])
        connected(port).close()
        assert meet(port, (0, 2), (1, 2), attempt="2") == [[socket.gethostname()] * 2] * 2
        assert "belongs to attempt '2' of a run, and the coordinator" in stale.result()
        assert stale.result().startswith("unreachable: only 1 of 2 processes came within 3 s")


def test_a_coordinator_that_does_not_answer_any_more_is_left(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "_ACKNOWLEDGE_SECONDS", 0.3)
    with ThreadPoolExecutor(1) as pool:
        with socket.create_server(("localhost", port)):  # as if it were suspended
            caller = pool.submit(lambda: meet(port, (1, 2))[0])
            assert "something else answers" in meet(port, (1, 2), timeout=1.0)[0]
        assert meet(port, (0, 2))[0] == caller.result() == [socket.gethostname()] * 2


def test_unreachable_coordinator(port):
    begun = time.monotonic()
    (result,) = meet(port, (1, 2), timeout=1.0)
    assert time.monotonic() - begun < 10
    assert f"process 1 cannot connect to the coordinator (process 0) at localhost:{port} within 1 s" in result
    assert "refused" in result and "--initialization_timeout" in result


def test_unknown_host():
    with pytest.raises(UnreachableError, match="coordinator .* at no-such-host.invalid:1 within 1 s"):
        rendezvous.meet(ProcessInfo("no-such-host.invalid:1", 2, 1), 1.0)


def test_a_process_that_comes_again_after_leaving_is_not_counted_twice(port):
    def visitor():
        """Says it is process 1, and is killed."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("localhost", port)) as s:
                    s.sendall(
                        b'{"greeting": "perex_t5x rendezvous 1", "index": 1, "count": 3, "host": "x", "pid": 1}\n'
                    )
                    return
            except OSError:
                time.sleep(0.05)

    thread = threading.Thread(target=visitor)
    thread.start()

    def late(process):
        thread.join()
        return meet(port, process)[0]

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(lambda: meet(port, (0, 3))[0])
        others = [pool.submit(late, (i, 3)) for i in (1, 2)]
        assert first.result() == [socket.gethostname()] * 3
        assert all(o.result() == first.result() for o in others)


def test_strangers_are_ignored_and_recognised(port):
    def stranger():
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("localhost", port)) as s:
                    s.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    return s.recv(100)
            except OSError:
                time.sleep(0.05)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(lambda: meet(port, (0, 2))[0])
        assert pool.submit(stranger).result() == b""
        assert meet(port, (1, 2))[0] == first.result() == [socket.gethostname()] * 2

    with socket.create_server(("localhost", port)) as server:

        def serve():
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        threading.Thread(target=serve, daemon=True).start()
        result = meet(port, (1, 2), timeout=1.0)[0]
        assert result.startswith("unreachable: ") and "something else answers" in result


@pytest.mark.parametrize(
    "message",
    [
        b"\x80\x04.",
        b"[1]",
        b'{"greeting": "perex_t5x rendezvous 1"}',
        b'{"greeting": "perex_t5x rendezvous 1", "index": [], "count": 2, "host": "x", "pid": 1}',
        b'{"greeting": "perex_t5x rendezvous 1", "index": 7, "count": 2, "host": "x", "pid": 1}',
        b'{"greeting": "perex_t5x rendezvous 1", "index": 1, "count": 2, "host": {}, "pid": 1, "attempt": 3}',
    ],
)
def test_what_a_stranger_says_ends_nothing(port, message):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: meet(port, (0, 2))[0])
        stranger = connected(port)
        stranger.sendall(message + b"\n")
        assert stranger.recv(1000) == b""  # sent away without a word
        stranger.close()
        assert meet(port, (1, 2))[0] == first.result() == [socket.gethostname()] * 2


def test_who_does_not_know_the_secret_is_sent_away(port, monkeypatch):
    monkeypatch.setenv(rendezvous.SECRET, "correct horse")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: meet(port, (0, 2))[0])
        stranger = connected(port)
        hello = {"greeting": "perex_t5x rendezvous 1", "index": 1, "count": 2, "host": "x", "pid": 1, "proof": "0" * 64}
        stranger.sendall(json.dumps(hello).encode() + b"\n")
        assert b"has not proven that it knows PEREX_T5X_SECRET" in stranger.recv(4000)
        stranger.close()
        assert meet(port, (1, 2))[0] == first.result() == [socket.gethostname()] * 2


def test_a_coordinator_that_does_not_know_the_secret_is_not_believed(port, monkeypatch, caplog):
    monkeypatch.setenv(rendezvous.SECRET, "correct horse")
    with socket.create_server(("", port)) as impostor, ThreadPoolExecutor(1) as pool:
        caller = pool.submit(lambda: meet(port, (1, 2), timeout=1.0)[0])
        connection, _ = impostor.accept()
        hello = connection.recv(4000)
        assert b"correct horse" not in hello
        connection.sendall(b'{"greeting": "perex_t5x rendezvous 1", "hosts": ["x", "x"]}\n')
        assert caller.result().startswith("unreachable: ")
        connection.close()
    assert "the coordinator there has not proven that it knows PEREX_T5X_SECRET" in caplog.text
