"""microbatch_size='auto': what is picked, for which platform, and that it changes no number."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import per_example
from perex_t5x.per_example.engine import microbatch
from perex_t5x.per_example.engine.microbatch import matmul_flops, peak_bytes
from tests.per_example.loop_reference import SOME, assert_matches, single_gradients


def rows(p, x):
    return jnp.sum(jnp.tanh(x @ p))


def test_the_model_of_the_cost():
    x, w = jnp.ones((1, 10, 4)), jnp.ones((4, 6))
    program = jax.make_jaxpr(jax.grad(rows))(w, x)
    assert matmul_flops(program.jaxpr) == 2 * 2 * 10 * 4 * 6  # x @ w, and its transpose for w alone

    def layers(p, x):
        return jnp.sum(jax.lax.scan(lambda h, w: (h @ w, None), x, p)[0])

    scanned = jax.make_jaxpr(layers)(jnp.ones((5, 4, 4)), x)
    assert matmul_flops(scanned.jaxpr) == 5 * 2 * 10 * 4 * 4
    assert peak_bytes(jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(x)))(x).jaxpr) == 2 * 40 * 4  # both alive at once
    conv = jax.make_jaxpr(lambda k, x: jax.lax.conv(x, k, (1, 1), "SAME"))(
        jnp.ones((8, 3, 3, 3)), jnp.ones((1, 3, 5, 5))
    )
    assert matmul_flops(conv.jaxpr) == 2 * (8 * 5 * 5) * (3 * 3 * 3)


@pytest.mark.parametrize(
    ("length", "width", "cpu"),
    [
        (1, 64, 32),
        (2048, 256, 1),
        (512, 256, 4),
    ],  # thin rows: all; long rows: one; in between: as many as make 1024 rows
)
def test_what_is_picked_on_a_cpu(length, width, cpu):
    table = per_example.coverage(
        rows, jax.ShapeDtypeStruct((width, width), jnp.float32), jax.ShapeDtypeStruct((32, length, width), jnp.float32),
        microbatch_size="auto",
    )  # fmt: skip
    assert table.microbatch_sizes == {"cpu": cpu, "default": 32}
    assert f"examples at a time: {cpu} on cpu, else 32" in str(table)


def test_activations_bound_the_size_elsewhere(monkeypatch):
    w, x = jnp.ones((16, 16)), jnp.ones((12, 8, 16))
    one = peak_bytes(jax.make_jaxpr(jax.value_and_grad(rows))(w, x[:1]).jaxpr)
    monkeypatch.setattr(microbatch, "ACTIVATION_BYTES", 5 * one)
    size = per_example.coverage(rows, w, x, microbatch_size="auto").microbatch_sizes["default"]
    assert size in (3, 4)  # at most 5, and divides 12; the engine's program is a little larger than this one


@pytest.mark.parametrize("group_size", [1, 2])
def test_it_changes_no_number_and_says_what_it_picked(monkeypatch, caplog, group_size):
    monkeypatch.setattr(microbatch, "CPU_FLOPS", 0)
    monkeypatch.setattr(microbatch, "CPU_ROWS", 0)
    w, x = jax.random.normal(jax.random.key(0), (4, 6)), jax.random.normal(jax.random.key(1), (8, 3, 4))
    compute = per_example.grad_statistics(rows, SOME, microbatch_size="auto", group_size=group_size, norms=True)
    with caplog.at_level(logging.INFO):
        stats, aux = jax.jit(compute)(w, x)
        jax.jit(lambda w, x: compute(w, x))(w, x)
    picked = {"cpu": group_size, "default": 8}
    assert [r.getMessage() for r in caplog.records if "auto" in r.getMessage()] == [  # once: it is remembered
        f"microbatch_size='auto': examples at a time: {picked}"
    ]
    gradients = single_gradients(rows, w, x)
    groups = [sum(gradients[i : i + group_size]) / group_size for i in range(0, 8, group_size)]
    assert_matches(stats, groups, SOME)
    assert aux.values.shape == (8,) and np.isfinite(aux.norms).all()
    for size, same in (("auto", False), (None, True)):
        traced = jax.jit(per_example.grad_statistics(rows, microbatch_size=size, group_size=group_size)).trace(w, x)
        cpu, tpu = (traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "tpu"))
        assert (cpu == tpu) == same


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="microbatch_size = 'automatic': must be a whole number, None or 'auto'"):
        per_example.grad_statistics(rows, microbatch_size="automatic")
