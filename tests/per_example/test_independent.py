"""`check_independent` finds losses that mix examples, names where, and leaves the others in peace."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex_t5x.per_example.independent import check_independent

DRAW = np.random.default_rng(0)
X = jnp.asarray(DRAW.normal(size=(6, 5)), jnp.float32)
W = jnp.asarray(DRAW.normal(size=(5, 4)), jnp.float32)


def squares(w, x):
    return jnp.mean((x @ w) ** 2)


def batch_norm(w, x):
    h = x @ w
    mean, variance = jnp.mean(h, 0, keepdims=True), jnp.var(h, 0, keepdims=True)
    return jnp.mean(jnp.tanh((h - mean) / jnp.sqrt(variance + 1e-3)) ** 2)


def contrastive(w, x):
    h = x @ w
    similarity = h @ h.T
    return jnp.mean(jax.nn.logsumexp(similarity, axis=-1) - jnp.diagonal(similarity))


def normalised_by_the_batch(w, x):
    mask = (x[:, 0] > -0.5).astype(x.dtype) + 0.5
    return jnp.sum(jnp.sum((x @ w) ** 2, axis=-1) * mask) / jnp.sum(mask)


def softmax_over_examples(w, x):
    return jnp.mean(jax.nn.softmax(x @ w, axis=0) ** 2)


def carried_from_example_to_example(w, x):
    return jnp.mean(jax.lax.scan(lambda h, row: (jnp.tanh(h + row @ w), h), jnp.zeros(4), x)[1])


@pytest.mark.parametrize(
    ("loss", "primitive"),
    [
        (batch_norm, "reduce_sum"),
        (contrastive, "dot_general"),
        (normalised_by_the_batch, "reduce_sum"),
        (softmax_over_examples, "reduce_sum"),
        (carried_from_example_to_example, "scan"),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_finds_losses_that_mix_examples(loss, primitive, reduction):
    with pytest.raises(ValueError, match="the loss mixes examples") as caught:
        check_independent(loss, W, X, reduction=reduction)
    message = str(caught.value)
    assert f"reduction='{reduction}'" in message
    assert f"`{primitive}`" in message and f"test_independent.py:{_line(loss)} (" in message


def _line(loss):
    """Where the examples of each loss meet."""
    offset = {batch_norm: 2, contrastive: 2, normalised_by_the_batch: 2}.get(loss, 1)
    return loss.__code__.co_firstlineno + offset


def test_a_difference_of_gradients_alone_is_found():
    def loss(w, x):
        h = x @ w
        shift = h.mean(0, keepdims=True)
        return jnp.mean(h) + jnp.mean((shift - jax.lax.stop_gradient(shift)) * h)  # the value is right

    with pytest.raises(
        ValueError, match="the gradient of the parameter differs from the mean of the examples' gradients"
    ):
        check_independent(loss, W, X)


def test_batch_norm_of_flax_is_named_by_its_module():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False, name="norm")(nn.Dense(4)(x))
            return nn.Dense(1)(x)

    net = Net()
    variables = net.init(jax.random.key(0), X)

    def loss(params, x):
        variables_of = {"params": params, "batch_stats": variables["batch_stats"]}
        return jnp.mean(net.apply(variables_of, x, mutable=["batch_stats"])[0] ** 2)

    with pytest.raises(ValueError, match="reduce_sum.* of .*norm"):
        check_independent(loss, variables["params"], X)


def layer_norm_and_attention(w, x):
    h = x.reshape(-1, 5, 1) * w[None]  # [N, 5, 4]
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-3)
    scores = jax.nn.softmax(jnp.einsum("nsd,ntd->nst", h, h), axis=-1)
    return jnp.mean(jnp.einsum("nst,ntd->nsd", scores, h) ** 2)


def with_a_regulariser(w, x):
    return squares(w, x) + 0.1 * jnp.sum(w**2)


@pytest.mark.parametrize("loss", [squares, layer_norm_and_attention, with_a_regulariser])
def test_accepts_means(loss):
    check_independent(loss, W, X)


def test_accepts_sums_aux_tuples_and_other_arguments():
    def loss(temperature, batch, w, bias):
        h = batch["x"] @ w + bias[None]
        return jnp.sum(h**2) / temperature, {"h": h}

    arguments = (2.0, {"x": X, "none": None, "ids": jnp.arange(6)}, W, jnp.ones(4))
    check_independent(loss, *arguments, reduction="sum", argnums=(2, 3), has_aux=True)


def test_a_gradient_that_is_zero_but_for_rounding_is_no_alarm():
    def loss(p, x):
        logits = x @ p["w"] + p["shift"]  # softmax does not see the shift
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[:, 0])

    check_independent(loss, {"w": W, "shift": jnp.float32(0.3)}, X)


@pytest.mark.parametrize(("assumed", "actual"), [("mean", "sum"), ("sum", "mean")])
def test_the_other_reduction_is_recognised(assumed, actual):
    reduce = getattr(jnp, actual)
    with pytest.raises(ValueError, match=f"is the {actual} of its examples' losses.*give reduction='{actual}'"):
        check_independent(lambda w, x: reduce(jnp.sum((x @ w) ** 2, axis=-1)), W, X, reduction=assumed)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (X[:1], {}, "one example"),
        (jnp.ones((4, 5)), {}, "all examples of the batch are alike"),
        (X, {"reduction": "max"}, "must be one of mean, sum"),
    ],
)
def test_what_cannot_be_checked_is_said(x, options, message):
    with pytest.raises(ValueError, match=message):
        check_independent(squares, W, x, **options)


def test_a_loss_that_is_not_a_scalar():
    with pytest.raises(ValueError, match=r"shape \(6,\); it must be a scalar"):
        check_independent(lambda w, x: jnp.sum(x @ w, axis=-1), W, X)
