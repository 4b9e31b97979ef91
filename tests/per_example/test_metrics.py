"""Metrics, numbers of each example's whole gradient: against a loop, wherever the gradient comes from."""

import re
from pathlib import Path

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
        jax.tree_util.keystr(p, simple=True, separator="/")
        for p, _ in jax.tree_util.tree_leaves_with_path(gradients[0])
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


def assert_same(found, expected, wanted=ALL, atol=3e-5):
    for m in metrics.canonical(wanted):

        def close(a, b, name=m.name):
            scale = max(float(np.max(np.abs(b))), 1e-12)
            np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=atol, rtol=0, err_msg=name)

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


def quick_if(quick, *values):
    """The others are slow: each compiles a program."""
    return pytest.param(*values, marks=() if quick else pytest.mark.slow, id="-".join(map(str, values)))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        quick_if(method == "surgery" or name == "mlp", name, method)
        for name in CASES
        for method in ("surgery", "vmap", "map", "loop")
    ],
)
def test_every_reduction_against_a_loop(name, method, expected):
    loss, params = CASES[name]
    wanted = METRICS if method == "map" else ALL
    compute = per_example.grad_statistics(loss, ("mean",), method=method, metrics=wanted)
    run = compute if method == "loop" else jax.jit(compute)
    assert_same(run(params, BATCH, operands={"v": direction(params)})[1].metrics, expected(name), wanted)


def recurrent(p, b):
    def step(h, x):
        return jnp.tanh(x @ p["w"] + h @ p["u"]), None

    h = jax.lax.scan(step, jnp.zeros((1, 5)), jnp.moveaxis(b["x"], 1, 0))[0]
    return jnp.sum(h**2)


def convolution(p, b):
    y = jax.lax.conv_general_dilated(b["x"], p["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.sum(jnp.tanh(y) ** 2) + 0.0 * jnp.sum(p["unused"]) + 0.1 * jnp.sum(p["shared"] ** 3)


def used_twice(p, b):
    """One matrix in two products, and stacked layers of which one half is used elsewhere."""
    h = jnp.tanh(b["x"] @ p["w"]) @ p["w"].T

    def layer(x, w):
        return jnp.tanh(x @ w), None

    h = jax.lax.scan(layer, h, p["l"][:2])[0]
    return jnp.mean((h @ p["l"][2] - b["y"]) ** 2)


def half_precision(p, b):
    h = jnp.tanh(b["x"].astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16))
    return jnp.mean(h.astype(jnp.float32) ** 2)


MORE = {
    "recurrent": (recurrent, {"w": normal(8, 5), "u": 0.3 * normal(5, 5)}, 3e-5),
    "convolution": (convolution, {"k": normal(3, 8, 4), "unused": normal(4), "shared": normal(3, 2)}, 3e-5),
    "used twice": (used_twice, {"w": 0.3 * normal(8, 5), "l": 0.3 * normal(3, 8, 8)}, 3e-5),
    "half precision": (half_precision, {"w": normal(8, 5)}, 1e-2),
}


@pytest.mark.parametrize("name", MORE)
def test_other_losses_against_a_loop(name):
    loss, params, tolerance = MORE[name]
    v = direction(params)
    found = jax.jit(per_example.grad_statistics(loss, metrics=ALL))(params, BATCH, operands={"v": v})[1].metrics
    assert_same(found, by_hand(loop.single_gradients(loss, params, BATCH), v), atol=tolerance)


@pytest.mark.parametrize(
    "name", ["mlp", "without a sequence", "embedding", "tied", "scanned", "slices", "materialised"]
)
def test_gram_matrices_of_gradients_that_do_not_fit(name, expected, monkeypatch):
    """Tiles of products, rows of embeddings, blocks of examples."""
    monkeypatch.setattr(measures, "GRAM_BYTES", 300)
    loss, params = CASES[name]
    found = jax.jit(per_example.grad_statistics(loss, (), metrics="gram"))(params, BATCH)[1].metrics
    assert_same(found, expected(name), ("gram",))


OPTIONS = (
    {"microbatch_size": 2},
    {"microbatch_size": 1, "norms": True},
    {"microbatch_size": "auto"},
    {"clip_norm": 0.05, "clip_strategy": "gradients"},
    {"clip_norm": 0.05, "clip_strategy": "factors", "microbatch_size": 2},
    {"clip_norm": 0.05, "clip_strategy": "two passes", "microbatch_size": 2},
    {"non_finite": "skip"},
    {"non_finite": "raise"},
    {"unit": "token", "token_fallback": True},
)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        quick_if(name == "scanned" or options in (OPTIONS[0], OPTIONS[4]), name, options)
        for name in ("mlp", "tied", "scanned")
        for options in OPTIONS
    ],
)
def test_options_change_no_number(name, options, expected):
    loss, params = CASES[name]
    wanted = METRICS if "microbatch_size" in options else ALL
    if "clip_norm" in options:  # the mean is then that of clipped gradients
        wanted = tuple(m for m in wanted if m != "cosine_to_mean")
    compute = per_example.grad_statistics(loss, metrics=wanted, **options)
    stats, aux = jax.jit(compute)(params, BATCH, operands={"v": direction(params)})
    assert_same(aux.metrics, expected(name), wanted)
    plain = per_example.grad_statistics(loss, **options)(params, BATCH)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), stats.averages, plain.averages)


