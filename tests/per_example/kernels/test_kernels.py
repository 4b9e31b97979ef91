"""The TPU kernels: on a CPU in Pallas' interpreter, against loops and XLA's form; and compiled for TPUs."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from perex_t5x import per_example
from perex_t5x.hardware.devices import has_libtpu, tpu_devices
from perex_t5x.per_example.engine import jaxprs, primitives
from perex_t5x.per_example.kernels import dispatch, matmul, tiles
from perex_t5x.per_example.kernels.matmul import sums_of_products
from perex_t5x.per_example.reductions.reducer import ReductionContext
from perex_t5x.per_example.statistic import canonical

needs_libtpu = pytest.mark.skipif(not has_libtpu(), reason="libtpu is not installed (extra 'tpu')")
SATURATED = per_example.Statistic("mean_saturated", lambda g: jnp.where(jnp.abs(g) > 1, jnp.sign(g), jnp.tanh(g) * g))
STATISTICS = ("mean", "mean_square", "mean_sign", SATURATED)
VMEM = 2**26


@pytest.fixture(autouse=True)
def compiled_for_tpus(monkeypatch):
    monkeypatch.setattr(dispatch, "for_tpu", lambda: True)


# Of the kernel alone: N, T, I, J, and a tile.
SHAPES = {
    "one tile": (2, 32, 128, 256, tiles.Tile(128, 256, 128, 256, 32, VMEM)),
    "parts": (2, 32, 256, 256, tiles.Tile(256, 256, 128, 128, 32, VMEM)),
    "ragged": (3, 37, 200, 300, tiles.Tile(128, 256, 128, 128, 37, VMEM)),
    "chunks": (2, 384, 128, 128, tiles.Tile(128, 128, 128, 128, 128, VMEM)),
    "ragged chunks": (3, 2100, 130, 129, tiles.Tile(128, 128, 128, 128, 128, VMEM)),
    "smaller than a tile": (1, 16, 70, 100, tiles.Tile(128, 128, 128, 128, 16, VMEM)),
}


def reference(statistics, s, r, weights, scales, initial, rounded):
    """A loop in NumPy over examples."""
    sums, squares = [np.array(x, np.float64) for x in initial], []
    for n in range(len(s)):
        g = np.asarray(rounded(jnp.asarray(s[n].astype(np.float64).T @ r[n].astype(np.float64), jnp.float32)))
        squares.append(np.sum(np.square(g, dtype=np.float64)))
        if weights is not None and weights[n] == 0:
            continue
        scaled = jnp.asarray(g if scales is None else g * scales[n])
        for total, statistic in zip(sums, statistics, strict=True):
            total += np.float64(1 if weights is None else weights[n]) * np.asarray(statistic.fn(scaled), np.float64)
    return sums, squares


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_kernel_is_a_loop_over_examples(name, dtype):
    n, length, rows, columns, tile = SHAPES[name]
    rng = np.random.default_rng(0)
    s, r = (np.asarray(jnp.asarray(rng.integers(-8, 8, (n, length, d)) / 8, dtype)) for d in (rows, columns))
    statistics = canonical(STATISTICS)
    initial = [rng.normal(size=(rows, columns)).astype(np.float32) for _ in statistics]
    weights = np.array([0.5, 0.0, 2.0], np.float32)[:n] if n > 1 else None
    scales = np.array([0.25, 1.0, 0.75], np.float32)[:n]
    rounded = lambda g: g.astype(dtype).astype(jnp.float32)  # noqa: E731
    context = ReductionContext(statistics, n, weights, scales, norms=True)
    for w, c, begin in ((weights, scales, initial), (None, None, None)):
        got, squares = sums_of_products(
            jnp.asarray(s),
            jnp.asarray(r),
            None if w is None else jnp.asarray(w),
            None if c is None else jnp.asarray(c),
            None if begin is None else [jnp.asarray(x) for x in begin],
            finish=rounded,
            add=context.added,
            num_sums=len(statistics),
            norms=True,
            tile=tile,
            precision=jax.lax.Precision.HIGHEST,
            interpret=True,
        )
        zeros = [np.zeros((rows, columns))] * len(statistics)
        want, want_squares = reference(statistics, s, r, w, c, zeros if begin is None else begin, rounded)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-5)
        np.testing.assert_allclose(squares, want_squares, rtol=1e-5)


def test_kernel_leaves_out_examples_of_weight_zero():
    s, r = np.ones((2, 16, 128), np.float32), np.ones((2, 16, 128), np.float32)
    s[1] = np.nan
    context = ReductionContext(canonical(("mean", "mean_square")), 2, norms=True)
    (mean, square), squares = sums_of_products(
        jnp.asarray(s),
        jnp.asarray(r),
        jnp.array([1.0, 0.0]),
        None,
        None,
        finish=lambda g: g,
        add=context.added,
        num_sums=2,
        norms=True,
        tile=SHAPES["smaller than a tile"][-1],
        interpret=True,
    )
    assert np.all(np.asarray(mean) == 16) and np.all(np.asarray(square) == 256)
    assert squares[0] == 16**2 * 128**2 and np.isnan(squares[1])


# --- inside the engine ------------------------------------------------------------------------------------------------


def loss(params, x_BxTxD):
    h = jnp.tanh(x_BxTxD.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)).astype(jnp.float32)
    y = jnp.tanh(jnp.einsum("btd,dhk->bthk", h, params["v"]))
    return jnp.sum(y**2) / 100


PARAMS = {
    "w": jax.ShapeDtypeStruct((160, 256), jnp.float32),
    "v": jax.ShapeDtypeStruct((256, 4, 60), jnp.float32),
}
PLACES = {"w": P(None, "model"), "v": P("model", None, None)}


def params_of(dtype):
    draw = np.random.default_rng(1)
    return {name: jnp.asarray(draw.normal(size=p.shape) * 0.1, dtype) for name, p in PARAMS.items()}


def params():
    return params_of(jnp.float32)


def batch(n=8, length=24):
    return jnp.asarray(np.random.default_rng(2).normal(size=(n, length, 160)), jnp.float32)


def mesh_of(devices, shape=(2, 1)):
    count = int(np.prod(shape))
    return Mesh(np.asarray(devices[:count]).reshape(shape), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


STEP = per_example.Statistic("step", lambda g, m: jnp.where(m > 0, g, jnp.tanh(0.9 * m + 0.1 * g)), operands=("m",))


def on_mesh(mesh, *, with_weights=False, with_operands=False, check_vma=False, **options):
    """The statistics of all devices' examples; the model axis is the compiler's."""
    statistics = (*STATISTICS, STEP) if with_operands else STATISTICS
    compute = per_example.grad_statistics(loss, statistics, data_axes=("data",), **options)

    def run(params, x, weights):
        operands = {"m": jax.tree.map(jnp.cos, params)} if with_operands else None
        found, aux = compute(params, x, weights=weights if with_weights else None, operands=operands)
        return found.averages, aux.norms

    out_specs = (P(), P("data") if {"norms", "clip_norm"} & set(options) else None)
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": out_specs}
    return jax.shard_map(run, mesh=mesh, **specs, axis_names={"data"}, check_vma=check_vma)


@pytest.fixture
def interpreted(monkeypatch):
    """The TPU's branch, with the kernel interpreted; yields the shapes of the products that it was given."""
    shapes = []

    def kernel(s, r, *arguments, **options):
        shapes.append((s.shape, r.shape))
        return sums_of_products(s, r, *arguments, **options, interpret=True)

    monkeypatch.setattr(matmul, "sums_of_products", kernel)
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *x, default, **forms: forms.get("tpu", default)(*x), raising=True
    )
    return shapes


