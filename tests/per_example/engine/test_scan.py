"""Scans that stack into unfilled memory are scans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from perex_t5x.per_example.engine.scan import scan as engine_scan


def _step(carry, x):
    a, b = carry
    new = (a * 1.5 + x["u"], b + 1)
    return new, {"a": a[:2], "nothing": None, "both": [x["u"] * b, new[0].astype(jnp.bfloat16)]}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("check_vma", [False, True])
def test_gives_what_lax_scan_gives(reverse, unroll, check_vma):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    options = {"length": 5, "reverse": reverse, "unroll": unroll}
    carry, xs = (jnp.arange(8.0), jnp.int32(3)), {"u": jnp.linspace(-1, 1, 40).reshape(5, 8)}
    place = ((P("data"), P()), {"u": P(None, "data")})

    def run(scan, seen):
        def local(carry, xs):
            (a, _), ys = scan(_step, carry, xs, **options)
            return a, ys["a"], ys["both"]

        local = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=place,
            out_specs=(P("data"), P(None, "data"), P(None, "data")),
            check_vma=check_vma,
        )
        seen.append(str(jax.make_jaxpr(local)(carry, xs)))
        return jax.jit(local)(carry, xs)

    ours, theirs = [], []
    jax.tree.map(np.testing.assert_array_equal, run(engine_scan, ours), run(jax.lax.scan, theirs))
    assert " empty[" in ours[0] and " empty[" not in theirs[0]


def test_is_a_plain_scan_where_the_compiler_divides_arrays():
    """The compiler would give every device the whole of unfilled memory."""
    options = {"length": 5, "reverse": False, "unroll": 1}
    arguments = (jnp.arange(8.0), jnp.int32(3)), {"u": jnp.ones((5, 8))}
    outside = jax.make_jaxpr(lambda c, xs: engine_scan(_step, c, xs, **options))(*arguments)
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    some = jax.shard_map(
        lambda c, xs: engine_scan(_step, c, xs, **options)[0][0],
        mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    with jax.set_mesh(mesh):
        inside = jax.make_jaxpr(some)(*arguments)
    for program in (outside, inside):
        assert " scan[" in str(program) and " empty[" not in str(program)
