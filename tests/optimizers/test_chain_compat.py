"""In optax's chains and wrappers the statistics follow the updates, or an error says that they cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perex_t5x import optimizers, per_example
from perex_t5x.errors import ConfigError
from perex_t5x.per_example.statistic import names_of
from tests.optimizers.optimizer_support import OPTIMIZERS, flat, statistics_of, tree_grads, tree_params

MASK = {"dense": {"kernel": True, "bias": False}, "scale": True}


def one_step(optimizer, stats, params=None, jit=False):
    params = tree_params() if params is None else params
    step = lambda s: optimizer.update(s.mean, optimizer.init(params), params, statistics=s)  # noqa: E731
    return (jax.jit(step) if jit else step)(stats)[0]


def scaled(grads, factor):
    return jax.tree.map(lambda g: factor * g, grads)


# --- a common factor in front -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("clip", [optax.clip_by_global_norm, optimizers.clip_by_global_norm])
def test_clipping_scales_every_examples_gradient(clip, jit):
    grads = tree_grads()
    norm = np.sqrt(sum(np.sum(g.mean(0) ** 2) for g in jax.tree.leaves(grads)))
    c = 1.0 / norm
    assert c < 0.5
    # eps large, so that the scale can be seen. NumPy: m̂ = c ḡ, v̂ = c² q.
    clipped = one_step(
        optax.chain(clip(1.0), optimizers.scale_by_moments(1, 1, eps=0.1)), statistics_of(grads), jit=jit
    )
    expected = jax.tree.map(lambda g: c * g.mean(0) / (c * np.sqrt((g**2).mean(0)) + 0.1), grads)
    np.testing.assert_allclose(flat(clipped), flat(expected), rtol=1e-4)
    only_mean = jax.tree.map(lambda g: c * g.mean(0) / (np.sqrt((g**2).mean(0)) + 0.1), grads)
    assert np.max(np.abs(flat(clipped) - flat(only_mean))) > 0.05
    loose = one_step(
        optax.chain(clip(100.0), optimizers.scale_by_moments(1, 1, eps=0.1)), statistics_of(grads), jit=jit
    )
    unclipped = one_step(optimizers.scale_by_moments(1, 1, eps=0.1), statistics_of(grads))
    np.testing.assert_allclose(flat(loose), flat(unclipped), rtol=1e-5)


@pytest.mark.parametrize("factor", [0.25, -3.0, 1e-12, 1e12])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_factor_in_front_is_as_gradients_that_are_scaled(name, factor):
    grads = tree_grads()
    chained = one_step(optax.chain(optax.scale(factor), OPTIMIZERS[name](0.1)), statistics_of(grads))
    np.testing.assert_allclose(
        flat(chained), flat(one_step(OPTIMIZERS[name](0.1), statistics_of(scaled(grads, factor)))), rtol=1e-4, atol=1e-7
    )


def test_factor_of_huge_and_tiny_gradients():
    for size in (1e-18, 1e18):
        stats = statistics_of(scaled(tree_grads(), size))
        stats = stats.__class__({"mean": stats.mean}, None, None, None, None)
        clip = optimizers.clip_by_global_norm(0.5 * size)
        clipped = one_step(clip, stats)
        np.testing.assert_allclose(np.linalg.norm(flat(clipped)), 0.5 * size, rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_coordinates_stay_alone(value):
    grads = tree_grads()
    good = jax.tree.map(np.copy, grads)
    grads["scale"][0, 1] = value
    micro = optimizers.scale_by_moments(1, 1, eps=0.1)
    fronts = [(optimizers.clip_by_global_norm(1.0), 1.0), (optax.scale(0.5), 0.5)]
    for (
        front,
        factor,
    ) in fronts:  # a norm that is not finite does not clip; another factor is found without the bad ones
        updates = flat(one_step(optax.chain(front, micro), statistics_of(grads)))
        bad = ~np.isfinite(updates)
        assert bad.sum() == 1 and not np.isfinite(flat(statistics_of(grads).mean))[bad]
        expected = flat(one_step(micro, statistics_of(scaled(good, factor))))
        np.testing.assert_allclose(updates[~bad], expected[~bad], rtol=1e-4)


def test_clipping_zero_gradients():
    stats = statistics_of(scaled(tree_grads(), 0.0))
    optimizer = optax.chain(optimizers.clip_by_global_norm(1.0), optimizers.micro_adam(0.1))
    assert not np.any(flat(one_step(optimizer, stats)))


@pytest.mark.parametrize(
    "front", [optax.clip(0.1), optax.add_decayed_weights(0.5), optax.scale_by_adam(), optimizers.micro_adam(0.1)]
)
def test_what_is_no_common_factor_is_refused(front):
    with pytest.raises(ConfigError, match="micro_sign: the updates are not the statistics' mean times a common factor"):
        one_step(optax.chain(front, optimizers.micro_sign(0.1)), statistics_of(tree_grads()))
    one_step(optax.chain(front, optimizers.sign_ema(0.1)), statistics_of(tree_grads()))  # reads the updates alone


def test_updates_rounded_to_bfloat16_are_still_a_multiple():
    stats = statistics_of(tree_grads())
    optimizer = optimizers.micro_adam(0.1)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), stats.mean)
    updates, _ = optimizer.update(low, optimizer.init(tree_params()), statistics=stats)
    assert all(u.dtype == jnp.bfloat16 for u in jax.tree.leaves(updates))
    np.testing.assert_allclose(flat(updates), flat(one_step(optimizer, stats)), rtol=0.03, atol=1e-3)


def test_a_statistic_of_ones_own_says_how_it_scales():
    def make(scaling):
        mean_abs = per_example.Statistic("mean_abs", jnp.abs, scaling=scaling)
        return optimizers.from_statistics(
            "mine", ("mean", mean_abs), lambda p: (), lambda s, state, p: (s[mean_abs], state)
        )

    stats = statistics_of(tree_grads(), names=("mean", "mean_abs"))
    chain = lambda scaling: optax.chain(optax.scale(-0.5), make(scaling))  # noqa: E731
    np.testing.assert_allclose(flat(one_step(chain(jnp.abs), stats)), 0.5 * flat(stats["mean_abs"]), rtol=1e-5)
    with pytest.raises(ConfigError, match=r"mine: a transformation in front .* how 'mean_abs' then changes is unknown"):
        one_step(chain(None), stats)
    np.testing.assert_allclose(
        flat(one_step(make(None), stats)), flat(stats["mean_abs"])
    )  # nothing in front: not asked


def abs_optimizer(learning_rate, statistic=None):
    """Declares its statistic by itself, as optimizers are also made while tracing."""
    statistic = statistic or per_example.Statistic("mean_abs", jnp.abs, scaling=jnp.abs)
    direction = optimizers.from_statistics(
        "mine", ("mean", statistic), lambda p: (), lambda s, state, p: (s[statistic], state)
    )
    return optimizers.descend(direction, learning_rate)


@pytest.mark.parametrize("make", [abs_optimizer, abs_optimizer(1.0), optax.masked(abs_optimizer(1.0), True)])
def test_a_statistic_of_ones_own_is_declared_once(make):
    params, batch = jnp.zeros(2), jnp.array([[1.0, 3.0], [3.0, -1.0]])
    wrapped = optax.chain(optax.scale(-0.5), make(1.0) if callable(make) else make)
    needs = optimizers.needs_of(wrapped, params)
    assert names_of(needs) == ("mean", "mean_abs") == names_of(optimizers.needs_of(make, params))
    stats, _ = per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), needs)(params, batch)
    updates, _ = wrapped.update(stats.mean, wrapped.init(params), params, statistics=stats)
    np.testing.assert_allclose(updates, [-1.0, -1.0])


def test_two_statistics_of_one_name_are_refused():
    other = per_example.Statistic("mean_abs", lambda g: 2 * jnp.abs(g), scaling=jnp.abs)
    both = optax.chain(abs_optimizer(1.0), abs_optimizer(1.0, other))
    with pytest.raises(ValueError, match="two different statistics are named 'mean_abs'"):
        optimizers.needs_of(both, jnp.zeros(2))


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("jit", [False, True])
def test_masked(name, jit):
    stats = statistics_of(tree_grads())
    alone = one_step(OPTIMIZERS[name](0.1), stats)
    masked = one_step(optax.masked(OPTIMIZERS[name](0.1), MASK), stats, jit=jit)
    for part in (lambda t: t["dense"]["kernel"], lambda t: t["scale"]):
        np.testing.assert_allclose(part(masked), part(alone), rtol=1e-5)
    np.testing.assert_array_equal(masked["dense"]["bias"], stats.mean["dense"]["bias"])  # passed through
    prefix = one_step(optax.masked(OPTIMIZERS[name](0.1), {"dense": False, "scale": True}), stats, jit=jit)
    np.testing.assert_allclose(prefix["scale"], alone["scale"], rtol=1e-5)


def test_multi_transform():
    stats, params = statistics_of(tree_grads()), tree_params()
    labels = {"dense": {"kernel": "msq", "bias": "sign"}, "scale": "other"}
    optimizer = optax.multi_transform(
        {
            "msq": optax.chain(optimizers.clip_by_global_norm(0.5), optimizers.micro_adam_msq(0.1)),
            "sign": optimizers.micro_sign(0.1),
            "other": optimizers.micro_adam_msq(0.2),
        },
        labels,
    )
    assert optimizers.needs_of(optimizer, params) == ("mean", "mean_square", "mean_sign")
    updates, state = optimizer.update(stats.mean, optimizer.init(params), params, statistics=stats)
    kernel = statistics_of(tree_grads()["dense"]["kernel"])
    np.testing.assert_allclose(
        updates["dense"]["kernel"], one_step(optimizers.micro_adam_msq(0.1), kernel, kernel.mean), rtol=1e-4
    )
    np.testing.assert_allclose(updates["dense"]["bias"], -0.01 * stats.mean_sign["dense"]["bias"], rtol=1e-4)
    logged = optimizers.logged(state)
    assert len(logged) == 2 and all(name.startswith("floored_share/inner_states/") for name in logged), list(logged)


# --- other wrappers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_inject_hyperparams(name):
    stats, params = statistics_of(tree_grads()), tree_params()
    optimizer = optax.inject_hyperparams(OPTIMIZERS[name])(learning_rate=optax.constant_schedule(0.1), weight_decay=0.1)
    assert optimizers.needs_of(optimizer, params) == OPTIMIZERS[name](0.1).needs
    plain = one_step(OPTIMIZERS[name](0.1, weight_decay=0.1), stats)
    for jit in (False, True):
        np.testing.assert_allclose(flat(one_step(optimizer, stats, jit=jit)), flat(plain), rtol=1e-5, atol=1e-7)


def test_inject_hyperparams_of_the_weights_of_the_moments():
    stats = statistics_of(tree_grads())
    optimizer = optax.inject_hyperparams(optimizers.scale_by_moments)(a=0.5, b=0.7)
    plain = one_step(optimizers.scale_by_moments(0.5, 0.7), stats)
    for jit in (False, True):
        np.testing.assert_allclose(flat(one_step(optimizer, stats, jit=jit)), flat(plain), rtol=1e-4)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_multi_steps_is_refused_where_statistics_are_read(name, jit):
    stats, params = statistics_of(tree_grads()), tree_params()
    optimizer = optax.MultiSteps(optax.chain(optax.identity(), OPTIMIZERS[name](0.1)), every_k_schedule=2)
    maybe_jit = jax.jit if jit else (lambda f: f)
    if OPTIMIZERS[name](0.1).needs == ("mean",):  # right: the mean is what MultiSteps accumulates
        state = maybe_jit(optimizer.init)(params)
        for _ in range(2):
            updates, state = maybe_jit(optimizer.update)(stats.mean, state, params, statistics=stats)
        np.testing.assert_allclose(flat(updates), flat(one_step(OPTIMIZERS[name](0.1), stats)), rtol=1e-5)
        return
    message = rf"{name} inside optax.MultiSteps .* GradStatistics.merge"
    with pytest.raises(ConfigError, match=message):
        maybe_jit(optimizer.init)(params)
    with pytest.raises(ConfigError, match=message):
        optimizers.needs_of(optimizer.gradient_transformation(), params)
    inner = optax.chain(optax.identity(), OPTIMIZERS[name](0.1)).init(params)
    state = optax.MultiStepsState(jnp.zeros((), int), jnp.zeros((), int), inner, stats.mean)
    with pytest.raises(ConfigError, match=message):
        maybe_jit(optimizer.update)(stats.mean, state, params, statistics=stats)


def test_merged_statistics_are_those_of_the_larger_batch():
    grads = tree_grads(count=16)
    first = statistics_of(jax.tree.map(lambda g: g[:8], grads))
    second = statistics_of(jax.tree.map(lambda g: g[8:], grads))
    merged = type(first).merge(first, second)
    for name in OPTIMIZERS:
        a, b = (one_step(OPTIMIZERS[name](0.1), s) for s in (merged, statistics_of(grads)))
        np.testing.assert_allclose(flat(a), flat(b), rtol=1e-3, atol=1e-6, err_msg=name)


def test_apply_if_finite_and_tree_map_params():
    stats, params = statistics_of(tree_grads()), tree_params()
    optimizer = optax.chain(
        optax.apply_if_finite(optimizers.micro_adam_msq(0.1), 3), optimizers.clip_by_global_norm(1.0)
    )
    assert optimizers.needs_of(optimizer, params) == ("mean", "mean_square")
    assert np.all(np.isfinite(flat(one_step(optimizer, stats))))
    for name, make in OPTIMIZERS.items():
        state = make(0.1).init(params)
        doubled = optax.tree_map_params(make(0.1), lambda x: x + 2, state)
        assert all(np.all(x == 2) for x in jax.tree.leaves(doubled[0].mu)), name


# --- needs ------------------------------------------------------------------------------------------------------------


def test_needs():
    params = jax.eval_shape(tree_params)
    expected = {
        "adam": ("mean",),
        "micro_adam": ("mean", "mean_square"),
        "micro_adam_var": ("mean", "mean_square"),
        "micro_adam_msq": ("mean", "mean_square"),
        "eve": ("mean", "mean_square"),
        "micro_sign": ("mean", "mean_sign"),
        "sign_sgd": ("mean",),
        "sign_ema": ("mean",),
    }
    for name, make in OPTIMIZERS.items():
        assert make(0.1).needs == expected[name]
        wrapped = optax.masked(optax.chain(optimizers.clip_by_global_norm(1.0), make(0.1)), MASK)
        for optimizer in (make, make(0.1), wrapped):
            assert optimizers.needs_of(optimizer, params) == expected[name], name
    for plain in (optax.adamw, optax.sgd(0.1), optax.chain(optax.clip(1.0), optax.adam(0.1))):
        assert optimizers.needs_of(plain, params) == ("mean",)
    assert optimizers.scale_by_moments(1, "1/B").needs == ("mean",)
    assert optimizers.scale_by_moments(1, "1/B", keep_parts=True).needs == ("mean", "mean_square")
    both = optax.chain(
        optax.masked(optimizers.micro_sign(0.1), MASK),
        optax.masked(optimizers.eve(0.1), {"dense": {"kernel": False, "bias": True}, "scale": False}),
    )
    assert optimizers.needs_of(both, params) == ("mean", "mean_sign", "mean_square")


def test_needs_of_a_transformation_that_reads_statistics_by_itself():
    def update(updates, state, params=None, *, statistics, **extra):
        return jax.tree.map(jnp.multiply, updates, statistics["mean_cube"]), state

    optimizer = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    assert optimizers.needs_of(optimizer, tree_params()) == ("mean", "mean_cube")
