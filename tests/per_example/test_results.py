"""Variance, squared mean, SNR, noise scale and merging, against NumPy in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import per_example
from perex_t5x.per_example import GradStatistics

P = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}


def linear(p, batch):
    """The gradient of an example is the example itself."""
    return jnp.sum(p["a"][None] * batch["a"]) + jnp.sum(p["b"][None] * batch["b"])


def draws(count, seed=0, mu=0.5, sigma=1.0):
    draw = np.random.default_rng(seed)
    make = lambda *shape: draw.normal(mu, sigma, (count, *shape)).astype(np.float32)  # noqa: E731
    return {"a": make(2, 3), "b": make(4)}


def compute(batch, weights=None, **options):
    run = jax.jit(lambda b, w: per_example.grad_statistics(linear, **options)(P, b, weights=w)[0])
    return run(batch, weights)


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def rows(batch, group_size=1):
    x = np.concatenate([np.asarray(v, np.float64).reshape(len(v), -1) for v in batch.values()], axis=1)
    return x.reshape(-1, group_size, x.shape[1]).mean(axis=1)


def test_without_weights_they_are_numpys():
    batch = draws(8)
    stats, x = compute(batch), rows(draws(8))
    variance, mean = x.var(axis=0, ddof=1), x.mean(axis=0)
    squared_mean = mean**2 - variance / 8
    np.testing.assert_allclose(flat(stats.variance()), variance, rtol=1e-5)
    np.testing.assert_allclose(flat(stats.squared_mean()), squared_mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(flat(stats.snr()), np.sqrt(np.maximum(squared_mean, 0) / variance), rtol=1e-3)
    np.testing.assert_allclose(stats.noise_scale(), variance.sum() / squared_mean.sum(), rtol=1e-4)
    np.testing.assert_allclose(stats.noise_scale_parts(), (variance.sum(), squared_mean.sum()), rtol=1e-4)
    assert int(stats.variance_clamps()) == 0


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_with_weights_and_groups(group_size):
    """One weight an example; a group's gradient is its weighted mean, its weight the mean of its weights."""
    batch, b = draws(8), group_size
    w = np.random.default_rng(1).uniform(0.2, 2.0, 8).astype(np.float32)
    w[5] = 0.0
    stats = compute(batch, jnp.asarray(w), group_size=b)
    w = w.astype(np.float64)
    totals = w.reshape(-1, b).sum(axis=1)
    h = (rows(batch) * w[:, None]).reshape(-1, b, 10).sum(axis=1) / np.where(totals, totals, 1)[:, None]
    mean, square = np.average(h, axis=0, weights=totals), np.average(h**2, axis=0, weights=totals)
    share = np.sum(w**2) / np.sum(w) ** 2
    within = np.sum((w.reshape(-1, b) ** 2).sum(axis=1) / np.where(totals, totals, 1)) / w.sum()
    variance = (square - mean**2) / (within - share)
    np.testing.assert_allclose(flat(stats.mean), np.average(rows(batch), axis=0, weights=w), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(flat(stats.mean_square), square, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(flat(stats.variance()), variance, rtol=1e-4)
    np.testing.assert_allclose(flat(stats.squared_mean()), mean**2 - variance * share, rtol=1e-3, atol=1e-5)
    assert (int(stats.count), int(stats.num_groups)) == (7, np.count_nonzero(totals))
    np.testing.assert_allclose([stats.weight_sum, stats.weight_square_sum], [w.sum(), np.sum(w**2)], rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("group_size", [1, 2])
def test_the_estimates_are_unbiased(weighted, group_size):
    """Over many batches, estimate − truth is within 4.5 standard errors, for every coordinate (26 of them)."""
    batches, count, mu, sigma = 3000, 6, 0.3, 2.0
    g = np.random.default_rng(7).normal(mu, sigma, (batches, count, 13)).astype(np.float32)
    w = jnp.asarray([0.5, 1.0, 2.0, 1.0, 0.2, 3.0]) if weighted else None
    engine = per_example.grad_statistics(lambda p, x: jnp.sum(p[None] * x), group_size=group_size)

    @jax.jit
    @jax.vmap
    def estimates(x):
        stats, _ = engine(jnp.zeros(13), x, weights=w)
        return stats.raw_variance(), stats.squared_mean()

    for estimate, truth in zip(estimates(g), (sigma**2, mu**2), strict=True):
        estimate = np.asarray(estimate, np.float64)
        error = estimate.std(axis=0) / np.sqrt(batches)
        assert np.all(np.abs(estimate.mean(axis=0) - truth) < 4.5 * error)
        assert np.all(error < 0.1 * sigma**2)  # the bound above says something


def test_the_biased_variance_would_fail_that_bound():
    """The same draws, without B/(B−1): the Monte Carlo test can tell."""
    batches, count, sigma = 3000, 6, 2.0
    g = np.random.default_rng(7).normal(0.3, sigma, (batches, count, 13))
    biased = g.var(axis=1)
    assert np.all(np.abs(biased.mean(axis=0) - sigma**2) > 4.5 * biased.std(axis=0) / np.sqrt(batches))


def test_a_single_example_has_no_variance():
    stats = compute(draws(1))
    assert np.isfinite(flat(stats.mean)).all()
    for derived in (stats.variance, stats.squared_mean, stats.snr, stats.noise_scale):
        with pytest.raises(ValueError, match="one example .or group. has no variance: give two or more"):
            derived()
    with pytest.raises(ValueError, match="has no variance"):  # known from the shapes, so before anything is compiled
        jax.jit(lambda b: per_example.grad_statistics(linear)(P, b)[0].variance())(draws(1))

    @jax.jit
    def traced(batch, weights):
        stats, _ = per_example.grad_statistics(linear)(P, batch, weights=weights)
        return stats.variance(), stats.squared_mean(), stats.snr(), stats.noise_scale(), stats.count

    *derived, count = traced(draws(3), jnp.array([0.0, 2.0, 0.0]))  # the other two do not take part
    assert np.isnan(flat(derived)).all() and int(count) == 1


def test_noise_without_signal_has_an_infinite_scale():
    x = {"a": np.ones((2, 2, 3), np.float32), "b": np.ones((2, 4), np.float32)}
    x = {k: v * np.array([1.0, -1.0], np.float32).reshape(2, *[1] * (v.ndim - 1)) for k, v in x.items()}
    stats = compute(x)  # mean 0, so |μ̂|² = −tr Σ̂ / 2 < 0
    assert float(stats.noise_scale()) == np.inf
    np.testing.assert_allclose(stats.noise_scale_parts(), (20.0, -10.0), rtol=1e-6)
    assert (flat(stats.snr()) == 0).all()


@pytest.mark.parametrize("group_size", [1, 2])
def test_merged_halves_are_the_whole(group_size):
    batch = draws(8)
    w = jnp.asarray([0.5, 0.0, 2.0, 1.5, 1.0, 3.0, 0.2, 1.0])
    parts = [
        compute(jax.tree.map(lambda x, i=i: x[i : i + 4], batch), w[i : i + 4], group_size=group_size) for i in (0, 4)
    ]
    merged, whole = GradStatistics.merge(*parts), compute(batch, w, group_size=group_size)
    for a, e in zip(jax.tree.leaves(merged), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(flat(merged.variance()), flat(whole.variance()), rtol=1e-4)
    assert merged.group_size == group_size


def test_merging_nothing_changes_nothing():
    whole, nothing = compute(draws(4)), compute(draws(4, seed=1), jnp.zeros(4))
    for merged in (GradStatistics.merge(whole, nothing), GradStatistics.merge(nothing, whole)):
        np.testing.assert_array_equal(flat(merged.mean), flat(whole.mean))
        assert int(merged.count) == 4


def test_the_limit_of_float32():
    """q − ḡ² keeps about 2·log10(σ/|μ|) + 7 digits: fine at |μ|/σ = 10, nothing left at 10⁴."""
    errors = {}
    for ratio in (10.0, 1e4):
        batch = draws(16, mu=ratio, sigma=1.0)
        variance = rows(batch).var(axis=0, ddof=1)
        errors[ratio] = np.max(np.abs(flat(compute(batch).raw_variance()) - variance) / variance)
    assert errors[10.0] < 1e-3
    assert errors[1e4] > 0.5


def test_clamped_coordinates_are_counted():
    batch = {"a": np.full((16, 2, 3), 1000.1, np.float32), "b": np.full((16, 4), 1000.1, np.float32)}
    stats = compute(batch)
    # Rounding decides the sign of q − ḡ² here: make it negative for one leaf, whatever it was.
    lower = {**stats.mean_square, "b": jnp.square(stats.mean["b"]) * (1 - 1e-6)}
    upper = {**lower, "a": jnp.square(stats.mean["a"]) * (1 + 1e-6)}
    stats = GradStatistics(
        {"mean": stats.mean, "mean_square": upper},
        stats.count,
        stats.num_groups,
        stats.weight_sum,
        stats.weight_square_sum,
    )
    assert int(stats.variance_clamps()) == 4
    assert (flat(stats.variance()["b"]) == 0).all() and (flat(stats.variance()["a"]) > 0).all()
    assert (flat(stats.raw_variance()["b"]) < 0).all()


def test_what_was_not_computed_is_named():
    with pytest.raises(KeyError, match="no statistic 'mean_square' here; these were computed: mean"):
        compute(draws(2), statistics="mean").variance()
