"""Trainer.unit = 'token': statistics over the positions of a weight, against copies of every weight at every position."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perex_t5x import optimizers, per_example
from perex_t5x.errors import ConfigError
from perex_t5x.monitoring import Monitor
from perex_t5x.trainer import Trainer
from tests import tiny
from tests.trainer_support import BATCH, assert_close, gradient_of, make_partitioner, make_trainer, run

T, D, V = 5, 4, 7


class Lookup:
    """Σ over real tokens of (tanh(e[id] w + b) − y)², with weights that differ between rows and W tokens in the batch."""

    def __init__(self, optimizer_def):
        self.optimizer_def = optimizer_def

    def get_initial_variables(self, rng, input_shapes):
        keys = jax.random.split(rng, 3)
        shapes = {"e": (V, D), "w": (D, D), "b": (D,)}
        return {"params": {name: jax.random.normal(k, s) for (name, s), k in zip(shapes.items(), keys, strict=True)}}

    def loss_normalizer(self, batch):
        return jnp.sum(batch["ids"] > 0, dtype=jnp.float32)

    def loss_fn(self, p, batch, dropout_rng, normalizer):
        y_BxTxD = jnp.tanh(p["e"][batch["ids"]] @ p["w"] + p["b"][None, None])
        loss = jnp.sum((batch["ids"] > 0)[..., None] * (y_BxTxD - batch["y"].reshape(y_BxTxD.shape)) ** 2)
        return loss / normalizer, {"examples": jnp.float32(batch["ids"].shape[0])}


def make_batch():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, T + 1, BATCH)
    ids = np.where(np.arange(T)[None] < lengths[:, None], rng.integers(1, V, (BATCH, T)), 0).astype(np.int32)
    return {"ids": ids, "y": rng.normal(size=(BATCH, T * D)).astype(np.float32)}


def expected(batch, params):
    """Mean and mean square over real positions P of (P/W) ∂ℓ/∂(the copy at the position), one `jax.grad` each."""

    def loss_at(p, token, y):
        return jnp.sum((jnp.tanh(p["e"][token] @ p["w"] + p["b"]) - y) ** 2)

    rows = []
    for ids, y in zip(batch["ids"], batch["y"].reshape(BATCH, T, D), strict=True):
        for t in np.flatnonzero(ids):
            rows.append(jax.grad(loss_at)(params, ids[t], y[t]))
    # P = W here: each position's gradient is scaled by P/W = 1, and their mean is Σ / W.
    g = jax.tree.map(lambda *x: np.stack(x).astype(np.float64), *rows)
    return {
        n: jax.tree.map(lambda x, f=f: f(x).mean(axis=0), g)
        for n, f in (("mean", lambda x: x), ("mean_square", np.square))
    }


@pytest.mark.parametrize("arguments", [{}, {"num_microbatches": 4}, {"mesh": (4, 1)}, {"non_finite": "skip"}], ids=str)
def test_statistics_are_those_of_positions(arguments):
    arguments = dict(arguments)
    trainer = Trainer(
        Lookup(optimizers.micro_adam), make_partitioner(*arguments.pop("mesh", (1, 1))), 0.1, unit="token", **arguments
    )
    batch = make_batch()
    shapes = {k: v.shape for k, v in batch.items()}
    params = trainer.init_state(jax.random.key(0), shapes).params
    gradient, reference = gradient_of(trainer, batch), expected(batch, params)
    for name in ("mean", "mean_square"):
        assert_close(gradient.statistics[name], reference[name], rtol=1e-4)
    assert_close(gradient.mean, reference["mean"], rtol=1e-4)
    assert gradient.statistics.count == BATCH and gradient.statistics.num_groups == np.count_nonzero(batch["ids"])
    by_example = gradient_of(Trainer(Lookup(optimizers.micro_adam), make_partitioner(), 0.1), batch)
    assert not np.allclose(by_example.statistics.mean_square["w"], reference["mean_square"]["w"], rtol=0.1)


@pytest.mark.parametrize("mesh", [(1, 1), (4, 2)], ids=str)
def test_a_transformer(mesh):
    """The mean is the batch gradient, and its parameters all have positions."""
    batch = tiny.random_batch(BATCH)
    token = gradient_of(make_trainer(optimizers.micro_adam, unit="token", mesh=mesh), batch)
    plain = gradient_of(make_trainer(optax.adamw), batch)
    assert_close(token.mean, plain.mean, rtol=1e-4)
    assert token.statistics.num_groups > BATCH
    for m, q in zip(jax.tree.leaves(token.mean), jax.tree.leaves(token.statistics.mean_square), strict=True):
        assert np.all(np.asarray(q) >= np.square(m) * (1 - 1e-4) - 1e-12)


def test_the_optimizer_and_the_monitor():
    """The monitor still measures examples; an optimizer that reads the mean alone has the plain step."""
    _, by_token = run(make_trainer(optimizers.micro_adam, unit="token", monitor=Monitor(period=1)), 3)
    _, by_example = run(make_trainer(optimizers.micro_adam, monitor=Monitor(period=1)), 3)
    for name, value in by_example[0]["measured"].items():
        np.testing.assert_array_equal(by_token[0]["measured"][name], value, err_msg=name)
    assert by_token[2]["objective"] != by_example[2]["objective"]
    plain = make_trainer(optax.adamw, unit="token")
    assert plain.has_plain_gradient(jax.eval_shape(lambda: {"w": jnp.zeros(2)}))


def test_from_gin(tmp_path):
    files = ("models/tiny.gin", "runs/pretrain.gin", "optimizers/micro_adam.gin", "runs/token_unit.gin")
    step, _ = tiny.train(tmp_path, "TRAIN_STEPS = 4", "train_script.train.stats_period = 1", files=files)
    rows = [json.loads(line) for line in open(tmp_path / "metrics.jsonl", encoding="utf-8")]
    assert step == 4 and "Trainer.unit = 'token'" in (tmp_path / "config.gin").read_text()
    losses = [row["loss"] for row in rows if row["name"] == "train" and "loss" in row]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_what_it_does_not_suit():
    mean_abs = per_example.Statistic("mean_tanh", jnp.tanh)

    def optimizer(learning_rate):
        def update(statistics, state, params):
            return statistics[mean_abs], state

        made = optimizers.from_statistics("own", ("mean", mean_abs), lambda p: optax.EmptyState(), update)
        return optimizers.descend(made, learning_rate)

    shapes = {k: v.shape for k, v in tiny.random_batch(BATCH).items()}
    with pytest.raises(ConfigError, match="Trainer.unit = 'token' needs factorable statistics.*'mean_tanh' is not"):
        make_trainer(optimizer, unit="token").abstract_state(shapes)

    class NoPositions(Lookup):
        def loss_fn(self, p, batch, dropout_rng, normalizer):
            loss, sums = super().loss_fn(p, batch, dropout_rng, normalizer)
            return loss * jnp.linalg.det(p["w"]), sums

    trainer = Trainer(NoPositions(optimizers.micro_adam), make_partitioner(), 0.1, unit="token")
    with pytest.raises(ConfigError, match="Trainer.unit = 'token' does not suit this model; use 'example'.*w"):
        gradient_of(trainer, make_batch())
