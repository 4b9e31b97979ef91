"""T5X's factors against NumPy, optax schedules, and bad input."""

import numpy as np
import optax
import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.schedules import as_schedule, create_learning_rate_scheduler

STEPS = np.array([0, 1, 5, 10, 11, 100, 1000])


@pytest.mark.parametrize(
    "factors,expected",
    [
        ("constant", lambda t: np.full(t.shape, 0.3)),
        ("constant * linear_warmup", lambda t: 0.3 * np.minimum(1, t / 10)),
        ("constant * linear_warmup * rsqrt_decay", lambda t: 0.3 * np.minimum(1, t / 10) / np.sqrt(np.maximum(t, 10))),
        ("rsqrt_normalized_decay", lambda t: np.sqrt(10 / np.maximum(t, 10))),
        ("decay_every", lambda t: 0.5 ** (t // 50)),
        ("linear_decay", lambda t: np.maximum(0, np.minimum(t / 10, 1 + 0.5 * (10 - t)))),
        ("cosine_decay", lambda t: 0.5 * (1 + np.cos(np.pi * ((np.maximum(t, 10) - 10) / 200 % 1)))),
    ],
)
def test_factors(factors, expected):
    rate = create_learning_rate_scheduler(factors, 0.3, 10, 0.5, steps_per_decay=50, steps_per_cycle=200)
    np.testing.assert_allclose([rate(t) for t in STEPS], expected(STEPS), rtol=1e-5, atol=1e-7)


def test_offset_and_floor():
    rate = create_learning_rate_scheduler(
        "constant * decay_every", 1.0, steps_per_decay=1, step_offset=10, min_learning_rate=0.1
    )
    assert float(rate(10)) == 1.0
    assert float(rate(11)) == 0.5
    assert float(rate(40)) == pytest.approx(0.1)


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
