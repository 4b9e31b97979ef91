"""Gradients of filters: by products of windows in programs for CPUs, one example at a time, and the loop's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from perex_t5x import per_example
from tests.per_example.loop_reference import SOME, STATISTICS, assert_matches, norms, single_gradients
from tests.per_example.test_memory import largest

N = 4
LAST = ("NHWC", "HWIO", "NHWC")
FIRST = ("NCHW", "OIHW", "NCHW")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def convolution(image, filter_shape, stride, padding, numbers=LAST, **options):
    """A loss with one convolution, its filter and a batch of images."""

    def loss(p, x):
        h = jax.lax.conv_general_dilated(x, p["w"], stride, padding, dimension_numbers=numbers, **options)
        return jnp.mean(jnp.sin(h))

    return loss, {"w": 0.3 * normal(0, *filter_shape)}, normal(1, N, *image)


def used_twice():
    """One filter in two layers: its gradient is a sum of two convolutions."""

    def loss(p, x):
        for stride in ((1, 1), (2, 1)):
            x = jnp.tanh(jax.lax.conv_general_dilated(x, p["w"], stride, "SAME", dimension_numbers=LAST))
        return jnp.mean(x**2)

    return loss, {"w": 0.3 * normal(0, 3, 3, 2, 2)}, normal(1, N, 6, 6, 2)


def in_layers():
    """Filters of stacked layers, rematerialised."""

    def loss(p, x):
        def layer(x, w):
            return jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAST)), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, p["w"])[0] ** 2)

    return loss, {"w": 0.3 * normal(0, 2, 3, 3, 2, 2)}, normal(1, N, 6, 6, 2)


def transposed(image, filter_shape):
    def loss(p, x):
        return jnp.mean(jnp.sin(jax.lax.conv_transpose(x, p["w"], (2, 2), "SAME", dimension_numbers=LAST)))

    return loss, {"w": 0.3 * normal(0, *filter_shape)}, normal(1, N, *image)


CASES = {
    "same": lambda: convolution((6, 7, 2), (3, 2, 2, 3), (1, 1), "SAME"),
    "strides": lambda: convolution((8, 7, 2), (3, 3, 2, 3), (2, 3), "SAME"),
    "valid": lambda: convolution((8, 7, 2), (3, 3, 2, 3), (2, 1), "VALID"),
    "channels_first": lambda: convolution((2, 7, 6), (3, 2, 3, 3), (1, 2), [(2, 1), (0, 3)], FIRST),
    "dilated": lambda: convolution((11, 9, 2), (3, 3, 2, 2), (1, 2), "SAME", rhs_dilation=(2, 3)),
    "dilated_image": lambda: convolution((5, 6, 2), (3, 3, 2, 2), (1, 1), [(2, 2), (1, 2)], lhs_dilation=(2, 3)),
    "transposed": lambda: transposed((5, 6, 2), (3, 3, 2, 3)),
    "negative_padding": lambda: convolution((9, 8, 2), (3, 2, 2, 2), (1, 1), [(-1, 0), (-2, -1)]),
    "one_by_one": lambda: convolution((5, 4, 3), (1, 1, 3, 2), (2, 1), "SAME"),
    "patches": lambda: convolution((8, 8, 2), (4, 4, 2, 3), (4, 4), "VALID"),
    "causal": lambda: convolution((9, 3), (4, 3, 2), (1,), [(3, 0)], ("NWC", "WIO", "NWC")),
    "volumes": lambda: convolution((4, 5, 4, 2), (2, 3, 2, 2, 2), (1, 2, 1), "SAME", ("NDHWC", "DHWIO", "NDHWC")),
    "groups": lambda: convolution((6, 5, 4), (3, 3, 2, 6), (1, 1), "SAME", feature_group_count=2),
    "groups_first": lambda: convolution((4, 5, 5), (6, 2, 3, 3), (2, 1), "SAME", FIRST, feature_group_count=2),
    "depthwise": lambda: convolution((6, 5, 4), (3, 3, 1, 4), (1, 2), "SAME", feature_group_count=4),
    "depthwise_twofold": lambda: convolution((6, 5, 3), (3, 3, 1, 6), (1, 1), "SAME", feature_group_count=3),
    "larger_than_its_image": lambda: convolution((3, 3, 7), (3, 3, 7, 8), (1, 1), "SAME"),
    "used_twice": used_twice,
    "in_layers": in_layers,
}


@pytest.mark.parametrize("name", CASES)
def test_filters(name):
    loss, params, x = CASES[name]()
    (row,) = per_example.coverage(loss, params, x, strict=True)
    assert row.reduction == "one at a time"
    stats, aux = jax.jit(per_example.grad_statistics(loss, STATISTICS, norms=True))(params, x)
    gradients = single_gradients(loss, params, x)
    assert_matches(stats, gradients, STATISTICS)
    np.testing.assert_allclose(aux.norms, norms(gradients), rtol=1e-5)


@pytest.mark.parametrize("strategy", ["gradients", "factors", "two passes"])
@pytest.mark.parametrize("name", ["strides", "groups", "used_twice"])
def test_filters_with_weights_clipping_and_microbatches(name, strategy):
    loss, params, x = CASES[name]()
    weights = jnp.array([0.5, 0.0, 2.0, 1.0])
    limit = float(np.median(norms(single_gradients(loss, params, x))))
    results = []
    for method, options in (("surgery", {"clip_strategy": strategy}), ("loop", {})):
        compute = per_example.grad_statistics(
            loss, SOME, method=method, microbatch_size=2, clip_norm=limit, norms=True, **options
        )
        results.append(jax.jit(lambda p, b, c=compute: c(p, b, weights=weights))(params, x))
    for a, e in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, e, atol=2e-5 * max(float(jnp.max(jnp.abs(e))), 1e-3), rtol=0)


def test_filters_with_operands():
    loss, params, x = CASES["strides"]()
    step = per_example.Statistic("step", lambda g, m: jnp.tanh(m + 100 * g), operands=("momentum",))
    momentum = {"w": 0.1 * normal(9, *params["w"].shape)}
    stats, _ = per_example.grad_statistics(loss, ("mean", step))(params, x, operands={"momentum": momentum})
    gradients = single_gradients(loss, params, x)
    expected = np.mean([np.tanh(np.asarray(momentum["w"]) + 100 * g["w"]) for g in gradients], axis=0)
    np.testing.assert_allclose(stats["step"]["w"], expected, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_types(dtype):
    for name in ("strides", "depthwise"):
        loss, params, x = CASES[name]()
        params, x = jax.tree.map(lambda v: v.astype(dtype), (params, x))
        stats, _ = jax.jit(per_example.grad_statistics(loss, SOME))(params, x)
        assert_matches(stats, single_gradients(loss, params, x), SOME, rtol=3e-2)


def test_other_platforms_keep_the_convolution():
    """Lowered for a TPU on this machine: a small filter's gradients all at once, by the compiler's own convolution."""
    loss, params, x = CASES["strides"]()
    traced = jax.jit(per_example.grad_statistics(loss)).trace(params, x)
    cpu, tpu = (traced.lower(lowering_platforms=(p,)).as_text().count for p in ("cpu", "tpu"))
    assert cpu("stablehlo.convolution") < tpu("stablehlo.convolution")
    assert cpu("stablehlo.while") == 2 and tpu("stablehlo.while") == 0  # over examples, and over windows


def test_nothing_of_size_examples_times_filter():
    """Nor of all examples' windows."""
    loss, params, _ = CASES["larger_than_its_image"]()
    x = normal(1, 64, 3, 3, 7)
    surgery = largest(jax.make_jaxpr(per_example.grad_statistics(loss))(params, x).jaxpr)
    assert surgery < 64 * params["w"].nbytes / 4


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["strides", "groups", "used_twice"])
def test_on_two_devices(name, check_vma):
    loss, params, batch = CASES[name]()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    compute = per_example.grad_statistics(loss, SOME, data_axes="data", norms=True)
    of_all = jax.shard_map(
        lambda p, b: compute(p, b)[0], mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    assert_matches(jax.jit(of_all)(params, batch), single_gradients(loss, params, batch), SOME)
