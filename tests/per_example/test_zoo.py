"""Every loss of the zoo against a plain loop over single examples, all at once and in microbatches."""

import jax
import numpy as np
import pytest

from perex_t5x import per_example, zoo
from perex_t5x.per_example.statistic import canonical
from tests.per_example.loop_reference import assert_matches, norms, single_gradients

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
    whole, parts = (
        per_example.grad_statistics(case.loss, NAMES, norms=True, microbatch_size=size, **case.options)
        for size in (None, 2)
    )

    @jax.jit  # one compilation for all
    def compute(*arguments):
        value = case.loss(*arguments)
        return (whole(*arguments), parts(*arguments)), value[0] if case.options.get("has_aux") else value

    results, batch_loss = compute(case.params, case.batch, *case.extra)
    gradients, rtol = loop(case), COARSE.get(name, 2e-5)
    for stats, per_unit in results:
        assert_matches(stats, gradients, canonical(NAMES), rtol=rtol)
        np.testing.assert_allclose(per_unit.norms, norms(gradients), rtol=rtol)
    # The case itself: examples whose gradients differ, and a loss that is the mean over them, which the benchmark's plain
    # gradient rests on. (A key for each example is not one key for all.)
    square = np.mean(np.square(norms(gradients)))
    of_mean = norms([jax.tree.map(lambda *g: sum(g) / len(g), *gradients)])[0] ** 2
    assert case.examples == len(gradients) > 2 and square > 1.001 * of_mean > 0
    if not case.extra:
        np.testing.assert_allclose(results[0][1].values.mean(), batch_loss, rtol=rtol)


def test_large_cases_are_the_same_losses():
    """Abstractly: same parameters' names, larger shapes, a scalar loss."""
    for name in zoo.NAMES:
        tiny, large = zoo.make(name), zoo.make(name, large=True)
        out = jax.eval_shape(large.loss, large.params, large.batch, *large.extra)
        assert (out[0] if large.options.get("has_aux") else out).shape == ()
        size = lambda case: sum(x.size for x in jax.tree.leaves((case.params, case.batch)))  # noqa: E731
        assert size(large) > 10 * size(tiny), name
