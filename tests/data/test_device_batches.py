import threading

import pytest

from perex_t5x.data.device_batches import prefetch
from perex_t5x.data.feed import EndOfData


class FakeFeed:
    def __init__(self, end=None, error=None):
        self.end, self.error, self.asked = end, error, []

    def batch(self, step, sharding):
        self.asked.append(step)
        if step == self.end:
            raise self.error or EndOfData("end")
        return {"x": step * 10}


def test_gives_steps_in_order_and_stays_within_its_buffer():
    feed = FakeFeed()
    with prefetch(feed, 5, None, buffer=2) as batches:
        assert [next(batches) for _ in range(3)] == [(5, {"x": 50}), (6, {"x": 60}), (7, {"x": 70})]
    assert len(feed.asked) <= 3 + 2 + 1


def test_ends_with_the_data():
    assert [step for step, _ in prefetch(FakeFeed(end=3), 0)] == [0, 1, 2]


def test_an_error_comes_where_the_batch_would_have_been():
    batches = prefetch(FakeFeed(end=2, error=RuntimeError("disk on fire")), 0)
    assert next(batches)[0] == 0 and next(batches)[0] == 1
    with pytest.raises(RuntimeError, match="disk on fire"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_close_stops_the_thread_even_when_nobody_reads():
    before = threading.active_count()
    batches = prefetch(FakeFeed(), 0, buffer=1)
    batches.close()
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(batches)
