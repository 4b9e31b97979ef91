"""The ways to look rows of a table up: each is `sparse`, and is the loop's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from perex_t5x import per_example
from perex_t5x.per_example.engine.rewrites import embeddings
from perex_t5x.per_example.reductions import measures
from tests.per_example.loop_reference import SOME, STATISTICS, assert_matches, norms, single_gradients
from tests.per_example.test_memory import largest

N, T, VOCABULARY, WIDTH = 4, 5, 130, 3


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def squared(h, batch):
    return jnp.sum(jnp.sin(h) * batch["x"])


def per_position(p, batch):
    """As Equinox does it: one id at a time, and `jax.vmap` over positions."""
    return squared(jax.vmap(jax.vmap(lambda i: p["e"][i]))(batch["ids"]), batch)


def used_twice(p, batch):
    """One table for encoder and decoder."""
    return squared(p["e"][batch["ids"]] + jnp.tanh(p["e"][batch["others"]]), batch)


def used_twice_in_different_ways(p, batch):
    h = jax.vmap(jax.vmap(lambda i: p["e"][i]))(batch["ids"]) * 0.5
    return squared(h - p["e"][:-8][batch["others"]], batch)


def one_hot(p, batch):
    return squared(jax.nn.one_hot(batch["ids"], VOCABULARY) @ p["e"], batch)


def one_hot_of_t5x(p, batch):
    classes = jax.lax.iota(jnp.int32, VOCABULARY)
    encoded = jnp.array(batch["ids"][..., None] == classes[None, None], dtype=jnp.float32)
    return squared(jnp.dot(encoded, p["e"]), batch)


def one_hot_transposed(p, batch):
    """Classes first, and explicitly repeated on both sides of the comparison."""
    shape = (1, VOCABULARY, T)
    ids = jax.lax.broadcast_in_dim(batch["ids"], shape, (0, 2))
    encoded = (jax.lax.broadcasted_iota(jnp.int32, shape, 1) == ids).astype(jnp.float32)
    return squared(jnp.einsum("vd,bvt->btd", p["e"], encoded), batch)


def one_hot_twice(p, batch):
    first, second = (jax.nn.one_hot(batch[name], VOCABULARY) @ p["e"] for name in ("ids", "others"))
    return squared(first * 0.5 + jnp.tanh(second), batch)


def sampled_softmax(p, batch):
    h = jnp.tanh(batch["x"])
    label = jnp.sum(h * p["e"][batch["ids"]], axis=-1)
    sampled = jnp.einsum("btd,bsd->bts", h, p["e"][batch["others"]])
    return jnp.mean(jax.nn.logsumexp(jnp.concatenate([label[..., None], sampled], axis=-1), axis=-1) - label)


def slice_of_the_table(p, batch):
    return squared(p["e"][2:-8][batch["ids"]], batch)


def slice_of_a_multiple(p, batch):
    return squared((-(p["e"] * 3.0) / 7.0)[1:-8][batch["ids"]], batch)


def constant_cotangents(p, batch):
    return jnp.sum(p["e"][batch["ids"]]) * 0.5


def deep_rows(p, batch):
    """A table with more axes, and one with a single number for each id."""
    e = p["e"].reshape(VOCABULARY, 1, WIDTH)
    rows = jnp.concatenate([e, 2 * e], axis=1)[batch["ids"]]
    return squared(rows[:, :, 1] + rows[:, :, 0] ** 2, batch)


def numbers(p, batch):
    return squared(p["e"][:, 0][batch["ids"]][..., None] * batch["x"], batch)


def tied_and_shared(p, batch):
    """T5's three uses of one table: encoder, decoder, and logits."""
    h = jnp.tanh(p["e"][batch["ids"]] + 0.3 * p["e"][batch["others"]])
    return jnp.mean(jax.nn.logsumexp(jnp.einsum("vd,btd->btv", p["e"], h), axis=-1))


def tied_and_shared_one_hot(p, batch):
    """The same as T5X computes it, with one-hot ids twice."""
    first, second = (jax.nn.one_hot(batch[name], VOCABULARY) @ p["e"] for name in ("ids", "others"))
    return jnp.mean(jax.nn.logsumexp(jnp.tanh(first + 0.3 * second) @ p["e"].T / 2.0, axis=-1))


