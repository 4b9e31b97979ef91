"""`GradStatistics.sensitivity`: what it says for which options, and that no neighbouring batch is further away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from perex_t5x import per_example
from perex_t5x.per_example import GradStatistics, Sensitivity
from tests.per_example.loop_reference import single_gradients

C, N = 0.7, 8


def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"]) @ params["v"])


def problem():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(keys[0], (3, 4)), "v": jax.random.normal(keys[1], (4,))}
    scale = jnp.array([0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 10.0, 100.0])[:, None]  # some clipped, some not
    return params, scale * jax.random.normal(keys[2], (N, 3))


def total(stats):
    """Σ_j h_j, flat."""
    leaves = [np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(stats.mean)]
    return np.concatenate(leaves) * float(stats.weight_sum) / stats.group_size


@pytest.mark.parametrize(
    ("options", "weights", "expected"),
    [
        ({}, None, None),
        ({"clip_norm": C}, None, Sensitivity(C, N)),
        ({"clip_norm": C, "microbatch_size": 2}, None, Sensitivity(C, N)),
        ({"clip_norm": C, "group_size": 2}, None, Sensitivity(2 * C, N // 2)),
        ({"clip_norm": C, "non_finite": "skip"}, None, Sensitivity(C)),
        ({"clip_norm": C}, np.arange(N) < 5, Sensitivity(C)),
        ({"clip_norm": C}, (np.arange(N) < 5).astype(np.float32), None),  # booleans alone are known to be at most 1
        ({"non_finite": "skip"}, None, None),
        ({"clip_norm": {"w": 0.3, "v": 0.4}}, None, Sensitivity(0.5, N)),
        ({"clip_norm": lambda norms: 0.1}, None, None),  # whatever it returns
    ],
    ids=range(10),
)
def test_what_it_says(options, weights, expected):
    params, x = problem()
    compute = per_example.grad_statistics(loss, ("mean",), **options)
    eager, _ = compute(params, x, weights=weights)
    jitted, _ = jax.jit(lambda p, x, w: compute(p, x, weights=w))(params, x, weights)
    assert eager.sensitivity == jitted.sensitivity == expected
    if expected is not None and expected.units:
        assert expected.mean == pytest.approx(expected.sum / expected.units)


def test_rounded_sums_have_none_and_meshes_do_not_matter():
    params, x = problem()
    for mesh in (jax.make_mesh((8,), ("data",)), jax.make_mesh((4, 2), ("data", "model"))):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        stats, _ = per_example.grad_statistics(loss, ("mean",), clip_norm=C)(params, placed)
        assert stats.sensitivity == Sensitivity(C, N)
    rounded = per_example.grad_statistics(loss, ("mean",), clip_norm=C, transport_dtype=jnp.bfloat16)
    assert rounded(params, x)[0].sensitivity is None


def test_inside_shard_map():
    """Over the axes that share the batch alone: over others parameters may be split, and norms those of a part."""
    params, x = problem()
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for manual, expected in ((("data",), Sensitivity(C, N)), (("data", "model"), None)):
        compute = per_example.grad_statistics(loss, ("mean",), clip_norm=C, data_axes="data")
        run = jax.shard_map(
            lambda p, x, compute=compute: compute(p, x)[0],
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
            axis_names=set(manual),
            check_vma=False,
        )
        assert jax.jit(run)(params, x).sensitivity == expected


@pytest.mark.parametrize("options", [{}, {"group_size": 2}, {"non_finite": "skip", "microbatch_size": 4}], ids=str)
def test_no_neighbour_is_further_away(options):
    """Each example is zeroed out in turn: a row of zeros has a gradient of 0."""
    params, x = problem()
    of_groups = options.get("group_size", 1) > 1

    @jax.jit
    def compute(x, keep):
        return per_example.grad_statistics(loss, ("mean",), clip_norm=C, **options)(params, x, weights=keep)[0]

    everything = np.ones(N, bool)
    whole, bound = total(compute(x, everything)), compute(x, everything).sensitivity.sum
    moved = [np.linalg.norm(total(compute(x.at[i].set(0.0), everything)) - whole) for i in range(N)]
    assert bound == (2 * C if of_groups else C) and max(moved) <= bound * (1 + 1e-5)
    if of_groups:
        assert max(moved) > C  # a group is replaced, not removed
        return
    gradients = single_gradients(loss, params, x)
    norms = np.array([np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(one))) for one in gradients])
    np.testing.assert_allclose(moved, np.minimum(norms, C), rtol=1e-4)
    assert norms.max() > C > norms.min()
    masked = [np.linalg.norm(total(compute(x, np.arange(N) != i)) - whole) for i in range(N)]
    np.testing.assert_allclose(masked, moved, rtol=1e-4)


def test_an_example_that_is_not_finite_is_zeroed_out_where_it_is_skipped():
    params, x = problem()
    compute = per_example.grad_statistics(loss, ("mean",), clip_norm=C, non_finite="skip")
    poisoned, _ = compute(params, x.at[3].set(jnp.nan))
    without, _ = compute(params, x, weights=np.arange(N) != 3)
    np.testing.assert_allclose(total(poisoned), total(without), rtol=1e-6)


def test_merging():
    params, x = problem()
    compute = per_example.grad_statistics(loss, ("mean",), clip_norm=C)
    a, b = compute(params, x[:3])[0], compute(params, x[3:])[0]
    merged, whole = GradStatistics.merge(a, b), compute(params, x)[0]
    assert merged.sensitivity == whole.sensitivity == Sensitivity(C, N)
    np.testing.assert_allclose(total(merged), total(whole), rtol=1e-5)
    unclipped, _ = per_example.grad_statistics(loss, ("mean",))(params, x)
    assert GradStatistics.merge(a, unclipped).sensitivity is None
    skipping, _ = per_example.grad_statistics(loss, ("mean",), clip_norm=2 * C, non_finite="skip")(params, x)
    assert GradStatistics.merge(a, skipping).sensitivity == Sensitivity(2 * C)
