"""The shipped optimizer files: every one trains, and a checkpoint of one can be continued with another."""

import os
import pathlib

import gin
import jax
import numpy as np
import pytest

from perex_t5x import gin_utils, models, optimizers, schedules, train
from perex_t5x.errors import ConfigError
from tests import tiny
from tests.trainer_support import assert_same

SHIPPED = sorted(path.stem for path in pathlib.Path(gin_utils.shipped_gin_dir(), "optimizers").glob("*.gin"))
SMALL = (
    "models.T5Config.num_decoder_layers = 1",
    "train_script.train.train_eval_dataset_cfg = None",
    "utils.CheckpointConfig.save = None",
)
# What a file needs besides; with a batch of 16 the noise of the shipped multiplier would be all that is seen.
BESIDES = {"dp_adamw": ("NOISE_SEED = 1", "optimizers.dp.noise_multiplier = 0.002")}


def files(name, run="runs/pretrain.gin"):
    return ("models/tiny.gin", run, f"optimizers/{name}.gin")


def test_which_are_shipped():
    assert {
        "adafactor", "adamw", "dp_adamw", "eve", "lion", "micro_adam", "micro_adam_msq", "micro_adam_var", "micro_clip",
        "micro_lion",
        "micro_sign", "sign_ema", "sign_sgd",
    } == set(SHIPPED)  # fmt: skip


# Of two kinds one: operands, noise. The others are slow, and configured by the test below; most tests train with micro_adam.
QUICK = ("dp_adamw", "micro_lion")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SHIPPED]
)
def test_every_shipped_file_trains_at_its_shipped_rate(name, tmp_path):
    every = "train_script.train.stats_period = 1"
    _, state = tiny.train(tmp_path, "TRAIN_STEPS = 30", every, *SMALL, *BESIDES.get(name, ()), files=files(name))
    losses = np.array(list(tiny.losses(tmp_path).values()))
    assert len(losses) == 30 and np.isfinite(losses).all()
    assert losses[-5:].mean() < 0.8 * losses[0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, state.opt_state)))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_rate_comes_from_the_file_and_yields_to_a_binding(name):
    def rate(*bindings):
        bindings = ("MODEL_DIR = 'x'", "TRAIN_STEPS = 1", *BESIDES.get(name, ()), *bindings)
        tiny.configure(*bindings, files=files(name, "runs/quickstart.gin"))
        schedule = gin.get_configurable(schedules.create_learning_rate_scheduler)()
        return float(schedule(5))  # the end of the warm-up

    text = pathlib.Path(gin_utils.shipped_gin_dir(), "optimizers", f"{name}.gin").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("BASE_LEARNING_RATE")]
    assert rate() == pytest.approx(float(line.split("=")[1]))
    assert rate("BASE_LEARNING_RATE = 0.125") == 0.125
    optimizer = gin.query_parameter("OPTIMIZER/gin.macro.value").scoped_configurable_fn
    needs = optimizers.needs_of(optimizer, {"w": jax.ShapeDtypeStruct((2,), "float32")})
    assert (needs == ("mean",)) == (name in ("adafactor", "adamw", "dp_adamw", "lion", "sign_sgd", "sign_ema"))


# --- with parentheses, as in T5X ---------------------------------------------------------------------------------------


def optimizer_def(*bindings):
    tiny.configure("MODEL_DIR = 'x'", "TRAIN_STEPS = 1", *bindings)
    return gin.get_configurable(models.DecoderOnlyModel)().optimizer_def


@pytest.mark.parametrize("name", ["optax.adafactor", "optax.adamw"])
def test_parentheses_leave_the_rate_to_the_schedule(name):
    without, called = optimizer_def(f"OPTIMIZER = @{name}"), optimizer_def(f"OPTIMIZER = @{name}()")
    direct = optimizer_def(f"models.DecoderOnlyModel.optimizer_def = @{name}()")
    none = (
        (f"mine/{name}.learning_rate = None",) if name == "optax.adafactor" else ()
    )  # a number is asked for elsewhere
    scoped = optimizer_def(f"OPTIMIZER = @mine/{name}()", *none)
    params, grads = {"w": np.ones((4, 4), np.float32)}, {"w": np.full((4, 4), 0.3, np.float32)}
    updates = []
    for made in (without, called, direct, scoped):
        driven = optimizers.drive_learning_rate(made)
        assert driven.uses_rate
        updates.append(driven.update(grads, driven.init(params), params, 0.25)[0])
    for other in updates[1:]:
        assert_same(other, updates[0])


