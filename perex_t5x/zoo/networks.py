"""Networks of dense layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.zoo.case import Draw, Parts, affine, case, cross_entropy, dense, layer_norm, mean_over_examples, row


def _labelled(draw: Draw, inputs: int, classes: int) -> dict[str, jax.Array]:
    n = draw.size(4, 64)
    return {"x": draw.normal(n, inputs), "label": draw.ids(classes, n)}


@case()
def dense_net(draw: Draw) -> Parts:
    """No sequence axis: every statistic factors."""
    d, classes = draw.size(5, 512), draw.size(3, 100)
    params = [dense(draw, d, d), dense(draw, d, d), dense(draw, d, classes)]

    def loss(params: Any, batch: Any) -> jax.Array:
        x_BxD = batch["x"]
        for p in params[:-1]:
            x_BxD = jax.nn.relu(affine(x_BxD, p))
        return cross_entropy(affine(x_BxD, params[-1]), batch["label"])

    return loss, params, _labelled(draw, d, classes)


@case()
def residual_net(draw: Draw) -> Parts:
    """Pre-norm residual blocks in a scan, no sequence axis."""
    d, f, layers, classes = draw.size(4, 256), draw.size(6, 1024), draw.size(2, 4), draw.size(3, 100)
    params = {
        "blocks": {
            "norm": draw.near_one(layers, d),
            "up": draw.weight(layers, d, f),
            "down": draw.weight(layers, f, d),
        },
        "out": dense(draw, d, classes),
    }

    def block(x_BxD: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return x_BxD + jax.nn.gelu(layer_norm(x_BxD, p["norm"]) @ p["up"]) @ p["down"], None

    def loss(params: Any, batch: Any) -> jax.Array:
        x_BxD, _ = jax.lax.scan(block, batch["x"], params["blocks"])
        return cross_entropy(affine(x_BxD, params["out"]), batch["label"])

    return loss, params, _labelled(draw, d, classes)


@case()
def gated_net(draw: Draw) -> Parts:
    """One product for value and gate, split afterwards; a learned scale in the exponent."""
    d, f = draw.size(4, 256), draw.size(6, 1024)
    params = {"in": draw.weight(d, 2 * f), "log_scale": draw.normal(f, scale=0.1), "out": draw.weight(f, 1)}

    def loss(params: Any, batch: Any) -> jax.Array:
        value_BxF, gate_BxF = jnp.split(batch["x"] @ params["in"], 2, axis=-1)
        h_BxF = value_BxF * jax.nn.silu(gate_BxF * row(jnp.exp(params["log_scale"]), gate_BxF))
        return jnp.mean(((h_BxF @ params["out"])[:, 0] - batch["y"]) ** 2)

    n = draw.size(4, 64)
    return loss, params, {"x": draw.normal(n, d), "y": draw.normal(n)}


@case()
def mixed_precision_net(draw: Draw) -> Parts:
    """float32 parameters, bfloat16 products, a float32 loss; a sequence axis."""
    d, t = draw.size(4, 256), draw.size(3, 64)
    params = {"first": draw.weight(d, d), "second": draw.weight(d, d), "bias": draw.normal(d, scale=0.1)}

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        h_BxTxD = jax.nn.relu(x_BxTxD.astype(jnp.bfloat16) @ p["first"])
        h_BxTxD = h_BxTxD @ p["second"]
        h_BxTxD = h_BxTxD + row(p["bias"], h_BxTxD)
        return jnp.mean((h_BxTxD.astype(jnp.float32) - x_BxTxD) ** 2)

    return loss, params, draw.normal(draw.size(4, 16), t, d)


@case()
def regularised_net(draw: Draw) -> Parts:
    """Weight decay and an unused parameter: gradients that are the same for every example."""
    d = draw.size(4, 512)
    params = {"first": dense(draw, d, d), "second": draw.weight(d, 1), "unused": draw.normal(d, 3)}

    def loss(params: Any, batch: Any) -> jax.Array:
        y_B = (jnp.tanh(affine(batch["x"], params["first"])) @ params["second"])[:, 0]
        decay = 1e-2 * jnp.sum(params["first"]["w"] ** 2) + 1e-2 * jnp.sum(jnp.abs(params["second"]))
        return jnp.mean((y_B - batch["y"]) ** 2) + decay

    n = draw.size(4, 64)
    return loss, params, {"x": draw.normal(n, d), "y": draw.normal(n)}


@case()
def ensemble(draw: Draw) -> Parts:
    """Every parameter has a leading axis of members, over which the network is mapped."""
    members, d, classes = draw.size(3, 8), draw.size(4, 128), draw.size(3, 10)
    params = {
        "first": {"w": draw.weight(members, d, d), "b": draw.normal(members, d, scale=0.1)},
        "second": {"w": draw.weight(members, d, classes), "b": draw.normal(members, classes, scale=0.1)},
    }

    def member(p: Any, x_BxD: jax.Array) -> jax.Array:
        return affine(jax.nn.relu(affine(x_BxD, p["first"])), p["second"])

    def loss(params: Any, batch: Any) -> jax.Array:
        logits_MxBxC = jax.vmap(member, in_axes=(0, None))(params, batch["x"])
        return jnp.mean(jax.vmap(cross_entropy, in_axes=(0, None))(logits_MxBxC, batch["label"]))

    return loss, params, _labelled(draw, d, classes)


@case()
def mixer(draw: Draw) -> Parts:
    """Products over tokens and over channels in turn."""
    t, d = draw.size(3, 64), draw.size(4, 128)
    params = {"tokens": draw.weight(t, t), "channels": draw.weight(d, d), "norm": draw.near_one(d)}

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        mixed = jnp.einsum("btd,ts->bsd", layer_norm(x_BxTxD, params["norm"]), params["tokens"])
        x = x_BxTxD + jax.nn.gelu(mixed)
        x = x + jax.nn.gelu(jnp.einsum("btd,de->bte", layer_norm(x, params["norm"]), params["channels"]))
        return jnp.mean(x**2)

    return loss, params, draw.normal(draw.size(4, 16), t, d)


@case()
def bilinear(draw: Draw) -> Parts:
    """x w y, and a third-order weight."""
    d, k = draw.size(4, 256), draw.size(2, 8)
    params = {"w": draw.weight(d, d), "third": draw.weight(k, d, d)}

    def one(params: Any, batch: Any) -> jax.Array:
        x, y = batch["x"], batch["y"]
        slices = jnp.einsum("d,kde,e->k", x, params["third"], y)
        return (x @ params["w"] @ y - 1.0) ** 2 + jnp.sum(jnp.tanh(slices))

    n = draw.size(4, 32)
    return mean_over_examples(one), params, {"x": draw.normal(n, d, scale=d**-0.5), "y": draw.normal(n, d)}


@case()
def set_network(draw: Draw) -> Parts:
    """Deep sets: the same layers for each element, a masked mean, a maximum."""
    t, d, f = draw.size(5, 64), draw.size(3, 64), draw.size(4, 256)
    params = {"each": dense(draw, d, f), "whole": dense(draw, 2 * f, 1)}

    def loss(params: Any, batch: Any) -> jax.Array:
        h_BxTxF = jax.nn.elu(affine(batch["x"], params["each"]))
        mask_BxTx1 = batch["mask"][:, :, None]
        mean_BxF = jnp.sum(h_BxTxF * mask_BxTx1, axis=1) / jnp.sum(mask_BxTx1, axis=1)
        top_BxF = jnp.max(jnp.where(mask_BxTx1 > 0, h_BxTxF, -10.0), axis=1)
        return jnp.mean(affine(jnp.concatenate([mean_BxF, top_BxF], axis=-1), params["whole"]) ** 2)

    n = draw.size(4, 16)
    mask = (jnp.arange(t)[None] <= draw.ids(t, n, 1)).astype(jnp.float32)
    return loss, params, {"x": draw.normal(n, t, d), "mask": mask}
