"""Sums over eight devices, sent narrow: what is rounded, and that nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from perex_t5x.hardware.hlo.program import Program
from perex_t5x.per_example import collectives

DEVICES = 8
ROUNDOFF = 2.0**-9  # of bfloat16
VALUES = np.random.default_rng(0).normal(size=(DEVICES, 16, 3)).astype(np.float32)


def compiled(function):
    mesh = Mesh(np.asarray(jax.devices()[:DEVICES]), ("data",))
    mapped = jax.shard_map(lambda x: function(x[0])[None], mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return jax.jit(mapped).lower(VALUES).compile()


def error_of(sums, addends=VALUES):
    return np.max(np.abs(sums - np.sum(addends.astype(np.float64), axis=0)) / np.sum(np.abs(addends), axis=0))


@pytest.mark.parametrize(
    ("exact", "stages", "roundings", "kind"),
    [
        (8, (), 1, "all-to-all"),
        (8, (2, 4), 2, "all-to-all"),
        (4, (), DEVICES, "reduce-scatter"),
        (2, (2, 4), 1 + 4, "reduce-scatter"),  # exact along the short dimension alone
    ],
)
def test_narrow_scatter(monkeypatch, exact, stages, roundings, kind):
    """Every rounding is at most u times the sum of magnitudes; the additions of an all-to-all are exact."""
    monkeypatch.setattr(collectives, "EXACT_DEVICES", exact)
    program = compiled(lambda x: collectives.scatter_over(x, ("data",), 0, jnp.bfloat16, stages))
    parts = np.asarray(program(VALUES))
    assert parts.dtype == np.float32
    if stages:  # a device's number in digits: its part is the one of its own number all the same
        np.testing.assert_allclose(parts, np.sum(VALUES, axis=0).reshape(parts.shape), atol=0.2)
    error = error_of(parts.reshape(16, 3))
    assert ROUNDOFF / 100 < error < 1.01 * roundings * ROUNDOFF
    if roundings == 1:  # equal, to float32's rounding, to the sum of rounded addends
        assert error_of(parts.reshape(16, 3), VALUES.astype(jnp.bfloat16).astype(np.float32)) < 1e-6
    assert kind in {c.kind for c in Program(program.as_text()).collectives()}


def test_wide_scatter_in_stages_is_one_scatter():
    parts = compiled(lambda x: collectives.scatter_over(x, ("data",), 0, None, (2, 4)))(VALUES)
    assert error_of(np.asarray(parts).reshape(16, 3)) < 1e-6


@pytest.mark.parametrize("exact", [8, 4])
def test_narrow_sum(monkeypatch, exact):
    """A sum is a scatter and a gather: one rounding more. Integers and scalars travel as they are."""
    monkeypatch.setattr(collectives, "EXACT_DEVICES", exact)
    sums = compiled(lambda x: collectives.sum_over(x, ("data",), jnp.bfloat16))(VALUES)
    assert error_of(np.asarray(sums)[3]) < 1.01 * (2 if exact == 8 else DEVICES + 1) * ROUNDOFF
    counts = compiled(lambda x: collectives.sum_over((x > 0).astype(jnp.int32), ("data",), jnp.bfloat16))(VALUES)
    np.testing.assert_array_equal(np.asarray(counts)[5], np.sum(VALUES > 0, axis=0))
    scalars = compiled(lambda x: collectives.sum_over(x[0, 0], ("data",), jnp.bfloat16))(VALUES)
    np.testing.assert_allclose(np.asarray(scalars), np.sum(VALUES[:, 0, 0], dtype=np.float32), rtol=1e-6)
