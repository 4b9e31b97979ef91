"""Models as their users write them in Flax linen, Flax nnx, Haiku and Equinox."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from perex_t5x import per_example
from tests.per_example.loop_reference import SOME, assert_matches, single_gradients

DRAW = np.random.default_rng(0)
BATCH = {
    "ids": jnp.asarray(DRAW.integers(0, 9, (5, 6)), jnp.int32),
    "label": jnp.asarray(DRAW.integers(0, 3, 5), jnp.int32),
}


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def linen():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids):
            x = nn.Embed(9, 8)(ids)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
            x = nn.Conv(8, kernel_size=(3,))(x)
            return nn.Dense(3)(nn.gelu(x).mean(axis=1))

    net = Net()
    params = net.init(jax.random.key(0), BATCH["ids"])["params"]
    return lambda params, batch: cross_entropy(net.apply({"params": params}, batch["ids"]), batch), params


def nnx_split_and_merge():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(9, 8, rngs=rngs)
            self.norm = nnx.RMSNorm(8, rngs=rngs)
            self.hidden = nnx.Linear(8, 12, rngs=rngs)
            self.out = nnx.Linear(12, 3, rngs=rngs)

        def __call__(self, ids):
            x = self.norm(self.embed(ids))
            return self.out(jax.nn.silu(self.hidden(x)).mean(axis=1))

    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, batch):
        return cross_entropy(nnx.merge(graph, params, rest)(batch["ids"]), batch)

    return loss, params


def haiku():
    def forward(batch):
        x = hk.Embed(9, 8)(batch["ids"])
        x, _ = hk.dynamic_unroll(hk.GRU(8), x, hk.GRU(8, name="start").initial_state(x.shape[0]), time_major=False)
        logits = hk.nets.MLP([7, 3])(hk.LayerNorm(-1, True, True)(x[:, -1]))
        return cross_entropy(logits, batch)

    transformed = hk.without_apply_rng(hk.transform(forward))
    return transformed.apply, transformed.init(jax.random.key(0), BATCH)


def equinox():
    class Net(eqx.Module):
        embed: eqx.nn.Embedding
        cell: eqx.nn.Linear
        out: eqx.nn.MLP
        name: str = "net"  # not an array: partitioned away

        def __init__(self, key):
            k = jax.random.split(key, 3)
            self.embed = eqx.nn.Embedding(9, 8, key=k[0])
            self.cell = eqx.nn.Linear(8, 8, key=k[1])
            self.out = eqx.nn.MLP(8, 3, 6, 1, key=k[2])

        def __call__(self, ids):
            x = jax.vmap(self.cell)(jax.vmap(self.embed)(ids))
            return self.out(jnp.tanh(x).sum(axis=0))

    params, static = eqx.partition(Net(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, batch):
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch["ids"]), batch)

    return loss, params


@pytest.mark.parametrize("make", [linen, nnx_split_and_merge, haiku, equinox])
def test_against_the_loop(make):
    loss, params = make()
    stats, aux = jax.jit(per_example.grad_statistics(loss, SOME))(params, BATCH)
    gradients = single_gradients(loss, params, BATCH)
    assert jax.tree.structure(stats.mean) == jax.tree.structure(params)
    assert_matches(stats, gradients)
    np.testing.assert_allclose(aux.values.mean(), loss(params, BATCH), rtol=1e-5)
