"""Every optimizer against a few lines of NumPy in double precision, for 50 steps on random gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perex_t5x import optimizers
from tests.optimizers.optimizer_support import (
    OPTIMIZERS,
    flat,
    random_grads,
    run,
    statistics_of,
    tree_grads,
    tree_params,
)

STEPS, B = 50, 8


def numpy_adam_like(x_TxNxD, second, b1=0.9, b2=0.999, eps=1e-8):
    m = v = 0.0
    for t, x in enumerate(x_TxNxD, 1):
        m = b1 * m + (1 - b1) * x.mean(0)
        v = b2 * v + (1 - b2) * second(x)
        yield m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)


def numpy_msq(x_TxNxD, b1=0.9, b2=0.999, eps=1e-8, c=1.0):
    m = v = q = 0.0
    for t, x in enumerate(x_TxNxD, 1):
        m = b1 * m + (1 - b1) * x.mean(0)
        v = b2 * v + (1 - b2) * (x.mean(0) ** 2 - x.var(0, ddof=1) / len(x))
        q = b2 * q + (1 - b2) * (x**2).mean(0)
        yield m / (1 - b1**t) / (np.sqrt(np.maximum(v, c * q / len(x)) / (1 - b2**t)) + eps)


def numpy_eve(x_TxNxD, b1=0.9, b2=0.999, eps=1e-8):
    m = v = 0.0
    for t, x in enumerate(x_TxNxD, 1):
        m = b1 * m + (1 - b1) * x.mean(0)
        v = b2 * v + (1 - b2) * (x**2).mean(0)
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        yield m_hat / (np.sqrt(v_hat / len(x) + (1 - 1 / len(x)) * m_hat**2) + eps)


def numpy_sign(x_TxNxD, before, after=lambda m: m, b1=0.9):
    m = 0.0
    for x in x_TxNxD:
        m = b1 * m + (1 - b1) * before(x)
        yield after(m)


NUMPY = {
    "adam": lambda x: numpy_adam_like(x, lambda g: g.mean(0) ** 2),
    "micro_adam": lambda x: numpy_adam_like(x, lambda g: (g**2).mean(0)),
    "micro_adam_var": lambda x: numpy_adam_like(x, lambda g: g.var(0, ddof=1)),
    "micro_adam_msq": numpy_msq,
    "eve": numpy_eve,
    "micro_sign": lambda x: numpy_sign(x, lambda g: np.sign(g).mean(0)),
    "sign_sgd": lambda x: numpy_sign(x, lambda g: np.sign(g.mean(0))),
    "sign_ema": lambda x: numpy_sign(x, lambda g: g.mean(0), np.sign),
}


def trajectory(optimizer, x, **options):
    return run(optimizer, [statistics_of(g, **options) for g in x], jnp.zeros(x.shape[-1]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_are_numpys(name):
    x = random_grads(STEPS, B)
    updates, _ = trajectory(OPTIMIZERS[name](0.1), x)
    expected = -0.1 * np.stack(list(NUMPY[name](x)))
    np.testing.assert_allclose(updates, expected, rtol=1e-4)
    others = [-0.1 * np.stack(list(NUMPY[n](x))) for n in OPTIMIZERS if n != name]
    assert min(np.max(np.abs(o - expected)) for o in others) > 0.05 * np.max(np.abs(expected))  # no two are the same


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scale_of_the_gradients_does_not_matter(name):
    options = {} if "sign" in name else {"eps": 0.0}
    x = random_grads(10, B)
    one, _ = trajectory(OPTIMIZERS[name](0.1, **options), x)
    other, _ = trajectory(OPTIMIZERS[name](0.1, **options), 1024.0 * x)
    np.testing.assert_allclose(one, other, rtol=1e-5)
    assert np.all(np.isfinite(one)) and np.all(np.any(one != 0, axis=0))


def test_floor_of_msq():
    x = 0.01 * np.ones(6) + np.random.default_rng(3).normal(size=(20, B, 6))  # weak signal: negative often
    for scale in (0.5, 1.0):
        updates, state = trajectory(optimizers.micro_adam_msq(1.0, floor_scale=scale), x)
        np.testing.assert_allclose(updates, -np.stack(list(numpy_msq(x, c=scale))), rtol=2e-4)
    q, variance, mean = np.mean(x**2, 1), x.var(1, ddof=1), x.mean(1)
    decay = 0.999 ** np.arange(20)[::-1, None]
    low, v = np.sum(decay * q, 0) / B, np.sum(decay * (mean**2 - variance / B), 0)
    assert 0 < np.mean(v < low) <= 1
    np.testing.assert_allclose(optimizers.logged(state)["floored_share"], np.mean(v < low))

    updates, state = trajectory(optimizers.micro_adam_msq(1.0, floor="zero"), x)
    np.testing.assert_allclose(updates, -np.stack(list(numpy_msq(x, c=0.0))), rtol=1e-3)
    np.testing.assert_allclose(optimizers.logged(state)["floored_share"], np.mean(v < 0))
    assert np.max(np.abs(updates)) > 1e5  # steps by m/eps: why zero is not the default


def test_adam_is_optax_adam():
    grads = [tree_grads(seed=i) for i in range(STEPS)]
    all_stats, params = [statistics_of(g) for g in grads], tree_params()
    pairs = [
        (optimizers.adam(0.1), optax.adam(0.1)),
        (optimizers.adam(0.1, 0.8, 0.95, 1e-3, nesterov=True), optax.adam(0.1, 0.8, 0.95, 1e-3, nesterov=True)),
        (optimizers.adam(0.1, weight_decay=0.3), optax.adamw(0.1, weight_decay=0.3)),
        (
            optimizers.adam(0.1, weight_decay=0.3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
            optax.adamw(0.1, weight_decay=0.3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        ),
        (optimizers.adam(optax.linear_schedule(1.0, 0.1, 20)), optax.adam(optax.linear_schedule(1.0, 0.1, 20))),
    ]
    for ours, theirs in pairs:
        a, b = (run(optax.with_extra_args_support(o), all_stats, params)[0] for o in (ours, theirs))
        np.testing.assert_allclose(flat(a), flat(b), rtol=1e-6)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "adam"])
def test_weight_decay_is_decoupled_and_masked(name):
    stats, params = statistics_of(tree_grads()), tree_params()
    mask = {"dense": {"kernel": True, "bias": False}, "scale": False}
    steps = {}
    for decay in (0.0, 0.3):
        optimizer = OPTIMIZERS[name](0.1, weight_decay=decay, mask=mask)
        steps[decay], _ = optimizer.update(stats.mean, optimizer.init(params), params, statistics=stats)
    difference = jax.tree.map(lambda a, b: a - b, steps[0.3], steps[0.0])
    np.testing.assert_allclose(difference["dense"]["kernel"], -0.03 * params["dense"]["kernel"], rtol=1e-4)
    assert not np.any(difference["dense"]["bias"]) and not np.any(difference["scale"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nesterov_looks_ahead(name):
    x, b1 = random_grads(3, B), 0.9
    ahead, _ = trajectory(OPTIMIZERS[name](1.0, nesterov=True), x)
    plain, _ = trajectory(OPTIMIZERS[name](1.0), x)
    g = x.mean(1)
    if name == "eve" or "adam" in name:
        m = [(1 - b1) * sum(b1 ** (t - i) * g[i] for i in range(t + 1)) for t in range(3)]
        m_hat = np.stack([m[t] / (1 - b1 ** (t + 1)) for t in range(3)])
        m_ahead = np.stack([b1 * m[t] / (1 - b1 ** (t + 2)) + (1 - b1) * g[t] / (1 - b1 ** (t + 1)) for t in range(3)])
        np.testing.assert_allclose(ahead, plain * m_ahead / m_hat, rtol=1e-4)
    else:
        x_in = {"micro_sign": np.sign(x).mean(1), "sign_sgd": np.sign(g), "sign_ema": g}[name]
        m = [(1 - b1) * sum(b1 ** (t - i) * x_in[i] for i in range(t + 1)) for t in range(3)]
        expected = np.stack([b1 * m[t] + (1 - b1) * x_in[t] for t in range(3)])
        np.testing.assert_allclose(ahead, -(np.sign(expected) if name == "sign_ema" else expected), rtol=1e-4)


@pytest.mark.parametrize(("a", "b"), [(1, "1/B"), (1, 1), (0, 1), (1, 0), (0.7, 0.2), (0.5, "1/B"), (2, "1/B")])
@pytest.mark.parametrize("group_size", [1, 2])
def test_second_moment_of_weighted_groups(a, b, group_size):
    x, w = random_grads(1, 12)[0], np.random.default_rng(1).uniform(0.2, 2, 12 // group_size)
    stats = statistics_of(x, w, group_size)
    variance, squared_mean = stats.raw_variance(), stats.squared_mean()
    b_number = np.sum(w**2) / np.sum(w) ** 2 / group_size if b == "1/B" else b
    expected = a * np.asarray(squared_mean, np.float64) + b_number * np.asarray(variance, np.float64)
    np.testing.assert_allclose(optimizers.second_moment(stats, a, b), expected, rtol=1e-3)


def test_members_that_are_exact():
    x = random_grads(1, 12)[0]
    stats, groups = statistics_of(x), statistics_of(x, group_size=3)
    np.testing.assert_array_equal(optimizers.second_moment(stats, 1, "1/B"), np.square(stats.mean))
    np.testing.assert_array_equal(optimizers.second_moment(stats, 1, 1), stats.mean_square)
    np.testing.assert_allclose(optimizers.second_moment(groups, 1, 1 / 3), groups.mean_square, rtol=1e-4)


def test_parts_give_the_same_step():
    x = 0.3 + np.random.default_rng(5).normal(size=(20, B, 6))
    for a, b, floor in [(1, 0, "auto"), (1, 0, "zero"), (0.5, 0.25, "mean_square"), (1, "1/B", "auto"), (0, 1, "auto")]:
        one, _ = trajectory(optimizers.scale_by_moments(a, b, eps=1e-3, floor=floor), x)
        two, state = trajectory(optimizers.scale_by_moments(a, b, eps=1e-3, floor=floor, keep_parts=True), x)
        np.testing.assert_allclose(one, two, rtol=1e-3)
    decay = 0.001 * 0.999 ** np.arange(20)[::-1, None]
    variance = x.var(1, ddof=1)
    squared_mean = x.mean(1) ** 2 - variance / B
    np.testing.assert_allclose(state.variance, np.sum(decay * variance, 0), rtol=1e-4)
    np.testing.assert_allclose(state.squared_mean, np.sum(decay * squared_mean, 0), rtol=1e-3, atol=1e-6)
    ratio = np.sum(decay * squared_mean) / np.sum(decay * variance)
    np.testing.assert_allclose(optimizers.logged(state)["ema_snr_squared"], ratio, rtol=1e-3)


def test_one_buffer_unless_more_is_asked():
    params = jnp.zeros(5)
    buffers = lambda o: sum(x.size == 5 for x in jax.tree.leaves(o.init(params)))  # noqa: E731
    for name in ("adam", "micro_adam", "micro_adam_var", "eve"):
        assert buffers(OPTIMIZERS[name](1.0)) == 2, name
    for name in ("micro_sign", "sign_sgd", "sign_ema"):
        assert buffers(OPTIMIZERS[name](1.0)) == 1, name
    assert buffers(optimizers.micro_adam_msq(1.0)) == 3
    assert buffers(optimizers.micro_adam_msq(1.0, floor="zero")) == 2
    assert buffers(optimizers.scale_by_moments(1, 0, keep_parts=True)) == 3


def test_a_varying_batch_size_enters_each_step():
    x = random_grads(2, 12)
    all_stats = [statistics_of(x[0][:4]), statistics_of(x[1])]
    p = [g.mean(0) ** 2 - g.var(0, ddof=1) / len(g) for g in (x[0][:4], x[1])]
    p = [0.5 * p_ + g.var(0, ddof=1) / len(g) for p_, g in zip(p, (x[0][:4], x[1]), strict=True)]  # a = 1/2, b = 1/B
    _, state = run(optimizers.scale_by_moments(0.5, "1/B", b2=0.9), all_stats, jnp.zeros(6))
    np.testing.assert_allclose(state.nu, 0.1 * (0.9 * p[0] + p[1]), rtol=1e-3)


def test_an_empty_batch_is_a_gradient_of_zero():
    zeros = statistics_of(np.zeros((4, 6)), weights=None)
    empty = jax.tree.map(jnp.zeros_like, zeros)  # what the engine returns when every weight is 0
    x = statistics_of(random_grads(1, B)[0])
    for name in OPTIMIZERS:
        optimizer = OPTIMIZERS[name](0.1)
        _, state = optimizer.update(x.mean, optimizer.init(jnp.zeros(6)), statistics=x)
        updates, _ = optimizer.update(empty.mean, state, statistics=empty)
        assert np.all(np.isfinite(updates)) and np.max(np.abs(updates)) < 1, name


def test_rounding_does_not_make_a_variance_negative():
    stats = statistics_of(np.ones((4, 6)))
    stats.averages["mean_square"] = stats.mean_square - 1e-6
    assert np.all(stats.raw_variance() < 0) and not np.any(optimizers.second_moment(stats, 0, 1))
    updates, _ = run(optimizers.micro_adam_var(0.1, eps=1.0), [stats], jnp.zeros(6))
    np.testing.assert_allclose(updates, -0.1 * np.ones((1, 6)), rtol=1e-5)


def test_moments_of_low_precision_parameters_are_float32_unless_asked():
    params = jnp.zeros(6, jnp.bfloat16)
    stats = statistics_of(random_grads(1, B)[0])
    for name in OPTIMIZERS:
        optimizer = OPTIMIZERS[name](0.1)
        state = optimizer.init(params)
        new = optimizer.update(stats.mean, state, params, statistics=stats)[1]
        assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(state)]
        assert state[0].mu.dtype == jnp.float32, name
    optimizer = optimizers.micro_adam_msq(0.1, mu_dtype="bfloat16", nu_dtype=jnp.bfloat16)
    updates, state = optimizer.update(stats.mean, optimizer.init(jnp.zeros(6)), statistics=stats)
    assert state[0].mu.dtype == state[0].nu.dtype == state[0].square.dtype == jnp.bfloat16
    assert updates.dtype == jnp.float32
    full, _ = trajectory(optimizers.micro_adam_msq(0.1), random_grads(1, B))
    np.testing.assert_allclose(updates, full[0], rtol=1e-5)  # rounded in the state, not in the step
