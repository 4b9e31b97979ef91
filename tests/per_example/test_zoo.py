"""Every loss of the zoo against a plain loop over single examples, and what is held of its gradients."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x import per_example, zoo
from perex_t5x.per_example.statistic import canonical
from tests.per_example.loop_reference import SOME, assert_matches, clipped, grouped, norms, single_gradients
from tests.per_example.test_memory import largest

NAMES = ("mean", "mean_square", "mean_sign")
# Cases whose arithmetic is coarser than float32's: what the gradients are rounded to while they are formed.
COARSE = {"mixed_precision_net": 2e-2}


def loop(case):
    """The gradients of single examples, in order."""
    loss = (lambda *arguments: case.loss(*arguments)[0]) if case.options.get("has_aux") else case.loss
    key = case.extra[0] if case.extra else None
    return single_gradients(loss, case.params, case.batch, key=key)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_against_the_loop(name):
    case = zoo.make(name)
    statistics = per_example.grad_statistics(case.loss, NAMES, norms=True, **case.options)

    @jax.jit  # one compilation for both
    def compute(*arguments):
        value = case.loss(*arguments)
        return statistics(*arguments), value[0] if case.options.get("has_aux") else value

    (stats, per_unit), batch_loss = compute(case.params, case.batch, *case.extra)
    gradients, rtol = loop(case), COARSE.get(name, 2e-5)
    assert_matches(stats, gradients, canonical(NAMES), rtol=rtol)
    np.testing.assert_allclose(per_unit.norms, norms(gradients), rtol=rtol)
    # The case itself: examples whose gradients differ, and a loss that is the mean over them, which the benchmark's plain
    # gradient rests on. (A key for each example is not one key for all.)
    square = np.mean(np.square(norms(gradients)))
    of_mean = norms([jax.tree.map(lambda *g: sum(g) / len(g), *gradients)])[0] ** 2
    assert case.examples == len(gradients) > 2 and square > 1.001 * of_mean > 0
    if not case.extra:
        np.testing.assert_allclose(per_unit.values.mean(), batch_loss, rtol=rtol)


@pytest.mark.slow
def test_large_cases_are_the_same_losses():
    """Abstractly: same parameters' names, larger shapes, a scalar loss."""
    for name in zoo.NAMES:
        tiny, large = zoo.make(name), zoo.make(name, large=True)
        out = jax.eval_shape(large.loss, large.params, large.batch, *large.extra)
        assert (out[0] if large.options.get("has_aux") else out).shape == ()
        size = lambda case: sum(x.size for x in jax.tree.leaves((case.params, case.batch)))  # noqa: E731
        assert size(large) > 10 * size(tiny), name


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_option_against_the_loop(name):
    """Clipping with weights; groups, in microbatches; statistics with φ(0) ≠ 0 and with operands."""
    case = zoo.make(name)
    gradients, rtol = loop(case), COARSE.get(name, 5e-5)
    limit, weights = float(np.median(norms(gradients))), jnp.array([1.0, 0.0, 2.0, 0.5])
    operand = jax.tree.map(lambda g: jnp.asarray(0.5 * g, jnp.float32), gradients[0])
    beyond = per_example.Statistic("beyond", lambda g, m: jnp.square(g - m), operands=("momentum",))
    options = {"norms": True, **case.options}
    clipping = per_example.grad_statistics(case.loss, SOME, clip_norm=limit, **options)
    groups = per_example.grad_statistics(case.loss, SOME, group_size=2, microbatch_size=2, **options)
    seeing = per_example.grad_statistics(case.loss, ("mean", beyond), **options)

    @jax.jit
    def compute(operand, *arguments):
        results = clipping(*arguments, weights=weights), groups(*arguments)
        return *results, seeing(*arguments, operands={"momentum": operand})

    (clip_stats, clip_aux), (group_stats, group_aux), (seen, _) = compute(operand, case.params, case.batch, *case.extra)
    assert_matches(clip_stats, clipped(gradients, limit), SOME, weights=weights, rtol=rtol)
    np.testing.assert_allclose(clip_aux.norms[jnp.array([0, 2, 3])], np.array(norms(gradients))[[0, 2, 3]], rtol=rtol)
    pairs = grouped(gradients, 2)
    assert_matches(group_stats, pairs, SOME, rtol=rtol)
    np.testing.assert_allclose(group_aux.norms, norms(pairs), rtol=rtol)
    gaps = [jax.tree.map(lambda g, m: np.square(g - m), g, operand) for g in gradients]
    top = max(np.max(x) for g in gaps for x in jax.tree.leaves(g))
    for actual, *single in zip(jax.tree.leaves(seen["beyond"]), *map(jax.tree.leaves, gaps), strict=True):
        np.testing.assert_allclose(actual, np.mean(single, axis=0), rtol=1e-3, atol=10 * rtol * top)


def bytes_of_arrays(text):
    """Bytes of the largest array in the text of a compiled program."""
    sizes = {"f64": 8, "s64": 8, "u64": 8, "c64": 8, "c128": 16, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2}
    found = re.findall(r"\b(f64|s64|u64|c64|c128|f32|s32|u32|bf16|f16)\[([\d,]+)\]", text)
    return max(sizes[dtype] * math.prod(map(int, shape.split(","))) for dtype, shape in found)


def of_program(function, case):
    """Bytes of the largest value anywhere in a program, as it is traced."""
    return largest(jax.make_jaxpr(function)(case.params, case.batch, *case.extra).jaxpr)


def of_compiled_program(function, case):
    return bytes_of_arrays(jax.jit(function).lower(case.params, case.batch, *case.extra).compile().as_text())


def assert_coverage_is_true(name, size_of):
    """Nothing is larger than twice the largest array of the plain gradient's program, than two parameters, or than what
    coverage says is held. (Rows of two lookups in one table are put together: twice.)"""
    case = zoo.make(name, large=True)
    loss = (lambda *arguments: case.loss(*arguments)[0]) if case.options.get("has_aux") else case.loss
    options = {"strict": True, **case.options}
    rows = per_example.coverage(case.loss, case.params, case.batch, *case.extra, **options)
    said = max(row.transient_bytes for row in rows)
    parameter = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(case.params))
    plain = size_of(jax.value_and_grad(loss), case)
    mine = size_of(per_example.grad_statistics(case.loss, **options), case)
    assert mine <= max(2 * plain, 2 * parameter, said)


SURGERY = [name for name in zoo.NAMES if "method" not in zoo.make(name).options]


# Filters are reduced differently by platform, and a traced program has all of them.
@pytest.mark.parametrize("name", [name for name in SURGERY if not name.startswith(("conv", "resnet"))])
def test_what_coverage_says_is_true_of_the_program(name):
    assert_coverage_is_true(name, of_program)


@pytest.mark.slow
@pytest.mark.parametrize("name", SURGERY)
def test_what_coverage_says_is_true_of_the_compiled_program(name):
    assert_coverage_is_true(name, of_compiled_program)