def test_groups():
    loss, params = CASES["scanned"]
    groups = loop.grouped(loop.single_gradients(loss, params, BATCH), 2)
    compute = per_example.grad_statistics(loss, metrics=ALL, group_size=2)
    _, aux = jax.jit(compute)(params, BATCH, operands={"v": direction(params)})
    assert_same(aux.metrics, by_hand(groups, direction(params)))


def test_cosine_to_the_mean_that_is_reported():
    """Weighted, and clipped."""
    loss, params = CASES["mlp"]
    singles = loop.single_gradients(loss, params, BATCH)
    weights = np.array([1.0, 0.0, 2.0, 1.0])
    limit = np.median(loop.norms(singles))
    compute = per_example.grad_statistics(loss, metrics=("cosine_to_mean",), clip_norm=limit)
    stats, aux = compute(params, BATCH, weights=weights)
    clipped = loop.clipped(singles, limit)
    mean = jax.tree.map(lambda *g: sum(w * x for w, x in zip(weights, g, strict=True)) / weights.sum(), *clipped)
    assert_same(aux.metrics, by_hand(singles, params, mean), ("cosine_to_mean",))
    loop.assert_matches(stats, clipped, weights=weights, statistics=loop.SOME[:2])


@pytest.mark.parametrize("method", ["surgery", "map"])
def test_norms_by_layer(method):
    """Of stacked parameters, whether a scan makes their gradient or slices do; others belong to no layer."""
    loss, _ = CASES["scanned"]
    params = {"layers": CASES["scanned"][1], "out": normal(8, 8)}

    def whole(p, b):
        return loss(p["layers"], {**b, "x": b["x"] @ p["out"]}) + jnp.sum(jnp.tanh(b["x"] @ p["layers"]["a"][1].T))

    wanted = (metrics.layer_norms(3), metrics.layer_norms(3, "each", per_parameter=True))
    run = jax.jit(per_example.grad_statistics(whole, (), metrics=wanted, method=method, microbatch_size=2))
    found = run(params, BATCH, operands={"layer": metrics.layer_of(params, "^layers/")})[1].metrics
    for i, g in enumerate(loop.single_gradients(whole, params, BATCH)):
        a, c = (np.sqrt(np.sum(g["layers"][k] ** 2, axis=(1, 2))) for k in ("a", "c"))
        np.testing.assert_allclose(found["each"]["layers"]["a"][i], a, rtol=1e-4)
        np.testing.assert_allclose(found["layer_norms"][i], np.sqrt(a**2 + c**2), rtol=1e-4)
        np.testing.assert_array_equal(found["each"]["out"][i], np.zeros(3))


