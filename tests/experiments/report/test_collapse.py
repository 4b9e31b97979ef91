"""The collapse number against numbers worked out by hand, and what it refuses to say."""

import math

import numpy as np
import pytest

from perex_t5x.experiments.report.collapse import Curve, collapse
from perex_t5x.experiments.report.load import LoadedRun

X = np.linspace(0, 1000, 11)


def curves(shifts, seeds):
    return [Curve(b, X, 5 - X / 500 + shift + seed) for b, shift in shifts.items() for seed in seeds]


def test_by_hand():
    found = collapse(curves({8: 0.0, 16: 1.0}, (-0.1, 0.0, 0.1)), warmup_examples=100)
    assert found.across_batch == pytest.approx(math.sqrt(0.5))  # sd of 0 and 1, with n - 1
    assert found.across_seed == pytest.approx(0.1)
    assert found.number == pytest.approx(math.sqrt(0.5) / 0.1)
    assert (found.batch_sizes, found.seeds, found.left_out, found.first, found.last) == ((8, 16), 3, 0, 100, 1000)
    assert found.perfect == pytest.approx(3**-0.5)


def test_curves_that_differ_by_seed_only_come_near_the_perfect_number():
    rng = np.random.default_rng(0)
    numbers = []
    for _ in range(200):
        made = [Curve(b, X, 3 + 0.1 * rng.standard_normal() + 0 * X) for b in (8, 16, 32, 64) for _ in range(4)]
        numbers.append(collapse(made).number)
    assert np.median(numbers) == pytest.approx(collapse(made).perfect, rel=0.1)


def test_points_of_evaluation_may_differ():
    fine = Curve(8, np.linspace(0, 1000, 101), 5 - np.linspace(0, 1000, 101) / 500)
    assert collapse([fine, Curve(16, X, 5 - X / 500)]).across_batch == pytest.approx(0, abs=1e-12)


def test_what_happens_before_the_end_of_the_warmup_does_not_count():
    wild = np.where(X < 300, np.nan, 2.0)
    found = collapse([Curve(8, X, wild), Curve(16, X, 0 * X + 2)], warmup_examples=300)
    assert found.across_batch == pytest.approx(0) and found.left_out == 0


def test_one_seed_gives_no_number():
    found = collapse(curves({8: 0.0, 16: 1.0}, (0.0,)))
    assert math.isnan(found.number) and found.seeds == 1 and found.across_batch == pytest.approx(math.sqrt(0.5))


def test_failed_and_short_curves_are_left_out():
    bad = Curve(32, X, np.where(X > 500, np.nan, 2.0))
    short = Curve(64, X[:3], 2 + 0 * X[:3])
    found = collapse([*curves({8: 0.0, 16: 1.0}, (-0.1, 0.1)), bad, short])
    assert found.left_out == 2 and found.batch_sizes == (8, 16) and found.last == 1000


@pytest.mark.parametrize("given", [[], curves({8: 0.0}, (0, 1)), [Curve(8, [0, 1], [1, 1]), Curve(16, [0, 1], [1, 1])]])
def test_nothing_to_compare(given):
    assert collapse(given, warmup_examples=5) is None


def test_the_best_rate_is_chosen_on_the_seeds_that_all_rates_have():
    """A third seed at the best rate, which happens to be bad, does not make another rate the best."""
    from perex_t5x.experiments.report.basins import Basin

    losses = {0.1: [2.0, 2.1], 0.2: [1.9, 2.0, 2.9], 0.4: [2.2, 2.2]}
    runs = {
        rate: [LoadedRun("a", seed=seed, status="done", final_loss=loss) for seed, loss in enumerate(found)]
        for rate, found in losses.items()
    }
    assert Basin("a", "s", runs).best() == 0.2 and not Basin("a", "s", runs).on_edge()
