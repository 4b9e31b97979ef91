"""Processes that meet, or do not: every one of them is told the same reason, in time."""

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
    monkeypatch.setattr(rendezvous, "_wait_for_service", lambda info, deadline: None)


def meet(port, *processes, timeout=30.0):
    """What each of the processes (index, count) returns or raises; they are threads here."""

    def one(process):
        try:
            return rendezvous.meet(ProcessInfo(f"localhost:{port}", process[1], process[0]), timeout)
        except (ConfigError, UnreachableError) as e:
            return str(e)

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def test_all_learn_all_hosts(port):
    results = meet(port, (2, 3), (0, 3), (1, 3))
    assert results == [[socket.gethostname()] * 3] * 3


def test_missing_process_is_named(port):
    begun = time.monotonic()
    results = meet(port, (0, 3), (1, 3), timeout=1.0)
    assert time.monotonic() - begun < 10
    assert len(set(results)) == 1
    assert "only 2 of 3 processes came within 1 s" in results[0] and "missing: process 2." in results[0]


def test_two_counts(port):
    results = meet(port, (0, 2), (1, 3))
    assert len(set(results)) == 1
    assert "process 0 (" in results[0] and "says 2" in results[0] and "says 3" in results[0]
    assert "--process_count" in results[0]


def test_two_processes_with_one_index(port):
    results = meet(port, (0, 3), (1, 3), (1, 3))
    assert all("two processes have --process_index=1" in r for r in results)


def test_second_process_0_on_a_host(port):
    results = meet(port, (0, 2), (0, 2), timeout=1.0)
    assert any("cannot listen at port" in r and "--process_index=0" in r for r in results)


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
        assert "something else answers" in meet(port, (1, 2))[0]
