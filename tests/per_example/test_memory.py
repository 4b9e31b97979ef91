"""No intermediate of the engine's program is larger than the largest of the plain gradient's; vmap's are."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from perex_t5x import per_example
from perex_t5x.models import DecoderOnlyModel, DecoderWrapper, T5Config

EXAMPLES, LENGTH, WIDTH = 8, 12, 64  # LENGTH < WIDTH / 4


def largest(jaxpr) -> int:
    """Bytes of the largest value anywhere in a program, inner programs included."""
    sizes = [0]
    for eqn in jaxpr.eqns:
        sizes += [int(np.prod(v.aval.shape)) * v.aval.dtype.itemsize for v in eqn.outvars if hasattr(v.aval, "dtype")]
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                if hasattr(inner, "jaxpr"):
                    sizes.append(largest(inner.jaxpr))
                elif hasattr(inner, "eqns"):
                    sizes.append(largest(inner))
    return max(sizes)


def decoder(scanned, remat, tied):
    config = T5Config(
        vocab_size=512,
        emb_dim=WIDTH,
        num_heads=4,
        head_dim=16,
        mlp_dim=256,
        num_decoder_layers=3,
        mlp_activations=("silu", "linear"),
        logits_via_embedding=tied,
        scan_layers=scanned,
        remat_policy=remat,
    )
    model = DecoderOnlyModel(DecoderWrapper(config), None, optax.sgd)
    inputs = {"decoder_input_tokens": (1, LENGTH)}
    params = jax.eval_shape(lambda: nn.meta.unbox(model.get_initial_variables(jax.random.key(0), inputs)["params"]))
    names = ("decoder_input_tokens", "decoder_target_tokens")
    batch = {name: jax.ShapeDtypeStruct((EXAMPLES, LENGTH), jnp.int32) for name in names}
    return lambda p, b: model.loss_fn(p, b, None, 10.0)[0], params, batch


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scanned,remat", [(True, "full"), (False, "none"), (False, "full")])
def test_nothing_is_larger_than_in_the_plain_program(scanned, remat, tied):
    loss, params, batch = decoder(scanned, remat, tied)
    plain = largest(jax.make_jaxpr(jax.value_and_grad(loss))(params, batch).jaxpr)
    options = {"reduction": "sum", "norms": True}
    surgery = largest(jax.make_jaxpr(per_example.grad_statistics(loss, **options))(params, batch).jaxpr)
    vmap = largest(jax.make_jaxpr(per_example.grad_statistics(loss, method="vmap", **options))(params, batch).jaxpr)
    assert surgery <= plain
    assert vmap > 4 * plain  # the test can fail


def test_coverage_names_the_forms():
    loss, params, batch = decoder(True, "full", False)
    rows = {row.parameter: row for row in per_example.coverage(loss, params, batch)}
    assert rows["token_embedder/embedding"].reduction == "sparse"
    assert rows["decoder/layers/mlp/wi_0/kernel"].reduction == "one at a time"
    assert rows["decoder/layers/mlp/wi_0/kernel"].transient_bytes == 4 * 64 * 256  # one example's, of one layer
    assert rows["decoder/decoder_norm/scale"].reduction == "all at once"
    assert "materialised" not in {row.reduction for row in rows.values()}
    text = str(per_example.coverage(loss, params, batch))
    assert text.splitlines()[0].split() == ["parameter", "shape", "reduction", "exact", "transient", "bytes", "note"]


def test_parameters_that_are_constrained_to_a_sharding_are_reduced_as_others():
    """As Flax's models under logical axis rules have them: the last equation of each gradient is a constraint."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))

    def loss(p, b, constrained=True):
        if constrained:
            p = jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, sharding), p)
        x = [jax.nn.one_hot(b[name], len(p["table"])) @ p["table"] for name in ("inputs", "targets")]
        return jnp.sum(jnp.tanh((x[0] + x[1]) @ p["w"]) ** 2)

    keys = jax.random.split(jax.random.key(0), 4)
    params = {"table": jax.random.normal(keys[0], (192, 16)), "w": jax.random.normal(keys[1], (16, 64))}
    batch = {name: jax.random.randint(keys[k], (8, 5), 0, 192) for k, name in ((2, "inputs"), (3, "targets"))}
    plain = functools.partial(loss, constrained=False)
    found = [{row.parameter: row.reduction for row in per_example.coverage(f, params, batch)} for f in (loss, plain)]
    assert found[0] == found[1] == {"table": "sparse", "w": found[1]["w"]} and found[1]["w"] != "materialised"
    results = [jax.jit(per_example.grad_statistics(f))(params, batch)[0].averages for f in (loss, plain)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)
