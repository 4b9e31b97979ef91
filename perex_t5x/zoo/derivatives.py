"""Losses with derivatives inside, with derivative rules of their own, or with parts that are held constant."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from perex_t5x.zoo.case import Draw, Parts, affine, case, dense, mean_over_examples, row


def _pairs(draw: Draw, d: int) -> dict[str, jax.Array]:
    n = draw.size(4, 32)
    return {"x": draw.normal(n, d), "y": draw.normal(n)}


def _scalar_net(draw: Draw, d: int) -> list[Any]:
    f = draw.size(5, 256)
    return [dense(draw, d, f), dense(draw, f, f), dense(draw, f, 1)]


def _apply(params: Any, x: jax.Array) -> jax.Array:
    """Softplus layers, of one row or of many; smooth, so that it may be differentiated again."""
    for p in params[:-1]:
        x = jax.nn.softplus(affine(x, p))
    return affine(x, params[-1])[..., 0]


@case()
def custom_vjp(draw: Draw) -> Parts:
    """An activation whose slope is clipped in its backward pass, which is then not the derivative of its forward pass."""
    d, t = draw.size(4, 128), draw.size(3, 32)

    @jax.custom_vjp
    def activation(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.sin(x) * row(scale, x)

    def forward(x: jax.Array, scale: jax.Array) -> Any:
        return activation(x, scale), (x, scale)

    def backward(saved: Any, cotangent: jax.Array) -> Any:
        x, scale = saved
        to_scale = jnp.sum(cotangent * jnp.sin(x), axis=tuple(range(x.ndim - 1)))
        return cotangent * jnp.clip(jnp.cos(x), -0.3, 0.3) * row(scale, x), 0.5 * to_scale

    activation.defvjp(forward, backward)

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        h_BxTxD = activation(x_BxTxD @ params["first"], params["scale"])
        return jnp.mean((h_BxTxD @ params["second"]) ** 2)

    params = {"first": draw.weight(d, d), "scale": draw.near_one(d), "second": draw.weight(d, d)}
    return loss, params, draw.normal(draw.size(4, 16), t, d)


@case()
def custom_jvp(draw: Draw) -> Parts:
    """A stable log(1 + exp x) with a rule, in a product with a function that has one too (`jax.nn.relu`)."""
    d, t = draw.size(4, 128), draw.size(3, 32)

    @jax.custom_jvp
    def stable(x: jax.Array) -> jax.Array:
        return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0)

    @stable.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return stable(primals[0]), jax.nn.sigmoid(primals[0]) * tangents[0]

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        return jnp.mean((stable(x_BxTxD @ params["a"]) * jax.nn.relu(x_BxTxD @ params["b"])) ** 2)

    return loss, {"a": draw.weight(d, d), "b": draw.weight(d, d)}, draw.normal(draw.size(4, 16), t, d)


@case()
def stopped_target(draw: Draw) -> Parts:
    """BYOL: the same weights online and, without gradient, for the target; a predictor between."""
    d = draw.size(4, 256)
    params = {"encoder": dense(draw, d, d), "predictor": draw.weight(d, d)}

    def unit(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)

    def loss(params: Any, batch: Any) -> jax.Array:
        online = unit(jnp.tanh(affine(batch["x"], params["encoder"])) @ params["predictor"])
        target = jax.lax.stop_gradient(unit(jnp.tanh(affine(batch["other"], params["encoder"]))))
        return jnp.mean(jnp.sum((online - target) ** 2, axis=-1))

    n = draw.size(4, 64)
    return loss, params, {"x": draw.normal(n, d), "other": draw.normal(n, d)}


@case()
def gradient_penalty(draw: Draw) -> Parts:
    """A critic whose gradient at the input shall have norm 1."""
    d = draw.size(4, 64)

    def one(params: Any, example: Any) -> jax.Array:
        real, fake = _apply(params, example["real"]), _apply(params, example["fake"])
        between = example["mix"] * example["real"] + (1 - example["mix"]) * example["fake"]
        slope_D = jax.grad(_apply, argnums=1)(params, between)
        return fake - real + 10.0 * (jnp.sqrt(jnp.sum(slope_D**2) + 1e-6) - 1.0) ** 2

    n = draw.size(4, 32)
    batch = {"real": draw.normal(n, d), "fake": draw.normal(n, d), "mix": jax.nn.sigmoid(draw.normal(n))}
    return mean_over_examples(one), _scalar_net(draw, d), batch


@case()
def inner_step(draw: Draw) -> Parts:
    """MAML: an example is a task. One step of gradient descent on its first half, the loss on its second."""
    d, t = draw.size(3, 32), draw.size(4, 16)

    def task_loss(params: Any, x_TxD: jax.Array, y_T: jax.Array) -> jax.Array:
        return jnp.mean((_apply(params, x_TxD) - y_T) ** 2)

    def one(params: Any, task: Any) -> jax.Array:
        half = t // 2
        inner = jax.grad(task_loss)(params, task["x"][:half], task["y"][:half])
        adapted = jax.tree.map(lambda w, g: w - 0.1 * g, params, inner)
        return task_loss(adapted, task["x"][half:], task["y"][half:])

    n = draw.size(4, 8)
    f = draw.size(4, 64)
    params = [dense(draw, d, f), dense(draw, f, 1)]
    return mean_over_examples(one), params, {"x": draw.normal(n, t, d), "y": draw.normal(n, t)}


@case()
def physics_informed(draw: Draw) -> Parts:
    """The residual of the heat equation u_t = u_xx + source, its derivatives by `jacfwd` and a jvp of a jvp."""
    f = draw.size(4, 128)
    params = [dense(draw, 2, f), dense(draw, f, f), dense(draw, f, 1)]

    def field(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
        return _apply(params, jnp.stack([t, x]))

    def one(params: Any, point: Any) -> jax.Array:
        t, x = point["t"], point["x"]
        u_t = jax.jacfwd(field, argnums=1)(params, t, x)
        slope = lambda x: jax.jvp(lambda x: field(params, t, x), (x,), (jnp.ones_like(x),))[1]  # noqa: E731
        u_xx = jax.jvp(slope, (x,), (jnp.ones_like(x),))[1]
        return (u_t - u_xx - jnp.sin(x)) ** 2 + field(params, jnp.zeros_like(t), x) ** 2

    n = draw.size(4, 64)
    return mean_over_examples(one), params, {"t": jax.nn.sigmoid(draw.normal(n)), "x": draw.normal(n)}


@case()
def score_matching(draw: Draw) -> Parts:
    """An energy model: ½|∇E|² − ΔE at the data, the Laplacian by a Hessian's trace."""
    d = draw.size(3, 6)

    def one(params: Any, x_D: jax.Array) -> jax.Array:
        energy = lambda x: _apply(params, x)  # noqa: E731
        return 0.5 * jnp.sum(jax.grad(energy)(x_D) ** 2) - jnp.trace(jax.hessian(energy)(x_D))

    f = draw.size(4, 64)
    return mean_over_examples(one), [dense(draw, d, f), dense(draw, f, 1)], draw.normal(draw.size(4, 32), d)


