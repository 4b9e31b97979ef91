"""Parameters that go through a function before they meet an example: exact, and nothing of size examples × parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import per_example
from tests.per_example.loop_reference import SOME, assert_matches, norms, single_gradients
from tests.per_example.test_memory import largest

N, T, D, F, RANK = 32, 2, 12, 14, 3
DRAW = np.random.default_rng(7)


def normal(*shape):
    return jnp.asarray(DRAW.normal(size=shape) / np.sqrt(shape[-1]), jnp.float32)


W, SQUARE, X = normal(D, F), normal(D, D), normal(N, T, D)
LORA = {"w": W, "a": normal(D, RANK), "b": normal(RANK, F)}
STACK = {"w": normal(3, D, D), "a": normal(3, D, RANK), "b": normal(3, RANK, D)}


def total(y):
    return jnp.sum(jnp.sin(y))


def of(f):
    """The loss whose only weight is f(w)."""
    return lambda w, x: total(x @ f(w))


def merged(p):
    return p["w"] + p["a"] @ p["b"]


def hyper(p, x):
    first, second = ((p["z"] @ p[name]).reshape(shape) for name, shape in (("h1", (D, F)), ("h2", (F, D))))
    return total(jnp.tanh(x @ first) @ second)


def recurrent(w, x):
    mixing = jax.nn.softmax(w)
    return total(jax.lax.scan(lambda h, x: (jnp.tanh(h @ mixing + x), None), x[:, 0], jnp.moveaxis(x, 1, 0))[0])


def rematerialised(w, x):
    return total(jax.checkpoint(lambda h, w: jnp.tanh(jnp.sin(h @ w) @ w))(x, w + w.T))


def over_layers(W, h):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, W)[0]


CASES = {
    "tanh": (of(jnp.tanh), W),
    "softmax": (of(jax.nn.softmax), W),
    "symmetric": (of(lambda w: w + w.T), SQUARE),
    "rows_moved": (of(lambda w: w[jnp.arange(D)[::-1]]), W),
    "over_its_deviation": (of(lambda w: w / w.std()), W),
    "standardised": (of(lambda w: (w - w.mean(0, keepdims=True)) / w.std(0, keepdims=True)), W),
    "weight_normalised": (
        lambda p, x: total(x @ (p["g"][None] * p["v"] / jnp.linalg.norm(p["v"]))),
        {"g": W[0], "v": W},
    ),
    "spectral_norm": (of(lambda w: w / jnp.linalg.norm(w, 2)), W),
    "inverse": (of(lambda w: jnp.linalg.inv(w + 3 * jnp.eye(D))), SQUARE),
    "cholesky": (of(lambda w: jnp.linalg.cholesky(w @ w.T + jnp.eye(D))), SQUARE),
    "triangular_solve": (of(lambda w: jax.scipy.linalg.solve_triangular(jnp.eye(D) + jnp.tri(D), w, lower=True)), W),
    "repeated": (of(lambda w: jnp.repeat(w[:, :4], 8, 1)), W),
    "merged": (lambda p, x: total(x @ merged(p)), LORA),
    "merged_with_bias": (lambda p, x: total(x @ merged(p["lora"]) + p["b"]), {"lora": LORA, "b": W[:1, None]}),
    "frozen_and_merged": (lambda p, x: total(x @ merged({"w": W, **p})), {k: LORA[k] for k in "ab"}),
    "two_of_the_same": (lambda p, x: total(x @ jnp.tanh(p["a"] + p["b"])), {"a": W, "b": 0.5 * W}),
    "hyper": (hyper, {"z": normal(2), "h1": normal(2, D * F), "h2": normal(2, F * D)}),
    "recurrent": (recurrent, SQUARE),
    "rematerialised": (rematerialised, SQUARE),
    "layers_merged_inside": (
        lambda p, x: total(jax.lax.scan(lambda h, p: (jnp.tanh(h @ merged(p)), None), x, p)[0]),
        STACK,
    ),
    "layers_merged_before": (
        lambda p, x: total(over_layers(p["w"] + jnp.einsum("ldr,lrf->ldf", p["a"], p["b"]), x)),
        STACK,
    ),
}


EMBEDDED = {
    "rematerialised": lambda p, h: jax.checkpoint(lambda h, w: jnp.sin(h @ w))(h, jax.nn.softmax(p["w"])),
    "used_by_two_remats": lambda p, h: jax.checkpoint(jnp.matmul)(jax.checkpoint(jnp.matmul)(h, p["w"]), p["w"]),
    "rematerialised_layers": lambda p, h: jax.lax.scan(
        lambda h, w: (jax.checkpoint(jnp.matmul, prevent_cse=False)(jnp.sin(h), jax.nn.softmax(w)), None), h, p["stack"]
    )[0],
    "recurrent": lambda p, h: (
        lambda w: jax.lax.scan(lambda s, x: (jnp.tanh(s @ w + x), None), h[:, 0], jnp.moveaxis(h, 1, 0))[0]
    )(jax.nn.softmax(p["w"])),
    "layers_of_layers_and_a_branch": lambda p, h: jax.lax.cond(
        p["w"][0, 0] > 0,
        lambda h, w: h @ w,
        lambda h, w: jnp.sin(h @ w.T),
        jax.lax.scan(lambda h, w: (over_layers(w, h), None), h, jnp.stack([jnp.tanh(p["stack"]), jnp.cos(p["stack"])]))[
            0
        ],
        jax.nn.softmax(p["w"]),
    ),
    "without_a_sequence": lambda p, h: jnp.tanh(jnp.sin(h[:, 0] @ p["stack"][0]) @ jax.nn.softmax(p["w"])),
}


@pytest.mark.parametrize("name", EMBEDDED)
def test_with_gradients_that_go_on_to_an_embedding(name):
    """What makes the gradient of f(w) passes another on to the embedding: taken apart, so that w's runs one at a time."""
    ids = jnp.asarray(DRAW.integers(0, 8, size=(N, T)))
    params = {"e": normal(8, D), "w": SQUARE, "stack": STACK["w"]}
    loss = lambda p, ids: total(EMBEDDED[name](p, p["e"][ids]))  # noqa: E731
    many = jnp.concatenate([ids] * 16)
    activations = largest(jax.make_jaxpr(jax.value_and_grad(loss))(params, many).jaxpr)
    assert (
        largest(jax.make_jaxpr(per_example.grad_statistics(loss, strict=True))(params, many).jaxpr) <= 4 * activations
    )
    stats, aux = jax.jit(per_example.grad_statistics(loss, SOME, norms=True))(params, ids)
    gradients = single_gradients(loss, params, ids)
    assert_matches(stats, gradients, SOME, rtol=5e-5)
    np.testing.assert_allclose(aux.norms, norms(gradients), rtol=5e-5)