def test_selected_parameters_only():
    loss, params = CASES["mlp"]
    singles = loop.single_gradients(loss, params, BATCH)
    some = ("parameter_norms", metrics.inner_product("v"), metrics.sketch(16, seed=3))
    compute = per_example.grad_statistics(loss, (), metrics=some, parameters="w|v")
    v = direction(params)
    found = compute(params, BATCH, operands={"v": v})[1].metrics
    assert found["parameter_norms"]["b"] is None
    without = lambda tree: {k: x for k, x in tree.items() if k != "b"}  # noqa: E731
    found["parameter_norms"] = without(found["parameter_norms"])
    # An element's place in a sketch does not depend on the other parameters.
    assert_same(found, by_hand([without(g) for g in singles], without(v)), some)


def test_sketches_keep_inner_products_on_average():
    """Mean over seeds against ⟨g_i, g_j⟩, within four standard errors of the variance that the docstring states."""
    loss, params = CASES["mlp"]
    gradients = loop.single_gradients(loss, params, BATCH)
    exact = by_hand(gradients, params)["gram"]
    dim, seeds = 32, 200

    @jax.jit
    @jax.vmap
    def inner_products(seed):
        sketch = metrics.CountSketch(dim, seed)  # of each parameter as `sketch` has it, compared with it above

        def one(gradient):
            named = jax.tree_util.tree_leaves_with_path(gradient)
            keys = [jax.tree_util.keystr(path, simple=True) for path, _ in named]
            codes = [sketch.codes(k, metrics.positions_of(g.shape)) for k, (_, g) in zip(keys, named, strict=True)]
            return sum(sketch(jnp.float32(g), c) for (_, g), c in zip(named, codes, strict=True))

        s = jnp.stack([one(g) for g in gradients])
        return s @ s.T

    products = np.asarray(inner_products(jnp.arange(seeds)))
    squares = np.diag(exact)
    bound = (squares[:, None] * squares[None] + exact**2) / dim
    assert np.all(np.abs(products.mean(axis=0) - exact) < 4 * np.sqrt(bound / seeds))
    assert np.all(products.var(axis=0) < 2 * bound)
    assert np.min(products.var(axis=0)) > 0  # other seeds, other projections


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["mlp", "tied", "scanned"])
def test_devices_that_share_the_batch(name, check_vma):
    loss, params = CASES[name]
    v = direction(params)
    batch = jax.tree.map(lambda x: np.concatenate([x, x[::-1] if x.dtype == np.int32 else 2 * x]), BATCH)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_device(p, b, v):
        compute = per_example.grad_statistics(loss, metrics=METRICS, data_axes="data", microbatch_size=1)
        return compute(p, b, operands={"v": v})[1].metrics

    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P("data"), check_vma=check_vma)
    expected = by_hand(loop.single_gradients(loss, params, batch), v)
    assert_same(jax.jit(run)(params, batch, v), expected, METRICS)


def test_parameters_that_are_gathered_over_the_batch_s_axis():
    """FSDP: each device has a part of the parameter and of the operand, and whole gradients of its own examples."""
    params, mesh = {"w": normal(8, 4)}, jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    v, batch = direction(params), {"x": normal(8, 6, 8)}
    wanted = tuple(m for m in METRICS if getattr(m, "name", m) != "sketch")

    def loss(p, b):
        return jnp.mean((b["x"] @ p["w"]) ** 2)

    def gathered(p, b):
        return loss({"w": jax.lax.all_gather(p["w"], "data", axis=0, tiled=True)}, b)

    def on_device(p, b, v):
        compute = per_example.grad_statistics(gathered, metrics=(*wanted, metrics.sketch(512)), data_axes="data")
        return compute(p, b, operands={"v": v})[1].metrics

    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P("data"), P("data"), P("data")), out_specs=P("data"))
    found = jax.jit(run)(params, batch, v)
    expected = by_hand(loop.single_gradients(loss, params, batch), v)
    assert_same(found, expected, wanted)
    # The sketch has other places for the elements than on one device, but each its own: with many buckets for 32 elements
    # most inner products are nearly kept, which they would not be if four parts shared their signs.
    s = np.asarray(found["sketch"])
    near = np.abs(s @ s.T - expected["gram"]) / np.sqrt(np.outer(expected["squared_norm"], expected["squared_norm"]))
    assert np.max(near) < 0.2


