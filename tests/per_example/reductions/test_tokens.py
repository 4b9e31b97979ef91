"""unit='token' against explicit positions: every application of a weight gets a copy of it, and a gradient of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import per_example
from perex_t5x.per_example import Statistic

N, T, D, F, V = 3, 5, 4, 6, 7
CUBE = Statistic("cube", lambda g: g**3, factorable=True)
STATISTICS = ("mean", "mean_square", "mean_sign", CUBE)
PHI = {"mean": lambda g: g, "mean_square": np.square, "mean_sign": np.sign, "cube": lambda g: g**3}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


PARAMS = {"e": normal(0, V, D), "s": normal(1, D), "w": normal(2, D, F), "b": normal(3, F)}


def batch(padded):
    ids = jax.random.randint(jax.random.key(4), (N, T), 0, V)
    lengths = jnp.array([T, 3, 4]) if padded else jnp.full(N, T)
    return {"ids": ids, "real": (jnp.arange(T)[None] < lengths[:, None]).astype(jnp.float32), "y": normal(5, N, T, F)}


def loss_of_positions(p, row):
    """One example; every parameter has a leading axis of positions."""
    x = jax.vmap(lambda e, i: e[i])(p["e"], row["ids"][0]) * p["s"]
    y = jnp.tanh(jnp.einsum("td,tdf->tf", x, p["w"]) + p["b"])
    return jnp.sum(row["real"][0][:, None] * (y - row["y"][0]) ** 2)


def loss(p, row):
    """The same with shared parameters, as one writes it."""
    x = p["e"][row["ids"]] * p["s"][None, None]
    return jnp.sum(row["real"][..., None] * (jnp.tanh(x @ p["w"] + p["b"][None, None]) - row["y"]) ** 2)


def positions(b):
    """Gradients of all real positions of all examples, [P, ...]."""
    copies = jax.tree.map(lambda p: jnp.broadcast_to(p, (T, *p.shape)), PARAMS)
    rows = []
    for i in range(N):
        row = jax.tree.map(lambda x, i=i: x[i : i + 1], b)
        g = jax.grad(loss_of_positions)(copies, row)
        keep = np.flatnonzero(np.asarray(row["real"][0]))
        rows.append(jax.tree.map(lambda x, keep=keep: np.asarray(x, np.float64)[keep], g))
    return rows


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("weights", [None, (1.0, 0.0, 2.0)])
@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_against_positions(padded, weights, microbatch_size):
    b = batch(padded)
    compute = per_example.grad_statistics(loss, STATISTICS, unit="token", microbatch_size=microbatch_size)
    given = None if weights is None else jnp.asarray(weights)
    stats, _ = jax.jit(lambda p, b: compute(p, b, weights=given))(PARAMS, b)
    w = np.ones(N) if weights is None else np.asarray(weights)
    rows = positions(b)
    counts = np.array([len(r["b"]) for r in rows])
    scale = (w * counts).sum() / w.sum()  # real positions an example
    for name, phi in PHI.items():
        for key in PARAMS:
            expected = sum(w[i] * phi(scale * rows[i][key]).sum(axis=0) for i in range(N)) / (w * counts).sum()
            actual = np.asarray(stats[name][key], np.float64)
            np.testing.assert_allclose(
                actual, expected, atol=1e-4 * np.abs(expected).max() + 1e-7, err_msg=f"{name} {key}"
            )
    assert int(stats.num_groups) == counts[w > 0].sum() and int(stats.count) == np.count_nonzero(w)
    singles = [jax.grad(loss)(PARAMS, jax.tree.map(lambda x, i=i: x[i : i + 1], b)) for i in range(N)]
    mean = jax.tree.map(lambda *g: sum(w[i] * g[i] for i in range(N)) / w.sum(), *singles)
    for a, e in zip(jax.tree.leaves(stats.mean), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)


def test_the_variance_is_that_of_positions():
    b = batch(True)
    stats, _ = per_example.grad_statistics(loss, unit="token")(PARAMS, b)
    g = np.concatenate([r["w"] for r in positions(b)])
    g = g * len(g) / N
    np.testing.assert_allclose(stats.variance()["w"], g.var(axis=0, ddof=1), rtol=1e-3, atol=1e-5)


def test_a_tied_embedding_counts_every_application():
    def tied(p, ids):
        return jnp.sum(jnp.sin(p[ids] @ p.T))

    p, ids = normal(0, V, D), jax.random.randint(jax.random.key(1), (N, T), 0, V)
    stats, _ = jax.jit(per_example.grad_statistics(tied, unit="token"))(p, ids)
    assert int(stats.num_groups) == 2 * N * T
    np.testing.assert_allclose(stats.mean, jax.grad(tied)(p, ids) / N, rtol=1e-4, atol=1e-5)


def test_scanned_layers_have_positions():
    def scanned(p, x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, p)[0] ** 2)

    p, x = normal(0, 3, D, D), normal(1, N, T, D)
    table = per_example.coverage(scanned, p, x, unit="token")
    assert table[0].reduction == "per token"
    stats, _ = jax.jit(per_example.grad_statistics(scanned, unit="token"))(p, x)
    np.testing.assert_allclose(stats.mean, jax.grad(scanned)(p, x) / N, rtol=1e-4, atol=1e-5)
    assert int(stats.num_groups) == N * T


def no_positions(p, x):
    return jnp.sum(jnp.tanh(x @ p["w"])) * jnp.linalg.det(p["m"])


def test_a_parameter_without_positions_is_refused_or_falls_back():
    p, x = {"w": normal(0, D, F), "m": normal(1, 3, 3)}, normal(2, N, T, D)
    with pytest.raises(ValueError, match=r"unit='token': the gradient of parameter m .* token_fallback=True"):
        per_example.grad_statistics(no_positions, unit="token")(p, x)
    stats, _ = per_example.grad_statistics(no_positions, unit="token", token_fallback=True)(p, x)
    by_example, _ = per_example.grad_statistics(no_positions)(p, x)
    np.testing.assert_allclose(stats.mean_square["m"], by_example.mean_square["m"], rtol=1e-5)
    np.testing.assert_allclose(stats.mean["w"], by_example.mean["w"], rtol=1e-4, atol=1e-5)
    assert not np.allclose(stats.mean_square["w"], by_example.mean_square["w"])
    alone, _ = per_example.grad_statistics(no_positions, unit="token", parameters="w")(p, x)
    np.testing.assert_allclose(alone.mean_square["w"], stats.mean_square["w"], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "word"}, "unit = 'word': must be one of example, token"),
        ({"unit": "token", "group_size": 3}, "unit='token' needs group_size=1"),
        ({"unit": "token", "clip_norm": 1.0}, "unit='token' needs clip_norm=None"),
        ({"unit": "token", "method": "vmap"}, "unit='token' needs method='surgery'"),
        ({"unit": "token", "statistics": Statistic("tanh", jnp.tanh)}, "statistic 'tanh' is not factorable"),
    ],
)
def test_what_tokens_do_not_go_with(options, message):
    with pytest.raises(ValueError, match=message):
        per_example.grad_statistics(loss, **options)


def test_a_row_that_is_not_finite_is_skipped():
    b = batch(False)
    bad = {**b, "y": b["y"].at[1].set(jnp.nan)}
    stats, aux = per_example.grad_statistics(loss, unit="token", non_finite="skip")(PARAMS, bad)
    expected, _ = per_example.grad_statistics(loss, unit="token")(PARAMS, b, weights=jnp.array([1.0, 0.0, 1.0]))
    for a, e in zip(jax.tree.leaves(stats.averages), jax.tree.leaves(expected.averages), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)
    assert int(aux.non_finite) == 1 and int(stats.count) == 2
