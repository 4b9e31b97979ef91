"""Statistical truth, seeded: estimators without bias, and what the place of the sign does to different laws.

Every coordinate is an independent repetition of the same experiment, so an average over coordinates is an expectation with a
known standard error. Bounds are four standard errors; a wrong formula lies many outside.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import optimizers
from perex_t5x.per_example import GradStatistics
from tests.optimizers.optimizer_support import run, statistics_of

MU, SIGMA = 0.3, 2.0


def z_score(samples, expected):
    """Distance of the samples' average from what is expected, in standard errors."""
    samples = np.asarray(samples, np.float64)
    return (samples.mean() - expected) / (samples.std(ddof=1) / math.sqrt(samples.size))


# --- estimators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("group_size", [1, 2])
def test_estimators_have_no_bias(weighted, group_size):
    draw = np.random.default_rng(11)
    count, size = 8, 100_000
    w = draw.uniform(0.2, 2.0, count // group_size) if weighted else None
    stats = statistics_of(draw.normal(MU, SIGMA, (count, size)), w, group_size, names=("mean", "mean_square"))
    assert abs(z_score(stats.raw_variance(), SIGMA**2)) < 4
    assert abs(z_score(stats.squared_mean(), MU**2)) < 4
    for a, b in [(1, 1), (0, 1), (1, 0), (0.5, 0.25)]:
        assert abs(z_score(optimizers.second_moment(stats, a, b), a * MU**2 + b * SIGMA**2)) < 4, (a, b)
    one_over_b = float(optimizers.inverse_batch_size(stats))
    for a in (1, 0.5):
        moment = optimizers.second_moment(stats, a, "1/B")
        assert abs(z_score(moment, a * MU**2 + one_over_b * SIGMA**2)) < 4
    # These can fail: without the correction by 1 − Σw²/(Σw)², and ḡ² as an estimate of μ².
    assert abs(z_score(group_size * (stats.mean_square - jnp.square(stats.mean)), SIGMA**2)) > 20
    assert abs(z_score(jnp.square(stats.mean), MU**2)) > 20
    if weighted:
        assert abs(one_over_b - 1 / count) > 0.01


def test_squared_mean_is_often_negative():
    stats = statistics_of(np.random.default_rng(12).normal(MU, SIGMA, (8, 100_000)), names=("mean", "mean_square"))
    assert abs(np.mean(np.asarray(stats.squared_mean()) < 0) - 0.61) < 0.01


def test_half_of_msq_is_floored_where_the_signal_is_weak():
    s, count, size, steps = 0.02, 8, 200, 3000
    draw = np.random.default_rng(13)
    mean = s + draw.normal(size=(steps, size)) / math.sqrt(count)
    spread = draw.chisquare(count - 1, (steps, size)) / count  # q − ḡ² of normal examples, independent of ḡ
    stats, params = _statistics(mean, count, q=mean**2 + spread), jnp.zeros(size)
    updates, state = run(optimizers.micro_adam_msq(1.0, floor="zero"), stats, params)
    assert 0.3 < optimizers.logged(state)["floored_share"] < 0.6
    assert np.max(np.abs(updates)) > 1e4  # m/eps
    updates, state = run(optimizers.micro_adam_msq(1.0), stats, params)
    assert 0.9 < optimizers.logged(state)["floored_share"] <= 1.0
    assert np.max(np.abs(updates)) < 10


# --- the place of the sign --------------------------------------------------------------------------------------------


def _statistics(mean_TxD, count, sign=None, q=None):
    """Statistics with a leading axis of steps, from averages that were drawn directly."""
    one = jnp.ones(len(mean_TxD))
    averages = {"mean": mean_TxD, "mean_sign": sign, "mean_square": q}
    averages = {name: jnp.asarray(x, jnp.float32) for name, x in averages.items() if x is not None}
    return GradStatistics(averages, count * one, count * one, count * one, count * one)


def last_direction(place, b1, stats):
    """The direction of the last step, one per coordinate."""
    direction = optimizers.scale_by_sign(place, b1)

    def step(state, now):
        steps, state = direction.update(now.mean, state, statistics=now)
        return state, steps

    init = direction.init(jnp.zeros(stats.mean.shape[1]))
    return jax.jit(lambda: jax.lax.scan(step, init, stats)[1][-1])()


def directions(draw_examples, b1, steps, count):
    """Each place's last direction, for gradients [steps, count, coordinates] that are drawn step by step."""
    means, signs = [], []
    for _ in range(steps):
        x_NxD = draw_examples()
        means.append(x_NxD.mean(0))
        signs.append(np.sign(x_NxD).mean(0))
    stats = _statistics(np.stack(means), count, sign=np.stack(signs))
    return {place: np.asarray(last_direction(place, b1, stats)) for place in ("example", "batch", "ema")}


def test_gaussian_directions_are_erf():
    s, count, b1, steps, size = 0.15, 4, 0.8, 60, 20_000
    draw = np.random.default_rng(21)
    found = directions(lambda: draw.normal(s, 1.0, (count, size)), b1, steps, count)
    n = (1 + b1) / (1 - b1)
    k = {"example": 1, "batch": count, "ema": count * n}
    for place, direction in found.items():
        assert abs(z_score(direction, math.erf(s * math.sqrt(k[place] / 2)))) < 4, place
        for other in k.values():  # and no other k would do
            assert other == k[place] or abs(z_score(direction, math.erf(s * math.sqrt(other / 2)))) > 10, place
    assert found["example"].mean() < found["batch"].mean() < found["ema"].mean()


def test_skewed_law_misleads_the_early_sign():
    """+10 with probability 0.1, −1 otherwise: the expected gradient is +0.1, the expected sign −0.8."""
    count, b1, steps, size = 64, 0.99, 800, 300
    draw = np.random.default_rng(22)
    positive = draw.binomial(count, 0.1, (steps, size)) / count
    stats = _statistics(11 * positive - 1, count, sign=2 * positive - 1)
    assert abs(z_score(stats.mean, 0.1)) < 4
    early, late = (np.asarray(last_direction(place, b1, stats)) for place in ("example", "ema"))
    assert np.all(early < 0) and abs(early.mean() - -0.8) < 0.01  # the wrong way, everywhere
    assert np.mean(late > 0) > 0.98


def right_way(direction):
    """How often a coordinate's direction has the sign of its expected gradient (here positive)."""
    return np.mean(direction > 0) + 0.5 * np.mean(direction == 0)


def test_heavy_tails_favour_the_early_sign():
    """Student-t with 1.5 degrees of freedom around a positive expectation: its variance is infinite.

    "Wins" means, at the same batches and decay: more coordinates step the right way, and the direction has a larger ratio
    of its mean to its standard deviation over repetitions. For normal gradients the late sign wins by the first measure.
    """
    s, count, b1, steps, size = 0.15, 16, 0.8, 40, 5_000
    draw = np.random.default_rng(23)
    heavy = directions(lambda: s + draw.standard_t(1.5, (count, size)), b1, steps, count)
    error = 0.5 / math.sqrt(size)
    assert right_way(heavy["example"]) > right_way(heavy["batch"]) + 4 * error
    assert right_way(heavy["batch"]) > right_way(heavy["ema"]) + 4 * error
    ratio = {place: d.mean() / d.std() for place, d in heavy.items()}
    assert ratio["example"] > 1.2 * ratio["batch"] and ratio["example"] > 2 * ratio["ema"]

    normal = directions(lambda: s + 2 * draw.normal(size=(count, size)), b1, steps, count)
    assert right_way(normal["ema"]) > right_way(normal["example"]) + 4 * error