@pytest.mark.parametrize("name", CASES)
def test_cones(name):
    loss, params = CASES[name]
    gradients = single_gradients(loss, params, X)
    rows = per_example.coverage(loss, params, X, strict=True)
    assert {row.reduction for row in rows} <= {"one at a time", "all at once"}
    weights = jnp.asarray(DRAW.integers(0, 3, size=N), jnp.float32)
    compute = per_example.grad_statistics(loss, SOME, norms=True, strict=True)
    stats, aux = jax.jit(lambda p, x, w: compute(p, x, weights=w))(params, X, weights)
    assert_matches(stats, gradients, SOME, weights, rtol=5e-5)
    np.testing.assert_allclose(aux.norms, norms(gradients), rtol=5e-5)


@pytest.mark.parametrize("name", ["merged", "layers_merged_inside"])
@pytest.mark.parametrize("strategy", ["factors", "gradients", "two passes"])
def test_with_norms_first_and_microbatches(name, strategy):
    """Clipped, eight examples at a time, against vmap."""
    loss, params = CASES[name]
    limit = float(np.median(norms(single_gradients(loss, params, X))))
    options = {"clip_norm": limit, "norms": True}
    compute = per_example.grad_statistics(loss, SOME, microbatch_size=8, clip_strategy=strategy, **options)
    expected = jax.jit(per_example.grad_statistics(loss, SOME, method="vmap", **options))(params, X)
    for a, e in zip(*map(jax.tree.leaves, (jax.jit(compute)(params, X), expected)), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-5 * float(jnp.max(jnp.abs(e))))


