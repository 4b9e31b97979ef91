"""A thread that writes: in order, nothing dropped, errors where the caller sees them."""

import signal
import threading
import time

import pytest

from perex_t5x.background import BackgroundWriter, retried, uninterrupted


def test_the_caller_waits_only_for_a_full_queue():
    release, done = threading.Event(), []
    writer = BackgroundWriter("test", most=2)
    writer.put(release.wait)
    while writer._queue.qsize():  # the thread has taken it
        time.sleep(0.001)
    for number in range(2):
        writer.put(lambda number=number: done.append(number))
    third = threading.Thread(target=writer.put, args=(lambda: done.append(2),))
    third.start()
    third.join(0.2)
    assert third.is_alive() and not done  # waits rather than drops
    release.set()
    third.join()
    writer.close()
    assert done == [0, 1, 2] and not any(thread.name == "test" for thread in threading.enumerate())
    writer.close()


def test_the_first_error_ends_the_work():
    done = []
    writer = BackgroundWriter("test", explained=lambda e: RuntimeError(f"explained: {e}"))
    writer.put(lambda: 1 / 0)
    writer.put(lambda: done.append("after"))
    for call in (writer.flush, writer.raise_errors, lambda: writer.put(print), writer.close):
        with pytest.raises(RuntimeError, match="explained: division by zero"):
            call()
    assert not done


def test_ticks_come_without_anything_to_do():
    ticked, waits = threading.Event(), [0.01]

    def tick():
        if waits:
            return waits.pop()
        ticked.set()
        return None

    writer = BackgroundWriter("test", tick)
    writer.put(lambda: None)
    assert ticked.wait(30)
    writer.close()


def test_only_what_passes_is_tried_again():
    tries = []

    def fails(error, times):
        def write():
            tries.append(error)
            if len(tries) <= times:
                raise error
            return "written"

        return write

    assert retried(fails(TimeoutError(), 2), "writing", (0.0, 0.0)) == "written" and len(tries) == 3
    tries.clear()
    with pytest.raises(TimeoutError):
        retried(fails(TimeoutError(), 9), "writing", (0.0, 0.0))
    assert len(tries) == 3
    tries.clear()
    with pytest.raises(PermissionError):
        retried(fails(PermissionError(13, "no"), 9), "writing", (0.0, 0.0))
    assert len(tries) == 1


def test_an_interruption_waits_for_what_is_being_written():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("written")
            with pytest.raises(KeyboardInterrupt):  # the second one does not wait
                signal.raise_signal(signal.SIGINT)
    assert done == ["written"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with uninterrupted():
        pass
