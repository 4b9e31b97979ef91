"""Programs without axes of size one, and products without padding: the same numbers, and what is gone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from perex_t5x import per_example
from perex_t5x.per_example.engine import jaxprs, rewrites
from perex_t5x.per_example.engine.rewrites.unit_axes import without_unit_axes

X = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 4)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 5)), jnp.float32)
IDS = jnp.array([[0, 3, 1, 1, 2, 0]])


def everywhere(jaxpr):
    """All equations, those of bodies too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs.inner(eqn):
            yield from everywhere(inner)


def chosen(x, ids):
    return jnp.take_along_axis(x, ids[..., None], axis=-1)[..., 0]


PROGRAMS = {
    "elementwise": lambda x: jnp.where(x > 0, jnp.exp(x), -x) * 2.0 + jnp.clip(x, -1, 1),
    "reductions": lambda x: jnp.sum(x, axis=(0, 2)) + jnp.max(x, axis=2)[0] + jnp.min(x, axis=0)[:, 0],
    "only axes of one": lambda x: jnp.sum(x, axis=0) + jnp.max(x, axis=0),
    "softmax": lambda x: jax.nn.log_softmax(x, axis=-1),
    "broadcast": lambda x: x * jnp.broadcast_to(jnp.sum(x, axis=1, keepdims=True), x.shape),
    "transpose": lambda x: jnp.transpose(x, (2, 0, 1)) + 1,
    "slice to one": lambda x: x[:, 2:3] * x[:, 1:2, :1],
    "slice": lambda x: x[:, ::2] - x[:, :-1:2],
    "pad": lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1), (2, 0))) + jnp.pad(x[..., :1], ((0, 0), (0, 0), (0, 5))),
    "reshape": lambda x: x.reshape(6, 1, 2, 2).reshape(2, 12),
    "product": lambda x: x @ W,
    "batched product": lambda x: jnp.einsum("btd,bsd->bts", x, x),
    "contracted axis of one": lambda x: jnp.einsum("bt,bs->ts", x[..., 0], x[..., 1]),
    "gather": lambda x: chosen(x, IDS),
    "scatter": lambda x: jnp.zeros((1, 6, 4)).at[0, :, 2].add(x[0, :, 0]),
    "scan": lambda x: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.sum(c, axis=0)), x, jnp.stack([W[:, :4]] * 3)),
    "remat": lambda x: jax.checkpoint(lambda y: jnp.tanh(y @ W[:, :4]) + y)(x),
    "cond": lambda x: jax.lax.cond(x[0, 0, 0] > 0, lambda y: y * 2, lambda y: y - jnp.sum(y, axis=0, keepdims=True), x),
    "cumsum, not known": lambda x: jnp.cumsum(x, axis=1) + jnp.sort(x, axis=0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_computes_the_same(name):
    program = jaxprs.inline(jax.make_jaxpr(PROGRAMS[name])(X))
    smaller = without_unit_axes(program)
    assert [v.shape for v in smaller.out_avals] == [v.shape for v in program.out_avals]
    want, got = (jax.tree.leaves(core.jaxpr_as_fun(p)(X)) for p in (program, smaller))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    slope = lambda p: jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in core.jaxpr_as_fun(p)(x)))(X)  # noqa: E731
    np.testing.assert_allclose(slope(smaller), slope(program), rtol=1e-5, atol=1e-6)


def test_products_and_sums_lose_them():
    program = jaxprs.inline(jax.make_jaxpr(lambda x: jnp.sum(jnp.tanh(x @ W), axis=2))(X))
    found = {e.primitive.name: e for e in without_unit_axes(program).jaxpr.eqns}
    assert found["dot_general"].invars[0].aval.shape == (6, 4) and found["reduce_sum"].invars[0].aval.shape == (6, 5)


def next_token_loss(params, ids_BxT):
    logits = (jnp.tanh(params["table"][ids_BxT] @ params["w"]) @ params["head"])[:, :-1]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen(logits, ids_BxT[:, 1:]))


def drawn():
    rng = np.random.default_rng(2)
    shapes = {"table": (11, 6), "w": (6, 6), "head": (6, 11)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    return params, jnp.asarray(rng.integers(0, 11, (5, 8)))


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 1}, {"clip_norm": 0.1}], ids=str)
def test_next_tokens_against_a_loop(options):
    params, ids = drawn()
    got, _ = per_example.grad_statistics(next_token_loss, ("mean", "mean_square"), **options)(params, ids)
    loop = {k: v for k, v in options.items() if k != "microbatch_size"}
    want, _ = per_example.grad_statistics(next_token_loss, ("mean", "mean_square"), method="loop", **loop)(params, ids)
    for name in ("mean", "mean_square"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), got[name], want[name])


def test_next_tokens_are_compared_and_not_scattered():
    """Every row has an index of its own: XLA makes a comparison of such a scatter. And the last position is left out."""
    params, ids = drawn()
    program = jax.make_jaxpr(per_example.grad_statistics(next_token_loss))(params, ids).jaxpr
    into_logits = [
        e for e in everywhere(program) if e.primitive.name == "scatter-add" and e.outvars[0].aval.shape == (5, 7, 11)
    ]
    assert len(into_logits) == 1
    assert into_logits[0].params["dimension_numbers"].update_window_dims == ()
    products = [e for e in everywhere(program) if e.primitive.name == "dot_general"]
    of_head = [e for e in products if e.outvars[0].aval.shape == (6, 11)]
    assert of_head and all(e.invars[0].aval.shape == (7, 6) for e in of_head)  # nor is there an axis of size one


def test_products_do_not_sum_over_axes_of_size_one():
    """The operands of a gradient are the values that other equations use, so that XLA need not make them twice."""
    params, ids = drawn()
    program = jaxprs.inline(jax.make_jaxpr(jax.grad(next_token_loss))(params, ids[:1]))
    rewritten = rewrites.rewrite(program, [False] * 3 + [True], range(3))
    products = {e.outvars[0].aval.shape: e for e in rewritten.jaxpr.eqns if e.primitive.name == "dot_general"}
    assert products[6, 11].params["dimension_numbers"] == (((0,), (0,)), ((), ()))
    uses = [e for e in rewritten.jaxpr.eqns if products[6, 11].invars[1] in e.invars]
    assert sorted(e.primitive.name for e in uses) == ["dot_general", "pad"]  # the latter for the layers before
