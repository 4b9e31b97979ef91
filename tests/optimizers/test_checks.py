"""What a user can get wrong: the message says what, where, and how to fix it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perex_t5x import optimizers
from perex_t5x.errors import ConfigError
from tests.optimizers.optimizer_support import OPTIMIZERS, random_grads, statistics_of

PARAMS = jnp.zeros(6)
READERS = [name for name, make in OPTIMIZERS.items() if make(0.1).needs != ("mean",)]


def stats_of(count=8, **options):
    return statistics_of(random_grads(1, count)[0], **options)


def update(optimizer, stats, updates=None):
    return optimizer.update(
        stats.mean if updates is None else updates, optimizer.init(PARAMS), PARAMS, statistics=stats
    )


@pytest.mark.parametrize("name", READERS)
def test_no_statistics(name):
    optimizer = OPTIMIZERS[name](0.1)
    with pytest.raises(ConfigError, match=rf"{name} needs the statistics 'mean', .*no statistics=") as e:
        optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    assert "optimizer.update(stats.mean, state, params, statistics=stats)" in str(e.value)
    with pytest.raises(ConfigError, match="statistics= is a tuple, not a per_example.GradStatistics"):
        optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS, statistics=(stats_of(), None))


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in READERS])
def test_the_mean_alone_needs_no_statistics(name):
    optimizer, stats = OPTIMIZERS[name](0.1), stats_of()
    a, _ = optimizer.update(stats.mean, optimizer.init(PARAMS))
    b, _ = update(optimizer, stats)
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", READERS)
def test_statistics_that_lack_what_is_needed(name):
    with pytest.raises(
        ConfigError, match=rf"{name} needs the statistics 'mean', 'mean_s.*; given were 'mean'\. Compute"
    ):
        update(OPTIMIZERS[name](0.1), stats_of(names=("mean",)))


@pytest.mark.parametrize("name", ["micro_adam_var", "micro_adam_msq"])
def test_one_example_has_no_variance(name):
    with pytest.raises(ConfigError, match=rf"{name} estimates the variance over examples, and one example has none"):
        update(OPTIMIZERS[name](0.1), stats_of(1))
    with pytest.raises(
        ConfigError, match=r"one group of 4 examples has none. Use a larger batch or a smaller group_size"
    ):
        update(OPTIMIZERS[name](0.1), stats_of(4, group_size=4))
    traced, _ = jax.jit(lambda s: update(OPTIMIZERS[name](0.1), s))(stats_of(1))
    assert np.all(np.isnan(traced))  # the count cannot be seen; not a number is not a wrong number


def test_one_example_is_enough_for_the_others():
    for name in OPTIMIZERS:
        if name not in ("micro_adam_var", "micro_adam_msq"):
            assert np.all(np.isfinite(update(OPTIMIZERS[name](0.1), stats_of(1))[0])), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hyperparameters(name):
    make = OPTIMIZERS[name]
    for value in (-0.1, 1.0, 1.5, float("nan"), jnp.asarray(1.0)):
        with pytest.raises(ConfigError, match=rf"{name}: b1 = .* must be in \[0, 1\)"):
            make(0.1, b1=value)
    for bad in ({"learning_rate": -0.1}, {"weight_decay": -1.0}, {"learning_rate": jnp.asarray(-0.1)}):
        with pytest.raises(ConfigError, match=rf"{name}: {next(iter(bad))} = .* must be in \[0, ∞\)"):
            make(**{"learning_rate": 0.1, **bad})
    if "sign" not in name:
        for bad in ({"b2": 1.0}, {"b2": -0.5}, {"eps": -1e-8}):
            with pytest.raises(ConfigError, match=rf"{name}: {next(iter(bad))} = "):
                make(0.1, **bad)
    make(0.0), make(0.1, b1=0.0), make(optax.constant_schedule(-1.0))  # a schedule is not looked into
    jax.jit(lambda rate: (make(rate), rate)[1])(-1.0)  # nor a traced rate


def test_moments_and_places():
    for a, b, message in [
        (0, 0, "a = b = 0 leaves nothing"),
        (-1, 1, r"a = -1 must be in \[0"),
        (1, -0.1, r"b = -0.1 must be in \[0"),
        (1, "1/M", "b = '1/M' must be one of '1/B'"),
    ]:
        with pytest.raises(ConfigError, match=f"scale_by_moments: {message}"):
            optimizers.scale_by_moments(a, b)
    with pytest.raises(ConfigError, match="floor = 'none' must be one of 'auto', 'mean_square', 'zero'"):
        optimizers.micro_adam_msq(0.1, floor="none")
    with pytest.raises(ConfigError, match="place = 'late' must be one of 'example', 'batch', 'ema'"):
        optimizers.scale_by_sign("late")
    with pytest.raises(ConfigError, match=r"max_norm = 0 must be in \(0, ∞\)"):
        optimizers.clip_by_global_norm(0)


def test_trees_that_do_not_fit():
    optimizer = optimizers.micro_adam(0.1)
    for wrong in ({"w": PARAMS}, jnp.zeros(5), [PARAMS, PARAMS]):
        with pytest.raises(ConfigError, match="micro_adam: the statistics' trees do not have the structure"):
            update(optimizer, stats_of(), updates=wrong)
    tree = {"w": jnp.zeros((2, 3)), "v": jnp.zeros(6)}
    stats = statistics_of(jax.tree.map(lambda p: np.ones((4, *p.shape)), tree))
    flattened = optax.flatten(optimizer)
    with pytest.raises(ConfigError, match=r"structure and shapes of the updates.*optax.flatten"):
        flattened.update(stats.mean, flattened.init(tree), tree, statistics=stats)
