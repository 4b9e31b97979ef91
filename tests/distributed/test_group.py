"""Two watchdogs over one store, in one process: a failure of one ends both, with the same words."""

import threading
import time

import pytest

from perex_t5x.distributed.group import Group
from perex_t5x.errors import Reason


class Memory:
    """Stands in for the coordination service."""

    def __init__(self):
        self._values = {}
        self._lock = threading.Lock()
        self.hangs = False

    def _answer(self):
        while self.hangs:
            time.sleep(0.01)

    def set(self, key, value):
        self._answer()
        with self._lock:
            self._values[key] = value

    def set_once(self, key, value):
        self._answer()
        with self._lock:
            return self._values.setdefault(key, value) == value

    def under(self, folder):
        self._answer()
        with self._lock:
            return {k.removeprefix(f"{folder}/"): v for k, v in self._values.items() if k.startswith(f"{folder}/")}


class Exits(dict):
    """Statuses by process; the thread that 'exits' ends its life here."""

    def of(self, index):
        def leave(status):
            self.setdefault(index, status)
            threading.Event().wait()

        return leave


@pytest.fixture
def processes():
    made = []

    def make(timeout=2.0, count=2):
        store, exits = Memory(), Exits()
        hosts = [f"host{i}" for i in range(count)]
        for i in range(count):
            options = {"timeout": timeout, "phase_timeout": 60.0, "exit_process": exits.of(i)}
            made.append(Group(store, i, hosts, **options))
        return store, exits, made

    yield make
    for group in made:
        group._over.set()


def eventually(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_error_in_one_ends_all(processes, capsys, monkeypatch):
    written = []
    monkeypatch.setattr("perex_t5x.cli.status.write", lambda *_, **more: written.append(more.get("caused_by")))
    _, exits, (first, second) = processes()
    first.start()
    second.start()
    threading.Thread(
        target=second.leave, args=("the disk is full", Reason.ERROR, "ERROR: the disk is full"), daemon=True
    ).start()
    eventually(lambda: exits == {0: 1, 1: 1})
    printed = capsys.readouterr().err
    assert "ERROR: process 1 (host1) stopped: the disk is full" in printed
    assert printed.count("\nERROR: the disk is full") + printed.startswith("ERROR: the disk is full") == 1
    assert written == [1], "the other one says because of whom; the first has said why itself"


def test_the_reason_travels(processes):
    _, exits, (first, second) = processes()
    first.start()
    second.start()
    threading.Thread(target=first.leave, args=("a bad value", Reason.CONFIGURATION, ""), daemon=True).start()
    eventually(lambda: exits == {0: 2, 1: 2})


def test_a_silent_process_is_named(processes, capsys):
    _, exits, (first, _, third) = processes(timeout=1.0, count=3)
    first.start()
    third.start()  # the second never comes
    eventually(lambda: exits == {0: 7, 2: 7})
    assert capsys.readouterr().err.count("process 1 (host1) has not answered for 1 s") == 2


def test_a_suspended_coordinator_is_named(processes, capsys):
    store, exits, (_, second) = processes(timeout=1.0)
    second.start()
    store.hangs = True
    eventually(lambda: exits == {1: 7})
    store.hangs = False
    assert "process 0 (host0) has not answered" in capsys.readouterr().err


def test_cleaning_up_that_hangs_is_cut_short(processes, capsys):
    _, exits, (first, second) = processes(timeout=1.0)
    first.start()
    second.start()
    second.failing("the data are gone", Reason.ERROR)  # and then its main thread waits for ever
    eventually(lambda: exits == {0: 1, 1: 1})
    assert "process 1 (host1) stopped: the data are gone" in capsys.readouterr().err


def test_a_request_to_stop_reaches_all(processes):
    _, exits, (first, second) = processes(timeout=5.0)
    for _ in range(3):
        first.stopping.passes()
    first.start()
    second.start()
    second.stopping.requested = True
    eventually(lambda: second.stopping._agreed and first.stopping._agreed)
    assert [second.stopping.passes() for _ in range(4)] == [True, True, True, False]
    assert not first.stopping.passes()
    assert exits == {}
