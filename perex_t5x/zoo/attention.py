"""Transformers: forms of attention, decoders, an encoder with a decoder, a vision transformer, mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x.zoo.case import Draw, Parts, add, affine, case, cross_entropy, dense, layer_norm, row

# --- forms of attention: functions of q, k, v [B, T, H, K] and further parameters -------------------------------------


def _softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | float = 0.0) -> jax.Array:
    """Causal; `bias` is added to the logits [B, H, T, S]."""
    t = q.shape[1]
    logits = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5 + bias
    logits = jnp.where(np.tril(np.ones((1, 1, t, t), bool)), logits, -1e9)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(logits, axis=-1), v)


def _linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal sums of φ(k) vᵀ, carried along by a scan over positions."""
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    b, _, h, d = q.shape

    def step(carry: Any, parts: Any) -> Any:
        state, total = carry
        q_t, k_t, v_t = parts
        state, total = state + jnp.einsum("bhk,bhv->bhkv", k_t, v_t), total + k_t
        return (state, total), jnp.einsum("bhk,bhkv->bhv", q_t, state) / jnp.sum(q_t * total, -1, keepdims=True)

    start = (jnp.zeros((b, h, d, d)), jnp.zeros((b, h, d)))
    _, out = jax.lax.scan(step, start, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v)))
    return jnp.moveaxis(out, 0, 1)


def _blockwise_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Blocks of keys pass by in a scan that carries the largest logit and the sums, as in flash attention."""
    b, t, h, d = q.shape
    block = max(1, t // 3) if t < 16 else 16
    blocks = [jnp.moveaxis(x.reshape(b, t // block, block, h, d), 1, 0) for x in (k, v)]
    positions = jnp.arange(t).reshape(t // block, block)

    def step(carry: Any, parts: Any) -> Any:
        top, total, out = carry
        k_s, v_s, where = parts
        logits = jnp.einsum("bthk,bshk->bhts", q, k_s) * d**-0.5
        visible = where[None, :] <= jnp.arange(t)[:, None]
        logits = jnp.where(visible[None, None], logits, -1e9)
        new_top = jnp.maximum(top, jax.lax.stop_gradient(jnp.max(logits, axis=-1)))
        shrink, p = jnp.exp(top - new_top), jnp.exp(logits - new_top[..., None])
        out = out * shrink[..., None] + jnp.einsum("bhts,bshk->bhtk", p, v_s)
        return (new_top, total * shrink + jnp.sum(p, axis=-1), out), None

    start = (jnp.full((b, h, t), -1e8), jnp.zeros((b, h, t)), jnp.zeros((b, h, t, d)))
    (_, total, out), _ = jax.lax.scan(step, start, (*blocks, positions))
    return jnp.moveaxis(out / total[..., None], 1, 2)


def _rotated(x_BxTxHxK: jax.Array) -> jax.Array:
    """Rotary positions."""
    t, half = x_BxTxHxK.shape[1], x_BxTxHxK.shape[3] // 2
    angle = np.arange(t)[:, None] * 100.0 ** -(np.arange(half)[None] / half)
    sin, cos = (jnp.asarray(f(angle), jnp.float32)[None, :, None] for f in (np.sin, np.cos))
    a, b = x_BxTxHxK[..., :half], x_BxTxHxK[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _one_layer(attend: Callable[..., jax.Array], extra: Callable[[Draw, int, int], Any] = lambda *_: {}) -> Any:
    """One layer of attention on real inputs; `extra` draws further parameters from heads and length."""

    def maker(draw: Draw) -> Parts:
        d, h, t = draw.size(4, 128), draw.size(2, 4), draw.size(6, 64)
        params = {"qkv": draw.weight(d, 3 * d), "out": draw.weight(d, d), **extra(draw, h, t)}

        def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
            b = x_BxTxD.shape[0]
            q, k, v = jnp.split((x_BxTxD @ params["qkv"]).reshape(b, t, 3 * h, d // h), 3, axis=2)
            y_BxTxD = attend(q, k, v, params).reshape(b, t, d) @ params["out"]
            return jnp.mean((y_BxTxD - x_BxTxD) ** 2)

        return loss, params, draw.normal(draw.size(4, 16), t, d)

    return maker


def _alibi(q: jax.Array, k: jax.Array, v: jax.Array, _: Any) -> jax.Array:
    h, t = q.shape[2], q.shape[1]
    distance = np.arange(t)[None, :] - np.arange(t)[:, None]
    slopes = 2.0 ** -np.arange(1, h + 1)
    return _softmax_attention(q, k, v, jnp.asarray(slopes[:, None, None] * distance, jnp.float32)[None])


def _relative_bias(q: jax.Array, k: jax.Array, v: jax.Array, p: Any) -> jax.Array:
    """A learned bias for each distance, in T5's way: a small table looked up for all pairs of positions."""
    t, buckets = q.shape[1], p["bias"].shape[0]
    distance = np.clip(np.arange(t)[:, None] - np.arange(t)[None, :], 0, buckets - 1)
    return _softmax_attention(q, k, v, jnp.moveaxis(p["bias"][distance], -1, 0)[None])


