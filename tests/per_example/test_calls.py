"""What a loss may be called with, and what it may do besides: the contract of `jax.grad`, kept for each example."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback

from perex_t5x import per_example

X = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
KEY = jax.random.key(0)


def statistics(loss, *arguments, method="surgery", microbatch_size=None, keywords=None, **options):
    options = {"statistics": ("mean", "mean_square", "mean_sign"), **options}
    compute = per_example.grad_statistics(loss, method=method, microbatch_size=microbatch_size, **options)
    return compute(*arguments, **(keywords or {}))


def assert_same(found, expected, rtol=2e-5):
    for name in ("mean", "mean_square", "mean_sign"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), found[name], expected[name])


LOSSES = {
    "associative_scan": lambda p, x: jnp.sum(jax.lax.associative_scan(jnp.multiply, jax.nn.sigmoid(x @ p), axis=1)),
    "associative_scan over the unit axis": lambda p, x: jnp.sum(
        jax.lax.associative_scan(jnp.multiply, jax.nn.sigmoid(x @ p), axis=0)
    ),
    "cumprod": lambda p, x: jnp.sum(jnp.cumprod(jax.nn.sigmoid(x @ p), axis=1)),
    "sort": lambda p, x: jnp.sum(jnp.sort(x @ p, axis=1) * jnp.arange(3.0)[None, :, None]),
    "top_k": lambda p, x: jnp.sum(jax.lax.top_k(x @ p, 3)[0] ** 2),
    "an empty slice before": lambda p, x: jnp.sum(jnp.concatenate([x[:0] @ p, x @ p], 0) ** 2),
    "an empty slice after": lambda p, x: jnp.sum((x @ p)[:0]) + jnp.sum((x @ p) ** 2),
    "an empty slice of another axis": lambda p, x: jnp.sum(jnp.concatenate([(x @ p)[:, :0], x @ p], 1) ** 2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_recurrent_models_and_odd_slices(name):
    expected, _ = statistics(LOSSES[name], W, X, method="loop")
    assert_same(statistics(LOSSES[name], W, X)[0], expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"microbatch_size": 2}, {"group_size": 2}, {"clip_norm": 0.5}, {"norms": True}, {"reduction": "sum"}],
    ids=str,
)
def test_one_example_after_another_on_the_device(options):
    def loss(p, x, key):
        return jnp.sum(jnp.tanh(x @ p["w"] + p["b"][None, None]) ** 2 * jax.random.bernoulli(key, 0.5, (1, 1, 6)))

    params = {"w": W, "b": np.zeros(6, np.float32)}
    options = {"rng_argnums": 2, **options}
    expected, per_unit = statistics(loss, params, X, KEY, method="loop", **options)
    found, mine = jax.jit(lambda *a: statistics(loss, *a, method="map", **options))(params, X, KEY)
    assert_same(found, expected)
    np.testing.assert_allclose(mine.values, per_unit.values, rtol=1e-6)
    if per_unit.norms is not None:
        np.testing.assert_allclose(mine.norms, per_unit.norms, rtol=1e-5)


def test_what_cannot_be_batched_goes_one_after_another():
    sizes, experts = jnp.array([1, 2]), np.stack([W, 2 * W])
    loss = lambda p, x: jnp.sum(jax.lax.ragged_dot(x[0], p, sizes) ** 2)  # noqa: E731
    assert_same(statistics(loss, experts, X, method="map")[0], statistics(loss, experts, X, method="loop")[0])
    pairs = [np.mean([jax.grad(loss)(experts, x[None]) for x in X[i : i + 2]], axis=0) for i in (0, 2)]
    in_groups, _ = statistics(loss, experts, X, method="map", group_size=2)
    np.testing.assert_allclose(in_groups.mean_square, np.mean(np.square(pairs), axis=0), rtol=2e-5)
    with pytest.raises(NotImplementedError, match="ragged_dot.* for several examples at once.*method='map'"):
        statistics(loss, experts, X)


# --- arguments --------------------------------------------------------------------------------------------------------


def test_extra_arguments_reach_the_loss_as_under_grad():
    def loss(p, x, train, name, scale, *, power=1, shift=None):
        assert train is True and name == "relu" and power == 2 and isinstance(scale, jax.core.Tracer | jax.Array)
        return scale * jnp.sum(getattr(jax.nn, name)(x @ p + shift["b"]) ** power)

    extra, keywords = (True, "relu", jnp.float32(0.5)), {"power": 2, "shift": {"b": jnp.ones((1, 1, 6))}}
    expected = np.mean([jax.grad(loss)(W, x[None], *extra, **keywords) for x in X], axis=0)
    for method in ("surgery", "vmap", "map", "loop"):
        found, _ = statistics(loss, W, X, *extra, method=method, keywords=keywords)
        np.testing.assert_allclose(found.mean, expected, rtol=2e-5, atol=1e-6)
    assert per_example.coverage(lambda p, x, train: jnp.sum(x @ p) if train else 0.0, W, X, True)[0].exact


def test_keys_may_be_a_tree_or_nothing():
    def loss(p, x, keys):
        return jnp.sum(x @ p) if keys is None else jnp.sum((x @ p) * jax.random.normal(keys["noise"], (1, 1, 6)))

    assert_same(
        statistics(loss, W, X, {"noise": KEY}, rng_argnums=2)[0],
        statistics(lambda p, x, key: loss(p, x, {"noise": key}), W, X, KEY, rng_argnums=2, method="loop")[0],
    )
    assert statistics(loss, W, X, None, rng_argnums=2)[0].count == 4


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_keys_whose_numbers_depend_on_the_batch_are_refused(implementation):
    key = jax.random.key(0, impl=implementation)
    loss = lambda p, x, key: jnp.sum((x @ p) * jax.random.normal(key, (1, 1, 6)))  # noqa: E731
    for method in ("surgery", "vmap"):
        with pytest.raises(ValueError, match=f"a key of '{implementation}'.*change with microbatch_size.*threefry2x32"):
            statistics(loss, W, X, key, rng_argnums=2, method=method)
    whole, parts = (statistics(loss, W, X, key, rng_argnums=2, method="map", microbatch_size=m)[0] for m in (None, 1))
    assert_same(whole, parts)
    assert_same(whole, statistics(loss, W, X, key, rng_argnums=2, method="loop")[0])
    single = [jax.grad(loss)(W, x[None], jax.random.fold_in(key, i)) for i, x in enumerate(X)]
    pairs = [(single[i] + single[i + 1]) / 2 for i in (0, 2)]
    for method in ("map", "loop"):  # within a group as well, each example draws as it would alone
        in_groups, _ = statistics(loss, W, X, key, rng_argnums=2, method=method, group_size=2)
        np.testing.assert_allclose(in_groups.mean_square, np.mean(np.square(pairs), axis=0), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (lambda p, x: (jnp.sum(x @ p), 1.0), {}, r"returns a tuple.*\(loss, aux\), say has_aux=True"),
        (lambda p, x: jnp.sum(x @ p), {"has_aux": True}, r"must return \(loss, aux\), but it returns one array"),
        (lambda p, x: (jnp.sum(x @ p), 1, 2), {"has_aux": True}, "but it returns 3 values"),
        (lambda p, x: {"loss": jnp.sum(x @ p)}, {}, "returns a dict; it must return a scalar"),
    ],
)
def test_what_a_loss_returns(loss, options, message):
    with pytest.raises(ValueError, match=message):
        statistics(loss, W, X, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((W, X, 3), {"rng_argnums": 2}, "argument 2, which is not a PRNG key but 3"),
        ((W, X, {"a": np.ones(2)}), {"rng_argnums": 2}, r"argument 2\['a'\], which is not a PRNG key but float64\[2\]"),
        ((W + 1j, X), {}, "complex64: φ of a complex gradient is not defined here.*jax.lax.complex"),
        ((W.astype(int), X), {}, "int64?.*which has no gradient|int32.*which has no gradient"),
    ],
)
def test_arguments_that_cannot_be(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        statistics(lambda p, x, *key: jnp.sum(jnp.abs(x @ p)), *arguments, **options)


def test_complex_parameters_as_two_real_ones():
    params = {"re": W, "im": 2 * W}
    loss = lambda p, x: jnp.sum(jnp.abs(jnp.fft.fft(x @ jax.lax.complex(p["re"], p["im"]), axis=1)) ** 2)  # noqa: E731
    assert_same(statistics(loss, params, X)[0], statistics(loss, params, X, method="loop")[0], rtol=1e-4)


# --- effects ----------------------------------------------------------------------------------------------------------


def in_scan(p, x, effect):
    def body(carry, row):
        effect(jnp.sum(row @ p))
        return jnp.tanh(carry + row @ p @ p.T), None

    return jnp.sum(jax.lax.scan(body, jnp.zeros((1, 5)), jnp.swapaxes(x, 0, 1))[0] ** 2)


def in_the_open(p, x, effect):
    effect(jnp.sum(x @ p))
    return jnp.sum((x @ p) ** 2)


@pytest.mark.parametrize("method", ["surgery", "vmap", "map", "loop"])
@pytest.mark.parametrize(("loss", "times"), [(in_the_open, 4), (in_scan, 12)])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_effects_are_kept(method, loss, times, microbatch_size):
    seen = []

    def effect(value):
        jax.debug.callback(lambda v: seen.append(float(v)), value)

    jax.jit(
        lambda p, x: statistics(lambda p, x: loss(p, x, effect), p, x, method=method, microbatch_size=microbatch_size)
    )(W, X)
    jax.effects_barrier()
    expected = [np.sum(r @ W) for x in X for r in (x if loss is in_scan else [x])]
    np.testing.assert_allclose(sorted(seen), sorted(expected), rtol=1e-4, atol=1e-4)
    assert len(seen) == times


def test_ordered_effects_are_refused_or_in_order():
    seen = []

    def loss(p, x):
        io_callback(lambda v: seen.append(float(v)), None, jax.lax.stop_gradient(x[0, 0, 0]), ordered=True)
        return jnp.sum((x @ p) ** 2)

    for method in ("surgery", "vmap"):
        with pytest.raises(ValueError, match=r"ordered effect \(io_callback, .*test_calls.py.*method='map'"):
            statistics(loss, W, X, method=method)
    jax.jit(lambda p, x: statistics(loss, p, x, method="map"))(W, X)
    jax.effects_barrier()
    assert seen == [float(x) for x in X[:, 0, 0]]


@pytest.mark.parametrize("method", ["surgery", "vmap", "map"])
def test_a_check_that_fails_is_reported(method):
    def loss(p, x):
        checkify.check(jnp.all(x < 2.0), "an example has {m}", m=jnp.max(x))
        return jnp.sum((x @ p) ** 2)

    checked = checkify.checkify(jax.jit(lambda p, x: statistics(loss, p, x, method=method)[0].mean))
    assert checked(W, np.minimum(X, 1.9))[0].get() is None
    assert "an example has 2." in checked(W, np.where(X.max() == X, 2.5, np.minimum(X, 1.9)))[0].get()
