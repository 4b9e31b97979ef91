import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perex_t5x.data.order import _GOLDEN, EpochOrder, MixedOrder, _hash, permutation


def test_the_hash_is_splitmix64():
    # The first two outputs of the published generator from seed 0.
    states = np.array([1, 2], np.uint64) * np.uint64(_GOLDEN)
    assert [hex(x) for x in _hash(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


def test_the_permutation_is_fixed_for_ever():
    # Literal numbers: a change would silently reorder the data of every run that resumes.
    assert permutation(8, 0, 0).tolist() == [1, 3, 6, 5, 0, 7, 4, 2]
    assert permutation(8, 1, 0).tolist() != permutation(8, 0, 1).tolist()


def test_every_epoch_sees_each_row_once_in_a_new_order():
    order = EpochOrder(50, seed=1)
    epochs = order.rows(np.arange(150)).reshape(3, 50)
    for epoch in epochs:
        assert sorted(epoch) == list(range(50))
    assert not (epochs[0] == epochs[1]).all()
    # Seed s's epoch 1 is not seed s+1's epoch 0: sweeps over seeds are independent.
    assert not (epochs[1] == EpochOrder(50, seed=2).rows(np.arange(50))).all()


def test_without_seed_rows_come_in_order():
    assert EpochOrder(3, None).rows(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_positions_of_a_row_are_spread_evenly():
    counts = np.zeros((6, 6))
    for seed in range(600):
        counts[np.arange(6), permutation(6, seed)] += 1
    assert np.abs(counts - 100).max() < 45  # 4.9 standard deviations


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    data=st.data(),
    start=st.integers(0, 10**9),
    length=st.integers(1, 64),
)
def test_any_window_of_a_mixture_equals_the_whole(sizes, data, start, length):
    rates = data.draw(st.lists(st.floats(0.01, 10), min_size=len(sizes), max_size=len(sizes)), label="rates")
    order = MixedOrder(sizes, rates, seed=0)
    whole = order.rows(np.arange(start, start + length))
    cut = data.draw(st.integers(0, length - 1))
    assert (order.rows(np.arange(start + cut, start + length)) == whole[cut:]).all()


@pytest.mark.parametrize("rates", [[1, 3], [0.2, 0.3, 0.5], [1000, 1]])
def test_a_mixture_keeps_its_proportions_at_every_moment(rates):
    sizes = [7] * len(rates)
    n = 4000
    owner = MixedOrder(sizes, rates, seed=5).rows(np.arange(n)) // 7
    for k, share in enumerate(np.asarray(rates) / np.sum(rates)):
        drawn = np.cumsum(owner == k)
        assert np.abs(drawn - share * np.arange(1, n + 1)).max() <= len(rates)


def test_each_task_of_a_mixture_runs_through_its_own_epochs():
    rows = MixedOrder([4, 10], [0.5, 0.5], seed=5).rows(np.arange(16))
    first = rows[rows < 4]
    assert sorted(first[:4]) == sorted(first[4:8]) == [0, 1, 2, 3]
