"""Clipping by parameter, by a traced norm or a function of norms; weights that are a function of loss and norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from perex_t5x import per_example
from tests.per_example import loop_reference as loop
from tests.per_example.test_operands import BATCH, CASES, MLP, branches, mlp

PASSES = [
    {"clip_strategy": "gradients"},
    {"clip_strategy": "factors", "microbatch_size": 2},
    {"clip_strategy": "two passes"},
    {"method": "vmap"},
    {"method": "map", "microbatch_size": 2},
    {"method": "loop"},
]
NAMES = ["mlp", "tied", "scanned", "slices", "branches"]


def scaled(gradients, factors):
    """Each gradient's leaves times the example's factors of them."""
    return [jax.tree.map(lambda x, c: x * c, g, f) for g, f in zip(gradients, factors, strict=True)]


def norms_of(gradient):
    return jax.tree.map(lambda x: np.sqrt(np.sum(x**2)), gradient)


def limits_for(gradients):
    """Of each parameter the median of its norms, so that some are clipped and some are not."""
    return jax.tree.map(lambda *n: float(np.median(n)) or 1.0, *map(norms_of, gradients))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=() if name == "scanned" or options is PASSES[1] else pytest.mark.slow)
        for name in NAMES
        for options in PASSES
    ],
    ids=str,
)
def test_each_parameter_is_clipped_by_its_own_norm(name, options):
    loss, params = CASES[name]
    singles = loop.single_gradients(loss, params, BATCH)
    limits = limits_for(singles)
    factors = [jax.tree.map(lambda n, c: min(1.0, c / max(n, 1e-30)), norms_of(g), limits) for g in singles]
    assert sum(f < 1 for tree in factors for f in jax.tree.leaves(tree)) > 0
    if name == "branches" and "clip_strategy" in options:
        options = {**options, "clip_strategy": "auto"}
    stats, aux = per_example.grad_statistics(loss, loop.SOME, clip_norm=limits, **options)(params, BATCH)
    loop.assert_matches(stats, scaled(singles, factors))
    np.testing.assert_allclose(aux.norms, loop.norms(singles), rtol=1e-5)


@pytest.mark.parametrize("options", PASSES, ids=str)
def test_a_function_of_norms(options):
    """Scale-invariant factors of the whole, and by parameter."""
    loss, params = CASES["scanned"]
    singles = loop.single_gradients(loss, params, BATCH)
    weights = np.array([1.0, 0.0, 2.0, 1.0])

    def whole(norms):
        return 1.0 / (1.0 + norms["a"] + 2.0 * norms["c"])

    def each(norms):
        return {"a": 1.0 / (1.0 + norms["c"]), "c": norms["a"]}

    for fn in (whole, each):
        compute = per_example.grad_statistics(loss, loop.SOME, clip_norm=fn, **options)
        stats, _ = compute(params, BATCH, weights=weights)
        found = [fn(norms_of(g)) for g in singles]
        factors = [f if isinstance(f, dict) else dict.fromkeys(params, f) for f in found]
        loop.assert_matches(stats, scaled(singles, factors), weights=weights)


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}, {"method": "vmap"}], ids=str)
def test_a_traced_norm(options):
    loss, params = CASES["mlp"]
    singles = loop.single_gradients(loss, params, BATCH)

    @jax.jit
    def run(params, limit, by_parameter):
        compute = per_example.grad_statistics(loss, loop.SOME, clip_norm=limit, **options)
        each = per_example.grad_statistics(loss, loop.SOME, clip_norm=by_parameter, **options)
        return compute(params, BATCH)[0], each(params, BATCH)[0]

    for share in (0.5, 1.0):
        limit = share * float(np.median(loop.norms(singles)))
        whole, each = run(params, limit, dict.fromkeys(params, limit))
        loop.assert_matches(whole, loop.clipped(singles, limit))
        factors = [jax.tree.map(lambda n, c=limit: min(1.0, c / n), norms_of(g)) for g in singles]
        loop.assert_matches(each, scaled(singles, factors))


@pytest.mark.parametrize("options", [{"microbatch_size": 2}, *PASSES[:4]], ids=str)
@pytest.mark.parametrize("name", [pytest.param("mlp", marks=pytest.mark.slow), "scanned"])
def test_weights_by_loss_and_norm(name, options):
    loss, params = CASES[name]
    singles = loop.single_gradients(loss, params, BATCH)
    losses = np.array([loss(params, loop.row(BATCH, i)) for i in range(4)])
    expected = losses / np.sqrt(1.0 + np.square(loop.norms(singles)))
    run = jax.jit(per_example.grad_statistics(loss, loop.SOME, **options), static_argnames="weights")
    stats, aux = run(params, BATCH, weights=lambda loss, norm: loss / jnp.sqrt(1.0 + norm**2))
    loop.assert_matches(stats, singles, weights=expected)
    np.testing.assert_allclose(stats.weight_sum, expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(stats.weight_square_sum, np.sum(expected**2), rtol=1e-5)
    np.testing.assert_allclose(aux.norms, loop.norms(singles), rtol=1e-5)


def test_weights_of_groups_and_with_clipping():
    loss, params = CASES["mlp"]
    groups = loop.grouped(loop.single_gradients(loss, params, BATCH), 2)
    losses = np.array([loss(params, loop.row(BATCH, i)) for i in range(4)])
    limit = float(np.min(loop.norms(groups)))
    compute = per_example.grad_statistics(loss, loop.SOME, group_size=2, clip_norm=limit)
    stats, _ = compute(params, BATCH, weights=lambda loss, norm: loss + norm)
    expected = losses.reshape(2, 2).mean(axis=1) + loop.norms(groups)
    loop.assert_matches(stats, loop.clipped(groups, limit), weights=expected)
    assert int(stats.num_groups) == 2 and int(stats.count) == 4
    # Within groups examples count alike: Var(h_j) = σ² / b.
    np.testing.assert_allclose(stats.group_noise / stats.weight_sum, 0.5, rtol=1e-5)


def test_a_weight_of_zero_leaves_out():
    def loss(w, b):
        return jnp.sum(jnp.sqrt(b["x"]) @ w)

    batch = {"x": jnp.array([[1.0, 4.0], [-1.0, 2.0], [4.0, 9.0]])}
    compute = per_example.grad_statistics(loss, non_finite="skip")
    stats, _ = compute(jnp.ones(2), batch, weights=lambda loss, norm: loss)
    np.testing.assert_allclose(stats.mean, (3 * np.array([1.0, 2.0]) + 5 * np.array([2.0, 3.0])) / 8, rtol=1e-6)
    assert int(stats.count) == 2


@pytest.mark.parametrize("explicit", [True, False])
def test_on_devices(explicit):
    singles = loop.single_gradients(mlp, MLP, BATCH)
    limits = limits_for(singles)
    losses = np.array([mlp(MLP, loop.row(BATCH, i)) for i in range(4)])
    expected = losses / (1.0 + np.array(loop.norms(singles)))
    by = lambda loss, norm: loss / (1.0 + norm)  # noqa: E731
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    if explicit:
        batch = {k: jax.device_put(x, NamedSharding(mesh, P("data"))) for k, x in BATCH.items()}

        @jax.jit
        def run(params, batch, limits):  # the limits are traced
            return per_example.grad_statistics(mlp, loop.SOME, clip_norm=limits)(params, batch, weights=by)[0]

        stats = run(MLP, batch, limits)
    else:

        def on_device(params, batch, limits):
            compute = per_example.grad_statistics(mlp, loop.SOME, clip_norm=limits, data_axes="data")
            return compute(params, batch, weights=by)[0]

        run = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
        stats = jax.jit(run)(MLP, BATCH, limits)
    factors = [jax.tree.map(lambda n, c: min(1.0, c / n), norms_of(g), limits) for g in singles]
    loop.assert_matches(stats, scaled(singles, factors), weights=expected)


@pytest.mark.parametrize("clip_strategy", ["gradients", "factors", "two passes"])
def test_parameters_that_are_gathered_over_the_batch_s_axis(clip_strategy):
    """FSDP: each device clips its own examples' whole gradients, and gets its part of the sums."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"w": MLP["w"], "v": MLP["v"]}
    loss = lambda p, b: jnp.mean((jnp.tanh(b["x"] @ p["w"]) @ p["v"] - b["y"]) ** 2)  # noqa: E731

    def gathered(p, b):
        return loss({**p, "w": jax.lax.all_gather(p["w"], "data", axis=0, tiled=True)}, b)

    singles = loop.single_gradients(loss, params, BATCH)
    limits = limits_for(singles)

    def on_device(params, batch):
        compute = per_example.grad_statistics(
            gathered, loop.SOME, clip_norm=limits, data_axes="data", clip_strategy=clip_strategy
        )
        return compute(params, batch)[0].averages

    specs = {"w": P("data"), "v": P()}
    out_specs = {s.name: specs for s in loop.SOME}
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(specs, P("data")), out_specs=out_specs)
    factors = [jax.tree.map(lambda n, c: min(1.0, c / n), norms_of(g), limits) for g in singles]
    loop.assert_matches(jax.jit(run)(params, BATCH), scaled(singles, factors))


