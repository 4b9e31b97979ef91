"""Metrics, numbers of each example's whole gradient: against a loop, wherever the gradient comes from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from perex_t5x import per_example
from perex_t5x.per_example import Metric, metrics
from perex_t5x.per_example.reductions import measures
from tests.per_example import loop_reference as loop
from tests.per_example.test_operands import BATCH, CASES, MLP, mlp, normal

METRICS = (
    "norm",
    "parameter_norms",
    "cosine_to_mean",
    metrics.squared_norm(),
    metrics.inner_product("v"),
    metrics.cosine("v", "cosines", per_parameter=True),
    metrics.cosine("v"),
    metrics.sketch(16, seed=3),
    Metric("cubes", lambda g, v: jnp.stack([jnp.sum(g**3 * v), jnp.sum(jnp.abs(g))]), operands=("v",)),
    Metric("largest", lambda g: jnp.max(jnp.abs(g)), over="max"),
)
ALL = (*METRICS, "gram")


def direction(params):
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)


def sketch_by_hand(names, gradient, dim, seed):
    """Element by element, from each one's own key."""
    total = np.zeros(dim)
    for name, g in zip(names, jax.tree.leaves(gradient), strict=True):
        codes = metrics.CountSketch(dim, seed).codes(name, jnp.arange(g.size, dtype=jnp.uint32))
        for code, x in zip(np.asarray(codes), g.ravel(), strict=True):
            total[code // 2] += -x if code % 2 else x
    return total


def cosine_of(a, b):
    return np.sum(a * b) / max(np.sqrt(np.sum(a * a) * np.sum(b * b)), 1e-30)


def by_hand(gradients, v, mean=None):
    """From a list of single gradients; `mean`: of all of them, where these are some."""
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])  # noqa: E731
    g_NxP, v_P = np.stack([flat(g) for g in gradients]), flat(v)
    mean_P = g_NxP.mean(axis=0) if mean is None else flat(mean)
    names = [
        jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree_util.tree_leaves_with_path(gradients[0])
    ]
    stack = lambda rows: jax.tree.map(lambda *x: np.stack(x), *rows)  # noqa: E731
    return {
        "norm": np.sqrt(np.sum(g_NxP**2, axis=1)),
        "squared_norm": np.sum(g_NxP**2, axis=1),
        "parameter_norms": stack([jax.tree.map(lambda x: np.sqrt(np.sum(x**2)), g) for g in gradients]),
        "inner_product(v)": g_NxP @ v_P,
        "cosine(v)": np.array([cosine_of(g, v_P) for g in g_NxP]),
        "cosine_to_mean": np.array([cosine_of(g, mean_P) for g in g_NxP]),
        "cosines": stack([jax.tree.map(cosine_of, g, v) for g in gradients]),
        "sketch": np.stack([sketch_by_hand(names, g, 16, 3) for g in gradients]),
        "cubes": np.stack([[np.sum(g**3 * v_P), np.sum(np.abs(g))] for g in g_NxP]),
        "largest": np.max(np.abs(g_NxP), axis=1),
        "gram": g_NxP @ g_NxP.T,
    }


def assert_same(found, expected, wanted=ALL):
    for m in metrics.canonical(wanted):

        def close(a, b, name=m.name):
            scale = max(float(np.max(np.abs(b))), 1e-12)
            np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=3e-5, rtol=0, err_msg=name)

        jax.tree.map(close, found[m.name], expected[m.name])


@pytest.fixture(scope="module")
def expected():
    known = {}

    def of(name):
        if name not in known:
            loss, params = CASES[name]
            known[name] = by_hand(loop.single_gradients(loss, params, BATCH), direction(params))
        return known[name]

    return of


@pytest.mark.parametrize("method", ["surgery", "vmap", "map", "loop"])
@pytest.mark.parametrize("name", CASES)
def test_every_reduction_against_a_loop(name, method, expected):
    loss, params = CASES[name]
    wanted = METRICS if method == "map" else ALL
    compute = per_example.grad_statistics(loss, ("mean",), method=method, metrics=wanted)
    run = compute if method == "loop" else jax.jit(compute)
    assert_same(run(params, BATCH, operands={"v": direction(params)})[1].metrics, expected(name), wanted)