WEIGHTS = jnp.array([1.0, 0.0, 2.0, 1.0, 0.5, 1.0, 0.0, 1.0])
OPTIONS = {
    "plain": {},
    "norms": {"norms": True},
    "weights": {"with_weights": True, "norms": True},
    "clipping": {"clip_norm": 0.5},
    "microbatches": {"microbatch_size": 2, "norms": True},
    "groups": {"group_size": 2},
    "operands": {"with_operands": True, "with_weights": True, "microbatch_size": 2, "norms": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_engine_with_kernel_is_engine_without(name, interpreted):
    mesh = mesh_of(jax.devices())
    got, norms = jax.jit(on_mesh(mesh, **OPTIONS[name]))(params(), batch(), WEIGHTS)
    used = len(interpreted)
    want, want_norms = jax.jit(on_mesh(mesh, kernels=False, **OPTIONS[name]))(params(), batch(), WEIGHTS)
    assert used >= 2 and len(interpreted) == used
    assert_close(got, want)
    if want_norms is not None:
        np.testing.assert_allclose(norms, want_norms, rtol=1e-4)


@pytest.mark.parametrize("shape", [(2, 2), (2, 4)])
def test_engine_with_kernel_under_tensor_parallelism(shape, interpreted, monkeypatch):
    mesh = mesh_of(jax.devices(), shape)
    monkeypatch.setattr(dispatch, "_SMALLEST", 0)  # each device has a small part
    options = {"norms": True, "shardings": PLACES, "with_operands": True}
    got, norms = jax.jit(on_mesh(mesh, **options))(params(), batch(), WEIGHTS)
    assert {s[2] for s, _ in interpreted} | {r[2] for _, r in interpreted} == {160, 240, 256 // shape[1]}
    want, want_norms = jax.jit(on_mesh(mesh, kernels=False, **options))(params(), batch(), WEIGHTS)
    assert_close(got, want)
    np.testing.assert_allclose(norms, want_norms, rtol=1e-4)


def assert_close(got, want):
    for name in want:
        for leaf, a, b in ((leaf, got[name][leaf], want[name][leaf]) for leaf in want[name]):
            scale = np.max(np.abs(b))
            # A bfloat16 gradient may round to the neighbouring value, and a sign near zero may change.
            wrong = np.abs(np.asarray(a) - np.asarray(b)) > 1e-4 * scale
            assert np.mean(wrong) < 5e-3, (name, leaf, np.mean(wrong))
            np.testing.assert_allclose(
                a, b, atol=(0.3 if name == "mean_sign" else 1e-2) * scale, err_msg=f"{name} {leaf}"
            )


# --- where it does not apply ------------------------------------------------------------------------------------------


def reasons(monkeypatch, call):
    seen = []
    unsupported_reason = dispatch.unsupported_reason
    monkeypatch.setattr(dispatch, "unsupported_reason", lambda *x: seen.append(unsupported_reason(*x)) or seen[-1])
    jax.eval_shape(call)
    return " / ".join(seen)


OFFSET = np.linspace(0, 1, 256, dtype=np.float32)
CASES = {
    "φ of 'sorted' has a `sort`": {"statistics": per_example.Statistic("sorted", lambda g: jnp.sort(g, axis=0))},
    "φ of 'half' is of bfloat16": {"statistics": per_example.Statistic("half", lambda g: g.astype(jnp.bfloat16))},
    "φ of 'held' holds arrays": {
        "statistics": per_example.Statistic("held", lambda g: g * jnp.sum(jnp.asarray(OFFSET)))
    },
    "operand 'm' of bfloat16": {"statistics": STEP, "operands": {"m": params_of(jnp.bfloat16)}},
    "a sequence of 4": {"x": batch(length=4)},
    "a gradient as small as 160 x 20": {"params": {"w": jnp.ones((160, 20)), "v": jnp.ones((20, 4, 60))}},
    "operands of float16": {
        "x": batch().astype(jnp.float16),
        "loss": lambda p, x: jnp.sum(jnp.tanh(x @ p["w"].astype(x.dtype))),
    },
    "precision": {"loss": lambda p, x: jnp.sum(jnp.dot(x, p["w"], precision="high") ** 2)},
}


@pytest.mark.parametrize("reason", CASES)
def test_says_why_it_does_not_apply(reason, monkeypatch):
    case = dict(CASES[reason])
    p, x, fn = case.get("params", params()), case.get("x", batch()), case.get("loss", loss)
    compute = per_example.grad_statistics(fn, case.get("statistics", ("mean", "mean_square")), data_axes=("data",))
    run = jax.shard_map(
        lambda p, x: compute(p, x, operands=case.get("operands"))[0].averages,
        mesh=mesh_of(jax.devices()),
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    assert reason in reasons(monkeypatch, lambda: run(p, x))


def test_says_that_the_compiler_places_it(monkeypatch):
    run = on_mesh(mesh_of(jax.devices(), (2, 2)))
    assert "mesh axes model" in reasons(monkeypatch, lambda: run(params(), batch(), WEIGHTS))


def test_outside_of_a_mesh_devices_are_not_known(monkeypatch):
    compute = per_example.grad_statistics(loss, STATISTICS)
    assert "not inside a shard_map" in reasons(monkeypatch, lambda: compute(params(), batch())[0].averages)


def test_not_for_cpus(monkeypatch):
    monkeypatch.undo()
    run = on_mesh(mesh_of(jax.devices()))
    assert "pallas_call" not in str(jax.make_jaxpr(run)(params(), batch(), WEIGHTS))
    assert "not compiled for TPUs" in reasons(monkeypatch, lambda: run(params(), batch(), WEIGHTS))


def test_coverage_says_which_parameters_have_a_kernel():
    fn = lambda p, x: jnp.sum(jnp.tanh(jnp.tanh(x @ p["w"]) @ p["narrow"]) + p["bias"][None, None])  # noqa: E731
    shapes = {"w": (160, 256), "narrow": (256, 10), "bias": (10,)}
    rows = {}

    def on_device(p, x):
        found = per_example.coverage(fn, p, x, data_axes=("data",))
        rows.update((row.parameter, row.kernel) for row in found)
        assert "no: a gradient as small as 256 x 10" in str(found)
        return 0.0

    p = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    run = jax.shard_map(
        on_device, mesh=mesh_of(jax.devices()), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    jax.eval_shape(run, p, jax.ShapeDtypeStruct((8, 24, 160), jnp.float32))
    assert rows == {"w": "", "narrow": "a gradient as small as 256 x 10", "bias": None}


def test_turned_off(monkeypatch):
    run = on_mesh(mesh_of(jax.devices()), kernels=False)
    assert "turned off" in reasons(monkeypatch, lambda: run(params(), batch(), WEIGHTS))


def test_statistics_can_be_mapped_and_differentiated():
    run = on_mesh(mesh_of(jax.devices()))
    p, x = params(), batch()
    assert "pallas_call" in str(jax.make_jaxpr(run)(p, x, WEIGHTS))
    total = lambda p: jnp.sum(run(p, x, WEIGHTS)[0]["mean_square"]["w"])  # noqa: E731
    value, slope = jax.jit(lambda p: jax.jvp(total, (p,), (p,)))(p)
    grad = jax.jit(jax.grad(total))(p)
    inner = sum(jnp.vdot(grad[k], p[k]) for k in p)
    assert value > 0 and slope != 0
    np.testing.assert_allclose(inner, slope, rtol=0.05)  # bfloat16
    pair = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), p)
    mapped = jax.jit(jax.vmap(total))(pair)
    np.testing.assert_allclose(mapped[0], value, rtol=0.02)
    assert mapped[1] != mapped[0]


# --- tiles ------------------------------------------------------------------------------------------------------------

SIZES = (1, 100, 128, 600, 768, 1024, 2816, 4096, 5632, 32128)
KINDS = ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "TPU v4")


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_fit_and_cover(kind):
    for rows, columns, length, itemsize in itertools.product(SIZES, SIZES, (16, 114, 1024, 1536, 8192), (2, 4)):
        tile = tiles.choose(rows, columns, length, itemsize, 3, True, kind)
        assert tile.rows % 128 == tile.columns % 128 == 0
        assert tile.rows % tile.part_rows == tile.columns % tile.part_columns == 0
        assert tiles.padded_length(length) % tile.chunk == 0 and (tile.chunk == length or tile.chunk % 128 == 0)
        operands, area = 2 * tile.chunk * (tile.rows + tile.columns) * itemsize, tile.rows * tile.columns * 4
        assert operands + 4 * 3 * area <= tile.vmem
        if min(rows, columns) >= 1024:
            waste = [-(-size // side) * side / size for size, side in ((rows, tile.rows), (columns, tile.columns))]
            assert max(waste) < 1.2


# --- compiled for TPUs ------------------------------------------------------------------------------------------------


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_compiles_for_tpus(topology, monkeypatch):
    """On a machine whose default backend is the CPU; the tile is that of the chip."""
    monkeypatch.undo()  # it is seen from the mesh alone that these are TPUs
    mesh = mesh_of(tpu_devices(topology))
    kinds = set()
    kind = tiles.device_kind
    monkeypatch.setattr(tiles, "device_kind", lambda: kinds.add(kind()) or kind())
    options = dict(with_weights=True, clip_norm=1.0, clip_strategy="two passes", microbatch_size=2, norms=True)
    options["with_operands"] = True
    compiled = compile_for(mesh, on_mesh(mesh, **options), length=200)
    assert jax.default_backend() == "cpu"
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') >= 2
    assert kinds == {mesh.devices.flat[0].device_kind} and kinds <= set(tiles._CHIPS)


@needs_libtpu
@pytest.mark.parametrize(("precision", "dtype"), [(None, "bf16"), (jax.lax.Precision.HIGHEST, "f32")])
def test_factors_are_written_as_the_matrix_units_take_them(precision, dtype, monkeypatch):
    """As for XLA's own products: float32 factors at default precision are bfloat16 in memory."""
    monkeypatch.undo()
    mesh = mesh_of(tpu_devices("v5e:2x2"))

    def loss(w, x_1xTxI):
        return jnp.sum(jnp.square(jnp.tanh(jnp.einsum("bti,ij->btj", jnp.tanh(x_1xTxI), w, precision=precision))))

    def local(w, x):
        return per_example.grad_statistics(loss, ("mean", "mean_square"))(w, x)[0].mean_square

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(mesh.axis_names)), out_specs=P(), check_vma=False)
    place = lambda spec, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))  # noqa: E731
    lowered = jax.jit(run).lower(place(P(), 256, 512), place(P(mesh.axis_names), 16, 128, 256))
    (kernel,) = [line for line in lowered.compile().as_text().splitlines() if '"tpu_custom_call"' in line]
    operands = kernel.partition("operand_layout_constraints=")[2]
    assert re.findall(r"(\w+)\[\d+,128,\d+\]", operands) == [dtype] * 2


