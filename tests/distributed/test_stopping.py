"""Processes at different places stop at the same one, whenever they are asked."""

import random
import threading
import time

import pytest

from perex_t5x.distributed.group import Stopping


@pytest.mark.parametrize("seed", range(5))
def test_all_stop_at_the_largest_count(seed):
    """Threads play main threads that pass marks at random speeds, never more than two ahead of the slowest."""
    rng = random.Random(seed)
    group = [Stopping() for _ in range(4)]
    delays = [rng.uniform(0, 0.003) for _ in group]

    def main_thread(own, delay):
        while own.passes():
            # A collective: nobody gets further than two marks ahead.
            while own.mark > min(s.mark for s in group) + 2:
                time.sleep(0.0005)
            time.sleep(delay)

    threads = [
        threading.Thread(target=main_thread, args=(s, d), daemon=True) for s, d in zip(group, delays, strict=True)
    ]
    for thread in threads:
        thread.start()
    time.sleep(rng.uniform(0.01, 0.1))
    limits = []
    for stopping in rng.sample(group, len(group)):  # the watchdogs hear of it one after the other
        limits.append(stopping.freeze())
        time.sleep(rng.uniform(0, 0.02))
    for stopping in group:
        stopping.agree(max(limits))
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert {s.mark for s in group} == {max(limits)}
    assert all(s.stopped for s in group)


def test_passing_costs_next_to_nothing():
    stopping = Stopping()
    begun = time.perf_counter()
    for _ in range(10_000):
        stopping.passes()
    assert (time.perf_counter() - begun) / 10_000 < 1e-4  # about a microsecond; generous on a loaded machine