def tied_one_hot(p, batch):
    h = jnp.tanh(jax.nn.one_hot(batch["ids"], VOCABULARY) @ p["e"] * 1.5)
    return jnp.mean(jax.nn.logsumexp(h @ p["e"].T, axis=-1))


CASES = {
    f.__name__: f
    for f in (
        per_position, used_twice, used_twice_in_different_ways, one_hot, one_hot_of_t5x, one_hot_transposed, one_hot_twice,
        sampled_softmax, slice_of_the_table, slice_of_a_multiple, constant_cotangents, tied_and_shared,
        tied_and_shared_one_hot, tied_one_hot,
    )
}  # fmt: skip
OTHERS = {f.__name__: f for f in (deep_rows, numbers)}


def inputs(dtype=jnp.float32):
    """Ids repeat within an example, between the two uses, and some are out of range."""
    ids = jax.random.randint(jax.random.key(1), (N, T), 0, 4).at[0, 0].set(VOCABULARY + 7).at[1, 1].set(-VOCABULARY - 3)
    others = jax.random.randint(jax.random.key(2), (N, T), 2, 7).at[2, 3].set(-2).at[3, 0].set(VOCABULARY - 1)
    batch = {"ids": ids, "others": others, "x": normal(3, N, T, WIDTH).astype(dtype)}
    return {"e": normal(0, VOCABULARY, WIDTH).astype(dtype)}, batch


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_embeddings(name):
    loss, (params, batch) = (CASES | OTHERS)[name], inputs()
    if name in CASES:
        (row,) = per_example.coverage(loss, params, batch, strict=True)
        assert row.reduction == ("sparse + dense" if "tied" in name else "sparse")
    stats, aux = jax.jit(per_example.grad_statistics(loss, STATISTICS, norms=True))(params, batch)
    gradients = single_gradients(loss, params, batch)
    assert_matches(stats, gradients, STATISTICS)
    np.testing.assert_allclose(aux.norms, norms(gradients), rtol=1e-5)


def test_two_tables_that_are_looked_up_as_one():
    def loss(p, batch):
        return squared(jnp.concatenate([p["a"], p["b"], p["c"]])[batch["ids"]], batch)

    params = {"a": normal(0, 2, WIDTH), "b": normal(1, 60, WIDTH), "c": normal(2, 68, WIDTH)}
    batch = inputs()[1]
    batch["ids"] = batch["ids"].at[1, 0].set(100).at[2].set(61)
    rows = per_example.coverage(loss, params, batch, strict=True)
    assert {row.reduction for row in rows} == {"sparse"}
    stats, aux = jax.jit(per_example.grad_statistics(loss, STATISTICS, norms=True))(params, batch)
    gradients = single_gradients(loss, params, batch)
    assert_matches(stats, gradients, STATISTICS)
    np.testing.assert_allclose(aux.norms, norms(gradients), rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_embeddings_with_weights_clipping_and_microbatches(name):
    loss, (params, batch) = CASES[name], inputs()
    weights = jnp.array([0.5, 0.0, 2.0, 1.0])
    limit = float(np.median(norms(single_gradients(loss, params, batch))))
    results = []
    for method in ("surgery", "loop"):
        compute = per_example.grad_statistics(loss, SOME, method=method, microbatch_size=2, clip_norm=limit, norms=True)
        results.append(jax.jit(lambda p, b, w, c=compute: c(p, b, weights=w))(params, batch, weights))
    for a, e in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, e, atol=2e-5 * max(float(jnp.max(jnp.abs(e))), 1e-3), rtol=0)


@pytest.mark.parametrize("name", ["per_position", "used_twice", "one_hot_twice", "slice_of_the_table"])
def test_embeddings_with_operands(name):
    """φ that differs from element to element sees whole gradients."""
    loss, (params, batch) = CASES[name], inputs()
    sign = per_example.Statistic("sign", lambda g, m: jnp.sign(m + g), operands=("momentum",))
    momentum = {"e": 0.1 * normal(9, VOCABULARY, WIDTH)}
    stats, _ = jax.jit(
        lambda p, b: per_example.grad_statistics(loss, ("mean", sign))(p, b, operands={"momentum": momentum})
    )(params, batch)
    gradients = single_gradients(loss, params, batch)
    expected = np.mean([np.sign(np.asarray(momentum["e"]) + g["e"]) for g in gradients], axis=0)
    np.testing.assert_array_equal(stats["sign"]["e"], expected.astype(np.float32))
    assert_matches(stats, gradients, STATISTICS[:1])


