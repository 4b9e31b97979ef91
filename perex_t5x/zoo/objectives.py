"""Objectives of other kinds: choices, sorts, graphs, randomness, results beside the loss, FFTs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.zoo.case import Draw, Parts, affine, case, cross_entropy, dense, mean_over_examples, row


@case()
def cond_by_example(draw: Draw) -> Parts:
    """Each example chooses one of two networks."""
    d = draw.size(4, 128)

    def one(params: Any, example: Any) -> jax.Array:
        y_D = jax.lax.cond(
            example["flag"] > 0,
            lambda x: jnp.tanh(x @ params["a"]),
            lambda x: jax.nn.relu(x @ params["b"]) + 0.1 * x,
            example["x"],
        )
        return jnp.sum((y_D @ params["out"]) ** 2)

    params = {"a": draw.weight(d, d), "b": draw.weight(d, d), "out": draw.weight(d, d)}
    n = draw.size(4, 32)
    return mean_over_examples(one), params, {"x": draw.normal(n, d), "flag": draw.normal(n)}


@case()
def cond_by_parameter(draw: Draw) -> Parts:
    """All examples take the same branch, which a parameter chooses; a weight is used in both."""
    d, t = draw.size(4, 128), draw.size(3, 32)

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        h = jax.lax.cond(
            jnp.sum(params["gate"]) > 0,
            lambda: jnp.tanh(x_BxTxD @ params["w"]),
            lambda: jax.nn.relu(x_BxTxD @ params["w"] @ params["v"]),
        )
        return jnp.mean((h * row(params["gate"], h)) ** 2)

    params = {"w": draw.weight(d, d), "v": draw.weight(d, d), "gate": draw.near_one(d)}
    return loss, params, draw.normal(draw.size(4, 16), t, d)


@case()
def switch_experts(draw: Draw) -> Parts:
    """Each example chooses one of three branches."""
    d = draw.size(4, 128)

    def one(params: Any, example: Any) -> jax.Array:
        branches = [jnp.tanh, jax.nn.gelu, lambda h: h * params["slope"]]
        h_D = jax.lax.switch(example["which"], branches, affine(example["x"], params["first"]))
        return jnp.sum((h_D @ params["second"]) ** 2)

    params = {"first": dense(draw, d, d), "second": draw.weight(d, d), "slope": draw.normal(d)}
    n = draw.size(4, 32)
    return mean_over_examples(one), params, {"x": draw.normal(n, d), "which": draw.ids(3, n)}


@case()
def sorted_features(draw: Draw) -> Parts:
    """Sorts, the largest k, and quantiles of what the weights give; sorting goes with its arguments."""
    d, t = draw.size(4, 64), draw.size(5, 32)
    params = {"w": draw.weight(d, d), "score": draw.weight(d, 1), "mix": draw.normal(t)}

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        h_BxTxD = jnp.tanh(x_BxTxD @ params["w"])
        score_BxT = (h_BxTxD @ params["score"])[..., 0]
        ordered = jnp.take_along_axis(h_BxTxD, jnp.argsort(score_BxT, axis=1)[..., None], axis=1)
        pooled = jnp.einsum("btd,t->bd", ordered, params["mix"])
        top, _ = jax.lax.top_k(score_BxT, 2)
        ranks = jnp.sort(score_BxT, axis=1) * row(jnp.linspace(-1.0, 1.0, t), score_BxT)
        return jnp.mean(pooled**2) + jnp.mean(jax.nn.softplus(-top)) + jnp.mean(ranks**2)

    return loss, params, draw.normal(draw.size(4, 16), t, d)


@case(rng_argnums=2)
def dropout(draw: Draw) -> Parts:
    """A key for each example; masks on activations and on whole positions."""
    d, t = draw.size(4, 128), draw.size(3, 32)

    def loss(params: Any, x_BxTxD: jax.Array, key: jax.Array) -> jax.Array:
        first, second = jax.random.split(key)
        h = jax.nn.relu(affine(x_BxTxD, params["first"]))
        h = jnp.where(jax.random.bernoulli(first, 0.7, h.shape), h / 0.7, 0.0)
        y = affine(h, params["second"]) * jax.random.bernoulli(second, 0.8, (*h.shape[:2], 1))
        return jnp.mean((y - x_BxTxD) ** 2)

    return loss, {"first": dense(draw, d, d), "second": dense(draw, d, d)}, draw.normal(draw.size(4, 16), t, d)


@case(rng_argnums=2, has_aux=True)
def variational_autoencoder(draw: Draw) -> Parts:
    """Sampled codes; the two parts of the loss are returned beside it."""
    d, f, z = draw.size(5, 256), draw.size(4, 256), draw.size(2, 32)
    params = {
        "encode": dense(draw, d, f),
        "code": dense(draw, f, 2 * z),
        "decode": dense(draw, z, f),
        "out": dense(draw, f, d),
    }

    def loss(params: Any, x_BxD: jax.Array, key: jax.Array) -> Any:
        mean, log_std = jnp.split(affine(jax.nn.relu(affine(x_BxD, params["encode"])), params["code"]), 2, axis=-1)
        code = mean + jnp.exp(0.1 * log_std) * jax.random.normal(key, mean.shape)
        logits = affine(jax.nn.relu(affine(code, params["decode"])), params["out"])
        rebuilt = jnp.mean(jnp.sum(jax.nn.softplus(logits) - jax.nn.sigmoid(x_BxD) * logits, axis=-1))
        prior = 0.5 * jnp.mean(jnp.sum(mean**2 + jnp.exp(0.2 * log_std) - 1 - 0.2 * log_std, axis=-1))
        return rebuilt + prior, {"rebuilt": rebuilt, "prior": prior}

    return loss, params, draw.normal(draw.size(4, 32), d)


@case(rng_argnums=2)
def diffusion(draw: Draw) -> Parts:
    """Noise at a random level is predicted, from the noised example and sines of the level."""
    d, f = draw.size(4, 256), draw.size(6, 512)
    params = {"x": dense(draw, d, f), "level": draw.weight(4, f), "out": dense(draw, f, d)}

    def loss(params: Any, x_BxD: jax.Array, key: jax.Array) -> jax.Array:
        for_noise, for_level = jax.random.split(key)
        noise = jax.random.normal(for_noise, x_BxD.shape)
        level = jax.random.uniform(for_level, (x_BxD.shape[0], 1))
        waves = jnp.concatenate([f(k * level) for f in (jnp.sin, jnp.cos) for k in (1.0, 4.0)], axis=-1)
        noised = jnp.sqrt(1 - level) * x_BxD + jnp.sqrt(level) * noise
        h = jax.nn.silu(affine(noised, params["x"]) + waves @ params["level"])
        return jnp.mean((affine(h, params["out"]) - noise) ** 2)

    return loss, params, draw.normal(draw.size(4, 32), d)


@case(has_aux=True)
def loss_with_aux(draw: Draw) -> Parts:
    """Predictions and their number of hits are returned beside the loss."""
    d, classes = draw.size(4, 256), draw.size(3, 100)

    def loss(params: Any, batch: Any) -> Any:
        logits = affine(jax.nn.relu(affine(batch["x"], params["first"])), params["second"])
        hits = jnp.sum(jnp.argmax(logits, axis=-1) == batch["label"])
        return cross_entropy(logits, batch["label"]), {"logits": logits, "hits": hits}

    n = draw.size(4, 64)
    params = {"first": dense(draw, d, d), "second": dense(draw, d, classes)}
    return loss, params, {"x": draw.normal(n, d), "label": draw.ids(classes, n)}


@case()
def contrastive_within(draw: Draw) -> Parts:
    """Each example holds several views of two kinds, which are to find each other within it."""
    d, views = draw.size(4, 128), draw.size(3, 16)

    def loss(params: Any, batch: Any) -> jax.Array:
        def unit(x: jax.Array) -> jax.Array:
            return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)

        a, b = unit(batch["a"] @ params["a"]), unit(jnp.tanh(batch["b"] @ params["b"]))
        logits_BxVxV = jnp.exp(params["log_scale"]) * jnp.einsum("bvd,bwd->bvw", a, b)
        labels = jnp.broadcast_to(jnp.arange(views)[None], logits_BxVxV.shape[:2])
        both = cross_entropy(logits_BxVxV, labels) + cross_entropy(jnp.swapaxes(logits_BxVxV, 1, 2), labels)
        return 0.5 * both

    params = {"a": draw.weight(d, d), "b": draw.weight(d, d), "log_scale": jnp.float32(0.5)}
    n = draw.size(4, 16)
    return loss, params, {"a": draw.normal(n, views, d), "b": draw.normal(n, views, d)}


@case()
def graph_network(draw: Draw) -> Parts:
    """An example is a graph: messages along edges, added up by `segment_sum`, two rounds with their own weights."""
    d, nodes, edges = draw.size(3, 64), draw.size(4, 32), draw.size(6, 128)

    def one(params: Any, graph: Any) -> jax.Array:
        h_VxD = graph["nodes"]
        for p in params["rounds"]:
            ends = jnp.concatenate([h_VxD[graph["from"]], h_VxD[graph["to"]]], axis=-1)
            message_ExD = jax.nn.relu(affine(ends, p["message"]))
            received = jax.ops.segment_sum(message_ExD, graph["to"], num_segments=nodes)
            h_VxD = h_VxD + jnp.tanh(received @ p["update"])
        return jnp.mean(h_VxD @ params["out"]) ** 2

    params = {
        "rounds": [{"message": dense(draw, 2 * d, d), "update": draw.weight(d, d)} for _ in range(2)],
        "out": draw.weight(d, 1),
    }
    n = draw.size(4, 16)
    batch = {
        "nodes": draw.normal(n, nodes, d),
        "from": draw.ids(nodes, n, edges),
        "to": draw.ids(nodes, n, edges),
    }
    return mean_over_examples(one), params, batch


@case()
def fourier_mixing(draw: Draw) -> Parts:
    """A Fourier neural operator: complex values between, complex weights from two real parameters."""
    d, t, modes = draw.size(3, 64), draw.size(6, 64), draw.size(2, 16)

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        waves = jnp.fft.rfft(x_BxTxD, axis=1)[:, :modes]
        mixed = jnp.einsum("bmd,mde->bme", waves, jax.lax.complex(params["re"], params["im"]))
        y = jnp.fft.irfft(jnp.pad(mixed, ((0, 0), (0, t // 2 + 1 - modes), (0, 0))), t, axis=1)
        return jnp.mean(jax.nn.gelu(y + x_BxTxD @ params["skip"]) ** 2)

    params = {"re": draw.weight(modes, d, d), "im": draw.weight(modes, d, d), "skip": draw.weight(d, d)}
    return loss, params, draw.normal(draw.size(4, 16), t, d)


@case()
def radial_basis(draw: Draw) -> Parts:
    """Distances to learned centres, with learned widths, and a Gaussian process's solve within the example."""
    d, centres, t = draw.size(3, 32), draw.size(4, 64), draw.size(4, 16)

    def one(params: Any, example: Any) -> jax.Array:
        gap = example["x"][:, None] - params["centres"][None]
        phi_TxC = jnp.exp(-jnp.sum(gap**2, axis=-1) * row(jnp.exp(params["log_width"]), gap[..., 0]))
        covariance = phi_TxC @ phi_TxC.T + 0.3 * jnp.eye(t)
        factor = jnp.linalg.cholesky(covariance)
        solved = jax.scipy.linalg.cho_solve((factor, True), example["y"])
        return 0.5 * example["y"] @ solved + jnp.sum(jnp.log(jnp.diagonal(factor)))

    params = {"centres": draw.normal(centres, d), "log_width": draw.normal(centres, scale=0.3) - 1.0}
    n = draw.size(4, 16)
    return mean_over_examples(one), params, {"x": draw.normal(n, t, d), "y": draw.normal(n, t)}


