"""Which form a gradient gets, and that each is right with every option that reaches it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import per_example
from perex_t5x.per_example.reductions import dense
from tests.per_example.loop_reference import SOME, STATISTICS, assert_matches, norms, single_gradients
from tests.per_example.test_memory import largest

N = 4


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def ids(seed, length, vocabulary):
    return jax.random.randint(jax.random.key(seed), (N, length), 0, vocabulary)


def embedding():
    def loss(p, batch):
        return jnp.sum(jnp.sin(p["e"][batch["ids"]]) * batch["x"])

    return loss, {"e": normal(0, 9, 3)}, {"ids": ids(1, 6, 4), "x": normal(2, N, 6, 3)}


def tied(transposed):
    def loss(p, batch):
        h = jnp.tanh(p["e"][batch["ids"]] * 1.5)
        logits = jnp.einsum("vd,btd->bvt" if transposed else "vd,btd->btv", p["e"], h)
        return jnp.mean(jax.nn.logsumexp(logits, axis=1 if transposed else 2))

    return loss, {"e": normal(0, 30, 5)}, {"ids": ids(1, 4, 3)}


def recurrent(remat=False):
    """The gradients are added up in the backward scan's carry."""

    def loss(p, x_BxTxD):
        def step(h, x):
            return jnp.tanh(h @ p["w"] + x @ p["u"] + p["b"][None]), None

        step = jax.checkpoint(step, prevent_cse=False) if remat else step
        h, _ = jax.lax.scan(step, jnp.ones((x_BxTxD.shape[0], 12)), jnp.swapaxes(x_BxTxD, 0, 1))
        return jnp.sum(h**2)

    params = {"w": 0.3 * normal(0, 12, 12), "u": normal(1, 10, 12), "b": normal(2, 12)}
    return loss, params, normal(3, N, 3, 10)


def repeated_layer():
    """An elementwise use besides a product, several times: no single product to contract."""

    def loss(p, x):
        def step(h, _):
            return jnp.tanh(h @ p["w"]) + 0.1 * jnp.sum(jnp.sin(p["w"])) * h, None

        return jnp.sum(jax.lax.scan(step, x, None, length=3)[0])

    return loss, {"w": 0.3 * normal(0, 8, 8)}, normal(1, N, 8)


def branch_on_data():
    def loss(p, x):
        sides = [lambda: jnp.sin(x @ p["w"]), lambda: x @ (p["w"] * 2), lambda: x @ p["w"] + p["b"][None]]
        return jnp.sum(jax.lax.switch(jnp.sum(x > 0).astype(jnp.int32) % 3, sides) ** 2)

    return loss, {"w": normal(0, 5, 8), "b": normal(1, 8)}, normal(2, N, 5)


def branch_for_all():
    def loss(p, batch):
        h = jax.lax.cond(p["gate"] > 0, lambda: jnp.sin(batch @ p["w"]), lambda: batch @ (p["w"] * 2))
        return jnp.sum(h**2)

    return loss, {"w": normal(0, 5, 8), "gate": jnp.ones(())}, normal(2, N, 3, 5)


def fused():
    """One parameter in three slices, and one of stacked layers, unrolled."""

    def loss(p, x):
        q, k, v = (x @ p["qkv"][:, i * 8 : i * 8 + 8] for i in range(3))
        h = jnp.tanh(q * k) + v
        for i in range(3):
            h = jnp.tanh(h @ p["layers"][i])
        return jnp.sum(h**2)

    return loss, {"qkv": normal(0, 6, 24), "layers": normal(1, 3, 8, 8)}, normal(2, N, 2, 6)


def concatenated():
    def loss(p, x):
        return jnp.sum(jnp.tanh(x @ jnp.concatenate([p["a"], p["b"]], axis=1)) ** 2)

    return loss, {"a": normal(0, 6, 5), "b": normal(1, 6, 4)}, normal(2, N, 2, 6)