def test_regions_of_a_mesh_in_the_loss():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    product = jax.shard_map(
        lambda x, w: jnp.tanh(x @ w), mesh=mesh, in_specs=(P(), P(None, "model")), out_specs=P(None, None, "model")
    )
    params = {"w": MLP["w"][:, :4], "v": MLP["v"][:4]}
    sharded = lambda p, b: jnp.mean((product(b["x"], p["w"]) @ p["v"]) ** 2)  # noqa: E731
    plain = lambda p, b: jnp.mean((jnp.tanh(b["x"] @ p["w"]) @ p["v"]) ** 2)  # noqa: E731
    singles = loop.single_gradients(plain, params, BATCH)
    limits = limits_for(singles)
    stats, _ = jax.jit(per_example.grad_statistics(sharded, loop.SOME, clip_norm=limits))(params, BATCH)
    factors = [jax.tree.map(lambda n, c: min(1.0, c / n), norms_of(g), limits) for g in singles]
    loop.assert_matches(stats, scaled(singles, factors))


def test_one_branch_of_a_cond_leaves_a_parameter_out():
    params = {"w": MLP["w"], "v": MLP["v"]}
    singles = loop.single_gradients(branches, params, BATCH)
    limits = {"w": float(np.min(norms_of(singles[0])["w"])), "v": 0.1}
    stats, _ = per_example.grad_statistics(branches, loop.SOME, clip_norm=limits)(params, BATCH)
    factors = [jax.tree.map(lambda n, c: min(1.0, c / n), norms_of(g), limits) for g in singles]
    loop.assert_matches(stats, scaled(singles, factors))