@case()
def policy_gradient(draw: Draw) -> Parts:
    """An example is an episode: discounted returns by a reversed scan, a clipped ratio, a value and an entropy term."""
    d, t, actions = draw.size(4, 64), draw.size(5, 32), draw.size(3, 8)
    params = {"body": dense(draw, d, d), "policy": dense(draw, d, actions), "value": dense(draw, d, 1)}

    def one(params: Any, episode: Any) -> jax.Array:
        def discount(total: jax.Array, reward: jax.Array) -> Any:
            total = reward + 0.9 * total
            return total, total

        _, returns_T = jax.lax.scan(discount, jnp.float32(0.0), episode["reward"], reverse=True)
        h = jnp.tanh(affine(episode["x"], params["body"]))
        logp = jax.nn.log_softmax(affine(h, params["policy"]))
        value_T = affine(h, params["value"])[:, 0]
        advantage_T = jax.lax.stop_gradient(returns_T - value_T)
        ratio_T = jnp.exp(jnp.take_along_axis(logp, episode["action"][:, None], axis=1)[:, 0] - episode["old_logp"])
        clipped_T = jnp.clip(ratio_T, 0.8, 1.2)
        gain = jnp.mean(jnp.minimum(ratio_T * advantage_T, clipped_T * advantage_T))
        entropy = -jnp.mean(jnp.sum(jnp.exp(logp) * logp, axis=-1))
        return -gain + 0.5 * jnp.mean((returns_T - value_T) ** 2) - 0.01 * entropy

    n = draw.size(4, 16)
    batch = {
        "x": draw.normal(n, t, d),
        "action": draw.ids(actions, n, t),
        "reward": draw.normal(n, t),
        "old_logp": -jnp.log(actions) + draw.normal(n, t, scale=0.3),
    }
    return mean_over_examples(one), params, batch
