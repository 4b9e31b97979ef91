"""The reference of this folder's tests: gradients of single examples by a Python loop, and averages over them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x import per_example
from perex_t5x.per_example.statistic import canonical

STATISTICS = canonical(
    [
        "mean",
        "mean_square",
        "mean_sign",
        per_example.Statistic("power", lambda g: jnp.abs(g) ** 1.5),
        per_example.Statistic("tanh", jnp.tanh),
        per_example.Statistic("cos", jnp.cos),
    ]
)
SOME = tuple(s for s in STATISTICS if s.name in ("mean", "mean_square", "cos"))


def row(batch, i):
    return jax.tree.map(lambda x: x[i : i + 1], batch)


def single_gradients(loss, params, batch, *extra, key=None):
    """One gradient an example; example i's key is fold_in(key, i)."""
    grad = jax.jit(jax.grad(loss))
    count = jax.tree.leaves(batch)[0].shape[0]
    keys = [() if key is None else (jax.random.fold_in(key, i),) for i in range(count)]
    rows = [grad(params, row(batch, i), *extra, *keys[i]) for i in range(count)]
    return [jax.tree.map(lambda g: np.asarray(g, np.float64), g) for g in rows]


def grouped(gradients, size):
    parts = [gradients[i : i + size] for i in range(0, len(gradients), size)]
    return [jax.tree.map(lambda *g: sum(g) / size, *part) for part in parts]


def norms(gradients):
    return [np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(g))) for g in gradients]


def clipped(gradients, limit):
    factors = [min(1.0, limit / n) for n in norms(gradients)]
    return [jax.tree.map(lambda x, f=f: x * f, g) for g, f in zip(gradients, factors, strict=True)]


def assert_matches(stats, gradients, statistics=SOME, weights=None, rtol=1e-5):
    """Every average against the loop's, relative to the leaf's largest entry.

    Signs are compared where no example's gradient is within rounding of zero; a leaf that is zero but for rounding is
    measured against the largest gradient of the tree.
    """
    weights = np.ones(len(gradients)) if weights is None else np.asarray(weights, np.float64)
    leaves = [jax.tree_util.tree_leaves_with_path(g) for g in gradients]
    top = max(np.max(np.abs(g)) for rows in leaves for _, g in rows)
    for s in statistics:
        actual = jax.tree.leaves(stats[s.name])
        assert len(actual) == len(leaves[0])
        for k, a in enumerate(actual):
            g_Nx = np.stack([rows[k][1] for rows in leaves])
            phis = np.asarray(s.fn(jnp.asarray(g_Nx, jnp.float32)), np.float64)
            expected = sum(w * p for w, p in zip(weights, phis, strict=True) if w) / weights.sum()
            a = np.asarray(a, np.float64)
            assert a.shape == expected.shape
            if s.name == "mean_sign":
                sure = np.min(np.abs(g_Nx), axis=0) > 1e-5 * max(np.max(np.abs(g_Nx)), 1e-2 * top)
                a, expected = np.where(sure, a, 0), np.where(sure, expected, 0)
            floor = float(np.max(np.asarray(s.fn(jnp.full(1, 1e-2 * top, jnp.float32)))))
            scale = max(np.max(np.abs(expected), initial=0.0), floor, 1e-12)
            name = f"{s.name} of {jax.tree_util.keystr(leaves[0][k][0])}"
            np.testing.assert_allclose(a / scale, expected / scale, rtol=0, atol=rtol, err_msg=name)
