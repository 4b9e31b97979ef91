"""Models that carry a state along: recurrent cells, linear recurrences, iterations and dynamic programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex_t5x.zoo.case import Draw, Parts, add, affine, case, dense, mean_over_examples, row


def _cell(step: Callable[[Any, jax.Array, jax.Array], Any], gates: int, states: int = 1) -> Any:
    """A recurrent cell in a scan over positions; `step(gates of [x, h], state)` gives the next state."""

    def maker(draw: Draw) -> Parts:
        d, t = draw.size(4, 128), draw.size(5, 32)
        params = {"x": dense(draw, d, gates * d), "h": draw.weight(d, gates * d), "out": draw.weight(d, 1)}

        def loss(params: Any, batch: Any) -> jax.Array:
            b = batch["x"].shape[0]
            x_TxBxG = jnp.moveaxis(affine(batch["x"], params["x"]), 1, 0)

            def body(state: Any, x_BxG: jax.Array) -> Any:
                state = step(state, x_BxG, state[0] @ params["h"])
                return state, state[0]

            _, h_TxBxD = jax.lax.scan(body, (jnp.zeros((b, d)),) * states, x_TxBxG)
            return jnp.mean(((h_TxBxD @ params["out"])[..., 0].T - batch["y"]) ** 2)

        n = draw.size(4, 16)
        return loss, params, {"x": draw.normal(n, t, d), "y": draw.normal(n, t)}

    return maker


def _lstm(state: Any, x: jax.Array, h: jax.Array) -> Any:
    i, f, g, o = jnp.split(x + h, 4, axis=-1)
    c = jax.nn.sigmoid(f + 1) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(state: Any, x: jax.Array, h: jax.Array) -> Any:
    (xr, xz, xn), (hr, hz, hn) = jnp.split(x, 3, axis=-1), jnp.split(h, 3, axis=-1)
    z = jax.nn.sigmoid(xz + hz)
    return ((1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * state[0],)


add("rnn", _cell(lambda state, x, h: (jnp.tanh(x + h),), 1))
add("lstm", _cell(_lstm, 4, states=2))
add("gru", _cell(_gru, 3))


@case()
def rnn_fori_loop(draw: Draw) -> Parts:
    """A loop with a fixed number of steps that writes its outputs into an array."""
    d, t = draw.size(4, 64), draw.size(4, 16)

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        def body(i: Any, carry: Any) -> Any:
            h, out = carry
            h = jnp.tanh(
                jax.lax.dynamic_index_in_dim(x_BxTxD, i, axis=1, keepdims=False) @ params["x"] + h @ params["h"]
            )
            return h, jax.lax.dynamic_update_index_in_dim(out, h, i, axis=1)

        _, out = jax.lax.fori_loop(0, t, body, (jnp.zeros_like(x_BxTxD[:, 0]), jnp.zeros_like(x_BxTxD)))
        return jnp.mean((out - x_BxTxD) ** 2)

    return loss, {"x": draw.weight(d, d), "h": draw.weight(d, d)}, draw.normal(draw.size(4, 16), t, d)


def _linear_recurrence(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """h_t = a_t h_{t−1} + b_t, by an associative scan."""

    def join(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return jax.lax.associative_scan(join, (a, b), axis=axis)[1]


@case()
def linear_recurrent_unit(draw: Draw) -> Parts:
    """LRU: complex eigenvalues from real parameters, complex states inside."""
    d, s, t = draw.size(4, 64), draw.size(3, 64), draw.size(6, 64)
    params = {
        "log_decay": draw.normal(s, scale=0.3),
        "phase": draw.normal(s),
        "in_re": draw.weight(d, s),
        "in_im": draw.weight(d, s),
        "out_re": draw.weight(s, d),
        "out_im": draw.weight(s, d),
        "skip": draw.normal(d),
    }

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        eigenvalue_S = jnp.exp(jax.lax.complex(-jnp.exp(params["log_decay"]), params["phase"]))
        b_BxTxS = jax.lax.complex(x_BxTxD @ params["in_re"], x_BxTxD @ params["in_im"])
        h_BxTxS = _linear_recurrence(jnp.broadcast_to(row(eigenvalue_S, b_BxTxS), b_BxTxS.shape), b_BxTxS, axis=1)
        y = jnp.real(h_BxTxS) @ params["out_re"] - jnp.imag(h_BxTxS) @ params["out_im"]
        return jnp.mean((jax.nn.gelu(y) + row(params["skip"], y) * x_BxTxD) ** 2)

    return loss, params, draw.normal(draw.size(4, 16), t, d)


@case()
def selective_scan(draw: Draw) -> Parts:
    """Mamba: a gated branch, a short depthwise convolution, and a recurrence whose step depends on the input."""
    d, s, t = draw.size(3, 64), draw.size(2, 8), draw.size(5, 64)
    params = {
        "in": draw.weight(d, 2 * d),
        "conv": draw.normal(3, 1, d, scale=0.5),
        "bc": draw.weight(d, 2 * s),
        "delta": dense(draw, d, d),
        "log_a": draw.normal(d, s, scale=0.3),
        "out": draw.weight(d, d),
    }

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        u, gate = jnp.split(x_BxTxD @ params["in"], 2, axis=-1)
        names = ("NWC", "WIO", "NWC")
        u = jax.lax.conv_general_dilated(
            u, params["conv"], (1,), ((2, 0),), dimension_numbers=names, feature_group_count=d
        )
        u = jax.nn.silu(u)
        b_BxTxS, c_BxTxS = jnp.split(u @ params["bc"], 2, axis=-1)
        delta_BxTxD = jax.nn.softplus(affine(u, params["delta"]))
        decay = jnp.exp(-delta_BxTxD[..., None] * jnp.exp(params["log_a"])[None, None])
        h = _linear_recurrence(decay, (delta_BxTxD * u)[..., None] * b_BxTxS[:, :, None, :], axis=1)
        y = jnp.einsum("btds,bts->btd", h, c_BxTxS) * jax.nn.silu(gate)
        return jnp.mean((y @ params["out"] - x_BxTxD) ** 2)

    return loss, params, draw.normal(draw.size(4, 8), t, d)


@case()
def rwkv_mixing(draw: Draw) -> Parts:
    """RWKV: shifted tokens, and exponentially decayed sums of values, in their cumulative form by products and sums."""
    d, t = draw.size(4, 128), draw.size(5, 64)
    params = {
        "mix": draw.normal(d, scale=0.3),
        "k": draw.weight(d, d),
        "v": draw.weight(d, d),
        "r": draw.weight(d, d),
        "decay": draw.normal(d, scale=0.3),
        "bonus": draw.normal(d, scale=0.3),
    }

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        before = jnp.pad(x_BxTxD, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        mix = row(jax.nn.sigmoid(params["mix"]), x_BxTxD)
        x = mix * x_BxTxD + (1 - mix) * before
        key, value, gate = jnp.exp(jnp.tanh(x @ params["k"])), x @ params["v"], jax.nn.sigmoid(x @ params["r"])
        decay = jnp.broadcast_to(row(jnp.exp(-0.1 * jnp.exp(params["decay"])), x), x.shape)
        top, bottom = (_linear_recurrence(decay, y, axis=1) for y in (key * value, key))
        bonus = key * row(jnp.exp(params["bonus"]), key)
        return jnp.mean((gate * (top + bonus * value) / (bottom + bonus) - x_BxTxD) ** 2)

    return loss, params, draw.normal(draw.size(4, 16), t, d)


@case()
def cumulative_products(draw: Draw) -> Parts:
    """Stick breaking and volume rendering: cumprod, cumsum, cummax and cumlogsumexp along a ray."""
    d, t = draw.size(3, 64), draw.size(6, 64)
    params = {"density": draw.weight(d, 1), "colour": draw.weight(d, d), "score": draw.weight(d, 1)}

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        alpha_BxT = jax.nn.sigmoid(x_BxTxD @ params["density"])[..., 0]
        passed_BxT = jnp.cumprod(1.0 - alpha_BxT + 1e-6, axis=1)
        weights_BxT = alpha_BxT * jnp.pad(passed_BxT, ((0, 0), (1, 0)), constant_values=1.0)[:, :-1]
        pixel_BxD = jnp.einsum("bt,btd->bd", weights_BxT, jax.nn.sigmoid(x_BxTxD @ params["colour"]))
        score_BxT = (x_BxTxD @ params["score"])[..., 0]
        running = jax.lax.cumlogsumexp(score_BxT, axis=1) - jax.lax.cummax(score_BxT, axis=1)
        return jnp.mean(pixel_BxD**2) + jnp.mean(jnp.cumsum(weights_BxT, axis=1) * running)

    return loss, params, draw.normal(draw.size(4, 16), t, d)


@case()
def neural_ode(draw: Draw) -> Parts:
    """Four steps of the classical Runge–Kutta method."""
    d, f = draw.size(3, 128), draw.size(5, 256)
    params = {"first": dense(draw, d, f), "second": dense(draw, f, d)}

    def loss(params: Any, batch: Any) -> jax.Array:
        def slope(x: jax.Array) -> jax.Array:
            return affine(jnp.tanh(affine(x, params["first"])), params["second"])

        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            h = 0.25
            k1 = slope(x)
            k2 = slope(x + h / 2 * k1)
            k3 = slope(x + h / 2 * k2)
            return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(x + h * k3)), None

        x, _ = jax.lax.scan(step, batch["x"], None, length=4)
        return jnp.mean((x - batch["y"]) ** 2)

    n = draw.size(4, 64)
    return loss, params, {"x": draw.normal(n, d), "y": draw.normal(n, d)}


@case()
def deep_equilibrium(draw: Draw) -> Parts:
    """A fixed point by a fixed number of iterations, its gradient by the implicit function theorem (a custom rule)."""
    d = draw.size(4, 64)
    params = {"w": 0.4 * draw.weight(d, d), "u": draw.weight(d, d), "out": draw.weight(d, 1)}

    def update(p: Any, x: jax.Array, z: jax.Array) -> jax.Array:
        return jnp.tanh(z @ p["w"] + x @ p["u"])

    def iterate(step: Callable[[jax.Array], jax.Array], start: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 12, lambda _, z: step(z), start)

    @jax.custom_vjp
    def solve(p: Any, x: jax.Array) -> jax.Array:
        return iterate(lambda z: update(p, x, z), jnp.zeros_like(x))

    def forward(p: Any, x: jax.Array) -> Any:
        z = solve(p, x)
        return z, (p, x, z)

    def backward(saved: Any, cotangent: jax.Array) -> Any:
        p, x, z = saved
        through_z = jax.vjp(lambda z: update(p, x, z), z)[1]
        u = iterate(lambda u: cotangent + through_z(u)[0], cotangent)
        return jax.vjp(lambda p, x: update(p, x, z), p, x)[1](u)

    solve.defvjp(forward, backward)

    def loss(params: Any, batch: Any) -> jax.Array:
        z = solve({"w": params["w"], "u": params["u"]}, batch["x"])
        return jnp.mean(((z @ params["out"])[:, 0] - batch["y"]) ** 2)

    n = draw.size(4, 32)
    return loss, params, {"x": draw.normal(n, d), "y": draw.normal(n)}


@case()
def conditional_random_field(draw: Draw) -> Parts:
    """The forward algorithm in a scan, transitions and scores of the true path."""
    d, k, t = draw.size(3, 64), draw.size(3, 16), draw.size(5, 32)
    params = {"emit": draw.weight(d, k), "transition": draw.normal(k, k, scale=0.3), "start": draw.normal(k)}

    def loss(params: Any, batch: Any) -> jax.Array:
        emit_BxTxK, tags = batch["x"] @ params["emit"], batch["tags"]

        def step(alpha_BxK: jax.Array, emit_BxK: jax.Array) -> tuple[jax.Array, None]:
            inner = alpha_BxK[:, :, None] + params["transition"][None]
            return jax.nn.logsumexp(inner, axis=1) + emit_BxK, None

        first = emit_BxTxK[:, 0] + row(params["start"], emit_BxTxK[:, 0])
        alpha_BxK, _ = jax.lax.scan(step, first, jnp.moveaxis(emit_BxTxK[:, 1:], 1, 0))
        path_B = jnp.sum(jnp.take_along_axis(emit_BxTxK, tags[..., None], axis=-1)[..., 0], axis=1)
        path_B = path_B + params["start"][tags[:, 0]]
        path_B = path_B + jnp.sum(params["transition"][tags[:, :-1], tags[:, 1:]], axis=1)
        return jnp.mean(jax.nn.logsumexp(alpha_BxK, axis=-1) - path_B)

    n = draw.size(4, 16)
    return loss, params, {"x": draw.normal(n, t, d), "tags": draw.ids(k, n, t)}


@case()
def temporal_classification(draw: Draw) -> Parts:
    """CTC: labels with blanks between them, the forward algorithm in log space, written for one example and mapped."""
    d, k, t, length = draw.size(3, 64), draw.size(4, 32), draw.size(6, 32), draw.size(2, 8)
    params = {"first": dense(draw, d, d), "second": draw.weight(d, k)}
    blank = jnp.arange(2 * length + 1) % 2 == 0

    def one(params: Any, example: Any) -> jax.Array:
        logp_TxK = jax.nn.log_softmax(jnp.tanh(affine(example["x"], params["first"])) @ params["second"])
        labels = jnp.zeros(2 * length + 1, jnp.int32).at[1::2].set(example["labels"])
        may_skip = ~blank & (labels != jnp.roll(labels, 2)) & (jnp.arange(2 * length + 1) >= 2)
        emitted_TxL = logp_TxK[:, labels]

        def step(alpha: jax.Array, emitted: jax.Array) -> tuple[jax.Array, None]:
            by_one = jnp.pad(alpha, (1, 0), constant_values=-1e4)[:-1]
            by_two = jnp.where(may_skip, jnp.pad(alpha, (2, 0), constant_values=-1e4)[:-2], -1e4)
            return jnp.logaddexp(jnp.logaddexp(alpha, by_one), by_two) + emitted, None

        start = jnp.where(jnp.arange(2 * length + 1) < 2, emitted_TxL[0], -1e4)
        alpha, _ = jax.lax.scan(step, start, emitted_TxL[1:])
        return -jnp.logaddexp(alpha[-1], alpha[-2])

    n = draw.size(4, 16)
    batch = {"x": draw.normal(n, t, d), "labels": draw.ids(k - 1, n, length) + 1}
    return mean_over_examples(one), params, batch


@case()
def long_convolution(draw: Draw) -> Parts:
    """S4 and Hyena: a filter as long as the sequence, made of decaying waves, applied by FFT."""
    d, t, waves = draw.size(3, 64), draw.size(6, 128), draw.size(2, 8)
    params = {
        "height": draw.normal(waves, d),
        "decay": draw.normal(waves, d, scale=0.3),
        "frequency": draw.normal(waves, d),
        "out": draw.weight(d, d),
    }
    time = np.arange(t, dtype=np.float32)[None, :, None]

    def loss(params: Any, x_BxTxD: jax.Array) -> jax.Array:
        wave = jnp.exp(-jnp.exp(params["decay"])[:, None] * time) * jnp.cos(params["frequency"][:, None] * time)
        filter_TxD = jnp.sum(params["height"][:, None] * wave, axis=0)
        product = jnp.fft.rfft(x_BxTxD, 2 * t, axis=1) * jnp.fft.rfft(filter_TxD, 2 * t, axis=0)[None]
        y = jnp.fft.irfft(product, 2 * t, axis=1)[:, :t]
        return jnp.mean((jax.nn.gelu(y) @ params["out"] - x_BxTxD) ** 2)

    return loss, params, draw.normal(draw.size(4, 16), t, d)
