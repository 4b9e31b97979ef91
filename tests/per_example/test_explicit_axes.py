"""Meshes as `jax.make_mesh` makes them, with Explicit axes, and with Auto axes, outside of `shard_map`."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from perex_t5x import per_example

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 6, 8)).astype(np.float32),
    "ids": RNG.integers(0, 16, (16, 6)).astype(np.int32),
}
PARAMS = {
    "embedding": RNG.normal(size=(16, 8)).astype(np.float32),
    "w": 0.3 * RNG.normal(size=(8, 32)).astype(np.float32),
    "b": np.zeros(32, np.float32),
    "v": 0.3 * RNG.normal(size=(32, 8)).astype(np.float32),
}
SPECS = {
    "replicated": {"embedding": P(), "w": P(), "b": P(), "v": P()},
    "tensor parallel": {"embedding": P(), "w": P(None, "model"), "b": P("model"), "v": P("model")},
    "fsdp": {"embedding": P("data"), "w": P("data"), "b": P(), "v": P("data", "model")},
}
STATISTICS = ("mean", "mean_square", "mean_sign")
DATA = P("data")


def loss_fn(params, batch, key):
    hidden = jnp.tanh(params["embedding"][batch["ids"]] @ params["w"] + params["b"][None, None])
    kept = jax.random.bernoulli(key, 0.7, hidden.shape)
    error = (jnp.where(kept, hidden, 0.0) @ params["v"] - batch["x"]) ** 2
    return jnp.mean(error), {"largest": jnp.max(error)}


def compute(method="surgery", **options):
    options = {"rng_argnums": 2, "has_aux": True, "norms": True, **options}
    return per_example.grad_statistics(loss_fn, STATISTICS, method=method, **options)


def placed(kind, specs, batch_spec=DATA):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    return mesh, jax.tree.map(put, PARAMS, SPECS[specs]), {k: put(x, batch_spec) for k, x in BATCH.items()}


def assert_same(found, expected):
    (stats, aux), (stats_0, aux_0) = found, expected
    for name in STATISTICS:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), stats[name], stats_0[name])
    np.testing.assert_allclose(aux.values, aux_0.values, rtol=1e-5)
    np.testing.assert_allclose(aux.norms, aux_0.norms, rtol=1e-4)
    np.testing.assert_allclose(aux.aux["largest"], aux_0.aux["largest"], rtol=1e-5)
    assert int(stats.count) == int(stats_0.count) and int(aux.non_finite) == 0


@pytest.fixture(scope="module")
def expected():
    return compute("loop")(PARAMS, BATCH, jax.random.key(0))


CASES = [
    *itertools.product([AxisType.Explicit], SPECS, ["surgery"], [False, True]),
    *itertools.product([AxisType.Explicit], ["fsdp"], ["vmap", "map"], [False]),
    *itertools.product([AxisType.Auto], ["replicated", "fsdp"], ["surgery"], [False, True]),
]


@pytest.mark.parametrize(("kind", "specs", "method", "set_mesh"), CASES)
def test_statistics_are_those_of_one_device(expected, kind, specs, method, set_mesh):
    mesh, params, batch = placed(kind, specs)
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        found = jax.jit(compute(method))(params, batch, jax.random.key(0))
    assert_same(found, expected)
    if kind == AxisType.Explicit:
        stats, aux = found
        assert all(x.sharding.is_equivalent_to(params[k].sharding, x.ndim) for k, x in stats.mean.items())
        assert aux.values.sharding.spec == aux.norms.sharding.spec == DATA


@pytest.mark.parametrize(
    "options",
    [{}, {"group_size": 2}, {"group_size": 16}, {"microbatch_size": 2}, {"clip_norm": 0.1}, {"parameters": "w|v"}],
    ids=str,
)
def test_options(options):
    _, params, batch = placed(AxisType.Explicit, "tensor parallel")
    weights = np.where(np.arange(16) % 5 == 0, 0.0, 1.0 + np.arange(16) % 3)
    found = compute(**options)(params, batch, jax.random.key(0), weights=weights)  # without jit
    assert_same(found, compute("loop", **options)(PARAMS, BATCH, jax.random.key(0), weights=weights))


def test_a_batch_over_both_axes_and_one_over_none(expected):
    for spec in (P(("data", "model")), P(None)):
        _, params, batch = placed(AxisType.Explicit, "replicated", spec)
        assert_same(jax.jit(compute())(params, batch, jax.random.key(0)), expected)


def test_examples_stay_where_they_are():
    """Nothing of the batch, and no gradient, is sent to other devices: only sums are."""
    _, params, batch = placed(AxisType.Explicit, "replicated")
    text = jax.jit(compute()).lower(params, batch, jax.random.key(0)).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text


def test_one_example_has_no_variance_also_there():
    _, params, batch = placed(AxisType.Explicit, "replicated", P(None))
    one = {k: x[:1] for k, x in batch.items()}
    with pytest.raises(ValueError, match="no variance"):
        jax.jit(lambda *a: compute()(*a)[0].variance())(params, one, jax.random.key(0))
