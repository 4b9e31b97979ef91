"""Diagonals of curvature matrices: against dense Jacobians and Hessians of tiny models."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from perex_t5x.per_example import curvature
from tests.per_example import loop_reference as loop

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


PARAMS = {"w": normal(4, 3), "v": normal(3, 3)}
FLAT = {"x": normal(4, 4), "a": np.ones(4, np.float32)}
SEQUENCE = {"x": normal(4, 2, 4), "a": np.array([[1.0, 0.0], [0.5, 2.0], [1.0, 1.0], [0.25, 0.5]], np.float32)}


def outputs(p, b):
    return jnp.tanh(b["x"] @ p["w"]) @ p["v"]


def weighted(p, b):
    return outputs(p, b), b["a"]


# One position's loss for some label, whose Hessian in f does not depend on the label.
ONE_LOSS = {
    "categorical": lambda f: jax.nn.logsumexp(f),
    "gaussian": lambda f: 0.5 * jnp.sum(f**2),
    "bernoulli": lambda f: jnp.sum(jax.nn.softplus(f)),
}


def dense(name, batch, params=PARAMS):
    """diag (1/N) Σ_i Σ_t a_it J_itᵀ H_it J_it with every Jacobian and Hessian formed."""
    f = outputs(params, batch)
    f_RxC, a_R = np.asarray(f).reshape(-1, f.shape[-1]), batch["a"].reshape(-1)
    hessians = np.stack([np.asarray(jax.hessian(ONE_LOSS[name])(x)) for x in f_RxC])
    jacobians = jax.jacobian(lambda p: outputs(p, batch).reshape(f_RxC.shape))(params)
    return jax.tree.map(
        lambda j: np.einsum("r,rc...,rcd,rd...->...", a_R, np.asarray(j), hessians, np.asarray(j)) / len(batch["x"]),
        jacobians,
    )


def assert_close(found, expected, rtol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.max(b)), found, expected)


@pytest.mark.parametrize("name", curvature.LIKELIHOODS)
@pytest.mark.parametrize("batch", [FLAT, SEQUENCE], ids=["one position", "a sequence"])
def test_gauss_newton_against_dense_matrices(name, batch):
    compute = curvature.gauss_newton_diagonal(weighted, name, has_weights=True)
    assert_close(jax.jit(compute)(PARAMS, batch), dense(name, batch))
    plain = {**batch, "a": np.ones_like(batch["a"])}
    assert_close(curvature.gauss_newton_diagonal(outputs, name, microbatch_size=2)(PARAMS, batch), dense(name, plain))


@pytest.mark.parametrize("name", curvature.LIKELIHOODS)
def test_sampled_labels_have_that_mean(name):
    """The mean of 400 estimates, within five standard errors of the exact diagonal at every coordinate."""
    one = curvature.fisher_diagonal(weighted, name, has_weights=True)
    keys = jax.random.split(jax.random.key(1), 400)
    drawn = jax.jit(lambda: jax.lax.map(lambda key: one(PARAMS, SEQUENCE, key), keys))()

    def check(x, exact):
        x = np.asarray(x, np.float64)
        error = x.std(axis=0) / np.sqrt(len(x))
        assert np.all(np.abs(x.mean(axis=0) - exact) < 5 * error + 1e-7)
        assert np.sum(x.mean(axis=0)) == pytest.approx(np.sum(exact), rel=0.1)

    jax.tree.map(check, drawn, dense(name, SEQUENCE))


def test_every_label_once_by_hand():
    """One position: Σ_c p_c (∇ −log p_c)², all labels enumerated by a loop over single examples."""
    total = jax.tree.map(lambda x: np.zeros(x.shape), PARAMS)
    for i in range(4):
        row = loop.row(FLAT, i)
        p = jax.nn.softmax(outputs(PARAMS, row))[0]
        for c in range(3):
            g = jax.grad(lambda q, row=row, c=c: -jax.nn.log_softmax(outputs(q, row))[0, c])(PARAMS)
            total = jax.tree.map(lambda t, x, w=p[c]: t + float(w) * np.asarray(x) ** 2 / 4, total, g)
    assert_close(curvature.gauss_newton_diagonal(outputs)(PARAMS, FLAT), total)


@pytest.mark.parametrize("options", [{"microbatch_size": 2}, {"method": "map"}], ids=str)
def test_labels_follow_the_example(options):
    key = jax.random.key(5)
    one = curvature.fisher_diagonal(outputs)
    assert_close(curvature.fisher_diagonal(outputs, **options)(PARAMS, SEQUENCE, key), one(PARAMS, SEQUENCE, key))
    assert not np.allclose(one(PARAMS, SEQUENCE, jax.random.key(6))["w"], one(PARAMS, SEQUENCE, key)["w"], rtol=1e-3)


def test_several_samples_are_their_mean():
    """Against single estimates with the keys that the samples have."""
    key, batch = jax.random.key(5), SEQUENCE

    def loss(p, b, key):
        f = outputs(p, b)
        y = jax.random.categorical(key, f)
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(f), y[..., None], axis=-1))

    squares = []
    for s in range(3):
        singles = loop.single_gradients(loss, PARAMS, {"x": batch["x"]}, key=jax.random.fold_in(key, s))
        squares.append(jax.tree.map(lambda *g: np.mean(np.square(g), axis=0), *singles))
    expected = jax.tree.map(lambda *x: np.mean(x, axis=0), *squares)
    assert_close(curvature.fisher_diagonal(outputs, num_samples=3)(PARAMS, {"x": batch["x"]}, key), expected)


def test_devices_draw_the_same_labels():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    key = jax.random.key(2)
    options = {"num_samples": 2, "has_weights": True}
    on_device = curvature.fisher_diagonal(weighted, data_axes="data", **options)
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
    expected = curvature.fisher_diagonal(weighted, **options)(PARAMS, SEQUENCE, key)
    assert_close(jax.jit(run)(PARAMS, SEQUENCE, key), expected)


def test_the_empirical_fisher_is_the_mean_square_and_not_the_fisher():
    labels = RNG.integers(0, 3, 4)

    def loss(p, b):
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(outputs(p, b)), b["y"][:, None], axis=-1))

    batch = {"x": FLAT["x"], "y": labels}
    found = curvature.empirical_fisher_diagonal(loss, microbatch_size=2)(PARAMS, batch)
    singles = loop.single_gradients(loss, PARAMS, batch)
    assert_close(found, jax.tree.map(lambda *g: np.mean(np.square(g), axis=0), *singles))
    assert not np.allclose(found["w"], dense("categorical", FLAT)["w"], rtol=0.05)


def test_arguments_reach_the_model():
    compute = curvature.gauss_newton_diagonal(lambda p, b, scale, power=1: scale**power * outputs(p, b), "gaussian")
    assert_close(
        compute(PARAMS, FLAT, 2.0, power=2), jax.tree.map(lambda x: 16 * x, dense("gaussian", FLAT)), rtol=1e-3
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"likelihood": "poisson"}, "likelihood = 'poisson': must be one of categorical, gaussian, bernoulli"),
        ({"num_samples": 0}, "num_samples = 0"),
        ({"group_size": 2}, "group_size is no option of a curvature diagonal"),
        ({"has_weights": True}, r"has_weights=True: outputs_fn must return \(outputs, weights\)"),
    ],
)
def test_requests_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        curvature.fisher_diagonal(outputs, **options)(PARAMS, FLAT, jax.random.key(0))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (weighted, "if it is .outputs, weights., say has_weights=True"),
        (lambda p, b: outputs(p, b)[:, 0], r"returns shape \(1,\)"),
    ],
)
def test_outputs_that_cannot_be(model, message):
    with pytest.raises(ValueError, match=message):
        curvature.gauss_newton_diagonal(model)(PARAMS, FLAT)
    with pytest.raises(ValueError, match="weights of shape"):
        curvature.gauss_newton_diagonal(lambda p, b: (outputs(p, b), jnp.ones(3)), has_weights=True)(PARAMS, FLAT)


@pytest.mark.parametrize("set_mesh", [False, True])
def test_a_batch_on_explicit_axes(set_mesh):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    params = {"w": put(PARAMS["w"], "model"), "v": put(PARAMS["v"])}
    batch = {k: put(x, "data") for k, x in SEQUENCE.items()}
    scaled = lambda p, b, scale, *, kind: (scale * outputs(p, b), b["a"]) if kind == "scaled" else None  # noqa: E731
    exact = curvature.gauss_newton_diagonal(scaled, has_weights=True)
    sampled = curvature.fisher_diagonal(weighted, has_weights=True, num_samples=2)
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        found = exact(params, batch, 1.0, kind="scaled")
        found_sampled = sampled(params, batch, jax.random.key(0))
    assert found["w"].sharding.is_equivalent_to(params["w"].sharding, 2)
    assert_close(found, dense("categorical", SEQUENCE))
    assert_close(found_sampled, sampled(PARAMS, SEQUENCE, jax.random.key(0)))
