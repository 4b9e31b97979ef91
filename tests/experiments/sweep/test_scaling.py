"""What follows from a batch size: the rate, steps, the optimizer's arguments, and what is evaluated."""

import gin
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import utils
from perex_t5x.errors import ConfigError
from perex_t5x.experiments.sweep import scaling
from perex_t5x.experiments.sweep.plan import parse_configuration
from tests.experiments.sweep.support import plan


def bound(run):
    return dict(binding.split(" = ", 1) for binding in run.own_bindings)


def by_batch(made):
    return {run.batch_size: run for run in made.runs}


@pytest.mark.parametrize(("rule", "rate"), [("sqrt", 0.02), ("linear", 0.04), ("constant", 0.01), ("full", 0.02)])
def test_rate_follows_the_rule(rule, rate):
    runs = by_batch(plan(batch_sizes=[16, 64], rule=rule, base_learning_rate=0.01))
    assert runs[64].learning_rate == pytest.approx(rate)
    assert float(bound(runs[64])["BASE_LEARNING_RATE"]) == pytest.approx(rate)
    assert runs[16].learning_rate == 0.01


def test_steps_follow_in_examples_seen():
    made = plan("TRAIN_STEPS = 96", "WARMUP_STEPS = 12", "EVAL_PERIOD = 24", batch_sizes=[8, 16, 32, 48])
    runs = by_batch(made)
    assert [(r.train_steps, r.examples) for r in made.runs] == [(192, 1536), (96, 1536), (48, 1536), (32, 1536)]
    assert bound(runs[8])["WARMUP_STEPS"] == "24" and bound(runs[32])["EVAL_PERIOD"] == "12"
    assert bound(runs[32])["SaveCheckpointConfig.period"] == "500"
    assert "TRAIN_STEPS" not in bound(runs[16])


def test_rounding_is_stated():
    made = plan("TRAIN_STEPS = 100", batch_sizes=[16, 48])
    assert by_batch(made)[48].note == "33 steps x 48 = 1584 examples instead of 1600"
    assert by_batch(made)[48].examples == 1584 and by_batch(made)[16].note == ""


@pytest.mark.parametrize("base", [16, 64])
def test_every_batch_size_is_evaluated_on_the_same_examples(base):
    for run in plan("BATCH_SIZE = 64", batch_sizes=[16, 64, 128], base_batch_size=base).runs:
        parse_configuration(run.files, run.bindings, ())
        with gin.config_scope("train_eval"):
            assert gin.get_configurable(utils.DatasetConfig)().batch_size == base
        with gin.config_scope("train"):
            assert gin.get_configurable(utils.DatasetConfig)().batch_size == run.batch_size
        assert gin.query_parameter("%EVAL_STEPS") == 2


@pytest.mark.parametrize(
    "factors",
    [
        "constant * linear_warmup * rsqrt_normalized_decay",
        "constant * linear_warmup * rsqrt_decay",
        "constant * linear_warmup * cosine_decay",
        "constant * linear_warmup * decay_every",
        "linear_decay",
    ],
)
def test_schedule_has_the_same_shape_in_examples_seen(factors):
    name = "utils.create_learning_rate_scheduler"
    made = plan(
        "TRAIN_STEPS = 400",
        "WARMUP_STEPS = 40",
        f"{name}.factors = '{factors}'",
        f"{name}.steps_per_decay = 80",
        f"{name}.steps_per_cycle = 200",
        f"{name}.decay_factor = {0.002 if 'linear_decay' in factors else 0.5}",
        batch_sizes=[16, 64],
        rule="constant",
    )
    rates = {}
    for run in made.runs:
        parse_configuration(run.files, run.bindings, ())
        schedule = gin.get_configurable(utils.create_learning_rate_scheduler)()
        rates[run.batch_size] = np.asarray(schedule(jnp.arange(run.train_steps)))
    np.testing.assert_allclose(rates[64], rates[16][::4], rtol=1e-5)
    assert np.ptp(rates[16]) > 0


def test_a_base_rate_that_is_multiplied_by_twice_is_refused():
    with pytest.raises(ConfigError, match=r"multiplies by the base rate more than once .*Leave 'constant' out"):
        plan("utils.create_learning_rate_scheduler.factors = 'constant * linear_decay'", batch_sizes=[16, 64])


def test_full_rule_scales_moments_bound_and_default():
    made = plan("optax.adamw.b2 = 0.99", "optax.adamw.eps = 1e-6", batch_sizes=[16, 64], rule="full")
    found = bound(by_batch(made)[64])
    assert float(found["optax.adamw.b1"]) == pytest.approx(0.6)
    assert float(found["optax.adamw.b2"]) == pytest.approx(0.96)
    assert float(found["optax.adamw.eps"]) == pytest.approx(5e-7)
    assert not any("adamw" in name for name in bound(by_batch(made)[16]))


def test_full_rule_sees_the_files_and_the_grid():
    made = plan(
        files=["models/tiny.gin", "runs/pretrain.gin", "optimizers/micro_adam.gin"],
        grid={"optimizers.micro_adam.b2": [0.98, 0.99]},
        batch_sizes=[32],
        rule="full",
    )
    assert [round(float(bound(run)["optimizers.micro_adam.b2"]), 9) for run in made.runs] == [0.96, 0.98]
    assert [run.learning_rate for run in made.runs] == pytest.approx([0.016 * 2**0.5] * 2)


def test_full_rule_refuses_and_names_the_largest():
    with pytest.raises(ConfigError, match=r"optax.adamw.b1 = 0.9 .*largest batch size is 159 \(κ = 9.9375\)"):
        plan(batch_sizes=[16, 160], rule="full")
    plan(batch_sizes=[16, 159], rule="full")
    assert scaling._largest_batch(0.98, 16) == 799


def test_weight_decay_per_example():
    made = plan(batch_sizes=[16, 64], rule="sqrt", weight_decay_rule="per_example")
    run = by_batch(made)[64]
    decay = float(bound(run)["optax.adamw.weight_decay"])
    # Σ ηλ over the steps of a run: the same
    assert decay * run.learning_rate * run.train_steps == pytest.approx(0.01 * made.runs[0].learning_rate * 8)
    assert "same at every batch size" in made.described()["weight_decay"]
    assert "optax.adamw.weight_decay" not in bound(by_batch(plan(batch_sizes=[64]))[64])


def test_foreign_schedule_is_refused_where_it_would_be_scaled():
    binding = "trainer.Trainer.learning_rate_fn = @optax.cosine_decay_schedule()"
    with pytest.raises(ConfigError, match="Trainer.learning_rate_fn is another schedule"):
        plan(binding, batch_sizes=[16, 32])
    assert plan(binding, grid={"optax.adamw.b2": [0.9, 0.99]}).runs[0].learning_rate is None
    assert by_batch(plan("trainer.Trainer.learning_rate_fn = 0.5", batch_sizes=[64]))[64].learning_rate == 1.0
