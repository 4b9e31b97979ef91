"""The engine against a plain Python loop over single examples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import per_example
from tests.per_example.loop_reference import STATISTICS, assert_matches, single_gradients


def keys(n):
    return jax.random.split(jax.random.key(0), n)


def normal(key, *shape):
    return jax.random.normal(key, shape)


# --- losses -----------------------------------------------------------------------------------------------------------


def mlp():
    k = keys(5)
    params = {"w": normal(k[0], 5, 8), "b": normal(k[1], 8), "v": normal(k[2], 8, 3)}

    def loss(p, batch):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ p["w"] + p["b"][None]) @ p["v"] - y) ** 2)

    return loss, params, (normal(k[3], 6, 5), normal(k[4], 6, 3))


def cnn():
    k = keys(3)
    params = {"w": normal(k[0], 3, 3, 2, 4), "v": normal(k[1], 144, 2)}

    def loss(p, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=numbers)
        # Small, so that cos(g) does not enlarge what a convolution rounds, which differs from one CPU to the next.
        return 0.002 * jnp.mean((jax.nn.relu(h).reshape(x.shape[0], -1) @ p["v"]) ** 2)

    return loss, params, normal(k[2], 6, 6, 6, 2)


def rnn():
    k = keys(3)
    params = {"w": 0.3 * normal(k[0], 6, 6), "u": normal(k[1], 4, 6)}

    def loss(p, x):
        def step(h, x_t):
            h = jnp.tanh(h @ p["w"] + x_t @ p["u"])
            return h, None

        h, _ = jax.lax.scan(step, jnp.zeros((x.shape[0], 6)), jnp.swapaxes(x, 0, 1))
        return jnp.sum(h**2)

    return loss, params, normal(k[2], 6, 5, 4)


def layers(tied, scanned, policy=None):
    k = keys(4)
    params = {"e": normal(k[0], 11, 4), "w": normal(k[1], 3, 4, 4), "s": jnp.ones(4)}
    if not tied:
        params["o"] = normal(k[2], 4, 11)

    def loss(p, ids):
        def layer(x, w):
            return x + jnp.tanh((x * p["s"][None, None]) @ w), None

        wrapped = layer if policy is None else jax.checkpoint(layer, policy=policy, prevent_cse=not scanned)
        x = p["e"][ids]
        if scanned:
            x, _ = jax.lax.scan(wrapped, x, p["w"])
        else:
            for i in range(3):
                x, _ = wrapped(x, p["w"][i])
        logits = x @ (p["e"].T if tied else p["o"])
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])

    return loss, params, jax.random.randint(k[3], (6, 5), 0, 6)  # ids repeat within an example


def branch_on_data():
    k = keys(2)

    def loss(p, x):
        return jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(x @ p["w"]), lambda: x @ (p["w"] * 2)))

    return loss, {"w": normal(k[0], 5, 8)}, normal(k[1], 6, 5)


def used_three_times():
    k = keys(2)

    def loss(p, x):
        w = p["w"]
        return jnp.sum(jnp.tanh(x @ w) @ w.T) + jnp.sum(w[:2] * x[0, :2, None]) + 0.1 * jnp.sum(w**2)

    return loss, {"w": normal(k[0], 5, 8), "unused": jnp.ones(3)}, normal(k[1], 6, 5)


def custom_gradient():
    k = keys(2)

    @jax.custom_vjp
    def doubled(w):
        return w

    doubled.defvjp(lambda w: (w, None), lambda _, g: (2.0 * g,))

    def loss(p, x):
        return jnp.sum(jnp.sin(x @ doubled(p["w"])))

    return loss, {"w": normal(k[0], 5, 8)}, normal(k[1], 6, 5)


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "no_batch_dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
CASES = {
    "mlp": mlp,
    "cnn": cnn,
    "rnn": rnn,
    "branch_on_data": branch_on_data,
    "used_three_times": used_three_times,
    "custom_gradient": custom_gradient,
    "unrolled": lambda: layers(False, False),
    "unrolled_remat": lambda: layers(False, False, POLICIES["nothing"]),
    "scanned": lambda: layers(False, True),
    "tied": lambda: layers(True, False),
    "tied_scanned": lambda: layers(True, True),
    **{f"scanned_{name}": functools.partial(layers, False, True, policy) for name, policy in POLICIES.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_loop(name):
    loss, params, batch = CASES[name]()
    gradients = single_gradients(loss, params, batch)
    stats, aux = jax.jit(per_example.grad_statistics(loss, STATISTICS, norms=True))(params, batch)
    assert_matches(stats, gradients, STATISTICS)
    norms = [np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(g))) for g in gradients]
    np.testing.assert_allclose(aux.norms, norms, rtol=1e-5)
    values = [float(loss(params, jax.tree.map(lambda x, i=i: x[i : i + 1], batch))) for i in range(6)]
    np.testing.assert_allclose(aux.values, values, rtol=1e-5)
    assert int(stats.count) == 6 and int(aux.non_finite) == 0


@pytest.mark.parametrize(
    "options", [{"microbatch_size": 2}, {"method": "vmap"}, {"method": "vmap", "microbatch_size": 3}]
)
def test_options_that_change_no_number(options):
    loss, params, batch = layers(True, True, POLICIES["nothing"])
    gradients = single_gradients(loss, params, batch)
    stats, aux = jax.jit(per_example.grad_statistics(loss, STATISTICS, norms=True, **options))(params, batch)
    assert_matches(stats, gradients, STATISTICS)
    assert aux.values.shape == aux.norms.shape == (6,)


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_weights(microbatch_size):
    loss, params, batch = layers(True, True)
    weights = jnp.array([0.0, 1.0, 2.5, 0.0, 0.5, 1.0])
    gradients = single_gradients(loss, params, batch)
    compute = per_example.grad_statistics(loss, STATISTICS, microbatch_size=microbatch_size)
    stats, _ = jax.jit(lambda p, b, w: compute(p, b, weights=w))(params, batch, weights)
    assert_matches(stats, gradients, STATISTICS, weights)
    assert int(stats.count) == 4
    assert float(stats.weight_sum) == 5.0 and float(stats.weight_square_sum) == 8.5


def test_an_example_of_weight_zero_may_be_nan():
    loss, params, (x, y) = mlp()
    weights = jnp.array([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    compute = jax.jit(lambda p, b, w: per_example.grad_statistics(loss, STATISTICS)(p, b, weights=w))
    stats, aux = compute(params, (x.at[1].set(jnp.nan), y), weights)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(stats.averages))
    assert int(aux.non_finite) == 1  # counted all the same
    expected, _ = compute(params, (x, y), weights)
    for a, e in zip(jax.tree.leaves(stats.averages), jax.tree.leaves(expected.averages), strict=True):
        np.testing.assert_array_equal(a, e)


def test_non_finite_examples_are_skipped():
    loss, params, (x, y) = mlp()
    gradients = single_gradients(loss, params, (x, y))
    compute = per_example.grad_statistics(loss, STATISTICS, non_finite="skip")
    stats, aux = jax.jit(compute)(params, (x.at[2].set(jnp.inf), y))
    kept = gradients[:2] + gradients[3:]
    assert_matches(stats, kept, STATISTICS)
    assert int(stats.count) == 5 and int(aux.non_finite) == 1


def test_clipping_inside_phi():
    loss, params, batch = layers(True, True)
    gradients = single_gradients(loss, params, batch)
    norms = [np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(g))) for g in gradients]
    limit = float(np.median(norms))
    clipped = [jax.tree.map(lambda x, n=n: x * min(1.0, limit / n), g) for g, n in zip(gradients, norms, strict=True)]
    stats, aux = jax.jit(per_example.grad_statistics(loss, STATISTICS, clip_norm=limit, norms=True))(params, batch)
    assert_matches(stats, clipped, STATISTICS)
    np.testing.assert_allclose(aux.norms, norms, rtol=1e-5)  # of the gradients before clipping


def test_groups_of_consecutive_examples():
    loss, params, batch = layers(False, True, POLICIES["nothing"])
    gradients = single_gradients(loss, params, batch)
    groups = [jax.tree.map(lambda a, b: (a + b) / 2, *gradients[i : i + 2]) for i in (0, 2, 4)]
    stats, _ = jax.jit(per_example.grad_statistics(loss, STATISTICS, group_size=2))(params, batch)
    assert_matches(stats, groups, STATISTICS)
    assert int(stats.count) == 6 and int(stats.num_groups) == 3


def test_sum_reduction_scales_so_that_the_mean_is_the_batch_gradient():
    _, params, batch = mlp()

    def total(p, b):
        x, y = b
        return jnp.sum((jnp.tanh(x @ p["w"] + p["b"][None]) @ p["v"] - y) ** 2)

    stats, aux = jax.jit(per_example.grad_statistics(total, "mean", reduction="sum", microbatch_size=2))(params, batch)
    value, gradient = jax.value_and_grad(total)(params, batch)
    for a, e in zip(jax.tree.leaves(stats.mean), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(jnp.sum(aux.values), value, rtol=1e-5)


def test_dropout_keys_belong_to_examples():
    loss0, params, batch = mlp()

    def loss(p, b, key):
        keep = jax.random.bernoulli(key, 0.5, p["b"].shape)
        return loss0({**p, "b": p["b"] * keep}, b)

    key = jax.random.key(3)
    compute = functools.partial(per_example.grad_statistics, loss, STATISTICS, rng_argnums=2)
    stats, _ = jax.jit(compute())(params, batch, key)
    split, _ = jax.jit(compute(microbatch_size=2))(params, batch, key)
    rows = [
        jax.grad(loss)(params, jax.tree.map(lambda x, i=i: x[i : i + 1], batch), jax.random.fold_in(key, i))
        for i in range(6)
    ]
    rows = [jax.tree.map(lambda g: np.asarray(g, np.float64), g) for g in rows]
    assert_matches(stats, rows, STATISTICS)
    assert_matches(split, rows, STATISTICS)


def test_aux_tuples_and_other_arguments():
    _, params, (x, y) = mlp()

    def loss(w, others, batch, temperature):
        h = jnp.tanh(batch["x"] @ w) @ others
        assert batch["nothing"] is None
        return jnp.mean((h - batch["y"]) ** 2) / temperature, {"h": h[0], "n": batch["n"][0]}

    batch = {"x": x, "y": y, "n": jnp.arange(6), "nothing": None}
    compute = per_example.grad_statistics(loss, STATISTICS, argnums=(0, 1), batch_argnums=2, has_aux=True)
    stats, aux = jax.jit(compute)(params["w"], params["v"], batch, 2.0)
    assert aux.aux["h"].shape == (6, 3) and aux.aux["n"].tolist() == list(range(6))
    assert [leaf.shape for leaf in stats.mean] == [(5, 8), (8, 3)]
    one = per_example.grad_statistics(loss, STATISTICS, argnums=1, batch_argnums=2, has_aux=True)
    np.testing.assert_allclose(one(params["w"], params["v"], batch, 2.0)[0].mean, stats.mean[1], rtol=1e-5)


def test_bf16_compute_is_reduced_in_f32():
    k = keys(2)

    def loss(p, x):
        return jnp.sum(jnp.tanh(x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32))

    params, batch = {"w": normal(k[0], 5, 8)}, normal(k[1], 6, 3, 5)
    gradients = single_gradients(loss, params, batch)
    stats, _ = jax.jit(per_example.grad_statistics(loss, ("mean", "mean_square")))(params, batch)
    assert stats.mean["w"].dtype == jnp.float32
    # Looser: products in bf16 may be rounded differently one by one and all together.
    for name, fn in (("mean", lambda g: g), ("mean_square", np.square)):
        expected = np.mean([fn(g["w"]) for g in gradients], axis=0)
        np.testing.assert_allclose(stats[name]["w"], expected, atol=2e-2 * np.abs(expected).max())