@pytest.mark.parametrize("name", ["one_hot", "one_hot_twice", "tied_one_hot", "used_twice", "slice_of_the_table"])
@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_cotangents_that_are_not_finite(name, bad):
    """0 · inf is NaN: in a product with one-hot ids it reaches all rows, in a lookup its own. As in the loss's gradient."""
    loss, (params, batch) = CASES[name], inputs()
    if "tied" in name:
        batch["ids"] = batch["ids"].at[0].set(1)  # in range: else nothing reaches the gradient
        params["e"] = params["e"].at[1, 0].set(bad)
    else:
        batch["x"] = batch["x"].at[0, 0, 1].set(bad).at[2, 1, 2].set(bad)  # the first of an id that is out of range
    finite = per_example.Statistic("finite", lambda g: jnp.isfinite(g).astype(jnp.float32) + 0 * jnp.nan_to_num(g))
    stats, aux = jax.jit(per_example.grad_statistics(loss, ("mean", finite), norms=True))(params, batch)
    gradients = np.stack([g["e"] for g in single_gradients(loss, params, batch)])
    np.testing.assert_array_equal(stats["finite"]["e"], np.isfinite(gradients).mean(0))
    np.testing.assert_array_equal(np.isfinite(stats.mean["e"]), np.isfinite(gradients).all(0))
    np.testing.assert_array_equal(np.isfinite(aux.norms), np.isfinite(gradients).all((1, 2)))
    weights = jnp.array([0.0, 1.0, 0.0, 1.0])
    if "tied" not in name:  # the examples that are not finite are left out
        kept, _ = per_example.grad_statistics(loss, SOME)(params, batch, weights=weights)
        assert_matches(kept, single_gradients(loss, params, batch), SOME, weights=weights)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["per_position", "used_twice", "one_hot", "one_hot_twice", "slice_of_the_table"])
def test_narrow_types(name, dtype):
    loss, (params, batch) = CASES[name], inputs(dtype)
    stats, _ = jax.jit(per_example.grad_statistics(loss, SOME))(params, batch)
    assert_matches(stats, single_gradients(loss, params, batch), SOME, rtol=3e-2)


def test_float16_overflows_as_the_gradient_does():
    """Two uses that are too large together: inf for the loss's own gradient, so here."""
    params = {"e": jnp.zeros((VOCABULARY, WIDTH), jnp.float16)}
    ids = jnp.arange(N)[:, None]
    loss = lambda p, i: jnp.sum(p["e"][i] * 5e4) + jnp.sum(p["e"][i] * 5e4)  # noqa: E731
    stats, _ = per_example.grad_statistics(loss, "mean")(params, ids)
    np.testing.assert_array_equal(np.isinf(stats.mean["e"][:, 0]), np.arange(VOCABULARY) < N)


def test_ids_of_eight_bits():
    """One-hot ids whose type cannot count to the number of classes; and one that just can."""
    params = {"e": normal(0, 300, WIDTH)}
    batch = {"ids": jnp.array([[0, 255, 44], [44, 44, 3]], jnp.uint8), "x": normal(1, 2, 3, WIDTH)}
    for classes in (256, 300):
        loss = lambda p, b, n=classes: squared(jax.nn.one_hot(b["ids"], n) @ p["e"][:n], b)  # noqa: E731
        stats, _ = per_example.grad_statistics(loss, SOME)(params, batch)
        assert_matches(stats, single_gradients(loss, params, batch), SOME)


@pytest.mark.parametrize("name", ["per_position", "used_twice", "one_hot", "slice_of_the_table"])
def test_no_ids_at_all(name):
    params, batch = inputs()
    batch = jax.tree.map(lambda x: x[:, :0], batch)
    stats, aux = per_example.grad_statistics(CASES[name], SOME, norms=True)(params, batch)
    assert_matches(stats, single_gradients(CASES[name], params, batch), SOME)
    assert not aux.norms.any()