def scaled_layers():
    """A factor of the example's own, and a shared one, on gradients that come out of a scan."""

    def loss(p, batch):
        def layers(w, h):
            return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, w)[0] ** 2)

        @jax.custom_vjp
        def scaled(w, h, s):
            return layers(w, h)

        def forward(w, h, s):
            return layers(w, h), (w, h, s)

        def backward(saved, ct):
            w, h, s = saved
            return 3.0 * (s * jax.grad(layers)(w, h)) * ct, jnp.zeros_like(h), jnp.zeros_like(s)

        scaled.defvjp(forward, backward)
        return scaled(p["w"], batch["x"], batch["s"][0])

    return loss, {"w": normal(0, 3, 6, 6)}, {"x": normal(1, N, 2, 6), "s": normal(2, N)}


CASES = {
    "embedding": (embedding, {"e": "sparse"}),
    "tied": (lambda: tied(False), {"e": "sparse + dense"}),
    "tied_transposed": (lambda: tied(True), {"e": "sparse + dense"}),
    "recurrent": (recurrent, {"w": "one at a time", "u": "one at a time", "b": "all at once"}),
    "recurrent_remat": (lambda: recurrent(True), {"w": "one at a time", "u": "one at a time", "b": "all at once"}),
    "repeated_layer": (repeated_layer, {"w": "one at a time"}),
    "branch_on_data": (branch_on_data, {"w": "one at a time", "b": "all at once"}),
    "branch_for_all": (branch_for_all, {"w": "one at a time", "gate": "shared"}),
    "fused": (fused, {"qkv": "one at a time", "layers": "one at a time"}),
    "concatenated": (concatenated, {"a": "one at a time", "b": "one at a time"}),
    "scaled_layers": (scaled_layers, {"w": "one at a time"}),
}


@pytest.mark.parametrize("name", CASES)
def test_reductions(name):
    make, reductions = CASES[name]
    loss, params, batch = make()
    rows = per_example.coverage(loss, params, batch, strict=True)
    assert {row.parameter: row.reduction for row in rows} == reductions
    stats, aux = jax.jit(per_example.grad_statistics(loss, STATISTICS, norms=True))(params, batch)
    gradients = single_gradients(loss, params, batch)
    assert_matches(stats, gradients, STATISTICS)
    np.testing.assert_allclose(aux.norms, norms(gradients), rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_reductions_with_weights_clipping_and_microbatches(name):
    """Everything at once against the loop method, whose own arithmetic `test_the_loop_method` checks."""
    loss, params, batch = CASES[name][0]()
    weights = jnp.array([0.5, 0.0, 2.0, 1.0])
    limit = float(np.median(norms(single_gradients(loss, params, batch))))
    results = {}
    for method in ("surgery", "loop"):
        compute = per_example.grad_statistics(
            loss, SOME, method=method, microbatch_size=2, clip_norm=limit, non_finite="skip", norms=True
        )
        results[method] = jax.jit(lambda p, b, w, c=compute: c(p, b, weights=w))(params, batch, weights)
    leaves = zip(*(jax.tree_util.tree_leaves_with_path(results[m]) for m in ("surgery", "loop")), strict=True)
    for (path, a), (_, e) in leaves:
        scale = max(float(jnp.max(jnp.abs(e), initial=0.0)), 1e-3)
        np.testing.assert_allclose(a, e, atol=2e-5 * scale, rtol=0, err_msg=jax.tree_util.keystr(path))


def test_the_loop_method():
    loss, params, batch = recurrent()
    stats, aux = per_example.grad_statistics(loss, STATISTICS, method="loop", norms=True, group_size=2)(params, batch)
    gradients = single_gradients(loss, params, batch)
    pairs = [jax.tree.map(lambda a, b: (a + b) / 2, *gradients[i : i + 2]) for i in (0, 2)]
    assert_matches(stats, pairs, STATISTICS)
    np.testing.assert_allclose(aux.norms, norms(pairs), rtol=1e-5)


@pytest.mark.parametrize("tile_bytes", [40, 64, 100])
@pytest.mark.parametrize("transposed", [False, True])
def test_tiles(monkeypatch, tile_bytes, transposed):
    """Tiles of the last or the first axis, with a remainder, are the whole."""
    loss, params, batch = tied(transposed)
    expected = jax.jit(per_example.grad_statistics(loss, STATISTICS, norms=True))(params, batch)
    monkeypatch.setitem(dense.TILE_BYTES, "cpu", tile_bytes)
    tiled = jax.jit(per_example.grad_statistics(loss, STATISTICS, norms=True, microbatch_size=2))(params, batch)
    for a, e in zip(jax.tree.leaves(tiled), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6)


def test_other_platforms_get_the_untiled_loop(monkeypatch):
    """Lowered for a TPU on this machine: no tiles, and nothing asks for the machine's own backend."""
    monkeypatch.setitem(dense.TILE_BYTES, "cpu", 100)
    loss, params, batch = tied(False)
    traced = jax.jit(per_example.grad_statistics(loss)).trace(params, batch)
    cpu, tpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "tpu"))
    assert cpu.count("stablehlo.while") > tpu.count("stablehlo.while") > 0


