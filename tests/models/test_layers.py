"""Layers in both of their forms: as CPUs and as TPUs compute them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x.models import layers
from tests.models.model_support import as_for_tpu, config, jit


@pytest.mark.parametrize("make", [layers.RMSNorm, layers.MlpBlock])
def test_the_form_for_tpus_rounds_no_worse(make, monkeypatch):
    """In bfloat16, against float64: results and gradients."""
    draw = np.random.default_rng(0)
    x, cotangent = (draw.normal(size=(4, 33, 16)) * np.exp(draw.normal(size=(4, 33, 1))) for _ in range(2))
    x, cotangent = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (x, cotangent))

    def run(dtype):
        cfg = config(dtype=dtype, mlp_activations=("silu", "linear"))
        module = make(cfg)
        extra = () if make is layers.RMSNorm else (None,)
        shapes = jax.eval_shape(module.init, jax.random.key(0), x, *extra)["params"]
        values = np.random.default_rng(1)
        params = jax.tree.map(lambda leaf: 1 + 0.3 * values.normal(size=leaf.shape), shapes)
        params = jax.tree.map(lambda p: jnp.asarray(p, jnp.promote_types(dtype, jnp.float32)), params)

        def apply(params, x):
            carried = (layers.carried_rms(x, cfg),) if make is layers.RMSNorm else extra
            return module.apply({"params": params}, x, *carried)

        def both(params, x, cotangent):
            y, vjp = jax.vjp(apply, params, x)
            return y, vjp(cotangent.astype(y.dtype))

        result = jit(both)(params, jnp.asarray(x, dtype), jnp.asarray(cotangent, dtype))
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(result)]

    with jax.enable_x64(True):
        exact = run("float64")
    on_cpu = run("bfloat16")
    as_for_tpu(monkeypatch)
    on_tpu = run("bfloat16")
    for reference, old, new in zip(exact, on_cpu, on_tpu, strict=True):
        errors = [np.sqrt(np.mean((value - reference) ** 2)) for value in (old, new)]
        assert 0 < errors[1] <= 1.05 * errors[0], errors
