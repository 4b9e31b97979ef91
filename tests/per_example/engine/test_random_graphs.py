"""Random small graphs of parameter uses: whatever the engine recognises or does not, the numbers are the loop's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perex_t5x import per_example
from tests.per_example.loop_reference import SOME, assert_matches, single_gradients

DRAW = np.random.default_rng(3)
N, S, D, VOCAB = 3, 2, 3, 4


def normal(*shape):
    return jnp.asarray(DRAW.normal(size=shape), jnp.float32)


PARAMS = {
    "w": normal(D, D),
    "v": normal(D, D),
    "b": normal(D),
    "e": normal(VOCAB, D),
    "stack": normal(2, D, D),
    "long": normal(5),
}
BATCH = {"x": normal(N, S, D), "ids": jnp.asarray([[0, 0], [1, 3], [2, 1]], jnp.int32), "s": normal(N)}


def over_layers(p, h, _):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["stack"])[0]


def recurrent(p, h, _):
    """The gradient of `w` is accumulated in the carry of the scan."""
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["w"] + row(p["b"], h)), None), h, None, length=3)[0]


def recurrent_remat(p, h, _):
    step = jax.checkpoint(lambda h, _: (jnp.tanh(h @ p["w"]) @ p["v"], None), prevent_cse=False)
    return jax.lax.scan(step, h, None, length=2)[0]


def layers_and_shared(p, h, _):
    """A scan that stacks the gradient of one parameter and carries that of another."""
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) @ p["w"], None), h, p["stack"])[0]


def one_of_three(p, h, batch):
    sides = [lambda: h @ p["w"], lambda: h @ p["v"].T, lambda: h]
    return jax.lax.switch(batch["ids"][0, 0], sides)


def branch(p, h, batch):
    return jax.lax.cond(batch["s"][0] > 0, lambda: h @ p["w"], lambda: h * row(p["b"], h))


def gather(p, h, batch):
    rows = p["e"][batch["ids"]]
    return h + (rows if h.ndim == 3 else rows.sum(axis=1))


def row(b, h):
    return b.reshape((1,) * (h.ndim - 1) + (D,))


# Each from (parameters, h, batch) to a new h, [1, S, D] or, once summed over S, [1, D].
OPERATIONS = {
    "matmul": lambda p, h, _: h @ p["w"],
    "other_matmul": lambda p, h, _: h @ p["v"],
    "transposed": lambda p, h, _: h @ p["w"].T,
    "bias": lambda p, h, _: h + row(p["b"], h),
    "scale": lambda p, h, _: h * row(p["b"], h),
    "gather": gather,
    "tied": lambda p, h, _: jax.nn.softmax(h @ p["e"].T) @ p["e"],
    "elementwise_on_parameter": lambda p, h, _: h @ (jnp.sin(p["w"]) * p["v"]),
    "layers": over_layers,
    "recurrent": recurrent,
    "recurrent_remat": recurrent_remat,
    "layers_and_shared": layers_and_shared,
    "branch": branch,
    "one_of_three": one_of_three,
    "unstacked": lambda p, h, _: jnp.tanh(h @ p["stack"][0]) @ p["stack"][1],
    "side_by_side": lambda p, h, _: (h @ jnp.concatenate([p["w"], p["v"]], axis=1))[..., 1 : D + 1],
    "concatenated": lambda p, h, _: h @ jnp.concatenate([p["w"][:1], p["v"][1:]]),
    "padded": lambda p, h, _: h @ jnp.pad(p["w"][:2], ((0, 1), (0, 0))),
    "sliced": lambda p, h, _: h * row(p["long"][1:4], h),
    "updated": lambda p, h, _: h @ p["w"].at[0].set(p["b"]),
    "shared_scalar": lambda p, h, _: h @ (p["w"] * p["long"][0]),
    "example_scalar": lambda p, h, batch: h @ (p["w"] * batch["s"][0]),
    "scaled_after": lambda p, h, batch: (h @ p["v"]) * batch["s"][0],
    "stopped": lambda p, h, _: h @ jax.lax.stop_gradient(p["w"]) + h @ p["v"],
    "rematerialised": lambda p, h, _: jax.checkpoint(lambda w, h: jnp.tanh(h @ w) @ w)(p["w"], h),
    "bf16": lambda p, h, _: h * row(p["b"].astype(jnp.bfloat16).astype(jnp.float32), h),
    "no_sequence": lambda p, h, _: h.sum(axis=1) if h.ndim == 3 else h,
    "regularised": lambda p, h, _: h + 0.1 * jnp.sum(p["v"] ** 2),
}


def make_loss(names):
    def loss(p, batch):
        h = batch["x"]
        for name in names:
            h = jnp.tanh(OPERATIONS[name](p, h, batch))
        return jnp.mean(jnp.sum(h.reshape(h.shape[0], -1) ** 2, axis=-1))

    return loss


CHECKS = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
CHAINS = st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4)


@settings(max_examples=20, **CHECKS)
@given(names=CHAINS)
def test_random_graphs(names):
    check(names)


@pytest.mark.slow
@settings(max_examples=200, **CHECKS)
@given(names=CHAINS)
def test_more_random_graphs(names):
    check(names)


def check(names):
    loss = make_loss(names)
    stats, aux = jax.jit(per_example.grad_statistics(loss, SOME, norms=True))(PARAMS, BATCH)
    gradients = single_gradients(loss, PARAMS, BATCH)
    assert_matches(stats, gradients)
    norms = [np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(tree))) for tree in gradients]
    np.testing.assert_allclose(aux.norms, norms, rtol=1e-4, atol=1e-6)
