"""Optimizers whose statistics see their own state: formulas against NumPy, limits against the others, and the trainer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perex_t5x import optimizers, per_example
from perex_t5x.errors import ConfigError
from tests import tiny
from tests.optimizers.optimizer_support import random_grads

STEPS, EXAMPLES = 30, 6


def trajectory(optimizer, x_TxNxD):
    """The updates of a linear loss, whose examples' gradients are the rows of x."""
    params = jnp.zeros(x_TxNxD.shape[-1])
    compute = per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), optimizer.needs)

    def step(state, x):
        stats, _ = compute(params, x, operands=optimizers.operands_of(state))
        updates, state = optimizer.update(stats.mean, state, params, statistics=stats)
        return state, updates

    return jax.jit(lambda x: jax.lax.scan(step, optimizer.init(params), x)[1])(jnp.asarray(x_TxNxD, jnp.float32))


def numpy_lion(x_TxNxD, b1=0.9, b2=0.99):
    m = 0.0
    for x in x_TxNxD:
        yield np.sign(b1 * m + (1 - b1) * x).mean(0)
        m = b2 * m + (1 - b2) * x.mean(0)


def numpy_clip(x_TxNxD, b1=0.9, b2=0.999, eps=1e-8, k=1.0):
    m, v = 0.0, np.zeros(x_TxNxD.shape[-1])
    for t, x in enumerate(x_TxNxD, 1):
        bound = np.inf if t == 1 else k * np.sqrt(v / (1 - b2 ** (t - 1)))
        m = b1 * m + (1 - b1) * np.clip(x, -bound, bound).mean(0)
        v = b2 * v + (1 - b2) * (x**2).mean(0)
        yield (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)


@pytest.mark.parametrize(
    ("optimizer", "formula"),
    [
        (optimizers.micro_lion(0.1), numpy_lion),
        (optimizers.micro_lion(0.1, b1=0.5, b2=0.8), lambda x: numpy_lion(x, 0.5, 0.8)),
        (optimizers.micro_clip(0.1, k=1.0), numpy_clip),
        (optimizers.micro_clip(0.1, b1=0.5, b2=0.9, k=0.5), lambda x: numpy_clip(x, 0.5, 0.9, k=0.5)),
    ],
)
def test_steps_are_numpys(optimizer, formula):
    x = random_grads(STEPS, EXAMPLES)
    found, expected = trajectory(optimizer, x), -0.1 * np.stack(list(formula(x)))
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-6)


def test_limits():
    """Examples that agree: Lion. Nothing is clipped: MicroAdam. Clipping changes the path."""
    x = random_grads(STEPS, EXAMPLES)
    alike = np.repeat(x[:, :1], EXAMPLES, axis=1)
    np.testing.assert_allclose(
        trajectory(optimizers.micro_lion(0.1), alike), trajectory_of_mean(optax.lion(0.1), alike), rtol=1e-5
    )
    unclipped = trajectory(optimizers.micro_clip(0.1, k=1e6), x)
    np.testing.assert_allclose(unclipped, trajectory(optimizers.micro_adam(0.1), x), rtol=1e-4)
    assert not np.allclose(trajectory(optimizers.micro_clip(0.1, k=1.0), x), unclipped, rtol=1e-2)
    assert not np.allclose(trajectory(optimizers.micro_lion(0.1), x), trajectory_of_mean(optax.lion(0.1), x), rtol=1e-2)


def trajectory_of_mean(optimizer, x_TxNxD):
    params = jnp.zeros(x_TxNxD.shape[-1])
    state, updates = optimizer.init(params), []
    for g in jnp.asarray(x_TxNxD.mean(axis=1), jnp.float32):
        step, state = optimizer.update(g, state, params)
        updates.append(step)
    return np.stack(updates)


@pytest.mark.parametrize("make", [optimizers.micro_lion, optimizers.micro_clip])
def test_what_they_need_and_hand_over(make):
    params = {"w": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.zeros(3)}
    needs = optimizers.needs_of(make, params)
    assert needs == make(0.1).needs == make(0.2).needs  # made once for each value
    operands = optimizers.operands_of(make(0.1).init(params))
    assert set(operands) == {name for s in needs if not isinstance(s, str) for name in s.operands}
    for tree in operands.values():
        assert jax.tree.map(lambda x: x.shape, tree) == {"w": (2, 3), "b": (3,)}
        assert {x.dtype for x in jax.tree.leaves(tree)} == {jnp.dtype(jnp.float32)}
    assert optimizers.operands_of(optimizers.micro_adam(0.1).init(params)) == {}


def test_combinations_that_cannot_be():
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    two = optax.multi_transform({k: optimizers.micro_lion(0.1) for k in params}, {k: k for k in params})
    with pytest.raises(ConfigError, match="two parts of the optimizer hand over the operand 'lion_momentum'"):
        optimizers.operands_of(two.init(params))
    with pytest.raises(ConfigError, match="b1 = 1.5"):
        optimizers.micro_lion(0.1, b1=1.5)
    with pytest.raises(ValueError, match="needs the operand 'lion_momentum'"):
        optimizer = optimizers.micro_lion(0.1)
        per_example.grad_statistics(lambda p, x: jnp.sum(x @ p), optimizer.needs)(jnp.zeros(2), jnp.ones((3, 2)))


@pytest.mark.parametrize("name", ["micro_lion", pytest.param("micro_clip", marks=pytest.mark.slow)])
def test_the_trainer_hands_the_state_over_on_every_mesh(name, tmp_path):
    files = ("models/tiny.gin", "runs/pretrain.gin", f"optimizers/{name}.gin")
    bindings = (
        "TRAIN_STEPS = 3",
        "train_script.train.stats_period = 1",
        "train_script.train.train_eval_dataset_cfg = None",
    )
    bindings += ("models.T5Config.num_decoder_layers = 1",)
    tiny.train(tmp_path / "one", *bindings, files=files)
    tiny.train(tmp_path / "fsdp", *bindings, files=(*files, "meshes/fsdp.gin"))
    one, fsdp = tiny.losses(tmp_path / "one"), tiny.losses(tmp_path / "fsdp")
    assert list(one) == [1, 2, 3] and one[3] != one[2] != one[1]
    np.testing.assert_allclose(list(one.values()), list(fsdp.values()), rtol=2e-4)