def test_a_rate_of_its_own_is_kept_and_said(caplog, tmp_path):
    bindings = ("OPTIMIZER = @optax.sgd()", "optax.sgd.learning_rate = 0.125")
    driven = optimizers.drive_learning_rate(optimizer_def(*bindings))
    assert not driven.uses_rate
    params = {"w": np.zeros(2, np.float32)}
    np.testing.assert_allclose(driven.update({"w": np.ones(2)}, driven.init(params), params, 9.0)[0]["w"], -0.125)
    for wanted, optimizer in ((True, bindings), (False, ("OPTIMIZER = @optax.sgd()",))):
        caplog.clear()
        tiny.configure(f"MODEL_DIR = '{tmp_path}'", "TRAIN_STEPS = 1", *SMALL, *optimizer)
        gin_utils.call(train.train, dry_run=True)
        assert ("Trainer.learning_rate_fn is not used" in caplog.text) == wanted


COMBINED = {
    "a chain, driven": (
        "OPTIMIZER = @optimizers.chain()",
        "optimizers.chain.transformations = [@optax.clip(), @optax.sgd()]",
    ),
    "a chain of a macro": (
        "OPTIMIZER = @optimizers.chain()",
        "optimizers.chain.transformations = %PARTS",
        "PARTS = [@optax.clip(), @optax.sgd()]",
    ),
    "a chain, with a schedule of its own": (
        "OPTIMIZER = @optimizers.chain()",
        "optimizers.chain.transformations = [@optax.clip(), @optax.sgd()]",
        "optax.sgd.learning_rate = @optax.constant_schedule()",
        "optax.constant_schedule.value = 0.5",
    ),
    "several": (
        "OPTIMIZER = @optimizers.MultiOptimizer()",
        "optimizers.MultiOptimizer.traversals_and_optimizers = [('w', @optimizers.chain()), ('b', @optax.sgd())]",
        "optimizers.chain.transformations = [@optax.clip(), @optax.sgd()]",
    ),
}


@pytest.mark.parametrize("kind", COMBINED)
def test_optimizers_are_combined_in_gin(kind, tmp_path):
    file = tmp_path / "combined.gin"
    lines = ("from __gin__ import dynamic_registration", "import optax", "from perex_t5x import optimizers")
    file.write_text("\n".join((*lines, *COMBINED[kind], "optax.clip.max_delta = 1.0")))
    tiny.configure("MODEL_DIR = 'x'", "TRAIN_STEPS = 1", files=("models/tiny.gin", "runs/pretrain.gin", str(file)))
    driven = optimizers.drive_learning_rate(gin.get_configurable(models.DecoderOnlyModel)().optimizer_def)
    assert driven.uses_rate == (kind != "a chain, with a schedule of its own")
    params, grads = {"w": np.zeros(2, np.float32), "b": np.zeros(1)}, {"w": np.array([0.5, 4.0]), "b": np.array([4.0])}
    updates, _ = driven.update(grads, driven.init(params), params, 0.5)
    np.testing.assert_allclose(updates["w"], [-0.25, -0.5])
    np.testing.assert_allclose(updates["b"], [-2.0 if kind == "several" else -0.5])


# --- from AdamW's checkpoint ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adamw_run(tmp_path_factory):
    """Four steps with AdamW."""
    model_dir = tmp_path_factory.mktemp("adamw")
    small = [b for b in SMALL if "CheckpointConfig" not in b]
    _, state = tiny.train(model_dir, "TRAIN_STEPS = 4", *small)
    return os.path.join(model_dir, "checkpoint_4"), state


def go_on(model_dir, source, name, *bindings):
    """One step from another run's checkpoint, at rate 0."""
    return tiny.train(
        model_dir,
        f"INITIAL_CHECKPOINT_PATH = '{source}'",
        "TRAIN_STEPS = 5",
        *tiny.RATE_0,
        *SMALL,
        *bindings,
        files=files(name, "runs/finetune.gin"),
    )


def test_switching_from_adamw_with_a_fresh_state(adamw_run, tmp_path):
    source, before = adamw_run
    fresh = "utils.RestoreCheckpointConfig.assignment_map = [('.*param_states.*', None)]"
    step, state = go_on(tmp_path, source, "micro_adam", fresh)
    assert step == 5 and int(state.opt_state[0].count) == 1
    assert_same(before.params, state.params)


def test_switching_from_adamw_takes_its_moments_over(adamw_run, tmp_path):
    """The names are AdamW's, so without a map `mu`, `nu` and the count continue."""
    source, before = adamw_run
    step, state = go_on(tmp_path, source, "micro_adam")
    assert step == 5 and int(state.opt_state[0].count) == 5
    assert_same(before.params, state.params)
    for old, new in zip(jax.tree.leaves(before.opt_state[0].nu), jax.tree.leaves(state.opt_state[0].nu), strict=True):
        assert (np.asarray(new) >= 0.98 * np.asarray(old) * (1 - 1e-6)).all() and np.asarray(new).any()


def test_a_state_with_more_in_it_needs_a_map(adamw_run, tmp_path):
    source, _ = adamw_run
    with pytest.raises(
        ConfigError, match=r"does not have .*square.*assignment_map = \[\('.\*param_states.\*', None\)\]"
    ):
        go_on(tmp_path, source, "micro_adam_msq")