@pytest.mark.parametrize("held", [2**20, 300])
def test_the_gram_matrix_of_all_devices_examples(held, monkeypatch):
    """Each device has its own examples' rows: of products, with and without a sequence, rows of a table, a sum, and what no
    example moves. FSDP: `u` is gathered."""
    monkeypatch.setattr(measures, "GRAM_BYTES", held)
    mesh = jax.make_mesh((2, 2), ("data", "replica"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = {"e": normal(12, 8), "w": normal(8, 8), "u": normal(8, 5), "b": normal(8), "d": normal(3, 8)}
    batch = jax.tree.map(lambda x: np.concatenate([x, x[::-1] if x.dtype == np.int32 else 2 * x]), BATCH)

    def loss(p, b):
        h = jnp.tanh(p["e"][b["ids"]] @ p["w"] + p["b"][None, None])
        return jnp.mean((h @ p["w"] - b["y"]) ** 2) + jnp.sum(jnp.tanh(b["x"][:, 0] @ p["u"])) + jnp.sum(p["d"] ** 2)

    def on_device(p, b):
        gathered = lambda p, b: loss({**p, "u": jax.lax.all_gather(p["u"], "data", axis=0, tiled=True)}, b)  # noqa: E731
        compute = per_example.grad_statistics(gathered, metrics=("gram", "norm"), data_axes=("replica", "data"))
        return compute(p, b)[1].metrics

    places = {**dict.fromkeys(params, P()), "u": P("data")}
    rows = P(("replica", "data"))
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(places, rows), out_specs=rows)
    expected = by_hand(loop.single_gradients(loss, params, batch), params)
    assert_same(jax.jit(run)(params, batch), expected, ("gram", "norm"))


def test_tensor_parallel_regions_in_the_loss():
    params = {"w": normal(8, 4)}
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    product = jax.shard_map(
        lambda x, w: jnp.tanh(x @ w), mesh=mesh, in_specs=(P(), P(None, "model")), out_specs=P(None, None, "model")
    )

    def loss(p, b):
        return jnp.mean(product(b["x"], p["w"]) ** 2)

    found = jax.jit(per_example.grad_statistics(loss, metrics=ALL))(
        params, {"x": BATCH["x"]}, operands={"v": direction(params)}
    )[1].metrics
    plain = lambda p, b: jnp.mean(jnp.tanh(b["x"] @ p["w"]) ** 2)  # noqa: E731
    assert_same(found, by_hand(loop.single_gradients(plain, params, {"x": BATCH["x"]}), direction(params)))


def test_on_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    specs = {"w": (None, None), "b": (None,), "v": (None, "model")}
    place = lambda tree: {k: put(x, *specs[k]) for k, x in tree.items()}  # noqa: E731
    batch, v = {k: put(x, "data") for k, x in BATCH.items()}, direction(MLP)
    run = jax.jit(per_example.grad_statistics(mlp, metrics=ALL))
    found = run(place(MLP), batch, operands={"v": place(v)})[1].metrics
    assert_same(found, by_hand(loop.single_gradients(mlp, MLP, BATCH), v))


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metric",
    ["norm", metrics.cosine("v"), metrics.sketch(64), Metric("x", lambda g, v: jnp.sum(g**3 * v), operands=("v",))],
    ids=lambda m: getattr(m, "name", m),
)
def test_memory_does_not_grow_as_examples_times_parameter(metric):
    """Compiled, of a product of 256 kB: 24 examples more take less than one gradient more, and 24 with vmap."""
    width = 256
    params, size = {"w": jax.ShapeDtypeStruct((width, width), jnp.float32)}, 4 * width**2

    def temporary(method, n):
        compute = per_example.grad_statistics(
            lambda p, b: jnp.sum(jnp.tanh(b["x"] @ p["w"])), (), method=method, metrics=metric
        )
        needs = "v" in getattr(metric, "operands", ())
        run = jax.jit(lambda p, b: compute(p, b, operands={"v": p} if needs else {})[1].metrics)
        batch = {"x": jax.ShapeDtypeStruct((n, 4, width), jnp.float32)}
        return run.lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    assert temporary("surgery", 32) < 6 * size
    assert temporary("surgery", 32) - temporary("surgery", 8) < size
    assert temporary("vmap", 32) > 32 * size  # the test can fail


