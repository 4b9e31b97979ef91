"""Statistics after the norms in one backward pass: every strategy against the loop, and what it holds against the budget."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import per_example
from perex_t5x.per_example.kernels import dispatch
from perex_t5x.per_example.reductions import held
from tests.per_example.loop_reference import SOME, assert_matches, clipped, grouped, norms, single_gradients

N, T, D, F, V, LAYERS = 4, 6, 5, 7, 11, 3


def normal(seed, *shape):
    return 0.4 * jax.random.normal(jax.random.key(seed), shape)


PARAMS = {
    "embedding": normal(0, V, D),
    "up": normal(1, LAYERS, D, F),
    "down": normal(2, LAYERS, F, D),
    "scale": normal(3, LAYERS, D),
    "whole": normal(4, 2 * D, D),
    "regularised": normal(5, 3),
    "unused": normal(6, 2),
}
BATCH = {"ids": jax.random.randint(jax.random.key(7), (N, T), 0, 4), "x": normal(8, N, T, D)}


def loss(p, batch):
    """Scanned and rematerialised layers, a shared input of two products, a parameter in slices, a regulariser."""

    def layer(h, w):
        up, down, scale = w
        n = h * scale[None, None]
        return h + jnp.tanh(n @ up) @ down + jnp.sin(n), None

    h = p["embedding"][batch["ids"]] + batch["x"]
    h, _ = jax.lax.scan(jax.checkpoint(layer), h, (p["up"], p["down"], p["scale"]))
    h = jnp.cos(h @ p["whole"][:D]) @ p["whole"][D:]
    return jnp.mean(h**2) + 0.1 * jnp.sum(p["regularised"] ** 2)


@pytest.mark.parametrize(
    "options",
    [{"group_size": 2, "non_finite": "skip"}, {"weights": True, "microbatch_size": 2}],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["gradients", "factors"])
def test_every_strategy(strategy, options, monkeypatch):
    monkeypatch.setattr(held, "LONG", {"cpu": 1, "tpu": 1})  # however short the sequence
    options = dict(options)
    weights = jnp.array([0.5, 2.0, 0.0, 1.0]) if options.pop("weights", False) else None
    gradients = grouped(single_gradients(loss, PARAMS, BATCH), options.get("group_size", 1))
    limit = float(np.median(norms(gradients)))
    compute = per_example.grad_statistics(loss, SOME, clip_norm=limit, clip_strategy=strategy, **options)
    assert {h.strategy for h in compute.trace(PARAMS, BATCH).holdings.values()} == {strategy}
    stats, aux = jax.jit(lambda p, b: compute(p, b, weights=weights))(PARAMS, BATCH)
    assert_matches(stats, clipped(gradients, limit), SOME, weights)
    np.testing.assert_allclose(aux.norms, norms(gradients), rtol=1e-5)


def two_products(p, x):
    def layer(h, w):
        return jnp.tanh(h @ w["in"]) @ w["out"] + jnp.sin(h @ w["other"]), None

    return jnp.sum(jax.lax.scan(layer, x, p)[0] ** 2)


STACKS = {"in": normal(0, LAYERS, 20, 30), "out": normal(1, LAYERS, 30, 20), "other": normal(2, LAYERS, 20, 20)}


def test_the_budget_decides():
    """Bytes are those of the arrays that are kept, a shared input once; more than the budget is never held."""
    x, length = normal(3, N, 4, 20), 4
    gradients = N * LAYERS * (20 * 30 + 30 * 20 + 20 * 20) * 4
    # Inputs of `in` and `other` are the same; so are the cotangents of `out` and, before the sine, of `other`'s result.
    factors = N * LAYERS * length * (20 + 30 + 30 + 20 + 20) * 4

    def chosen(**options):
        table = per_example.coverage(two_products, STACKS, x, clip_norm=1.0, **options)
        (holding,) = table.holdings.values()
        assert table.passes == (2 if holding.strategy == "two passes" else 1)
        return holding.strategy, holding.bytes

    assert chosen() == ("gradients", factors)  # short products are cheaper to form again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held, "LONG", {"cpu": 1, "tpu": 1})
        assert chosen(clip_memory=gradients) == ("gradients", gradients)
        assert chosen(clip_memory=gradients - 1) == ("factors", factors)
        assert chosen(strict=True) == ("factors", factors)
        assert chosen(clip_memory=factors - 1) == ("two passes", 0)
        assert chosen(microbatch_size=1, clip_memory=gradients // N) == ("gradients", gradients // N)
        patch.setattr(dispatch, "for_tpu", lambda: True)  # kernels make a second pass cheap
        assert chosen(kernels=False) == ("two passes", 0)
        assert chosen(kernels=False, microbatch_size=1)[0] == "gradients"
    text = str(per_example.coverage(two_products, STACKS, x, clip_norm=1.0, clip_memory=1000))
    assert f"one pass would hold {factors:,} bytes, clip_memory is 1,000" in text
    assert f"held until the norms are known, {factors:,} bytes" in str(
        per_example.coverage(two_products, STACKS, x, non_finite="skip")
    )


def test_a_branch_takes_two_passes():
    def branching(p, x, flag):
        return jnp.sum(jax.lax.cond(flag, lambda w: jnp.tanh(x @ w), lambda w: x @ w, p["w"]))

    table = per_example.coverage(branching, {"w": normal(0, 20, 30)}, normal(1, N, 3, 20), True, clip_norm=1.0)
    assert table.passes == 2 and "the gradient of w comes out of a branch" in str(table)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_memory": -1}, "clip_memory = -1: must be a number of bytes"),
        ({"clip_memory": "2GB"}, "clip_memory = '2GB': must be a number of bytes"),
        (
            {"clip_strategy": "one pass"},
            "clip_strategy = 'one pass': must be one of auto, gradients, factors, two passes",
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        per_example.grad_statistics(loss, **options)