@needs_libtpu
@pytest.mark.parametrize("check_vma", [False, True])
def test_compiles_under_tensor_parallelism(check_vma):
    mesh = mesh_of(tpu_devices("v5e:2x2"), (2, 2))
    run = on_mesh(mesh, shardings=PLACES, norms=True, check_vma=check_vma, with_operands=True)
    assert "tpu_custom_call" in compile_for(mesh, run).as_text()


def everything(g):
    """Every function that may stand in a φ."""
    x = jnp.abs(g) + jnp.exp(-g) * jax.nn.sigmoid(g) + jnp.log(g * g + 1) + jnp.log1p(g * g) + jnp.tanh(g) + g**3
    x = x / (jnp.sqrt(g * g + 1) + jax.lax.rsqrt(g * g + 2)) - jnp.clip(g, -1, 1) + jnp.power(jnp.abs(g), 1.5)
    x = jnp.where((g > 0) & (x >= 0.5) | ~(g < 2) | (x == 0.25), x, jax.lax.stop_gradient(-g))
    x = jnp.where((x != 3) & (x <= 7) & jnp.isfinite(x), x, jnp.sign(x))
    x = jax.lax.clamp(-5.0, x, 5.0)
    return jnp.maximum(x, -9) + jnp.minimum(x, 9) + jnp.square(g.astype(jnp.bfloat16).astype(jnp.float32))


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_every_known_function_compiles(topology):
    program = jax.make_jaxpr(everything)(jax.ShapeDtypeStruct((8, 128), jnp.float32))
    used = {eqn.primitive.name for eqn in jaxprs.inline(program).jaxpr.eqns} | {"add_any", "copy"}
    assert used >= primitives.KERNEL_ELEMENTWISE, primitives.KERNEL_ELEMENTWISE - used
    mesh = mesh_of(tpu_devices(topology))
    compute = per_example.grad_statistics(loss, per_example.Statistic("everything", everything), data_axes=("data",))
    run = jax.shard_map(
        lambda p, x, _: compute(p, x)[0].averages,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    assert "tpu_custom_call" in compile_for(mesh, run).as_text()


def compile_for(mesh, run, length=64):
    arguments = (PARAMS, jax.ShapeDtypeStruct((8, length, 160), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32))
    specs = (P(), P("data"), P("data"))
    put = lambda tree, spec: jax.tree.map(  # noqa: E731
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree
    )
    lowered = jax.jit(run).lower(*(put(a, s) for a, s in zip(arguments, specs, strict=True)))
    return lowered.compile()