def test_memory_of_a_gram_matrix(monkeypatch):
    monkeypatch.setattr(measures, "GRAM_BYTES", 2**20)
    params, batch = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((16, 4, 512), jnp.float32)
    run = jax.jit(per_example.grad_statistics(lambda w, x: jnp.sum(jnp.tanh(x @ w)), (), metrics="gram"))
    assert run.lower(params, batch).compile().memory_analysis().temp_size_in_bytes < 5 * 2**20


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": "nrom"}, "unknown metric 'nrom'. Did you mean 'norm'"),
        ({"metrics": ("norm", "norm")}, "metric 'norm' is given twice"),
        ({"metrics": metrics.inner_product("v")}, r"metric 'inner_product\(v\)' needs the operand 'v': give operands="),
        ({"metrics": "gram", "microbatch_size": 2}, "'gram' needs all examples at a time.*sketch"),
        ({"metrics": "gram", "microbatch_size": "auto"}, "'gram' needs all examples at a time"),
        ({"metrics": "gram", "method": "map"}, "method='map' has one gradient at a time"),
        ({"statistics": ()}, "statistics is empty: give at least one"),
    ],
)
def test_requests_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        per_example.grad_statistics(mlp, **options)(MLP, BATCH)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", lambda g: jnp.sqrt(jnp.sum(g**2))), "must be the sum of reduce of its parts.*combine"),
        (("x", lambda g: jnp.sum(g, axis=0)), "must be the sum of reduce of its parts"),
        (("x", lambda g: jnp.sum(g > 0)), "floating dtype, not int32"),
        (("x", jnp.sum, None, "v"), r"give a tuple, \('v',\)"),
        (("", jnp.sum), "give a non-empty string"),
        (("x", jnp.sum, None, (), "mean"), "over = 'mean': must be one of sum, max"),
    ],
)
def test_metrics_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        Metric(*arguments)
    with pytest.raises(ValueError, match="dim = 0"):
        metrics.sketch(0)


def test_coverage_is_that_of_the_statistics():
    rows = per_example.coverage(mlp, MLP, BATCH, metrics=ALL)
    assert [r.reduction for r in rows] == [r.reduction for r in per_example.coverage(mlp, MLP, BATCH)]


def test_the_examples_of_the_docs_run():
    page = (Path(__file__).resolve().parents[2] / "docs" / "gradient_metrics.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    known: dict = {}
    for block in blocks:
        exec(block, known)
    assert len(blocks) == 3
    assert known["aux"].metrics["sketch"].shape == (16, 256)
    own = (known["cubed"], known["largest"], known["distance"])
    run = per_example.grad_statistics(known["loss_fn"], (), metrics=own)
    assert run(known["params"], known["batch"], operands={"momentum": known["params"]})[1].metrics["largest"].shape == (
        16,
    )
