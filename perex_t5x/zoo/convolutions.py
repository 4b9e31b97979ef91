"""Convolutions of every sort, and a residual network with group normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from perex_t5x.zoo.case import Draw, Parts, add, affine, case, cross_entropy, dense, row


def _convolution(**how: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Channels last, in one or two dimensions."""

    def apply(x: jax.Array, kernel: jax.Array) -> jax.Array:
        names = ("NWC", "WIO", "NWC") if x.ndim == 3 else ("NHWC", "HWIO", "NHWC")
        options = {"window_strides": (1,) * (x.ndim - 2), "padding": "SAME"} | how
        return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=names, **options)

    return apply


def _two_layers(
    apply: Callable[[jax.Array, jax.Array], jax.Array], spatial: int, groups: int = 1, depthwise: bool = False
) -> Callable[[Draw], Parts]:
    """Two convolutions with biases, then the mean over places and a dense layer."""

    def maker(draw: Draw) -> Parts:
        channels, classes = draw.size(4, 32), draw.size(3, 10)
        side = draw.size(6, 128) if spatial == 1 else draw.size(5, 16)
        kernel = (3,) * spatial + (1 if depthwise else channels // groups, channels)
        params = {
            "kernels": [draw.normal(*kernel, scale=(3**spatial * kernel[-2]) ** -0.5) for _ in range(2)],
            "biases": [draw.normal(channels, scale=0.1) for _ in range(2)],
            "out": dense(draw, channels, classes),
        }

        def loss(params: Any, batch: Any) -> jax.Array:
            x = batch["x"]
            for kernel, bias in zip(params["kernels"], params["biases"], strict=True):
                x = apply(x, kernel)
                x = jax.nn.gelu(x + row(bias, x))
            return cross_entropy(affine(jnp.mean(x, axis=tuple(range(1, 1 + spatial))), params["out"]), batch["label"])

        n = draw.size(4, 16)
        return loss, params, {"x": draw.normal(n, *(side,) * spatial, channels), "label": draw.ids(classes, n)}

    return maker


add("conv_1d", _two_layers(_convolution(), 1))
add("conv_2d", _two_layers(_convolution(), 2))
add("conv_strided", _two_layers(_convolution(window_strides=(2, 2)), 2))
add("conv_dilated_causal", _two_layers(_convolution(rhs_dilation=(2,), padding=((4, 0),)), 1))
add(
    "conv_depthwise",
    lambda draw: _two_layers(_convolution(feature_group_count=draw.size(4, 32)), 2, depthwise=True)(draw),
)
add("conv_grouped", _two_layers(_convolution(feature_group_count=2), 2, groups=2))


def _transposed(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


add("conv_transposed", _two_layers(_transposed, 2))


@case()
def resnet_block(draw: Draw) -> Parts:
    """A stem, two residual blocks with group normalisation, one of them strided with a projection."""
    c, side, classes = draw.size(4, 32), draw.size(6, 16), draw.size(3, 10)

    def kernel(size: int, inputs: int, outputs: int) -> jax.Array:
        return draw.normal(size, size, inputs, outputs, scale=(size * size * inputs) ** -0.5)

    def block(inputs: int, outputs: int) -> dict[str, Any]:
        p = {"first": kernel(3, inputs, outputs), "second": kernel(3, outputs, outputs)}
        p |= {"scales": [draw.near_one(outputs) for _ in range(2)]}
        return p if inputs == outputs else p | {"project": kernel(1, inputs, outputs)}

    params = {"stem": kernel(3, 3, c), "same": block(c, c), "down": block(c, 2 * c), "out": dense(draw, 2 * c, classes)}

    def group_norm(x: jax.Array, scale_C: jax.Array) -> jax.Array:
        g = x.reshape(*x.shape[:3], 2, x.shape[3] // 2)
        g = g - jnp.mean(g, axis=(1, 2, 4), keepdims=True)
        g = g * jax.lax.rsqrt(jnp.mean(g**2, axis=(1, 2, 4), keepdims=True) + 1e-5)
        return g.reshape(x.shape) * row(scale_C, x)

    def residual(x: jax.Array, p: Any, stride: int) -> jax.Array:
        strided = _convolution(window_strides=(stride, stride))
        y = jax.nn.relu(group_norm(strided(x, p["first"]), p["scales"][0]))
        y = group_norm(_convolution()(y, p["second"]), p["scales"][1])
        return jax.nn.relu(y + (strided(x, p["project"]) if "project" in p else x))

    def loss(params: Any, batch: Any) -> jax.Array:
        x = _convolution()(batch["x"], params["stem"])
        x = residual(residual(x, params["same"], 1), params["down"], 2)
        return cross_entropy(affine(jnp.mean(x, axis=(1, 2)), params["out"]), batch["label"])

    n = draw.size(4, 16)
    return loss, params, {"x": draw.normal(n, side, side, 3), "label": draw.ids(classes, n)}


@case()
def conv_pooled(draw: Draw) -> Parts:
    """Maximum and mean pooling between convolutions, as in LeNet."""
    c, side, classes = draw.size(3, 16), draw.size(8, 28), draw.size(3, 10)
    params = {
        "first": draw.normal(3, 3, 1, c, scale=0.3),
        "second": draw.normal(3, 3, c, 2 * c, scale=(9 * c) ** -0.5),
        "out": dense(draw, 2 * c * (side // 4) ** 2, classes),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        x = jax.nn.relu(_convolution()(batch["x"], params["first"]))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(_convolution()(x, params["second"]))
        x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        return cross_entropy(affine(x.reshape(x.shape[0], -1), params["out"]), batch["label"])

    n = draw.size(4, 16)
    return loss, params, {"x": draw.normal(n, side, side, 1), "label": draw.ids(classes, n)}