def test_norms_of_a_first_pass_use_the_gram_matrices():
    loss, params, batch = tied(False)
    two_passes = dict(clip_norm=1.0, clip_strategy="two passes")
    table = per_example.coverage(loss, params, batch, **two_passes)
    assert table.passes == 2 and table.norm_reductions == {"e": "sparse + dense"}
    wide = lambda w, x: jnp.sum(jnp.tanh(x @ w))  # noqa: E731
    table = per_example.coverage(wide, jnp.ones((20, 30)), normal(0, N, 3, 20), **two_passes)
    assert set(table.norm_reductions.values()) == {"gram"}
    assert "two passes" in str(table) and "gram" in str(table)
    assert per_example.coverage(wide, jnp.ones((20, 30)), normal(0, N, 3, 20)).passes == 1


@pytest.mark.parametrize("name", ["recurrent", "fused", "repeated_layer", "concatenated"])
def test_nothing_of_size_examples_times_parameter(name):
    """More examples, no larger intermediate than a parameter or a batch of activations."""
    loss, params, batch = CASES[name][0]()
    many = jax.tree.map(lambda x: jnp.concatenate([x] * 16), batch)
    biggest = max(p.size for p in jax.tree.leaves(params)) * 4
    surgery = largest(jax.make_jaxpr(per_example.grad_statistics(loss))(params, many).jaxpr)
    vmap = largest(jax.make_jaxpr(per_example.grad_statistics(loss, method="vmap"))(params, many).jaxpr)
    assert vmap >= 64 * biggest
    assert surgery < vmap / 2


def test_tracing_grows_linearly():
    """Equations of the program for 2, 8 and 32 unrolled layers, stacked in one parameter."""

    def equations(layers):
        def loss(p, x):
            for i in range(layers):
                x = jnp.tanh(x @ p["w"][i] + p["b"][i][None, None])
            return jnp.sum(x)

        params = {"w": jnp.ones((layers, 8, 8)), "b": jnp.ones((layers, 8))}
        return count(jax.make_jaxpr(per_example.grad_statistics(loss))(params, jnp.ones((N, 2, 8))).jaxpr)

    def count(jaxpr):
        inner = [
            x for eqn in jaxpr.eqns for p in eqn.params.values() for x in (p if isinstance(p, tuple | list) else [p])
        ]
        return len(jaxpr.eqns) + sum(
            count(getattr(x, "jaxpr", x)) for x in inner if hasattr(getattr(x, "jaxpr", x), "eqns")
        )

    two, eight, many = equations(2), equations(8), equations(32)
    per_layer = (eight - two) / 6
    assert many < 1.1 * (eight + 24 * per_layer)


# --- what else users ask ----------------------------------------------------------------------------------------------


