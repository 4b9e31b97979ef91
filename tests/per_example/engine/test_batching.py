"""Equations applied to all examples at once: as `jax.vmap` does it, whichever of their arguments have an example axis."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from perex_t5x.per_example.engine import batching, jaxprs

N = 3
PROGRAMS = {
    "elementwise": (lambda x, y: jnp.exp(x) * y - 2.0, (4, 5), (4, 5)),
    "broadcast by size one": (lambda x, y: jax.lax.mul(x, y), (4, 5), (4, 1)),
    "an array and a scalar": (lambda x, y: jax.lax.mul(x, y), (4, 5), ()),
    "scalars": (lambda x, y: x * y + 1.0, (), ()),
    "selection": (lambda x, y: jnp.where(x > 0, y, -1.0), (4, 5), (4, 5)),
    "selection by a scalar": (lambda x, y: jax.lax.select(x > 0, y, 2 * y), (), (4, 5)),
    "selection of scalars": (lambda x, y: jax.lax.select(x > 0, y, jnp.float32(7)), (), ()),
    "clamp": (lambda x, y: jax.lax.clamp(jnp.float32(-0.1), x, y), (4, 5), ()),
    "sums of gradients": (lambda x, y: jax.grad(lambda z: jnp.sum(z * y) + jnp.sum(z * x))(x), (4, 5), (4, 5)),
    "sums of scalars' gradients": (lambda x, y: jax.grad(lambda z: z * y + jnp.sin(z))(x), (), ()),
    "shapes": (lambda x, y: jnp.broadcast_to(x.reshape(1, 20, 1)[0].T, (2, 1, 20)) + y, (4, 5), (2, 1, 20)),
    "reductions": (lambda x, y: jnp.sum(x, (0, 2)) + jnp.max(y, 1) + jnp.prod(y, 1), (4, 5, 2), (5, 4)),
    "slices": (lambda x, y: x[1:, ::2] + y[:, :-1], (4, 5), (3, 4)),
    "slices of scalars": (lambda x, y: jax.lax.slice(x, (), (), ()) * y, (), ()),
    "padding": (lambda x, y: jax.lax.pad(x, y, [(1, 0, 0), (0, 2, 1)]), (4, 5), ()),
    "product": (lambda x, y: x @ y, (4, 5), (5, 2)),
    "product of several axes": (lambda x, y: jnp.einsum("abc,cda->db", x, y), (2, 3, 4), (4, 5, 2)),
    "batched product": (lambda x, y: jnp.einsum("btd,bsd->bts", x, y), (2, 3, 4), (2, 5, 4)),
    "no rule here": (lambda x, y: jnp.sort(x, axis=0) + jnp.cumsum(y, axis=1), (4, 5), (4, 5)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_vmap(name):
    fn, *shapes = PROGRAMS[name]
    program = jaxprs.inline(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)))
    rng = np.random.default_rng(0)
    for batched in itertools.product((True, False), repeat=2):
        if not any(batched):
            continue
        values = [
            jnp.asarray(rng.normal(size=(N, *s) if b else s), jnp.float32) for s, b in zip(shapes, batched, strict=True)
        ]
        env = {v: (x, b) for v, x, b in zip(program.jaxpr.invars, values, batched, strict=True)}
        env |= {v: (c, False) for v, c in zip(program.jaxpr.constvars, program.consts, strict=True)}
        for eqn in program.jaxpr.eqns:
            arguments, flags = zip(
                *((v.val, False) if isinstance(v, core.Literal) else env[v] for v in eqn.invars), strict=True
            )
            if any(flags):
                outs, out_flags = batching.bind_batched(eqn, arguments, flags)
            else:
                outs, out_flags = jaxprs.bind(eqn, arguments), [False] * len(eqn.outvars)
            env.update((v, (x, f)) for v, x, f in zip(eqn.outvars, outs, out_flags, strict=True))
            for v, x, f in zip(eqn.outvars, outs, out_flags, strict=True):
                assert x.shape == ((N, *v.aval.shape) if f else v.aval.shape) and x.dtype == v.aval.dtype
        got, has_axis = env[program.jaxpr.outvars[0]]
        assert has_axis
        want = jax.vmap(fn, in_axes=tuple(0 if b else None for b in batched))(*values)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_common_equations_need_no_vmap(monkeypatch):
    """Else a program takes much longer to trace."""
    program = jaxprs.inline(jax.make_jaxpr(PROGRAMS["reductions"][0])(jnp.ones((4, 5, 2)), jnp.ones((5, 4))))
    monkeypatch.setattr(jax, "vmap", None)
    ones = {v: jnp.ones((N, *v.aval.shape)) for eqn in program.jaxpr.eqns for v in eqn.invars}
    for eqn in program.jaxpr.eqns:
        batching.bind_batched(eqn, [ones[v] for v in eqn.invars], [True] * len(eqn.invars))