def _normed_attention(q: jax.Array, k: jax.Array, v: jax.Array, p: Any) -> jax.Array:
    """Queries and keys normalised, logits capped, and a learned sink that takes part in the softmax."""
    q, k = layer_norm(q, p["q_scale"]), layer_norm(k, p["k_scale"])
    logits = 5.0 * jnp.tanh(jnp.einsum("bthk,bshk->bhts", q, k) / 5.0)
    sink = jnp.broadcast_to(p["sink"][None, :, None, None], (*logits.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, sink], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def _norm_parameters(draw: Draw, h: int, t: int) -> Any:
    k = draw.size(4, 128) // h
    return {"q_scale": draw.near_one(k), "k_scale": draw.near_one(k), "sink": draw.normal(h)}


add("attention_softmax", _one_layer(lambda q, k, v, _: _softmax_attention(q, k, v)))
add("attention_linear", _one_layer(lambda q, k, v, _: _linear_attention(q, k, v)))
add("attention_blockwise", _one_layer(lambda q, k, v, _: _blockwise_attention(q, k, v)))
add("attention_rotary", _one_layer(lambda q, k, v, _: _softmax_attention(_rotated(q), _rotated(k), v)))
add("attention_alibi", _one_layer(_alibi))
add("attention_relative_bias", _one_layer(_relative_bias, lambda draw, h, t: {"bias": draw.normal(t // 2, h)}))
add("attention_normed_sink", _one_layer(_normed_attention, _norm_parameters))

# --- decoders ---------------------------------------------------------------------------------------------------------


def _decoder(
    *, scanned: bool = True, remat: Any = None, tied: bool = False, kv_heads: int | None = None, rotary: bool = False
) -> Callable[[Draw], Parts]:
    """A causal language model. `remat`: the policy of `jax.checkpoint`, or True."""

    def maker(draw: Draw) -> Parts:
        d, h, t, layers = draw.size(4, 128), draw.size(2, 4), draw.size(5, 32), 2
        f, vocabulary, kv = draw.size(6, 512), draw.size(11, 1024), kv_heads or draw.size(2, 4)
        k = d // h
        params = {
            "embedding": draw.normal(vocabulary, d, scale=d**-0.5),
            "layers": {
                "norm": draw.near_one(layers, d),
                "q": draw.weight(layers, d, h * k),
                "kv": draw.weight(layers, d, 2 * kv * k),
                "out": draw.weight(layers, h * k, d),
                "mlp_norm": draw.near_one(layers, d),
                "up": draw.weight(layers, d, f),
                "down": draw.weight(layers, f, d),
            },
            "norm": draw.near_one(d),
        }
        if not tied:
            params["logits"] = draw.weight(d, vocabulary)

        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            b, t, _ = x.shape
            y = layer_norm(x, p["norm"])
            q, pair = (y @ p["q"]).reshape(b, t, h, k), (y @ p["kv"]).reshape(b, t, 2, kv, k)
            if rotary:
                q, pair = _rotated(q), pair.at[:, :, 0].set(_rotated(pair[:, :, 0]))
            keys, values = (jnp.repeat(pair[:, :, i], h // kv, axis=2) for i in (0, 1))
            x = x + _softmax_attention(q, keys, values).reshape(b, t, h * k) @ p["out"]
            return x + jax.nn.gelu(layer_norm(x, p["mlp_norm"]) @ p["up"]) @ p["down"], None

        if remat is not None:
            layer = jax.checkpoint(layer, policy=None if remat is True else remat, prevent_cse=not scanned)

        def loss(params: Any, ids_BxT: jax.Array) -> jax.Array:
            x = params["embedding"][ids_BxT[:, :-1]]
            if scanned:
                x, _ = jax.lax.scan(layer, x, params["layers"])
            else:
                for i in range(layers):
                    x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
            out = params["embedding"].T if tied else params["logits"]
            return cross_entropy(layer_norm(x, params["norm"]) @ out, ids_BxT[:, 1:])

        return loss, params, draw.ids(vocabulary // 2, draw.size(4, 16), t + 1)

    return maker


_SAVE_PRODUCTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
add("decoder_scanned", _decoder())
add("decoder_scanned_remat", _decoder(remat=True))
add("decoder_scanned_policy", _decoder(remat=_SAVE_PRODUCTS, rotary=True))
add("decoder_unrolled", _decoder(scanned=False))
add("decoder_unrolled_remat", _decoder(scanned=False, remat=True))
add("decoder_tied", _decoder(tied=True))
add("decoder_grouped_rotary", _decoder(scanned=False, kv_heads=1, rotary=True, tied=True))


def _experts(draw: Draw) -> tuple[int, int, int, dict[str, jax.Array]]:
    d, f, experts = draw.size(4, 64), draw.size(5, 256), draw.size(3, 8)
    params = {
        "router": draw.weight(d, experts),
        "up": draw.weight(experts, d, f),
        "down": draw.weight(experts, f, d),
    }
    return d, f, experts, params


@case(method="map")
def experts_ragged(draw: Draw) -> Parts:
    """Each token goes to one expert; tokens are sorted by expert for `ragged_dot`, which JAX cannot batch."""
    d, _, experts, params = _experts(draw)

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        x_ND = x_BxTxD.reshape(-1, d)
        gates = jax.nn.softmax(x_ND @ params["router"], axis=-1)
        chosen = jnp.argmax(gates, axis=-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=experts).astype(jnp.int32)
        h = jax.nn.gelu(jax.lax.ragged_dot(x_ND[order], params["up"], sizes))
        y = jax.lax.ragged_dot(h, params["down"], sizes) * jnp.max(gates, axis=-1)[order][:, None]
        return jnp.mean((jnp.zeros_like(x_ND).at[order].set(y) - x_ND) ** 2)

    return loss, params, draw.normal(draw.size(4, 8), draw.size(5, 64), d)


@case()
def experts_one_hot(draw: Draw) -> Parts:
    """Each example's tokens go to two experts of limited capacity, by one-hot products; with a balancing loss."""
    d, _, experts, params = _experts(draw)
    t = draw.size(5, 64)
    capacity = -(-2 * t // experts)

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        gates_BxTxE = jax.nn.softmax(x_BxTxD @ params["router"], axis=-1)
        top, chosen = jax.lax.top_k(gates_BxTxE, 2)
        asked = jax.nn.one_hot(chosen, experts)  # [B, T, 2, E]
        place = jnp.cumsum(asked.reshape(x_BxTxD.shape[0], 2 * t, experts), axis=1).reshape(asked.shape) - 1
        slots = jax.nn.one_hot(jnp.where(asked > 0, place, -1).astype(jnp.int32), capacity) * asked[..., None]
        combine = jnp.einsum("btk,btkec->btec", top, slots)
        h = jnp.einsum("btec,btd->becd", (combine > 0).astype(jnp.float32), x_BxTxD)
        h = jax.nn.gelu(jnp.einsum("becd,edf->becf", h, params["up"]))
        y = jnp.einsum("btec,becd->btd", combine, jnp.einsum("becf,efd->becd", h, params["down"]))
        share = jnp.mean(asked[:, :, 0], axis=1)
        balance = jnp.sum(share * jnp.mean(gates_BxTxE, axis=1), axis=-1)
        return jnp.mean((y - x_BxTxD) ** 2) + 0.1 * jnp.mean(balance)

    return loss, params, draw.normal(draw.size(4, 16), t, d)


@case()
def encoder_decoder(draw: Draw) -> Parts:
    """One shared table, one layer of each, cross-attention, padding that takes no part, label smoothing."""
    d, h, s, t, vocabulary = draw.size(4, 128), draw.size(2, 4), draw.size(4, 64), draw.size(5, 64), draw.size(11, 1024)

    def attention(x: jax.Array, y: jax.Array, p: Any, mask: jax.Array) -> jax.Array:
        q = jnp.einsum("btd,dhk->bthk", x, p["q"])
        k, v = (jnp.einsum("bsd,dhk->bshk", y, p[name]) for name in ("k", "v"))
        logits = jnp.where(mask[:, None], jnp.einsum("bthk,bshk->bhts", q, k), -1e9)
        return jnp.einsum("bhts,bshk,hkd->btd", jax.nn.softmax(logits, axis=-1), v, p["o"])

    def attention_parameters() -> dict[str, jax.Array]:
        names = {name: draw.normal(d, h, d // h, scale=d**-0.5) for name in "qkv"}
        return names | {"o": draw.normal(h, d // h, d, scale=d**-0.5)}

    params = {
        "table": draw.normal(vocabulary, d, scale=d**-0.5),
        "encoder": attention_parameters(),
        "decoder": attention_parameters(),
        "cross": attention_parameters(),
        "mlp": draw.weight(d, d),
        "logits": draw.weight(d, vocabulary),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        source, target = batch["source"], batch["target"]
        x, real = params["table"][source], (source > 0)[:, None, :]
        x = x + attention(x, x, params["encoder"], jnp.broadcast_to(real, (source.shape[0], s, s)))
        y = params["table"][jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]]
        causal = jnp.broadcast_to(np.tril(np.ones((1, t, t), bool)), (target.shape[0], t, t))
        y = y + attention(y, y, params["decoder"], causal)
        y = y + attention(y, x, params["cross"], jnp.broadcast_to(real, (target.shape[0], t, s)))
        logp = jax.nn.log_softmax(jax.nn.relu(y @ params["mlp"]) @ params["logits"])
        chosen = jnp.take_along_axis(logp, target[..., None], axis=-1)[..., 0]
        each_BxT = -0.9 * chosen - 0.1 * jnp.mean(logp, axis=-1)
        weight = (target > 0).astype(jnp.float32)
        return jnp.mean(jnp.sum(each_BxT * weight, axis=1) / jnp.sum(weight, axis=1))

    n = draw.size(4, 16)
    source = draw.ids(vocabulary - 1, n, s) + 1
    return loss, params, {"source": source.at[1, 2:].set(0), "target": draw.ids(vocabulary - 1, n, t) + 1}


@case()
def vision_transformer(draw: Draw) -> Parts:
    """Patches by a strided convolution; class token and positions come out of one array by `split`."""
    d, side, patch, classes = draw.size(4, 128), draw.size(4, 32), draw.size(2, 4), draw.size(3, 10)
    count = (side // patch) ** 2
    params = {
        "patches": draw.normal(patch, patch, 3, d, scale=0.2),
        "tokens": draw.normal(count + 2, d, scale=0.1),
        "norm": draw.near_one(d),
        "qkv": draw.weight(d, 3 * d),
        "mlp": dense(draw, d, d),
        "head": dense(draw, d, classes),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        names = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            batch["x"], params["patches"], (patch, patch), "VALID", dimension_numbers=names
        )
        b = x.shape[0]
        class_token, positions = jnp.split(params["tokens"], [1])
        x = jnp.concatenate([jnp.broadcast_to(class_token[None], (b, 1, d)), x.reshape(b, count, d)], axis=1)
        x = x + positions[None]
        q, k, v = jnp.split(layer_norm(x, params["norm"]) @ params["qkv"], 3, axis=-1)
        x = x + jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2) * d**-0.5, axis=-1) @ v
        x = x + jax.nn.gelu(affine(x, params["mlp"]))
        return cross_entropy(affine(x[:, 0], params["head"]), batch["label"])

    n = draw.size(4, 16)
    return loss, params, {"x": draw.normal(n, side, side, 3), "label": draw.ids(classes, n)}


@case()
def latent_queries(draw: Draw) -> Parts:
    """Perceiver: learned queries read the example; weights are shared over two rounds."""
    d, t, m = draw.size(4, 128), draw.size(5, 64), draw.size(3, 16)
    params = {"latents": draw.normal(m, d), "kv": draw.weight(d, 2 * d), "mlp": draw.weight(d, d), "b": draw.normal(d)}

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        k, v = jnp.split(x_BxTxD @ params["kv"], 2, axis=-1)
        z = jnp.broadcast_to(params["latents"][None], (x_BxTxD.shape[0], m, d))
        for _ in range(2):
            z = z + jax.nn.softmax(jnp.einsum("bmd,btd->bmt", z, k) * d**-0.5, axis=-1) @ v
            z = z + jnp.tanh(z @ params["mlp"] + row(params["b"], z))
        return jnp.mean(z**2)

    return loss, params, draw.normal(draw.size(4, 16), t, d)
