"""Statistics that see trees like the parameters: exact against a loop, wherever the gradient comes from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from perex_t5x import per_example
from perex_t5x.per_example import Statistic
from perex_t5x.per_example.reductions import dense

RNG = np.random.default_rng(0)
STATISTICS = (
    "mean",
    "mean_square",
    Statistic("step_sign", lambda g, m: jnp.sign(0.9 * m + 0.1 * g), operands=("momentum",)),
    Statistic("distance", lambda g, m: (g - m) ** 2, operands=("momentum",)),
    Statistic("inner", lambda g, m: g * m, operands=("momentum",)),
    Statistic(
        "clipped", lambda g, v, m: jnp.clip(g, -jnp.sqrt(v), jnp.sqrt(v)) + 0.0 * m, operands=("second", "momentum")
    ),
)


PLAIN = {"mean": lambda g: g, "mean_square": lambda g: g**2}


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def operands_for(params):
    leaves = jax.tree.leaves(params)
    tree = jax.tree.structure(params)
    momentum = tree.unflatten([0.1 * normal(*x.shape) for x in leaves])
    return {"momentum": momentum, "second": tree.unflatten([normal(*x.shape) ** 2 for x in leaves])}


def by_hand(loss, params, batch, operands):
    """A Python loop over single examples and `jax.grad`."""
    count = len(jax.tree.leaves(batch)[0])
    grads = [jax.grad(loss)(params, jax.tree.map(lambda x, i=i: x[i : i + 1], batch)) for i in range(count)]
    sums = {}
    for s in STATISTICS:
        fn, names = (PLAIN[s], ()) if isinstance(s, str) else (s.fn, s.operands)
        trees = [operands[name] for name in names]
        values = [jax.tree.map(lambda g, *o, fn=fn: np.float64(fn(g, *o)), g, *trees) for g in grads]
        sums[s if isinstance(s, str) else s.name] = jax.tree.map(lambda *x: np.mean(x, axis=0), *values)
    return sums


def assert_same(stats, expected):
    for name, tree in expected.items():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), stats[name], tree)


X, Y = normal(4, 6, 8), normal(4, 6, 8)
IDS = RNG.integers(0, 12, (4, 6)).astype(np.int32)
ROW = (None, None)


def mlp(p, b):
    return jnp.mean((jnp.tanh(b["x"] @ p["w"] + p["b"][ROW]) @ p["v"] - b["y"]) ** 2)


def without_sequence(p, b):
    return jnp.sum((jnp.tanh(b["x"][:, 0] @ p["w"]) @ p["v"] - b["y"][:, 0]) ** 2)


def embedding(p, b):
    return jnp.mean((jnp.tanh(p["e"][b["ids"]] @ p["w"]) - b["y"]) ** 2)


def tied(p, b):
    return -jnp.mean(jax.nn.log_softmax(jnp.tanh(p["e"][b["ids"]]) @ p["e"].T))


def scanned(p, b, wrap=lambda f: f):
    def layer(x, w):
        return x + jnp.tanh(x @ w["a"].T) @ w["c"], None

    return jnp.mean((jax.lax.scan(wrap(layer), b["x"], p)[0] - b["y"]) ** 2)


def slices(p, b):
    return jnp.mean((jnp.tanh(b["x"] @ p["w"][:, :3]) @ p["v"][:3] + b["x"] @ p["w"][:, 3:] @ p["v"][3:]) ** 2)


def branches(p, b):
    square, cosine = (lambda: jnp.mean((b["x"] @ p["w"]) ** 2)), (lambda: jnp.mean(jnp.cos(b["x"] @ p["w"])))
    return jax.lax.cond(jnp.sum(p["v"]) > 0, square, cosine) + jnp.sum(p["v"] ** 2)


def odd(p, b):
    """What the engine cannot follow: materialised."""
    return jnp.mean((b["x"] @ jnp.linalg.inv(p["w"] + 4 * jnp.eye(8))) ** 2)


MLP = {"w": normal(8, 5), "b": normal(5), "v": normal(5, 8)}
LAYERS = {"a": 0.3 * normal(3, 5, 8), "c": 0.3 * normal(3, 5, 8)}
EMBEDDING = {"e": normal(12, 8), "w": normal(8, 8)}
CASES = {
    "mlp": (mlp, MLP),
    "without a sequence": (without_sequence, {"w": MLP["w"], "v": MLP["v"]}),
    "embedding": (embedding, EMBEDDING),
    "tied": (tied, {"e": EMBEDDING["e"]}),
    "scanned": (scanned, LAYERS),
    "scanned, remat": (lambda p, b: scanned(p, b, jax.checkpoint), LAYERS),
    "slices": (slices, {"w": MLP["w"], "v": MLP["v"]}),
    "branches": (branches, {"w": MLP["w"], "v": MLP["v"]}),
    "materialised": (odd, {"w": normal(8, 8)}),
}
BATCH = {"x": X, "y": Y, "ids": IDS}


def with_methods():
    """The other methods reduce whole gradients, wherever these come from: those of most cases are slow."""
    for name in CASES:
        for method in ("surgery", "vmap", "map", "loop"):
            is_slow = method != "surgery" and name != "slices"
            yield pytest.param(name, method, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(("name", "method"), with_methods())
def test_every_reduction_against_a_loop(name, method):
    loss, params = CASES[name]
    operands = operands_for(params)
    compute = per_example.grad_statistics(loss, STATISTICS, method=method)
    run = compute if method == "loop" else jax.jit(compute)
    assert_same(run(params, BATCH, operands=operands)[0], by_hand(loss, params, BATCH, operands))


RATIO = Statistic("ratio", lambda g, v: g / jnp.sqrt(v), operands=("second",))


def test_an_embedding_has_each_row_s_own_value_at_zero():
    """φ(0; v) is NaN where v is 0: in the sum of a row that some example does not use, and in no other."""
    params = {"e": normal(12, 3, 4), "w": normal(12, 8)}
    batch = {"ids": np.concatenate([np.full((4, 1), 5), IDS % 4], axis=1).astype(np.int32)}  # 5 in all, 4 in none
    second = {"e": normal(12, 3, 4) ** 2, "w": normal(12, 8) ** 2}
    second["e"][4:6, 1] = 0.0
    weights = np.array([1.0, 0.0, 2.0, 0.3], np.float32)

    def loss(p, b):
        return jnp.mean(jnp.tanh(p["e"][b["ids"]].reshape(1, 7, 12) @ p["w"]) ** 2)

    compute = per_example.grad_statistics(loss, ("mean", RATIO), microbatch_size=2)
    found = jax.jit(compute)(params, batch, operands={"second": second}, weights=weights)[0][RATIO]
    grads = [jax.grad(loss)(params, {"ids": batch["ids"][i : i + 1]}) for i in range(4)]
    for name, x in found.items():
        with np.errstate(all="ignore"):
            values = [np.asarray(g[name], np.float64) / np.sqrt(second[name]) for g in grads]
        expected = sum(w * x for w, x in zip(weights, values, strict=True) if w) / weights.sum()
        np.testing.assert_allclose(x, expected, rtol=2e-4, atol=2e-6)
    assert np.all(np.isnan(found["e"][4, 1])) and np.all(np.isinf(found["e"][5, 1]))
    rows = per_example.coverage(loss, params, batch, statistics=("mean", RATIO))
    assert [r.reduction for r in rows] == ["sparse", "one at a time"]


def test_a_tile_of_a_product_has_its_tile_of_the_operands(monkeypatch):
    monkeypatch.setattr(dense, "TILE_BYTES", {"cpu": 64})
    operands = operands_for(MLP)
    found, _ = jax.jit(per_example.grad_statistics(mlp, STATISTICS, norms=True))(MLP, BATCH, operands=operands)
    assert_same(found, by_hand(mlp, MLP, BATCH, operands))


@pytest.mark.parametrize(
    "options", [{"microbatch_size": 2}, {"microbatch_size": "auto"}, {"parameters": "w|v"}], ids=str
)
@pytest.mark.parametrize("name", ["mlp", "scanned"])
def test_splitting_changes_no_number(name, options):
    if name == "scanned" and "parameters" in options:
        options = {"parameters": "a"}
    loss, params = CASES[name]
    operands = operands_for(params)
    found, _ = per_example.grad_statistics(loss, STATISTICS, **options)(params, BATCH, operands=operands)
    expected = by_hand(loss, params, BATCH, operands)
    for statistic, tree in expected.items():
        for key, value in tree.items():
            if found[statistic][key] is not None:
                np.testing.assert_allclose(found[statistic][key], value, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0.05}, {"norms": True}, {"group_size": 2}, {"non_finite": "skip"}], ids=str
)
def test_options_against_the_loop(options):
    loss, params = CASES["scanned"]
    operands, weights = operands_for(params), np.array([1.0, 0.0, 2.0, 1.0])
    found, expected = (
        per_example.grad_statistics(loss, STATISTICS, method=m, **options)(
            params, BATCH, operands=operands, weights=weights
        )[0]
        for m in ("surgery", "loop")
    )
    assert_same(found, expected.averages)


def test_on_devices_that_share_the_batch_and_the_parameters():
    """FSDP inside `shard_map`: each device has a part of the parameter, and of its operands."""
    params, operands = {"w": normal(8, 4)}, operands_for({"w": normal(8, 4)})
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(p, b):
        return jnp.mean((b["x"] @ p["w"]) ** 2)

    def gathered(p, b):
        return loss({"w": jax.lax.all_gather(p["w"], "data", axis=0, tiled=True)}, b)

    def on_device(p, b, operands):
        return per_example.grad_statistics(gathered, STATISTICS, data_axes="data")(p, b, operands=operands)[0].averages

    batch = {"x": normal(8, 6, 8)}
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P("data"), P("data"), P("data")), out_specs=P("data"))
    assert_same(jax.jit(run)(params, batch, operands), by_hand(loss, params, batch, operands))


def test_on_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    operands = operands_for(MLP)
    specs = {"w": (None, None), "b": (None,), "v": (None, "model")}
    place = lambda tree: {k: put(x, *specs[k]) for k, x in tree.items()}  # noqa: E731
    batch = {k: put(x, "data") for k, x in BATCH.items()}
    placed = {name: place(tree) for name, tree in operands.items()}
    found, _ = jax.jit(per_example.grad_statistics(mlp, STATISTICS))(place(MLP), batch, operands=placed)
    assert_same(found, by_hand(mlp, MLP, BATCH, operands))


def test_the_sign_of_lion_of_each_example_is_not_that_of_the_mean():
    loss, params = CASES["mlp"]
    operands = operands_for(params)
    found, _ = per_example.grad_statistics(loss, STATISTICS)(params, BATCH, operands=operands)
    of_mean = jax.tree.map(lambda g, m: jnp.sign(0.9 * m + 0.1 * g), found.mean, operands["momentum"])
    assert not np.allclose(found["step_sign"]["w"], of_mean["w"])


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (None, "statistic 'step_sign' needs the operand 'momentum': give operands="),
        ({"momentum": MLP}, "needs the operand 'second'"),
        ({"momentum": MLP, "second": MLP, "third": MLP}, "operands has 'third', which no statistic sees"),
        ({"momentum": MLP, "second": {"w": MLP["w"]}}, "operand 'second' does not have the parameters' structure"),
        ({"momentum": MLP, "second": {**MLP, "b": normal(4)}}, r"operand 'second' of b has shape \(4,\).*\(5,\)"),
    ],
)
def test_operands_that_do_not_fit(operands, message):
    with pytest.raises(ValueError, match=message):
        per_example.grad_statistics(mlp, STATISTICS)(MLP, BATCH, operands=operands)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operands": "momentum"}, r"give a tuple, \('momentum',\)"),
        ({"operands": ("momentum",), "factorable": True}, "neither factorable"),
        ({"operands": ("momentum",), "scaling": jnp.abs}, "neither factorable nor has it a scaling"),
    ],
)
def test_statistics_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        Statistic("x", lambda g, m: g * m, **options)
    with pytest.raises(ValueError, match="not factorable"):
        per_example.grad_statistics(mlp, STATISTICS[2], unit="token")


def test_coverage_says_how():
    rows = per_example.coverage(mlp, MLP, BATCH, statistics=STATISTICS)
    assert {r.reduction for r in rows} <= {"one at a time", "all at once"} and all(r.exact for r in rows)