@case()
def contrastive_divergence(draw: Draw) -> Parts:
    """An energy model whose negative sample comes from a few steps of descent in the input, held constant."""
    d = draw.size(4, 64)

    def one(params: Any, x_D: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x - 0.2 * jax.grad(_apply, argnums=1)(params, x), None

        negative, _ = jax.lax.scan(step, jnp.zeros_like(x_D), None, length=3)
        real, fake = _apply(params, x_D), _apply(params, jax.lax.stop_gradient(negative))
        return real - fake + 0.1 * (real**2 + fake**2)

    return mean_over_examples(one), _scalar_net(draw, d), draw.normal(draw.size(4, 32), d)


@case()
def coupling_flow(draw: Draw) -> Parts:
    """A normalising flow: affine couplings of the two halves, and an invertible mixing with its determinant."""
    d, f, layers = draw.size(4, 64), draw.size(3, 256), draw.size(2, 4)
    half = d // 2
    params = [
        {"in": dense(draw, half, f), "out": dense(draw, f, d), "mix": jnp.eye(d) + 0.2 * draw.weight(d, d)}
        for _ in range(layers)
    ]

    def loss(params: Any, x_BxD: jax.Array) -> jax.Array:
        log_det_B = jnp.zeros(x_BxD.shape[0])
        for p in params:
            kept, moved = x_BxD[:, :half], x_BxD[:, half:]
            log_scale, shift = jnp.split(affine(jnp.tanh(affine(kept, p["in"])), p["out"]), 2, axis=-1)
            log_scale = jnp.tanh(log_scale)
            x_BxD = jnp.concatenate([kept, moved * jnp.exp(log_scale) + shift], axis=-1) @ p["mix"]
            log_det_B = log_det_B + jnp.sum(log_scale, axis=-1) + jnp.linalg.slogdet(p["mix"])[1]
        return jnp.mean(0.5 * jnp.sum(x_BxD**2, axis=-1) - log_det_B)

    return loss, params, draw.normal(draw.size(4, 32), d)


@case()
def checkpointed(draw: Draw) -> Parts:
    """`jax.checkpoint` by the names of what is saved, one inside another."""
    d, t = draw.size(4, 128), draw.size(3, 32)
    policy = jax.checkpoint_policies.save_only_these_names("kept")

    def block(x: jax.Array, p: Any) -> jax.Array:
        h = checkpoint_name(jax.nn.gelu(x @ p["up"]), "kept")
        return x + jax.checkpoint(lambda h, w: jnp.tanh(h @ w))(h, p["down"])

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        for p in params:
            x_BxTxD = jax.checkpoint(block, policy=policy)(x_BxTxD, p)
        return jnp.mean(x_BxTxD**2)

    params = [{"up": draw.weight(d, d), "down": draw.weight(d, d)} for _ in range(2)]
    return loss, params, draw.normal(draw.size(4, 16), t, d)


@case()
def distillation(draw: Draw) -> Parts:
    """A student beside a teacher whose parameters are among those differentiated, and get no gradient."""
    d, classes = draw.size(4, 256), draw.size(3, 100)
    params = {"student": draw.weight(d, classes), "teacher": draw.weight(d, classes), "warmth": jnp.float32(1.3)}

    def loss(params: Any, x_BxD: jax.Array) -> jax.Array:
        teacher = jax.nn.softmax(x_BxD @ jax.lax.stop_gradient(params["teacher"]), axis=-1)
        student = jax.nn.log_softmax(x_BxD @ params["student"] / params["warmth"], axis=-1)
        return -jnp.mean(jnp.sum(teacher * student, axis=-1))

    return loss, params, draw.normal(draw.size(4, 64), d)
