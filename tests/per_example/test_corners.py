"""Corners that once went wrong: programs and numbers at the edge of what a form assumes, against the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from perex_t5x import per_example
from perex_t5x.per_example import Statistic
from tests.per_example.loop_reference import STATISTICS

N = 6
SOME = ("mean", "mean_square", Statistic("cos", jnp.cos))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X, W, STACK = normal(0, N, 5, 4), normal(1, 4, 4), normal(2, 3, 4, 4)


def layers(w, x, remat=False):
    layer = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(jax.checkpoint(layer) if remat else layer, x[0], w)[0] ** 2)


def same(loss, params, *arguments, statistics=SOME, rtol=2e-5, jit=True, **options):
    """Surgery and loop agree; returns what surgery gives."""
    surgery, loop = (
        per_example.grad_statistics(loss, statistics, method=m, norms=True, **options) for m in ("surgery", "loop")
    )
    found = [(jax.jit(surgery) if jit else surgery)(params, *arguments), loop(params, *arguments)]
    for (path, a), (_, e) in zip(*map(jax.tree_util.tree_leaves_with_path, found), strict=True):
        assert a.dtype == e.dtype, jax.tree_util.keystr(path)
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        scale = max(np.max(np.abs(e), initial=0.0, where=np.isfinite(e)), 1e-30)
        np.testing.assert_allclose(a / scale, e / scale, rtol=0, atol=rtol, err_msg=jax.tree_util.keystr(path))
    return found[0]


# --- operations after a body ------------------------------------------------------------------------------------------

AFTER = {
    "full_factor_first": lambda p, x: layers(jnp.full_like(p, 0.5) * p, x),
    "example_factor_first": lambda p, x: layers(jnp.broadcast_to(x[0, 0, 0], p.shape) * p, x),
    "divided": lambda p, x: layers(p / x[0, 0, 0], x),
    "remat": lambda p, x: layers(jnp.full_like(p, 0.5) * p, x, remat=True),
    "two_factors": lambda p, x: layers((p * x[0, 0, 0]) * 3.0, x),
    "regularised": lambda p, x: layers(p, x) + 0.1 * jnp.sum(p**2),
    "masked": lambda p, x: layers(p * jnp.tri(4)[None], x),
    "regularised_remat": lambda p, x: layers(p, x, remat=True) + 0.1 * jnp.sum(jnp.sin(p)),
    "once_more": lambda p, x: layers(p, x) + layers(p, x[:, :2]),
}


@pytest.mark.parametrize("name", AFTER)
def test_operations_after_a_body(name):
    same(AFTER[name], STACK, X, statistics=STATISTICS[:2] + STATISTICS[3:], rtol=1e-4)
    same(AFTER[name], STACK, X, microbatch_size=2, clip_norm=0.5, rtol=1e-4)


def test_a_stack_used_by_two_operations():
    """A regulariser is added inside the loop; with a second loop over the same stack, examples go one at a time."""
    wide, x = normal(0, 3, 32, 32), normal(1, 16, 4, 32)
    table = per_example.coverage(AFTER["regularised"], wide, x, strict=True)
    assert table[0].transient_bytes == 32 * 32 * 4
    table = per_example.coverage(AFTER["once_more"], wide, x, strict=True)
    assert table[0].reduction == "one at a time" and table[0].transient_bytes < 16 * wide.size * 4


# --- branches ---------------------------------------------------------------------------------------------------------


def test_branches():
    cond = jax.lax.cond
    same(
        lambda p, x: jnp.sum(cond(x[0, 0, 0] > 0, lambda s: jnp.sin(s * x), lambda s: s * s * x, -p)),
        jnp.float32(0.7),
        X,
    )
    same(lambda p, x: cond(True, lambda p: jnp.sum((x @ p) ** 2), lambda p: jnp.sum(p), p), W, X)
    shared = lambda p, x, f: cond(f, lambda p: layers(p, x), lambda p: jnp.sum(p), p)  # noqa: E731
    for flag in (True, False):
        same(shared, STACK, X, jnp.asarray(flag), clip_norm=1.0)
        same(shared, STACK, X, jnp.asarray(flag), non_finite="skip", microbatch_size=3)

    def in_scan(p, x, f):
        def step(r, w):
            return cond(f, lambda w: r * 1.1 + jnp.sum(w**2), lambda w: r, w), None

        return jax.lax.scan(step, jnp.float32(0), p)[0] + jnp.sum(x)

    same(in_scan, STACK, X, jnp.asarray(True))


@pytest.mark.parametrize("is_switch", [False, True])
@pytest.mark.parametrize("in_vmap", [False, True])
def test_a_branch_that_each_example_chooses(in_vmap, is_switch):
    """A parameter that only some examples' branch uses; the others' product is not even finite."""
    p = {"a": normal(3, 4, 5), "b": normal(4, 4, 5), "out": normal(5, 5, 3)}
    x = X[:, 0].at[2].set(jnp.inf)
    batch = {"x": x, "which": jnp.array([0, 1, 0, 1, 2, 1])}

    def one(p, x, which):
        branches = [lambda x: jnp.tanh(jnp.where(jnp.isinf(x), 0.5, x) @ p["a"]), lambda x: x @ p["b"]]
        if is_switch:
            h = jax.lax.switch(which, [*branches, lambda x: jnp.sin(x @ p["b"] * 0.5)], x)
        else:
            h = jax.lax.cond(which > 0, *branches[::-1], x)
        return jnp.sum((h @ p["out"]) ** 2)

    def loss(p, batch):
        x, which = batch["x"], batch["which"]
        return jnp.mean(jax.vmap(one, (None, 0, 0))(p, x, which)) if in_vmap else one(p, x[0], which[0])

    stats, _ = same(loss, p, batch)
    assert np.all(np.isfinite(stats.mean["a"]))
    same(loss, p, batch, clip_norm=0.5, microbatch_size=2)
    table = per_example.coverage(loss, p, batch, statistics=("mean", "mean_square"), strict=True)
    rows = {row.parameter: row.reduction for row in table}
    assert rows["a"] == "factored" and (is_switch or rows["b"] == "factored")


def test_tokens_under_a_branch_that_does_not_use_the_weight():
    def loss(p, x, f):
        return jax.lax.cond(f, lambda p: jnp.sum(jnp.sin(x @ p)), lambda p: jnp.float32(0), p)

    compute = per_example.grad_statistics(loss, unit="token")
    plain = per_example.grad_statistics(lambda p, x: jnp.sum(jnp.sin(x @ p)), unit="token")
    np.testing.assert_allclose(compute(W, X, jnp.asarray(True))[0].mean_square, plain(W, X)[0].mean_square, rtol=1e-5)
    assert not np.any(compute(W, X, jnp.asarray(False))[0].mean_square)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_complex_intermediates():
    def loss(p, x):
        return jnp.sum(jnp.real((x * jnp.exp(1j * x)) @ p.astype(jnp.complex64)) ** 2)

    same(loss, W, X)
    same(loss, W, X[:, 0])
    same(loss, normal(3, 40, 30), normal(4, N, 2, 40), clip_norm=1.0)


def test_float16_overflows_as_it_does():
    def loss(p, x):
        return jnp.sum((x.astype(jnp.float16) @ p.astype(jnp.float16)).astype(jnp.float32) * x[..., :1])

    for x in (jnp.ones((4, 2, 64)).at[1].set(400.0), jnp.ones((4, 64)).at[1].set(400.0)):
        stats, aux = same(loss, jnp.full((64, 64), 0.01), x, non_finite="skip", statistics=("mean", "mean_square"))
        assert int(stats.count) == 3 and int(aux.non_finite) == 1
    half = jnp.float16(300.0)
    # Compiled as a whole, XLA multiplies twice in float32 before it rounds, and nothing overflows.
    halves = lambda p, x: layers((p.astype(jnp.float16) * half) * half, x).astype(jnp.float32)  # noqa: E731
    same(halves, STACK * 1e-6, X, rtol=2e-2, jit=False)


@pytest.mark.parametrize("scale", [1e18, 1e-12])
def test_norms_of_large_and_small_gradients(scale):
    def loss(p, x):
        return scale * jnp.sum(jnp.sin((x / scale) @ p) * x) if scale > 1 else scale * jnp.sum(jnp.sin(x @ p))

    stats, aux = same(loss, normal(0, 32, 32), normal(1, 4, 2, 32), non_finite="skip", statistics=("mean",))
    assert int(stats.count) == 4 and np.all(np.asarray(aux.norms) > 0)


def test_norms_where_positions_cancel():
    x = normal(0, 4, 1, 32)
    x = jnp.concatenate([x, -x * (1 + 1e-4)], axis=1)
    same(lambda p, x: jnp.sum(x @ p), normal(1, 32, 32), x, clip_norm=1e-3)


def test_a_statistic_that_closes_over_a_traced_value_or_is_infinite_at_zero():
    ids = jnp.array([[0, 1, 1], [2, 2, 2], [0, 3, 1]])

    def loss(p, ids):
        return jnp.sum(jnp.sin(p["e"][ids])) + jnp.sum(jnp.tanh(p["t"][ids]) @ p["t"].T)

    params = {"e": normal(0, 9, 3), "t": normal(1, 30, 3)}

    @jax.jit
    def clipped(tau):
        return per_example.grad_statistics(loss, Statistic("c", lambda g: jnp.clip(g, -tau, tau)))(params, ids)[0]["c"]

    expected = per_example.grad_statistics(loss, Statistic("c", lambda g: jnp.clip(g, -0.3, 0.3)))(params, ids)[0]["c"]
    for a, e in zip(jax.tree.leaves(clipped(0.3)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)
    log = Statistic("log", lambda g: jnp.log(jnp.abs(g)))
    both = [per_example.grad_statistics(loss, log, method=m)(params, ids)[0]["log"]["e"] for m in ("surgery", "loop")]
    np.testing.assert_allclose(*both, rtol=1e-5)


def test_ids_that_int32_cannot_hold():
    ids = jnp.array([[2**31 + 1, 2], [3, 2**32 - 1]], jnp.uint32)
    for mode in ("clip", "fill"):
        same(lambda p, i, m=mode: jnp.sum(jnp.sin(p.at[i].get(mode=m, fill_value=0.0))), normal(0, 5, 3), ids)


def test_double_precision():
    with jax.enable_x64(True):
        w, x = W.astype(jnp.float64), X.astype(jnp.float64)
        stats, _ = same(lambda p, x: jnp.sum(jnp.tanh(x @ p)), w, x, rtol=1e-13)
        whole = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p)) / N)(w)
        np.testing.assert_allclose(stats.mean, whole, rtol=1e-12)
        f32 = jnp.float32
        same(lambda p, x: jnp.sum(jnp.tanh(x.astype(f32) @ p.astype(f32))).astype(jnp.float64), w, x)
        same(lambda p, x: jnp.sum(jnp.tanh(x.astype(f32) @ p.astype(f32))).astype(jnp.float64), w, x[:, 0])


def test_a_weight_used_many_times():
    def loss(p, x):
        for i in range(500):
            x = x + 1e-3 * jnp.sin(x @ p + i)
        return jnp.sum(x)

    assert per_example.coverage(loss, W, X)[0].reduction in ("one at a time", "all at once")


# --- arguments --------------------------------------------------------------------------------------------------------


def test_aux_of_an_example_that_is_left_out_of_its_group():
    compute = per_example.grad_statistics(lambda p, x: (jnp.sum(x @ p), (x[0, 0, 0], 7)), has_aux=True, group_size=2)
    _, aux = compute(W, X, weights=jnp.array([1.0, 0.0, 1.0, 1.0, 1.0, 1.0]))
    value, number = aux.aux
    assert np.isnan(value[1]) and number[1] == 0
    np.testing.assert_allclose(np.delete(value, 1), np.delete(X[:, 0, 0], 1))
    assert np.all(np.delete(number, 1) == 7)


# --- a region on a mesh, inside the loss ------------------------------------------------------------------------------


@pytest.mark.slow
def test_shard_map_inside_the_loss():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = PartitionSpec(None, "model"), PartitionSpec()

    def block(w, v, b, x):
        return jax.lax.psum(jnp.tanh(x @ w) @ v, "model") + b[None, None]

    def loss(p, x):
        specs = (split, PartitionSpec("model", None), whole, whole)
        y = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=whole)(p["w"], p["v"], p["b"], x)
        return jnp.sum(y**2)

    params = {"w": normal(0, 4, 8), "v": normal(1, 8, 4), "b": normal(2, 4)}
    reductions = {row.parameter: row.reduction for row in per_example.coverage(loss, params, X)}
    assert reductions["w"] == reductions["v"] == "one at a time"
    same(loss, params, X)
    weights = jnp.array([1.0, 0.0, 2.0, 1.0, 0.5, 1.0])
    for clip in (None, 0.5):
        found = [
            per_example.grad_statistics(loss, SOME, method=m, clip_norm=clip, microbatch_size=3, norms=True)(
                params, X, weights=weights
            )
            for m in ("surgery", "loop")
        ]
        for a, e in zip(*map(jax.tree.leaves, found), strict=True):
            np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-5)
