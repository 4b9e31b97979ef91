"""x f(w): products with a function of a weight, so that the gradient passes through f on its way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x.zoo.case import Draw, Parts, add, case, row


def _through(
    function: Callable[[Any], jax.Array], parameters: Callable[[Draw, int], Any] | None = None
) -> Callable[[Draw], Parts]:
    """mean (tanh(x f(w)) − y)², x with a sequence axis; `parameters` draws what f takes, a square weight by default."""

    def maker(draw: Draw) -> Parts:
        d = draw.size(6, 256)
        params = parameters(draw, d) if parameters else {"w": draw.weight(d, d)}

        def loss(params: Any, batch: Any) -> jax.Array:
            y_BxTxE = jnp.tanh(batch["x"] @ function(params))
            return jnp.mean((y_BxTxE - batch["y"][:, :, None]) ** 2)

        n, t = draw.size(4, 32), draw.size(3, 16)
        return loss, params, {"x": draw.normal(n, t, d), "y": draw.normal(n, t)}

    return maker


def _well_conditioned(draw: Draw, d: int) -> dict[str, jax.Array]:
    return {"w": jnp.eye(d) + 0.3 * draw.weight(d, d)}


def _spectral(p: Any) -> jax.Array:
    """Three steps of the power iteration, whose vectors are held constant."""
    w = p["w"]
    u = jnp.ones(w.shape[0])
    for _ in range(3):
        v = u @ w
        v = v / jnp.linalg.norm(v)
        u = w @ v
        u = u / jnp.linalg.norm(u)
    u, v = jax.lax.stop_gradient((u, v))
    return w / (u @ w @ v)


def _standardised(p: Any) -> jax.Array:
    centred = p["w"] - jnp.mean(p["w"], axis=0, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=0, keepdims=True) + 1e-4) * row(p["gain"], centred)


def _normalised(p: Any) -> jax.Array:
    return p["v"] * row(p["g"] / jnp.linalg.norm(p["v"], axis=0), p["v"])


def _cholesky(p: Any) -> jax.Array:
    w = p["w"]
    return jnp.linalg.cholesky(w @ w.T + jnp.eye(w.shape[0]))


def _cayley(p: Any) -> jax.Array:
    skew, one = p["w"] - p["w"].T, jnp.eye(p["w"].shape[0])
    return jnp.linalg.solve(one + skew, one - skew)


def _circulant(p: Any) -> jax.Array:
    d = p["c"].shape[0]
    return p["c"][(np.arange(d)[:, None] - np.arange(d)[None]) % d]


def _straight_through(p: Any) -> jax.Array:
    scale = jnp.max(jnp.abs(p["w"])) / 7
    rounded = jnp.round(p["w"] / scale) * scale
    return p["w"] + jax.lax.stop_gradient(rounded - p["w"])


def _pruned(p: Any) -> jax.Array:
    """The smaller half of the entries does not take part."""
    size = jax.lax.stop_gradient(jnp.abs(p["w"]))
    return jnp.where(size > jnp.median(size), p["w"], 0.0)


def _hypernetwork(p: Any) -> jax.Array:
    d = p["codes"].shape[0]
    return jnp.tanh(p["codes"] @ p["inner"]).reshape(d, -1) @ p["outer"]


def _taylor_rotation(p: Any) -> jax.Array:
    return jax.scipy.linalg.expm(0.3 * (p["w"] - p["w"].T), max_squarings=3)


def _householder(p: Any) -> jax.Array:
    """A product of reflections, by a scan."""
    d = p["v"].shape[1]

    def reflect(q: jax.Array, v_D: jax.Array) -> tuple[jax.Array, None]:
        return q - (2.0 / (v_D @ v_D)) * jnp.outer(q @ v_D, v_D), None

    return jax.lax.scan(reflect, jnp.eye(d), p["v"])[0]


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "tanh": (lambda p: jnp.tanh(p["w"]),),
    "softmax": (lambda p: jax.nn.softmax(p["w"], axis=0),),
    "symmetric": (lambda p: p["w"] + p["w"].T,),
    "permuted": (lambda p: p["w"][np.random.default_rng(1).permutation(p["w"].shape[0])],),
    "over_std": (lambda p: p["w"] / jnp.std(p["w"]),),
    "merged_lora": (
        lambda p: p["w"] + 0.5 * p["a"] @ p["b"],
        lambda draw, d: {"w": draw.weight(d, d), "a": draw.weight(d, 2), "b": draw.weight(2, d)},
    ),
    "spectral_norm": (_spectral,),
    "inverse": (lambda p: jnp.linalg.inv(p["w"]), _well_conditioned),
    "cholesky": (_cholesky,),
    "standardised": (_standardised, lambda draw, d: {"w": draw.weight(d, d), "gain": draw.near_one(d)}),
    "weight_norm": (_normalised, lambda draw, d: {"v": draw.weight(d, d), "g": draw.near_one(d)}),
    "orthogonal_qr": (lambda p: jnp.linalg.qr(p["w"])[0], _well_conditioned),
    "orthogonal_expm": (_taylor_rotation,),
    "orthogonal_cayley": (_cayley,),
    "householder": (_householder, lambda draw, d: {"v": draw.normal(3, d)}),
    "low_rank": (lambda p: p["u"] @ p["v"], lambda draw, d: {"u": draw.weight(d, 2), "v": draw.weight(2, d)}),
    "kronecker": (
        lambda p: jnp.kron(p["a"], p["b"]),
        lambda draw, d: {"a": draw.weight(2, 2), "b": draw.weight(d // 2, d // 2)},
    ),
    "circulant": (_circulant, lambda draw, d: {"c": draw.normal(d, scale=d**-0.5)}),
    "straight_through": (_straight_through,),
    "pruned": (_pruned,),
    "hypernetwork": (
        _hypernetwork,
        lambda draw, d: {"codes": draw.normal(d, 3), "inner": draw.weight(3, 8), "outer": draw.weight(8, d)},
    ),
    "repeated": (lambda p: jnp.repeat(p["w"][:, :2], p["w"].shape[1] // 2, 1),),
    "block_diagonal": (
        lambda p: jax.scipy.linalg.block_diag(*p["blocks"]),
        lambda draw, d: {"blocks": draw.weight(2, d // 2, d // 2)},
    ),
    "triangular": (lambda p: jnp.tril(p["w"]),),
    "positive": (lambda p: jax.nn.softplus(p["w"]) / p["w"].shape[0],),
}
for _name, _parts in _FUNCTIONS.items():
    add(f"weight_{_name}", _through(*_parts))


@case()
def weight_twice(draw: Draw) -> Parts:
    """The function of the weight is used twice, once transposed."""
    d, t = draw.size(6, 256), draw.size(3, 32)

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        made = jnp.tanh(params["w"])
        return jnp.mean((jax.nn.gelu(x_BxTxD @ made) @ made.T - x_BxTxD) ** 2)

    return loss, {"w": draw.weight(d, d)}, draw.normal(draw.size(4, 16), t, d)


@case()
def tied_transpose(draw: Draw) -> Parts:
    """An autoencoder with w and w.T, no sequence axis."""
    d, f = draw.size(6, 512), draw.size(4, 256)
    params = {"w": draw.weight(d, f), "b": draw.normal(f, scale=0.1), "c": draw.normal(d, scale=0.1)}

    def loss(params: Any, x_BxD: jax.Array) -> jax.Array:
        h_BxF = x_BxD @ params["w"]
        h_BxF = jax.nn.sigmoid(h_BxF + row(params["b"], h_BxF))
        y_BxD = h_BxF @ params["w"].T
        return jnp.mean((y_BxD + row(params["c"], y_BxD) - x_BxD) ** 2)

    return loss, params, draw.normal(draw.size(4, 64), d)


@case()
def shared_layers(draw: Draw) -> Parts:
    """One layer applied again and again by a loop in Python (ALBERT), and its scaled copy once more."""
    d, t = draw.size(5, 256), draw.size(3, 32)

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        h = x_BxTxD
        for _ in range(3):
            h = h + jnp.tanh(h @ params["w"])
        return jnp.mean((h @ (params["scale"] * params["w"])) ** 2)

    params = {"w": draw.weight(d, d), "scale": jnp.float32(0.7)}
    return loss, params, draw.normal(draw.size(4, 16), t, d)


@case()
def flattened_parameters(draw: Draw) -> Parts:
    """One long vector from which every weight is cut."""
    d, f, t = draw.size(4, 128), draw.size(6, 256), draw.size(3, 32)

    def loss(vector: jax.Array, x_BxTxD: jax.Array) -> jax.Array:
        up, down = vector[: d * f].reshape(d, f), vector[d * f :].reshape(f, d)
        return jnp.mean((jax.nn.relu(x_BxTxD @ up) @ down - x_BxTxD) ** 2)

    return loss, draw.normal(2 * d * f, scale=d**-0.5), draw.normal(draw.size(4, 16), t, d)


@case()
def stacked_split(draw: Draw) -> Parts:
    """Layers are cut from stacked parameters one by one, two of them joined into a wide product."""
    d, t = draw.size(4, 256), draw.size(3, 32)

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        first, second, third = (w[0] for w in jnp.split(params["w"], 3))
        wide = x_BxTxD @ jnp.concatenate([first, second], axis=1)
        return jnp.mean((jax.nn.silu(wide[..., :d]) * wide[..., d:] @ third) ** 2)

    return loss, {"w": draw.weight(3, d, d)}, draw.normal(draw.size(4, 16), t, d)


@case()
def layers_merged_lora(draw: Draw) -> Parts:
    """LoRA merged for all layers at once, before the scan over them; the embedding in front of it is trained, too."""
    d, layers, rank, vocab = draw.size(6, 256), draw.size(2, 4), draw.size(2, 8), draw.size(7, 512)

    def loss(params: Any, batch: Any) -> jax.Array:
        merged = params["w"] + jnp.einsum("ldr,lrf->ldf", params["a"], params["b"])
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), params["embedding"][batch["ids"]], merged)
        return jnp.mean((h - batch["y"][..., None]) ** 2)

    params = {
        "embedding": draw.normal(vocab, d),
        "w": draw.weight(layers, d, d),
        "a": draw.weight(layers, d, rank),
        "b": draw.weight(layers, rank, d),
    }
    n, t = draw.size(4, 16), draw.size(3, 32)
    return loss, params, {"ids": draw.ids(vocab, n, t), "y": draw.normal(n, t)}