@pytest.mark.parametrize(
    ("clip_norm", "message"),
    [
        (0.0, "clip_norm = 0.0: must be positive"),
        (jnp.float32(-1), "must be positive"),
        ({"w": 1.0, "v": 1.0}, "clip_norm does not have the parameters' structure"),
        ({"w": 1.0, "v": 0.0, "b": 1.0}, "clip_norm of v = 0.0: must be positive"),
        ({"w": 1.0, "v": np.ones(2), "b": 1.0}, "clip_norm of v = .*must be a positive number"),
        (lambda norms: {"w": 1.0}, "what it returns does not have the parameters' structure"),
        (lambda norms: {k: jnp.ones(3) for k in norms}, r"of b it returns shape \(3,\)"),
    ],
)
def test_limits_that_cannot_be(clip_norm, message):
    with pytest.raises(ValueError, match=message):
        per_example.grad_statistics(mlp, clip_norm=clip_norm)(MLP, BATCH)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (lambda loss, norm: loss / jnp.sum(loss), "it must see one example's loss and norm alone"),
        (lambda loss, norm: jnp.stack([loss, norm]), r"but it returns \(2,\)"),
    ],
)
def test_weights_that_cannot_be(weights, message):
    with pytest.raises(ValueError, match=message):
        per_example.grad_statistics(mlp)(MLP, BATCH, weights=weights)
