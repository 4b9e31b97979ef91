"""Bad input is refused with what was wrong, where, and how to fix it."""

import jax
import jax.numpy as jnp
import pytest

from perex_t5x import per_example
from perex_t5x.per_example import GradStatistics, Statistic

W, X = jnp.ones((5, 4)), jnp.ones((6, 5))


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def compute(loss=loss, arguments=(W, X), weights=None, **options):
    return per_example.grad_statistics(loss, **options)(*arguments, weights=weights)


def test_unequal_leading_axes_name_the_leaves():
    batch = {"x": X, "y": {"label": jnp.ones(5)}}
    with pytest.raises(ValueError) as caught:
        compute(lambda w, b: loss(w, b["x"]), (W, batch))
    assert "argument 1['x']: 6" in str(caught.value) and "argument 1['y']['label']: 5" in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (X[:0], "the batch has zero examples"),
        ({}, "the batch has no arrays"),
        ({"x": X, "t": 3.0}, r"argument 1\['t'\] is a scalar"),
    ],
)
def test_batches_without_examples(batch, message):
    with pytest.raises(ValueError, match=message):
        compute(lambda w, b: loss(w, b), (W, batch))


@pytest.mark.parametrize("method", ["surgery", "vmap"])
def test_a_loss_that_is_not_a_scalar(method):
    with pytest.raises(ValueError, match=r"has shape \(1, 4\); it must be a scalar"):
        compute(lambda w, x: x @ w, method=method)
    with pytest.raises(ValueError, match="has dtype int32; it must be floating"):
        compute(lambda w, x: jnp.int32(1), method=method)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 4}, "group_size = 4 does not divide the number of examples = 6. Nearest that does: 3"),
        (
            {"microbatch_size": 5},
            "microbatch_size = 5 does not divide the number of examples = 6. Nearest that does: 6",
        ),
        ({"group_size": 3, "microbatch_size": 2}, "group_size = 3 does not divide microbatch_size = 2"),
        ({"group_size": 0}, "group_size = 0: must be a positive whole number"),
        ({"microbatch_size": 1.5}, "microbatch_size = 1.5: must be a positive whole number"),
    ],
)
def test_sizes_that_do_not_divide(options, message):
    with pytest.raises(ValueError, match=message):
        compute(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "graph"}, "method = 'graph': must be one of surgery, vmap, map, loop"),
        ({"reduction": "max"}, "reduction = 'max': must be one of mean, sum"),
        ({"non_finite": "drop"}, "non_finite = 'drop': must be one of"),
        ({"clip_norm": 0.0}, "clip_norm = 0.0: must be positive"),
        ({"argnums": ()}, "argnums is empty"),
        ({"batch_argnums": ()}, "batch_argnums is empty"),
        ({"argnums": 1}, "argument 1 has two roles"),
        ({"rng_argnums": 1}, "argument 1 has two roles"),
        ({"batch_argnums": 2}, "batch_argnums names argument 2, but the loss was given 2"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        compute(**options)


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        (
            "mean_sqare",
            "unknown statistic 'mean_sqare'. Did you mean 'mean_square'. Known names: mean, mean_square, mean_sign",
        ),
        (("mean", "mean"), "statistic 'mean' is given twice"),
        ((), "statistics is empty"),
    ],
)
def test_statistics(statistics, message):
    with pytest.raises(ValueError, match=message.replace("'mean_square'.", r"'mean_square'\?")):
        compute(statistics=statistics)


def test_something_else_than_a_statistic():
    with pytest.raises(TypeError, match="names or per_example.Statistic objects, not builtin_function"):
        compute(statistics=(abs,))


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (lambda g: g.sum(axis=0), {}, r"φ must be elementwise, but it turns shape \(3, 2\) into \(2,\)"),
        (lambda g: g > 0, {}, "φ returns bool; it must return a floating dtype"),
        (lambda g: jnp.sign(g).astype(jnp.int32), {}, "φ returns int32"),
        (lambda g: g + 0j, {}, "φ returns complex64"),
        (jnp.tanh, {"factorable": True}, "claims factorable=True, but φ.* at a = "),
        (jnp.abs, {"scaling": lambda c: c}, r"scaling must give φ\(c·g\) = scaling\(c\)·φ\(g\), but at c = -1.5"),
    ],
)
def test_functions_that_are_no_statistics(fn, options, message):
    with pytest.raises(ValueError, match=message):
        Statistic("mine", fn, **options)


def test_a_statistic_needs_a_name():
    with pytest.raises(ValueError, match="give a non-empty string"):
        Statistic("", jnp.tanh)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        (jnp.ones(5), {}, r"weights has shape \(5,\): one per example is needed, \(6,\)"),
        (jnp.ones((6, 1)), {}, r"weights has shape \(6, 1\)"),
        (jnp.float32(1.0), {}, r"weights has shape \(\)"),
    ],
)
def test_weights_of_a_wrong_shape(weights, options, message):
    with pytest.raises(ValueError, match=message):
        compute(weights=weights, **options)


def test_parameters_that_are_no_arrays():
    for leaf in (jnp.tanh, "gelu"):
        with pytest.raises(ValueError, match="parameter act is no array, but .*eqx.partition"):
            compute(lambda p, x: loss(p["w"], x), ({"act": leaf, "w": W}, X), parameters="w")


def stacked(params, x):
    """The loop over layers stacks gradients of softmax(w), through those of tanh, and makes that of `x @ v` besides."""
    weights = jax.nn.softmax(params["layer"]["w"])
    return jnp.sum(jax.lax.scan(lambda h, w: (jnp.sin(h @ jnp.tanh(w)), None), x @ params["v"], weights)[0])


def test_strict_names_the_parameter_and_the_reason():
    params = {"layer": {"w": jnp.ones((2, 5, 5))}, "v": jnp.ones((5, 5))}
    table = {row.parameter: row for row in per_example.coverage(stacked, params, X)}
    row = table["layer/w"]
    assert row.reduction == row.form == "materialised"
    with pytest.raises(ValueError) as caught:
        compute(stacked, (params, X), strict=True)
    message = str(caught.value)
    assert message == (
        "strict=True: per-example gradients of 'layer/w' would have to be materialised "
        f"({row.transient_bytes:,} bytes) because {row.note}. strict=False allows it; results stay exact."
    )
    assert "lax.scan stacks them" in row.note
    compute(stacked, (params, X))  # and without it there is no error


def test_merging_different_statistics():
    one, other = compute(statistics="mean")[0], compute()[0]
    with pytest.raises(ValueError, match=r"cannot merge \['mean'\] with \['mean', 'mean_square'\]"):
        GradStatistics.merge(one, other)
    with pytest.raises(ValueError, match="cannot merge groups of 1 with groups of 2"):
        GradStatistics.merge(other, compute(group_size=2)[0])


def test_errors_come_when_traced_too():
    with pytest.raises(ValueError, match="does not divide"):
        jax.eval_shape(lambda w, x: per_example.grad_statistics(loss, group_size=4)(w, x), W, X)