@pytest.mark.parametrize("name", ["merged", "layers_merged_before"])
def test_metrics_and_clipping_by_parameter(name):
    """Numbers of whole gradients that come out of one cone, each parameter clipped by itself; against vmap."""
    loss, params = CASES[name]
    limits = jax.tree.map(lambda p: 0.5 + 0.1 * p.ndim, params)
    metrics = (per_example.metrics.norm(per_parameter=True), per_example.metrics.sketch(4))
    options = {"clip_norm": limits, "metrics": metrics}
    mine, expected = (
        jax.jit(per_example.grad_statistics(loss, SOME, method=method, **options))(params, X)
        for method in ("surgery", "vmap")
    )
    for a, e in zip(*map(jax.tree.leaves, (mine, expected)), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-5 * float(jnp.max(jnp.abs(e))))


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_held_for_all_examples(name):
    """Many examples: no intermediate is as large as a quarter of all their gradients, whatever vmap's are."""
    loss, params = CASES[name]
    many = jnp.concatenate([X] * 16)
    trace = lambda **options: jax.make_jaxpr(per_example.grad_statistics(loss, **options))(params, many)  # noqa: E731
    activations = largest(jax.make_jaxpr(jax.value_and_grad(loss))(params, many).jaxpr)
    assert largest(trace(strict=True).jaxpr) <= 4 * activations
    if name != "frozen_and_merged":  # whose gradients are smaller than its activations
        assert largest(trace(method="vmap").jaxpr) > 4 * activations


def test_a_cone_is_run_once():
    """The product that three gradients are made of is not formed three times."""
    loss, params = CASES["merged"]
    programs = [jax.make_jaxpr(f)(params, X) for f in (jax.grad(loss), per_example.grad_statistics(loss))]
    plain, mine = (str(program).count(" dot_general[") for program in programs)
    assert plain == mine > 3


def test_what_is_held_is_said():
    """A function before a loop and another inside: what the loop stacks are gradients, not smaller values."""
    embedding = normal(40, D)
    ids = jnp.asarray(DRAW.integers(0, 40, size=(N, T)))

    def loss(p, ids):
        weights = p["w"] + jnp.einsum("ldr,lrf->ldf", p["a"], p["b"])
        return total(jax.lax.scan(lambda h, w: (h @ jax.nn.softmax(w), None), p["embedding"][ids], weights)[0])

    params = {**STACK, "embedding": embedding}
    table = {row.parameter: row for row in per_example.coverage(loss, params, ids)}
    assert {name: row.reduction for name, row in table.items()} == {
        "a": "materialised",
        "b": "materialised",
        "w": "materialised",
        "embedding": "sparse",
    }
    assert table["w"].transient_bytes >= N * STACK["w"].size * 4
    with pytest.raises(
        ValueError, match="'a' would have to be materialised .* can be applied to one layer's inside it"
    ):
        per_example.coverage(loss, params, ids, strict=True)
    # One example's are held in any case.
    table = per_example.coverage(loss, params, ids, strict=True, microbatch_size=1)
    assert table[0].reduction == "one at a time" and table[0].transient_bytes >= STACK["w"].size * 4
    stats, _ = jax.jit(per_example.grad_statistics(loss, SOME))(params, ids)
    assert_matches(stats, single_gradients(loss, params, ids), SOME)