def test_a_subset_of_the_parameters():
    """Frozen parameters have no statistics, and nothing is computed for them."""
    loss, params, batch = recurrent()
    gradients = single_gradients(loss, params, batch)
    only = jax.jit(per_example.grad_statistics(loss, SOME, parameters="^(u|b)$", norms=True))
    stats, aux = only(params, batch)
    assert stats.mean["w"] is None
    kept = [{k: g[k] for k in ("u", "b")} for g in gradients]
    assert_matches(stats, kept, SOME)
    np.testing.assert_allclose(aux.norms, norms(kept), rtol=1e-5)
    by_function = per_example.grad_statistics(loss, SOME, parameters=lambda name: name != "w")(params, batch)[0]
    np.testing.assert_allclose(by_function.mean["u"], stats.mean["u"], rtol=1e-6)
    assert [row.parameter for row in per_example.coverage(loss, params, batch, parameters="u")] == ["u"]
    with pytest.raises(ValueError, match="parameters selects none of the parameters: b, u, w"):
        per_example.grad_statistics(loss, parameters="kernel")(params, batch)
    with pytest.raises(ValueError, match="give a regular expression"):
        per_example.grad_statistics(loss, parameters="(")


def test_lora_holds_the_base_constant():
    def loss(p, x):
        return jnp.sum(jnp.tanh(x @ (p["base"] + p["lora_a"] @ p["lora_b"])) ** 2)

    params = {"base": normal(0, 6, 8), "lora_a": normal(1, 6, 2), "lora_b": normal(2, 2, 8)}
    x = normal(3, N, 3, 6)
    stats, _ = jax.jit(per_example.grad_statistics(loss, STATISTICS, parameters="^lora_"))(params, x)
    kept = [{k: g[k] for k in ("lora_a", "lora_b")} for g in single_gradients(loss, params, x)]
    assert_matches(stats, kept, STATISTICS)


def test_the_first_index_places_a_part_in_the_global_batch():
    def loss(p, x, key):
        return jnp.sum(p * jax.random.normal(key, p.shape)) * jnp.sum(x)

    params, x, key = jnp.ones(3), normal(0, 8, 2), jax.random.key(5)
    compute = per_example.grad_statistics(loss, "mean", rng_argnums=2)
    whole, _ = compute(params, x, key)
    halves = [jax.jit(compute.__call__)(params, x[i : i + 4], key, first_index=i)[0].mean for i in (0, 4)]
    np.testing.assert_allclose((halves[0] + halves[1]) / 2, whole.mean, rtol=1e-5)
    assert not np.allclose(compute(params, x[4:], key)[0].mean, halves[1])


def test_groups_leave_out_an_example_without_its_nan():
    loss, params, batch = recurrent()
    weights = jnp.array([1.0, 0.0, 1.0, 3.0])
    gradients = single_gradients(loss, params, batch)
    groups = [gradients[0], jax.tree.map(lambda a, b: (a + 3 * b) / 4, *gradients[2:])]
    for bad in (batch, batch.at[1].set(jnp.nan)):
        stats, aux = jax.jit(
            lambda p, b: per_example.grad_statistics(loss, STATISTICS, group_size=2)(p, b, weights=weights)
        )(params, bad)
        assert_matches(stats, groups, STATISTICS, weights=[0.5, 2.0])
        assert (int(stats.count), int(stats.num_groups), int(aux.non_finite)) == (3, 2, 0)
        assert np.isnan(aux.values[1]) and np.isfinite(np.delete(aux.values, 1)).all()


def test_non_finite_raise():
    loss, params, batch = recurrent()
    compute = per_example.grad_statistics(loss, non_finite="raise")
    stats, aux = compute(params, batch)
    assert aux.norms is None and int(stats.count) == N
    bad = batch.at[2].set(jnp.inf)
    with pytest.raises(FloatingPointError, match="loss or gradient of 1 of 4 examples .groups. is not finite: 2"):
        compute(params, bad)
    with pytest.raises(Exception, match="is not finite: 2"):
        jax.block_until_ready(jax.jit(compute)(params, bad))
        jax.effects_barrier()
    compute(params, bad, weights=jnp.array([1.0, 1.0, 0.0, 1.0]))  # left out: no reason to raise
