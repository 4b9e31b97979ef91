"""Transposes after the product that a gradient comes from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import per_example
from perex_t5x.per_example.engine import jaxprs
from perex_t5x.per_example.engine.rewrites import rewrite

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(12, 4)).astype(np.float32)
IDS = RNG.integers(0, 12, (5, 3)).astype(np.int32)


def loss_of(num_transposes, tied):
    """A table that is transposed this often on its way to a product, and perhaps looked up as well."""

    def loss(p, ids_BxT):
        table = p["table"]
        for _ in range(num_transposes):
            table = jnp.transpose(table)
        x = p["table" if tied else "x"][ids_BxT]
        subscripts = "btd,vd->btv" if num_transposes % 2 == 0 else "btd,dv->btv"
        logits = jnp.einsum(subscripts, x, table, precision="highest")
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)

    return loss


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_transposes", [0, 1, 2, 3])
def test_transposes_after_a_product(num_transposes, tied):
    loss, params = loss_of(num_transposes, tied), {"table": TABLE, "x": TABLE + 1}
    program = jaxprs.inline(jax.make_jaxpr(lambda w, ids: jax.grad(loss)({**params, "table": w}, ids))(TABLE, IDS[:1]))
    before, after = (
        sum(e.primitive.name == "transpose" and e.outvars[0].aval.size == TABLE.size for e in p.jaxpr.eqns)
        for p in (program, rewrite(program, (False, True), (0,)))
    )
    # What is left is the table's own, on its way to the product.
    assert after == num_transposes and before >= num_transposes
    if num_transposes == 1:
        assert before == 3  # of the gradient, two: the test can fail
    statistics, same = (
        per_example.grad_statistics(loss, ("mean", "mean_square"), method=m, norms=True)(params, IDS)
        for m in ("surgery", "loop")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), statistics, same)
