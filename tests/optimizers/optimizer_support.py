"""Gradients of examples as NumPy arrays, their statistics, and steps of an optimizer on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x import optimizers
from perex_t5x.per_example import GradStatistics

PHI = {"mean": lambda g: g, "mean_square": np.square, "mean_sign": np.sign, "mean_abs": np.abs}
NAMES = ("mean", "mean_square", "mean_sign")

# Every optimizer, as a function of the learning rate.
OPTIMIZERS = {
    "adam": optimizers.adam,
    "micro_adam": optimizers.micro_adam,
    "micro_adam_var": optimizers.micro_adam_var,
    "micro_adam_msq": optimizers.micro_adam_msq,
    "eve": optimizers.eve,
    "micro_sign": optimizers.micro_sign,
    "sign_sgd": optimizers.sign_sgd,
    "sign_ema": optimizers.sign_ema,
}


def statistics_of(grads_N, weights=None, group_size=1, names=NAMES):
    """`GradStatistics` of a tree of per-example gradients [N, ...], straight from the definition, in double precision."""

    def average(name, g_N):
        h_M = np.asarray(g_N, np.float64)
        h_M = h_M.reshape(-1, group_size, *h_M.shape[1:]).mean(axis=1)
        return jnp.asarray(np.average(PHI[name](h_M), axis=0, weights=weights), jnp.float32)

    count = len(jax.tree.leaves(grads_N)[0])
    w = np.ones(count // group_size) if weights is None else np.asarray(weights, np.float64)
    return GradStatistics(
        {name: jax.tree.map(functools.partial(average, name), grads_N) for name in names},
        count=jnp.asarray(count),
        num_groups=jnp.asarray(len(w)),
        weight_sum=jnp.asarray(group_size * w.sum(), jnp.float32),
        weight_square_sum=jnp.asarray(group_size * (w**2).sum(), jnp.float32),
        group_size=group_size,
    )


def random_grads(steps, count, size=6, seed=0):
    """[steps, count, size]: a signal-to-noise ratio and a scale of its own for every coordinate."""
    draw = np.random.default_rng(seed)
    mu, sigma = draw.normal(0, 1, size), draw.uniform(0.3, 3.0, size)
    scale = 10.0 ** draw.integers(-3, 3, size)
    return (mu + sigma * draw.normal(size=(steps, count, size))) * scale


def tree_grads(count=8, seed=0):
    """Per-example gradients of a small tree of parameters."""
    draw = np.random.default_rng(seed)
    shapes = {"dense": {"kernel": (4, 6), "bias": (6,)}, "scale": (3,)}
    return jax.tree.map(lambda s: 0.3 + draw.normal(size=(count, *s)), shapes, is_leaf=lambda s: isinstance(s, tuple))


def tree_params():
    return jax.tree.map(lambda g: jnp.asarray(g.mean(axis=0) * 0.1 + 0.5, jnp.float32), tree_grads(seed=7))


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def run(optimizer, all_statistics, params):
    """The updates of every step, and the last state; one compiled loop. Statistics: a list, or with an axis of steps."""
    if isinstance(all_statistics, list):
        all_statistics = jax.tree.map(lambda *xs: jnp.stack(xs), *all_statistics)

    def step(state, stats):
        updates, state = optimizer.update(stats.mean, state, params, statistics=stats)
        return state, updates

    state, updates = jax.jit(lambda s, x: jax.lax.scan(step, s, x))(optimizer.init(params), all_statistics)
    return updates, state
