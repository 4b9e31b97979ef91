"""T5X's numbers for every product of factors, optax schedules, and bad input."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.schedules import FACTORS, as_schedule, create_learning_rate_scheduler

# What T5X's function of the same name gives for each factor alone, without a floor (printed by it, in float32).
STEPS = (0, 1, 50, 100, 101, 150, 1000, 2100, 20000)
T5X = {
    "constant": (0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001),
    "linear_warmup": (0, 0.01, 0.5, 1, 1, 1, 1, 1, 1),
    "linear_decay": (0, 1e-05, 0.0005, 0.001, 0.0001, -0.044, -0.809, -1.799, -17.909),
    "rsqrt_decay": (0.1, 0.1, 0.1, 0.1, 0.0995037, 0.0816497, 0.0316228, 0.0218218, 0.00707107),
    "rsqrt_normalized_decay": (1, 1, 1, 1, 0.995037, 0.816497, 0.316228, 0.218218, 0.0707107),
    "decay_every": (1, 1, 1, 1, 1, 1, 0.9, 0.81, 0.121577),
    "cosine_decay": (1, 1, 1, 1, 0.999999, 0.998459, 0.578217, 1, 0.00615588),
}
ARGUMENTS = {
    "base_learning_rate": 0.001,
    "warmup_steps": 100,
    "decay_factor": 0.9,
    "steps_per_decay": 1000,
    "steps_per_cycle": 2000,
}


def rates(*factors, **changes):
    schedule = create_learning_rate_scheduler(" * ".join(factors), **{**ARGUMENTS, **changes})
    return np.asarray(schedule(jnp.array(STEPS)))


def test_every_product_of_factors_is_t5xs():
    assert set(T5X) == set(FACTORS)
    products = [c for n in range(1, len(T5X) + 1) for c in itertools.combinations(T5X, n)]
    products += [("linear_decay", "linear_decay"), ("constant", "constant", "rsqrt_decay")]  # negative twice: positive
    assert len(products) == 2**7 - 1 + 2
    for factors in products:
        wanted = np.maximum(np.prod([T5X[name] for name in factors], axis=0), 1e-8)
        np.testing.assert_allclose(rates(*factors), wanted, rtol=1e-4, atol=2e-12, err_msg=" * ".join(factors))


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        # The default: constant * linear_warmup * rsqrt_decay from 0.5, 1000 steps of warm-up, at least 1e-8.
        ({}, (1e-08, 1.58114e-05, 0.000790569, 0.00158114, 0.00159695, 0.00237171, 0.0158114, 0.0109109, 0.00353553)),
        (
            {"factors": "linear_decay", "base_learning_rate": 0.001, "warmup_steps": 100},
            (1e-08, 1e-05, 0.0005, 0.001, 0.0005, 1e-08, 1e-08, 1e-08, 1e-08),
        ),
    ],
)
def test_products_with_t5xs_defaults(arguments, wanted):
    found = create_learning_rate_scheduler(**arguments)(jnp.array(STEPS))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_without_warm_up():
    """T5X's numbers where it has any: at step 0 most of them are not finite."""
    for name, wanted in {
        "constant": (0.001, 0.001, 0.001),
        "linear_warmup": (1, 1, 1),
        "linear_decay": (0.0001, -0.044, -17.999),
        "rsqrt_decay": (1, 0.141421, 0.00707107),
        "rsqrt_normalized_decay": (0, 0, 0),
        "decay_every": (1, 1, 0.121577),
        "cosine_decay": (0.999999, 0.998459, 1),
    }.items():
        schedule = create_learning_rate_scheduler(name, **{**ARGUMENTS, "warmup_steps": 0})
        found = schedule(jnp.array([1, 50, 20000]))
        np.testing.assert_allclose(found, np.maximum(wanted, 1e-8), rtol=2e-5, err_msg=name)
        assert np.isfinite(schedule(0))


def test_offset_and_floor():
    rate = create_learning_rate_scheduler(
        "constant * decay_every", 1.0, steps_per_decay=1, step_offset=10, min_learning_rate=0.1
    )
    assert float(rate(10)) == 1.0
    assert float(rate(11)) == 0.5
    assert float(rate(40)) == pytest.approx(0.1)
    late = create_learning_rate_scheduler(
        "linear_warmup", warmup_steps=4, step_offset=2**24
    )  # float32 has no 2**24 + 1
    assert [float(late(2**24 + i)) for i in (0, 1, 3)] == pytest.approx([1e-8, 0.25, 0.75])


def test_optax_schedules_and_numbers():
    assert float(as_schedule(optax.linear_schedule(1.0, 0.0, 10))(5)) == pytest.approx(0.5)
    assert float(as_schedule(0.25)(99)) == 0.25
    with pytest.raises(ConfigError, match="must not be negative"):
        as_schedule(-0.1)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"factors": "constant * linear_wamup"}, "unknown factor 'linear_wamup'. Did you mean 'linear_warmup'"),
        ({"base_learning_rate": -1.0}, "must be a number, at least 0"),
        ({"warmup_steps": -1}, "warmup_steps = -1"),
        ({"steps_per_decay": 0}, "steps_per_decay = 0"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ConfigError, match=message):
        create_learning_rate_scheduler(**arguments)