def test_tokens_of_one_hot_products():
    """unit='token': the unit is one token's row, looked up or by a product."""
    params, batch = inputs()
    batch["ids"] = jnp.abs(batch["ids"]) % VOCABULARY
    lookup = lambda p, b: squared(p["e"][b["ids"]], b)  # noqa: E731
    by_lookup, by_product = (
        per_example.grad_statistics(loss, ("mean", "mean_square"), unit="token")(params, batch)[0]
        for loss in (lookup, one_hot)
    )
    for a, e in zip(jax.tree.leaves(by_product), jax.tree.leaves(by_lookup), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_what_is_not_a_one_hot_product_stays():
    """Other comparisons, a weighted encoding, few classes, classes that the product sums over, ids that all share."""
    params, batch = inputs()
    encoded = lambda b, n=VOCABULARY: jax.nn.one_hot(b["ids"], n)  # noqa: E731
    classes = jnp.arange(VOCABULARY)[None, None]
    losses = {
        "smaller": lambda p, b: squared(
            (classes < b["ids"][..., None]).astype(jnp.float32) @ p["e"], b
        ),
        "smoothed": lambda p, b: squared((encoded(b) * 0.9 + 0.1 / VOCABULARY) @ p["e"], b),
        "few": lambda p, b: squared(encoded(b, 7) @ p["e"][:7], b),
        "differs by class": lambda p, b: squared(
            (b["ids"][..., None] + classes % 2 == classes).astype(jnp.float32) @ p["e"], b
        ),
        "shared": lambda p, b: squared(jax.nn.one_hot(jnp.arange(T)[None], VOCABULARY) @ p["e"], b),
    }  # fmt: skip
    for name, loss in losses.items():
        (row,) = per_example.coverage(loss, params, batch)
        assert row.reduction != "sparse", name
        stats, _ = per_example.grad_statistics(loss, SOME)(params, batch)
        assert_matches(stats, single_gradients(loss, params, batch), SOME)


def test_programs_for_tpus_keep_the_product(monkeypatch):
    monkeypatch.setattr(embeddings.dispatch, "for_tpu", lambda: True)
    (row,) = per_example.coverage(one_hot, *inputs())
    assert row.reduction == "one at a time"


@pytest.mark.parametrize("name", [n for n in CASES if "one_hot" not in n and "tied" not in n])
def test_nothing_of_size_examples_times_table(name):
    """(One-hot ids and logits are as large as that for a table as narrow as this one.)"""
    params, batch = inputs()
    many = jax.tree.map(lambda x: jnp.concatenate([x] * 16), batch)
    surgery = largest(jax.make_jaxpr(per_example.grad_statistics(CASES[name]))(params, many).jaxpr)
    assert surgery < 16 * N * params["e"].nbytes / 4


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["per_position", "used_twice", "one_hot_twice", "slice_of_the_table", "tied_one_hot"])
def test_on_two_devices(name, check_vma):
    loss, params, batch = CASES[name], *inputs()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    compute = per_example.grad_statistics(loss, SOME, data_axes="data", norms=True)
    of_all = jax.shard_map(
        lambda p, b: compute(p, b)[0], mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    assert_matches(jax.jit(of_all)(params, batch), single_gradients(loss, params, batch), SOME)


@pytest.mark.parametrize(
    ("name", "bad"), [("per_position", 1.0), ("used_twice", 1.0), ("one_hot_twice", 1.0), ("one_hot_twice", jnp.nan)]
)
def test_inner_products_and_the_gram_matrix(name, bad, monkeypatch):
    """From rows alone; gradients of all examples would be too much memory."""
    monkeypatch.setattr(measures, "GRAM_BYTES", 0)
    loss, (params, batch) = CASES[name], inputs()
    batch["x"] = batch["x"].at[2, 1, 2].set(bad)
    v = {"e": normal(5, VOCABULARY, WIDTH)}
    wanted = [per_example.metrics.inner_product("v", "inner"), per_example.metrics.gram("gram")]
    compute = per_example.grad_statistics(loss, "mean", metrics=wanted)
    _, aux = jax.jit(lambda p, b: compute(p, b, operands={"v": v}))(params, batch)
    g_Nx = np.stack([g["e"].reshape(-1) for g in single_gradients(loss, params, batch)])
    expected = {"inner": g_Nx @ np.asarray(v["e"], np.float64).reshape(-1), "gram": g_Nx @ g_Nx.T}
    for metric, e in expected.items():
        np.testing.assert_allclose(aux.metrics[metric], e, rtol=1e-4, atol=1e-4)
